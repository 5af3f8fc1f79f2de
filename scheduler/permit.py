"""The right to run one attempt: what was booked, by whom, and its release.

Invariants
- A permit books one slot and some KV tokens on one engine and in one run's ledger, in one step with the choice of the engine.
- It releases exactly what it booked, once; a second release is a bug and raises.
- It can grow (the attempt outgrew its claim) and change class (promotion), never change engine.

What this module does not know: whether booking was wise; that was decided before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.states import SHORT_TASKS, RolloutClass, TaskType

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.ledger import Ledger


@mypyc_attr(acyclic=True)
class Permit:
    __slots__ = ("engine", "kv_tokens", "ledger", "released", "rollout_class", "run_id", "task_type")

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        run_id: str,
        rollout_class: RolloutClass,
        task_type: TaskType,
        kv_tokens: int,
    ) -> None:
        self.engine = engine
        self.ledger = ledger
        self.run_id = run_id
        self.rollout_class = rollout_class
        self.task_type = task_type
        self.kv_tokens = kv_tokens
        self.released = False
        self._book(1, kv_tokens)

    def grow(self, kv_tokens: int) -> None:
        """Book `kv_tokens` more."""
        self.kv_tokens += kv_tokens
        self._book(0, kv_tokens)

    def change_class(self, rollout_class: RolloutClass) -> None:
        self._book(-1, -self.kv_tokens)
        self.rollout_class = rollout_class
        self._book(1, self.kv_tokens)

    def release(self) -> None:
        if self.released:
            raise AssertionError("permit released twice")
        self.released = True
        self._book(-1, -self.kv_tokens)

    def _book(self, slots: int, kv_tokens: int) -> None:
        engine = self.engine
        engine.slots_used += slots
        engine.kv_claimed_tokens += kv_tokens
        mine = engine.kv_by_run.get(self.run_id, 0) + kv_tokens
        if mine:
            engine.kv_by_run[self.run_id] = mine
        else:
            engine.kv_by_run.pop(self.run_id, None)
        if self.task_type in SHORT_TASKS:
            engine.short_used += slots
        elif self.rollout_class is RolloutClass.CRITICAL:
            engine.critical_used += slots
        if slots and engine.room is not None:
            engine.room.note(engine)
        self.ledger.book(self.rollout_class, self.task_type, slots, kv_tokens)
