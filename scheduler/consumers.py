"""Who reads a run's results: attaching, detaching, acknowledging, expiring.

Invariants
- An older trainer epoch is fenced; a newer one fences the consumers of the older.
- Results leave a run only by acknowledgement or by age; both free their bytes and their rollout record.
- Undelivered results are bounded by bytes (a closed gate stops admission) and by age (the oldest expire, with a warning).

What this module does not know: streams and connections.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from rolloutd.scheduler import delivering, letting_in, lifecycle, publishing
from rolloutd.scheduler.actions import Attached, Finished, GroupFinished, NoticeKind
from rolloutd.scheduler.events import AcknowledgeResults, AttachConsumer
from rolloutd.scheduler.outbox import Consumer, Kept
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import Acknowledgement, StepReport
from rolloutd.scheduler.states import Code, TrainerState
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

SMOOTHING: Final = 0.02  # weight of the newest reward in the mean
DROP_REASON_CHARACTERS: Final = 200


def fence(run: Run, epoch: int) -> Refusal | None:
    """Refuse callers of an older trainer epoch."""
    if epoch >= run.epoch:
        return None
    return Refusal(
        Code.ABORTED,
        "FENCED",
        f"trainer_epoch: {epoch} is older than epoch {run.epoch} of run {run.run_id!r}; this trainer was replaced",
    )


def raise_epoch(world: World, run: Run, epoch: int, newcomer: Consumer | None = None) -> None:
    """A trainer that started later spoke: streams of earlier ones end, and its steps count from wherever it says."""
    if epoch <= run.epoch:
        return
    run.epoch = epoch
    publishing.orphan(world, run, f"a trainer of epoch {epoch} took over from the one that pushes", pushed_only=True)
    run.report = StepReport(step=0, trainer_state=TrainerState.UNKNOWN)
    letting_in.restarted(world, run)
    for other in run.consumers.values():
        if other.attached and other is not newcomer and other.epoch < epoch:
            other.attached = False
            world.end_stream(run, other.consumer_id, fence(run, other.epoch))


def ensure(world: World, run: Run, consumer_id: str, epoch: int) -> Consumer | Refusal:
    """The consumer of this name, made on first use."""
    consumer = run.consumers.get(consumer_id)
    if consumer is None:
        if len(run.consumers) >= world.config.delivery.max_consumers_per_run:
            return Refusal(
                Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_CONSUMERS",
                f"consumer_id: run {run.run_id!r} has {len(run.consumers)} consumers already; reuse ids or take over old ones",
            )
        consumer = run.consumers[consumer_id] = Consumer(consumer_id)
        consumer.epoch = epoch
    return consumer


def attach(world: World, run: Run, event: AttachConsumer) -> Refusal | None:
    """A stream opened; what this consumer missed since its cursor is delivered again."""
    made = ensure(world, run, event.consumer_id, event.epoch)
    if isinstance(made, Refusal):
        return made
    consumer = made
    raise_epoch(world, run, event.epoch, consumer)
    consumer.epoch = event.epoch
    consumer.attached = True
    world.timers.cancel(consumer.grace_timer)
    consumer.grace_timer = None
    consumer.cursor = max(consumer.cursor, event.cursor)  # a server that restarted goes on where its consumer is
    consumer.closing = False
    for cursor in consumer.through(event.cursor):
        _forget(world, run, consumer, cursor)
    for name in event.take_over:
        _take_over(world, run, consumer, name)
    world.deliver(run, consumer.consumer_id, 0, Attached(consumer.cursor, consumer.unfinished, len(consumer.kept)))
    for rollout_id in consumer.by_rollout:
        refresh(run, run.rollouts[rollout_id])
    for cursor, kept in consumer.kept.items():
        world.deliver(run, consumer.consumer_id, cursor, kept.event)
    return None


def refresh(run: Run, rollout: Rollout) -> None:
    """A kept result may have become too old while nobody took it: withhold or mark it before it is delivered again."""
    result = delivering.too_old_now(run, rollout)
    if result is None:
        return
    rollout.result = result
    consumer = run.consumers[rollout.consumer_id]
    run.undelivered_bytes += consumer.replace(consumer.by_rollout[rollout.rollout_id], Finished(result))
    group = rollout.group
    if group is None or result.complete:
        return
    group.note_stale(rollout.rollout_id)
    teller = run.consumers.get(group.consumer_id)
    cursor = teller.by_group.get(group.group_id) if teller is not None else None
    told = teller.kept[cursor].event if teller is not None and cursor is not None else None
    if (
        teller is not None
        and cursor is not None
        and isinstance(told, GroupFinished)
        and rollout.rollout_id in told.rollout_ids
    ):
        failed = (*told.failed_rollout_ids, rollout.rollout_id)
        run.undelivered_bytes += teller.replace(cursor, replace(told, complete=False, failed_rollout_ids=failed))


def detach(world: World, run: Run, consumer_id: str) -> None:
    consumer = run.consumers.get(consumer_id)
    if consumer is None or not consumer.attached:
        return
    consumer.attached = False
    consumer.closing = False
    if run.settings.cancel_on_disconnect:
        if run.settings.disconnect_grace_seconds > 0.0:
            due = world.now + run.settings.disconnect_grace_seconds
            consumer.grace_timer = world.timers.add(due, TimerKind.DISCONNECT, (run, consumer))
        else:
            abandon(world, run, consumer)
    prune(run, consumer)


def abandon(world: World, run: Run, consumer: Consumer) -> None:
    """Cancel what a consumer that is gone had not got yet."""
    if consumer.attached:
        return
    for rollout in list(run.rollouts.values()):
        if rollout.consumer_id == consumer.consumer_id:
            lifecycle.cancel(world, rollout)


def close(world: World, run: Run, consumer_id: str) -> None:
    """Half-closed: end the stream once nothing is pending."""
    consumer = run.consumers.get(consumer_id)
    if consumer is not None:
        consumer.closing = True
        world.closing[run.run_id, consumer_id] = (run, consumer)
        end_if_drained(world, run, consumer)


def end_if_drained(world: World, run: Run, consumer: Consumer) -> None:
    if consumer.closing and consumer.attached and not consumer.unfinished:
        consumer.closing = False
        world.end_stream(run, consumer.consumer_id, None)


def acknowledge(world: World, run: Run, consumer: Consumer, event: AcknowledgeResults) -> None:
    """Forget acknowledged results; verdicts feed the valid count and the consumed mix."""
    for acknowledgement in event.acknowledgements:
        cursor = consumer.by_rollout.get(acknowledgement.rollout_id)
        if cursor is not None:
            _note_verdict(world, run, acknowledgement)
            _forget(world, run, consumer, cursor)
    for cursor in consumer.through(event.through_cursor):
        _forget(world, run, consumer, cursor)
    world.dirty = True


def expire(world: World, run: Run) -> None:
    """Drop results that nobody acknowledged within their time, and what is left of consumers and groups that are gone."""
    ttl = run.settings.undelivered_ttl_seconds or world.config.delivery.undelivered_ttl_seconds
    dropped = 0
    for consumer in list(run.consumers.values()):
        for cursor in consumer.older_than(world.now - ttl):
            before = run.undelivered_results
            _forget(world, run, consumer, cursor)
            dropped += before - run.undelivered_results
        prune(run, consumer)
    if dropped:
        message = f"{dropped} results were dropped: not acknowledged within {ttl:.0f} s"
        world.record("warning", "results_expired", run=run.run_id, count=dropped, ttl_seconds=ttl)
        world.notify(run, NoticeKind.RESULTS_EXPIRED, message, ttl)


def prune(run: Run, consumer: Consumer) -> None:
    """A consumer with nothing pending that is not connected need not be remembered."""
    if (
        not consumer.attached
        and not consumer.unfinished
        and not consumer.kept
        and consumer.consumer_id.startswith(delivering.UNARY)
    ):
        run.consumers.pop(consumer.consumer_id, None)


def _take_over(world: World, run: Run, consumer: Consumer, name: str) -> None:
    """Everything of another consumer becomes this one's, under new cursors."""
    other = run.consumers.get(name)
    if other is None or other is consumer:
        return
    if other.attached:
        other.attached = False
        world.end_stream(
            run, name, Refusal(Code.ABORTED, "REPLACED", f"consumer {consumer.consumer_id!r} took over from {name!r}")
        )
    world.timers.cancel(other.grace_timer)
    for rollout in run.rollouts.values():
        if rollout.consumer_id == name:
            rollout.consumer_id = consumer.consumer_id
    consumer.unfinished += other.unfinished
    other.unfinished = 0
    for kept in list(other.kept.values()):
        _move(consumer, kept)
    for group in run.groups.values():
        if group.consumer_id == name:
            group.consumer_id = consumer.consumer_id
    del run.consumers[name]


