"""From a rollout's end to its consumer's outbox: at once, or in the order of the run's target mix (`mix_hold`).

Invariants
- Every result that is kept back goes into the outbox once: when its turn comes, when its time is over, or at once when keeping it
  would help nobody: the run has ended or the server shuts down, it was cancelled, somebody waits for it.
- Nothing is kept back that somebody waits for: turns of sessions and nodes of a tree (the next one is made from them), what has a
  deadline, single calls, what a waiting trainer needs for its step, what belongs to no step where it needs samples, and whatever
  did not complete.
- A result that became too old meanwhile is withheld or marked as it goes, like one that is delivered once more.
- A group's end goes behind the last of its results, to the consumer of the member that ended last; where that one is gone (a
  single call), to the consumer of the result that went last.

What this module does not know: why a rollout ended, and streams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rolloutd.scheduler import mix, versions
from rolloutd.scheduler.actions import Finished, GroupFinished
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.mix_hold import MOST_RESULTS, MixHold, Place
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import RunSettings
from rolloutd.scheduler.states import OnStale, Outcome, RolloutState, TrainerState
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

UNARY: Final = "unary/"  # how the names of those begin who are made for a single call, and forgotten once they are gone
HELD_PART: Final = 4  # of what a run may have undelivered, at most one byte in so many is kept back


def configure(world: World, run: Run, settings: RunSettings) -> None:
    """Put a run's settings in force, after its `settings` are these."""
    hold = run.mix_hold
    wanted = bool(settings.target_mix) and settings.mix_hold_seconds > 0.0
    if hold is not None and wanted and hold.target == dict(settings.target_mix):
        hold.seconds = settings.mix_hold_seconds
        settle(world, run)
        return
    if hold is not None:
        let_all_go(world, run)
        world.timers.cancel(hold.timer)
        run.mix_hold = None
    if wanted:
        hold = run.mix_hold = MixHold(settings.target_mix, settings.mix_hold_seconds)
        for rollout in run.rollouts.values():
            if rollout.state is not RolloutState.FINISHED:
                hold.note_state(rollout, None, rollout.state)


def hand_over(world: World, run: Run, rollout: Rollout) -> None:
    """A rollout has ended: its result goes to its consumer now, or later. The caller settles when all is noted of it."""
    hold = run.mix_hold
    result = rollout.result
    if result is None:
        raise AssertionError(f"{rollout.rollout_id} has no result; story: {rollout.tell()}")
    if hold is not None and _must_wait(world, run, hold, rollout, result):
        hold.keep(rollout, world.now, result.size_bytes)
        run.undelivered_bytes += result.size_bytes
        run.undelivered_results += 1
        if rollout.group is not None:
            rollout.group.held += 1
        rollout.note(world.now, f"kept back: stratum {rollout.spec.stratum!r} is ahead of the target mix")
    else:
        _deliver(world, run, rollout, result)


def group_ended(world: World, run: Run, group: Group, consumer_id: str) -> None:
    """All members have ended: say so behind the last of their results."""
    group.consumer_id = consumer_id
    _tell_group(world, run, group)


def reported(world: World, run: Run) -> None:
    """The trainer said something new of itself: what it waits for by now goes."""
    hold = run.mix_hold
    if hold is not None and run.report.trainer_state is TrainerState.WAITING:
        for rollout in [one for one in hold.held if _trainer_waits(run, one)]:
            _release(world, run, hold, rollout)
    settle(world, run)


def settle(world: World, run: Run) -> None:
    """What need not wait any more goes. Call after anything that may have changed that; after a report, call `reported`."""
    hold = run.mix_hold
    if hold is None:
        return
    if run.ended or world.shutting_down:
        let_all_go(world, run)
        return
    if hold.held:
        _let_in_order(world, run, hold)
    _arm(world, run, hold)


def _let_in_order(world: World, run: Run, hold: MixHold) -> None:
    """Those go whose turn it is, and those over a bound."""
    _look_at_places(world, run, hold)
    stuck = _stuck(world, run)
    while True:
        rollout_or_none = hold.next(stuck)
        if rollout_or_none is None:
            oldest = hold.oldest()
            full = len(hold.held) > MOST_RESULTS or hold.size_bytes > _most_bytes(world, run)
            if oldest is None or not (full or world.now >= hold.held[oldest] + hold.seconds):
                break
            rollout_or_none = oldest
        _release(world, run, hold, rollout_or_none)


def let_go(world: World, run: Run, rollout: Rollout) -> bool:
    """Deliver one result that is kept back; False where it is not."""
    hold = run.mix_hold
    if hold is None or rollout not in hold.held:
        return False
    _release(world, run, hold, rollout)
    _arm(world, run, hold)
    return True


def let_all_go(world: World, run: Run) -> None:
    hold = run.mix_hold
    if hold is None:
        return
    for rollout in list(hold.held):
        _release(world, run, hold, rollout)
    _arm(world, run, hold)


