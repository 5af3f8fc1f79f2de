"""Late binding without anything else: one queue, and whoever is first goes to the emptiest engine with a free slot.

Invariants
- Nothing waits at an engine for a slot (it may wait there for memory, as these arms know of none).
- The order is that of the key alone, ties by arrival.

What this module does not know: classes, prefixes, memory, lengths (but for the oracle, which is told them).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rolloutd.bench.arms.pool import ArmEngine, ArmPool, ArmRollout


def oldest_first(rollout: ArmRollout) -> int:
    """The order of arrival."""
    return rollout.number


def longest_first(rollout: ArmRollout) -> int:
    """The oracle's: longest output first."""
    return -rollout.hidden_output_tokens


class LateBinding(ArmPool):
    """`key`: lower goes first."""

    def __init__(self, key: Callable[[ArmRollout], int]) -> None:
        super().__init__()
        self._key = key
        self._queue: list[tuple[int, int, ArmRollout]] = []

    def arrived(self, rollouts: Sequence[ArmRollout]) -> None:
        for rollout in rollouts:
            heapq.heappush(self._queue, (self._key(rollout), rollout.number, rollout))
        self._fill()

    def ended(self, engine: ArmEngine) -> None:
        self._fill()

    def _fill(self) -> None:
        while self._queue:
            roomy = [one for one in self.engines if one.in_flight < one.facts.slots and not one.updating]
            if not roomy:
                return
            self.send(heapq.heappop(self._queue)[2], min(roomy, key=lambda one: (one.in_flight, one.number)))
