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
- A lane without entries is forgotten when lanes are ranked.

What this module does not know: how keys and bonuses are made, engines, budgets. `lanes_naive.py` is the twin it is tested
against.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.states import Gate, TaskType

FRONT: Final = 8  # sorted items kept before the heap, or as many as the longest look took
HEADS_PER_LANE: Final = 3
LANES_LOOKED_AT: Final = 6  # with a deadline, and as many without
RANK_LOOKS = 8  # looks between two rankings of the lanes
ENGINES_LOOKED_AT: Final = 4  # whose affinity heaps one look goes into
HEADS_PER_ENGINE: Final = 2
MAX_AFFINE_ENGINES: Final = 8  # engines whose affinity heap one entry enters
COMPACT_MINIMUM: Final = 64
LOOKED_PAST: Final = 64  # arrivals in which the oldest that may go is looked for

Item = tuple[float, int, int, Entry]  # (key, tie-break, sequence, entry)
Flow = tuple[str, bool]  # of one stratum: what is to be trained on (True), or the rest

SHUT_OUT: Final = frozenset({Gate.POLICY_VERSION, Gate.STALENESS})  # holds that may last


class LaneKey(NamedTuple):
    """Entries of one lane are alike in this."""

    stratum: str
    sample: bool  # to train on: its place in a target mix is another than that of the rest of its stratum
    timed: bool
    task_type: TaskType
    continuation: bool
    apart: bool  # some engine has its prompt and it waits, or has waited, for that: others need not stand behind it
    labels: tuple[tuple[str, str], ...]


def lane_key(entry: Entry) -> LaneKey:
    timed = entry.deadline_at is not None
    apart = entry.apart_since is not None
    return LaneKey(entry.stratum, entry.sample, timed, entry.task_type, entry.continuation, apart, entry.key.labels)


def _live(item: Item) -> bool:
    return item[3].sequence == item[2]


