"""Room for critical work that cannot be placed: interrupt BACKGROUND, then REUSABLE, within guards.

Guards: a minimum run time, a maximum of preemptions per rollout, a cool-down between rounds of one pool, floors of the victims'
classes, `on_preempt: NEVER`, and never the work of the current step. EVALUATION with a deadline preempts without cool-down.

Invariants
- At most as many are interrupted as wait: victims on their way out count as room already made.

What this module does not know: who takes the room; the next pass decides.
"""

from __future__ import annotations

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, Gate, OnPreempt, Origin, RolloutClass, RolloutState
from rolloutd.scheduler.turns import Turn
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

CURABLE = frozenset(
    {
        Gate.ENGINE_SLOTS,
        Gate.ENGINE_KV,
        Gate.PRESSURE,
        Gate.SHORT_RESERVED,
        Gate.CEILING_ROLLOUTS,
        Gate.CEILING_KV,
        Gate.ENGINE_KV_CEILING,
    }
)


def make_room(world: World, turn: Turn, gate: Gate) -> None:
    """Called when nothing of a turn could be placed because of `gate`."""
    settings = world.config.preempt
    run = turn.run
    if not settings.enabled or turn.rollout_class is not RolloutClass.CRITICAL or gate not in CURABLE:
        return
    oldest = turn.backlog.oldest()
    if oldest is None or not any(sum(other.ledger.class_running[1:]) for other in world.runs.values()):
        return
    pool = oldest.pool
    first = oldest.members[0]
    urgent = first.spec.origin is Origin.EVALUATION and first.deadline_at is not None
    since = world.now - world.last_preemption.get(pool, -1e9)
    if since < settings.cool_down_seconds and not urgent:
        return
    leaving = sum(
        1
        for attempt in world.attempts.values()
        if attempt.engine.facts.pool == pool and attempt.rollout.state is RolloutState.ABORTING
    )
    wanted = _waiting(turn) - leaving
    if wanted <= 0:
        return
    taken = 0
    allowance = {other.run_id: _allowance(other) for other in world.runs.values()}
    for attempt in _victims(world, run, pool, gate):
        if taken >= wanted:
            break
        victim = attempt.rollout
        left = allowance[victim.run.run_id]
        if left[victim.rollout_class] <= 0:
            continue
        left[victim.rollout_class] -= 1
        taken += 1
        world.preempted_total += 1
        lifecycle.abort(world, victim, AbortReason.PREEMPT, f"room for {first.rollout_id}")
        world.decide(
            DecisionKind.PREEMPTED,
            victim,
            f"room for critical {first.rollout_id}",
            engine_id=attempt.engine.engine_id,
            gate=gate,
        )
    if taken:
        world.last_preemption[pool] = world.now


def _waiting(turn: Turn) -> int:
    return sum(len(entry.members) for entry in turn.backlog.entries() if not entry.held)


def _allowance(run: Run) -> list[int]:
    """How many of each class may go before the class falls below its floor."""
    quotas = run.ledger.budget.classes
    return [
        max(0, run.ledger.class_running[rollout_class] - quotas.get(rollout_class, NO_QUOTA).floor_rollouts)
        for rollout_class in RolloutClass
    ]


def _victims(world: World, run: Run, pool: str, gate: Gate) -> list[Attempt]:
    """Who may be interrupted, in the order they go: lowest class first, then who has written least."""
    settings = world.config.preempt
    own_only = gate in (Gate.CEILING_ROLLOUTS, Gate.CEILING_KV, Gate.ENGINE_KV_CEILING)
    found = []
    for attempt in world.attempts.values():
        rollout = attempt.rollout
        if (
            rollout.rollout_class is RolloutClass.CRITICAL
            or rollout.state is RolloutState.ABORTING
            or rollout.on_preempt is OnPreempt.NEVER
            or rollout.preemptions >= settings.max_per_rollout
            or world.now - attempt.dispatched_at < settings.min_run_seconds
            or not _reachable(world, attempt.engine, run, pool)
        ):
            continue
        if rollout.needed_by_step is not None and rollout.needed_by_step <= rollout.run.step:
            continue
        if rollout.run is not run and (own_only or rollout.run.ledger.running <= rollout.run.settings.floor_rollouts):
            continue
        found.append(attempt)
    found.sort(key=lambda attempt: (-attempt.rollout.rollout_class, attempt.generated_tokens, attempt.attempt_id))
    return found


def _reachable(world: World, engine: Engine, run: Run, pool: str) -> bool:
    """Whether a slot freed on this engine could go to the waiting run."""
    return engine.is_open(world.now) and world.serves(engine, run, pool, {})
