"""Room for critical work that cannot be placed: interrupt BACKGROUND, then REUSABLE, within guards.

Guards: a minimum run time, a maximum of preemptions per rollout, a cool-down between rounds of one pool, floors of the
victims' classes, task types and runs, `on_preempt: NEVER`, and never the work of the current step nor short work, which ends
by itself before an abort would be worth it. EVALUATION with a
deadline preempts at once, without cool-down and minimum run time. A rule (`rules/`) may open classes of a run to its own critical
work: then neither `preempt.enabled` nor the minimum run time nor the maximum per rollout protects them.

Invariants
- At most as many are interrupted as wait: victims on their way out count as room already made.

What this module does not know: who takes the room; the next pass decides.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import (
    AbortReason,
    Gate,
    OnPreempt,
    Origin,
    RolloutClass,
    TaskType,
)
from rolloutd.scheduler.turns import Turn
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

FloorKey = tuple[str, str, int]  # run id, kind of floor, class or task type

# Of the cool-down passes before those who wait are looked at again when nobody could be interrupted.
FRUITLESS_SHARE: Final = 0.5

CURABLE: Final = frozenset(
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


def may_help(world: World, pool: str) -> bool:
    """Whether interrupting anything is worth thinking about now: a cheap look before a dear one."""
    if not world.yielding:
        return False
    if not world.config.preempt.enabled and not any(run.rules.knobs.preempt for run in world.runs.values()):
        return False
    if _cool(world, pool):
        return True
    return world.evaluations > 0


def make_room(world: World, turn: Turn, gate: Gate) -> None:
    """Called when nothing of a turn could be placed because of `gate`."""
    if turn.rollout_class is not RolloutClass.CRITICAL or gate not in CURABLE or not may_help(world, turn.pool):
        return
    cool = _cool(world, turn.pool)
    evaluations = _evaluations(turn) if turn.backlog.evaluations else 0
    oldest = turn.backlog.oldest()
    if oldest is None or not (cool or evaluations):
        return
    leaving = sum(attempt.engine.facts.pool == turn.pool for attempt in world.aborting.values())
    taken = 0
    if cool:
        waiting = turn.backlog.ready_members(len(world.yielding) + leaving)
        taken = _interrupt(world, turn.run, oldest, gate, waiting - leaving, world.config.preempt.min_run_seconds)
    taken += _interrupt(world, turn.run, oldest, gate, evaluations - leaving - taken, 0.0)
    if taken:
        world.last_preemption[turn.pool] = world.now


def note_fruitless(world: World, pool: str) -> None:
    """Nobody could be interrupted for anyone who waits: that will hardly be different in the next moment."""
    if _cool(world, pool):
        world.fruitless_at[pool] = world.now


def _cool(world: World, pool: str) -> bool:
    seconds = world.config.preempt.cool_down_seconds
    if world.now - world.fruitless_at.get(pool, -1e9) < FRUITLESS_SHARE * seconds:
        return False
    return world.now - world.last_preemption.get(pool, -1e9) >= seconds


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
    spare = _Spare(world, run)
    taken = 0
    for attempt in victims:
        if taken >= wanted:
            break
        if not spare.take(attempt):
            continue
        taken += 1
        world.preempted_total += 1
        attempt.rollout.run.preemptions += 1
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


class _Spare:
    """How many of each class, task type and run may go before a floor is reached; what is on its way out does not count."""

    def __init__(self, world: World, waiting: Run) -> None:
        self._waiting = waiting
        self._left: dict[FloorKey, int] = {}
        self._leaving: Counter[FloorKey] = Counter()
        for attempt in world.aborting.values():
            self._leaving.update(key for key, _, _ in self._floors(attempt))

    def take(self, attempt: Attempt) -> bool:
        """Take one if all its floors allow it."""
        floors = self._floors(attempt)
        for key, floor, running in floors:
            if self._left.setdefault(key, running - self._leaving[key] - floor) <= 0:
                return False
        for key, _, _ in floors:
            self._left[key] -= 1
        return True

    def _floors(self, attempt: Attempt) -> list[tuple[FloorKey, int, int]]:
        """(key, floor, running) of the floors this attempt helps to fill: of its class, its task type, and for another run
        than the waiting one its run. Only floors that are set.
        """
        run = attempt.rollout.run
        ledger = run.ledger
        permit = attempt.permit
        of_class = ledger.budget.classes.get(permit.rollout_class, NO_QUOTA).floor_rollouts
        of_task = ledger.budget.tasks.get(permit.task_type, NO_QUOTA).floor_rollouts
        of_run = 0 if run is self._waiting else run.settings.floor_rollouts
        floors: list[tuple[FloorKey, int, int]] = []
        if of_class:
            running = ledger.class_running[permit.rollout_class]
            floors.append(((run.run_id, "class", permit.rollout_class), of_class, running))
        if of_task:
            floors.append(((run.run_id, "task", permit.task_type), of_task, ledger.task_running[permit.task_type]))
        if of_run:
            floors.append(((run.run_id, "run", 0), of_run, ledger.running))
        return floors


def _victims(world: World, run: Run, pool: str, gate: Gate, min_run_seconds: float) -> list[Attempt]:
    """Who may be interrupted, in the order they go: lowest class first, then who has written least."""
    settings = world.config.preempt
    opened = run.rules.knobs.preempt  # classes of this run that a rule has put at its critical work's disposal
    own_only = gate in (Gate.CEILING_ROLLOUTS, Gate.CEILING_KV, Gate.ENGINE_KV_CEILING)
    found = []
    for attempt in world.yielding.values():
        rollout = attempt.rollout
        if (
            rollout.on_preempt is OnPreempt.NEVER
            or (own_only and rollout.run is not run)
            or not _reachable(world, attempt.engine, run, pool)
        ):
            continue
        guarded = (
            not settings.enabled
            or rollout.yielded >= settings.max_per_rollout
            or world.now - attempt.dispatched_at < min_run_seconds
        )
        if guarded and not (rollout.run is run and rollout.rollout_class in opened):
            continue
        if rollout.needed_by_step is not None and rollout.needed_by_step <= rollout.run.step:
            continue
        found.append(attempt)
    found.sort(key=lambda attempt: (-attempt.rollout.rollout_class, attempt.generated_tokens, attempt.attempt_id))
    return found


def _reachable(world: World, engine: Engine, run: Run, pool: str) -> bool:
    """Whether a slot freed on this engine could go to the waiting run."""
    return engine.is_open(world.now) and world.serves(engine, run, pool, {})
