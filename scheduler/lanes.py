"""The queue of one (run, pool, class, short or long): ordered by the part of the score that does not move.

Structure: one lane per kind of entry (`LaneKey`): what a gate or a moving term depends on, so that work which may not start
never stands before work which may. A lane is a small sorted front before a heap, keyed by
`Entry.static_key` (lower goes first). Beside the lanes, one heap per engine holds the entries whose prefix that engine has,
keyed by static key minus their prefix bonus: this keeps prefix hits although only a few heads per lane are looked at.
Deletion is lazy: an item counts only while its sequence number is the entry's.

Invariants
- Every entry here is in exactly one lane or held; `count` is the number of entries, `ready` those in lanes.
- Stale items never outnumber live ones by more than a constant, so memory is bounded by what is queued.
- Keys with and without a deadline are not comparable and never share a lane, nor a ranking of lanes.
- A lane without entries is forgotten when it is looked at.

What this module does not know: how keys and bonuses are made, engines, budgets. `lanes_naive.py` is the twin it is tested
against.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.states import Gate, TaskType

FRONT = 8  # sorted items kept before the heap
HEADS_PER_LANE = 3
LANES_LOOKED_AT = 8  # with a deadline, and as many without
HEADS_PER_ENGINE = 2
MAX_AFFINE_ENGINES = 4  # engines whose affinity heap one entry enters
COMPACT_MINIMUM = 64

Item = tuple[float, int, int, Entry]  # (key, tie-break, sequence, entry)


class LaneKey(NamedTuple):
    """Entries of one lane are alike in this."""

    stratum: str
    timed: bool
    task_type: TaskType
    continuation: bool
    labels: tuple[tuple[str, str], ...]


def lane_key(entry: Entry) -> LaneKey:
    timed = entry.deadline_at is not None
    return LaneKey(entry.stratum, timed, entry.task_type, entry.continuation, entry.key.labels)


def _live(item: Item) -> bool:
    return item[3].sequence == item[2]


class Lane:
    """Entries of one kind in key order, ties by the given tie-break."""

    __slots__ = ("_front", "_heap", "_stale")

    def __init__(self) -> None:
        self._front: list[Item] = []
        self._heap: list[Item] = []
        self._stale = 0

    def push(self, item: Item) -> None:
        if not self._heap or (self._front and item < self._front[-1]):
            insort(self._front, item)
            if len(self._front) > 2 * FRONT:
                for moved in self._front[FRONT:]:
                    heapq.heappush(self._heap, moved)
                del self._front[FRONT:]
        else:
            heapq.heappush(self._heap, item)

    def note_stale(self) -> None:
        """One of the items here stopped being live."""
        self._stale += 1
        if self._stale > COMPACT_MINIMUM and 2 * self._stale > len(self._front) + len(self._heap):
            self._front = [item for item in self._front if _live(item)]
            self._heap = [item for item in self._heap if _live(item)]
            heapq.heapify(self._heap)
            self._stale = 0

    def heads(self, count: int) -> list[Entry]:
        """The first `count` live entries (fewer where there are fewer), in order; nothing is removed."""
        front = [item for item in self._front if _live(item)]
        self._stale -= len(self._front) - len(front)
        while len(front) < count and self._heap:
            item = heapq.heappop(self._heap)
            if _live(item):
                front.append(item)
            else:
                self._stale -= 1
        self._front = front
        return [item[3] for item in front[:count]]


class Backlog:
    __slots__ = ("_affine", "_arrivals", "_lanes", "brief", "count", "evaluations", "held", "ready", "tasks")

    def __init__(self) -> None:
        self._lanes: dict[LaneKey, Lane] = {}
        self._affine: dict[str, Lane] = {}
        self._arrivals: deque[Entry] = deque()
        self.count = 0
        self.ready = 0
        self.held = 0
        self.brief = 0  # entries that hold a slot only for a moment
        self.evaluations = 0  # entries whose data are for evaluation
        self.tasks = [0] * len(TaskType)  # entries by task type

    # membership --------------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take an entry in, not ordered yet: `order` or `hold` must follow."""
        entry.backlog = self
        self.count += 1
        self.tasks[entry.task_type] += 1
        self.evaluations += entry.evaluation
        self.brief += entry.brief
        self._arrivals.append(entry)

    def order(self, entry: Entry, sequence: int, tie: int, bonuses: Iterable[tuple[str, float]]) -> None:
        """Put an entry into its lane (again) under its static key; `bonuses` are (engine cache key, prefix bonus)."""
        self._take_out(entry)
        entry.sequence = sequence
        entry.held_gate = Gate.OPEN
        self.ready += 1
        self._lane(entry).push((entry.static_key, tie, sequence, entry))
        best = sorted(bonuses, key=lambda bonus: -bonus[1])[:MAX_AFFINE_ENGINES]
        for engine, bonus in best:
            self._affine.setdefault(engine, Lane()).push((entry.static_key - bonus, tie, sequence, entry))
        entry.affine = tuple(engine for engine, _ in best)

    def hold(self, entry: Entry, sequence: int, gate: Gate) -> None:
        """Keep an entry out of the lanes until it is ordered again."""
        self._take_out(entry)
        entry.sequence = sequence
        entry.held_gate = gate
        self.held += 1

    def remove(self, entry: Entry, sequence: int) -> None:
        self._take_out(entry)
        entry.sequence = sequence
        entry.backlog = None
        entry.held_gate = Gate.OPEN
        self.count -= 1
        self.tasks[entry.task_type] -= 1
        self.evaluations -= entry.evaluation
        self.brief -= entry.brief

    def forget_engine(self, engine: str) -> None:
        self._affine.pop(engine, None)

    # looking -----------------------------------------------------------------------------------------------------------

    def candidates(
        self,
        engines: Iterable[str],
        lane_bonus: Callable[[str], float],
        tasks: Container[TaskType],
        heads_per_lane: int = HEADS_PER_LANE,
    ) -> list[Entry]:
        """A bounded set of entries worth scoring: lane heads, heads of the engines' affinity heaps, and the oldest.

        engines: cache keys of engines with room. lane_bonus: what a stratum's moving terms are worth now. tasks: task
        types that may start now; entries of others are left out.
        """
        found: dict[int, Entry] = {}
        for entry in self._lane_heads(lane_bonus, tasks, heads_per_lane):
            found[entry.sequence] = entry
        for engine in engines:
            affine = self._affine.get(engine)
            if affine is None:
                continue
            heads = affine.heads(HEADS_PER_ENGINE)
            if not heads:
                del self._affine[engine]
            for entry in heads:
                if entry.task_type in tasks:
                    found[entry.sequence] = entry
        oldest = self.oldest()
        if oldest is not None and not oldest.held and oldest.task_type in tasks:
            found[oldest.sequence] = oldest
        return list(found.values())

    def _lane_heads(
        self, lane_bonus: Callable[[str], float], tasks: Container[TaskType], heads_per_lane: int
    ) -> Iterable[Entry]:
        ranked: tuple[list[tuple[float, int, list[Entry]]], ...] = ([], [])  # without and with a deadline
        empty = []
        for key, lane in self._lanes.items():
            if key.task_type not in tasks:
                continue
            heads = lane.heads(heads_per_lane)
            if heads:
                ranked[key.timed].append((heads[0].static_key - lane_bonus(key.stratum), heads[0].sequence, heads))
            else:
                empty.append(key)
        for key in empty:
            del self._lanes[key]
        for of_a_kind in ranked:
            if len(of_a_kind) > LANES_LOOKED_AT:
                of_a_kind = heapq.nsmallest(LANES_LOOKED_AT, of_a_kind)
            for _, _, heads in of_a_kind:
                yield from heads

    def oldest(self) -> Entry | None:
        """The entry that arrived first among those still here (held or not)."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].backlog is not self:
            arrivals.popleft()
        if len(arrivals) > COMPACT_MINIMUM and len(arrivals) > 2 * self.count:
            self._arrivals = arrivals = deque(entry for entry in arrivals if entry.backlog is self)
        return arrivals[0] if arrivals else None

    def entries(self) -> list[Entry]:
        """All entries, in order of arrival (for checks and views)."""
        return list({id(entry): entry for entry in self._arrivals if entry.backlog is self}.values())

    def _take_out(self, entry: Entry) -> None:
        """Leave lane or hold, where the entry is in one."""
        if entry.held_gate is not Gate.OPEN:
            self.held -= 1
        elif self._in_lane(entry):
            self.ready -= 1
            lane = self._lanes.get(lane_key(entry))
            if lane is not None:
                lane.note_stale()
            for engine in entry.affine:
                affine = self._affine.get(engine)
                if affine is not None:
                    affine.note_stale()
            entry.affine = ()

    def _in_lane(self, entry: Entry) -> bool:
        return entry.sequence > 0

    def _lane(self, entry: Entry) -> Lane:
        return self._lanes.setdefault(lane_key(entry), Lane())
