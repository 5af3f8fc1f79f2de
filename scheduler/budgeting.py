"""Stage one: what each run may use now. Budgets set, shrunk, leased; gates asked by the placement; ceilings enforced.

Invariants
- Ceilings are hard: nothing is placed over one, and when one shrinks below what runs, work is interrupted by class until what
  is left fits, within `budget.shrink_seconds`.
- A lease that runs out falls back to the configured default budget, with a warning.

What this module does not know: scores.
"""

from __future__ import annotations

import math

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.actions import NoticeKind
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import (
    AbortReason,
    Code,
    Gate,
    OnPreempt,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
)
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World


def set_budget(world: World, run: Run, budget: Budget) -> Refusal | None:
    """Put a budget in force; None when it is accepted."""
    refusal = _check(budget) or _check_memory_known(world, run, budget)
    if refusal is not None:
        return refusal
    world.timers.cancel(run.lease_timer)
    run.lease_timer = None
    if budget.lease_seconds > 0.0:
        run.lease_timer = world.timers.add(world.now + budget.lease_seconds, TimerKind.LEASE, run)
    _apply(world, run, budget, NoticeKind.BUDGET_CHANGED, "budget set by the trainer")
    return None


def lease_expired(world: World, run: Run) -> None:
    run.lease_timer = None
    world.record("warning", "budget_lease_expired", run=run.run_id)
    _apply(
        world,
        run,
        world.config.budget.default,
        NoticeKind.BUDGET_LEASE_EXPIRED,
        "lease ran out: back to the configured default",
    )


def back_to_default(world: World, run: Run, message: str) -> None:
    """Put the configured default budget in force."""
    _apply(world, run, world.config.budget.default, NoticeKind.BUDGET_CHANGED, message)


def _apply(world: World, run: Run, budget: Budget, notice: NoticeKind, message: str) -> None:
    run.ledger.adopt(budget)
    run.reserved_for = None  # it may fit now, or never
    world.dirty = True
    world.notify(run, notice, message)
    enforce(world, run)


def _check(budget: Budget) -> Refusal | None:
    for name in ("max_rollouts", "max_kv_tokens", "training_reserved_mb", "max_inference_mb"):
        value = getattr(budget, name)
        if value is not None and not 0 <= value < math.inf:
            return invalid(name, f"is {value}; must be a finite number, 0 or more")
    if not 0.0 <= budget.lease_seconds < math.inf:
        return invalid(
            "lease_seconds", f"is {budget.lease_seconds}; must be a finite number of seconds, 0 for no lease"
        )
    quotas: list[tuple[str, Quota]] = [(f"classes[{key.name}]", quota) for key, quota in budget.classes.items()]
    quotas += [(f"tasks[{key.name}]", quota) for key, quota in budget.tasks.items()]
    for name, quota in quotas:
        if not 0.0 <= quota.share <= 1.0:
            return invalid(f"{name}.share", f"is {quota.share}; must be 0 to 1")
        if quota.max_rollouts is not None and quota.floor_rollouts > quota.max_rollouts:
            return invalid(
                f"{name}.floor_rollouts", f"is {quota.floor_rollouts}, above max_rollouts ({quota.max_rollouts})"
            )
    for name, floors in (("classes", budget.classes.values()), ("tasks", budget.tasks.values())):
        total = sum(quota.floor_rollouts for quota in floors)
        if budget.max_rollouts is not None and total > budget.max_rollouts:
            return invalid(f"{name}.floor_rollouts", f"sum to {total}, above max_rollouts ({budget.max_rollouts})")
    return None


def _check_memory_known(world: World, run: Run, budget: Budget) -> Refusal | None:
    """A limit in MB needs engines that say what their KV cache weighs."""
    if budget.training_reserved_mb is None and budget.max_inference_mb is None:
        return None
    for engine in world.engines.values():
        facts = engine.facts
        if not facts.kv_cache_bytes and (not engine.owner or engine.owner == run.run_id):
            return Refusal(
                Code.FAILED_PRECONDITION,
                "ENGINE_MEMORY_UNKNOWN",
                f"engine {facts.engine_id} does not report the size of its KV cache, so a limit in MB cannot hold there; "
                "use max_kv_tokens",
            )
    return None


# gates -----------------------------------------------------------------------------------------------------------------


def run_gate(world: World, run: Run, rollout_class: RolloutClass) -> Gate:
    """Whether this run may start anything of this class now."""
    if world.shutting_down:
        return Gate.SHUTTING_DOWN
    state = run.report.trainer_state
    if run.paused or run.ended or state is TrainerState.PAUSED:
        return Gate.RUN_PAUSED
    if state is TrainerState.SYNCING and rollout_class is RolloutClass.CRITICAL:
        return Gate.TRAINER_SYNCING
    limit = world.undelivered_limit_bytes(run)
    if run.undelivered_bytes > limit:
        return Gate.UNDELIVERED
    return Gate.OPEN


def engine_kv_limit(run: Run, engine: Engine) -> int:
    """KV tokens this run may claim on this engine: the engine's capacity less what the budget's MB limits take away."""
    limit = engine.facts.kv_capacity_tokens
    budget = run.ledger.budget
    per_mb = engine.tokens_per_mb()
    if per_mb:
        if budget.training_reserved_mb is not None:
            limit = min(limit, max(0, int(limit - budget.training_reserved_mb * per_mb)))
        if budget.max_inference_mb is not None:
            limit = min(limit, int(budget.max_inference_mb * per_mb))
    return limit


