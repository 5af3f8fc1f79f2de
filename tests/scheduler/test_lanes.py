"""The queue's order: the lanes against their naive twin, and what stands in whose way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rolloutd.scheduler import lanes
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.entry import Entry, EntryKey
from rolloutd.scheduler.lanes import Backlog, Lane
from rolloutd.scheduler.lanes_naive import NaiveBacklog
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import Quota, RunSettings
from rolloutd.scheduler.states import Gate, TaskType
from tests.scheduler.kit import BACKGROUND, CRITICAL, RUN, Bench, config, engine, prompt, spec, specs

OWNER = Run(RUN, RunSettings(), SchedulerConfig(), 0.0)
ENGINES = ["e0/1", "e1/1", "e2/1", "e3/1", "e4/1", "e5/1"]
KEYS = st.floats(-1e6, 1e6, allow_nan=False) | st.sampled_from([0.0, 1.0])


def entry(name: str, stratum: str = "", timed: bool = False, task_type: TaskType = TaskType.GENERATION) -> Entry:
    made = Entry(OWNER, EntryKey("policy", CRITICAL, task_type, name, "", name, ()), b"1234", None, stratum, {}, 0.0)
    made.deadline_at = 1.0 if timed else None
    return made


@pytest.fixture(autouse=True)
def _rank_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin has no memory of earlier looks."""
    monkeypatch.setattr(lanes, "RANK_LOOKS", 1)


