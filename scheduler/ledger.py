"""What one run uses and what it may use: counters by class and task type against the budget in force.

Invariants
- Counters are sums over the run's permits and queued rollouts; `check()` of the core re-derives them.
- A ceiling is hard. A share binds only while somebody else of the run wants the room. A floor is lent while unused, and while
  its work could not start whatever room it had (`stalled_*`, noted by `budgeting`).

What this module does not know: engines' room, scores, who is next.
"""

from __future__ import annotations

import math

from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import Gate, RolloutClass, TaskType

NO_QUOTA = Quota()


class Ledger:
    __slots__ = (
        "budget",
        "class_queued",
        "class_running",
        "kv_tokens",
        "running",
        "stalled_classes",
        "stalled_tasks",
        "task_queued",
        "task_running",
    )

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.running = 0
        self.kv_tokens = 0
        self.stalled_classes: frozenset[RolloutClass] = frozenset()  # below their floor, and room would not help them
        self.stalled_tasks: frozenset[TaskType] = frozenset()
        self.class_running = [0] * len(RolloutClass)
        self.task_running = [0] * len(TaskType)
        self.class_queued = [0] * len(RolloutClass)
        self.task_queued = [0] * len(TaskType)

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
        """Rollouts that may run at once, of `slots` that the run's engines have."""
        limit = self.budget.max_rollouts
        return slots if limit is None else min(slots, limit)

    @property
    def has_floors(self) -> bool:
        """Whether the budget has any quota that could be a floor."""
        return bool(self.budget.classes or self.budget.tasks)

    def class_owed(self, rollout_class: RolloutClass) -> int:
        """Rollouts that this class is below its floor and could run."""
        quota = self.budget.classes.get(rollout_class)
        if quota is None:
            return 0
        return max(0, min(quota.floor_rollouts - self.class_running[rollout_class], self.class_queued[rollout_class]))

    def task_owed(self, task_type: TaskType) -> int:
        quota = self.budget.tasks.get(task_type)
        if quota is None:
            return 0
        return max(0, min(quota.floor_rollouts - self.task_running[task_type], self.task_queued[task_type]))

    def class_open(self, rollout_class: RolloutClass) -> bool:
        """Whether the class is below its own ceiling."""
        limit = self.budget.classes.get(rollout_class, NO_QUOTA).max_rollouts
        return limit is None or self.class_running[rollout_class] < limit

    def task_open(self, task_type: TaskType) -> bool:
        limit = self.budget.tasks.get(task_type, NO_QUOTA).max_rollouts
        return limit is None or self.task_running[task_type] < limit

    def gate(self, rollout_class: RolloutClass, task_type: TaskType, slots: int) -> Gate:
        """Whether the budget lets one more rollout of this class and task type run; KV is asked separately."""
        budget = self.budget
        if budget.max_rollouts is not None and self.running >= budget.max_rollouts:
            return Gate.CEILING_ROLLOUTS
        if not budget.classes and not budget.tasks:
            return Gate.OPEN
        if not self.class_open(rollout_class):
            return Gate.CLASS_CEILING
        if not self.task_open(task_type):
            return Gate.TASK_CEILING
        class_quota = budget.classes.get(rollout_class, NO_QUOTA)
        task_quota = budget.tasks.get(task_type, NO_QUOTA)
        if self.class_owed(rollout_class) or self.task_owed(task_type):
            return Gate.OPEN
        return self._soft_gate(rollout_class, task_type, class_quota, task_quota, self.ceiling(slots))

    def _soft_gate(
        self, rollout_class: RolloutClass, task_type: TaskType, class_quota: Quota, task_quota: Quota, ceiling: int
    ) -> Gate:
        """Shares and the floors of others; only reached by work above its own floors."""
        classes = (one for one in self.budget.classes if one is not rollout_class and one not in self.stalled_classes)
        tasks = (one for one in self.budget.tasks if one is not task_type and one not in self.stalled_tasks)
        owed = max(sum(self.class_owed(one) for one in classes), sum(self.task_owed(one) for one in tasks))
        if 0 < owed and ceiling - self.running <= owed:
            return Gate.FLOOR_OWED
        over_class = class_quota.share and self.class_running[rollout_class] >= math.ceil(class_quota.share * ceiling)
        if over_class and any(self.class_queued[other] for other in RolloutClass if other is not rollout_class):
            return Gate.CLASS_SHARE
        over_task = task_quota.share and self.task_running[task_type] >= math.ceil(task_quota.share * ceiling)
        if over_task and any(self.task_queued[other] for other in TaskType if other is not task_type):
            return Gate.TASK_SHARE
        return Gate.OPEN

    def kv_gate(self, kv_tokens: int) -> Gate:
        limit = self.budget.max_kv_tokens
        return Gate.CEILING_KV if limit is not None and self.kv_tokens + kv_tokens > limit else Gate.OPEN
