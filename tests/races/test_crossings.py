"""Two events that cross, in both orders: an end, an interruption or a fault, and what the engine was writing meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolloutd.scheduler.actions import Abort
from rolloutd.scheduler.events import AttemptEnded, BeginShutdown
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import AbortReason, Code, FaultKind, OnPreempt, Outcome, RolloutState, TaskType
from tests.scheduler.kit import BACKGROUND, Bench, engine, spec


def test_cancel_then_finish_is_cancelled_with_its_tokens() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.cancel("a")
    assert bench.said[-1] == Abort(bench.live["a"].attempt_id, "e0", AbortReason.CANCEL)
    bench.finish("a", 7)
    assert bench.outcome("a") is Outcome.CANCELLED and bench.whole("a")
    assert bench.result("a").generated_tokens == 7
    bench.quiet()


def test_finish_then_cancel_is_completed() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.finish("a", 7)
    bench.cancel("a")
    assert bench.outcome("a") is Outcome.COMPLETED
    bench.quiet()


def test_cancel_before_anything_was_ticked() -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    bench.cancel("a")
    assert bench.outcome("a") is Outcome.CANCELLED and not bench.tick()
    bench.quiet()


def test_a_deadline_that_passed_before_the_first_tick_dispatches_nothing() -> None:
    bench = Bench(engine())
    bench.submit(spec("a", deadline_seconds=0.5))
    assert not bench.tick(1.0)
    assert bench.outcome("a") is Outcome.DEADLINE_EXCEEDED
    error = bench.result("a").error
    assert error is not None and error.code is Code.DEADLINE_EXCEEDED
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
