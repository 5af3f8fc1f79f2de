"""Queues in an order of their own again after the weights that keys are made of changed: a slice with each tick.

A key costs some 20 us, and a run may have 100,000 prompts waiting; all at once would keep everybody waiting for seconds.

Invariants
- Each entry that waited when weights changed is looked at once, whatever becomes of it meanwhile; what joins later has its key by
  the new weights anyway. Until its turn an entry is where its old key put it.
- Ticks are wanted until all is done.

What this module does not know: why weights changed.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import queueing
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.world import World

SLICE_ENTRIES: Final = 128  # a tick: a few milliseconds


def begin(world: World, run: Run) -> None:
    """Everything of this run that waits gets a fresh key."""
    for entry in run.entries.values():
        world.reordering[entry] = None
    world.dirty = True


def go_on(world: World) -> None:
    """The next slice."""
    waiting = world.reordering
    for _ in range(min(SLICE_ENTRIES, len(waiting))):
        entry = next(iter(waiting))
        del waiting[entry]
        if entry.backlog is not None and not entry.held:
            queueing.order(world, entry)
