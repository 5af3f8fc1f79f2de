"""What one run uses and what it may use: counters by class and task type against the budget in force.

Invariants
- Counters are sums over the run's permits and queued rollouts; `check()` of the core re-derives them.
- A ceiling is hard. A share binds only while somebody else of the run wants the room. A floor is lent while unused, and while
  its work could not start whatever room it had (`stalled_*`, noted by `budgeting`).

What this module does not know: engines' room, scores, who is next.
"""

from __future__ import annotations

import math
from typing import Final

from rolloutd.scheduler.rules.book import NO_KNOBS
from rolloutd.scheduler.rules.knobs import Knobs
from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import Gate, RolloutClass, TaskType

NO_QUOTA: Final = Quota()


class Ledger:
    __slots__ = (
        "_class_floors",
        "_class_quotas",
        "_cap_factor",
        "_has_quotas",
        "_share_factors",
        "_shares_turned",
        "_task_floors",
        "_task_quotas",
        "budget",
        "class_queued",
        "class_running",
        "floor_classes",
        "floor_tasks",
        "has_floors",
        "kv_tokens",
        "running",
        "stalled_classes",
        "stalled_tasks",
        "task_queued",
        "task_running",
    )

    def __init__(self, budget: Budget) -> None:
        self.adopt(budget)
        self.turn(NO_KNOBS)
        self.running = 0
        self.kv_tokens = 0
        self.stalled_classes: frozenset[RolloutClass] = frozenset()  # below their floor, and room would not help them
        self.stalled_tasks: frozenset[TaskType] = frozenset()
        self.class_running = [0] * len(RolloutClass)
        self.task_running = [0] * len(TaskType)
        self.class_queued = [0] * len(RolloutClass)
        self.task_queued = [0] * len(TaskType)

    def adopt(self, budget: Budget) -> None:
        """Put a budget in force."""
        self.budget = budget
        self._class_quotas = [budget.classes.get(one, NO_QUOTA) for one in RolloutClass]
        self._task_quotas = [budget.tasks.get(one, NO_QUOTA) for one in TaskType]
        self._has_quotas = bool(budget.classes or budget.tasks)
        self.floor_classes = tuple(one for one in RolloutClass if self._class_quotas[one].floor_rollouts)
        self.floor_tasks = tuple(one for one in TaskType if self._task_quotas[one].floor_rollouts)
        # The same as plain numbers, (class or task type, floor): asked for every turn, and an enum is a slow index.
        self._class_floors = [(int(one), self._class_quotas[one].floor_rollouts) for one in self.floor_classes]
        self._task_floors = [(int(one), self._task_quotas[one].floor_rollouts) for one in self.floor_tasks]
        self.has_floors = bool(self.floor_classes or self.floor_tasks)

    def turn(self, knobs: Knobs) -> None:
        """Put in force what the run's rules make of shares and of the cap on running rollouts."""
        self._cap_factor = knobs.cap_factor
        self._share_factors = knobs.share_factors
        self._shares_turned = knobs.shares_turned

    def turned(self) -> tuple[float, list[float]]:
        """The cap and the shares as factors, as they are in force (for checks)."""
        return self._cap_factor, self._share_factors

    @property
    def queued(self) -> int:
        return sum(self.class_queued)

    def book(self, rollout_class: RolloutClass, task_type: TaskType, slots: int, kv_tokens: int) -> None:
        self.running += slots
        self.kv_tokens += kv_tokens
        self.class_running[rollout_class] += slots
        self.task_running[task_type] += slots

    def enqueue(self, rollout_class: RolloutClass, task_type: TaskType, count: int) -> None:
        self.class_queued[rollout_class] += count
        self.task_queued[task_type] += count

    # limits ------------------------------------------------------------------------------------------------------------

    def ceiling(self, slots: int) -> int:
        """Rollouts that may run at once, of `slots` that the run's engines have. Rules leave room for one at least."""
        limit = self.budget.max_rollouts
        ceiling = slots if limit is None else min(slots, limit)
        return ceiling if self._cap_factor == 1.0 else min(ceiling, max(1, int(self._cap_factor * ceiling)))

    def class_owed(self, rollout_class: RolloutClass) -> int:
        """Rollouts that this class is below its floor and could run."""
        missing = self._class_quotas[rollout_class].floor_rollouts - self.class_running[rollout_class]
        return min(missing, self.class_queued[rollout_class]) if missing > 0 else 0

    def task_owed(self, task_type: TaskType) -> int:
        missing = self._task_quotas[task_type].floor_rollouts - self.task_running[task_type]
        return min(missing, self.task_queued[task_type]) if missing > 0 else 0

    def owes(self) -> bool:
        """Whether any class or task type is below its floor and could run."""
        for number, floor in self._class_floors:
            if self.class_running[number] < floor and self.class_queued[number]:
                return True
        for number, floor in self._task_floors:
            if self.task_running[number] < floor and self.task_queued[number]:
                return True
        return False

    def class_open(self, rollout_class: RolloutClass) -> bool:
        """Whether the class is below its own ceiling."""
        limit = self._class_quotas[rollout_class].max_rollouts
        return limit is None or self.class_running[rollout_class] < limit

    def task_open(self, task_type: TaskType) -> bool:
        limit = self._task_quotas[task_type].max_rollouts
        return limit is None or self.task_running[task_type] < limit

    def gate(self, rollout_class: RolloutClass, task_type: TaskType, slots: int) -> Gate:
        """Whether the budget lets one more rollout of this class and task type run; KV is asked separately."""
        budget = self.budget
        if budget.max_rollouts is not None and self.running >= budget.max_rollouts:
            return Gate.CEILING_ROLLOUTS
        if self._cap_factor != 1.0 and self.running >= self.ceiling(slots):
            return Gate.CEILING_ROLLOUTS
        if not self._has_quotas and not self._shares_turned:
            return Gate.OPEN
        if not self.class_open(rollout_class):
            return Gate.CLASS_CEILING
        if not self.task_open(task_type):
            return Gate.TASK_CEILING
        owing = self.has_floors and self.owes()  # mostly nothing is, and who and how much is dear to ask
        if owing and (self.class_owed(rollout_class) or self.task_owed(task_type)):
            return Gate.OPEN
        return self._soft_gate(rollout_class, task_type, self.ceiling(slots), owing)

    def _soft_gate(self, rollout_class: RolloutClass, task_type: TaskType, ceiling: int, owing: bool) -> Gate:
        """Shares and, where `owing`, the floors of others; only reached by work above its own floors."""
        if owing:
            class_owed = task_owed = 0
            for one in self.floor_classes:
                if one is not rollout_class and one not in self.stalled_classes:
                    class_owed += self.class_owed(one)
            for other in self.floor_tasks:
                if other is not task_type and other not in self.stalled_tasks:
                    task_owed += self.task_owed(other)
            if 0 < max(class_owed, task_owed) and ceiling - self.running <= max(class_owed, task_owed):
                return Gate.FLOOR_OWED
        share = self._class_quotas[rollout_class].share
        if self._shares_turned:
            if self.class_running[rollout_class] >= math.ceil(self._left_by_raised(rollout_class) * ceiling):
                return Gate.CLASS_SHARE
            share = min(1.0, share * self._share_factors[rollout_class])
        if share and self.class_running[rollout_class] >= math.ceil(share * ceiling):
            if sum(self.class_queued) > self.class_queued[rollout_class]:
                return Gate.CLASS_SHARE
        share = self._task_quotas[task_type].share
        if share and self.task_running[task_type] >= math.ceil(share * ceiling):
            if sum(self.task_queued) > self.task_queued[task_type]:
                return Gate.TASK_SHARE
        return Gate.OPEN

    def _left_by_raised(self, rollout_class: RolloutClass) -> float:
        """The part of the slots that a class may fill beside classes with a larger factor that wait or run: as its factor stands to
        the largest of theirs. Also while they do not wait: their next work would find the slots taken, for as long as that runs."""
        mine = largest = self._share_factors[rollout_class]
        for other in RolloutClass:
            if self.class_queued[other] or self.class_running[other]:
                largest = max(largest, self._share_factors[other])
        return mine / largest

    def kv_gate(self, kv_tokens: int) -> Gate:
        limit = self.budget.max_kv_tokens
        return Gate.CEILING_KV if limit is not None and self.kv_tokens + kv_tokens > limit else Gate.OPEN
