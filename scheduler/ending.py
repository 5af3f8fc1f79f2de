"""The end of a run: what it still has is cancelled, a slice at once, the rest with the next ticks.

Invariants
- Nothing of a run that has ended is dispatched (`budgeting` sees to that), and all of it ends, before the run may go on.
- What an engine finishes before its turn comes is done, as it would have been a moment earlier.

What this module does not know: why the run ends.
"""

from __future__ import annotations

import sys
from typing import Final

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Outcome
from rolloutd.scheduler.world import World

SLICE_ROLLOUTS: Final = 128  # a tick: a few milliseconds


def begin(world: World, run: Run) -> None:
    run.ended = True
    world.ending[run] = list(run.rollouts.values())[::-1]
    _go_on(world, run, SLICE_ROLLOUTS)


def go_on(world: World) -> None:
    """The next slice of each run."""
    for run in list(world.ending):
        _go_on(world, run, SLICE_ROLLOUTS)


def complete(world: World, run: Run) -> None:
    """All that is left of it now: the run goes on."""
    if run in world.ending:
        _go_on(world, run, sys.maxsize)


def _go_on(world: World, run: Run, most: int) -> None:
    left = world.ending[run]
    for _ in range(min(most, len(left))):
        lifecycle.cancel(world, left.pop(), Outcome.RUN_ENDED)
    if not left:
        del world.ending[run]
    world.dirty = True
