"""A rollout's life outside engines: queued, requeued, cancelled, promoted, finished.

Invariants
- `finish` is the only way to end: it releases, counts, keeps the result and tells the group, once; the second caller finds it
  done and changes nothing (property P1).
- A rollout with a live attempt is never finished directly: the attempt is aborted first and its end finishes the rollout.
- A group that has what it keeps gets no more: what ends whole in the same moment is surplus too.

What this module does not know: placement, engines' replies.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from rolloutd.scheduler import delivering, grouping, letting_in, mix, queueing, turns, versions
from rolloutd.scheduler.actions import Abort
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.over_launch import Fate
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import AttemptRecord, Piece, RolloutResult, Span
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import (
    OUTCOMES,
    AbortReason,
    OnPreempt,
    OnStale,
    Outcome,
    RolloutClass,
    RolloutState,
    TaskType,
)
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

RETRY_AFTER_SECONDS: Final = 5.0
FINGERPRINT_BYTES: Final = 256  # of an output's first and last tokens
# Why a live attempt is aborted where its rollout ends so.
ABORTS_FOR: Final = {
    Outcome.CANCELLED: AbortReason.CANCEL,
    Outcome.RUN_ENDED: AbortReason.RUN_ENDED,
    Outcome.SURPLUS: AbortReason.SURPLUS,
}
# Of the scheduler itself: they give way to a reason that somebody else has.
OWN_REASONS: Final = frozenset(
    {
        AbortReason.PREEMPT,
        AbortReason.BUDGET,
        AbortReason.NO_PROGRESS,
        AbortReason.RECALL,
        AbortReason.PUBLISH,
        AbortReason.MEMORY,
        AbortReason.SLICE,
        AbortReason.MOVE,
    }
)


def enqueue(world: World, rollout: Rollout) -> None:
    """First time in the queue."""
    queueing.put(world, rollout)
    arm_timer(world, rollout)


def requeue(world: World, rollout: Rollout, why: str, *, keep: bool = True) -> None:
    """Back to the queue after an attempt; without `keep` the tokens written so far are dropped. At shutdown it ends."""
    if world.shutting_down:
        finish(world, rollout, Outcome.SHUTDOWN)
        return
    if (
        not keep
        or rollout.on_preempt is OnPreempt.RESTART
        or not rollout.resumable
        or versions.must_restart(world, rollout)
    ):
        rollout.pieces.clear()
        rollout.pieces_by.clear()
    if rollout.spec.text is not None and rollout.pieces and not rollout.pieces[0].prompt_token_bytes:
        rollout.pieces.clear()  # the engine never told the prompt's ids, so there is nothing to continue from
        rollout.pieces_by.clear()
    spec = rollout.spec
    longest = world.longest_prompt(rollout.run, spec.pool, spec.engine_labels)
    if longest and spec.prompt_tokens + rollout.kept_tokens > longest:
        rollout.pieces.clear()  # no engine takes so long a prompt, though one may have written it
        rollout.pieces_by.clear()
    note_move(rollout, RolloutState.QUEUED)
    rollout.move(RolloutState.QUEUED, world.now, why)
    rollout.queued_at = world.now
    queueing.put(world, rollout)
    arm_timer(world, rollout)


def restart(world: World, rollout: Rollout, why: str) -> None:
    """A queued rollout gives up the tokens that it kept and starts again from its prompt."""
    queueing.take(world, rollout)
    rollout.run.lengths.note_stopped(rollout.prompt_hash, rollout.kind, rollout.rollout_id)
    rollout.pieces.clear()
    rollout.pieces_by.clear()
    rollout.note(world.now, f"starts again: {why}")
    queueing.put(world, rollout)


def cut_interrupted(rollout: Rollout, piece: Piece) -> None:
    """The last token of an aborted attempt is written again by the next one: see `Piece.without_last_token`."""
    if not rollout.pieces or rollout.pieces[-1] is not piece:
        return
    left = piece.without_last_token(rollout.spec.of_text)
    if left.token_bytes or left.prompt_logprob_bytes:
        rollout.pieces[-1] = left
    else:
        rollout.pieces.pop()
        rollout.pieces_by.pop()


def arm_timer(world: World, rollout: Rollout) -> None:
    """(Re)start the rollout's one timer: the earliest thing that may become due in its state."""
    world.timers.cancel(rollout.timer)
    rollout.timer = None
    due = math.inf if rollout.deadline_at is None else rollout.deadline_at
    attempt = rollout.attempt
    if rollout.state is RolloutState.QUEUED:
        due = min(due, rollout.ttl_at)
    elif rollout.state is RolloutState.ABORTING and attempt is not None:
        due = attempt.aborted_at + world.config.executor.abort_seconds
    elif attempt is not None:
        due = min(due, attempt.progress_at + progress_timeout(world, rollout))
    if due < math.inf:
        rollout.timer = world.timers.add(due, TimerKind.ROLLOUT, rollout)


