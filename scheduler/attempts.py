"""What engines report about attempts, and what becomes of their rollouts.

Invariants
- An attempt ends once; reports about attempts that are gone are ignored.
- "Bad request" ends the rollout, "busy" sends it back without a mark, "broken" and "silent" mark the engine, exclude it for
  this rollout and cost one of its attempts (property P7). "Not reached" marks the engine alone: it saw nothing of the rollout.
- Tokens that arrived before a fault or an interruption are kept, unless the rollout wants to restart.

What this module does not know: where the rollout goes next.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import budgeting, lengths, lifecycle, publishing, queueing, time_slice, versions
from rolloutd.scheduler.actions import Progressed
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.events import AttemptEnded, AttemptFailed, AttemptProgress
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import AbortReason, Code, FaultKind, Gate, OnPreempt, Outcome, RolloutState
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

RETRY_AFTER_SECONDS: Final = 5.0
QUIET_GROWTH: Final = 1.25  # in place of `lengths.GROWTH` where no sibling waits: it says little about others
# Stands, whatever came back. Also of a group that has enough: it keeps exactly as many as its caller said.
CALLERS_WORD: Final = frozenset({AbortReason.CANCEL, AbortReason.RUN_ENDED, AbortReason.DEADLINE, AbortReason.SURPLUS})


def progress(world: World, event: AttemptProgress) -> None:
    attempt = world.attempts.get(event.attempt_id)
    if attempt is None or event.generated_tokens <= attempt.generated_tokens:
        return
    engine = attempt.engine
    now = world.now
    tokens = event.generated_tokens
    if attempt.first_token_at is None:
        # Before its siblings are woken: they are ordered once, by all that is known.
        rollout = attempt.rollout
        written = rollout.kept_tokens + tokens
        attempt.run.lengths.note_running(rollout.prompt_hash, rollout.kind, rollout.rollout_id, written)
        _first_token(world, attempt, event.prompt_tokens, event.cached_tokens)
    elif now >= engine.curve_at and attempt.progress_at >= engine.batch_since:
        engine.note_step(now, (now - attempt.progress_at) / (tokens - attempt.generated_tokens))
    attempt.run.supply.add(tokens - attempt.generated_tokens, now)
    attempt.generated_tokens = tokens
    engine.promises.note_written(attempt.promise, tokens)
    attempt.progress_at = now
    if tokens >= attempt.look_tokens:
        _look_at(world, attempt)


def _look_at(world: World, attempt: Attempt) -> None:
    """What follows from how much an attempt has written, and how much it has to write until something follows again."""
    rollout = attempt.rollout
    run = rollout.run
    tokens = attempt.generated_tokens
    kept = rollout.kept_tokens
    enough = _grow_claim(world, attempt)
    awaited = rollout.prompt_hash in run.entries_by_prompt
    if run.lengths.note_running(rollout.prompt_hash, rollout.kind, rollout.rollout_id, kept + tokens) and awaited:
        queueing.note_lengths(world, rollout)
    slice_end = time_slice.consider(world, attempt)
    if rollout.spec.want_progress:
        told = Progressed(rollout.rollout_id, kept + tokens, attempt.engine.engine_id)
        world.deliver(run, rollout.consumer_id, 0, told)
    else:
        growth = lengths.GROWTH if awaited else QUIET_GROWTH
        longer = int((kept + tokens) * growth) - kept + 1
        attempt.look_tokens = min(enough, min(slice_end, longer))  # compiled, `min` of three is a call of Python's


def ended(world: World, event: AttemptEnded) -> None:
    """The engine finished an attempt: by itself, or because it was asked to stop."""
    attempt = world.attempts.get(event.attempt_id)
    if attempt is None:
        return
    rollout = attempt.rollout
    engine = attempt.engine
    piece, problem = _believed(attempt, event.piece)
    tokens = len(piece.token_bytes) // TOKEN_BYTES
    if attempt.first_token_at is None and (tokens or piece.prompt_logprob_bytes):
        _first_token(world, attempt, piece.prompt_tokens, piece.cached_tokens)
    rollout.run.supply.add(max(0, tokens - attempt.generated_tokens), world.now)
    reason = attempt.abort_reason
    if reason is not AbortReason.NO_PROGRESS:
        engine.note_success()
    _learn_speed(world, attempt, tokens)
    if attempt.first_token_at is not None and attempt.kv_version in piece.versions:
        # A version that wrote none of it has not computed it: it was stopped before its engine came to do that again.
        _credit(world, attempt, attempt.token_bytes + piece.token_bytes[:-TOKEN_BYTES])  # the last has no KV
    _wake_followers(world, attempt)
    lifecycle.close_attempt(world, attempt, piece, piece.finish_reason if reason is None else reason.name.lower())
    if problem:
        _doubt(world, attempt, problem)
        if reason is None:
            _fault(world, rollout, f"engine {engine.engine_id}: {problem}")
        else:
            _interrupted(world, rollout, attempt, reason)
    elif piece.finish_reason == "abort" and not rollout.is_whole:
        if reason not in CALLERS_WORD and not world.shutting_down:
            lifecycle.cut_interrupted(rollout, piece)
        _interrupted(world, rollout, attempt, reason)
    elif (
        reason not in CALLERS_WORD and attempt.slice_tokens and piece.finish_reason == "length" and not rollout.is_whole
    ):
        _count_engine(attempt, piece)
        lifecycle.requeue(world, rollout, f"its slice of {attempt.slice_tokens} tokens is done", keep=True)
    elif reason in CALLERS_WORD:
        _interrupted(world, rollout, attempt, reason)  # it finished in the same moment; the caller's word stands
    else:
        engine.note_success()  # also where it was thought to be stuck: a probe must come to an end
        _count_engine(attempt, piece)
        lifecycle.finish(world, rollout, Outcome.COMPLETED)
        queueing.note_lengths(world, rollout)


def failed(world: World, event: AttemptFailed) -> None:
    attempt = world.attempts.get(event.attempt_id)
    if attempt is None:
        return
    rollout = attempt.rollout
    engine = attempt.engine
    settings = world.config.executor
    reason = attempt.abort_reason
    _wake_followers(world, attempt)
    partial, problem = _believed(attempt, event.partial) if event.partial is not None else (None, "")
    lifecycle.close_attempt(world, attempt, partial, event.fault.name.lower())
    if problem:
        _doubt(world, attempt, problem)
    if event.fault in (FaultKind.BROKEN, FaultKind.SILENT, FaultKind.UNREACHED):
        was_open = engine.breaker_until > world.now
        engine.note_fault(world.now, event.message, settings)
        rollout.excluded |= {engine.engine_id}
        if engine.breaker_until > world.now:
            _look_again(world, engine, engine.breaker_until)
        if engine.breaker_until > world.now and not was_open:
            world.record(
                "warning", "engine_breaker_open", engine=engine.engine_id, faults=engine.faults, error=event.message
            )
    elif event.fault is FaultKind.BUSY:
        engine.busy_until = world.now + settings.busy_seconds
        _look_again(world, engine, engine.busy_until)
        engine.probing = False
    else:
        engine.probing = False
    if rollout.is_whole and reason not in CALLERS_WORD:
        lifecycle.finish(world, rollout, Outcome.COMPLETED)  # only the last word was lost
    elif reason is not None and reason is not AbortReason.NO_PROGRESS:
        _interrupted(world, rollout, attempt, reason)
    elif event.fault is FaultKind.REFUSED:
        error = Refusal(
            Code.INVALID_ARGUMENT, "ENGINE_REFUSED", f"engine {engine.engine_id} refused it: {event.message}"
        )
        lifecycle.finish(world, rollout, Outcome.ENGINE_REFUSED, error)
    elif event.fault is FaultKind.BUSY:
        _retry(world, rollout, f"engine {engine.engine_id} is busy: {event.message}")
    elif event.fault is FaultKind.UNREACHED:
        _retry(world, rollout, f"engine {engine.engine_id} was not reached: {event.message}")
    else:
        _fault(world, rollout, f"engine {engine.engine_id} failed: {event.message}")


def _look_again(world: World, engine: Engine, at: float) -> None:
    """Schedule when the engine may be used again. An earlier wish gives way: the later one holds for both."""
    world.timers.cancel(engine.wake_timer)
    engine.wake_timer = world.timers.add(max(at, engine.busy_until, engine.breaker_until), TimerKind.ENGINE, engine)


def abort_overdue(world: World, rollout: Rollout) -> None:
    """An engine did not end an attempt after its abort: stop believing in it."""
    attempt = rollout.attempt
    if attempt is None:
        return
    engine = attempt.engine
    message = f"abort of attempt {attempt.number} unanswered for {world.config.executor.abort_seconds} s"
    failed(world, AttemptFailed(attempt.attempt_id, FaultKind.SILENT, message))
    world.record("warning", "abort_unanswered", engine=engine.engine_id, rollout=rollout.rollout_id)


def _first_token(world: World, attempt: Attempt, prompt_tokens: int, cached_tokens: int) -> None:
    """The prompt is computed and cached: credit it, correct the index, release who waited for it."""
    rollout = attempt.rollout
    engine = attempt.engine
    attempt.first_token_at = engine.batch_since = world.now
    attempt.cached_tokens = cached_tokens
    if rollout.first_token_at is None:
        rollout.first_token_at = world.now
    if rollout.state is RolloutState.DISPATCHED:
        rollout.move(RolloutState.RUNNING, world.now, f"first token from {engine.engine_id}")
    engine.predicted_cached_tokens += attempt.predicted_tokens
    engine.cached_tokens += cached_tokens
    engine.prompt_tokens += prompt_tokens
    rollout.run.prompt_tokens += prompt_tokens
    rollout.run.cached_tokens += cached_tokens
    if attempt.token_bytes:
        if cached_tokens + engine.facts.page_tokens <= attempt.predicted_tokens:
            _discredit(world, attempt, cached_tokens)
        _credit(world, attempt, attempt.token_bytes)
    for entry in world.computing.end(attempt.stems):
        entry.hits_at = -1.0
        queueing.wake(world, entry)
    attempt.stems = ()
    siblings = _waiting_siblings(rollout)
    if siblings is not None and siblings.leader_id == attempt.attempt_id:
        held = world.index.whole_pages(engine.cache_key, siblings.prompt_tokens)
        if held and attempt.kv_version == engine.version:
            siblings.segments = [(world.index.flag(engine.cache_key), held), *siblings.segments]  # the longest first
        queueing.wake(world, siblings)


def _believed(attempt: Attempt, piece: Piece) -> tuple[Piece, str]:
    """What came back, with the policy version of each span; without the tokens whose version nobody can tell, and why."""
    found = versions.origins(attempt, piece)
    if found.problem:
        first = piece.first_tokens(found.tokens)
        return first.with_versions(first.version_spans, found.versions), found.problem
    if not piece.version_spans:
        engine = attempt.engine
        return piece.with_versions(((engine.label, 0, found.tokens),), (engine.version,)), ""
    return piece.with_versions(piece.version_spans, found.versions), ""


def _doubt(world: World, attempt: Attempt, problem: str) -> None:
    """Its engine may hold other weights than it acknowledged; not so where it became another run's meanwhile."""
    engine = attempt.engine
    if engine.owner in ("", attempt.rollout.run.run_id):
        publishing.fence(world, engine, problem)


