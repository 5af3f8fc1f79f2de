"""How many rollouts an engine really runs: learned from its own queue.

Slots are what an engine runs at most. How many it admits depends on memory it promises to each (SGLang charges a running
request with its remaining max_new_tokens), which nobody outside can compute. So: when an engine lets work wait although it
prefills nothing, it is full; what waits there comes back, where it can still be re-ordered or go elsewhere, and the number
that runs becomes the engine's limit for long work. While nothing waits there the limit rises again, more slowly after each
time that was too early. `budget.learn_limits` switches that off: what an engine lets wait stays in its queue.

Invariants
- Work recalled has no token yet; a recall is neither a fault of the engine nor an attempt of the rollout.
- Short work is not limited and not recalled: it fits where a long generation does not.
- An engine that is empty, or has run at its limit without a queue until the limit reached its slots, has no limit. Switched off
  while there are limits, each is gone with its engine's next report.

What this module does not know: memory, other engines.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import EngineLoad
from rolloutd.scheduler.states import SHORT_TASKS, AbortReason, RolloutState
from rolloutd.scheduler.world import World

# A prefill pass of the largest usual chunk (16k tokens) ends within this on any engine worth having.
FULL_AFTER_SECONDS: Final = 1.0
FIRST_RAISE_SECONDS: Final = 1.0
LAST_RAISE_SECONDS: Final = 60.0
RAISE_DIVISOR: Final = 32  # a raise is this part of the slots, at least 1


def note_load(world: World, engine: Engine, load: EngineLoad) -> None:
    """Take one load report; recalls what waits in an engine that is full."""
    now = world.now
    moved = load.prefilled_tokens_total != engine.queue_prefilled_tokens
    engine.queue_prefilled_tokens = load.prefilled_tokens_total
    if not world.config.budget.learn_limits:
        engine.queue_since = None
        if engine.limit is not None:
            _lift_limit(world, engine)
        return
    if not load.waiting_rollouts:
        engine.queue_since = None
        _raise_limit(world, engine)
    elif moved or engine.queue_since is None or not engine.ready:
        engine.queue_since = now
    elif now - engine.queue_since >= FULL_AFTER_SECONDS:
        _recall(world, engine, engine.queue_since)
        engine.queue_since = now


def _raise_limit(world: World, engine: Engine) -> None:
    if engine.limit is None:
        return
    if not engine.slots_used:
        _lift_limit(world, engine)
    elif engine.slots_used >= engine.limit and world.now >= engine.raise_at:
        engine.limit += max(1, engine.facts.slots // RAISE_DIVISOR)
        engine.raise_at = world.now + engine.raise_seconds
        if engine.limit >= engine.facts.slots:
            _lift_limit(world, engine)
        else:
            _note_room(world, engine)


def _lift_limit(world: World, engine: Engine) -> None:
    engine.limit = None
    engine.raise_seconds = FIRST_RAISE_SECONDS
    _note_room(world, engine)


def _note_room(world: World, engine: Engine) -> None:
    engine.note_room()
    world.dirty = True


def _recall(world: World, engine: Engine, since: float) -> None:
    waiting = [
        attempt
        for attempt in engine.attempts.values()
        if attempt.first_token_at is None
        and attempt.dispatched_at <= since
        and attempt.rollout.state is RolloutState.DISPATCHED
        and attempt.permit.task_type not in SHORT_TASKS
    ]
    if not waiting:
        return
    engine.limit = max(1, engine.slots_used - len(waiting))
    engine.note_room()
    engine.raise_at = world.now + engine.raise_seconds
    engine.raise_seconds = min(2.0 * engine.raise_seconds, LAST_RAISE_SECONDS)
    for attempt in waiting:
        lifecycle.abort(world, attempt.rollout, AbortReason.RECALL, f"engine {engine.engine_id} let it wait")
    world.record(
        "info", "engine_full", engine=engine.engine_id, limit_rollouts=engine.limit, recalled_rollouts=len(waiting)
    )
