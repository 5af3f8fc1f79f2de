from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rolloutd.bench.w1 import AGENT, ESSAY, MATH, REWARD, SMALL_DEMO, demo_step, w1
from rolloutd.bench.workload import (
    FIRST_TOKEN_ID,
    Item,
    Kind,
    Limits,
    TaskType,
    TokenIds,
    WorkClass,
    Workload,
    random_tokens,
    stream,
    token_bytes,
)

LIMITS = Limits(vocabulary_size=32_000)


def tokens(item: Item) -> TokenIds:
    return np.frombuffer(item.prompt_bytes, dtype="<u4")


def test_w1_is_64_prompts_of_8_and_a_prompt_is_one_object_in_its_group() -> None:
    items = w1(1, LIMITS, step=3).items
    groups = defaultdict(list)
    for item in items:
        groups[item.group_id].append(item)
    assert len(groups) == 64
    assert len({item.prompt_bytes for item in items}) == 64
    for members in groups.values():
        assert [member.sample for member in members] == list(range(8))
        assert len({id(member.prompt_bytes) for member in members}) == 1
        assert len({member.sampling_seed for member in members}) == 8
    assert {item.kind for item in items} == {Kind.CRITICAL}
    assert {item.needed_by_step for item in items} == {3}
    assert {item.max_new_tokens for item in items} == {16_384}
    assert all(16 <= item.prompt_tokens <= 512 and 1 <= item.output_tokens <= 16_384 for item in items)


def test_w1_test_vector() -> None:
    """Fixed figures for seed 1: another machine, or a later commit, draws the same."""
    items = w1(1, LIMITS).items
    assert [item.output_tokens for item in items[:8]] == [494, 858, 1790, 1050, 1319, 1161, 655, 1650]
    assert [item.prompt_tokens for item in items[::8]][:6] == [187, 126, 105, 100, 315, 165]
    assert tokens(items[0])[:4].tolist() == [28378, 22756, 6603, 29114]
    assert sum(item.output_tokens for item in items) == 1_005_555


def test_same_arguments_same_workload_and_each_argument_matters() -> None:
    assert demo_step(5, LIMITS, step=2) == demo_step(5, LIMITS, step=2)
    base = w1(5, LIMITS)
    for other in (w1(6, LIMITS), w1(5, LIMITS, step=1)):
        assert not {item.prompt_bytes for item in base.items} & {item.prompt_bytes for item in other.items}


def test_another_epoch_keeps_prompts_and_renews_samples() -> None:
    first, second = w1(5, LIMITS).items, w1(5, LIMITS, epoch=1).items
    assert [item.prompt_bytes for item in first] == [item.prompt_bytes for item in second]
    assert not {item.rollout_id for item in first} & {item.rollout_id for item in second}
    assert sum(a.output_tokens != b.output_tokens for a, b in zip(first, second, strict=True)) > 500
    assert sum(a.sampling_seed != b.sampling_seed for a, b in zip(first, second, strict=True)) > 500


def test_demo_step_holds_the_four_kinds_in_their_numbers() -> None:
    workload = demo_step(1, LIMITS, step=1)
    assert len(workload.of_kind(Kind.CRITICAL)) == 512
    assert len(workload.of_kind(Kind.REUSABLE)) == 192
    assert len(workload.of_kind(Kind.BACKGROUND)) == 80
    assert len(workload.of_kind(Kind.REWARD)) == 300
    assert workload.of_kind(Kind.CRITICAL) == w1(1, LIMITS, step=1).items
    arrivals = [item.arrival_seconds for item in workload.items]
    assert arrivals == sorted(arrivals)


def test_no_id_is_used_twice_over_steps_and_epochs() -> None:
    ids = [
        item.rollout_id
        for step in (0, 1)
        for epoch in (0, 1)
        for item in demo_step(1, LIMITS, step=step, epoch=epoch, shape=SMALL_DEMO).items
    ]
    assert len(set(ids)) == len(ids)


def test_drawing_more_of_one_traffic_leaves_the_others_alone() -> None:
    few = replace(SMALL_DEMO, reusable=replace(SMALL_DEMO.reusable, groups=1))
    small, fewer = demo_step(1, LIMITS, shape=SMALL_DEMO), demo_step(1, LIMITS, shape=few)
    for kind in (Kind.CRITICAL, Kind.BACKGROUND, Kind.REWARD):
        assert small.of_kind(kind) == fewer.of_kind(kind)
    assert len(fewer.of_kind(Kind.REUSABLE)) == 2


