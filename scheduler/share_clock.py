"""Taking turns by share: who has had least of what it should have goes next.

Every name has a virtual time that grows by 1 / share with each turn it takes (start-time fair queueing): its next turn starts at
`start` and ends at `finish`. Whoever finishes first goes next; where all have something to do, nobody is ever a whole turn off
its share.

Invariants
- What a name missed while it had nothing to do is made good for `memory` turns of all together (and one of its own), and then
  forgotten: a name that comes back after an hour does not shut out the others.
- Names without a share take no turns here, nor do those with less than `LEAST_SHARE`: where numbers hold one of their turns, they do
  not hold the turns of the others beside it.

What this module does not know: what a turn is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEAST_SHARE: Final = 1e-6  # of all: one turn in a million, more than a run makes rollouts


class ShareClock:
    __slots__ = ("_memory", "_next", "_now", "strides")

    def __init__(self, shares: Mapping[str, float], memory: float) -> None:
        """shares: relative, 0 or more. memory: turns of all together."""
        total = sum(shares.values())
        self.strides = {
            name: total / share for name, share in shares.items() if share > 0.0 and share / total >= LEAST_SHARE
        }
        self._memory = memory
        self._next = dict.fromkeys(self.strides, 0.0)
        self._now = 0.0  # the latest start of all turns taken

    def start(self, name: str) -> float:
        """Raises KeyError for a name without a share."""
        return max(self._next[name], self._now - self.strides[name] - self._memory)

    def finish(self, name: str) -> float:
        return self.start(name) + self.strides[name]

    def take(self, name: str) -> None:
        start = self.start(name)
        self._next[name] = start + self.strides[name]
        self._now = max(self._now, start)

    def give_back(self, name: str) -> None:
        """A turn that was taken came to nothing."""
        self._next[name] -= self.strides[name]
