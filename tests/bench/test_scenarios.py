"""Named workloads: test vectors, what epochs and scale change, sessions, and files in Mooncake's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rolloutd.bench.bounds import Chain, EngineShape, bound, bound_of_lengths, workload_bound
from rolloutd.bench.ceiling import cacheable_prefix_tokens, cacheable_turn_tokens, workload_hit_ceiling
from rolloutd.bench.mooncake import BLOCK_TOKENS, TraceError, read_mooncake
from rolloutd.bench.scenarios import Q4, SCENARIOS
from rolloutd.bench.sessions import tool_gaps_seconds, turn_item
from rolloutd.bench.workload import TOKEN_BYTES, Kind, Limits, Session, TaskType, Turn, WorkClass, stream
from rolloutd.engines.sim.timing import TimingModel

VOCABULARY = 32_000

# (workload, seed): rollouts, prompt tokens, output tokens, bound seconds on its own engines, hit ceiling. Another implementation
# of the generator, the bound and the ceiling must find the same.
VECTORS = {
    ("Q1", 0): (512, 82184, 854260, 98.602625, 0.829943),
    ("Q1", 1): (512, 81688, 1005555, 115.432130, 0.829498),
    ("Q1s", 1): (512, 81688, 782000, 47.220545, 0.829498),
    ("Q2", 1): (512, 4493360, 262441, 19.334193, 0.874068),
    ("Q3", 0): (956, 1029633, 1120046, 163.724780, 0.683319),
    ("Q4", 0): (1411, 13680379, 346862, 333.326123, 0.927262),
    ("W1", 0): (512, 82184, 854260, 98.602625, 0.829943),  # Q1's prompts and outputs, on other engines
    ("W1b", 0): (1024, 161264, 755760, 83.686060, 0.827165),
    ("W2", 0): (1536, 246072, 32413437, 1068.841711, 0.829741),
    ("W3", 0): (23367, 1012905837, 5917790, 1062.555067, 0.983024),
    ("W4", 0): (2048, 17085176, 1140073, 50.960812, 0.874122),
    ("W5", 0): (256, 92532, 109648, 14.466110, 0.488653),
    ("W6", 0): (5734, 290614576, 5159907, 991.425441, 0.985754),
}


@pytest.mark.parametrize(("name", "seed"), VECTORS)
def test_vectors(name: str, seed: int) -> None:
    scenario = SCENARIOS[name]
    workload = scenario.draw(seed, VOCABULARY)
    lengths = [(item.prompt_tokens, item.output_tokens) for item in workload.items]
    lengths += [length for session in workload.sessions for length in session.lengths()]
    shapes = [EngineShape(TimingModel(), scenario.slots, scenario.kv_tokens, 16, stalls=True)] * scenario.engines
    assert (
        workload.rollouts,
        sum(prompt for prompt, _ in lengths),
        sum(output for _, output in lengths),
        round(workload_bound(workload, shapes).seconds, 6),
        round(workload_hit_ceiling(workload, 16), 6),
    ) == VECTORS[name, seed]


@pytest.mark.parametrize("name", ["Q1", "W1", "W4"])
def test_bound_and_ceiling_of_groups_that_share_nothing_by_their_formula(name: str) -> None:
    """Work: what is written but the first tokens at full batches, and prompts less what siblings share, on all engines; or the
    longest rollout alone. No memory binds here.
    """
    scenario = SCENARIOS[name]
    items = scenario.draw(0, VOCABULARY).items
    alone = max(item.prompt_tokens / 20_000 + item.output_tokens * 0.007045 for item in items)
    prompts = [item.prompt_tokens for item in items[::8]]
    computed = sum(tokens + 7 * (tokens - (tokens - 1) // 16 * 16) for tokens in prompts)
    step_seconds = 0.007 + 0.000045 * scenario.slots
    written = sum(item.output_tokens - 1 for item in items)
    work = written * step_seconds / (scenario.engines * scenario.slots) + computed / (scenario.engines * 20_000)
    rollouts, prompt_tokens, _, bound_seconds, ceiling = VECTORS[name, 0]
    assert rollouts == len(items)
    assert bound_seconds == pytest.approx(max(alone, work), abs=1e-5)
    assert ceiling == pytest.approx(1.0 - computed / prompt_tokens, abs=1e-6)


def test_a_second_epoch_has_the_same_prompts_and_other_samples() -> None:
    cold, warm = (SCENARIOS["Q3"].draw(3, VOCABULARY, epoch=epoch) for epoch in (0, 1))
    groups = [[item for item in one.items if item.task_type is not TaskType.REWARD] for one in (cold, warm)]
    assert [a.prompt_bytes for a in groups[0]] == [b.prompt_bytes for b in groups[1]]
    assert [a.output_tokens for a in groups[0]] != [b.output_tokens for b in groups[1]]
    assert not {a.rollout_id for a in groups[0]} & {b.rollout_id for b in groups[1]}


def test_scale_multiplies_what_there_is_to_do() -> None:
    once, thrice = (SCENARIOS["Q4"].draw(0, VOCABULARY, scale=scale) for scale in (1, 3))
    assert (len(once.sessions), len(thrice.sessions)) == (128, 384)


# sessions --------------------------------------------------------------------------------------------------------------


def test_sessions_of_a_task_start_alike_and_fit_the_context() -> None:
    workload = Q4.draw(5, VOCABULARY)
    firsts = [session.turns[0].new_bytes for session in workload.sessions]
    assert all(len(set(firsts[task * 4 : task * 4 + 4])) == 1 for task in range(32))
    assert len({first[: 3_000 * TOKEN_BYTES] for first in firsts}) == 1
    assert all(prompt + 2_048 <= Q4.context_tokens for one in workload.sessions for prompt, _ in one.lengths())
    assert 9 < sum(len(session.turns) for session in workload.sessions) / 128 < 15
    assert all(session.turns[0].gap_seconds == 0.0 for session in workload.sessions)


def test_tool_gaps_have_the_measured_mix() -> None:
    gaps = tool_gaps_seconds(stream(0, "gaps"), 200_000)
    slow = 0.504 * 0.58
    assert abs(float(np.mean((gaps > 2.0) & (gaps < 40.0))) - slow * 0.9999) < 0.01
    assert abs(float(np.mean(gaps > 40.0)) - 0.005) < 0.001
    assert 0.01 < float(np.median(gaps[gaps < 1.0])) < 0.05


def _session(*turns: tuple[int, int, float]) -> Session:
    parts = tuple(Turn(np.arange(new, dtype="<u4").tobytes(), output, 0, gap) for new, output, gap in turns)
    return Session("s", WorkClass.CRITICAL, TaskType.GENERATION, "agents", 100, parts)


def test_a_turn_holds_all_before_it() -> None:
    session = _session((100, 10, 0.0), (50, 20, 1.0))
    assert session.lengths() == [(100, 10), (160, 20)]
    item = turn_item(session, 1, b"\0" * 640, 3.0)
    assert (item.turn, item.session_id, item.prompt_tokens, item.kind) == (1, "s", 160, Kind.CRITICAL)


def test_a_turn_is_served_by_the_one_before_with_its_output_but_for_the_newest_token() -> None:
    assert cacheable_turn_tokens([_session((100, 12, 0.0), (50, 20, 0.0))], 16).tolist() == [
        0,
        96,
    ]  # 111 tokens have KV
    assert cacheable_turn_tokens([_session((100, 13, 0.0), (50, 20, 0.0))], 16).tolist() == [0, 112]
    assert cacheable_turn_tokens([_session((100, 13, 0.0)), _session((100, 13, 0.0))], 16).tolist() == [0, 96]


def test_a_session_alone_takes_its_turns_with_their_cache_and_its_gaps() -> None:
    engine = EngineShape(TimingModel(), 16, 100_000, 16, stalls=True)
    session = _session((100, 13, 0.0), (50, 20, 2.5))
    computed = (100 + 163 - 112) / 20_000
    alone = computed + 33 * engine.timing.decode_step_seconds(1) + 2.5
    assert bound((), [engine], [session]).seconds == pytest.approx(alone)
    assert bound((), [engine, engine], [session]).seconds == pytest.approx(alone)


def test_prefill_and_decode_add_up_where_one_stalls_the_other() -> None:
    ones = np.ones(64, dtype=np.int64)
    engines = [EngineShape(TimingModel(), 16, 200_000, 16, stalls=True)] * 2
    both = bound_of_lengths(ones * 4_000, ones * 4_000, ones * 101, engines)
    decode = 64 * 100 / (2 * 16 / TimingModel().decode_step_seconds(16))
    assert both.both_works_seconds == pytest.approx(decode + 64 * 4_000 / 40_000)
    assert both.seconds == both.both_works_seconds
    slow = [engines[0], EngineShape(TimingModel(prefill_tokens_per_second=5_000), 16, 200_000, 16, stalls=True)]
    apart = bound_of_lengths(ones * 4_000, ones * 4_000, ones * 101, slow)
    assert apart.prefill_work_seconds < apart.both_works_seconds < apart.prefill_work_seconds + decode


def test_a_chain_is_as_long_as_its_parts() -> None:
    ones = np.ones(3, dtype=np.int64)
    engine = EngineShape(TimingModel(), 16, 200_000, 16)
    alone = bound_of_lengths(ones * 20, ones * 20, ones * 10, [engine], chains=[Chain(0, 2, 1.0)])
    assert alone.longest_alone_seconds == pytest.approx(2 * (0.001 + 10 * engine.timing.decode_step_seconds(1)) + 1.0)


# Mooncake --------------------------------------------------------------------------------------------------------------

LINES = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2_000, "input_length": 1_100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3_000, "input_length": 9_000, "output_length": 0, "hash_ids": list(range(10, 28))},
]


def _file(folder: Path, lines: list[object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_mooncake_blocks_are_shared_as_their_ids_say(tmp_path: Path) -> None:
    limits = Limits(VOCABULARY, context_tokens=4_096)
    workload = read_mooncake(_file(tmp_path, list(LINES)), 0, limits, most_requests=10, rate=2.0)
    assert [item.prompt_tokens for item in workload.items] == [700, 1_100, 4_095]
    assert [item.output_tokens for item in workload.items] == [5, 50, 1]
    assert [item.arrival_seconds for item in workload.items] == [0.0, 1.0, 1.5]
    assert {item.max_new_tokens for item in workload.items} == {
        50,
        1,
    }  # never the rollout's own length, but for lack of room
    cached = cacheable_prefix_tokens([item.prompt_bytes for item in workload.items], 16)
    assert cached.tolist() == [0, 688, 0]  # whole pages of the 700 tokens that the first two have in common
    assert len(read_mooncake(_file(tmp_path, list(LINES)), 0, limits, most_requests=1).items) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("no object", "line 1"),
        ({"timestamp": 0, "input_length": 5}, "output_length"),
        ({"timestamp": 0, "input_length": BLOCK_TOKENS + 1, "output_length": 1, "hash_ids": [1]}, "cover"),
        ({"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}, "timestamp"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, word: str) -> None:
    with pytest.raises(TraceError, match=word):
        read_mooncake(_file(tmp_path, [line]), 0, Limits(VOCABULARY), most_requests=10)