class Twins(RuleBasedStateMachine):
    """The same calls on both; what both offer is the same."""

    @initialize()
    def start(self) -> None:
        self.fast = Backlog()
        self.naive = NaiveBacklog()
        self.pairs: dict[str, tuple[Entry, Entry]] = {}
        self.sequence = 0
        self.made = 0

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    @rule(
        stratum=st.sampled_from("abcdefghijkl"),
        timed=st.booleans(),
        task=st.sampled_from([TaskType.GENERATION, TaskType.REPLAY]),
        key=KEYS,
        tie=st.integers(0, 2),
        bonuses=st.dictionaries(st.sampled_from(ENGINES), st.floats(0, 10), max_size=6),
    )
    def add(self, stratum: str, timed: bool, task: TaskType, key: float, tie: int, bonuses: dict[str, float]) -> None:
        self.made += 1
        name = f"r{self.made}"
        self.pairs[name] = entry(name, stratum, timed, task), entry(name, stratum, timed, task)
        for backlog, one in zip((self.fast, self.naive), self.pairs[name], strict=True):
            backlog.add(one)  # type: ignore[attr-defined]
        self.order_one(name, key, tie, bonuses)

    @rule(keys=st.lists(KEYS, min_size=10, max_size=30), engine_id=st.sampled_from(ENGINES))
    def add_many_to_one_lane(self, keys: list[float], engine_id: str) -> None:
        """More than a lane's sorted front holds."""
        for key in keys:
            self.add(stratum="a", timed=False, task=TaskType.GENERATION, key=key, tie=0, bonuses={engine_id: 1.0})

    def order_one(self, name: str, key: float, tie: int, bonuses: dict[str, float]) -> None:
        sequence = self.next()
        mine, twin = self.pairs[name]
        mine.static_key = twin.static_key = key
        self.fast.order(mine, sequence, tie, bonuses.items())
        self.naive.order(twin, sequence, tie, bonuses.items())

    @precondition(lambda self: self.pairs)
    @rule(
        data=st.data(),
        key=KEYS,
        tie=st.integers(0, 2),
        bonuses=st.dictionaries(st.sampled_from(ENGINES), st.floats(0, 10)),
    )
    def reorder(self, data: Any, key: float, tie: int, bonuses: dict[str, float]) -> None:
        self.order_one(data.draw(st.sampled_from(sorted(self.pairs))), key, tie, bonuses)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        mine, twin = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
        sequence = self.next()
        self.fast.hold(mine, sequence, Gate.HELD_FOR_LEADER)
        self.naive.hold(twin, sequence, Gate.HELD_FOR_LEADER)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=st.integers(1, 5))
    def remove(self, data: Any, count: int) -> None:
        for _ in range(min(count, len(self.pairs))):
            mine, twin = self.pairs.pop(data.draw(st.sampled_from(sorted(self.pairs))))
            sequence = self.next()
            self.fast.remove(mine, sequence)
            self.naive.remove(twin, sequence)

    @rule(name=st.sampled_from(ENGINES))
    def forget(self, name: str) -> None:
        self.fast.forget_engine(name)
        self.naive.forget_engine(name)

    @rule(
        engines=st.lists(st.sampled_from(ENGINES), unique=True, max_size=lanes.ENGINES_LOOKED_AT),
        favourite=st.sampled_from("abcdefghijkl"),
        tasks=st.frozensets(st.sampled_from([TaskType.GENERATION, TaskType.REPLAY])),
        heads=st.integers(1, 5),
    )
    def look(self, engines: list[str], favourite: str, tasks: frozenset[TaskType], heads: int) -> None:
        def bonus(stratum: str) -> float:
            return 5.0 if stratum == favourite else 0.0

        fast = self.fast.candidates(engines, bonus, tasks, heads)
        naive = self.naive.candidates(engines, bonus, tasks, heads)
        assert sorted(one.prompt_hash for one in fast) == sorted(one.prompt_hash for one in naive)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "fast"):
            return
        held = sum(mine.held for mine, _ in self.pairs.values())
        assert (self.fast.count, self.fast.held, self.fast.ready) == (len(self.pairs), held, len(self.pairs) - held)
        first, twin = self.fast.oldest(), self.naive.oldest()
        assert (first and first.prompt_hash) == (twin and twin.prompt_hash)
        assert [one.prompt_hash for one in self.fast.entries()] == [one.prompt_hash for one in self.naive.entries()]


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life_of_one_lane_with_many_stale_items(seed: int) -> None:
    """Long enough for heaps to fill, be compacted and run dry again, which short examples seldom do."""
    dice = random.Random(seed)
    fast, naive = Backlog(), NaiveBacklog()
    pairs: list[tuple[Entry, Entry]] = []
    for sequence in range(1, 1200):
        growing = (sequence // 200) % 3 == 0
        if growing or not pairs:
            pairs.append((entry(f"r{sequence}"), entry(f"r{sequence}")))
            fast.add(pairs[-1][0])
            naive.add(pairs[-1][1])
            chosen = pairs[-1]
        else:
            chosen = dice.choice(pairs)
        mine, twin = chosen
        if not growing and dice.random() < 0.4:
            # As the placement does: mostly who goes next.
            (first,) = naive.candidates((), lambda _: 0.0, frozenset(TaskType), 1)[:1]
            chosen = next(pair for pair in pairs if pair[1] is first)
            pairs.remove(chosen)
            fast.remove(chosen[0], sequence)
            naive.remove(chosen[1], sequence)
        else:
            # Moving forward leaves stale items deep in the heap, where nobody meets them.
            mine.static_key = twin.static_key = dice.random() if growing else mine.static_key / 2
            fast.order(mine, sequence, 0, [("e0/1", 0.1)])
            naive.order(twin, sequence, 0, [("e0/1", 0.1)])
        if sequence % 4:
            continue
        looked = [
            sorted(one.prompt_hash for one in backlog.candidates(["e0/1"], lambda _: 0.0, frozenset(TaskType)))
            for backlog in (fast, naive)
        ]
        assert looked[0] == looked[1]


def test_stale_items_are_bounded_by_the_live_ones() -> None:
    backlog = Backlog()
    kept = entry("kept")
    backlog.add(kept)
    for sequence in range(1, 20_000):
        backlog.order(kept, sequence, 0, [("e0/1", 1.0)])
    (lane,) = backlog._lanes.values()
    for one in (lane, backlog._affine["e0/1"]):
        assert isinstance(one, Lane) and len(one._front) + len(one._heap) <= 2 * lanes.COMPACT_MINIMUM + 2


def test_a_long_look_is_not_undone_by_what_comes_after_it() -> None:
    rng = random.Random(7)
    lane = Lane()
    items = []
    for number in range(400):
        one = entry(f"r{number}")
        one.sequence = number + 1
        item = (rng.random() - 2.0 * (number % 40 == 0), 0, one.sequence, one)  # now and then one that goes first
        items.append(item)
        lane.push(item)
        if number % 40 == 0 and number:
            assert len(lane._front) > 30
        if number % 40 == 39:
            assert lane.heads(32) == [item[3] for item in sorted(items)[:32]]
        if number % 7 == 0:
            first = lane.first()
            assert first is min(items)[3]
            if number % 2:
                items.remove(min(items))
                first.sequence = 0
                lane.note_stale()


def test_lanes_that_are_empty_are_forgotten() -> None:
    backlog = Backlog()
    for index in range(1000):
        one = entry(f"r{index}", stratum=f"s{index}")
        backlog.add(one)
        backlog.order(one, 2 * index + 1, 0, [(f"e{index}/1", 1.0)])
        backlog.remove(one, 2 * index + 2)
        backlog.candidates([f"e{index}/1"], lambda _: 0.0, frozenset(TaskType))
    assert not backlog._lanes and not backlog._affine


# what may not start never stands before what may


def test_work_of_a_task_type_at_its_ceiling_blocks_no_other_task_type() -> None:
    bench = Bench(engine(slots=8))
    bench.budget(tasks={TaskType.REPLAY: Quota(max_rollouts=1)})
    bench.submit(*specs("p", 20, task_type=TaskType.REPLAY))
    bench.tick(1.0)
    bench.submit(*specs("g", 7))
    bench.tick(1.0)
    assert sum(rollout_id.startswith("g") for rollout_id in bench.live) == 7


def test_work_that_no_engine_of_the_pool_can_take_blocks_nothing_behind_it() -> None:
    bench = Bench(engine("e0", 8, labels={"gpu": "old"}), engine("e1", 1, context_tokens=8192, labels={"gpu": "old"}))
    bench.run(*specs("long", 1, tokens=5000))
    bench.submit(
        *specs("labelled", 20, engine_labels={"gpu": "new"}, deadline_seconds=50.0),
        *specs("waiting", 20, tokens=5000),  # only e1, which is full, could take them
    )
    bench.tick(1.0)
    bench.submit(*specs("g", 8))
    bench.tick(1.0)
    assert bench.running_on("e0") == [f"g{index}" for index in range(8)]


def test_new_sessions_held_back_by_memory_pressure_do_not_hold_back_a_continuation() -> None:
    bench = Bench(engine(slots=16, kv_capacity_tokens=1000, page_tokens=1), settings=config(preempt={"enabled": False}))
    bench.run(*specs("r", 10, tokens=80, max_new_tokens=8))  # 880 of 1000
    bench.submit(*specs("new", 10, tokens=80, max_new_tokens=8))
    bench.tick(1.0)
    assert bench.gates()[Gate.PRESSURE]
    bench.submit(spec("next", 80, max_new_tokens=8, session_id="s", turn=2))
    assert [one.rollout_id for one in bench.tick(1.0)] == ["next"]


def test_deadlines_in_many_strata_are_looked_at_beside_work_without() -> None:
    bench = Bench(engine(slots=1), settings=config(preempt={"enabled": False}))
    bench.now = 1_000_000.0
    bench.run(spec("first"))
    bench.submit(*[spec(f"r{index}", stratum=f"s{index}") for index in range(20)])
    bench.submit(spec("urgent", stratum="s20", deadline_seconds=10.0))
    bench.finish("first")
    assert [one.rollout_id for one in bench.tick(1.0)] == ["urgent"]


@pytest.mark.parametrize("rollout_class", [CRITICAL, BACKGROUND])
def test_a_lane_serves_in_order_of_arrival_where_nothing_else_differs(rollout_class: Any) -> None:
    bench = Bench(engine(slots=1))
    order = []
    for index in range(30):
        bench.now += 1.0
        bench.submit(spec(f"r{index:02}", rollout_class=rollout_class, token_bytes=prompt(f"r{index}", 8)))
    for _ in range(30):
        (one,) = bench.tick()
        order.append(one.rollout_id)
        bench.finish(one.rollout_id)
    assert order == sorted(order)