def progress_timeout(world: World, rollout: Rollout) -> float:
    """Seconds without a token before an attempt is given up; fewer on an engine that does not answer its health checks."""
    settings = world.config.executor
    patience = rollout.spec.progress_timeout_seconds or settings.timeout_seconds
    lost = rollout.attempt is not None and rollout.attempt.engine.lost
    return min(patience, settings.lost_seconds) if lost else patience


def expect_abort(world: World, attempt: Attempt, reason: AbortReason, why: str) -> None:
    """The engine is about to stop a live attempt without being asked for this one."""
    attempt.rollout.move(RolloutState.ABORTING, world.now, why)
    attempt.abort_reason = reason
    attempt.aborted_at = world.now
    world.note_attempt(attempt)
    arm_timer(world, attempt.rollout)


def abort(world: World, rollout: Rollout, reason: AbortReason, why: str) -> None:
    """Ask the engine to stop the live attempt. A rollout that is aborting already keeps the stronger reason."""
    attempt = rollout.attempt
    if attempt is None:
        raise AssertionError(f"{rollout.rollout_id} has no attempt to abort; story: {rollout.tell()}")
    if rollout.state is RolloutState.ABORTING:
        if attempt.abort_reason in OWN_REASONS:
            attempt.abort_reason = reason
        return
    expect_abort(world, attempt, reason, why)
    send_abort(world, attempt)


def send_abort(world: World, attempt: Attempt) -> None:
    """Ask the engine to stop it, once."""
    reason = attempt.abort_reason
    if reason is not None and not attempt.abort_sent:
        attempt.abort_sent = True
        world.emit(Abort(attempt.attempt_id, attempt.engine.engine_id, reason))


def cancel(world: World, rollout: Rollout) -> int:
    """Cancel a rollout and its subtree; returns how many were not finished yet."""
    return cancel_subtree(world, rollout.run, rollout.rollout_id)


def cancel_subtree(world: World, run: Run, root: str) -> int:
    """Cancel what is left below and including `root`, whose own record may be gone; returns how many were not finished."""
    count = 0
    for rollout_id in run.family.subtree(root):
        current = run.rollouts.get(rollout_id)
        if current is not None:
            count += end_one(world, current, Outcome.CANCELLED, "cancelled")
    return count


def end_one(world: World, rollout: Rollout, outcome: Outcome, why: str) -> bool:
    """End a rollout, without what is below it, for one of `ABORTS_FOR`; False where it has ended already."""
    if rollout.state is RolloutState.FINISHED:
        if outcome is not Outcome.SURPLUS:  # its caller's word: what it made is not waited for any more
            delivering.let_go(world, rollout.run, rollout)
        return False
    if rollout.attempt is None:
        finish(world, rollout, outcome)
    else:
        abort(world, rollout, ABORTS_FOR[outcome], why)
    return True


def end_surplus(world: World, run: Run, group: Group) -> None:
    """A group has as many complete members as it keeps: the others end, with the tokens that they have.

    What is below them in a tree search goes on: nobody said that it is not wanted.
    """
    for rollout_id in group.members:
        rollout = run.rollouts.get(rollout_id)
        if rollout is not None:
            end_one(world, rollout, Outcome.SURPLUS, f"{group.keep} of its group are complete")