def _credit(world: World, attempt: Attempt, tokens: bytes) -> None:
    """The engine holds KV of these tokens, computed by one version."""
    rollout = attempt.rollout
    if attempt.kv_version is not None:
        namespace = rollout.run.lineage(rollout.spec.pool).namespace(attempt.kv_version)
        world.index.insert(namespace, tokens, attempt.engine.cache_key)


def _discredit(world: World, attempt: Attempt, cached_tokens: int) -> None:
    """Less was cached than was believed, by whatever version."""
    rollout = attempt.rollout
    for namespace, _ in rollout.run.lineage(rollout.spec.pool).lookups:
        world.index.forget(namespace, attempt.token_bytes, attempt.engine.cache_key, cached_tokens)


def _wake_followers(world: World, attempt: Attempt) -> None:
    """Siblings held for this attempt may go."""
    entry = _waiting_siblings(attempt.rollout)
    if entry is not None and entry.leader_id == attempt.attempt_id:
        entry.hits_at = -1.0
        queueing.wake(world, entry)


def _waiting_siblings(rollout: Rollout) -> Entry | None:
    """The entry this rollout was dispatched from, while others still wait there."""
    siblings = rollout.siblings
    return siblings if siblings is not None and siblings.members else None


def _grow_claim(world: World, attempt: Attempt) -> int:
    """Book more KV before the attempt outgrows what it booked; returns with how many tokens to look again."""
    settings = world.config.budget
    sent = len(attempt.token_bytes) // TOKEN_BYTES
    enough = attempt.permit.kv_tokens - sent - settings.headroom_tokens
    if attempt.generated_tokens <= enough:
        return enough + 1
    most = sent + attempt.rollout.remaining_tokens
    page = attempt.engine.facts.page_tokens
    wanted = min(most, sent + attempt.generated_tokens + settings.growth_tokens)
    wanted = -(-wanted // page) * page
    if wanted > attempt.permit.kv_tokens:
        attempt.permit.grow(wanted - attempt.permit.kv_tokens)
        run = attempt.rollout.run
        if budgeting.kv_exceeded(run, attempt.engine):
            budgeting.enforce(world, run, outgrown=True)
    return attempt.permit.kv_tokens - sent - settings.headroom_tokens + 1


def _learn_speed(world: World, attempt: Attempt, tokens: int) -> None:
    if attempt.first_token_at is not None and tokens >= 8:
        engine = attempt.engine
        engine.note_decode((world.now - attempt.first_token_at) / tokens)
        if engine.room is not None:
            engine.room.note_pace(engine)


def _count_engine(attempt: Attempt, piece: Piece) -> None:
    attempt.engine.generated_tokens += len(piece.token_bytes) // TOKEN_BYTES


def _interrupted(world: World, rollout: Rollout, attempt: Attempt, reason: AbortReason | None) -> None:
    """An attempt stopped before its rollout was done."""
    if reason is AbortReason.CANCEL:
        lifecycle.finish(world, rollout, Outcome.CANCELLED)
    elif reason is AbortReason.RUN_ENDED:
        lifecycle.finish(world, rollout, Outcome.RUN_ENDED)
    elif reason is AbortReason.SHUTDOWN:
        lifecycle.finish(world, rollout, Outcome.SHUTDOWN)
    elif reason is AbortReason.DEADLINE:
        lifecycle.finish(world, rollout, Outcome.DEADLINE_EXCEEDED)
    elif reason is AbortReason.SURPLUS:
        lifecycle.finish(world, rollout, Outcome.SURPLUS)
    elif reason is AbortReason.NO_PROGRESS:
        attempt.engine.note_fault(world.now, "no progress", world.config.executor)
        rollout.excluded |= {attempt.engine.engine_id}
        _fault(world, rollout, f"engine {attempt.engine.engine_id} made no progress")
    elif reason is AbortReason.RECALL:
        lifecycle.requeue(world, rollout, "recalled from the engine's queue", keep=True)
    elif reason in (AbortReason.PUBLISH, AbortReason.MEMORY):
        lifecycle.requeue(world, rollout, f"interrupted ({reason.name.lower()})", keep=True)
    elif reason in time_slice.DIVIDING:
        rollout.preemptions += 1
        why = "its time slice is over" if reason is AbortReason.SLICE else "it goes on elsewhere"
        lifecycle.requeue(world, rollout, why, keep=time_slice.keeps_tokens(rollout))
    elif reason in (AbortReason.PREEMPT, AbortReason.BUDGET):
        rollout.preemptions += 1
        rollout.yielded += reason is AbortReason.PREEMPT
        lifecycle.requeue(world, rollout, f"interrupted ({reason.name.lower()})", keep=True)
    else:
        _fault(world, rollout, f"engine {attempt.engine.engine_id} aborted it by itself")


def _fault(world: World, rollout: Rollout, message: str) -> None:
    """One of the rollout's attempts is spent; retry elsewhere while some are left."""
    rollout.faults += 1
    limit = rollout.spec.max_attempts or rollout.run.settings.max_attempts or world.config.executor.max_attempts
    if rollout.faults >= limit:
        error = Refusal(
            Code.UNAVAILABLE,
            "ENGINE_FAILED",
            f"{rollout.faults} of {limit} attempts failed; last: {message}",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
        lifecycle.finish(world, rollout, Outcome.ENGINE_FAILED, error)
    else:
        _retry(world, rollout, message)


def _retry(world: World, rollout: Rollout, message: str) -> None:
    world.retried_total += 1
    world.decide(DecisionKind.RETRIED, rollout, message, gate=Gate.OPEN)
    lifecycle.requeue(world, rollout, message, keep=rollout.on_preempt is not OnPreempt.RESTART)
