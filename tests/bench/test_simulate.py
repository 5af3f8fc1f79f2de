"""`rolloutd simulate`: the production core in the same harness, figures worked out by hand, the command and its refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rolloutd.bench.figures import Figures, Limit, figures, gap_closed, over_seeds
from rolloutd.bench.metrics import RolloutRecord
from rolloutd.bench.simulate import main, plan_of
from rolloutd.bench.simulated import EpochRecord, Epochs
from rolloutd.bench.workload import Kind, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.filler import filler_tokens
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.machine import Scheduler
from tests.bench.test_arms import MACHINE, SMALL


def test_the_production_core_serves_a_closed_loop_the_same_way_twice() -> None:
    def run() -> tuple[float, dict[str, int], list[float | None]]:
        workload = SMALL.draw(2, MACHINE.model.vocabulary_size)
        scheduler = Scheduler(SchedulerConfig(), random.Random(0), 0.0)
        record = Epochs(scheduler, [MACHINE] * 3).run(workload, 0)
        scheduler.check()
        assert len(record.records) == workload.rollouts and not record.failed
        return record.seconds, record.engine_tokens, [one.delivered_seconds for one in record.records.values()]

    first = run()
    assert first == run()
    workload = SMALL.draw(2, MACHINE.model.vocabulary_size)
    outputs = sum(one.output_tokens for one in workload.items)
    outputs += sum(turn.output_tokens for session in workload.sessions for turn in session.turns)
    assert sum(first[1].values()) == outputs


def test_figures_of_an_epoch_worked_out_by_hand() -> None:
    record = EpochRecord(
        records={
            "a": RolloutRecord(Kind.CRITICAL, 0.0, 0.0, 12.0, 1, prompt_tokens=100, cached_tokens=0),
            "b": RolloutRecord(Kind.REUSABLE, 0.0, 1.0, 15.0, 1, prompt_tokens=100, cached_tokens=80),
            "r": RolloutRecord(Kind.REWARD, 5.0, 5.0, 9.0, 1, prompt_tokens=10, cached_tokens=0),
            "s": RolloutRecord(Kind.REWARD, 11.0, 11.0, 11.5, 1, prompt_tokens=10, cached_tokens=0),
        },
        engine_tokens={"e0": 300, "e1": 100},
        session_ends={"x": 6.0, "y": 8.0},
        prefill_seconds=4.0,
        seconds=20.0,
        dispatches=5,
        handle_seconds=0.0004,
    )
    limit = Limit(10.0, 5.0, 8.0, 0.5, 3.5, hit_lru=0.25)
    assert figures("fifo", Workload.of("w", ()), 3, 1, record, limit, [MACHINE] * 2) == Figures(
        arm="fifo",
        workload="w",
        seed=3,
        epoch=1,
        makespan_over_bound=2.0,
        critical_over_bound=1.5,
        reward_p99_seconds=0.5,  # the query that came in the first ten seconds does not count
        prefix_hit=round(80 / 220, 4),
        prefix_hit_ceiling=0.5,
        prefix_hit_lru=0.25,
        imbalance=1.5,
        reusable_over_bound=1.5,
        background_over_bound=None,
        session_mean_seconds=7.0,
        session_over_alone=2.0,
        makespan_seconds=20.0,
        bound_seconds=10.0,
        used=0.25,
        prefill_share=0.1,
        moves=0.25,
        failed=0,
        handle_us_per_rollout=100.0,
    )


def test_the_gap_that_an_arm_closes() -> None:
    lines = [
        Figures(arm, "Q1", seed, 0, makespan_over_bound=value)
        for seed, values in enumerate([(1.4, 1.3, 1.2), (1.3, 1.3, 1.1), (1.2, 1.1, 1.199)])
        for arm, value in zip(("fifo", "rolloutd", "oracle"), values, strict=True)
    ]
    gap = gap_closed(lines, "rolloutd", "Q1", 0)
    assert gap is not None and gap.mean == pytest.approx(0.25)  # of 0.5 and 0; the third seed has no gap to close
    assert gap_closed(lines[1:], "rolloutd", "Q1", 0) is None
    spread = over_seeds(lines)["Q1", "fifo", 0]["makespan_over_bound"]
    assert (spread.mean, spread.deviation) == (pytest.approx(1.3), pytest.approx(0.1))


def test_the_command_prints_a_table_and_a_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["W5", "--seeds", "0-1", "--arm", "fifo,oracle", "--engines", "4", "--slowdowns", "1,1,1,2"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(one["arm"], one["seed"], one["epoch"]) for one in lines] == [
        ("fifo", 0, 0),
        ("oracle", 0, 0),
        ("fifo", 1, 0),
        ("oracle", 1, 0),
    ]
    keys = (
        "arm workload seed epoch makespan_over_bound critical_over_bound reward_p99_seconds prefix_hit prefix_hit_ceiling "
        "prefix_hit_lru imbalance"
    )
    assert list(lines[0])[:11] == keys.split()
    assert all(one["makespan_over_bound"] >= 1.0 for one in lines)
    assert "makespan / bound" in out and "gap closed" in out
    assert main([*flags, "--json"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in (*lines, *again):
        del line["handle_us_per_rollout"]
    assert again == lines


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["Q9"], "Q9"),
        (["Q1", "--arm", "best"], "--arm"),
        (["Q1", "--seeds", "3-1"], "--seeds"),
        (["Q1", "--seeds", "a"], "--seeds"),
        (["Q1", "--seed", "1", "--seeds", "0-1"], "give one"),
        (["Q1", "--engines", "0"], "--engines"),
        (["Q1", "--slowdowns", "1,0"], "slowdown"),
        (["Q1", "--scale", "0"], "--scale"),
        (["Q1", "--fitted", "README.md"], "--fitted"),
        (["README.md"], "line 1"),
    ],
)
def test_a_bad_argument_is_refused_by_name(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 1
    assert word in capsys.readouterr().err


def test_a_file_of_requests_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}
    path.write_text("\n".join(json.dumps(line | {"timestamp": 100 * n}) for n in range(8)), encoding="utf-8")
    assert main([str(path), "--engines", "2", "--json"]) == 0
    (figures_of,) = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert figures_of["workload"] == "trace.jsonl" and figures_of["prefix_hit"] > 0.5
    assert figures_of["prefix_hit_lru"] is None, "memory for every prompt"


def test_of_a_file_that_is_larger_than_the_memory_the_hit_of_that_memory_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts of one block in turn, in room for two of them: each is forgotten just before it comes again."""
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1_000 * n, "input_length": 512, "output_length": 1, "hash_ids": [n % 3]} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main([str(path), "--engines", "1", "--kv-tokens", "1024", "--json"]) == 0
    (figures_of,) = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert (figures_of["prefix_hit_ceiling"], figures_of["prefix_hit_lru"]) == (round(496 / 1024, 4), 0.0)


