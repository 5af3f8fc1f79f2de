"""A group that has what it keeps, and a member at every point of its life: one end, SURPLUS, and nothing left booked.

A race is a list of events. `a` and `k` are a group that keeps one; `LIVES` brings `a` to a point of its life while `k` runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutd.scheduler.actions import GroupFinished
from rolloutd.scheduler.events import AttachConsumer, BeginShutdown, DetachConsumer, EndRun, JoinEngine, UpdateRollouts
from rolloutd.scheduler.spec import RolloutSpec, RolloutUpdate
from rolloutd.scheduler.states import FaultKind, Gate, OnPreempt, Outcome, RolloutState, UpdateMode
from tests.scheduler.kit import REUSABLE, RUN, Bench, config, engine, engines, prompt, spec

SETTINGS = config(executor={"max_attempts": 1})


def member(name: str, **fields: object) -> RolloutSpec:
    return spec(name, group_id="g", group_size=2, group_keep=1, token_bytes=prompt(name, 64), **fields)


def one_runs() -> Bench:
    """`k` runs alone; the budget lets nothing else in."""
    bench = Bench(engine(slots=4), settings=SETTINGS)
    bench.run(member("k"))
    return bench


def queued(bench: Bench) -> None:
    bench.budget(max_rollouts=1)
    bench.submit(member("a"))
    bench.tick()


def held(bench: Bench) -> None:
    """`a` waits for the first token of `lead`, which has the same prompt."""
    bench.submit(spec("lead", rollout_class=REUSABLE, token_bytes=prompt("a", 64)))
    bench.tick()
    bench.submit(member("a", rollout_class=REUSABLE))
    bench.tick()
    assert bench.view("a").gate is Gate.HELD_FOR_PREFIX


def dispatched(bench: Bench) -> None:
    bench.submit(member("a"))
    bench.tick()


def running(bench: Bench) -> None:
    bench.run(member("a"))
    bench.write("a", 3)


def never_preempted(bench: Bench) -> None:
    bench.run(member("a", on_preempt=OnPreempt.NEVER))
    bench.write("a", 3)


def interrupted(bench: Bench) -> None:
    """Asked to stop by a budget, and still there."""
    running(bench)
    bench.budget(max_rollouts=1)
    if "a" not in bench.leaving():
        bench.budget(max_rollouts=0)


def resumed(bench: Bench) -> None:
    """Stopped once with five tokens, and running again from there."""
    running(bench)
    bench.budget(max_rollouts=0)
    bench.stopped("a", 5)
    if "k" in bench.leaving():
        bench.stopped("k", 1)
    bench.budget()
    for one in bench.tick():
        bench.write(one.rollout_id, 1)


def requeued(bench: Bench) -> None:
    """Back in the queue with five tokens."""
    running(bench)
    bench.budget(max_rollouts=0)
    bench.stopped("a", 5)


LIVES = [queued, held, dispatched, running, never_preempted, interrupted, resumed, requeued]
LAST_WORDS = ["aborted", "finished", "broken", "silent", "refused", "unanswered", "restarted"]


@pytest.mark.parametrize("last_word", LAST_WORDS)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_what_is_not_needed_any_more_ends_once_at_every_point_of_a_life(
    life: Callable[[Bench], None], last_word: str
) -> None:
    bench = one_runs()
    life(bench)
    bench.finish("k", 4)
    bench.tick()
    was_live = "a" in bench.live
    assert was_live or bench.outcome("a") is Outcome.SURPLUS, "who waits ends at once"
    if was_live:
        assert bench.state("a") is RolloutState.ABORTING and "a" in bench.leaving()
        words: dict[str, Callable[[], object]] = {
            "aborted": lambda: bench.stopped("a", 3),
            "finished": lambda: bench.finish("a", 4),
            "broken": lambda: bench.fail("a", FaultKind.BROKEN, 3),
            "silent": lambda: bench.fail("a", FaultKind.SILENT),
            "refused": lambda: bench.fail("a", FaultKind.REFUSED),
            "unanswered": lambda: None,
            "restarted": lambda: bench.do(JoinEngine(engine(slots=4, incarnation="2"))),
        }
        words[last_word]()
    bench.pass_time(15.0)  # past the abort timeout
    result = bench.result("a")
    assert (result.outcome, result.complete) == (Outcome.SURPLUS, False)
    assert result.error is not None and result.error.reason == "SURPLUS" and "'g'" in result.error.message
    assert bench.whole("a"), "what it wrote is there, once"
    if was_live and last_word == "finished":
        assert result.finish_reason == "stop" and result.generated_tokens >= 4
    (end,) = bench.heard(GroupFinished)
    assert end == GroupFinished("g", True, ("k", "a"), (), ("a",))
    if "lead" in bench.live:
        bench.finish("lead")
    bench.tick()
    bench.quiet()
    bench.acknowledge("k", "a", "lead")
    assert not bench.its_run().groups and bench.run_view().undelivered_bytes == 0


def cancelled(bench: Bench) -> None:
    bench.cancel("a")


def deadline(bench: Bench) -> None:
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("a", deadline_seconds=0.5),)))
    bench.tick(1.0)


def run_ended(bench: Bench) -> None:
    bench.do(EndRun(RUN))


def shut_down(bench: Bench) -> None:
    bench.do(BeginShutdown(1.0))
    bench.tick(1.5)


OTHER_ENDS = [
    (cancelled, Outcome.CANCELLED),
    (deadline, Outcome.DEADLINE_EXCEEDED),
    (run_ended, Outcome.RUN_ENDED),
    (shut_down, Outcome.SHUTDOWN),
]


@pytest.mark.parametrize(("other", "outcome"), OTHER_ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_first_word_stands_between_surplus_and_what_its_caller_says(
    other: Callable[[Bench], None], outcome: Outcome
) -> None:
    surplus_first = one_runs()
    running(surplus_first)
    surplus_first.finish("k")
    other(surplus_first)
    surplus_first.stopped("a", 3)
    assert surplus_first.result("a").outcome is Outcome.SURPLUS
    surplus_first.quiet()
    other_first = one_runs()
    running(other_first)
    other(other_first)
    other_first.finish("k")
    other_first.stopped("a", 3)
    ended = other_first.result("a").outcome
    assert ended in (outcome, Outcome.SURPLUS) and (ended is outcome or outcome is Outcome.SHUTDOWN)
    other_first.quiet()


def test_two_that_end_in_one_moment_leave_exactly_what_the_group_keeps() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=4, group_keep=2))
    for name in ("g/2", "g/0", "g/1", "g/3"):  # the last two were done before their aborts arrived
        bench.finish(name)
    outcomes = [bench.outcome(f"g/{index}") for index in range(4)]
    assert outcomes == [Outcome.COMPLETED, Outcome.SURPLUS, Outcome.COMPLETED, Outcome.SURPLUS]
    bench.quiet()


def test_all_tokens_and_a_lost_last_word_do_not_make_one_more_than_the_group_keeps() -> None:
    bench = one_runs()
    bench.run(member("a"))
    bench.finish("k")
    bench.fail("a", FaultKind.BROKEN, 16)
    assert bench.outcome("a") is Outcome.SURPLUS and bench.result("a").generated_tokens == 16
    bench.quiet()


@pytest.mark.parametrize("mode", UpdateMode)
def test_a_publication_between_the_abort_and_its_end_changes_nothing(mode: UpdateMode) -> None:
    for surplus_first in (True, False):
        bench = one_runs()
        running(bench)
        if surplus_first:
            bench.finish("k")
            bench.publish(1, mode=mode)
        else:
            bench.publish(1, mode=mode)
            if "k" in bench.live:
                bench.finish("k")  # it was done before the engine paused
        if "a" in bench.live:
            bench.stopped("a", 3)
        bench.finish_updates()
        for _ in range(3):
            for one in bench.tick():
                bench.write(one.rollout_id, 1)
            for name in list(bench.live):
                bench.finish(name)
        ends = {bench.outcome("a"), bench.outcome("k")}
        assert ends == {Outcome.COMPLETED, Outcome.SURPLUS}
        bench.quiet()


def test_members_of_two_consumers_each_hear_of_their_own_end() -> None:
    bench = Bench(engine(slots=4))
    bench.do(AttachConsumer(RUN, "rank-1"))
    bench.submit(member("k"))
    bench.submit(member("a"), consumer="rank-1")
    for one in bench.tick():
        bench.write(one.rollout_id, 1)
    bench.do(DetachConsumer(RUN, "rank-1"))
    bench.finish("k")
    bench.stopped("a", 2)
    assert len(bench.its_run().consumers["rank-1"].kept) == 2, "its result and the end of the group wait for it"
    bench.do(AttachConsumer(RUN, "rank-1"))
    assert bench.outcome("a") is Outcome.SURPLUS and len(bench.heard(GroupFinished, "rank-1")) == 1
    bench.acknowledge("k")
    bench.acknowledge("a", consumer="rank-1")
    bench.quiet()
    assert not bench.its_run().groups and bench.run_view().undelivered_bytes == 0


def test_what_joins_a_group_that_has_enough_ends_at_once_and_never_runs() -> None:
    bench = one_runs()
    bench.finish("k")
    bench.acknowledge("k")
    bench.submit(member("a"))
    assert bench.outcome("a") is Outcome.SURPLUS and bench.result("a").attempts == 0
    (end,) = bench.heard(GroupFinished)
    assert end.complete and end.surplus_rollout_ids == ("a",)
    bench.quiet()


def test_a_kept_one_that_became_too_old_before_anybody_took_it_leaves_its_group_partial() -> None:
    bench = Bench(*engines(1, 4))
    bench.configure(max_staleness=0)
    bench.run(member("k"), member("a"))
    bench.do(DetachConsumer(RUN, "rank-0"))
    bench.finish("k")
    bench.stopped("a", 3)
    bench.published(1)
    bench.do(AttachConsumer(RUN, "rank-0"))
    assert (bench.outcome("k"), bench.outcome("a")) == (Outcome.STALE, Outcome.SURPLUS)
    end = bench.heard(GroupFinished)[-1]
    assert not end.complete and (end.failed_rollout_ids, end.surplus_rollout_ids) == (("k",), ("a",))
    bench.quiet()
