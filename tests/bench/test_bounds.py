"""Known values by hand, and small schedules of real steps that must never end before the bound."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.bench.bounds import Bound, EngineShape, bound, bound_of_lengths
from rolloutd.bench.ceiling import cacheable_prefix_tokens
from rolloutd.bench.lengths import Tokens
from rolloutd.bench.w1 import MATH, w1
from rolloutd.bench.workload import Item, Limits, TaskType, WorkClass


@dataclass(frozen=True)
class Affine:
    """tau(b) = a + c b."""

    prefill_tokens_per_second: float = 20_000.0
    a_seconds: float = 7e-3
    c_seconds: float = 0.045e-3

    def decode_step_seconds(self, running_rollouts: int) -> float:
        return self.a_seconds + self.c_seconds * running_rollouts


@dataclass(frozen=True)
class Cliff:
    """Fast up to 4 running, ten times slower beyond."""

    prefill_tokens_per_second: float = 20_000.0

    def decode_step_seconds(self, running_rollouts: int) -> float:
        return 0.01 if running_rollouts <= 4 else 0.1


# The default (flat) curve of the simulated engine.
ENGINE = EngineShape(Affine(), slots=16, kv_capacity_tokens=200_000, page_size_tokens=16)


def lengths(*values: int) -> Tokens:
    return np.array(values, dtype=np.int64)


def equal(count: int, prompt_tokens: int, output_tokens: int, engines: list[EngineShape]) -> Bound:
    """The bound of `count` equal rollouts that share nothing."""
    prompts = lengths(*[prompt_tokens] * count)
    return bound_of_lengths(prompts, prompts, lengths(*[output_tokens] * count), engines)


def item(number: int, prompt: list[int], output_tokens: int) -> Item:
    return Item(
        rollout_id=str(number),
        work_class=WorkClass.CRITICAL,
        task_type=TaskType.GENERATION,
        prompt_bytes=np.array(prompt, dtype="<u4").tobytes(),
        output_tokens=output_tokens,
        max_new_tokens=output_tokens,
        sampling_seed=0,
        stratum="",
    )


def test_vector_where_total_work_binds() -> None:
    """8 engines x 16 slots, 256 rollouts of 160 + 1,000 tokens: tau(16) = 7.72 ms, tau(1) = 7.045 ms."""
    result = equal(256, 160, 1_000, [ENGINE] * 8)
    assert result.decode_work_seconds == pytest.approx(15.44)  # 256,000 tokens x 7.72 ms / 16 / 8
    assert result.longest_alone_seconds == pytest.approx(7.053)  # 160 / 20,000 + 1,000 x 7.045 ms
    assert result.prefill_work_seconds == pytest.approx(0.256)  # 40,960 tokens / 160,000
    assert result.kv_seconds == pytest.approx(0.743952)  # 7.045 ms x 256 x (160,000 + 500,000) / 1.6 M
    assert result.seconds == result.decode_work_seconds


def test_vector_where_the_longest_rollout_binds() -> None:
    result = bound_of_lengths(lengths(100, 20_000), lengths(100, 20_000), lengths(10, 5_000), [ENGINE] * 8)
    assert result.seconds == result.longest_alone_seconds == pytest.approx(1.0 + 35.225)


def test_vector_where_prefill_binds() -> None:
    result = equal(64, 20_000, 2, [ENGINE] * 4)
    assert result.seconds == result.prefill_work_seconds == pytest.approx(16.0)


def test_vector_where_memory_limits_the_batch() -> None:
    """Mean context 1,000 + 500 = 1,500, so 9,000 KV tokens hold 6 of the 16 slots: tau(6) = 7.27 ms."""
    result = equal(30, 1_000, 1_000, [replace(ENGINE, kv_capacity_tokens=9_000)])
    assert result.decode_work_seconds == pytest.approx(36.35)  # 30,000 x 7.27 ms / 6
    assert result.kv_seconds == pytest.approx(35.225)  # 7.045 ms x 30 x 1.5 M / 9,000
    assert result.seconds == result.decode_work_seconds


def test_memory_limit_between_two_whole_batches_is_interpolated() -> None:
    result = equal(30, 1_000, 1_000, [replace(ENGINE, kv_capacity_tokens=9_750)])  # 6.5 contexts
    assert result.decode_work_seconds == pytest.approx(30_000 * (7e-3 + 6.5 * 0.045e-3) / 6.5)


def test_engine_too_small_for_the_mean_context_still_runs_one() -> None:
    assert equal(1, 100, 100, [replace(ENGINE, kv_capacity_tokens=10)]).decode_work_seconds == pytest.approx(0.7045)


def test_a_curve_that_is_best_below_its_full_batch_uses_that_batch() -> None:
    assert equal(80, 1, 10, [replace(ENGINE, timing=Cliff())]).decode_work_seconds == pytest.approx(800 * 0.01 / 4)


def test_engines_that_differ_add_their_rates_and_the_fastest_runs_the_longest() -> None:
    slow = replace(ENGINE, timing=Affine(10_000.0, 14e-3, 0.09e-3))
    result = equal(96, 1_000, 500, [slow, ENGINE])
    assert result.decode_work_seconds == pytest.approx(48_000 / (16 / 7.72e-3 + 16 / 15.44e-3))
    assert result.longest_alone_seconds == pytest.approx(0.05 + 500 * 7.045e-3)
    assert result.prefill_work_seconds == pytest.approx(96_000 / 30_000)
    assert result.kv_seconds == pytest.approx(7.045e-3 * 96 * 625_000 / 400_000)


def test_siblings_prefill_and_hold_their_prompt_once() -> None:
    """8 siblings of 33 tokens, page 16: one computes 33, seven compute 1."""
    group = [item(sample, list(range(33)), 100) for sample in range(8)]
    by_hand = bound_of_lengths(lengths(*[33] * 8), lengths(33, *[1] * 7), lengths(*[100] * 8), [ENGINE])
    assert bound(group, [ENGINE]) == by_hand
    assert by_hand.prefill_work_seconds == pytest.approx(40 / 20_000)
    assert by_hand.longest_alone_seconds == pytest.approx(33 / 20_000 + 0.7045)


def test_w1_on_the_engines_of_the_demonstration() -> None:
    """4 x 32 slots: the longest rollout binds, and decode work is all tokens at tau(32) = 8.44 ms."""
    items = w1(1, Limits(vocabulary_size=32_000)).items
    result = bound(items, [replace(ENGINE, slots=32)] * 4)
    assert result.decode_work_seconds == pytest.approx(sum(i.output_tokens for i in items) * 8.44e-3 / 128)
    assert result.seconds == pytest.approx(max(i.prompt_tokens / 20_000 + i.output_tokens * 7.045e-3 for i in items))


def test_shorter_cap_turns_w1_from_longest_to_total_work() -> None:
    """Q1 and Q1s: 8 x 16 slots with caps of 16,384 and 4,096 tokens."""
    short = MATH.draw(1, Limits(vocabulary_size=32_000, max_output_tokens=4_096), step=0)
    full = MATH.draw(1, Limits(vocabulary_size=32_000), step=0)
    of_short, of_full = bound(short, [ENGINE] * 8), bound(full, [ENGINE] * 8)
    assert of_short.seconds == of_short.decode_work_seconds > of_short.longest_alone_seconds
    assert of_full.seconds == of_full.longest_alone_seconds > of_full.decode_work_seconds


@pytest.mark.parametrize("largest", range(4))
def test_bound_is_its_largest_term(largest: int) -> None:
    terms = [2.0 if position == largest else 1.0 for position in range(4)]
    assert Bound(*terms).seconds == 2.0


def test_nothing_to_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="0 items on 1 engines"):
        bound([], [ENGINE])
    with pytest.raises(ValueError, match="1 items on 0 engines"):
        bound([item(0, [1], 1)], [])
    with pytest.raises(ValueError, match="slots is 0"):
        replace(ENGINE, slots=0)


def engine_end_seconds(queue: list[Item], engine: EngineShape) -> float:
    """Step by step: admit in order while a slot and room for the whole rollout are free; prefill stalls decode.

    Kinder than a real engine in one way: its prefix cache takes no room and holds everything it ever saw.
    """
    hits = cacheable_prefix_tokens([i.prompt_bytes for i in queue], engine.page_size_tokens).tolist()
    waiting = list(zip(queue, hits, strict=True))
    running: list[tuple[int, int]] = []  # tokens left, tokens reserved
    now = 0.0
    while waiting or running:
        while waiting and len(running) < engine.slots:
            head, hit = waiting[0]
            reserved = head.prompt_tokens + head.output_tokens
            if sum(tokens for _, tokens in running) + reserved > engine.kv_capacity_tokens:
                break
            waiting.pop(0)
            now += (head.prompt_tokens - hit) / engine.timing.prefill_tokens_per_second
            running.append((head.output_tokens, reserved))
        now += engine.timing.decode_step_seconds(len(running))
        running = [(left - 1, reserved) for left, reserved in running if left > 1]
    return now


# Family of the prompt (0 to 3), prompt and output tokens.
rollouts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=24).map(
    lambda shapes: [item(n, [family] * p, out) for n, (family, p, out) in enumerate(shapes)]
)


@given(
    jobs=rollouts,
    engines=st.integers(1, 3),
    slots=st.integers(1, 6),
    spare_kv=st.integers(0, 150),
    page=st.sampled_from([1, 4, 16]),
    prefill=st.sampled_from([100.0, 2_000.0, 1e6]),
    c_seconds=st.sampled_from([0.0, 0.045e-3, 5e-3]),
)
def test_no_schedule_ends_before_the_bound(
    jobs: list[Item], engines: int, slots: int, spare_kv: int, page: int, prefill: float, c_seconds: float
) -> None:
    largest = max(job.prompt_tokens + job.output_tokens for job in jobs)
    shape = EngineShape(Affine(prefill, 7e-3, c_seconds), slots, largest + spare_kv, page)
    limit = bound(jobs, [shape] * engines).seconds
    for order in (jobs, sorted(jobs, key=lambda job: -job.output_tokens)):
        ends = [engine_end_seconds(order[first::engines], shape) for first in range(engines)]
        assert max(ends) >= limit * (1 - 1e-9)


def test_equal_rollouts_that_fill_every_batch_reach_the_bound() -> None:
    shape = EngineShape(Affine(prefill_tokens_per_second=1e12), 16, 200_000, 16)
    items = [item(n, [n] * 20, 50) for n in range(64)]
    limit = bound(items, [shape] * 2).seconds
    assert max(engine_end_seconds(items[first::2], shape) for first in range(2)) == pytest.approx(limit, rel=1e-6)
