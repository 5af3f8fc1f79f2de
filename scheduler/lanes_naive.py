"""The naive twin of `lanes.Backlog`: one list, sorted whenever somebody looks. For tests; the bounds are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_ENGINE, HEADS_PER_LANE, LANES_LOOKED_AT, MAX_AFFINE_ENGINES, lane_key
from rolloutd.scheduler.states import Gate, TaskType


class NaiveBacklog:
    def __init__(self) -> None:
        self._arrived: list[Entry] = []
        self._keys: dict[int, tuple[float, int, int]] = {}  # id of an entry in a lane -> key, tie-break, sequence
        self._bonuses: dict[int, dict[str, float]] = {}

    def add(self, entry: Entry) -> None:
        self._arrived.append(entry)

    def order(self, entry: Entry, sequence: int, tie: int, bonuses: Iterable[tuple[str, float]]) -> None:
        entry.sequence, entry.held_gate = sequence, Gate.OPEN
        self._keys[id(entry)] = (entry.static_key, tie, sequence)
        self._bonuses[id(entry)] = dict(sorted(bonuses, key=lambda bonus: -bonus[1])[:MAX_AFFINE_ENGINES])

    def hold(self, entry: Entry, sequence: int, gate: Gate) -> None:
        entry.sequence, entry.held_gate = sequence, gate
        self._keys.pop(id(entry), None)

    def remove(self, entry: Entry, sequence: int) -> None:
        self.hold(entry, sequence, Gate.OPEN)
        self._arrived.remove(entry)

    def forget_engine(self, engine: str) -> None:
        for bonuses in self._bonuses.values():
            bonuses.pop(engine, None)

    def candidates(
        self,
        engines: Iterable[str],
        lane_bonus: Callable[[str], float],
        tasks: frozenset[TaskType],
        heads_per_lane: int = HEADS_PER_LANE,
    ) -> list[Entry]:
        ready = sorted((one for one in self._arrived if id(one) in self._keys), key=lambda one: self._keys[id(one)])
        found: list[Entry] = []
        for timed in (False, True):
            lanes = [
                [one for one in ready if lane_key(one) == key and one.task_type in tasks]
                for key in {lane_key(one) for one in ready}
                if key.timed is timed
            ]
            heads = [lane[:heads_per_lane] for lane in lanes if lane]
            heads.sort(key=lambda lane: (lane[0].static_key - lane_bonus(lane[0].stratum), lane[0].sequence))
            most = LANES_LOOKED_AT if heads_per_lane <= HEADS_PER_LANE else len(heads)
            found += [one for lane in heads[:most] for one in lane]
        for engine in engines:
            held_there = [one for one in ready if engine in self._bonuses[id(one)]]
            held_there.sort(key=lambda one: (one.static_key - self._bonuses[id(one)][engine], *self._keys[id(one)][1:]))
            found += [one for one in held_there[:HEADS_PER_ENGINE] if one.task_type in tasks]
        found += [one for one in self._arrived[:1] if id(one) in self._keys and one.task_type in tasks]
        return list({id(one): one for one in found}.values())

    def oldest(self) -> Entry | None:
        return self._arrived[0] if self._arrived else None

    def entries(self) -> list[Entry]:
        return list(self._arrived)
