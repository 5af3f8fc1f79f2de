"""The end of a run: what it still has is cancelled, a slice at once, the rest with the next ticks.

Invariants
- Nothing of a run that has ended is dispatched (`budgeting` sees to that), and all of it ends, before the run may go on.
- What an engine finishes before its turn comes is done, as it would have been a moment earlier.
- However many runs end, a tick takes one slice.

What this module does not know: why the run ends.
"""

from __future__ import annotations

import sys
from typing import Final

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Outcome, RolloutState
from rolloutd.scheduler.world import World

SLICE_ROLLOUTS: Final = 128  # a tick: a few milliseconds


def begin(world: World, run: Run) -> None:
    run.ended = True
    if run in world.ending:
        return
    left = [one for one in run.rollouts.values() if one.state is not RolloutState.FINISHED]
    left.reverse()
    if left:
        world.ending[run] = left
        _end(world, run, SLICE_ROLLOUTS)


def go_on(world: World) -> None:
    """The next slice, from run to run."""
    left = SLICE_ROLLOUTS
    for run in list(world.ending):
        if left <= 0:
            return
        left -= _end(world, run, left)


def complete(world: World, run: Run) -> None:
    """All that is left of it now: the run goes on."""
    if run in world.ending:
        _end(world, run, sys.maxsize)


def _end(world: World, run: Run, most: int) -> int:
    left = world.ending.pop(run)
    count = min(most, len(left))
    for _ in range(count):
        lifecycle.end_one(world, left.pop(), Outcome.RUN_ENDED, "run_ended")
    if left:
        world.ending[run] = left  # behind the others
    world.dirty = True
    return count
