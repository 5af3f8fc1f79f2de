"""Lower classes leave the engines that run the last rollouts of a step, where others have room for them.

Which rollout is the last is not known when its neighbours are chosen (`tail.py` goes by what is expected), and neighbours that
run for long are still there when it turns out. Their tokens are kept: going on elsewhere costs a prefill of what they have so far.

Invariants
- Nobody is moved who would start again, who has hardly begun or is nearly done, or who was moved often; no more leave in one
  look than have room elsewhere, and no more than `MOST_AT_ONCE`.
- An engine is cleared only when it is fuller than twice the slowdown allows, and then down to what it allows, so that one move does
  not bring on the next.

What this module does not know: where they go on; the next pass decides.
"""

from __future__ import annotations

from rolloutd.scheduler import lifecycle, tail
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, OnPreempt
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

MOST_AT_ONCE = 8
GRACE = 2.0  # times the slowdown that is allowed: less than that is left alone
LEAST_LEFT_TOKENS = 256.0  # expected of one that is moved: it would be done soon


def clear_tail(world: World, run: Run) -> None:
    """One look, once a second."""
    settings = world.config
    if not settings.policy.tail_moves or not settings.preempt.enabled or not world.yielding:
        return
    if not tail.is_on(world, run):
        return
    crowded: list[tuple[Engine, int]] = []
    spare = 0
    for engine in world.engines.values():
        if not engine.is_open(world.now) or not world.serves(engine, run, engine.facts.pool, {}):
            continue
        free = engine.free_slots(False, settings.queue.reserved_short_slots)
        awaited = tail.awaited(world, run, engine)
        if not awaited:
            spare += max(0, free)
            continue
        beside = engine.slots_used - awaited - engine.short_used
        allowed = tail.most_beside(world, run, engine)
        if beside > tail.most_beside(world, run, engine, grace=GRACE):
            crowded.append((engine, beside - allowed))
        else:
            spare += max(0, min(free, allowed - beside))
    leaving = len(world.aborting)
    spare = min(spare - leaving, MOST_AT_ONCE)
    for engine, excess in crowded:
        for attempt in _movable(world, run, engine)[: max(0, min(excess, spare))]:
            spare -= 1
            _move(world, attempt)


def _movable(world: World, run: Run, engine: Engine) -> list[Attempt]:
    """Who may be moved away from an engine, in the order they go: who has least to compute again."""
    settings = world.config.preempt
    found = []
    for attempt in engine.attempts.values():
        rollout = attempt.rollout
        if attempt.attempt_id not in world.yielding or rollout.run is not run or rollout.excluded:
            continue
        if rollout.needed_by_step is not None and rollout.needed_by_step <= run.step + 1:
            continue
        if rollout.on_preempt is not OnPreempt.KEEP_PARTIAL or not rollout.resumable:
            continue
        if rollout.moved >= settings.max_per_rollout or world.now - attempt.dispatched_at < settings.min_run_seconds:
            continue
        if attempt.expected_left_tokens() >= LEAST_LEFT_TOKENS:
            found.append(attempt)
    found.sort(key=lambda one: (one.generated_tokens + len(one.token_bytes), one.attempt_id))
    return found


def _move(world: World, attempt: Attempt) -> None:
    world.preempted_total += 1
    attempt.rollout.moved += 1
    engine_id = attempt.engine.engine_id
    lifecycle.abort(world, attempt.rollout, AbortReason.PREEMPT, f"leaves {engine_id} to the last critical rollouts")
    world.decide(
        DecisionKind.PREEMPTED,
        attempt.rollout,
        "leaves the last critical rollouts of the step alone",
        engine_id=engine_id,
    )
