"""Room for critical work that cannot be placed: interrupt BACKGROUND, then REUSABLE, within guards.

Guards: a minimum run time, a maximum of preemptions per rollout, a cool-down between rounds of one pool, floors of the
victims' classes, task types and runs, `on_preempt: NEVER`, and never the work of the current step. EVALUATION with a
deadline preempts at once, without cool-down and minimum run time.

Invariants
- At most as many are interrupted as wait: victims on their way out count as room already made.

What this module does not know: who takes the room; the next pass decides.
"""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, Gate, OnPreempt, Origin, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.turns import Turn
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

FloorKey = tuple[str, str, int]  # run id, kind of floor, class or task type

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
    if not settings.enabled or turn.rollout_class is not RolloutClass.CRITICAL or gate not in CURABLE:
        return
    oldest = turn.backlog.oldest()
    if oldest is None or not any(sum(other.ledger.class_running[1:]) for other in world.runs.values()):
        return
    pool = oldest.pool
    cool = world.now - world.last_preemption.get(pool, -1e9) >= settings.cool_down_seconds
    evaluations = _evaluations(turn) if turn.backlog.evaluations else 0
    if not cool and not evaluations:
        return
    leaving = sum(
        1
        for attempt in world.attempts.values()
        if attempt.engine.facts.pool == pool and attempt.rollout.state is RolloutState.ABORTING
    )
    taken = 0
    if cool:
        ready = [entry for entry in turn.backlog.entries() if not entry.held]
        waiting = sum(len(entry.members) for entry in ready)
        taken = _interrupt(world, turn.run, oldest, gate, waiting - leaving, settings.min_run_seconds)
    taken += _interrupt(world, turn.run, oldest, gate, evaluations - leaving - taken, 0.0)
    if taken:
        world.last_preemption[pool] = world.now


def _evaluations(turn: Turn) -> int:
    """Evaluation with a deadline among those that go next: it waits for no cool-down and no minimum run time."""
    heads = turn.backlog.candidates((), lambda _: 0.0, frozenset(TaskType))
    return sum(
        len(entry.members)
        for entry in heads
        if entry.deadline_at is not None and entry.members[0].spec.origin is Origin.EVALUATION
    )


def _interrupt(world: World, run: Run, waiting: Entry, gate: Gate, wanted: int, min_run_seconds: float) -> int:
    """Interrupt up to `wanted` attempts that have run for `min_run_seconds`; returns how many went."""
    if wanted <= 0:
        return 0
    victims = _victims(world, run, waiting.pool, gate, min_run_seconds)
    if not victims:
        return 0
    staying: Counter[FloorKey] = Counter()
    for attempt in world.attempts.values():
        if attempt.rollout.state is not RolloutState.ABORTING:
            staying.update(_floors(attempt, run).keys())
    taken = 0
    for attempt in victims:
        if taken >= wanted:
            break
        floors = _floors(attempt, run)
        if any(staying[key] <= floor for key, floor in floors.items()):
            continue
        staying.subtract(dict.fromkeys(floors, 1))
        taken += 1
        world.preempted_total += 1
        first = waiting.members[0].rollout_id
        lifecycle.abort(world, attempt.rollout, AbortReason.PREEMPT, f"room for {first}")
        world.decide(
            DecisionKind.PREEMPTED,
            attempt.rollout,
            f"room for critical {first}",
            engine_id=attempt.engine.engine_id,
            gate=gate,
        )
    return taken


def _floors(attempt: Attempt, waiting: Run) -> dict[FloorKey, int]:
    """The floors this attempt helps to fill: of its class, its task type and, for another run than the waiting one, its run."""
    run = attempt.rollout.run
    budget = run.ledger.budget
    permit = attempt.permit
    return {
        (run.run_id, "class", permit.rollout_class): budget.classes.get(permit.rollout_class, NO_QUOTA).floor_rollouts,
        (run.run_id, "task", permit.task_type): budget.tasks.get(permit.task_type, NO_QUOTA).floor_rollouts,
        (run.run_id, "run", 0): 0 if run is waiting else run.settings.floor_rollouts,
    }


def _victims(world: World, run: Run, pool: str, gate: Gate, min_run_seconds: float) -> list[Attempt]:
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
            or rollout.yielded >= settings.max_per_rollout
            or world.now - attempt.dispatched_at < min_run_seconds
            or not _reachable(world, attempt.engine, run, pool)
        ):
            continue
        if rollout.needed_by_step is not None and rollout.needed_by_step <= rollout.run.step:
            continue
        if own_only and rollout.run is not run:
            continue
        found.append(attempt)
    found.sort(key=lambda attempt: (-attempt.rollout.rollout_class, attempt.generated_tokens, attempt.attempt_id))
    return found


def _reachable(world: World, engine: Engine, run: Run, pool: str) -> bool:
    """Whether a slot freed on this engine could go to the waiting run."""
    return engine.is_open(world.now) and world.serves(engine, run, pool, {})
