"""The compiled core's classes that are `acyclic` are invisible to the garbage collector: a ring of them would stay for ever."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

from rolloutd.scheduler.events import DetachConsumer, EndRun
from tests.scheduler.kit import CONSUMER, RUN, Bench, engine, specs
from tests.scheduler.virtual.random_world import RandomWorld

SCHEDULES = 15
# Of a publication, a few in a run's life: tracked.
MAY_BE_RINGS = {"EngineUpdate", "PolicyUpdate", "Publication", "Root"}


def rings_of(play: Callable[[], object]) -> Counter[str]:
    """Names of the core's classes whose instances only a collection frees, after this was played. What it returns is alive."""
    gc.collect()
    gc.disable()
    try:
        alive = play()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        del alive
        return Counter(
            type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("rolloutd.scheduler")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_what_ends_is_freed_by_its_reference_count() -> None:
    """Says something on the plain core, where every class is tracked."""
    rings: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world = RandomWorld(seed, check_every=1 << 30)
        rings.update(rings_of(lambda world=world: (world.play(), world)))  # type: ignore[misc]
    assert not set(rings) - MAY_BE_RINGS


def test_a_run_that_is_forgotten_leaves_none_of_its_work() -> None:
    def play() -> Bench:
        bench = Bench(engine())
        bench.run(*specs("r", 4))
        for rollout_id in list(bench.live):
            bench.finish(rollout_id)
        bench.run()
        for rollout_id in list(bench.live):
            bench.finish(rollout_id)
        bench.acknowledge(*[f"r{number}" for number in range(4)])
        bench.do(EndRun(RUN))
        bench.do(DetachConsumer(RUN, CONSUMER))
        bench.pass_time(3.0)
        assert RUN not in bench.core._world.runs
        return bench

    assert not {"Entry", "Lane", "Rollout", "Attempt", "Group", "Timer", "Node"} & set(rings_of(play))
