import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.bench.ceiling import cacheable_prefix_tokens, lru_prefix_tokens, prefix_hit_ceiling
from rolloutd.bench.w1 import AGENT, MATH
from rolloutd.bench.workload import Limits

LIMITS = Limits(vocabulary_size=32_000)


def packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def naive_cacheable(prompts: list[list[int]], page: int) -> list[int]:
    """Compare with every earlier prompt, token by token."""
    cached = []
    for position, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:position]:
            common = 0
            while common < min(len(prompt), len(earlier)) and prompt[common] == earlier[common]:
                common += 1
            # Whole pages only, and the last token of this prompt is always computed.
            best = max(best, min(common, len(prompt) - 1) // page * page)
        cached.append(best)
    return cached


# Two ids and short prompts: shared prefixes, repeats and prompts that end inside another one are all common.
few_ids = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=25)


@given(few_ids, st.integers(1, 7))
def test_same_as_the_naive_twin(prompts: list[list[int]], page: int) -> None:
    assert cacheable_prefix_tokens([packed(p) for p in prompts], page).tolist() == naive_cacheable(prompts, page)


@given(few_ids.filter(bool), st.integers(1, 7))
def test_hit_is_a_share_below_one(prompts: list[list[int]], page: int) -> None:
    hit = prefix_hit_ceiling([packed(p) for p in prompts], page)
    assert hit == sum(naive_cacheable(prompts, page)) / sum(map(len, prompts))
    assert 0.0 <= hit < 1.0


def test_same_as_the_naive_twin_on_drawn_prompts_with_a_shared_head() -> None:
    prompts = [item.prompt_bytes for item in AGENT.draw(3, LIMITS, step=0)][:24]
    ids = [np.frombuffer(prompt, dtype="<u4").tolist() for prompt in prompts]
    for page in (1, 16, 64):
        assert cacheable_prefix_tokens(prompts, page).tolist() == naive_cacheable(ids, page)


@pytest.mark.parametrize(
    ("prompt", "samples", "page", "hit"),
    [
        (240, 8, 16, 7 / 8 * 224 / 240),  # a whole number of pages: the last one holds the token that is computed
        (241, 8, 16, 7 / 8 * 240 / 241),
        (156, 8, 64, 7 / 8 * 128 / 156),
        (100_001, 16, 1, 15 / 16 * 100_000 / 100_001),
        (16, 8, 16, 0.0),
    ],
)
def test_known_group_ceilings(prompt: int, samples: int, page: int, hit: float) -> None:
    assert prefix_hit_ceiling([packed([7] * prompt)] * samples, page) == pytest.approx(hit)


def test_w1_ceiling_is_that_of_its_groups() -> None:
    """All members but the first find the whole pages before the prompt's last token; groups share nothing."""
    items = MATH.draw(1, LIMITS, step=0)
    exact = prefix_hit_ceiling([item.prompt_bytes for item in items], 16)
    prompts = [item.prompt_tokens for item in items[::8]]
    assert exact == pytest.approx(7 / 8 * sum((tokens - 1) // 16 * 16 for tokens in prompts) / sum(prompts))
    assert 0.80 < exact < 0.875


def test_order_of_arrival_does_not_change_what_a_group_saves() -> None:
    prompts = [item.prompt_bytes for item in MATH.draw(1, LIMITS, step=0)]
    interleaved = [prompt for sample in range(8) for prompt in prompts[sample::8]]
    assert prefix_hit_ceiling(interleaved, 16) == prefix_hit_ceiling(prompts, 16)


def test_a_prompt_inside_an_earlier_one_and_the_other_way_round() -> None:
    long, short = packed(list(range(100))), packed(list(range(40)))
    assert cacheable_prefix_tokens([long, short], 8).tolist() == [0, 32]
    assert cacheable_prefix_tokens([short, long], 8).tolist() == [0, 40]


def test_the_same_tokens_at_another_place_are_no_hit() -> None:
    two_pages = [packed([1] * 4 + [2] * 4 + [9]), packed([2] * 4 + [1] * 4 + [9])]
    assert cacheable_prefix_tokens(two_pages, 4).tolist() == [0, 0]
    assert cacheable_prefix_tokens([packed([1, 2, 9]), packed([2, 1, 9])], 2).tolist() == [0, 0]


# a cache with a bound


def naive_lru(prompts: list[list[int]], page: int, pages: int) -> list[int]:
    """Pages by their whole prefix, each with when it was last used; the least recent goes, of equals the longest prefix."""
    used: dict[tuple[int, ...], tuple[int, int]] = {}
    cached = []
    for now, prompt in enumerate(prompts):
        own = [tuple(prompt[:end]) for end in range(page, len(prompt) + 1, page)]
        held = [one in used for one in own]
        leading = held.index(False) if False in held else len(held)
        cached.append(min(leading, (len(prompt) - 1) // page) * page)
        used.update({one: (now, -len(one)) for one in own})
        for one in sorted(used, key=lambda one: used[one])[: max(0, len(used) - pages)]:
            del used[one]
    return cached


@given(few_ids, st.integers(1, 5), st.integers(1, 12))
def test_a_bounded_cache_is_the_same_as_its_naive_twin(prompts: list[list[int]], page: int, pages: int) -> None:
    arrived = [packed(p) for p in prompts]
    assert lru_prefix_tokens(arrived, page, pages * page).tolist() == naive_lru(prompts, page, pages)


@given(few_ids, st.integers(1, 5))
def test_a_bounded_cache_that_is_large_enough_is_the_endless_one(prompts: list[list[int]], page: int) -> None:
    arrived = [packed(p) for p in prompts]
    enough = sum(map(len, prompts)) + page
    assert lru_prefix_tokens(arrived, page, enough).tolist() == cacheable_prefix_tokens(arrived, page).tolist()


def test_what_is_least_recent_is_forgotten_its_end_first() -> None:
    long, other = packed([1, 1, 2, 2, 3, 3]), packed([7, 7, 8, 8])
    assert lru_prefix_tokens([long, other, long], 2, 8).tolist() == [
        0,
        0,
        4,
    ]  # its last page had to go, and serves nothing
    assert lru_prefix_tokens([long, other, long], 2, 6).tolist() == [0, 0, 2]
    assert lru_prefix_tokens([long, long], 2, 4).tolist() == [0, 4], "of one that is too large the beginning stays"
    assert lru_prefix_tokens([long, other, long, other], 2, 4).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="capacity_tokens is 3"):
        lru_prefix_tokens([long], 4, 3)


def test_nothing_and_nonsense() -> None:
    assert cacheable_prefix_tokens([], 16).tolist() == []
    with pytest.raises(ValueError, match="prompt 1 has 0 bytes"):
        cacheable_prefix_tokens([packed([1]), b""], 16)
    with pytest.raises(ValueError, match="prompt 0 has 5 bytes"):
        cacheable_prefix_tokens([b"12345"], 16)
    with pytest.raises(ValueError, match="page_size_tokens"):
        cacheable_prefix_tokens([packed([1])], 0)
    with pytest.raises(ValueError, match="no prompt"):
        prefix_hit_ceiling([], 16)