def test_reusable_prompts_share_exactly_their_head_in_every_step() -> None:
    items = [item for step in (0, 1) for item in AGENT.draw(1, LIMITS, step=step)]
    assert len({item.prompt_bytes[: 3_000 * 4] for item in items}) == 1
    assert len({item.prompt_bytes[3_000 * 4 : 3_004 * 4] for item in items}) == 2 * 96
    assert {item.kind for item in items} == {Kind.REUSABLE}
    assert all(item.output_tokens <= item.max_new_tokens == 2_048 for item in items)


def test_background_is_long_and_needed_by_no_step() -> None:
    items = replace(ESSAY, groups=2_000).draw(1, LIMITS, step=0)
    assert {(item.work_class, item.needed_by_step) for item in items} == {(WorkClass.BACKGROUND, None)}
    assert {item.max_new_tokens for item in items} == {24_576}
    assert np.median([item.output_tokens for item in items]) == pytest.approx(np.exp(8.6), rel=0.05)


def test_reward_queries_are_a_poisson_process_of_short_distinct_queries() -> None:
    items = replace(REWARD, queries=20_000, seconds=4_000.0).draw(1, LIMITS, step=0)
    assert len(items) == 20_000
    gaps = np.diff([item.arrival_seconds for item in items])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)  # of an exponential, deviation = mean
    assert {item.output_tokens for item in items} == set(range(1, 11))
    assert np.median([item.prompt_tokens for item in items]) == pytest.approx(np.exp(6.5), rel=0.03)
    assert len({item.prompt_bytes for item in items}) == len(items)
    assert {(item.kind, item.task_type, item.group_id) for item in items} == {(Kind.REWARD, TaskType.REWARD, "")}


@pytest.mark.parametrize("vocabulary_size", [4, 512, 151_936])
def test_every_token_is_inside_the_vocabulary(vocabulary_size: int) -> None:
    workload = demo_step(2, Limits(vocabulary_size=vocabulary_size), shape=SMALL_DEMO)
    ids = np.concatenate([tokens(item) for item in workload.items])
    assert ids.min() >= FIRST_TOKEN_ID
    assert ids.max() < vocabulary_size


def test_every_rollout_fits_a_small_context() -> None:
    limits = Limits(vocabulary_size=512, context_tokens=4_096, max_output_tokens=256)
    for shape in (SMALL_DEMO, replace(SMALL_DEMO, reusable=AGENT)):
        for item in demo_step(1, limits, shape=shape).items:
            assert item.prompt_tokens + item.max_new_tokens <= 4_096
            assert item.max_new_tokens <= 256


def test_traffic_that_cannot_fit_says_what_to_lower() -> None:
    with pytest.raises(ValueError, match="lower max_output_tokens or the head"):
        AGENT.draw(1, Limits(vocabulary_size=512, context_tokens=4_096), step=0)
    with pytest.raises(ValueError, match="cap of"):
        REWARD.draw(1, Limits(vocabulary_size=512, context_tokens=16), step=0)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary_size"):
        Limits(vocabulary_size=3)
    with pytest.raises(ValueError, match="context_tokens"):
        Limits(vocabulary_size=10, context_tokens=1)
    with pytest.raises(ValueError, match="max_output_tokens"):
        Limits(vocabulary_size=10, max_output_tokens=0)


def test_workload_sorts_by_arrival_keeps_ties_in_order_and_refuses_a_second_use_of_an_id() -> None:
    drawn = MATH.draw(1, LIMITS, step=0)
    late, first, second = (
        replace(item, arrival_seconds=at) for item, at in zip(drawn[:3], (2.0, 1.0, 1.0), strict=True)
    )
    assert Workload.of("three", [late, first, second]).items == (first, second, late)
    with pytest.raises(ValueError, match="occurs twice"):
        Workload.of("twice", [late, late])


def test_streams_are_told_apart_by_every_part_of_their_name() -> None:
    streams = [stream(1, "a", 0), stream(1, "a", 1), stream(1, "b", 0), stream(2, "a", 0), stream(1, "a")]
    draws = [int(rng.integers(0, 2**62)) for rng in streams]
    assert len(set(draws)) == 5
    assert int(stream(1, "a", 0).integers(0, 2**62)) == draws[0]


def test_token_bytes_are_little_endian_uint32() -> None:
    assert token_bytes(np.array([3, 258], dtype=np.uint32)) == b"\x03\0\0\0\x02\x01\0\0"
    assert len(token_bytes(random_tokens(stream(1, "x"), 5, LIMITS))) == 20
