"""`make bench-peers` without its processes: requests and answers, the trainer on a door of straw, pairs, the CPU check."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import orjson
import pytest

from rolloutd.bench.demo_cpu import CpuMeter, Usage
from rolloutd.bench.figures import Figures
from rolloutd.bench.peers import Asked, estimate_seconds, main
from rolloutd.bench.peers_arms import ARMS, PRODUCT, arms_for
from rolloutd.bench.peers_cpu import CpuReport
from rolloutd.bench.peers_doors import Answer, answer_of_page, bodies, options
from rolloutd.bench.peers_report import KEYS, best_policies, json_line, pair_table, pairs, twin_table, verdicts
from rolloutd.bench.peers_stack import fleet_of, router_words
from rolloutd.bench.peers_trainer import Epoch, Wrong
from rolloutd.bench.workload import Item, Kind, TaskType, WorkClass, Workload
from tests.bench.test_arms import MACHINE, SMALL

FAST = 2_000.0  # simulated seconds per real one: nothing here depends on a clock


def item(name: str, prompt: Sequence[int] = (5, 6, 7), **more: object) -> Item:
    fields: dict[str, object] = {
        "rollout_id": name,
        "work_class": WorkClass.CRITICAL,
        "task_type": TaskType.GENERATION,
        "prompt_bytes": np.array(prompt, "<u4").tobytes(),
        "output_tokens": 4,
        "max_new_tokens": 100,
        "sampling_seed": 9,
        "stratum": "math",
    }
    return Item(**(fields | more))  # type: ignore[arg-type]


# ---- requests and answers ---------------------------------------------------------------------------------------------


def test_a_routers_call_says_the_hidden_length_as_the_least_one_and_nothing_else_of_it() -> None:
    calls = dict(bodies([item("a"), item("b", sampling_seed=3), item("c", (8,), output_tokens=1)]))
    first, second, third = (orjson.loads(calls[name]) for name in "abc")
    assert first == {
        "input_ids": [5, 6, 7],
        "rid": "a",
        "sampling_params": {"max_new_tokens": 100, "min_new_tokens": 3, "sampling_seed": 9, "temperature": 1.0},
        "stream": False,
    }
    assert (second["rid"], second["input_ids"], second["sampling_params"]["sampling_seed"]) == ("b", [5, 6, 7], 3)
    assert (third["input_ids"], third["sampling_params"]["min_new_tokens"]) == ([8], 0)


def test_a_submission_to_rolloutd_hides_each_samples_length_in_custom_params() -> None:
    group = [
        item("g-0", group_id="g", sampling_seed=1, output_tokens=10, needed_by_step=2),
        item("g-1", group_id="g", sampling_seed=2, output_tokens=20, sample=1, needed_by_step=2),
    ]
    words = options(group)
    assert words["rollout_id"] == "g" and words["samples"] == 2 and words["seeds"] == [1, 2]
    assert words["custom_params"] == {"end_at_tokens": {"1": 13, "2": 23}}
    assert words["needed_by_step"] == 2 and "session_id" not in words
    alone = options([item("t#001", session_id="t", turn=1)])
    assert (alone["rollout_id"], alone["samples"], alone["session_id"], alone["turn"]) == ("t#001", 1, "t", 1)


def test_what_a_page_says() -> None:
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "cached_tokens": 2}
    page = orjson.dumps({"output_ids": [4, 1], "meta_info": meta})
    assert answer_of_page("a", 200, page) == Answer("a", np.array([4, 1], "<u4").tobytes(), 3, 2)
    assert answer_of_page("a", 503, b"no room").problem == "HTTP 503: no room"
    aborted = orjson.dumps({"output_ids": [4], "meta_info": meta | {"finish_reason": {"type": "abort"}}})
    assert "abort" in answer_of_page("a", 200, aborted).problem


# ---- the trainer ------------------------------------------------------------------------------------------------------


class StrawDoor:
    """Answers everything at once with as many tokens as asked for, unless told otherwise."""

    def __init__(self, **odd: str) -> None:
        """odd: rollout id -> "twice", "short", "fails" or "breaks"."""
        self.answers: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        self.submitted: list[Item] = []
        self.steps: list[str] = []
        self._odd = odd

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def begin(self, step: int, items: Sequence[Item], rollouts: int) -> None:
        self.steps.append(f"begin {step}: {len(items)} of {rollouts}")

    async def submit(self, items: Sequence[Item]) -> None:
        for one in items:
            self.submitted.append(one)
            odd = self._odd.get(one.rollout_id)
            if odd == "breaks":
                raise OSError("the door is gone")
            tokens = one.output_tokens - (odd == "short")
            answer = Answer(
                one.rollout_id, b"\7\0\0\0" * tokens, one.prompt_tokens, 1, problem="HTTP 500" if odd == "fails" else ""
            )
            for _ in range(2 if odd == "twice" else 1):
                self.answers.put_nowait(answer)

    async def end(self, step: int) -> None:
        self.steps.append(f"end {step}")

    async def publish(self, version: int, engine_urls: Sequence[str]) -> None: ...


async def test_every_rollout_comes_back_once_and_turns_follow_each_other() -> None:
    workload = SMALL.draw(3, MACHINE.model.vocabulary_size)
    door = StrawDoor()
    progress: list[int] = []
    record = await Epoch(door, workload, 4, FAST, progress.append).run()
    assert len(record.records) == len(door.submitted) == workload.rollouts == progress[-1] and not record.failed
    assert door.steps == [f"begin 4: {len(workload.items) + len(workload.sessions)} of {workload.rollouts}", "end 4"]
    assert set(record.session_ends) == {session.session_id for session in workload.sessions}
    assert all(one.deliveries == 1 and one.cached_tokens == 1 for one in record.records.values())
    rewards = {one.rollout_id: one.arrival_seconds for one in workload.items if one.kind is Kind.REWARD}
    assert all(record.records[name].submitted_seconds == seconds for name, seconds in rewards.items())
    by_session: defaultdict[str, list[Item]] = defaultdict(list)
    for one in door.submitted:
        by_session[one.session_id].append(one)
    for session in workload.sessions:
        turns = by_session[session.session_id]
        assert [one.turn for one in turns] == list(range(len(session.turns)))
        for before, after, turn in zip(turns, turns[1:], session.turns[1:], strict=False):
            output = b"\7\0\0\0" * before.output_tokens
            assert after.prompt_bytes == before.prompt_bytes + output + turn.new_bytes
            ended = record.records[before.rollout_id].delivered_seconds
            assert ended is not None
            assert record.records[after.rollout_id].submitted_seconds >= ended + turn.gap_seconds


@pytest.mark.parametrize(("odd", "message"), [("twice", "came back twice"), ("short", "lost on the way")])
async def test_an_answer_that_is_not_what_was_asked_for_is_no_figure(odd: str, message: str) -> None:
    workload = Workload.of("w", [item("a"), item("b")])
    with pytest.raises(Wrong, match=message):
        await Epoch(StrawDoor(a=odd), workload, 0, FAST).run()


async def test_a_failed_turn_ends_its_session_and_is_counted() -> None:
    workload = Workload.of("w", [item("a")], SMALL.draw(3, MACHINE.model.vocabulary_size).sessions[:1])
    session = workload.sessions[0]
    epoch = Epoch(StrawDoor(**{f"{session.session_id}#001": "fails"}), workload, 0, FAST)
    record = await epoch.run()
    assert epoch.problems == {f"{session.session_id}#001": "HTTP 500"} and len(record.failed) == 1
    assert len(record.records) == 3 and session.session_id in record.session_ends


async def test_a_door_that_breaks_breaks_the_epoch() -> None:
    with pytest.raises(OSError, match="the door is gone"):
        await Epoch(StrawDoor(a="breaks"), Workload.of("w", [item("a")]), 0, FAST).run()


# ---- who is compared --------------------------------------------------------------------------------------------------


def test_sticky_policies_run_where_there_are_sessions_and_rolloutd_runs_first() -> None:
    of_q1, of_q4 = ([arm.name for arm in arms_for(name)] for name in ("Q1", "Q4"))
    assert of_q1[0] == of_q4[0] == PRODUCT
    assert {"sglang-router:manual", "smg:manual"} <= set(of_q4) and not {"sglang-router:manual"} & set(of_q1)
    assert [arm.name for arm in arms_for("Q1", ("smg:power_of_two", PRODUCT))] == [PRODUCT, "smg:power_of_two"]


def test_only_smg_is_told_how_often_to_look_in_simulated_time() -> None:
    fleet = fleet_of([MACHINE] * 3, 4.0)
    assert (fleet.engines, fleet.slots, fleet.kv_tokens) == (3, MACHINE.slots, MACHINE.kv_tokens)
    smg = router_words("smg", ARMS["smg:manual"], fleet, ("http://a", "http://b"), 1, 2)
    assert smg[smg.index("--load-monitor-interval") + 1] == "2" and smg[-3:] == [
        "--worker-urls",
        "http://a",
        "http://b",
    ]
    assert smg[smg.index("--policy") + 1 :][:3] == ["manual", "--assignment-mode", "min_load"]
    router = router_words("r", ARMS["sglang-router:cache_aware"], fleet, ("http://a",), 1, 2)
    assert "--load-monitor-interval" not in router and "cache_aware" in router


def test_a_longer_scale_takes_less_time_and_an_arm_that_suits_nothing_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bounds = {(workload, 1): 100.0 for workload in ("Q1", "Q4")}
    slow, fast = (estimate_seconds(Asked(("Q1", "Q4"), (1,), scale=scale), bounds) for scale in (1.0, 4.0))
    assert slow > 2 * fast
    with pytest.raises(SystemExit) as refused:
        main(["--workloads", "Q1", "--arms", "smg:manual"])
    assert refused.value.code == 2 and "none of smg:manual is for Q1" in capsys.readouterr().err


# ---- pairs ------------------------------------------------------------------------------------------------------------


def line(arm: str, makespan: float, hit: float, seed: int = 1, workload: str = "Q1") -> Figures:
    return Figures(
        arm,
        workload,
        seed,
        0,
        makespan_over_bound=makespan,
        critical_over_bound=makespan,
        prefix_hit=hit,
        prefix_hit_ceiling=0.9,
        imbalance=1.1,
    )


LINES = [
    line(PRODUCT, 1.2, 0.8),
    line("smg:cache_aware", 1.5, 0.4),
    line("smg:least_load", 1.2, 0.0),
    line("sglang-router:round_robin", 1.0, 0.8),
    line(PRODUCT, 1.0, 0.8, seed=2),
    line("smg:cache_aware", 1.0, 0.8, seed=2),
    line("smg:least_load", 1.2, 0.0, seed=2),
    line("smg:least_load", 1.2, 0.0, seed=3),
]


def test_pairs_are_of_one_workload_and_seed() -> None:
    found = {(pair.peer, pair.seed): pair.ratios for pair in pairs(LINES)}
    assert len(found) == 5, "seed 3 has no rolloutd"
    assert found["smg:cache_aware", 1] == pytest.approx(
        {"makespan_over_bound": 0.8, "critical_over_bound": 0.8, "prefix_hit": 2.0}
    )
    assert found["smg:least_load", 2] == pytest.approx(
        {"makespan_over_bound": 1 / 1.2, "critical_over_bound": 1 / 1.2}
    ), "nothing is a multiple of no hit"


def test_a_peer_is_represented_by_its_best_policy_and_losses_are_named() -> None:
    assert best_policies(LINES) == {
        ("Q1", 0, "smg"): "smg:least_load",
        ("Q1", 0, "sglang-router"): "sglang-router:round_robin",
    }
    smg, router = verdicts(LINES)
    assert smg == (
        "Q1, cold, against smg's best (least_load): makespan wins (0.917 x, 0.833 to 1.000); "
        "critical wins (0.917 x, 0.833 to 1.000)"
    )
    assert "makespan LOSES (1.200 x)" in router and "prefix hit draws (1.000 x)" in router
    assert pair_table(LINES).row_count == 5


def test_the_last_lines_have_exactly_the_keys_that_others_read() -> None:
    read = json.loads(json_line(LINES[0]))
    assert tuple(read) == KEYS and read["arm"] == PRODUCT and read["reward_p99_seconds"] is None


def test_an_arm_is_held_against_its_own_virtual_time() -> None:
    virtual = [line("rolloutd", 1.0, 0.8), line("round-robin", 1.0, 0.8)]
    table = twin_table(LINES, virtual)
    assert table is not None and table.row_count == 2
    assert [list(column.cells) for column in table.columns][3:6] == [
        [PRODUCT, "sglang-router:round_robin"],
        ["rolloutd", "round-robin"],
        ["1.200", "1.000"],
    ]
    assert twin_table(LINES, [replace(one, seed=7) for one in virtual]) is None


# ---- the CPU check ----------------------------------------------------------------------------------------------------


def metered(*, router: float = 0.1, waited: float = 0.0) -> CpuReport:
    """Ten seconds, of which the last five are busy."""
    meter = CpuMeter({})
    used = starved = 0.0
    for second in range(11):
        engines = {f"engine {number}": Usage(second * 0.01 * number) for number in (1, 2)}
        meter.sample(float(second), {"smg": Usage(used, starved), **engines})
        if second >= 5:
            used, starved = used + router, starved + waited
    return CpuReport.of(meter)


def test_the_cpu_check_looks_at_the_busiest_stretch() -> None:
    quiet = metered()
    assert quiet.problems == () and quiet.words() == "CPU smg 5% (peak 10%), busiest engine 2% (peak 2%)"
    (bound,) = metered(router=0.7).problems
    assert bound == "smg used 70% of a core for 5 s"
    (starved,) = metered(waited=0.5).problems
    assert starved == "smg waited for a core 50% of 5 s"
    assert "not measured" in CpuReport().words()
