"""What time brings: timers that fall due, housekeeping, shutdown.

Invariants
- Every rollout has at most one live timer; when it fires, whatever is due for its state is done and the next is armed.
- Housekeeping work per call is bounded by what is kept, and runs every `HOUSEKEEPING_SECONDS`; of several runs each has its
  own moment in that time, so that no call does it for all of them.

What this module does not know: the wall clock.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import (
    attempts,
    budgeting,
    colocation,
    consumers,
    delivering,
    letting_in,
    lifecycle,
    publishing,
    queueing,
    updating,
)
from rolloutd.scheduler.actions import NoticeKind
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.rules import watch
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, Code, Gate, Outcome, RolloutState
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

HOUSEKEEPING_SECONDS: Final = 1.0
SWEEP_NODES: Final = 384  # index nodes per housekeeping: under a millisecond, also where the core is plain Python
REVIEWED_ENTRIES: Final = 128  # per run and housekeeping, where priors of length changed: a millisecond or two
RETRY_AFTER_SECONDS: Final = 5.0
MOST_QUIET_SECONDS: Final = 30.0  # between two notices about the same trouble


def fire_due(world: World) -> None:
    while True:
        due = world.timers.pop_due(world.now)
        if due is None:
            return
        kind, subject = due
        match kind:
            case TimerKind.ROLLOUT:
                _rollout_due(world, subject)
            case TimerKind.HOLD:
                subject.hold_timer = None
                queueing.wake(world, subject)
            case TimerKind.LEASE:
                budgeting.lease_expired(world, subject)
            case TimerKind.DISCONNECT:
                consumers.abandon(world, *subject)
            case TimerKind.SHUTDOWN:
                _abort_all(world)
            case TimerKind.UPDATE:
                updating.due(world, subject)
            case TimerKind.PLACE:
                world.dirty = True
            case TimerKind.MIX:
                delivering.settle(world, subject)
            case TimerKind.RULES:
                watch.due(world)
            case TimerKind.HOUSEKEEPING:
                if isinstance(subject, Run):
                    _keep_run(world, subject)
                else:
                    _housekeeping(world)
            case TimerKind.ENGINE:
                subject.wake_timer = None
                world.dirty = True


def begin_shutdown(world: World, grace_seconds: float) -> None:
    """Nothing new; what is queued ends now, what runs may finish within the grace."""
    if world.shutting_down:
        return
    world.shutting_down = True
    for run in world.runs.values():
        world.notify(
            run, NoticeKind.DRAINING, f"the server is shutting down within {grace_seconds:.0f} s", grace_seconds
        )
        for rollout in list(run.rollouts.values()):
            if rollout.state is RolloutState.QUEUED:
                lifecycle.finish(world, rollout, Outcome.SHUTDOWN)
        delivering.settle(world, run)
    world.timers.add(world.now + grace_seconds, TimerKind.SHUTDOWN, True)


def end_drained_streams(world: World) -> None:
    """Streams that were half-closed and have nothing pending any more."""
    for key, (run, consumer) in list(world.closing.items()):
        consumers.end_if_drained(world, run, consumer)
        if not consumer.closing:
            del world.closing[key]


def _rollout_due(world: World, rollout: Rollout) -> None:
    rollout.timer = None
    now = world.now
    attempt = rollout.attempt
    state = rollout.state
    if state is RolloutState.FINISHED:
        return
    if state is RolloutState.ABORTING:
        attempts.abort_overdue(world, rollout)
    elif rollout.deadline_at is not None and now >= rollout.deadline_at:
        if attempt is None:
            lifecycle.finish(world, rollout, Outcome.DEADLINE_EXCEEDED)
        else:
            lifecycle.abort(world, rollout, AbortReason.DEADLINE, "its deadline passed")
    elif state is RolloutState.QUEUED and now >= rollout.ttl_at:
        _ttl_passed(world, rollout)
    elif attempt is not None and attempt.engine.stands_still:
        attempt.progress_at = now  # while it gets other weights; that has time limits of its own
        lifecycle.arm_timer(world, rollout)
    elif attempt is not None and now >= attempt.progress_at + lifecycle.progress_timeout(world, rollout):
        lifecycle.abort(world, rollout, AbortReason.NO_PROGRESS, "no progress within its limit")
    else:
        lifecycle.arm_timer(world, rollout)


def _ttl_passed(world: World, rollout: Rollout) -> None:
    """Waited too long: for room, or for an engine that is not there."""
    run = rollout.run
    spec = rollout.spec
    engines = world.pool_engines(run, spec.pool, spec.engine_labels)
    waited = rollout.queued_seconds + world.now - rollout.queued_at
    if rollout.entry is not None and rollout.entry.held_gate is Gate.POLICY_VERSION:
        newest = run.newest_version(spec.pool)
        error = Refusal(
            Code.UNAVAILABLE,
            "POLICY_VERSION_UNMET",
            f"no engine of pool {spec.pool!r} held a version that it accepts for {waited:.1f} s, its queue_ttl; the newest is {newest}",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
        lifecycle.finish(world, rollout, Outcome.VERSION_UNMET, error)
    elif any(not engine.lost and not engine.draining for engine in engines):
        error = Refusal(
            Code.UNAVAILABLE,
            "QUEUE_TIMEOUT",
            f"waited {waited:.1f} s for room, its queue_ttl; raise queue_ttl_seconds, the budget or the number of engines",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
        lifecycle.finish(world, rollout, Outcome.QUEUE_TIMEOUT, error)
    else:
        error = Refusal(
            Code.UNAVAILABLE,
            "NO_ENGINE",
            f"{world.why_none(run, spec.pool)} for {waited:.1f} s, its queue_ttl",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
        lifecycle.finish(world, rollout, Outcome.NO_ENGINE, error)


def _abort_all(world: World) -> None:
    """The grace is over."""
    for attempt in list(world.attempts.values()):
        if attempt.rollout.state is not RolloutState.ABORTING:
            lifecycle.abort(world, attempt.rollout, AbortReason.SHUTDOWN, "the server shuts down")


def _housekeeping(world: World) -> None:
    world.timers.add(world.now + HOUSEKEEPING_SECONDS, TimerKind.HOUSEKEEPING, True)
    world.index.sweep(SWEEP_NODES)
    colocation.retry(world)
    runs = list(world.runs.values())
    for number, run in enumerate(runs):
        if number:
            world.timers.add(world.now + number * HOUSEKEEPING_SECONDS / len(runs), TimerKind.HOUSEKEEPING, run)
        else:
            _keep_run(world, run)
    if any(run.ledger.queued for run in world.runs.values()):
        world.dirty = True  # waits, engine back-offs and reservations change with time alone


def _keep_run(world: World, run: Run) -> None:
    """One run's share of the housekeeping, unless the run is gone."""
    if world.runs.get(run.run_id) is not run:
        return
    consumers.expire(world, run)
    delivering.settle(world, run)  # what may start has changed
    if run.lengths.note_second() and not run.reviewed:
        run.reviewed = list(run.entries.values())
    queueing.review_lengths(world, run, REVIEWED_ENTRIES)
    world.kept[run] = None
    _watch_capacity(world, run)
    for group_id in list(run.idle_groups):
        group = run.groups.get(group_id)
        if group is not None and group.unacknowledged == 0:
            del run.groups[group_id]  # members all delivered, but the announced size was never reached
            letting_in.group_over(world, run, group_id)
    run.idle_groups.clear()
    attached = any(consumer.attached for consumer in run.consumers.values())
    publishing_now = any(lineage.active is not None for lineage in run.lineages.values())
    done = run.ended and not run.unfinished and not run.undelivered_results
    if done and not attached and not publishing_now and not colocation.has_memory_of(world, run):
        del world.runs[run.run_id]
        publishing.forget_run(world, run)
        for lineage in run.lineages.values():
            world.unseen.pop(lineage, None)
            world.index.drop_owner(lineage.owner)
        # Compiled, entries and lanes are invisible to the garbage collector: what knows both them and the run is let go of here.
        run.backlogs.clear()
        run.ready.clear()
        run.led.clear()
        run.reviewed.clear()


