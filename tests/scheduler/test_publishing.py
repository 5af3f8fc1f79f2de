"""Publishing a policy version: order of calls, what happens to running work, failures, retries, other runs and pools."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.actions import NoticeKind, PublishEnded, PublishProgress
from rolloutd.scheduler.engine import REMEMBERED_LABELS
from rolloutd.scheduler.events import PublishPolicy as Publish
from rolloutd.scheduler.events import WeightsPushed
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import (
    CacheHandling,
    Code,
    FaultKind,
    PauseMode,
    UpdateMode,
    UpdateState,
    Verb,
)
from tests.scheduler.kit import RUN, Bench, engine, engines, spec, specs

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


@pytest.mark.parametrize("mode", UpdateMode)
def test_an_idle_engine_is_paused_flushed_loaded_verified_and_resumed(mode: UpdateMode) -> None:
    bench = Bench(engine())
    bench.publish(1, mode=mode, cache=CACHES[mode])
    flush = [Verb.FLUSH] if CACHES[mode] is CacheHandling.FLUSH else []
    assert verbs(bench) == [Verb.PAUSE, *flush, Verb.LOAD, Verb.VERIFY, Verb.RESUME]
    assert ends(bench) == [PublishEnded(RUN, "policy", 1, ("e0",), ())]
    assert bench.engine("e0").version == 1
    assert bench.run_view().policy_version == 1
    assert bench.notices(NoticeKind.VERSION_PUBLISHED)


def test_nothing_is_dispatched_while_an_engine_is_updated() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.submit(spec("r"))
    while bench.out() is not Verb.RESUME:
        assert not bench.tick()
        bench.answer()
    bench.answer()
    assert [one.rollout_id for one in bench.tick()] == ["r"]


def test_retract_aborts_nothing_and_each_token_has_its_version() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.RETRACT)
    assert bench.controls["e0"].mode is PauseMode.RETRACT
    bench.finish_updates()
    assert not bench.aborted
    bench.finish("r", 16, spans=(("default", 0, 5), ("1", 5, 16)))
    assert bench.whole("r")
    assert [(one.policy_version, one.start, one.end) for one in bench.result("r").spans] == [(0, 0, 5), (1, 5, 16)]


def test_abort_and_resume_keeps_tokens_and_goes_on_with_the_new_version() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    assert bench.out() is Verb.PAUSE and bench.controls["e0"].mode is PauseMode.ABORT
    assert not bench.aborted, "the pause itself stops what runs"
    bench.stopped("r", 6)
    bench.finish_updates()
    (again,) = bench.tick()
    assert again.max_new_tokens == 10
    bench.finish("r", 10)
    assert bench.whole("r")
    assert [one.policy_version for one in bench.result("r").spans] == [0, 1]
    assert bench.result("r").preemptions == 0


def test_what_waits_at_the_gate_of_a_paused_engine_is_asked_to_stop_before_weights_come() -> None:
    bench = Bench(engine())
    bench.submit(spec("late"))
    bench.tick()
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    bench.answer()  # the pause returned, and this one had not reached the engine
    assert bench.leaving() == {"late"} and bench.out() is None
    bench.stopped("late")
    assert verbs(bench) == [Verb.FLUSH, Verb.LOAD, Verb.VERIFY, Verb.RESUME]
    bench.tick()
    bench.finish("late")
    assert [one.policy_version for one in bench.result("late").spans] == [1]


def test_drain_lets_work_end_and_starts_nothing_new() -> None:
    bench = Bench(engine(slots=2))
    bench.run(spec("a"))
    bench.publish(1, mode=UpdateMode.DRAIN)
    bench.submit(spec("b"))
    assert not bench.tick() and bench.out() is None
    bench.finish("a")
    assert bench.out() is Verb.PAUSE
    bench.finish_updates()
    bench.tick()
    bench.finish("b")
    assert [bench.result(name).spans[0].policy_version for name in ("a", "b")] == [0, 1]


def test_a_drain_that_takes_too_long_interrupts() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.DRAIN)
    for _ in range(130):  # it goes on writing, so it is not stuck
        bench.pass_time(5.0, 5.0)
        if "r" in bench.leaving():
            break
        bench.write("r", bench.core._world.attempts[bench.live["r"].attempt_id].generated_tokens + 1)
    assert bench.leaving() == {"r"}
    bench.stopped("r", 5)
    bench.finish_updates()
    bench.tick()
    bench.finish("r", 11)
    assert bench.whole("r")


def test_in_place_waits_for_first_tokens_so_that_no_prompt_is_computed_over_old_prefixes() -> None:
    bench = Bench(engine())
    bench.submit(spec("r"))
    bench.tick()
    bench.publish(1, mode=UpdateMode.IN_PLACE, cache=CacheHandling.NAMESPACE)
    assert bench.out() is None
    bench.write("r", 1)
    assert verbs(bench) == [Verb.PAUSE, Verb.LOAD, Verb.VERIFY, Verb.RESUME]
    assert not bench.aborted


def test_a_namespace_separates_new_work_and_a_flush_does_not_need_one() -> None:
    bench = Bench(engine())
    bench.published(1, mode=UpdateMode.DRAIN)
    (flushed,) = bench.run(spec("a"))
    assert flushed.cache_salt == ""
    bench.finish("a")
    bench.published(2, mode=UpdateMode.DRAIN, cache=CacheHandling.NAMESPACE)
    (separate,) = bench.run(spec("b"))
    assert separate.cache_salt.startswith("2-"), "the same number of another run would match it"


@pytest.mark.parametrize("mode", UpdateMode)
def test_a_prefix_never_counts_across_versions(mode: UpdateMode) -> None:
    bench = Bench(engine(page_tokens=16))
    bench.run(spec("a", tokens=64, token_bytes=spec("x", 64).token_bytes))
    bench.finish("a")
    bench.published(1, mode=mode, cache=CACHES[mode])
    (again,) = bench.run(spec("b", tokens=64, token_bytes=spec("x", 64).token_bytes))
    assert bench.core._world.attempts[again.attempt_id].predicted_tokens == 0
    bench.finish("b")
    (third,) = bench.run(spec("c", tokens=64, token_bytes=spec("x", 64).token_bytes))
    assert bench.core._world.attempts[third.attempt_id].predicted_tokens == 48


def test_a_kept_cache_counts_as_long_as_the_run_says() -> None:
    bench = Bench(engine(page_tokens=16))
    bench.configure(prefix_ttl_versions=1)
    bench.run(spec("a", token_bytes=spec("x", 64).token_bytes))
    bench.finish("a")
    predicted = []
    for version in (1, 2):
        bench.published(version, mode=UpdateMode.DRAIN, cache=CacheHandling.KEEP)
        (one,) = bench.run(spec(f"b{version}", token_bytes=spec("x", 64).token_bytes))
        predicted.append(bench.core._world.attempts[one.attempt_id].predicted_tokens)
        bench.fail(f"b{version}", FaultKind.BUSY)
        bench.cancel(f"b{version}")
        bench.pass_time(20.0)
    assert predicted == [48, 48]  # the second look counts what version 1 computed when it wrote its first token


def test_versions_far_apart_are_no_work() -> None:
    bench = Bench(engine(page_tokens=16))
    bench.configure(prefix_ttl_versions=2**31 - 1)
    bench.run(spec("a", token_bytes=spec("x", 64).token_bytes))
    bench.finish("a")
    for version in (10, 2**30, 2**31 - 1):
        bench.published(version, mode=UpdateMode.DRAIN, cache=CacheHandling.KEEP)
    (one,) = bench.run(spec("b", token_bytes=spec("x", 64).token_bytes))
    assert bench.core._world.attempts[one.attempt_id].predicted_tokens == 48
    assert len(bench.its_run().lineage("policy").lookups) == 4
    bench.finish("b")
    for version in range(2**31, 2**31 + 40):
        bench.published(version, mode=UpdateMode.DRAIN, cache=CacheHandling.KEEP)
    assert len(bench.its_run().lineage("policy").lookups) == REMEMBERED_LABELS


def test_a_refused_flush_is_repeated_and_the_weights_are_sent_once() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.answer()
    for _ in range(3):
        assert bench.out() is Verb.FLUSH
        bench.answer(flushed=False)
        assert bench.out() is None
        bench.tick(0.3)
    assert verbs(bench) == [Verb.FLUSH, Verb.LOAD, Verb.VERIFY, Verb.RESUME]
    assert bench.engine("e0").version == 1


def test_a_cache_that_cannot_be_flushed_leaves_the_old_weights_running_in_quarantine() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1)
    bench.answer()
    while bench.out() is Verb.FLUSH:
        bench.answer(flushed=False)
        bench.tick(0.3)
    assert verbs(bench) == [Verb.RESUME]
    assert ends(bench)[-1].failed == ("e0",)
    assert not bench.aborted
    bench.finish("r")
    assert bench.result("r").spans[0].policy_version == 0
    bench.submit(spec("next"))
    assert not bench.tick(), "an engine without the version gets nothing"


def test_weights_that_cannot_be_read_leave_the_old_ones_and_a_retry_works() -> None:
    bench = Bench(*engines(2))
    bench.run(*specs("r", 2))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH, "e0")
    bench.call_fails("e0", FaultKind.REFUSED, "no such checkpoint")
    assert bench.out("e0") is Verb.RESUME
    bench.answer("e0")
    while bench.out("e1") is not None:
        bench.answer("e1")
    assert ends(bench)[-1] == PublishEnded(RUN, "policy", 1, ("e1",), ("e0",))
    assert not bench.aborted
    bench.publish(1)
    assert set(bench.controls) == {"e0"}, "only who does not hold it"
    bench.finish_updates()
    assert ends(bench)[-1] == PublishEnded(RUN, "policy", 1, ("e0", "e1"), ())
    assert bench.engine("e0").is_open(bench.now)


def test_half_new_weights_write_nothing_that_is_kept() -> None:
    bench = Bench(engine())
    bench.run(spec("r"))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH)
    bench.call_fails(fault=FaultKind.BROKEN)
    assert bench.leaving() == {"r"} and bench.out() is None, "it does not go on before our work has left"
    bench.stopped("r", 4)
    assert verbs(bench) == [Verb.RESUME]
    assert not bench.engine("e0").is_open(bench.now)
    bench.published(2)
    bench.tick()
    bench.finish("r", 12)
    assert bench.whole("r")
    assert [one.policy_version for one in bench.result("r").spans] == [0, 2]


def test_a_load_that_left_the_old_label_did_not_happen_and_is_not_named() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.answer_through(Verb.LOAD)
    bench.answer(label="default")
    assert bench.out() is Verb.RESUME
    bench.answer()
    assert ends(bench)[-1].failed == ("e0",) and bench.engine("e0").version == 0


def test_pushed_weights_with_another_label_are_named_once_then_given_up() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.answer_through(Verb.BEGIN)
    bench.do(WeightsPushed(RUN, "policy", 1))
    bench.answer_through(Verb.END)
    bench.answer(label="default")
    assert bench.out() is Verb.NAME
    bench.answer()
    bench.answer(label="default")
    assert bench.out() is Verb.RESUME
    bench.answer()
    assert ends(bench)[-1].failed == ("e0",) and bench.engine("e0").version == 0


def test_an_engine_that_does_not_resume_is_asked_again_and_then_given_up() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.answer_through(Verb.VERIFY)
    for _ in range(5):
        assert bench.out() is Verb.RESUME
        bench.call_fails()
        bench.tick(0.3)
    assert ends(bench)[-1].failed == ("e0",)
    assert not bench.engine("e0").is_open(bench.now)


def test_pushed_weights_are_bracketed_and_confirmed_per_engine() -> None:
    bench = Bench(*engines(2))
    bench.publish(1, path="")
    for name in ("e0", "e1"):
        bench.answer_through(Verb.BEGIN, name)
        assert bench.out(name) is None and states(bench, name)[-1] is UpdateState.PUSHING
    bench.do(WeightsPushed(RUN, "policy", 1, "e0"))
    assert bench.out("e0") is Verb.END and bench.out("e1") is None
    bench.do(WeightsPushed(RUN, "policy", 1, "e1", error="no NCCL"))
    bench.answer("e0")
    bench.answer("e0", label="default")  # the trainer did not pass the version on
    assert verbs(bench, "e0") == [Verb.NAME, Verb.VERIFY, Verb.RESUME]
    assert verbs(bench, "e1") == [Verb.RESUME]
    assert ends(bench)[-1] == PublishEnded(RUN, "policy", 1, ("e0",), ("e1",))


def test_a_session_left_open_by_an_earlier_push_is_closed_first() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.answer_through(Verb.FLUSH)
    bench.call_fails(fault=FaultKind.REFUSED, message="already open")
    assert bench.out() is Verb.END
    bench.answer()
    assert bench.out() is Verb.BEGIN
    bench.answer()
    bench.do(WeightsPushed(RUN, "policy", 1))
    bench.answer()
    bench.labels["e0"] = "1"
    bench.finish_updates()
    assert bench.engine("e0").version == 1


def test_a_trainer_that_never_confirms_fails_the_engine() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.answer_through(Verb.BEGIN)
    bench.pass_time(1000.0, 100.0)
    assert verbs(bench) == [Verb.RESUME]
    assert ends(bench)[-1].failed == ("e0",)


def test_confirming_what_is_not_being_pushed_is_refused() -> None:
    bench = Bench(engine())
    bench.publish(1)
    error = bench.refused(WeightsPushed(RUN, "policy", 1))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NOT_PUSHING")


def test_versions_only_grow_and_the_same_one_is_no_work() -> None:
    bench = Bench(engine())
    bench.published(3)
    error = bench.refused(Publish(RUN, PolicyUpdate(2, "/weights/2")))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "VERSION_BACKWARDS")
    bench.publish(3)
    assert not bench.controls
    assert ends(bench)[-1] == PublishEnded(RUN, "policy", 3, ("e0",), ())


def test_two_at_once_go_one_after_the_other() -> None:
    bench = Bench(engine())
    bench.publish(1)
    bench.publish(2)
    bench.publish(2)
    bench.finish_updates()
    assert [one.version for one in ends(bench)] == [1, 2]
    assert bench.engine("e0").version == 2


def test_rolling_updates_keep_the_others_serving() -> None:
    bench = Bench(*engines(3))
    bench.publish(1, engines_at_once=1)
    assert set(bench.controls) == {"e0"}
    bench.submit(*specs("r", 6))
    assert {one.engine_id for one in bench.tick()} == {"e1", "e2"}
    for name in ("e0", "e1", "e2"):
        assert set(bench.controls) == {name}
        verbs(bench, name)
    assert ends(bench)[-1].updated == ("e0", "e1", "e2")


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        (UpdateMode.RETRACT, CacheHandling.NAMESPACE),
        (UpdateMode.RETRACT, CacheHandling.KEEP),
        (UpdateMode.IN_PLACE, CacheHandling.FLUSH),
    ],
)
def test_unsound_pairs_of_mode_and_cache_are_refused(mode: UpdateMode, cache: CacheHandling) -> None:
    bench = Bench(engine())
    error = bench.refused(Publish(RUN, PolicyUpdate(1, "/w", mode, cache)))
    assert error.code is Code.INVALID_ARGUMENT and "cache" in error.message


def test_other_pools_are_not_touched() -> None:
    bench = Bench(engine("e0"), engine("judge", pool="reward"))
    bench.publish(1)
    assert set(bench.controls) == {"e0"}
    assert [one.engine_id for one in bench.run(spec("r", pool="reward"))] == ["judge"]
    bench.finish_updates()
    bench.finish("r")
    assert bench.result("r").spans[0].policy_version == 0


def test_an_engine_serves_one_runs_versions() -> None:
    bench = Bench(engine(slots=4))
    bench.submit(spec("other"), run="second")
    bench.tick()
    bench.publish(1)
    assert bench.leaving() == {"other"}, "another run's tokens are not to be written by these weights"
    bench.stopped("other")
    bench.finish_updates()
    assert not bench.tick()
    error = bench.refused(Publish("second", PolicyUpdate(1, "/w")))
    assert error.reason == "ENGINES_OWNED"