@mypyc_attr(acyclic=True)
class Lane:
    """Entries of one kind in key order, ties by the given tie-break."""

    __slots__ = ("_first", "_first_sequence", "_front", "_heap", "_kept", "_stale", "first_key", "key", "ranked")

    def __init__(self, key: LaneKey | None = None) -> None:
        self.key = key  # None: an affinity heap, which has all kinds
        self._front: list[Item] = []
        self._heap: list[Item] = []
        self._kept = FRONT  # items left in the front when it grew too long: as many as the longest look takes
        self._stale = 0
        self._first: Entry | None = None  # found at the last look, while its sequence is still this one
        self._first_sequence = 0
        self.first_key = 0.0  # of what `first` returned
        self.ranked = False  # among those that ranked best

    def push(self, item: Item) -> bool:
        """Take an item in; true when it is the first now."""
        front = self._front
        boxed: Any = item  # once: compiled, a tuple is put into an object each time one is needed
        if not self._heap or (front and item[0] <= front[-1][0] and item < front[-1]):
            if not front or front[-1][0] < item[0]:
                front.append(boxed)
            else:
                insort(front, boxed)
            if len(front) > 2 * self._kept:
                for moved in front[self._kept :]:
                    heapq.heappush(self._heap, moved)
                del front[self._kept :]
            if front[0][2] == item[2]:  # not `is`: compiled, a tuple has no identity
                self._first, self._first_sequence, self.first_key = item[3], item[2], item[0]
                return True
            return False
        heapq.heappush(self._heap, boxed)
        return not front

    def note_stale(self) -> None:
        """One of the items here stopped being live."""
        self._stale += 1
        if self._stale > COMPACT_MINIMUM and 2 * self._stale > len(self._front) + len(self._heap):
            self._front = [item for item in self._front if _live(item)]
            self._heap = [item for item in self._heap if _live(item)]
            heapq.heapify(self._heap)
            self._stale = 0

    def first(self) -> Entry | None:
        """The first live entry; stale items before it are dropped."""
        first = self._first
        if first is not None and first.sequence == self._first_sequence:
            return first
        item = self._first_item()
        if item is None:
            self._first = None
        else:
            self._first, self._first_sequence, self.first_key = item[3], item[2], item[0]
        return self._first

    def _first_item(self) -> Item | None:
        front = self._front
        stale = 0
        for item in front:
            if item[3].sequence == item[2]:
                break
            stale += 1
        if stale:
            del front[:stale]
            self._stale -= stale
        if front:
            return front[0]
        heads = self.heads(1)
        return self._front[0] if heads else None

    def heads(self, count: int) -> list[Entry]:
        """The first `count` live entries (fewer where there are fewer), in order; nothing is removed."""
        if count > self._kept:
            self._kept = count
        found: list[Entry] = []
        for item in self._front:
            if item[3].sequence != item[2]:
                break
            found.append(item[3])
            if len(found) == count:
                return found
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
    __slots__ = (
        "_affine",
        "_arrivals",
        "_lanes",
        "_looks",
        "_looks_left",
        "_note_ready",
        "_top",
        "_top_tasks",
        "_touched",
        "_turn",
        "count",
        "evaluations",
        "fruitless_at",
        "held",
        "ready",
        "shut_out",
        "tasks",
    )

    def __init__(self, note_ready: Callable[[Backlog], None] | None = None) -> None:
        """note_ready: called when `ready` leaves 0 and when it becomes 0."""
        self._note_ready = note_ready
        self._lanes: dict[LaneKey, Lane] = {}
        self._affine: dict[str, Lane] = {}
        self._top: list[Lane] = []  # the lanes that ranked best when they were last ranked
        self._top_tasks: frozenset[TaskType] = frozenset()  # for these
        self._touched: dict[Lane, None] = {}  # lanes whose first entry is a newer one
        self._looks_left = 0  # until they are ranked again
        self._looks = 0
        self._turn = 0
        self._arrivals: deque[Entry] = deque()
        self.count = 0
        self.ready = 0
        self.held = 0
        # When a look behind the first entries of its lanes last found nothing (kept by `choosing`).
        self.fruitless_at = -math.inf
        self.evaluations = 0  # entries whose data are for evaluation
        self.tasks = [0] * len(TaskType)  # entries by task type
        self.shut_out = [0] * len(TaskType)  # of these, held for something that room would not bring

    # membership --------------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take an entry in, not ordered yet: `order` or `hold` must follow."""
        entry.backlog = self
        entry.looked_at = 0
        self.count += 1
        self.tasks[entry.task_type] += 1
        self.evaluations += entry.evaluation
        self._arrivals.append(entry)

    def order(self, entry: Entry, sequence: int, tie: int, bonuses: Iterable[tuple[str, float]]) -> None:
        """Put an entry into its lane (again) under its static key; `bonuses` are (engine cache key, prefix bonus)."""
        self._take_out(entry)
        entry.sequence = sequence
        entry.held_gate = Gate.OPEN
        self.ready += 1
        if self.ready == 1 and self._note_ready is not None:
            self._note_ready(self)
        lane = entry.lane = self._lane(entry)
        if lane.push((entry.static_key, tie, sequence, entry)) and not lane.ranked:
            self._touched[lane] = None
        best = list(bonuses)
        if len(best) > MAX_AFFINE_ENGINES:
            best.sort(key=lambda bonus: -bonus[1])
            del best[MAX_AFFINE_ENGINES:]
        names: list[str] = []
        for engine, bonus in best:
            affine = self._affine.get(engine)
            if affine is None:
                affine = self._affine[engine] = Lane()
            affine.push((entry.static_key - bonus, tie, sequence, entry))
            names.append(engine)
        entry.affine = tuple(names)

    def hold(self, entry: Entry, sequence: int, gate: Gate) -> None:
        """Keep an entry out of the lanes until it is ordered again."""
        self._take_out(entry)
        entry.sequence = sequence
        entry.held_gate = gate
        self.held += 1
        self.shut_out[entry.task_type] += gate in SHUT_OUT

    def remove(self, entry: Entry, sequence: int) -> None:
        self._take_out(entry)
        entry.sequence = sequence
        entry.backlog = None
        entry.held_gate = Gate.OPEN
        self.count -= 1
        self.tasks[entry.task_type] -= 1
        self.evaluations -= entry.evaluation

    def forget_engine(self, engine: str) -> None:
        self._affine.pop(engine, None)

    # looking -----------------------------------------------------------------------------------------------------------

    def candidates(
        self,
        engines: Sequence[str],
        lane_bonus: Callable[[str], float],
        tasks: frozenset[TaskType],
        heads_per_lane: int = HEADS_PER_LANE,
    ) -> list[Entry]:
        """A bounded set of entries worth scoring: lane heads, heads of the engines' affinity heaps, and the oldest.

        engines: cache keys of engines with room. lane_bonus: what a stratum's moving terms are worth now. tasks: task
        types that may start now; entries of others are left out. Lanes are ranked anew every `RANK_LOOKS` looks; in
        between, a lane with a new first entry is looked at beside those that ranked best.
        """
        found: list[Entry] = []
        self._looks += 1
        look = self._looks
        lanes = self._ranked(lane_bonus, tasks) if heads_per_lane <= HEADS_PER_LANE else self._of(tasks)
        for lane in lanes:
            if heads_per_lane == 1:
                first = lane.first()
                if first is not None:
                    first.looked_at = look
                    found.append(first)
            else:
                for entry in lane.heads(heads_per_lane):
                    entry.looked_at = look
                    found.append(entry)
        for engine in self._some(engines):
            affine = self._affine.get(engine)
            if affine is None:
                continue
            heads = affine.heads(HEADS_PER_ENGINE)
            if not heads:
                del self._affine[engine]
            for entry in heads:
                if entry.looked_at != look and entry.task_type in tasks:
                    entry.looked_at = look
                    found.append(entry)
        oldest = self.oldest()
        if oldest is not None and oldest.looked_at != look and not oldest.held and oldest.task_type in tasks:
            found.append(oldest)
        return found

    def flows(self, tasks: frozenset[TaskType]) -> list[Flow]:
        """Those with an entry that is not held, of these tasks."""
        found: dict[Flow, None] = {}
        empty = []
        for key, lane in self._lanes.items():
            if key.task_type in tasks and (key.stratum, key.sample) not in found:
                if lane.first() is None:
                    empty.append(key)
                else:
                    found[key.stratum, key.sample] = None
        for key in empty:
            del self._lanes[key]
        return list(found)

    def of_flow(self, flow: Flow, engines: Sequence[str], tasks: frozenset[TaskType]) -> list[Entry]:
        """The first entries of one flow's lanes, and its own among the heads of the engines' affinity heaps."""
        stratum, sample = flow
        found: dict[Entry, None] = {}
        for key, lane in self._lanes.items():
            if key.stratum == stratum and key.sample is sample and key.task_type in tasks:
                found.update(dict.fromkeys(lane.heads(HEADS_PER_LANE)))
        for engine in self._some(engines):
            affine = self._affine.get(engine)
            if affine is not None:
                for entry in affine.heads(HEADS_PER_ENGINE):
                    if entry.stratum == stratum and entry.sample is sample and entry.task_type in tasks:
                        found[entry] = None
        return list(found)

    def timed(self, tasks: frozenset[TaskType]) -> list[Entry]:
        """The first entries of the lanes with a deadline."""
        found: list[Entry] = []
        for key, lane in self._lanes.items():
            if key.timed and key.task_type in tasks:
                found += lane.heads(HEADS_PER_LANE)
        return found

    def _of(self, tasks: frozenset[TaskType]) -> list[Lane]:
        """All lanes of these tasks: for a look behind what may not start."""
        return [lane for key, lane in self._lanes.items() if key.task_type in tasks]

    def _ranked(self, lane_bonus: Callable[[str], float], tasks: frozenset[TaskType]) -> list[Lane]:
        """The best lanes without and with a deadline."""
        self._looks_left -= 1
        if self._looks_left < 0 or tasks != self._top_tasks or len(self._touched) > LANES_LOOKED_AT:
            self._rank(lane_bonus, tasks)
        elif self._touched:
            return self._top + [one for one in self._touched if one.key is not None and one.key.task_type in tasks]
        return self._top

    def _rank(self, lane_bonus: Callable[[str], float], tasks: frozenset[TaskType]) -> None:
        ranked: tuple[list[tuple[float, int, Lane]], ...] = ([], [])  # without and with a deadline
        bonuses: dict[str, float] = {}
        empty = []
        for lane in self._top:
            lane.ranked = False
        for key, lane in self._lanes.items():
            if key.task_type not in tasks:
                continue
            first = lane.first()
            if first is None:
                empty.append(key)
                continue
            bonus = bonuses.get(key.stratum)
            if bonus is None:
                bonus = bonuses[key.stratum] = lane_bonus(key.stratum)
            ranked[key.timed].append((lane.first_key - bonus, first.sequence, lane))
        for key in empty:
            del self._lanes[key]
        self._top = [lane for of_a_kind in ranked for _, _, lane in sorted(of_a_kind)[:LANES_LOOKED_AT]]
        for lane in self._top:
            lane.ranked = True
        self._top_tasks = tasks
        self._touched.clear()
        self._looks_left = RANK_LOOKS - 1

    def _some(self, engines: Sequence[str]) -> Sequence[str]:
        """All of them, or a few, others at each look: of many with room it does not matter which is filled first."""
        count = len(engines)
        if count <= ENGINES_LOOKED_AT:
            return engines
        self._turn = (self._turn + ENGINES_LOOKED_AT) % count
        return [engines[(self._turn + step) % count] for step in range(ENGINES_LOOKED_AT)]

    def oldest(self) -> Entry | None:
        """The entry that arrived first among those still here (held or not)."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].backlog is not self:
            arrivals.popleft()
        if len(arrivals) > COMPACT_MINIMUM and len(arrivals) > 2 * self.count:
            self._arrivals = arrivals = deque(entry for entry in arrivals if entry.backlog is self)
        return arrivals[0] if arrivals else None

    def oldest_ready(self) -> Entry | None:
        """The one of them that arrived first and is not held, if it is among the first `LOOKED_PAST`."""
        self.oldest()  # drops those that left
        for entry in islice(self._arrivals, LOOKED_PAST):
            if entry.backlog is self and not entry.held:
                return entry
        return None

    def ready_members(self, most: int) -> int:
        """Rollouts of entries that may be dispatched, counted up to about `most`."""
        count = 0
        seen: set[Entry] = set()
        for entry in self._arrivals:
            if count >= most:
                break
            if entry.backlog is self and not entry.held and entry not in seen:
                seen.add(entry)
                count += len(entry.members)
        return count

    def entries(self) -> list[Entry]:
        """All entries, in order of arrival (for checks and views)."""
        return list({id(entry): entry for entry in self._arrivals if entry.backlog is self}.values())

    def _take_out(self, entry: Entry) -> None:
        """Leave lane or hold, where the entry is in one."""
        if entry.held_gate is not Gate.OPEN:
            self.held -= 1
            self.shut_out[entry.task_type] -= entry.held_gate in SHUT_OUT
        elif self._in_lane(entry):
            self.ready -= 1
            if not self.ready and self._note_ready is not None:
                self._note_ready(self)
            if entry.lane is not None:
                entry.lane.note_stale()
                entry.lane = None
            for engine in entry.affine:
                affine = self._affine.get(engine)
                if affine is not None:
                    affine.note_stale()
            entry.affine = ()

    def _in_lane(self, entry: Entry) -> bool:
        return entry.sequence > 0

    def _lane(self, entry: Entry) -> Lane:
        key = entry.lane_key
        if key is None or key.timed is (entry.deadline_at is None) or key.apart is (entry.apart_since is None):
            key = entry.lane_key = lane_key(entry)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        return lane
