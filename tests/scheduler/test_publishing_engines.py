"""Engines that come, go, restart, contradict themselves or stand still while versions are published."""

from __future__ import annotations

from rolloutd.scheduler.actions import PublishEnded, PublishProgress
from rolloutd.scheduler.events import JoinEngine, LoseEngine, RemoveEngine, WeightsPushed
from rolloutd.scheduler.states import (
    CacheHandling,
    FaultKind,
    Outcome,
    RolloutState,
    UpdateMode,
    UpdateState,
    Verb,
)
from tests.scheduler.kit import CRITICAL, RUN, Bench, engine, engines, spec, specs

CACHES = {
    UpdateMode.DRAIN: CacheHandling.FLUSH,
    UpdateMode.ABORT_AND_RESUME: CacheHandling.FLUSH,
    UpdateMode.RETRACT: CacheHandling.FLUSH,
    UpdateMode.IN_PLACE: CacheHandling.NAMESPACE,
}


def verbs(bench: Bench, engine_id: str = "e0") -> list[Verb]:
    """Calls made to an engine while all of them succeed."""
    made = []
    while (verb := bench.out(engine_id)) is not None:
        made.append(verb)
        bench.answer(engine_id)
    return made


def ends(bench: Bench) -> list[PublishEnded]:
    return [one for one in bench.said if isinstance(one, PublishEnded)]


def states(bench: Bench, engine_id: str = "e0") -> list[UpdateState]:
    return [one.state for one in bench.said if isinstance(one, PublishProgress) and one.engine_id == engine_id]


def test_a_new_engine_gets_the_version_before_it_serves() -> None:
    bench = Bench(engine("e0"))
    bench.published(4)
    bench.do(JoinEngine(engine("e1")))
    bench.submit(*specs("r", 4))
    assert {one.engine_id for one in bench.tick()} == {"e0"}
    assert bench.controls["e1"].verb is Verb.PAUSE
    bench.finish_updates()
    assert {one.engine_id for one in bench.tick()} == {"e1"}
    assert bench.engine("e1").version == 4


def test_pushed_versions_cannot_be_caught_up_by_themselves() -> None:
    bench = Bench(engine("e0"))
    bench.publish(1, path="")
    bench.answer_through(Verb.BEGIN)
    bench.do(WeightsPushed(RUN, "policy", 1))
    bench.labels["e0"] = "1"
    bench.finish_updates()
    bench.do(JoinEngine(engine("e1")))
    assert not bench.controls
    assert "publish it again" in bench.engine("e1").quarantine
    bench.publish(1, path="")
    assert set(bench.controls) == {"e1"}


def test_an_engine_that_restarts_in_its_update_fails_it_and_catches_up() -> None:
    bench = Bench(*engines(2))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH, "e0")
    bench.controls.pop("e0")
    bench.labels.pop("e0", None)
    bench.do(JoinEngine(engine("e0", incarnation="2")))
    assert bench.out("e0") is None or bench.out("e0") is Verb.PAUSE
    bench.finish_updates()
    assert bench.engine("e0").version == 1 and bench.engine("e1").version == 1
    assert {one.version for one in ends(bench)} == {1}
    assert bench.engine("e0").is_open(bench.now)


def test_a_removed_engine_does_not_hold_up_the_others() -> None:
    bench = Bench(*engines(2))
    bench.publish(1)
    bench.do(RemoveEngine("e0"))
    bench.controls.pop("e0")
    bench.finish_updates()
    assert ends(bench)[-1].updated == ("e1",)


def test_late_answers_of_calls_that_were_given_up_change_nothing() -> None:
    bench = Bench(engine())
    bench.publish(1)
    late = bench.controls.pop("e0")
    bench.do(JoinEngine(engine(incarnation="2")))
    assert bench.out() is Verb.PAUSE, "the new process has to get it too"
    from rolloutd.scheduler.events import ControlEnded

    now_out = bench.engine("e0").control_id
    bench.do(ControlEnded("e0", late.control_id))
    assert bench.engine("e0").control_id == now_out


def test_an_engine_that_goes_back_to_older_weights_is_fenced() -> None:
    bench = Bench(engine())
    bench.published(2)
    bench.run(spec("r"))
    bench.finish("r", 16, spans=(("default", 0, 16),))
    assert "r" not in bench.ended, "tokens of a version that it had left"
    assert bench.engine("e0").quarantine
    bench.finish_updates()
    bench.tick(20.0)
    bench.finish("r")
    assert [one.policy_version for one in bench.result("r").spans] == [2]


