"""Many rollouts become critical a slice at a time."""

from __future__ import annotations

from rolloutd.scheduler.events import EndRun, Tick
from rolloutd.scheduler.promoting import SLICE_ROLLOUTS
from rolloutd.scheduler.states import Outcome, RolloutClass
from tests.scheduler.kit import RUN, Bench, engine, spec


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
