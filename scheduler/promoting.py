"""Rollouts become CRITICAL when the trainer reaches the step that needs them: a slice at once, the rest with the next ticks.

Thousands may be needed by one step, and each of them changes its place in the queue.

Invariants
- Whoever is needed by the run's step or an earlier one is CRITICAL, or has its turn with one of the next ticks.
- Earlier steps first; within one step in the order of ids.

What this module does not know: what classes mean to the placement.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import budgeting, lifecycle
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutClass
from rolloutd.scheduler.world import World

SLICE_ROLLOUTS: Final = 128  # a tick: a few milliseconds


def begin(world: World, run: Run) -> None:
    """The run's step may have advanced, or somebody may be needed earlier than before."""
    if any(step <= run.step for step in run.by_step):
        world.promoting.setdefault(run, 0)
        _go_on(world, run)


def go_on(world: World) -> None:
    """The next slice of each run."""
    for run in list(world.promoting):
        _go_on(world, run)


def _go_on(world: World, run: Run) -> None:
    reached = run.step
    left = SLICE_ROLLOUTS
    for step in sorted(known for known in run.by_step if known <= reached):
        for rollout_id in sorted(run.by_step[step])[:left]:
            lifecycle.change_class(world, run.rollouts[rollout_id], RolloutClass.CRITICAL, f"step {reached} needs it")
            left -= 1
        if not left:
            break
    world.promoting[run] += SLICE_ROLLOUTS - left
    budgeting.enforce(world, run)  # running work changed its class, and classes have ceilings
    world.dirty = True
    if not any(step <= reached for step in run.by_step):
        promoted = world.promoting.pop(run)
        world.record("info", "promoted", run=run.run_id, step=reached, rollouts=promoted)
