"""Asserts that nothing passes work that is owed a floor of its budget.

Floors, after every Tick. A class with `floor_rollouts` f is owed d = min(f - running, queued and not held) rollouts. "Within one
rollout" means: d >= 2 never goes together with
    (F1) room: the class's oldest entry, not held, has every gate open on an open engine with a free slot, at rest
    (F2) a dispatch in this Tick, of the same run and pool, of a class that is not owed, to an engine that would still take the
         owed class's oldest entry after it (short work in a slot reserved for it, and a rollout too large for any gap in the
         room kept for it, are nobody else's loss)

What this module does not know: what may run at most (`ceilings`).
"""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler import budgeting, gates, updating
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.events import Event, Tick
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass
from rolloutd.scheduler.world import World
from tests.scheduler.virtual.watched import Key, Watched


class Floors:
    def __init__(self, world: World, watched: dict[Key, Watched], counts: Counter[str]) -> None:
        """`watched`: every accepted rollout, kept up to date by the caller."""
        self.world = world
        self.watched = watched
        self.counts = counts
        self._reserved: set[Rollout] = set()  # for whom room was kept before the event

    def observe(self, event: Event, dispatched: list[Dispatch]) -> None:
        """After every event, with what it dispatched."""
        if isinstance(event, Tick):
            self._check_floors(dispatched)
        self._note_reservations()

    def _check_floors(self, dispatched: list[Dispatch]) -> None:
        world = self.world
        if world.shutting_down:
            return
        for run in world.runs.values():
            if not any(quota.floor_rollouts for quota in run.ledger.budget.classes.values()):
                continue
            for rollout_class, quota in run.ledger.budget.classes.items():
                owed = min(
                    quota.floor_rollouts - run.ledger.class_running[rollout_class], self._ready(run, rollout_class)
                )
                if owed < 2:
                    continue
                for entry in self._oldest_entries(run, rollout_class):
                    self._check_owed(run, entry, owed, dispatched)

    @staticmethod
    def _ready(run: Run, rollout_class: RolloutClass) -> int:
        return sum(
            len(entry.members)
            for entry in run.entries.values()
            if entry.rollout_class is rollout_class and not entry.held
        )

    @staticmethod
    def _oldest_entries(run: Run, rollout_class: RolloutClass) -> list[Entry]:
        found = []
        for (_, its_class, _), backlog in run.backlogs.items():
            if its_class is rollout_class and backlog.count:
                oldest = backlog.oldest()
                if oldest is not None and not oldest.held:
                    found.append(oldest)
        return found

    def _note_reservations(self) -> None:
        """Whom room is kept for; a Tick may use it up."""
        keepers = [engine.reserved_for for engine in self.world.engines.values()]
        keepers += [run.reserved_for for run in self.world.runs.values()]
        self._reserved = {member for keeper in keepers if keeper is not None for member in keeper.members}

    def _check_owed(self, run: Run, entry: Entry, owed: int, dispatched: list[Dispatch]) -> None:
        world = self.world
        ledger = run.ledger
        if budgeting.run_gate(world, run, entry.rollout_class) is not Gate.OPEN:
            return
        what = f"{world.now}: {run.run_id} {entry.rollout_class.name} is owed {owed}"
        self.counts["floors looked at"] += 1
        at_rest = (
            not world.dirty
            and not updating.last_calls_out(world)
            and ledger.gate(entry.rollout_class, entry.task_type, world.run_slots(run)) is Gate.OPEN
        )
        above = self._above_floors(run, dispatched)
        for engine in world.engines.values():
            if not engine.is_open(world.now) or gates.engine_gate(world, entry, engine)[0] is not Gate.OPEN:
                continue
            if at_rest:
                assert engine.free_slots(entry.short, world.room(engine.facts.pool).reserved_short) <= 0, (
                    f"{what} and {engine.engine_id} has room (F1)"
                )
            for action in dispatched:
                if action.run_id != run.run_id or action.engine_id != engine.engine_id:
                    continue
                other = self.watched[run.run_id, action.rollout_id].rollout
                if other in self._reserved or (other.task_type in SHORT_TASKS and not entry.short):
                    continue
                fits = ledger.budget.classes.get(entry.rollout_class, NO_QUOTA).max_rollouts
                task = ledger.budget.tasks.get(entry.task_type, NO_QUOTA).max_rollouts
                blocked = (fits is not None and ledger.class_running[entry.rollout_class] >= fits) or (
                    task is not None and ledger.task_running[entry.task_type] >= task
                )
                assert action.attempt_id not in above or blocked, (
                    f"{what} and {action.rollout_id} went to {engine.engine_id} (F2)"
                )

    def _above_floors(self, run: Run, dispatched: list[Dispatch]) -> set[str]:
        """Attempts of this Tick whose class and task type were at their floors already when they were dispatched."""
        mine = [action for action in dispatched if action.run_id == run.run_id]
        rollouts = [self.watched[run.run_id, action.rollout_id].rollout for action in mine]
        classes = [one - sum(r.rollout_class == c for r in rollouts) for c, one in enumerate(run.ledger.class_running)]
        tasks = [one - sum(r.task_type == t for r in rollouts) for t, one in enumerate(run.ledger.task_running)]
        budget = run.ledger.budget
        above = set()
        for action, rollout in zip(mine, rollouts, strict=True):
            of_class = budget.classes.get(rollout.rollout_class, NO_QUOTA).floor_rollouts
            of_task = budget.tasks.get(rollout.task_type, NO_QUOTA).floor_rollouts
            if classes[rollout.rollout_class] >= of_class and tasks[rollout.task_type] >= of_task:
                above.add(action.attempt_id)
            classes[rollout.rollout_class] += 1
            tasks[rollout.task_type] += 1
        return above
