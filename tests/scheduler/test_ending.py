"""A run with much waiting ends a slice at a time, and none of it starts meanwhile."""

from __future__ import annotations

from rolloutd.scheduler import trainer
from rolloutd.scheduler.ending import SLICE_ROLLOUTS
from rolloutd.scheduler.events import EndRun, Tick
from rolloutd.scheduler.states import Outcome
from tests.scheduler.kit import RUN, Bench, engine, spec, specs

COUNT = 2 * SLICE_ROLLOUTS + 1


def crowded() -> Bench:
    """One slot, taken; `COUNT` wait."""
    bench = Bench(engine(slots=1))
    bench.run(spec("runs"))
    bench.submit(*specs("q", COUNT))
    bench.tick()
    return bench


def outcomes(bench: Bench) -> list[Outcome]:
    return [bench.result(rollout_id).outcome for rollout_id in bench.ended]


def test_it_ends_a_slice_at_a_time() -> None:
    bench = crowded()
    bench.do(EndRun(RUN))
    counts = [len(bench.ended)]
    while bench.core.wants_tick:
        bench.do(Tick())
        counts.append(len(bench.ended))
    # The one that runs is among the first; it ends when its engine says so.
    assert counts[:3] == [SLICE_ROLLOUTS - 1, 2 * SLICE_ROLLOUTS - 1, COUNT]
    assert set(outcomes(bench)) == {Outcome.RUN_ENDED}


def test_nothing_of_it_starts_before_its_turn() -> None:
    bench = crowded()
    bench.do(EndRun(RUN))
    bench.finish("runs")  # its slot is free
    assert not bench.tick()
    assert len(bench.ended) == COUNT + 1


def test_a_run_that_goes_on_has_ended_before() -> None:
    bench = crowded()
    bench.do(EndRun(RUN))
    bench.configure()
    assert len(bench.ended) == COUNT and not bench.core._world.ending
    bench.finish("runs")
    assert [one.rollout_id for one in bench.run(spec("new"))] == ["new"]


def test_a_second_end_changes_nothing() -> None:
    bench = crowded()
    bench.do(EndRun(RUN))
    bench.do(EndRun(RUN))
    bench.tick()
    assert len(bench.ended) == COUNT


def ends(bench: Bench) -> list[int]:
    """How many rollouts each `EndRun` said that it ends."""
    return [record.fields["rollouts"] for record in bench.records(trainer.RUN_ENDED)]


def test_it_says_how_many_end_also_of_those_whose_turn_comes_later() -> None:
    bench = crowded()
    bench.do(EndRun(RUN))
    bench.do(EndRun(RUN))
    assert ends(bench) == [COUNT + 1, 0]


def test_what_has_ended_or_was_to_end_before_is_not_counted() -> None:
    bench = Bench(engine(slots=4))
    bench.configure(target_mix={"a": 1.0, "b": 1.0}, mix_hold_seconds=30.0)
    bench.run(*[spec(name, stratum=name[0]) for name in ("a0", "a1", "b0", "b1")])
    bench.finish("a0")
    bench.finish("a1")
    assert bench.run_view().held_results == 1
    bench.cancel("b1")
    bench.do(EndRun(RUN))
    assert ends(bench) == [1], "b0"


def test_an_end_that_is_repeated_comes_to_an_end() -> None:
    bench = crowded()
    for _ in range(4):
        bench.do(EndRun(RUN))
        bench.do(Tick())
    assert len(bench.ended) == COUNT


def test_a_tree_ends_a_slice_at_a_time() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("runs"))
    bench.submit(spec("root"), *(spec(f"leaf{n}", parent_rollout_id="root") for n in range(3 * SLICE_ROLLOUTS)))
    bench.do(EndRun(RUN))
    assert len(bench.ended) <= SLICE_ROLLOUTS
    bench.tick()
    assert len(bench.ended) == 3 * SLICE_ROLLOUTS + 1


def test_a_tick_takes_one_slice_however_many_runs_end() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("runs"))
    for run in ("a", "b", "c"):
        bench.submit(*specs(f"{run}-", 3 * SLICE_ROLLOUTS), run=run)
    for run in ("a", "b", "c"):
        bench.do(EndRun(run))
    left = [sum(bench.its_run(run).unfinished for run in ("a", "b", "c"))]
    while bench.core.wants_tick:
        bench.do(Tick())
        left.append(sum(bench.its_run(run).unfinished for run in ("a", "b", "c")))
    assert left == [count * SLICE_ROLLOUTS for count in range(6, -1, -1)]
