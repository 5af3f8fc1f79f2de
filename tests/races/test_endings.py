"""Every way to end at every point of a life, in every order: one end, nothing left booked (properties P1, P2).

A race is a list of events. `LIVES` brings a rollout to a point of its life, `ENDS` ends it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rolloutd.scheduler.actions import Abort, Dispatch
from rolloutd.scheduler.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    BeginShutdown,
    DetachConsumer,
    EndRun,
    JoinEngine,
    LoseEngine,
    RemoveEngine,
    UpdateRollouts,
)
from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutUpdate
from rolloutd.scheduler.states import AbortReason, Code, FaultKind, OnPreempt, Outcome, RolloutState, TaskType
from tests.scheduler.kit import BACKGROUND, CONSUMER, REUSABLE, RUN, Bench, config, engine, spec

SETTINGS = config(executor={"max_attempts": 1})


def queued(bench: Bench) -> None:
    bench.budget(max_rollouts=0)
    bench.submit(spec("a", 64))
    bench.tick()


def held(bench: Bench) -> None:
    """`a` waits for the first token of `lead`, which has the same prompt."""
    bench.submit(spec("lead", 64, REUSABLE, token_bytes=spec("a", 64).token_bytes))
    bench.tick()
    bench.submit(spec("a", 64, REUSABLE))
    bench.tick()
    assert bench.view("a").gate.name == "HELD_FOR_PREFIX"


def dispatched(bench: Bench) -> None:
    bench.submit(spec("a", 64))
    bench.tick()


def running(bench: Bench) -> None:
    bench.run(spec("a", 64))
    bench.write("a", 3)


def requeued(bench: Bench) -> None:
    running(bench)
    bench.budget(max_rollouts=0)
    bench.stopped("a", 5)
    assert bench.state("a") is RolloutState.QUEUED


def interrupted(bench: Bench) -> None:
    """Asked to stop by a budget, and still there."""
    running(bench)
    bench.budget(max_rollouts=0)


LIVES = [queued, held, dispatched, running, interrupted, requeued]


def cancel(bench: Bench) -> None:
    bench.cancel("a")


def end_run(bench: Bench) -> None:
    bench.do(EndRun(RUN))


def deadline(bench: Bench) -> None:
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("a", deadline_seconds=0.5),)))
    bench.tick(1.0)


def shutdown(bench: Bench) -> None:
    bench.do(BeginShutdown(1.0))
    bench.tick(1.5)


def disconnect(bench: Bench) -> None:
    bench.configure(cancel_on_disconnect=True)
    bench.do(DetachConsumer(RUN, CONSUMER))


ENDS: list[tuple[Callable[[Bench], None], Outcome]] = [
    (cancel, Outcome.CANCELLED),
    (end_run, Outcome.RUN_ENDED),
    (deadline, Outcome.DEADLINE_EXCEEDED),
    (shutdown, Outcome.SHUTDOWN),
    (disconnect, Outcome.CANCELLED),
]


@pytest.mark.parametrize("last_word", ["aborted", "finished", "broken", "silent", "unanswered", "restarted"])
@pytest.mark.parametrize(("end", "outcome"), ENDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_one_end_at_every_point_of_a_life(
    life: Callable[[Bench], None], end: Callable[[Bench], None], outcome: Outcome, last_word: str
) -> None:
    bench = Bench(engine(slots=2), settings=SETTINGS)
    life(bench)
    end(bench)
    bench.tick()
    was_live = "a" in bench.live
    if was_live:
        words: dict[str, Callable[[], object]] = {
            "aborted": lambda: bench.stopped("a", 3),
            "finished": lambda: bench.finish("a", 4),
            "broken": lambda: bench.fail("a", FaultKind.BROKEN, 3),
            "silent": lambda: bench.fail("a", FaultKind.SILENT),
            "unanswered": lambda: None,
            "restarted": lambda: bench.do(JoinEngine(engine(slots=2, incarnation="2"))),
        }
        words[last_word]()
    bench.pass_time(15.0)  # past the abort timeout
    result = bench.its_run().rollouts["a"].result if "a" in bench.its_run().rollouts else bench.result("a")
    assert result is not None
    if was_live and last_word == "finished" and (end is shutdown or (end is deadline and life is interrupted)):
        # It was done before the grace was over, or before anybody asked the engine for the deadline's sake.
        assert result.outcome is Outcome.COMPLETED
    else:
        assert result.outcome is outcome
    assert result.complete == (result.outcome is Outcome.COMPLETED)
    assert (result.error is None) == result.complete
    if "lead" in bench.live:
        bench.finish("lead")
    bench.tick()
    bench.quiet()


# two events, both orders


def test_queue_40_cancel_then_finish_is_cancelled_with_its_tokens() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.cancel("a")
    assert bench.said[-1] == Abort(bench.live["a"].attempt_id, "e0", AbortReason.CANCEL)
    bench.finish("a", 7)
    assert bench.outcome("a") is Outcome.CANCELLED and bench.whole("a")
    assert bench.result("a").generated_tokens == 7
    bench.quiet()


def test_queue_40_finish_then_cancel_is_completed() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.finish("a", 7)
    bench.cancel("a")
    assert bench.outcome("a") is Outcome.COMPLETED
    bench.quiet()


def test_queue_40_cancel_before_anything_was_ticked() -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    bench.cancel("a")
    assert bench.outcome("a") is Outcome.CANCELLED and not bench.tick()
    bench.quiet()


def test_queue_40_a_deadline_that_passed_before_the_first_tick_dispatches_nothing() -> None:
    bench = Bench(engine())
    bench.submit(spec("a", deadline_seconds=0.5))
    assert not bench.tick(1.0)
    assert bench.outcome("a") is Outcome.DEADLINE_EXCEEDED
    error = bench.result("a").error
    assert error is not None and error.code is Code.DEADLINE_EXCEEDED
    bench.quiet()


def test_the_first_word_stands_between_cancel_and_deadline() -> None:
    for first, second, outcome in (
        (cancel, deadline, Outcome.CANCELLED),
        (deadline, cancel, Outcome.DEADLINE_EXCEEDED),
    ):
        bench = Bench(engine())
        bench.run(spec("a"))
        first(bench)
        second(bench)
        bench.stopped("a", 2)
        assert bench.outcome("a") is outcome
        bench.quiet()


def preempted(bench: Bench) -> None:
    """`a` (background) was asked to make room for `urgent`."""
    bench.run(spec("a", rollout_class=BACKGROUND))
    bench.now += 3.0
    bench.submit(spec("urgent"))
    bench.tick()
    assert bench.state("a") is RolloutState.ABORTING


def test_a_preempted_rollout_that_finishes_in_the_same_moment_is_completed() -> None:
    bench = Bench(engine(slots=1))
    preempted(bench)
    bench.finish("a", 9)
    assert bench.outcome("a") is Outcome.COMPLETED and bench.whole("a")
    assert [one.rollout_id for one in bench.tick()] == ["urgent"]


def test_a_preempted_rollout_resumes_from_its_tokens() -> None:
    bench = Bench(engine(slots=1))
    preempted(bench)
    bench.stopped("a", 5)
    assert bench.state("a") is RolloutState.QUEUED and bench.view("a").generated_tokens == 5
    assert [one.rollout_id for one in bench.tick()] == ["urgent"]
    bench.finish("urgent")
    (again,) = bench.tick()
    assert (again.rollout_id, len(again.token_bytes) // 4, again.max_new_tokens) == ("a", 13, 11)
    bench.finish("a", 11)
    assert bench.outcome("a") is Outcome.COMPLETED and bench.whole("a")
    result = bench.result("a")
    assert (result.generated_tokens, result.attempts, result.preemptions) == (16, 2, 1)
    assert [(span.start, span.end, span.attempt) for span in result.spans] == [(0, 5, 1), (5, 16, 2)]
    bench.quiet()


def test_an_id_prompt_resumes_from_its_tokens_although_its_engine_wrote_text_too() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("r", max_new_tokens=100))
    attempt = bench.live["r"]
    bench.budget(max_rollouts=0)
    bench.do(AttemptEnded(attempt.attempt_id, replace(bench.piece("r", 40, "abort"), text="forty words")))
    bench.budget()
    (resumed,) = bench.tick()
    assert len(resumed.token_bytes) == len(attempt.token_bytes) + 39 * TOKEN_BYTES  # the last one is written again
    bench.finish("r", 61)
    assert bench.whole("r") and bench.result("r").text == ""


def test_cancel_during_a_preemption_cancels() -> None:
    bench = Bench(engine(slots=1))
    preempted(bench)
    bench.cancel("a")
    bench.stopped("a", 5)
    assert bench.outcome("a") is Outcome.CANCELLED
    assert bench.result("a").generated_tokens == 5


def test_a_deadline_that_passes_during_a_preemption_ends_it_once_the_engine_let_go() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", rollout_class=BACKGROUND, deadline_seconds=4.0))
    bench.now += 3.0
    bench.submit(spec("urgent"))
    bench.tick()
    bench.tick(2.0)
    assert bench.state("a") is RolloutState.ABORTING
    bench.stopped("a", 5)
    bench.tick()
    assert bench.outcome("a") is Outcome.DEADLINE_EXCEEDED


def test_a_budget_interruption_that_crosses_a_natural_end_is_completed() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.budget(max_rollouts=0)
    assert bench.leaving() == {"a"}
    bench.finish("a", 16, "length")
    assert bench.outcome("a") is Outcome.COMPLETED
    bench.quiet()


def test_an_interruption_that_arrives_after_the_last_token_completes_with_length() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.budget(max_rollouts=0)
    bench.stopped("a", 16)
    result = bench.result("a")
    assert (result.outcome, result.finish_reason, result.complete) == (Outcome.COMPLETED, "length", True)


def test_a_fault_after_the_last_token_completes_and_never_asks_for_zero_tokens() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.fail("a", FaultKind.BROKEN, 16)
    bench.tick()
    assert [one.max_new_tokens for one in bench.dispatched] == [16]
    result = bench.result("a")
    assert (result.outcome, result.finish_reason, result.generated_tokens) == (Outcome.COMPLETED, "length", 16)
    bench.quiet()


def test_a_preempted_replay_is_not_completed_without_its_log_probs() -> None:
    bench = Bench(engine(slots=1))
    bench.submit(spec("a", rollout_class=BACKGROUND, task_type=TaskType.REPLAY))
    bench.tick()
    bench.now += 3.0
    bench.submit(spec("urgent"))
    bench.tick()
    bench.stopped("a")
    assert bench.state("a") is RolloutState.QUEUED


def test_a_restarting_rollout_gives_up_its_tokens() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", rollout_class=BACKGROUND, on_preempt=OnPreempt.RESTART))
    bench.now += 3.0
    bench.submit(spec("urgent"))
    bench.tick()
    bench.stopped("a", 5)
    bench.tick()
    bench.finish("urgent")
    (again,) = bench.tick()
    assert (again.token_bytes, again.max_new_tokens) == (spec("a").token_bytes, 16)
    bench.finish("a", 16)
    assert bench.whole("a") and bench.result("a").generated_tokens == 16


@pytest.mark.parametrize("interruption", ["preempt", "budget"])
def test_an_interruption_that_ends_during_shutdown_ends_the_rollout(interruption: str) -> None:
    bench = Bench(engine(slots=1))
    if interruption == "preempt":
        preempted(bench)
    else:
        bench.run(spec("a"))
        bench.budget(max_rollouts=0)
    bench.do(BeginShutdown(5.0))
    bench.stopped("a", 4)
    assert bench.outcome("a") is Outcome.SHUTDOWN
    assert bench.result("a").generated_tokens == 4
    bench.pass_time(6.0)
    bench.quiet()


def test_a_rollout_that_ran_longer_than_its_queue_ttl_still_gets_to_wait() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", queue_ttl_seconds=10.0))
    bench.pass_time(60.0)
    bench.budget(max_rollouts=0)
    bench.stopped("a", 5)
    bench.pass_time(8.0)
    assert bench.state("a") is RolloutState.QUEUED, "time on the engine is not time in the queue"
    bench.pass_time(4.0)
    assert bench.outcome("a") is Outcome.QUEUE_TIMEOUT
    error = bench.result("a").error
    assert error is not None and "waited 10.0 s" in error.message


# reports that come late, twice, or not at all


def test_late_reports_about_a_dead_attempt_change_nothing() -> None:
    bench = Bench(engine(), engine("e1"))
    bench.run(spec("a"))
    first = bench.live["a"]
    late = bench.piece("a", 9, "stop")
    bench.fail("a", FaultKind.BROKEN, 2)
    bench.tick()
    second = bench.live["a"]
    assert second.attempt_id != first.attempt_id and second.engine_id != first.engine_id  # engine-75
    before = bench.view("a")
    for event in (
        AttemptProgress(first.attempt_id, 9, 8, 0),
        AttemptEnded(first.attempt_id, late),
        AttemptFailed(first.attempt_id, FaultKind.BROKEN, "late"),
    ):
        assert bench.do(event) == []
    assert bench.view("a") == before
    bench.finish("a", 14)
    assert bench.whole("a") and bench.result("a").generated_tokens == 16
    bench.quiet()


def test_a_second_end_of_the_same_attempt_is_ignored() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    one = bench.live["a"]
    piece = bench.piece("a", 4, "stop")
    bench.do(AttemptEnded(one.attempt_id, piece))
    assert bench.do(AttemptEnded(one.attempt_id, piece)) == []
    assert bench.do(AttemptProgress(one.attempt_id, 9, 8, 0)) == []
    assert bench.result("a").generated_tokens == 4
    bench.quiet()


def test_progress_that_goes_back_is_ignored() -> None:
    bench = Bench(engine())
    bench.run(spec("a", want_progress=True))
    bench.write("a", 6)
    bench.write("a", 4)
    assert bench.view("a").generated_tokens == 6


def test_reports_about_an_attempt_that_never_was_are_ignored() -> None:
    bench = Bench(engine())
    assert bench.do(AttemptProgress("f" * 32, 1, 1, 0)) == []
    assert bench.do(AttemptFailed("f" * 32, FaultKind.BROKEN, "who?")) == []


def test_an_unanswered_abort_frees_the_slot_and_blames_the_engine() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a"))
    bench.cancel("a")
    bench.pass_time(9.0)
    assert bench.state("a") is RolloutState.ABORTING
    bench.pass_time(2.0)
    assert bench.outcome("a") is Outcome.CANCELLED
    assert bench.engine("e0").faults == 1 and bench.records("abort_unanswered")
    bench.quiet()


def test_an_unanswered_preemption_sends_the_rollout_back() -> None:
    bench = Bench(engine(slots=1), engine("e1", slots=1))
    bench.run(spec("a", rollout_class=BACKGROUND), spec("b"))
    bench.now += 3.0
    bench.submit(spec("urgent"))
    bench.tick()
    bench.pass_time(11.0)
    assert "a" not in bench.ended
    assert "urgent" in bench.live


def test_an_engine_that_restarts_while_it_aborts_ends_the_abort() -> None:
    bench = Bench(engine(slots=2))
    bench.run(spec("a"), spec("b"))
    bench.cancel("a")
    bench.do(JoinEngine(engine(slots=2, incarnation="2")))
    assert bench.outcome("a") is Outcome.CANCELLED
    assert bench.state("b") is RolloutState.QUEUED
    assert [one.rollout_id for one in bench.tick()] == ["b"]


def test_a_removed_engine_is_forgotten_when_its_last_abort_went_unanswered() -> None:
    bench = Bench(engine(), engine("e1"))
    bench.run(spec("a"), spec("b"), spec("c"))
    bench.do(RemoveEngine("e0"))
    bench.pass_time(11.0)
    assert [one.engine_id for one in bench.core.engine_views()] == ["e1"]


def test_a_lost_engine_keeps_its_attempts_until_they_report() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.do(LoseEngine("e0", "no route"))
    assert bench.state("a") is RolloutState.RUNNING
    bench.finish("a", 4)
    assert bench.outcome("a") is Outcome.COMPLETED


def test_no_progress_aborts_blames_the_engine_and_goes_elsewhere() -> None:
    bench = Bench(engine(), engine("e1"))
    bench.run(spec("a", progress_timeout_seconds=5.0))
    first = bench.live["a"].engine_id
    bench.pass_time(4.0)
    bench.write("a", 3)
    bench.pass_time(4.0)
    assert bench.state("a") is RolloutState.RUNNING
    bench.pass_time(2.0)
    assert bench.said.count(Abort(bench.live["a"].attempt_id, first, AbortReason.NO_PROGRESS)) == 1
    bench.stopped("a", 3)
    assert bench.engine(first).faults == 1
    (again,) = bench.tick()
    assert again.engine_id != first and again.max_new_tokens == 13


def test_a_rollout_that_comes_back_with_all_it_needs_while_stuck_is_completed() -> None:
    bench = Bench(engine())
    bench.run(spec("a", progress_timeout_seconds=5.0))
    bench.pass_time(6.0)
    bench.finish("a", 16)
    assert bench.outcome("a") is Outcome.COMPLETED


def test_attempts_are_spent_by_broken_engines_only() -> None:
    bench = Bench(engine("e0"), engine("e1"), engine("e2"), settings=config(executor={"max_attempts": 2}))
    bench.run(spec("a"))
    for _ in range(5):
        bench.fail("a", FaultKind.BUSY)
        bench.tick(1.0)
    bench.fail("a", FaultKind.BROKEN)
    assert [one.rollout_id for one in bench.tick()] == ["a"]
    bench.fail("a", FaultKind.SILENT)
    error = bench.result("a").error
    assert bench.outcome("a") is Outcome.ENGINE_FAILED and error is not None
    assert "2 of 2 attempts failed" in error.message and error.retry_after_seconds > 0.0
    bench.quiet()


def test_dispatch_50_1000_rollouts_cancelled_at_random_moments_leave_nothing_behind() -> None:
    bench = Bench(engine("e0", 8), engine("e1", 8))
    dice = bench.core._world.rng
    for turn in range(125):
        bench.submit(*[spec(f"r{turn}-{index}") for index in range(8)])
        bench.tick(0.05)
        for rollout_id in list(bench.live):
            if dice.random() < 0.3 and rollout_id not in bench.leaving():
                bench.write(rollout_id, 1 + bench.view(rollout_id).generated_tokens)
        open_ids = [view.rollout_id for view in bench.core.list_rollouts(RUN, bench.now, limit=2000) if not view.result]
        bench.cancel(*[rollout_id for rollout_id in open_ids if dice.random() < 0.5])
        for rollout_id in sorted(bench.leaving()):
            if dice.random() < 0.7:
                bench.stopped(rollout_id, 1)
        bench.acknowledge(*bench.ended)
    bench.cancel(*[view.rollout_id for view in bench.core.list_rollouts(RUN, bench.now, limit=2000)])
    bench.stop_aborted()
    assert len(bench.ended) == 1000
    bench.quiet()
    bench.do(JoinEngine(engine("e1", 8, incarnation="2")))
    started: list[Dispatch] = []
    for turn in range(200):
        bench.submit(spec(f"after-{turn}"))
        started += bench.tick(0.1)
        if len(bench.live) == 8:
            for rollout_id in list(bench.live):
                bench.finish(rollout_id)
    shares = [sum(one.engine_id == name for one in started) for name in ("e0", "e1")]
    assert min(shares) >= 80, f"after a restart the load is not even: {shares}"
