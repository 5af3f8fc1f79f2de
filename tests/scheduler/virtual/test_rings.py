"""The compiled core's classes that are `acyclic` are invisible to the garbage collector: a ring of them would stay for ever."""

from __future__ import annotations

import gc
from collections import Counter

from tests.scheduler.virtual.random_world import RandomWorld

SCHEDULES = 15
# Of a publication, a few in a run's life: tracked.
MAY_BE_RINGS = {"EngineUpdate", "PolicyUpdate", "Publication", "Root"}


def test_what_ends_is_freed_by_its_reference_count() -> None:
    """Says something on the plain core, where every class is tracked."""
    rings: Counter[str] = Counter()
    try:
        for seed in range(SCHEDULES):
            gc.collect()
            gc.disable()
            world = RandomWorld(seed, check_every=1 << 30)
            world.play()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            rings.update(
                type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("rolloutd.scheduler")
            )
            gc.garbage.clear()
            gc.set_debug(0)
            del world  # it was alive until here: what it holds is no garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not set(rings) - MAY_BE_RINGS