def _watch_capacity(world: World, run: Run) -> None:
    """Tell a run that waits with nothing to run on since when, and what its engines said: at once, then ever more rarely."""
    pools = {pool for (pool, _, _), backlog in run.backlogs.items() if backlog.count}
    missing = sorted(
        pool
        for pool in pools
        if not any(
            # One that gets a version is back by itself, and every publication would be an alarm.
            (engine.state(world.now) == "ready" or (engine.held_kind == "updating" and not engine.lost))
            and world.serves(engine, run, pool, {})
            for engine in world.engines.values()
        )
    )
    if not missing:
        run.no_capacity_since = None
        return
    if run.no_capacity_since is None:
        run.no_capacity_since = world.now
        world.record("warning", "no_capacity", run=run.run_id, pools=missing)
        run.no_capacity_told_at = None
    since = world.now - run.no_capacity_since
    told = run.no_capacity_told_at
    if told is not None and world.now < min(
        told + MOST_QUIET_SECONDS, run.no_capacity_since + 2.0 * (told - run.no_capacity_since)
    ):
        return
    run.no_capacity_told_at = world.now
    message = f"no ready engine in pool {', '.join(missing)} for {since:.0f} s{_why_missing(world, run, missing)}"
    world.notify(run, NoticeKind.NO_CAPACITY, message, since)


def _why_missing(world: World, run: Run, missing: list[str]) -> str:
    """One reason, with its separator, or nothing."""
    engines = [engine for pool in missing for engine in world.pool_engines(run, pool, {})]
    held = {engine.held_because for engine in engines if engine.held_because and not engine.lost}
    errors = {f"last error: {engine.last_error}" for engine in engines if engine.last_error}
    reasons = sorted(held) or sorted(errors) or [world.why_none(run, missing[0])] * (not engines)
    return f"; {reasons[0]}" if reasons else ""