# engines ---------------------------------------------------------------------------------------------------------------


def test_filler_is_a_function_of_prompt_and_seed_with_ordinary_ids() -> None:
    tokens = filler_tokens(b"abcd", 7, 500, 1_000)
    assert tokens == filler_tokens(b"abcd", 7, 800, 1_000)[:500]
    assert min(tokens) >= 3 and max(tokens) < 1_000
    assert tokens != filler_tokens(b"abcd", 8, 500, 1_000) and tokens != filler_tokens(b"abce", 7, 500, 1_000)
    with pytest.raises(ValueError, match="write_tokens"):
        filler_tokens(b"", 0, 1 << 20, 1_000)


def test_fitted_curves() -> None:
    assert TimingModel("flat", base_seconds=0.01, growth=0.001).decode_step_seconds(5) == pytest.approx(0.015)
    assert TimingModel("steep", base_seconds=0.01, growth=0.5).decode_step_seconds(4) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="base_seconds"):
        TimingModel(base_seconds=0.0)


FITTED = {
    "curve": "flat",
    "base_seconds": 0.01,
    "growth": 0.001,
    "prefill_tokens_per_second": 9_000.0,
    "slots": 24,
    "kv_tokens": 60_000,
    "page_size_tokens": 64,
    "context_tokens": 8_192,
}


def test_a_fitted_engine_is_simulated_with_its_sizes_where_no_flag_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(FITTED), encoding="utf-8")
    fitted = ["--fitted", str(path)]
    (first, *others) = plan_of(["W5", *fitted]).pool.machines
    assert (first.slots, first.kv_tokens, first.page_size_tokens) == (24, 60_000, 64)
    assert first.timing.decode_step_seconds(5) == pytest.approx(0.015)
    assert first.context_tokens == 8_192, "W5 has rollouts of up to 32,768 tokens, the engine holds no more than this"
    assert others == [first] * 7, "the workload says how many"
    flags = ["--slots", "8", "--kv-tokens", "90000", "--context-tokens", "7000", "--prefill-tokens-per-second", "1000"]
    (given, *_) = plan_of(["W5", *fitted, *flags]).pool.machines
    assert (given.slots, given.kv_tokens, given.page_size_tokens, given.context_tokens) == (8, 90_000, 64, 7_000)
    assert (given.timing.prefill_tokens_per_second, given.timing.base_seconds) == (1_000.0, 0.01)
    (plain, *_) = plan_of(["W5"]).pool.machines
    assert (plain.slots, plain.kv_tokens, plain.page_size_tokens, plain.context_tokens) == (16, 200_000, 16, 32_768)
    path.write_text(json.dumps(FITTED | {"context_tokens": 1_000_000}), encoding="utf-8")
    assert plan_of(["W5", *fitted]).pool.context_tokens == 32_768, "the workload stays what it is"


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": "many"}, {"kv_tokens": None}])
def test_a_file_with_wrong_sizes_is_refused_by_name(
    wrong: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(FITTED | wrong), encoding="utf-8")
    assert main(["W5", "--fitted", str(path)]) == 1
    said = capsys.readouterr().err
    assert "--fitted" in said and next(iter(wrong)) in said


def test_a_prompt_longer_than_a_prefill_batch_does_not_wait_for_an_empty_engine() -> None:
    from rolloutd.engines.sim.machine import SimMachine
    from rolloutd.engines.sim.request import SimRequest
    from rolloutd.engines.sim.tokens import Sampling

    machine = SimMachine(MachineConfig(max_prefill_tokens=256, write_tokens=False))

    def submit(rid: str, prompt_tokens: int, output_tokens: int) -> None:
        sampling = Sampling(max_new_tokens=1_000, end_at_tokens=prompt_tokens + output_tokens)
        machine.submit(machine_now[0], SimRequest(rid, b"\5\0\0\0" * prompt_tokens, sampling))

    machine_now = [0.0]
    submit("first", 16, 900)
    machine_now[0] = 0.5
    first = machine.advance(0.5)
    submit("long", 2_000, 10)
    ended = [frame.rid for frame in [*first, *machine.advance(2.0)] if frame.finish_reason is not None]
    assert ended == ["long"]
