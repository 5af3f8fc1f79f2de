"""Many rollouts become critical a slice at a time."""

from __future__ import annotations

from rolloutd.scheduler.events import EndRun, Tick, UpdateRollouts
from rolloutd.scheduler.promoting import SLICE_ROLLOUTS
from rolloutd.scheduler.spec import RolloutUpdate
from rolloutd.scheduler.states import Outcome, RolloutClass
from tests.scheduler.kit import BACKGROUND, REUSABLE, RUN, Bench, engine, spec


def waiting(bench: Bench, count: int, step: int = 5) -> None:
    """Reusable rollouts that a step needs, behind one that runs."""
    bench.run(spec("runs"))
    wanted = [
        spec(f"q{number:04d}", rollout_class=RolloutClass.REUSABLE, needed_by_step=step) for number in range(count)
    ]
    bench.submit(*wanted)
    bench.tick()


def critical(bench: Bench) -> int:
    return sum(one.rollout_class is RolloutClass.CRITICAL for one in bench.its_run().rollouts.values()) - 1


def test_a_few_are_critical_at_once() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, 3)
    bench.step(5)
    assert critical(bench) == 3


def test_many_are_critical_after_some_ticks() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, 2 * SLICE_ROLLOUTS + 1)
    bench.step(4)
    assert critical(bench) == 0
    bench.step(5)
    counts = [critical(bench)]
    while bench.core.wants_tick:
        bench.do(Tick())
        counts.append(critical(bench))
    assert counts[:3] == [SLICE_ROLLOUTS, 2 * SLICE_ROLLOUTS, 2 * SLICE_ROLLOUTS + 1]
    told = [one.fields["rollouts"] for one in bench.records("promoted")]
    assert told == [2 * SLICE_ROLLOUTS + 1]


def test_a_later_step_takes_over_what_an_earlier_one_began() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, SLICE_ROLLOUTS + 1)
    bench.submit(spec("later", rollout_class=RolloutClass.BACKGROUND, needed_by_step=6))
    bench.step(5)
    bench.step(6)
    bench.tick()
    assert critical(bench) == SLICE_ROLLOUTS + 2


def test_those_that_end_before_their_turn_are_left_alone() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, 2 * SLICE_ROLLOUTS)
    bench.step(5)
    last = f"q{2 * SLICE_ROLLOUTS - 1:04d}"
    bench.cancel(last)
    bench.do(EndRun(RUN))
    bench.tick()
    assert bench.result(last).outcome is Outcome.CANCELLED
    assert bench.result("q0000").outcome is Outcome.RUN_ENDED
    assert not bench.core._world.promoting


def test_the_trainers_word_stands_whether_or_not_the_promotion_is_over() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, 3 * SLICE_ROLLOUTS)
    bench.step(5)
    last = f"q{3 * SLICE_ROLLOUTS - 1:04d}"
    for rollout_id in ("q0000", last):  # its turn was, and is to come
        bench.do(UpdateRollouts(RUN, (RolloutUpdate(rollout_id, rollout_class=BACKGROUND),)))
    bench.tick()
    assert critical(bench) == 3 * SLICE_ROLLOUTS - 2
    assert {bench.view(one).rollout_class for one in ("q0000", last)} == {BACKGROUND}


def test_a_budget_that_shrinks_meanwhile_does_not_take_what_the_step_needs_first() -> None:
    bench = Bench(engine(slots=2))
    bench.run(spec("z", rollout_class=BACKGROUND, needed_by_step=5))  # the last by its id
    bench.run(spec("nobody needs it", rollout_class=REUSABLE))
    bench.submit(*(spec(f"q{n}", rollout_class=BACKGROUND, needed_by_step=5) for n in range(2 * SLICE_ROLLOUTS)))
    bench.step(5)
    bench.budget(max_rollouts=1)
    assert bench.leaving() == {"nobody needs it"}


def test_updates_of_many_promote_a_slice_at_a_time() -> None:
    bench = Bench(engine(slots=1))
    waiting(bench, 4 * SLICE_ROLLOUTS, step=9)
    bench.step(5)
    wanted = [RolloutUpdate(f"q{n:04d}", needed_by_step=5) for n in range(4 * SLICE_ROLLOUTS)]
    bench.do(UpdateRollouts(RUN, tuple(wanted)))
    assert critical(bench) == SLICE_ROLLOUTS
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("q0000", needed_by_step=4),)))
    assert critical(bench) == SLICE_ROLLOUTS
    bench.tick()
    assert critical(bench) == 4 * SLICE_ROLLOUTS and len(bench.records("promoted")) == 1