def test_tokens_of_weights_that_nobody_published_are_not_delivered() -> None:
    bench = Bench(*engines(2))
    bench.run(spec("r"))
    where = bench.live["r"].engine_id
    bench.finish("r", 16, spans=(("default", 0, 6), ("rogue", 6, 16)))
    assert bench.engine(where).quarantine and "rogue" in bench.engine(where).quarantine
    (again,) = bench.tick()
    assert again.engine_id != where and again.max_new_tokens == 10
    bench.finish("r", 10)
    assert bench.whole("r")


def test_a_deadline_still_counts_while_the_engine_stands_still() -> None:
    bench = Bench(engine())
    bench.run(spec("r", deadline_seconds=50.0))
    bench.publish(1)
    bench.pass_time(51.0, 3.0)
    assert bench.leaving() == {"r"}
    bench.stopped("r", 3)
    assert bench.outcome("r") is Outcome.DEADLINE_EXCEEDED


def test_standing_still_is_not_a_lack_of_progress() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH)
    bench.pass_time(600.0, 30.0)
    assert not bench.leaving()
    bench.finish_updates()
    bench.pass_time(110.0, 10.0)
    assert not bench.leaving()
    bench.pass_time(12.0, 3.0)
    assert bench.leaving() == {"r"}


def test_cancel_while_it_stands_still() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1)
    bench.cancel("r")
    bench.stopped("r", 2)
    assert bench.outcome("r") is Outcome.CANCELLED
    bench.finish_updates()
    bench.quiet()


def test_readiness_asked_before_it_resumed_is_old_news() -> None:
    from rolloutd.scheduler.events import EngineReadiness

    bench = Bench(engine())
    bench.publish(1)
    bench.do(EngineReadiness("e0", False))
    bench.finish_updates()
    bench.now += 0.01
    bench.do(EngineReadiness("e0", False, age_seconds=0.5))
    assert bench.engine("e0").is_open(bench.now)
    bench.do(EngineReadiness("e0", False))
    assert not bench.engine("e0").is_open(bench.now)


def test_a_lost_engine_fails_by_its_own_calls() -> None:
    bench = Bench(*engines(2))
    bench.publish(1)
    bench.do(LoseEngine("e0", "gone"))
    bench.call_fails("e0", FaultKind.UNREACHED)
    for _ in range(10):
        bench.tick(0.3)
        if bench.out("e0") is None:
            break
        bench.call_fails("e0", FaultKind.UNREACHED)
    bench.finish_updates()
    assert ends(bench)[-1] == PublishEnded(RUN, "policy", 1, ("e1",), ("e0",))


def test_rollouts_wait_in_their_queue_and_none_is_lost() -> None:
    bench = Bench(*engines(2, slots=4))
    bench.run(*specs("r", 8))
    for version, mode in enumerate(UpdateMode, start=1):
        bench.publish(version, mode=mode, cache=CACHES[mode])
        for name in list(bench.live):
            if bench.state(name) is RolloutState.ABORTING:
                bench.stopped(name, 2)
        if mode is UpdateMode.DRAIN:
            for name in list(bench.live):
                bench.finish(name)
        bench.finish_updates()
        bench.submit(*specs(f"v{version}-", 4, CRITICAL))
        for one in bench.tick():
            bench.write(one.rollout_id, 1)
    for _ in range(20):
        for name in list(bench.live):
            bench.finish(name, bench.live[name].max_new_tokens)
        bench.tick(1.0)
    assert len(bench.ended) == 8 + 16
    assert all(bench.whole(name) for name in bench.ended)
    bench.quiet()


def test_a_burst_of_work_waits_for_engines_that_are_about_to_work_again() -> None:
    bench = Bench(*engines(2, slots=8))
    bench.publish(1)
    for name in ("e0", "e1"):
        bench.answer_through(Verb.LOAD, name)
    bench.answer_through(Verb.RESUME, "e0")
    bench.submit(*specs("r", 6))
    assert not bench.tick(), "e1 is being verified"
    bench.answer_through(Verb.RESUME, "e1")
    assert {one.engine_id for one in bench.tick()} == {"e0", "e1"}


def test_it_does_not_wait_long_for_them() -> None:
    bench = Bench(*engines(2, slots=8))
    bench.publish(1)
    for name in ("e0", "e1"):
        bench.answer_through(Verb.LOAD, name)
    bench.answer_through(Verb.RESUME, "e0")
    bench.submit(*specs("r", 2))
    assert not bench.tick() and bench.core.next_due() <= bench.now + 0.03
    assert {one.engine_id for one in bench.tick(0.031)} == {"e0"}
    bench.answer_through(Verb.VERIFY, "e1")
    bench.submit(*specs("s", 2))
    assert bench.tick(), "not once more within the next moment"
