"""Rollouts become CRITICAL when the trainer reaches the step that needs them: a slice at once, the rest with the next ticks.

Thousands may be needed by one step, and each of them changes its place in the queue.

Invariants
- Whoever was needed by the run's step or an earlier one when `begin` was called is CRITICAL, or has its turn with one of the
  next ticks, unless the trainer gave it a class meanwhile.
- What runs goes first, so that no budget interrupts it for what it is no longer; then earlier steps, then ids.
- However many runs there are, a tick takes one slice.

What this module does not know: what classes mean to the placement.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import budgeting, lifecycle
from rolloutd.scheduler.promotion import Promotion
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutClass, RolloutState
from rolloutd.scheduler.world import World

SLICE_ROLLOUTS: Final = 128  # a tick: a few milliseconds


def begin(world: World, run: Run) -> None:
    """The run's step advanced, or somebody is needed earlier than before."""
    due = sorted(step for step in run.by_step if step <= run.step)
    if not due:
        return
    began = run in world.promoting
    promotion = world.promoting.setdefault(run, Promotion())
    found = [rollout_id for step in due for rollout_id in sorted(run.by_step[step])]
    for rollout_id in sorted(found, key=lambda one: run.rollouts[one].attempt is None):
        promotion.left[rollout_id] = None
    world.dirty = True
    if not began:
        _promote(world, run, SLICE_ROLLOUTS)


def settle(world: World, run: Run, rollout_id: str) -> None:
    """The trainer gave it a class: that stands."""
    promotion = world.promoting.get(run)
    if promotion is not None:
        promotion.left.pop(rollout_id, None)


def go_on(world: World) -> None:
    """The next slice, from run to run."""
    left = SLICE_ROLLOUTS
    for run in list(world.promoting):
        if left <= 0:
            return
        left -= _promote(world, run, left)


def _promote(world: World, run: Run, most: int) -> int:
    promotion = world.promoting.pop(run)
    count = min(most, len(promotion.left))
    for _ in range(count):
        rollout_id = next(iter(promotion.left))
        del promotion.left[rollout_id]
        rollout = run.rollouts.get(rollout_id)
        if rollout is None or rollout.state is RolloutState.FINISHED or rollout.needed_by_step is None:
            continue
        if rollout.needed_by_step <= run.step:
            promotion.done += rollout.rollout_class is not RolloutClass.CRITICAL
            lifecycle.change_class(world, rollout, RolloutClass.CRITICAL, f"step {run.step} needs it")
    budgeting.enforce(world, run)  # running work changed its class, and classes have ceilings
    world.dirty = True
    if promotion.left:
        world.promoting[run] = promotion  # behind the others
    elif promotion.done:
        world.record("info", "promoted", run=run.run_id, step=run.step, rollouts=promotion.done)
    return count