def kv_exceeded(run: Run, engine: Engine) -> bool:
    """Whether claims have outgrown a KV ceiling of the run's budget (interrupted work that is still leaving counts too)."""
    limit = run.ledger.budget.max_kv_tokens
    if limit is not None and run.ledger.kv_tokens > limit:
        return True
    budget = run.ledger.budget
    if budget.training_reserved_mb is None and budget.max_inference_mb is None:
        return False
    return engine.kv_by_run.get(run.run_id, 0) > engine_kv_limit(run, engine)


def note_stalled(world: World, run: Run) -> bool:
    """Find floors that hold no room now, because their work could not start in it: no engine of its pool takes work, the
    trainer syncs, another ceiling is reached, it waits for a version or to be let in. True when that changed.
    """
    ledger = run.ledger
    if not ledger.owes() and not ledger.stalled_classes and not ledger.stalled_tasks:
        return False
    classes = {one for one in ledger.floor_classes if ledger.class_owed(one)}
    tasks = {one for one in ledger.floor_tasks if ledger.task_owed(one)}
    if classes or tasks:
        for (pool, rollout_class, _), backlog in run.backlogs.items():
            if backlog.count and _may_start(world, run, pool, rollout_class):
                able = [one for one in TaskType if backlog.tasks[one] > backlog.shut_out[one] and ledger.task_open(one)]
                tasks.difference_update(able)
                if able:
                    classes.discard(rollout_class)
    before = (ledger.stalled_classes, ledger.stalled_tasks)
    ledger.stalled_classes, ledger.stalled_tasks = frozenset(classes), frozenset(tasks)
    return before != (ledger.stalled_classes, ledger.stalled_tasks)


def _may_start(world: World, run: Run, pool: str, rollout_class: RolloutClass) -> bool:
    """Whether work of this pool and class could start if there were room."""
    return (
        run_gate(world, run, rollout_class) is Gate.OPEN
        and run.ledger.class_open(rollout_class)
        and any(engine.is_open(world.now) and world.serves(engine, run, pool, {}) for engine in world.engines.values())
    )


# enforcement -----------------------------------------------------------------------------------------------------------


def enforce(world: World, run: Run, *, outgrown: bool = False) -> None:
    """Interrupt work until what stays fits every ceiling of the run's budget. `outgrown`: because running work grew."""
    budget = run.ledger.budget
    live = [
        attempt
        for attempt in world.attempts.values()
        if attempt.rollout.run is run and attempt.rollout.state is not RolloutState.ABORTING
    ]
    if not live:
        return
    victims = _floors_last(budget, sorted(live, key=_victim_order))
    for rollout_class in RolloutClass:
        limit = budget.classes.get(rollout_class, NO_QUOTA).max_rollouts
        _interrupt_over(
            world,
            [a for a in victims if a.permit.rollout_class is rollout_class],
            limit,
            None,
            f"{rollout_class.name} ceiling",
        )
    for task_type in TaskType:
        limit = budget.tasks.get(task_type, NO_QUOTA).max_rollouts
        _interrupt_over(
            world, [a for a in victims if a.permit.task_type is task_type], limit, None, f"{task_type.name} ceiling"
        )
    _interrupt_over(world, victims, budget.max_rollouts, budget.max_kv_tokens, "budget ceiling")
    if budget.training_reserved_mb is not None or budget.max_inference_mb is not None:
        for engine in {attempt.engine.engine_id: attempt.engine for attempt in victims}.values():
            here = [attempt for attempt in victims if attempt.engine is engine]
            _interrupt_over(world, here, None, engine_kv_limit(run, engine), f"memory ceiling on {engine.engine_id}")
    if outgrown:
        for attempt in live:
            attempt.rollout.outgrown += attempt.rollout.state is RolloutState.ABORTING


def _victim_order(attempt: Attempt) -> tuple[int, bool, bool, int]:
    """First to be interrupted: lowest class; last those that never want to be; then who has written least."""
    rollout = attempt.rollout
    current = rollout.needed_by_step is not None and rollout.needed_by_step <= rollout.run.step
    return (
        -int(attempt.permit.rollout_class),
        current,
        rollout.on_preempt is OnPreempt.NEVER,
        attempt.generated_tokens + rollout.kept_tokens,
    )


def _floors_last(budget: Budget, victims: list[Attempt]) -> list[Attempt]:
    """The same order, but what fills the floors of classes and task types goes after everything else."""
    kept: set[str] = set()
    for rollout_class, quota in budget.classes.items():
        mine = [attempt.attempt_id for attempt in victims if attempt.permit.rollout_class is rollout_class]
        kept.update(mine[max(0, len(mine) - quota.floor_rollouts) :])
    for task_type, quota in budget.tasks.items():
        mine = [attempt.attempt_id for attempt in victims if attempt.permit.task_type is task_type]
        kept.update(mine[max(0, len(mine) - quota.floor_rollouts) :])
    return sorted(victims, key=lambda attempt: attempt.attempt_id in kept)


def _interrupt_over(
    world: World, victims: list[Attempt], max_rollouts: int | None, max_kv_tokens: int | None, why: str
) -> None:
    """Abort from the front of `victims` until the rest fits both limits (None: no limit)."""
    left = [attempt for attempt in victims if attempt.rollout.state is not RolloutState.ABORTING]
    rollouts = len(left)
    kv_tokens = sum(attempt.permit.kv_tokens for attempt in left)
    for attempt in left:
        fits = max_rollouts is None or rollouts <= max_rollouts
        if fits and (max_kv_tokens is None or kv_tokens <= max_kv_tokens):
            return
        rollouts -= 1
        kv_tokens -= attempt.permit.kv_tokens
        lifecycle.abort(world, attempt.rollout, AbortReason.BUDGET, why)
        world.decide(
            DecisionKind.INTERRUPTED,
            attempt.rollout,
            why,
            engine_id=attempt.engine.engine_id,
            gate=Gate.CEILING_ROLLOUTS,
        )
