"""Samples that are not on their way any more, and who is let in for them: see `staleness`.

Invariants
- A sample leaves the window at most once: `in_window` is false from then on.
- Whatever makes room lets in who waits, one after the other, until the one that goes first does not fit.
- Of the samples of a trainer that was replaced only those that still run stay on their way.

What this module does not know: when a group may be let in; `staleness.Window` says.
"""

from __future__ import annotations

from rolloutd.scheduler import queueing
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import RunSettings
from rolloutd.scheduler.staleness import Window, bound, key_of
from rolloutd.scheduler.world import World


def configure(world: World, run: Run, settings: RunSettings) -> list[Entry]:
    """Put a run's bound in force; returns entries that have to be ordered again."""
    window = run.window
    waiting = window.leave_all() if window is not None else []
    if settings.max_staleness is None or not settings.batch_samples:
        run.window = None
    else:
        capacity = (settings.max_staleness + 1) * settings.batch_samples
        if window is None:
            run.window = Window(capacity)
        else:
            window.capacity = capacity
    return waiting


def ended(world: World, rollout: Rollout) -> None:
    """A rollout ended: one without a result to train on is not on its way any more."""
    result = rollout.result
    if result is None or result.complete:
        return
    group = rollout.group
    if group is not None and group.spare > 0:
        rollout.in_window = False  # what its group keeps may still come: nothing was reserved for this one
    else:
        consumed(world, rollout)


def consumed(world: World, rollout: Rollout) -> None:
    """The trainer has it, or nobody ever will."""
    run = rollout.run
    window = run.window
    if window is not None and bound(rollout) and rollout.in_window:
        rollout.in_window = False
        if window.consume(key_of(rollout)[0]):
            let_in(world, run)


def group_over(world: World, run: Run, group_id: str) -> None:
    if run.window is not None and run.window.drop(group_id):
        let_in(world, run)


def restarted(world: World, run: Run) -> None:
    """A trainer started again: it will not take the samples that were made for the one before, unless they still run."""
    window = run.window
    if window is None:
        return
    let_in_before = set(window.left)
    window.left.clear()
    window.open_to.clear()
    window.outstanding = 0
    for rollout in run.rollouts.values():
        key, samples = key_of(rollout)
        if rollout.result is None and key in let_in_before and rollout.in_window:
            group = rollout.group
            most = samples if group is None or not group.keep else group.keep - group.completed
            if window.left.get(key, 0) < most:
                window.left[key] = window.left.get(key, 0) + 1
                window.open_to[key] = max(
                    samples, window.left[key]
                )  # the rest of it was reserved, too, and has results
                window.outstanding += 1
        elif rollout.result is not None:
            rollout.in_window = False
    let_in(world, run)


def settle(world: World) -> None:
    """Those left that stood before others."""
    stirred, world.stirred = world.stirred, {}
    for run in stirred:
        let_in(world, run)


def let_in(world: World, run: Run) -> None:
    """Room came free: those that wait go on, first those that go first."""
    window = run.window
    while window is not None:
        entry = window.next()
        if entry is None or not entry.members:
            return
        key, samples = key_of(entry.members[0])
        if not window.admit(key, samples):
            return
        for one in window.leave_together(key):
            queueing.wake(world, one)