def _move(consumer: Consumer, kept: Kept) -> None:
    cursor = consumer.keep(kept.event, kept.at_seconds)
    if consumer.kept[cursor].size_bytes != kept.size_bytes:
        raise AssertionError("an event changed its size while it moved")


def _forget(world: World, run: Run, consumer: Consumer, cursor: int) -> None:
    """One durable event is done with: free its bytes, its rollout record and, after the last member, its group."""
    kept = consumer.drop(cursor)
    if kept is None:
        return
    run.undelivered_bytes -= kept.size_bytes
    if not isinstance(kept.event, Finished):
        return
    run.undelivered_results -= 1
    rollout_id = kept.event.result.rollout_id
    rollout = run.rollouts.pop(rollout_id)
    letting_in.consumed(world, rollout)
    run.remember_delivered(rollout_id)
    run.family.forget(rollout_id, run.rollouts)
    members = run.sampled.get(rollout.spec.rollout_id)
    if members is not None:
        members.pop(rollout_id, None)
        if not members:
            del run.sampled[rollout.spec.rollout_id]
    group = rollout.group
    if group is None:
        return
    group.unacknowledged -= 1
    if group.unacknowledged == 0 and not group.notified:
        run.idle_groups[group.group_id] = None
    elif group.unacknowledged == 0:
        teller = run.consumers.get(group.consumer_id)
        event_cursor = None if teller is None else teller.by_group.get(group.group_id)
        if teller is not None and event_cursor is not None:
            _forget(world, run, teller, event_cursor)
        run.groups.pop(group.group_id, None)
        letting_in.group_over(world, run, group.group_id)


def _note_verdict(world: World, run: Run, acknowledgement: Acknowledgement) -> None:
    rollout = run.rollouts.get(acknowledgement.rollout_id)
    if rollout is None or rollout.result is None:
        return
    reward = acknowledgement.reward
    if reward is not None and math.isfinite(reward):
        run.mean_reward = (
            reward if run.mean_reward is None else run.mean_reward + SMOOTHING * (reward - run.mean_reward)
        )
    if acknowledgement.used:
        run.valid_samples += 1
        run.mix.consumed.add(run.mix.name(rollout.spec.stratum))
    elif acknowledgement.used is not None:
        run.dropped_samples += 1
        reason = acknowledgement.drop_reason[:DROP_REASON_CHARACTERS]
        world.record("info", "result_dropped", run=run.run_id, rollout=rollout.rollout_id, reason=reason, reward=reward)
