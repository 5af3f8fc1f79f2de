"""How many samples of a run may be on their way: what is generated far ahead of the trainer is too old when it is taken.

    capacity = (max_staleness + 1) x samples of one training step

A sample is reserved when its group is let in, occupied while it runs and until its result is taken, and consumed when the
trainer acknowledges it; the bound is on all three together. It counts what is outstanding and not versions that went by, so it
is right as well for a trainer that starts again at a high version.

Invariants
- A group is let in as a whole: no set of half-finished groups can keep each other from ending.
- A group that alone exceeds the capacity is let in when nothing else is on its way.
- Those that wait go by class, then by arrival, and nobody passes them: a large group would wait for ever behind small ones.
- Whoever belongs to a group that was let in does not wait.
- Of a group that keeps fewer than it is made of, what it keeps is reserved: the trainer never gets more.

What this module does not know: engines and scores.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from rolloutd.scheduler.states import Origin, TaskType

if TYPE_CHECKING:
    from rolloutd.scheduler.entry import Entry
    from rolloutd.scheduler.rollout import Rollout


class Window:
    __slots__ = ("capacity", "left", "open_to", "outstanding", "waiting", "_heap", "_together")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.left: dict[str, int] = {}  # group or single rollout -> samples of it that are not consumed
        self.open_to: dict[str, int] = {}  # group -> samples that were reserved for it
        self.outstanding = 0
        self.waiting: dict[Entry, str] = {}  # -> its group or single rollout
        self._together: dict[str, dict[Entry, None]] = {}  # group or single rollout -> who waits of it
        self._heap: list[tuple[int, int, int, Entry]] = []  # (class, arrival, sequence, entry), some of them gone

    def admit(self, key: str, samples: int) -> bool:
        """Reserve room for a group, once; more of its samples than were announced are let in with it."""
        if key in self.left:
            more = samples - self.open_to[key]
            if more > 0:
                self._reserve(key, more)
            return True
        if self.outstanding and self.outstanding + samples > self.capacity:
            return False
        self.left[key] = self.open_to[key] = 0
        self._reserve(key, samples)
        return True

    def consume(self, key: str) -> bool:
        """One sample of a group is not on its way any more; true when that made room."""
        left = self.left.get(key)
        if left is None:
            return False
        self.outstanding -= 1
        if left == 1:
            del self.left[key], self.open_to[key]
        else:
            self.left[key] = left - 1
        return True

    def drop(self, key: str) -> bool:
        """A group is over, whatever was reserved for it; true when that made room."""
        left = self.left.pop(key, None)
        self.open_to.pop(key, None)
        self.outstanding -= left or 0
        return bool(left)

    def wait(self, entry: Entry, key: str) -> None:
        self.waiting[entry] = key
        self._together.setdefault(key, {})[entry] = None
        heapq.heappush(self._heap, (entry.rollout_class, entry.arrival, entry.sequence, entry))

    def leave(self, entry: Entry) -> bool:
        """It does not wait any more; true if it did, and others may go first now."""
        key = self.waiting.pop(entry, None)
        if key is None:
            return False
        together = self._together[key]
        del together[entry]
        if not together:
            del self._together[key]
        return True

    def leave_together(self, key: str) -> list[Entry]:
        """Who waited of a group that was let in; they do not any more."""
        waited = list(self._together.pop(key, ()))
        for entry in waited:
            del self.waiting[entry]
        return waited

    def leave_all(self) -> list[Entry]:
        """Who waited; nobody does any more."""
        waited = list(self.waiting)
        self.waiting.clear()
        self._together.clear()
        return waited

    def passes(self, entry: Entry, key: str) -> bool:
        """Whether an entry would be let in before somebody who waits and goes first."""
        first = self.next()
        if first is None or first is entry or key in self.left:
            return False
        return (first.rollout_class, first.arrival) < (entry.rollout_class, entry.arrival)

    def next(self) -> Entry | None:
        """Who waits and goes first."""
        heap = self._heap
        while heap and heap[0][3] not in self.waiting:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def _reserve(self, key: str, samples: int) -> None:
        self.left[key] += samples
        self.open_to[key] += samples
        self.outstanding += samples


def bound(rollout: Rollout) -> bool:
    """Whether it is a sample that the trainer takes: generated by the policy of now, to be trained on."""
    return rollout.spec.task_type is TaskType.GENERATION and rollout.spec.origin is Origin.CURRENT_POLICY


def key_of(rollout: Rollout) -> tuple[str, int]:
    """What it is let in with, and how many samples that is."""
    group = rollout.group
    if group is None:
        return f"/{rollout.rollout_id}", 1
    return group.group_id, group.keep or max(group.size, len(group.members))
