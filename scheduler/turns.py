"""Whose turn it is: which run, then short or long work, then which class.

    runs: below their floor first, then the least virtual tokens (expected tokens / fairness weight)
    floors: what is below a floor goes before everything else of its run
    kind: short and long work alternate by quantum while both wait
    class: every `overdue_turn`-th dispatch to the one that waits longest, past `overdue_seconds`; every
           n-th to a lower class in the STABLE phase while the trainer does not wait; else CRITICAL, REUSABLE, BACKGROUND

Invariants
- Every queued class gets its turn: floors, overdue turns and quanta do not depend on scores (property P5).

What this module does not know: engines and scores. A turn that cannot be placed is handed back by the caller as blocked.
"""

from __future__ import annotations

import math

from rolloutd.scheduler.lanes import Backlog
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutClass
from rolloutd.scheduler.world import World


class Turn:
    __slots__ = ("backlog", "overdue", "pool", "rollout_class", "run", "short")

    def __init__(self, run: Run, pool: str, rollout_class: RolloutClass, short: bool, backlog: Backlog) -> None:
        self.run = run
        self.pool = pool
        self.rollout_class = rollout_class
        self.short = short
        self.backlog = backlog
        self.overdue = False  # for the one that waits longest, whatever its score


def next_turn(
    world: World,
    pool: str,
    blocked: set[tuple[str, RolloutClass, bool]],
    long_room: bool = True,
) -> Turn | None:
    """The turn that goes next in this pool, leaving out what the caller found blocked; None when nothing waits.

    long_room: whether any engine has a slot that long work may take; else only short work has a turn.
    """
    waiting = world.waiting.get(pool)
    if not waiting:
        return None
    tried: list[Run] = []
    while len(tried) < len(waiting):
        run = _first_run(waiting, tried, pool)
        tried.append(run)
        run_id = run.run_id
        turns = [
            Turn(run, pool, rollout_class, short, backlog)
            for (rollout_class, short), backlog in run.ready[pool].items()
            if (long_room or short) and (not blocked or (run_id, rollout_class, short) not in blocked)
        ]
        if not turns:
            continue
        if len(turns) > 1 and run.ledger.has_floors and run.ledger.owes():
            below = [turn for turn in turns if owed(run, turn)]
            if below:
                return _first(below)
        return _class_turn(world, run, _kind_turn(world, run, turns))
    return None


def charge(run: Run, pool: str, expected_tokens: float, short: bool) -> None:
    """A turn was used: advance the run's virtual time and its counters."""
    run.virtual_tokens[pool] = run.virtual_tokens.get(pool, 0.0) + expected_tokens / run.settings.fairness_weight
    run.dispatches += 1
    if short:
        run.kind_streak = max(1, run.kind_streak + 1)
    else:
        run.kind_streak = min(-1, run.kind_streak - 1)


def settle(run: Run, pool: str, expected_tokens: float, actual_tokens: float) -> None:
    """The true cost is known now."""
    run.virtual_tokens[pool] += (actual_tokens - expected_tokens) / run.settings.fairness_weight


def rejoin(world: World, run: Run, pool: str) -> None:
    """A run that had nothing queued in a pool comes back: it may not use up the time it was away at once.

    It starts level with the least of those who are there; where nobody is, with the most of all, so that whoever comes
    next finds it level.
    """
    others = [other for other in world.runs.values() if other is not run and pool in other.virtual_tokens]
    if not others:
        run.virtual_tokens[pool] = max(run.virtual_tokens.get(pool, 0.0), 0.0)
        return
    running = {run_id for engine in world.engines.values() if engine.facts.pool == pool for run_id in engine.kv_by_run}
    present = [other.virtual_tokens[pool] for other in others if other.run_id in running or other.waits_in(pool)]
    base = min(present) if present else max((other.virtual_tokens[pool] for other in others), default=0.0)
    run.virtual_tokens[pool] = max(run.virtual_tokens.get(pool, 0.0), base)


def _first_run(waiting: dict[Run, None], tried: list[Run], pool: str) -> Run:
    """Of those not tried yet: below its floor first, then the least virtual tokens, then by name."""
    first: Run | None = None
    least = math.inf
    first_met = True
    for run in waiting:
        if tried and run in tried:
            continue
        met = run.ledger.running >= run.settings.floor_rollouts
        tokens = run.virtual_tokens.get(pool, 0.0)
        if first is not None:
            if met is not first_met:
                if met:
                    continue
            elif tokens > least or (tokens == least and run.run_id > first.run_id):
                continue
        first, least, first_met = run, tokens, met
    assert first is not None, "the caller counts those that were tried"
    return first


def _first(turns: list[Turn]) -> Turn:
    """By class, short work before long work of the same class."""
    first = turns[0]
    for turn in turns:
        if turn.rollout_class < first.rollout_class or (
            turn.rollout_class is first.rollout_class and turn.short and not first.short
        ):
            first = turn
    return first


def _kind_turn(world: World, run: Run, turns: list[Turn]) -> list[Turn]:
    """Short work first; after its quantum, or inside the quantum of long work, long work: neither blocks the other."""
    settings = world.config.queue
    short = [turn for turn in turns if turn.short]
    long = [turn for turn in turns if not turn.short]
    if not short or not long:
        return turns
    if run.kind_streak >= settings.short_quantum or -settings.long_quantum < run.kind_streak < 0:
        return long
    return short


def _class_turn(world: World, run: Run, turns: list[Turn]) -> Turn:
    settings = world.config.queue
    if run.dispatches % settings.overdue_turn == settings.overdue_turn - 1:
        overdue = [turn for turn in turns if _waited(world, turn) > settings.overdue_seconds]
        if overdue:
            longest = max(overdue, key=lambda turn: (_waited(world, turn), -turn.rollout_class, turn.short))
            longest.overdue = True
            return longest
    first = _first(turns)
    every = lower_turn(world, run)
    if every and run.dispatches % every == every - 1:
        lower = [turn for turn in turns if turn.rollout_class is not first.rollout_class]
        if lower:
            return _first(lower)
    return first


def lower_turn(world: World, run: Run) -> int:
    """Every how many dispatches a lower class goes before waiting critical work; 0: never (cold start, trainer waiting)."""
    settings = world.config.policy
    if not run.phase.blend:
        return 0
    relaxed = run.phase.blend * (1.0 - run.pressure(world.now))
    return math.ceil(settings.stable_lower_turn / relaxed) if relaxed > 0.01 else 0


def owed(run: Run, turn: Turn) -> bool:
    """Whether this turn's class, or a task type of its kind, is below its floor."""
    ledger = run.ledger
    if ledger.class_owed(turn.rollout_class):
        return True
    return any(turn.backlog.tasks[task] and ledger.task_owed(task) for task in ledger.floor_tasks)


def _waited(world: World, turn: Turn) -> float:
    oldest = turn.backlog.oldest()
    return 0.0 if oldest is None else world.now - oldest.queued_at