def change_class(world: World, rollout: Rollout, rollout_class: RolloutClass, why: str) -> None:
    """Move a rollout to another class, queued or running."""
    if rollout.state is RolloutState.FINISHED or rollout.rollout_class is rollout_class:
        return
    before = rollout.rollout_class
    world.decide(DecisionKind.PROMOTED, rollout, f"{before.name} -> {rollout_class.name}: {why}")
    rollout.note(world.now, f"class {before.name} -> {rollout_class.name}: {why}")
    if rollout.state is RolloutState.QUEUED:
        queueing.take(world, rollout)
        rollout.rollout_class = rollout_class
        queueing.put(world, rollout)
    else:
        rollout.rollout_class = rollout_class
        if rollout.attempt is not None:
            rollout.attempt.permit.change_class(rollout_class)
            world.note_attempt(rollout.attempt)
    note_step(world, rollout)
    if rollout.run.mix_hold is not None:
        rollout.run.mix_hold.note_class(rollout, before)
        delivering.settle(world, rollout.run)
    world.dirty = True


def note_move(rollout: Rollout, state: RolloutState, made: bool = False) -> None:
    """Call before it leaves an engine or ends; made: with a result to train on. What counts for the target mix follows."""
    run = rollout.run
    if not made:
        mix.give_back(rollout)
    if run.mix_hold is not None:
        run.mix_hold.note_state(rollout, rollout.state, state)


def note_step(world: World, rollout: Rollout) -> None:
    """Remember who becomes CRITICAL when the trainer reaches its step."""
    run = rollout.run
    step = rollout.needed_by_step
    if step is None:
        return
    waiting = run.by_step.get(step)
    if rollout.rollout_class is RolloutClass.CRITICAL or rollout.state is RolloutState.FINISHED:
        if waiting is not None:
            waiting.discard(rollout.rollout_id)
            if not waiting:
                del run.by_step[step]
    elif waiting is None:
        run.by_step[step] = {rollout.rollout_id}
    else:
        waiting.add(rollout.rollout_id)


def close_attempt(world: World, attempt: Attempt, piece: Piece | None, end: str) -> None:
    """An attempt is over: release its permit, wake who waited for it, keep its tokens with the rollout."""
    rollout = attempt.rollout
    now = world.now
    attempt.permit.release()
    attempt.engine.promises.release(attempt.promise)
    attempt.engine.batch_since = now
    world.forget_attempt(attempt)
    attempt.engine.attempts.pop(attempt.attempt_id, None)
    grouping.note_ended(attempt.run, attempt.rollout.prompt_hash, attempt.engine)
    rollout.attempt = None
    rollout.run.lengths.note_stopped(rollout.prompt_hash, rollout.kind, rollout.rollout_id)
    turns.settle(rollout.run, rollout.spec.pool, attempt.charged_tokens, _cost_tokens(attempt, piece))
    rollout.running_seconds += now - attempt.dispatched_at
    rollout.ttl_at += now - attempt.dispatched_at  # the limit is on waiting, and that was not waiting
    for entry in world.computing.end(attempt.stems):
        queueing.wake(world, entry)
    attempt.stems = ()
    if piece is not None and (piece.token_bytes or piece.prompt_logprob_bytes or piece.finish_reason != "abort"):
        rollout.pieces.append(piece)
        rollout.pieces_by.append((attempt.engine.engine_id, attempt.number))
    rollout.note_attempt(
        AttemptRecord(
            attempt.number,
            attempt.engine.engine_id,
            attempt.batch_id,
            attempt.version,
            attempt.dispatched_at - rollout.submitted_at,
            now - rollout.submitted_at,
            0 if piece is None else len(piece.token_bytes) // TOKEN_BYTES,
            end,
        )
    )
    world.dirty = True


