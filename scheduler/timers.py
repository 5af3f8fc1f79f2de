"""Things that become due: a heap of timers that can be taken back.

Invariants
- A timer fires at most once; a cancelled one never fires.
- Cancelled timers cost memory only until they outnumber the live ones (then the heap is rebuilt), so the heap is bounded by
  twice the live timers plus a constant, however long their times are.

What this module does not know: what a timer means. `pop_due` hands back the (kind, subject) pair it was given.
"""

from __future__ import annotations

import enum
import heapq
import math
from typing import Any

REBUILD_MINIMUM = 1024


class TimerKind(enum.IntEnum):
    ROLLOUT = 0
    LEASE = 1
    HOLD = 2
    DISCONNECT = 3
    SHUTDOWN = 4
    ENGINE = 5
    HOUSEKEEPING = 6
    UPDATE = 7


class Timer:
    """One entry of the heap; `subject` None means cancelled or fired."""

    __slots__ = ("due", "kind", "subject")

    def __init__(self, due: float, kind: TimerKind, subject: Any) -> None:
        self.due = due
        self.kind = kind
        self.subject = subject


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._dead = 0

    def add(self, due: float, kind: TimerKind, subject: Any) -> Timer:
        timer = Timer(due, kind, subject)
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, timer))
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Take a timer back; None and fired timers are ignored."""
        if timer is None or timer.subject is None:
            return
        timer.subject = None
        self._dead += 1
        if self._dead > REBUILD_MINIMUM and 2 * self._dead > len(self._heap):
            self._heap = [item for item in self._heap if item[2].subject is not None]
            heapq.heapify(self._heap)
            self._dead = 0

    def next_due(self) -> float:
        """Time of the earliest live timer; inf when there is none."""
        heap = self._heap
        while heap and heap[0][2].subject is None:
            heapq.heappop(heap)
            self._dead -= 1
        return heap[0][0] if heap else math.inf

    def pop_due(self, now: float) -> tuple[TimerKind, Any] | None:
        """The next timer due at `now`, removed; None when nothing is."""
        if self.next_due() > now:
            return None
        timer = heapq.heappop(self._heap)[2]
        subject, timer.subject = timer.subject, None
        return timer.kind, subject

    def __len__(self) -> int:
        return len(self._heap) - self._dead
