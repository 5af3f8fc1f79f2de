"""What versions a rollout accepts: when it is submitted, placed, interrupted and delivered; slices."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.actions import Deliver, Finished, GroupFinished
from rolloutd.scheduler.events import AttachConsumer, DetachConsumer, JoinEngine, SubmitRollouts
from rolloutd.scheduler.states import Code, Gate, OnPreempt, OnStale, Outcome, RolloutState, UpdateMode, Verb
from tests.scheduler.kit import CONSUMER, RUN, Bench, engine, engines, spec, unpack

OTHER = "rank-1"


def version_of(bench: Bench, rollout_id: str) -> list[int]:
    return [one.policy_version for one in bench.result(rollout_id).spans]


# placed ----------------------------------------------------------------------------------------------------------------


def test_a_minimum_waits_for_its_version() -> None:
    bench = Bench(engine())
    bench.submit(spec("new", min_version=1), spec("any"))
    assert [one.rollout_id for one in bench.tick()] == ["any"]
    assert bench.view("new").gate is Gate.POLICY_VERSION
    bench.published(1)
    assert [one.rollout_id for one in bench.tick()] == ["new"]


def test_an_exact_version_that_is_there_is_used_in_a_rolling_update() -> None:
    bench = Bench(*engines(2))
    bench.publish(1, engines_at_once=1)
    bench.submit(spec("old", exact_version=0), spec("new", exact_version=1))
    (old,) = bench.tick()
    assert (old.rollout_id, old.engine_id) == ("old", "e1")
    bench.answer_through(Verb.RESUME, "e0")
    (new,) = bench.tick()
    assert (new.rollout_id, new.engine_id) == ("new", "e0")
    bench.finish("old")
    bench.finish_updates()
    bench.finish("new")
    assert version_of(bench, "old") == [0] and version_of(bench, "new") == [1]


def test_an_exact_version_that_is_gone_is_refused_and_one_that_goes_ends() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("busy"))
    bench.submit(spec("waits", exact_version=0))
    bench.published(1)
    assert bench.outcome("waits") is Outcome.VERSION_GONE
    error = bench.rejected(spec("late", exact_version=0))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "POLICY_VERSION_GONE")


def test_an_exact_version_to_come_waits_and_is_unmet_after_its_ttl() -> None:
    bench = Bench(engine())
    bench.submit(spec("later", exact_version=7, queue_ttl_seconds=30.0))
    bench.pass_time(31.0)
    assert bench.outcome("later") is Outcome.VERSION_UNMET
    error = bench.result("later").error
    assert error is not None and error.reason == "POLICY_VERSION_UNMET" and error.code is Code.UNAVAILABLE


def test_fail_fast_says_at_once_that_a_version_is_not_there() -> None:
    bench = Bench(engine())
    error = bench.rejected(spec("now", min_version=3, fail_fast=True))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "POLICY_VERSION_UNMET")


@pytest.mark.parametrize(
    "fields",
    [{"min_version": -1}, {"exact_version": 1, "min_version": 2}, {"max_staleness": -1}, {"max_partial_span": -2}],
)
def test_requirements_that_make_no_sense_are_refused(fields: dict[str, int]) -> None:
    bench = Bench(engine())
    assert bench.rejected(spec("bad", **fields)).code is Code.INVALID_ARGUMENT


def test_a_run_sets_defaults_that_a_rollout_overrides() -> None:
    bench = Bench(engine(slots=2))
    bench.configure(min_version=1)
    bench.submit(spec("default"), spec("own", min_version=0))
    assert [one.rollout_id for one in bench.tick()] == ["own"]
    bench.published(1)
    assert [one.rollout_id for one in bench.tick()] == ["default"]


def test_work_behind_those_that_wait_for_a_version_goes_on() -> None:
    bench = Bench(engine(slots=4))
    bench.submit(*(spec(f"w{index}", min_version=9) for index in range(100)), spec("any"))
    assert [one.rollout_id for one in bench.tick()] == ["any"]


def test_work_that_waits_for_a_version_can_be_cancelled() -> None:
    bench = Bench(engine())
    bench.submit(spec("w", min_version=9))
    bench.tick()
    bench.cancel("w")
    assert bench.outcome("w") is Outcome.CANCELLED
    assert not bench.its_run().lineage("policy").held
    bench.quiet()


def test_a_version_may_come_with_an_engine() -> None:
    bench = Bench(engine("e0"))
    bench.published(1)
    bench.submit(spec("r", min_version=1, engine_labels={"big": "yes"}))
    assert not bench.tick()
    bench.do(JoinEngine(engine("e1", labels={"big": "yes"})))
    bench.finish_updates()
    assert [one.engine_id for one in bench.tick()] == ["e1"]


# interrupted -----------------------------------------------------------------------------------------------------------


def test_one_version_only_starts_again_where_others_go_on() -> None:
    bench = Bench(engine(slots=2))
    bench.run(spec("mixed"), spec("pure", max_partial_span=0))
    bench.publish(1, mode=UpdateMode.RETRACT)
    assert bench.leaving() == {"pure"}, "it can not go on under other weights"
    bench.stopped("pure", 5)
    bench.finish_updates()
    (again,) = bench.tick()
    assert again.rollout_id == "pure" and again.max_new_tokens == 16
    bench.finish("pure")
    bench.finish("mixed", 16, spans=(("default", 0, 4), ("1", 4, 16)))
    assert version_of(bench, "pure") == [1] and version_of(bench, "mixed") == [0, 1]


def test_a_partial_rollout_spans_no_more_versions_than_it_may() -> None:
    bench = Bench(engine())
    bench.run(spec("r", max_partial_span=1))
    sent = []
    for version in (1, 2):
        bench.publish(version, mode=UpdateMode.ABORT_AND_RESUME)
        bench.stopped("r", 4)
        bench.finish_updates()
        (again,) = bench.tick()
        bench.write("r", 1)
        sent.append(again.max_new_tokens)
    assert sent == [12, 16], "version 2 may not follow version 0"
    bench.finish("r", 16)
    assert version_of(bench, "r") == [2] and bench.whole("r")


def test_kept_tokens_that_grew_too_old_are_given_up_while_it_waits() -> None:
    bench = Bench(engine())
    bench.run(spec("r", max_staleness=1))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    bench.stopped("r", 4)
    bench.publish(2, mode=UpdateMode.ABORT_AND_RESUME)
    bench.finish_updates()
    (again,) = bench.tick()
    assert again.max_new_tokens == 16
    bench.finish("r")
    assert version_of(bench, "r") == [2]


def test_older_weights_never_write_on_behind_newer_ones() -> None:
    bench = Bench(*engines(2))
    bench.publish(1, engines_at_once=1)
    bench.answer_through(Verb.RESUME, "e0")
    bench.submit(spec("r", min_version=1))
    bench.tick()
    bench.write("r", 1)
    bench.call_fails("e1")  # e1 keeps version 0, in quarantine
    bench.finish_updates()
    bench.step(1)
    bench.budget(max_rollouts=0)
    bench.stopped("r", 5)
    bench.budget()
    (again,) = bench.tick()
    assert again.engine_id == "e0"


# delivered -------------------------------------------------------------------------------------------------------------


def aged(on_stale: OnStale) -> Bench:
    """A rollout of version 0 that ends when version 2 is the newest, although it allows one behind.

    It is alone on an engine whose update waits for its turn, so nobody interrupts it.
    """
    bench = Bench(*engines(2, slots=1))
    bench.configure(max_staleness=1, on_stale=on_stale)
    bench.published(1)
    bench.run(spec("a"), spec("b"))
    bench.publish(2, engines_at_once=1, mode=UpdateMode.DRAIN)
    bench.publish(3, engines_at_once=1, mode=UpdateMode.DRAIN)
    first = next(name for name in ("a", "b") if bench.live[name].engine_id == "e0")
    bench.finish(first)
    bench.answer_through(Verb.RESUME, "e0")
    return bench


def test_what_is_done_in_time_is_not_stale() -> None:
    bench = aged(OnStale.WITHHOLD)
    (other,) = bench.live
    bench.finish(other)
    assert bench.outcome(other) is Outcome.COMPLETED and bench.result(other).staleness == 1


@pytest.mark.parametrize("on_stale", OnStale)
def test_what_grew_too_old_before_it_was_fetched_is_withheld_or_flagged(on_stale: OnStale) -> None:
    bench = Bench(engine())
    bench.configure(max_staleness=1, on_stale=on_stale)
    bench.run(spec("r"))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.finish("r")
    bench.published(1)
    bench.published(2)
    heard = [
        one.event.result  # type: ignore[union-attr]
        for one in bench.core.handle(AttachConsumer(RUN, CONSUMER), bench.now)
        if isinstance(getattr(one, "event", None), Finished)
    ]
    bench.core.check()
    (result,) = heard
    assert result.stale and result.staleness == 2
    if on_stale is OnStale.WITHHOLD:
        assert result.outcome is Outcome.STALE and not result.token_bytes
        assert result.error is not None and "max_staleness is 1" in result.error.message
    else:
        assert result.outcome is Outcome.COMPLETED and len(unpack(result.token_bytes)) == 16
    assert bench.run_view().stale_results == 1
    bench.acknowledge("r")
    bench.quiet()


def test_a_group_is_not_complete_any_more_when_a_sample_grew_too_old() -> None:
    bench = Bench(engine())
    bench.configure(max_staleness=0)
    bench.submit(spec("g", samples=2))
    bench.tick()
    bench.write("g/0", 1)
    bench.tick()
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.finish("g/0")
    bench.finish("g/1")
    bench.published(1)
    heard = [
        one.event for one in bench.core.handle(AttachConsumer(RUN, CONSUMER), bench.now) if isinstance(one, Deliver)
    ]
    bench.core.check()
    (group,) = (one for one in heard if isinstance(one, GroupFinished))
    assert not group.complete and sorted(group.failed_rollout_ids) == ["g/0", "g/1"]


def test_who_asks_again_gets_no_result_that_grew_too_old() -> None:
    bench = Bench(engine())
    bench.configure(max_staleness=0)
    bench.run(spec("r"))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.finish("r")
    bench.published(1)
    submission = SubmitRollouts(RUN, OTHER, (spec("r"),))
    bench.core.handle(AttachConsumer(RUN, OTHER), bench.now)
    heard = [one.event for one in bench.core.handle(submission, bench.now) if isinstance(one, Deliver)]
    (again,) = (one.result for one in heard if isinstance(one, Finished))
    assert again.outcome is Outcome.STALE and not again.token_bytes
    bench.core.check()


def test_a_rollout_that_is_too_old_for_the_next_version_leaves_its_engine_before() -> None:
    bench = Bench(engine())
    bench.configure(max_staleness=0)
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.RETRACT)
    assert bench.leaving() == {"r"}
    bench.stopped("r", 3)
    bench.finish_updates()
    bench.tick()
    bench.finish("r")
    assert version_of(bench, "r") == [1]


def test_a_drained_rollout_that_grew_stale_is_withheld_and_says_so() -> None:
    bench = Bench(engine())
    bench.configure(max_staleness=0)
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.DRAIN)
    bench.finish("r")
    assert bench.outcome("r") is Outcome.STALE
    assert not bench.result("r").token_bytes and bench.result("r").spans


# slices ----------------------------------------------------------------------------------------------------------------


def test_a_long_rollout_is_divided_and_may_move() -> None:
    bench = Bench(*engines(2))
    bench.configure(slice_tokens=6)
    bench.submit(spec("r", max_new_tokens=16))
    lengths = []
    while "r" not in bench.ended:
        (one,) = bench.tick()
        lengths.append(one.max_new_tokens)
        bench.write("r", 1)
        bench.finish("r", one.max_new_tokens, "length")
    assert lengths == [6, 6, 4]
    assert bench.whole("r")
    result = bench.result("r")
    assert result.finish_reason == "length" and result.attempts == 3 and result.generated_tokens == 16
    assert [one.number for one in result.history] == [1, 2, 3]


def test_a_slice_that_ends_by_itself_ends_the_rollout() -> None:
    bench = Bench(engine())
    bench.configure(slice_tokens=6)
    bench.run(spec("r"))
    bench.finish("r", 3, "stop")
    assert bench.result("r").generated_tokens == 3 and bench.outcome("r") is Outcome.COMPLETED


def test_state_over_the_output_is_not_divided() -> None:
    bench = Bench(engine())
    bench.configure(slice_tokens=6)
    (one,) = bench.run(spec("r", sampling={"regex": "a*"}))
    assert one.max_new_tokens == 16


def test_what_starts_again_when_it_is_interrupted_is_not_divided() -> None:
    bench = Bench(engine())
    bench.configure(slice_tokens=6, on_preempt=OnPreempt.RESTART)
    (one,) = bench.run(spec("r"))
    assert one.max_new_tokens == 16


def test_a_cancelled_slice_stays_cancelled() -> None:
    bench = Bench(engine())
    bench.configure(slice_tokens=6)
    bench.run(spec("r"))
    bench.cancel("r")
    bench.finish("r", 6, "length")
    assert bench.outcome("r") is Outcome.CANCELLED


# lineage ---------------------------------------------------------------------------------------------------------------


def test_a_result_names_its_attempts_and_their_versions() -> None:
    bench = Bench(*engines(2))
    bench.run(spec("r"))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    where = bench.live["r"].engine_id
    bench.stopped("r", 6)
    bench.finish_updates()
    bench.tick(2.0)
    bench.finish("r", 10)
    result = bench.result("r")
    first, second = result.history
    assert (first.number, first.engine_id, first.policy_version, first.end) == (1, where, 0, "publish")
    assert (second.number, second.policy_version, second.end) == (2, 1, "stop")
    assert first.started_seconds <= first.ended_seconds < second.started_seconds <= second.ended_seconds
    assert result.policy_version == 1 and result.staleness == 1
    assert bench.state("r") is RolloutState.FINISHED
