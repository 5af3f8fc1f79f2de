"""Reports of engines that come late, twice, or not at all: nothing changes twice, and silence frees what it held."""

from __future__ import annotations

from rolloutd.scheduler.actions import Abort
from rolloutd.scheduler.events import AttemptEnded, AttemptFailed, AttemptProgress, JoinEngine, LoseEngine, RemoveEngine
from rolloutd.scheduler.states import AbortReason, FaultKind, Outcome, RolloutState
from tests.scheduler.kit import BACKGROUND, Bench, config, engine, spec


def test_late_reports_about_a_dead_attempt_change_nothing() -> None:
    bench = Bench(engine(), engine("e1"))
    bench.run(spec("a"))
    first = bench.live["a"]
    late = bench.piece("a", 9, "stop")
    bench.fail("a", FaultKind.BROKEN, 2)
    bench.tick()
    second = bench.live["a"]
    assert second.attempt_id != first.attempt_id and second.engine_id != first.engine_id
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
