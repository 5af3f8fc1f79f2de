"""Engines joining, leaving, reporting.

Invariants
- A new incarnation starts with an empty cache in the index and no attempts: what the old process ran is failed over.
- A removed engine's attempts are aborted and end by their own reports; the engine is forgotten when the last one did.

What this module does not know: how engines are reached.
"""

from __future__ import annotations

from rolloutd.scheduler import admission, attempts, budgeting, lifecycle, publishing
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import AttemptFailed, EngineLoad, EngineReadiness, JoinEngine, LoseEngine
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.spec import EngineFacts
from rolloutd.scheduler.states import AbortReason, FaultKind, RolloutState
from rolloutd.scheduler.world import World


def join(world: World, event: JoinEngine) -> Refusal | None:
    facts = event.facts
    refusal = _check(facts)
    if refusal is not None:
        return refusal
    old = world.engines.get(facts.engine_id)
    world.fleet_mark += 1
    if old is not None and old.room is not None:
        old.room.leave(old)
    world.leaving.pop(facts.engine_id, None)
    if old is not None and old.facts.incarnation == facts.incarnation:
        old.most_slots = max(facts.slots, old.slots_used)
        old.facts = facts
        old.lost = False
        old.ready = True
        old.draining = old.removed = False
        world.room(facts.pool).join(old)
        engine = old
    else:
        if old is not None:
            _bury(world, old, "the engine restarted")
        engine = Engine(facts)
        if facts.engine_version.isdecimal():  # somebody published to it: what it has cached may be of older weights
            engine.salt = world.fresh_salt(facts.engine_version)
        world.engines[facts.engine_id] = engine
        world.fleet_mark += 1  # again: burying the old one looked engines up
        world.room(facts.pool).join(engine)
        world.index.add_engine(engine.cache_key, max(1, facts.page_tokens), _cache_cap(world, facts))
    world.record(
        "info",
        "engine_joined",
        engine=facts.engine_id,
        pool=facts.pool,
        slots=facts.slots,
        incarnation=facts.incarnation,
    )
    publishing.joined(world, engine)
    for run in world.runs.values():
        budgeting.enforce(world, run)
    world.dirty = True
    return None


def lose(world: World, event: LoseEngine) -> None:
    engine = world.engines.get(event.engine_id)
    if engine is None or engine.lost:
        return
    engine.lost = True
    engine.last_error = event.message
    world.fleet_mark += 1
    for attempt in engine.attempts.values():
        lifecycle.arm_timer(world, attempt.rollout)  # its patience is shorter now
    world.record("warning", "engine_lost", engine=event.engine_id, error=event.message, attempts=len(engine.attempts))
    world.dirty = True


def readiness(world: World, event: EngineReadiness) -> None:
    engine = world.engines.get(event.engine_id)
    if engine is None or engine.update is not None or world.now - event.age_seconds < engine.resumed_at:
        return  # it stands still on our word, or did when it was asked
    if engine.ready is not event.ready:
        engine.ready = event.ready
        world.dirty = True


def load(world: World, event: EngineLoad) -> None:
    engine = world.engines.get(event.engine_id)
    if engine is None:
        return
    engine.note_load(event)
    admission.note_load(world, engine, event)
    if engine.lost:
        engine.lost = False
        world.fleet_mark += 1
        world.dirty = True


def drain(world: World, engine: Engine) -> None:
    """Nothing new goes there; what runs, runs on."""
    engine.draining = True
    world.fleet_mark += 1
    world.record("info", "engine_draining", engine=engine.engine_id, attempts=len(engine.attempts))


def remove(world: World, engine: Engine) -> None:
    """Interrupt what runs there (its tokens are kept) and forget the engine when the last attempt has ended."""
    engine.draining = engine.removed = True
    world.fleet_mark += 1
    world.leaving[engine.engine_id] = engine
    for attempt in list(engine.attempts.values()):
        if attempt.rollout.state is not RolloutState.ABORTING:
            lifecycle.abort(world, attempt.rollout, AbortReason.BUDGET, f"engine {engine.engine_id} was removed")
    forget_removed(world)
    world.dirty = True


def forget_removed(world: World) -> None:
    """Of the engines that were removed, those whose last attempt has ended."""
    if not world.leaving:
        return
    for engine in [engine for engine in world.leaving.values() if not engine.attempts]:
        world.timers.cancel(engine.wake_timer)
        _drop_cache(world, engine)
        publishing.left(world, engine, "the engine was removed")
        if engine.room is not None:
            engine.room.leave(engine)
        del world.engines[engine.engine_id]
        del world.leaving[engine.engine_id]
        world.fleet_mark += 1
        world.record("info", "engine_removed", engine=engine.engine_id)


def _bury(world: World, engine: Engine, message: str) -> None:
    """The process is gone and with it its attempts and its cache."""
    engine.lost = engine.removed = True
    publishing.left(world, engine, message)
    for attempt in list(engine.attempts.values()):
        attempts.failed(world, AttemptFailed(attempt.attempt_id, FaultKind.BROKEN, message))
    world.timers.cancel(engine.wake_timer)
    _drop_cache(world, engine)


def _drop_cache(world: World, engine: Engine) -> None:
    world.index.drop_engine(engine.cache_key)
    world.mirror.drop(engine.cache_key)
    for run in world.runs.values():
        for backlog in run.backlogs.values():
            backlog.forget_engine(engine.cache_key)


def _cache_cap(world: World, facts: EngineFacts) -> int:
    """Credited cache never exceeds what the engine can hold."""
    configured = world.config.index.max_cached_tokens
    if configured and facts.kv_capacity_tokens:
        return min(configured, facts.kv_capacity_tokens)
    return configured or facts.kv_capacity_tokens


def _check(facts: EngineFacts) -> Refusal | None:
    if facts.slots < 1:
        return invalid("slots", f"engine {facts.engine_id} offers {facts.slots} slots; at least 1 is needed")
    if facts.page_tokens < 1:
        return invalid("page_tokens", f"engine {facts.engine_id} reports a page of {facts.page_tokens} tokens")
    return None
