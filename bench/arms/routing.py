"""Early binding: a router gives every request to an engine the moment it arrives, and the engine queues it.

Invariants
- A request is sent on at once; while weights change it waits at the engine's gate, as it would at a real one.

What this module does not know: which engine; that is the rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rolloutd.bench.arms.pool import ArmEngine, ArmPool, ArmRollout

Rule = Callable[[ArmRollout, Sequence[ArmEngine]], ArmEngine]


class Router(ArmPool):
    """`rule` chooses among all engines."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule

    def arrived(self, rollouts: Sequence[ArmRollout]) -> None:
        for rollout in rollouts:
            self.send(rollout, self._rule(rollout, self.engines))