def _cost_tokens(attempt: Attempt, piece: Piece | None) -> int:
    """Tokens an attempt made its engine compute: the uncached prompt, once the first token came, and the output."""
    written = max(attempt.generated_tokens, 0 if piece is None else len(piece.token_bytes) // TOKEN_BYTES)
    if attempt.first_token_at is None:
        return written
    prompt = len(attempt.token_bytes) // TOKEN_BYTES or (0 if piece is None else piece.prompt_tokens)
    return written + max(0, prompt - attempt.cached_tokens)


def finish(world: World, rollout: Rollout, outcome: Outcome, error: Refusal | None = None) -> None:
    """End a rollout: the one place where that happens. The caller has closed its attempt before."""
    if rollout.state is RolloutState.FINISHED:
        return
    if rollout.attempt is not None:
        raise AssertionError(f"{rollout.rollout_id} finished with a live attempt; story: {rollout.tell()}")
    run = rollout.run
    if rollout.entry is not None:
        queueing.take(world, rollout)
        rollout.queued_seconds += world.now - rollout.queued_at
        run.lengths.note_stopped(rollout.prompt_hash, rollout.kind, rollout.rollout_id)
    lineage = run.lineage(rollout.spec.pool)
    group = rollout.group
    if outcome is Outcome.COMPLETED and group is not None and group.has_enough:
        outcome = Outcome.SURPLUS
    stale = outcome is Outcome.COMPLETED and versions.too_old(lineage, rollout)
    if stale:
        run.stale_results += 1
        if run.settings.on_stale is OnStale.WITHHOLD:
            outcome, error = Outcome.STALE, versions.stale_error(lineage, rollout)
    note_move(rollout, RolloutState.FINISHED, outcome is Outcome.COMPLETED)
    rollout.move(RolloutState.FINISHED, world.now, OUTCOMES[outcome].label)
    world.timers.cancel(rollout.timer)
    rollout.timer = None
    note_step(world, rollout)
    if error is None and outcome is not Outcome.COMPLETED:
        row = OUTCOMES[outcome]
        said = outcome.name.lower().replace("_", " ")
        if outcome is Outcome.SURPLUS and group is not None:
            said = f"{group.keep} of group {group.group_id!r} are complete, which is all that it keeps"
        error = Refusal(row.code, outcome.name, f"rollout {rollout.rollout_id!r}: {said}")
    result = _result(rollout, outcome, error, world.now, lineage.version, stale)
    rollout.result = result.without_tokens() if outcome is Outcome.STALE else result
    letting_in.ended(world, rollout)
    run.unfinished -= 1
    run.finished_by_class[rollout.rollout_class] += 1
    run.finished_by_task[rollout.task_type] += 1
    if outcome is Outcome.COMPLETED:
        _learn(run, rollout, rollout.result)
    _keep(world, run, rollout, rollout.result)
    world.dirty = True
    if outcome is Outcome.COMPLETED and group is not None and group.has_enough:
        end_surplus(world, run, group)


def _keep(world: World, run: Run, rollout: Rollout, result: RolloutResult) -> None:
    """Hand the result, and the group's end, over to the consumer."""
    delivering.hand_over(world, run, rollout)
    group = rollout.group
    if group is not None:
        if group.keep and not group.notified:
            group.fates.append(_fate(run, rollout, result))
        if group.note_finished(rollout.rollout_id, result.outcome):
            delivering.group_ended(world, run, group, rollout.consumer_id)
            if 0 < group.keep < len(group.members):
                run.over_launch.note_group(group.fates)
            group.fates.clear()
    delivering.settle(world, run)


def _fate(run: Run, rollout: Rollout, result: RolloutResult) -> Fate:
    """What may be said of its length, whether it was done or not."""
    tokens = result.generated_tokens
    whole = result.outcome is Outcome.COMPLETED or result.finish_reason == "stop" or rollout.is_whole
    if whole:
        return Fate(result.outcome, tokens, float(tokens), True)
    expected = run.lengths.expected(rollout.prompt_hash, rollout.kind, rollout.max_new_tokens, tokens)
    return Fate(result.outcome, tokens, expected, False)


def _learn(run: Run, rollout: Rollout, result: RolloutResult) -> None:
    """Feed length priors, the output fingerprint and the stand-in for entropy."""
    run.finished_samples += 1
    run.lengths.note_finished(result.prompt_hash, rollout.kind, rollout.rollout_id, result.generated_tokens)
    if result.token_bytes:
        tokens = (
            result.token_bytes
        )  # two outputs of one length that begin and end alike are one, and hashing long ones is dear
        run.mix.note_output(hash((len(tokens), tokens[:FINGERPRINT_BYTES], tokens[-FINGERPRINT_BYTES:])))
    if result.logprob_bytes and run.phase.wants_log_probs:
        log_probs = np.frombuffer(result.logprob_bytes, dtype="<f4")
        run.phase.note_log_prob(float(np.add.reduce(log_probs)) / len(log_probs))


def _result(
    rollout: Rollout, outcome: Outcome, error: Refusal | None, now: float, policy_version: int, stale: bool
) -> RolloutResult:
    spec = rollout.spec
    pieces = rollout.pieces
    last = pieces[-1] if pieces else None
    spans: list[Span] = []
    offset = 0
    for place in range(len(pieces)):
        piece = pieces[place]
        engine_id, number = rollout.pieces_by[place]
        versions_of = piece.versions
        for which in range(len(versions_of)):
            label, start, end = piece.version_spans[which]
            if end > start or spec.task_type is TaskType.REPLAY:  # whose version is that of its log-probs
                spans.append(Span(versions_of[which], label, offset + start, offset + end, engine_id, number))
        offset += len(piece.token_bytes) // TOKEN_BYTES
    token_bytes, logprobs, text = b"", b"", ""
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()
    if last is not None and len(pieces) == 1:  # nearly always
        token_bytes, logprobs, top_logprobs, text = last.token_bytes, last.logprob_bytes, last.top_logprobs, last.text
    elif pieces:
        token_bytes = b"".join([piece.token_bytes for piece in pieces])
        logprobs = b"".join([piece.logprob_bytes for piece in pieces])
        top_logprobs = tuple([row for piece in pieces for row in piece.top_logprobs])
        text = "".join([piece.text for piece in pieces])
    generated = offset
    finish_reason = last.finish_reason if last is not None else "abort"
    if finish_reason == "abort" and outcome is Outcome.COMPLETED:
        finish_reason = "length"  # stopped by us after its last token
    elif finish_reason == "length" and outcome is not Outcome.COMPLETED and not rollout.is_whole:
        finish_reason = "abort"  # a slice was done, it was not
    first_cached = pieces[0].cached_tokens if pieces else 0
    return RolloutResult(
        run_id=rollout.run.run_id,
        rollout_id=rollout.rollout_id,
        group_id="" if rollout.group is None else rollout.group.group_id,
        sample_index=rollout.sample_index,
        session_id=spec.session_id,
        turn=spec.turn,
        step=rollout.needed_by_step,
        rollout_class=rollout.rollout_class,
        task_type=spec.task_type,
        stratum=spec.stratum,
        outcome=outcome,
        error=error,
        token_bytes=token_bytes,
        logprob_bytes=logprobs if len(logprobs) == generated * 4 else b"",
        top_logprobs=top_logprobs,
        text=text if spec.of_text else "",
        prompt_token_bytes=spec.token_bytes
        if spec.return_prompt_tokens
        else (pieces[0].prompt_token_bytes if pieces else b""),
        prompt_logprob_bytes=pieces[0].prompt_logprob_bytes if pieces else b"",
        finish_reason=finish_reason,
        matched_stop=last.matched_stop if last is not None else None,
        spans=tuple(spans),
        engine_id=rollout.pieces_by[-1][0] if rollout.pieces_by else "",
        batch_id=rollout.last_batch_id,
        attempts=rollout.attempts,
        preemptions=rollout.preemptions,
        prompt_tokens=spec.prompt_tokens if spec.text is None else (pieces[0].prompt_tokens if pieces else 0),
        cached_tokens=first_cached,
        predicted_cached_tokens=rollout.predicted_cached_tokens,
        generated_tokens=generated,
        queued_seconds=rollout.queued_seconds,
        first_token_seconds=0.0 if rollout.first_token_at is None else rollout.first_token_at - rollout.submitted_at,
        running_seconds=rollout.running_seconds,
        total_seconds=now - rollout.submitted_at,
        prompt_hash=rollout.prompt_hash,
        complete=outcome is Outcome.COMPLETED,
        clipped=rollout.clipped,
        extras=last.extras if last is not None else {},
        policy_version=policy_version,
        stale=stale,
        history=tuple(rollout.history),
    )