def _release(world: World, run: Run, hold: MixHold, rollout: Rollout) -> None:
    """Deliver one result that is kept back. The caller arms the timer of the rest."""
    result = rollout.result
    if result is None:
        raise AssertionError(f"{rollout.rollout_id} is kept back without a result; story: {rollout.tell()}")
    hold.leave(rollout, result.size_bytes)
    run.undelivered_bytes -= result.size_bytes
    run.undelivered_results -= 1
    aged = too_old_now(run, rollout)
    if aged is not None:
        rollout.result = result = aged
    group = rollout.group
    if group is not None:
        group.held -= 1
        if aged is not None and not aged.complete:
            group.note_stale(rollout.rollout_id)
    _deliver(world, run, rollout, result)
    if group is not None and group.notified:
        if group.consumer_id not in run.consumers:
            group.consumer_id = rollout.consumer_id
        _tell_group(world, run, group)


def too_old_now(run: Run, rollout: Rollout) -> RolloutResult | None:
    """The result of a rollout that became too old since it ended, as it is to be delivered; None where it did not."""
    result = rollout.result
    if result is None or not result.complete or result.stale:
        return None
    lineage = run.lineage(rollout.spec.pool)
    if not versions.too_old(lineage, rollout):
        return None
    run.stale_results += 1
    if run.settings.on_stale is OnStale.FLAG:
        return replace(result, stale=True, policy_version=lineage.version)
    mix.give_back(rollout)
    return replace(
        result.without_tokens(),
        outcome=Outcome.STALE,
        error=versions.stale_error(lineage, rollout),
        policy_version=lineage.version,
        stale=True,
    )


def keep_event(world: World, run: Run, consumer_id: str, event: Finished | GroupFinished) -> None:
    """Into the outbox, and to the stream where there is one."""
    consumer = run.consumers[consumer_id]
    cursor = consumer.keep(event, world.now)
    run.undelivered_bytes += consumer.kept[cursor].size_bytes
    if isinstance(event, Finished):
        run.undelivered_results += 1
    world.deliver(run, consumer_id, cursor, event)


def _deliver(world: World, run: Run, rollout: Rollout, result: RolloutResult) -> None:
    if run.mix_hold is not None and result.complete:
        run.mix_hold.note_delivered(rollout)
    run.consumers[rollout.consumer_id].unfinished -= 1
    keep_event(world, run, rollout.consumer_id, Finished(result))


def _tell_group(world: World, run: Run, group: Group) -> None:
    if group.held or group.told:
        return
    group.told = True
    event = GroupFinished(
        group.group_id, group.is_complete, tuple(group.members), tuple(group.failed), tuple(group.surplus)
    )
    keep_event(world, run, group.consumer_id, event)


def _must_wait(world: World, run: Run, hold: MixHold, rollout: Rollout, result: RolloutResult) -> bool:
    if not _may_wait(world, run, hold, rollout, result):
        return False
    _look_at_places(world, run, hold)
    return hold.is_ahead(rollout, _stuck(world, run))


def _may_wait(world: World, run: Run, hold: MixHold, rollout: Rollout, result: RolloutResult) -> bool:
    spec = rollout.spec
    return (
        result.complete
        and not run.ended
        and not world.shutting_down
        and hold.counts(rollout)
        and not spec.session_id
        and not spec.parent_rollout_id
        and rollout.deadline_at is None
        and not rollout.consumer_id.startswith(UNARY)
        and not (run.report.trainer_state is TrainerState.WAITING and _trainer_waits(run, rollout))
    )


def _trainer_waits(run: Run, rollout: Rollout) -> bool:
    """Whether a trainer that waits could go on with this: its step needs it, or it needs samples and this is for no step."""
    step = rollout.needed_by_step
    return run.report.samples_needed > 0 if step is None else step <= run.step


def _look_at_places(world: World, run: Run, hold: MixHold) -> None:
    """Tell it what is queued where no engine takes work: none may run it, or all that may are lost or draining."""
    if hold.places_mark != world.fleet_mark:
        hold.note_places({one: _is_served(world, run, one) for one in hold.places()})
        hold.places_mark = world.fleet_mark


def _is_served(world: World, run: Run, place: Place) -> bool:
    pool, labels = place
    return any(not one.lost and not one.draining for one in world.pool_engines(run, pool, dict(labels)))


def _stuck(world: World, run: Run) -> bool:
    """Whether what is queued may not start before results are taken, or before somebody says so."""
    window = run.window
    limit = world.undelivered_limit_bytes(run)
    waits = window is not None and bool(window.waiting)
    return waits or run.paused or run.undelivered_bytes > limit or run.report.trainer_state is TrainerState.PAUSED


def _most_bytes(world: World, run: Run) -> int:
    return world.undelivered_limit_bytes(run) // HELD_PART


def _arm(world: World, run: Run, hold: MixHold) -> None:
    """One timer, for the oldest."""
    oldest = hold.oldest()
    due = None if oldest is None else hold.held[oldest] + hold.seconds
    timer = hold.timer
    if timer is not None and timer.subject is not None and timer.due == due:
        return
    world.timers.cancel(timer)
    hold.timer = None if due is None else world.timers.add(due, TimerKind.MIX, run)
