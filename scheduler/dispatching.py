"""Booking a chosen pair: the permit, the promise, the attempt, what its siblings wait for, and the action itself.

Invariants
- Choosing and booking are one step for the caller, so a burst cannot pile onto one engine.
- The story, the decision and every counter of a dispatch change here.

What this module does not know: how the pair was chosen.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import grouping, queueing, turns
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.choosing import Look
from rolloutd.scheduler.considered import Considered
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lifecycle import arm_timer
from rolloutd.scheduler.permit import Permit
from rolloutd.scheduler.promises import Promise
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import Gate, OnPreempt, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

CLASS_NAMES: Final = tuple(one.name for one in RolloutClass)  # by value; an enum's own look-up of its name is dear


def dispatch(world: World, look: Look, batch_id: int) -> None:
    """Book the permit and send the entry's first member."""
    entry, engine = look.entry, look.engine
    if entry is None or engine is None:
        raise AssertionError("nothing was chosen")
    facts = queueing.entry_facts(world, entry)
    facts.common_tokens = look.common_tokens
    facts.longest_tokens = look.longest_tokens
    run = entry.run
    rollout = entry.members[0]
    expected = entry.expected_tokens
    held = world.index.held(entry.segments, engine.cache_key) if entry.segments else 0
    predicted = min(held, most_cacheable(entry.prompt_tokens, engine.facts.page_tokens))
    token_bytes, text = entry.token_bytes, entry.text
    queueing.take(world, rollout)
    permit = Permit(engine, run.ledger, run.run_id, rollout.rollout_class, rollout.task_type, look.claim)
    rollout.queued_seconds += world.now - rollout.queued_at
    rollout.attempts += 1
    rollout.destination = None
    rollout.last_batch_id = batch_id
    if rollout.attempts == 1:
        rollout.predicted_cached_tokens = predicted
    promise = Promise(entry.prompt_tokens, rollout.remaining_tokens, bool(rollout.spec.sampling.get("ignore_eos")))
    engine.promises.make(promise)
    attempt = Attempt(world.fresh_attempt_id(), rollout, engine, permit, promise, batch_id, world.now, token_bytes)
    attempt.predicted_tokens = predicted
    attempt.slice_tokens = _slice_tokens(world, rollout, entry)
    rollout.attempt = attempt
    rollout.siblings = entry
    world.attempts[attempt.attempt_id] = attempt
    engine.attempts[attempt.attempt_id] = attempt
    grouping.note_started(run, rollout.prompt_hash, engine)
    engine.note_dispatch(world.config.executor)
    engine.batch_since = world.now
    queueing.release_reservations(world, entry)
    entry.blocked_since = None
    if run.mix_hold is not None:
        run.mix_hold.note_state(rollout, RolloutState.QUEUED, RolloutState.DISPATCHED)
    rollout.move(RolloutState.DISPATCHED, world.now, f"to {engine.engine_id} in batch {batch_id}")
    world.note_attempt(attempt)
    arm_timer(world, rollout)
    attempt.charged_tokens = expected + entry.prompt_tokens - predicted
    turns.charge(run, entry.pool, attempt.charged_tokens, entry.short)
    run.mix.note_dispatched(entry.stratum)
    run.mix.note_begun(rollout)
    run.no_capacity_since = None
    world.dispatched_total += 1
    if text is None and predicted + world.config.queue.min_shared_tokens <= entry.prompt_tokens:
        attempt.stems = queueing.entry_stems(entry)
        world.computing.begin(attempt.stems)
    _hold_siblings(world, entry, attempt, predicted)
    world.decide(
        DecisionKind.DISPATCHED,
        rollout,
        f"{CLASS_NAMES[entry.rollout_class]}, waited {round(1e3 * (world.now - rollout.submitted_at))} ms",
        batch_id=batch_id,
        engine_id=engine.engine_id,
        considered=Considered(facts, look.told),
    )
    spec = rollout.spec
    sampling = dict(spec.sampling)
    if spec.seeds:
        sampling["sampling_seed"] = spec.seeds[rollout.sample_index]
    if rollout.pieces and sampling.get("min_new_tokens"):
        sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - rollout.kept_tokens)
    world.emit(
        Dispatch(
            attempt_id=attempt.attempt_id,
            engine_id=engine.engine_id,
            batch_id=batch_id,
            run_id=run.run_id,
            rollout_id=rollout.rollout_id,
            token_bytes=token_bytes,
            text=text,
            max_new_tokens=0 if spec.task_type is TaskType.REPLAY else attempt.slice_tokens or rollout.remaining_tokens,
            sampling=sampling,
            logprobs=spec.logprobs,
            top_logprobs=spec.top_logprobs,
            prompt_logprobs_from=0 if spec.task_type is TaskType.REPLAY else None,
            engine_params=spec.engine_params,
            cache_salt=engine.salt,
        )
    )


def _slice_tokens(world: World, rollout: Rollout, entry: Entry) -> int:
    """Tokens after which a long rollout may move to another engine; 0 where it writes on to its end."""
    slice_tokens = rollout.run.settings.slice_tokens
    if not slice_tokens or rollout.remaining_tokens <= slice_tokens or entry.text is not None or not rollout.resumable:
        return 0
    if rollout.task_type is TaskType.REPLAY:
        return 0
    if rollout.on_preempt is OnPreempt.RESTART:  # it would start again with each slice
        return 0
    longest = world.longest_prompt(rollout.run, entry.pool, entry.labels)
    return 0 if longest and entry.prompt_tokens + slice_tokens > longest else slice_tokens


def most_cacheable(prompt_tokens: int, page_tokens: int) -> int:
    """Tokens of a prompt that an engine can serve from cache: whole pages, and at least one token is always computed."""
    return max(0, prompt_tokens - 1) // page_tokens * page_tokens


def _hold_siblings(world: World, entry: Entry, leader: Attempt, predicted: int) -> None:
    """Leader first: those that share its prompt wait for its first token, unless the prompt is cached there or too short."""
    if not entry.members or entry.text is not None:
        return
    settings = world.config.queue
    missing = len(leader.token_bytes) // TOKEN_BYTES - predicted
    if missing < max(settings.min_shared_tokens, leader.engine.facts.page_tokens + 1):
        return
    queueing.hold(world, entry, Gate.HELD_FOR_LEADER, world.now + settings.leader_timeout_seconds)
    entry.leader_id = leader.attempt_id
    entry.held_at = world.now
    if entry.rollout_class is RolloutClass.CRITICAL and not entry.short:
        entry.run.led.append(entry)
    world.decide(
        DecisionKind.HELD,
        entry.members[0],
        f"leader {leader.rollout.rollout_id} computes the prompt",
        gate=Gate.HELD_FOR_LEADER,
    )
