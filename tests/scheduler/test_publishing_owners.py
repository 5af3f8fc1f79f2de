"""Whose versions an engine holds: runs that end and come back, engines that change hands, pools that were empty."""

from __future__ import annotations

from rolloutd.scheduler.actions import NoticeKind
from rolloutd.scheduler.events import AttachConsumer, DetachConsumer, EndRun, JoinEngine, RemoveEngine, WeightsPushed
from rolloutd.scheduler.events import PublishPolicy as Publish
from rolloutd.scheduler.run import MOST_POOLS
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import Code, Verb
from tests.scheduler.kit import CONSUMER, RUN, Bench, engine, spec, specs


def test_a_run_that_has_ended_publishes_nothing() -> None:
    bench = Bench(engine())
    bench.submit(spec("r"))
    bench.do(EndRun(RUN))
    error = bench.refused(Publish(RUN, PolicyUpdate(1, "/weights/1")))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_ENDED")


def test_an_engine_that_an_ended_run_still_updates_is_not_taken_from_it() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.do(EndRun(RUN))
    assert bench.refused(Publish("other", PolicyUpdate(1, "/other/1"))).reason == "ENGINES_OWNED"
    bench.finish_updates()
    bench.publish(1, run="other", path="/other/1")
    assert bench.controls["e0"].verb is Verb.PAUSE
    bench.finish_updates()
    assert bench.engine("e0").owner == "other"


def test_the_same_number_of_another_run_is_another_version() -> None:
    bench = Bench(engine())
    bench.published(1)
    bench.do(EndRun(RUN))
    bench.publish(1, run="other", path="/other/1")
    assert bench.out() is Verb.PAUSE, "what it holds is the first run's"
    assert (bench.engine("e0").owner, bench.engine("e0").version) == ("other", 0)
    bench.finish_updates()
    assert bench.engine("e0").version == 1


def test_engines_of_a_forgotten_run_serve_nobody_before_somebody_publishes() -> None:
    bench = Bench(engine())
    bench.published(1)
    bench.do(EndRun(RUN))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.pass_time(2.0)
    assert RUN not in bench.core._world.runs
    bench.do(AttachConsumer(RUN, CONSUMER))
    bench.submit(spec("again"), spec("others"))
    assert not bench.tick(), "it holds another life's version"
    assert "which has ended" in bench.engine("e0").held_because
    bench.published(1)
    assert bench.engine("e0").version == 1 and len(bench.tick()) == 2


def test_an_engine_that_comes_to_an_empty_pool_gets_the_version_that_was_published_there() -> None:
    bench = Bench(engine())
    bench.published(1)
    bench.do(RemoveEngine("e0"))
    bench.tick()
    bench.submit(spec("r"))
    bench.do(JoinEngine(engine("e1")))
    assert not bench.tick() and bench.out("e1") is Verb.PAUSE
    bench.finish_updates()
    assert [one.engine_id for one in bench.tick()] == ["e1"]


def test_an_engine_without_an_owner_serves_no_run_that_has_published() -> None:
    bench = Bench(engine("e0", run_id=RUN), engine("e1", run_id="other"))
    bench.published(1)
    bench.publish(1, run="other", path="/other/1")
    bench.finish_updates()
    bench.do(JoinEngine(engine("e2")))  # nobody knows whose it is to be
    bench.submit(spec("mine"))
    bench.submit(spec("third"), run="third")
    assert {one.rollout_id: one.engine_id for one in bench.tick()} == {"mine": "e0", "third": "e2"}


def test_an_engine_that_somebody_published_to_before_we_knew_it_matches_nothing_old() -> None:
    bench = Bench(engine("e0"), engine("e1", engine_version="7"))
    (first, second) = bench.run(*specs("r", 2))
    salts = {one.engine_id: one.cache_salt for one in (first, second)}
    assert salts["e0"] == "" and salts["e1"].startswith("7-")


def test_work_without_an_engine_is_told_whose_weights_they_hold() -> None:
    bench = Bench(engine())
    bench.do(AttachConsumer("other", CONSUMER))
    bench.publish(1, run="other", path="/other/1")
    bench.finish_updates()
    quick = bench.rejected(spec("quick", fail_fast=True))
    bench.submit(spec("a", queue_ttl_seconds=30.0))
    bench.pass_time(31.0)
    for said in (quick.message, bench.notices(NoticeKind.NO_CAPACITY)[0].message, str(bench.result("a").error)):
        assert "hold the weights of another run ('other')" in said


def test_a_publication_is_no_lack_of_capacity() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.submit(spec("a"))
    bench.answer_through(Verb.BEGIN)
    bench.pass_time(30.0)
    assert not bench.notices(NoticeKind.NO_CAPACITY)
    bench.do(WeightsPushed(RUN, "policy", 1, error="out of disk"))
    bench.finish_updates()
    bench.pass_time(5.0)
    assert "out of disk" in bench.notices(NoticeKind.NO_CAPACITY)[0].message


def test_a_run_names_a_bounded_number_of_pools() -> None:
    bench = Bench(engine())
    for number in range(MOST_POOLS):
        bench.publish(1, pool=f"p{number}")
    error = bench.refused(Publish(RUN, PolicyUpdate(1, "/weights/1", pool="one more")))
    assert (error.code, error.fields[0][0]) == (Code.INVALID_ARGUMENT, "pool")
    assert bench.rejected(spec("r", pool="another")).fields[0][0] == "pool"
    bench.submit(spec("ok", pool="p0"))
    bench.publish(2, pool="p0")
    assert len(bench.its_run().lineages) == MOST_POOLS
