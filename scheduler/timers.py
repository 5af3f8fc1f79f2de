"""Things that become due: timers that can be taken back.

Structure: those due in the next second or two are a heap; the others lie in buckets by whole second, unordered, each knowing
its place, so that taking one back frees it at once. Most timers are taken back long before they are due.

Invariants
- Timers fire in order of their time, those of one time in order of their making; each at most once, a cancelled one never.
- Cancelled timers cost memory only in the heap, until they outnumber the live ones there.
- No call costs more than the timers of one second.

What this module does not know: what a timer means. `pop_due` hands back the (kind, subject) pair it was given.
"""

from __future__ import annotations

import enum
import heapq
import math
from typing import Any, Final

from mypy_extensions import mypyc_attr

REBUILD_MINIMUM: Final = 1024
MOST_SECONDS: Final = 1e15  # what is due later shares one bucket


class TimerKind(enum.IntEnum):
    ROLLOUT = 0
    LEASE = 1
    HOLD = 2
    DISCONNECT = 3
    SHUTDOWN = 4
    ENGINE = 5
    HOUSEKEEPING = 6
    UPDATE = 7
    PLACE = 8
    RULES = 9
    MIX = 10


@mypyc_attr(acyclic=True)
class Timer:
    """`subject` None means cancelled or fired."""

    __slots__ = ("bucket", "due", "kind", "place", "sequence", "subject")

    def __init__(self, due: float, kind: TimerKind, subject: Any, sequence: int) -> None:
        self.due = due
        self.kind = kind
        self.subject = subject
        self.sequence = sequence  # order among timers due at the same time
        self.bucket: list[Timer] | None = None  # that holds it, at `place`; None: it is in the heap
        self.place = 0


class Timers:
    def __init__(self) -> None:
        self._near: list[tuple[float, int, Timer]] = []  # a heap of those due before `_near_until`
        self._near_until = -math.inf
        self._dead = 0  # cancelled ones in the heap
        self._later: dict[int, list[Timer]] = {}  # by whole second
        self._seconds: list[int] = []  # a heap with every second of `_later`, and some that are empty now
        self._sequence = 0

    def add(self, due: float, kind: TimerKind, subject: Any) -> Timer:
        self._sequence += 1
        timer = Timer(due, kind, subject, self._sequence)
        if due < self._near_until:
            heapq.heappush(self._near, (due, timer.sequence, timer))
            return timer
        second = int(min(due, MOST_SECONDS))
        bucket = self._later.get(second)
        if bucket is None:
            bucket = self._later[second] = []
            heapq.heappush(self._seconds, second)
        timer.bucket = bucket
        timer.place = len(bucket)
        bucket.append(timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Take a timer back; None and fired timers are ignored."""
        if timer is None or timer.subject is None:
            return
        timer.subject = None
        bucket = timer.bucket
        if bucket is None:
            self._dead += 1
            if self._dead > REBUILD_MINIMUM and 2 * self._dead > len(self._near):
                self._near = [item for item in self._near if item[2].subject is not None]
                heapq.heapify(self._near)
                self._dead = 0
            return
        timer.bucket = None
        last = bucket.pop()
        if last is not timer:
            bucket[timer.place] = last
            last.place = timer.place
        if not bucket:
            del self._later[int(min(timer.due, MOST_SECONDS))]
            if len(self._seconds) > REBUILD_MINIMUM and len(self._seconds) > 2 * len(self._later):
                self._seconds = sorted(self._later)

    def next_due(self) -> float:
        """Time of the earliest live timer; inf when there is none."""
        while True:
            near = self._near
            while near and near[0][2].subject is None:
                heapq.heappop(near)
                self._dead -= 1
            if near:
                return near[0][0]
            if not self._seconds:
                return math.inf
            second = heapq.heappop(self._seconds)
            bucket = self._later.pop(second, None)
            if bucket is None:
                continue
            for timer in bucket:
                timer.bucket = None
            self._near = [(timer.due, timer.sequence, timer) for timer in bucket]
            heapq.heapify(self._near)
            self._near_until = math.inf if second >= MOST_SECONDS else second + 1.0

    def pop_due(self, now: float) -> tuple[TimerKind, Any] | None:
        """The next timer due at `now`, removed; None when nothing is."""
        if self.next_due() > now:
            return None
        timer = heapq.heappop(self._near)[2]
        subject, timer.subject = timer.subject, None
        return timer.kind, subject

    def live(self) -> list[Timer]:
        """Those that are neither cancelled nor fired, in no order (for checks)."""
        near = [timer for _, _, timer in self._near if timer.subject is not None]
        return near + [timer for bucket in self._later.values() for timer in bucket]

    def __len__(self) -> int:
        return len(self._near) - self._dead + sum(len(bucket) for bucket in self._later.values())
