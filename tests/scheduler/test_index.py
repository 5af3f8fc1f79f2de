"""The radix index's own promises, case by case: recency, bounds, caps, merging, accounting."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from rolloutd.scheduler.index import PrefixIndex
from tests.scheduler.index_kit import SPACE, UNBOUNDED, ids, index_of, run_of, sweep_all


def test_segments_are_longest_first_with_growing_masks() -> None:
    index = index_of("a", "b", "c")
    for engine, length in (("a", 96), ("b", 48), ("c", 48)):
        index.insert(SPACE, run_of(1, length), engine)
    a, b, c = (index.bit(engine) for engine in "abc")
    assert a is not None and b is not None and c is not None
    segments = index.segments(SPACE, run_of(1, 80))
    assert segments == [(1 << a, 80), (1 << a | 1 << b | 1 << c, 48)]
    assert [index.matched(segments, bit) for bit in (a, b, c, 99)] == [80, 48, 48, 0]
    index.drop_engine("b")
    assert index.matched(segments, b) == 0
    assert index.segments(SPACE, run_of(1, 80)) == [(1 << a, 80), (1 << a | 1 << c, 48)]


def test_what_is_read_off_segments_is_what_a_match_says() -> None:
    """With pages of several sizes, shared stems, and engines that flushed their cache or left."""
    rng = random.Random(5)
    names = [f"e{number}" for number in range(70)]
    index = PrefixIndex(UNBOUNDED, 16)
    for number, name in enumerate(names):
        index.add_engine(name, (1, 16, 32, 48)[number % 4])
    stem = run_of(1, 96)
    for _ in range(300):
        tail = run_of(rng.randrange(2, 6), 16 * rng.randrange(9))
        index.insert(SPACE, stem[: 4 * 16 * rng.randrange(7)] + tail, rng.choice(names))
    index.clear_engine("e3")
    index.drop_engine("e4")
    for number in range(2, 6):
        tokens = stem + run_of(number, 100)
        segments = index.segments(SPACE, tokens)
        hits = index.match(SPACE, tokens)
        assert len(hits) > 10
        assert {name: index.held(segments, name) for name in names if index.held(segments, name)} == hits
        longest = index.longest(segments, len(names))
        assert dict(longest) == hits and len(longest) == len(hits)
        assert index.longest(segments, 4) == longest[:4]


def test_some_engines_of_a_mask_from_a_bit_on() -> None:
    names = [f"e{number}" for number in range(100)]
    index = index_of(*names)
    index.drop_engine("e50")
    mask = sum(index.flag(name) for name in names[40:60])
    assert index.flag("e50") == index.flag("stranger") == 0
    assert index.some_of(mask, 3, 48) == ["e48", "e49", "e51"]
    assert index.some_of(mask, 4, 58) == ["e58", "e59", "e40", "e41"]
    assert index.some_of(mask, 100, 7) == [*names[40:50], *names[51:60]]
    assert index.some_of(0, 3, 5) == []


def test_the_least_recently_used_tail_goes_first_and_the_stem_survives() -> None:
    stem = run_of(1, 160)
    room = 4 * (160 + 3 * 160)
    index = index_of("a", max_bytes=room + 5_000)
    for tail in range(2, 5):
        index.insert(SPACE, stem + run_of(tail, 160), "a")
    index.match(SPACE, stem + run_of(2, 160))
    index.match(SPACE, stem + run_of(3, 160), touch=False)
    filler = 10
    while index.match(SPACE, stem + run_of(3, 160), touch=False) == {"a": 320}:
        index.insert(SPACE, run_of(filler, 160), "a")
        filler += 1
        index.check()
    assert index.match(SPACE, stem + run_of(2, 160), touch=False) == {"a": 320}  # touched later
    assert index.match(SPACE, stem, touch=False) == {"a": 160}


def test_a_fork_does_not_refresh_the_tail_it_splits_off() -> None:
    index = index_of("a", max_bytes=24_000)
    index.insert(SPACE, run_of(1, 16) + run_of(2, 2_000), "a")
    index.insert(SPACE, run_of(3, 2_000), "a")
    index.insert(SPACE, run_of(1, 16) + run_of(4, 16), "a")  # splits the first
    index.insert(SPACE, run_of(5, 2_000), "a")
    assert index.match(SPACE, run_of(1, 16) + run_of(2, 2_000)) == {"a": 16}
    assert index.match(SPACE, run_of(3, 2_000)) == {"a": 2_000}


def test_dead_nodes_go_before_live_ones() -> None:
    index = index_of("a", max_bytes=40_000)
    index.insert(SPACE._replace(owner="old"), run_of(2, 4_000), "a")
    index.insert(SPACE, run_of(1, 2_000), "a")
    index.match(SPACE._replace(owner="old"), run_of(2, 4_000))  # more recent than the live one
    index.drop_owner("old")
    for filler in range(10, 15):
        index.insert(SPACE, run_of(filler, 640), "a")
    assert index.match(SPACE, run_of(1, 2_000)) == {"a": 2_000}
    assert index.statistics().dead_nodes == 0


def test_nodes_of_a_dropped_engine_go_before_live_ones() -> None:
    index = index_of("a", "gone", max_bytes=40_000)
    index.insert(SPACE, run_of(1, 2_000), "a")
    index.insert(SPACE, run_of(2, 4_000), "gone")
    index.drop_engine("gone")
    for filler in range(10, 15):
        index.insert(SPACE, run_of(filler, 640), "a")
    assert index.match(SPACE, run_of(1, 2_000)) == {"a": 2_000}


def test_a_prompt_over_the_bound_is_cut() -> None:
    index = index_of("a", max_bytes=10_000)
    pages = index.insert(SPACE, run_of(1, 10_000), "a")
    assert 0 < pages < 10_000 // 64
    assert index.match(SPACE, run_of(1, 10_000)) == {"a": pages * 16}
    index.check()
    tiny = index_of("a", max_bytes=500)
    assert tiny.insert(SPACE, run_of(1, 100), "a") == 0
    assert tiny.statistics().bytes == 0


def test_a_capped_engine_keeps_its_most_recent_credit() -> None:
    index = index_of("capped", max_tokens=320)
    index.add_engine("free", 1)
    for token in range(1, 5):
        index.insert(SPACE, run_of(token, 96), "free")
        index.insert(SPACE, run_of(token, 96), "capped")
        index.insert(SPACE, run_of(1, 96), "capped")  # its engine keeps using the first
        assert index.statistics().engine_tokens["capped"] <= 320
        index.check()
    held = [index.match(SPACE, run_of(token, 96)) for token in range(1, 5)]
    assert [hit.get("capped", 0) for hit in held] == [96, 0, 96, 96]
    assert [hit["free"] for hit in held] == [96] * 4


def test_a_cap_gives_up_tails_before_the_stem_they_share() -> None:
    index = index_of("capped", max_tokens=160)
    stem = run_of(1, 64)
    for tail in range(2, 8):
        index.insert(SPACE, stem + run_of(tail, 48), "capped")
        assert index.match(SPACE, stem + run_of(tail, 48)) == {"capped": 112}
        index.check()
    assert index.statistics().engine_tokens == {"capped": 160}
    assert index.match(SPACE, stem + run_of(6, 48)) == {"capped": 112}
    assert index.match(SPACE, stem + run_of(5, 48)) == {"capped": 64}


@pytest.mark.parametrize("fork", [False, True])
def test_what_forget_keeps_was_used_just_now(fork: bool) -> None:
    """With a fork the cut falls on the border of a node, without one inside an edge."""
    index = index_of("capped", max_tokens=320)
    index.insert(SPACE, run_of(1, 96) + run_of(2, 64), "capped")
    if fork:
        index.insert(SPACE, run_of(1, 96) + run_of(3, 16), "capped")
    index.insert(SPACE, run_of(4, 96), "capped")
    index.forget(SPACE, run_of(1, 96) + run_of(2, 64), "capped", keep_tokens=100)
    index.insert(SPACE, run_of(5, 160), "capped")
    index.check()
    assert index.match(SPACE, run_of(1, 96)) == {"capped": 96}
    assert index.match(SPACE, run_of(4, 96)) == {}


def test_a_prompt_over_the_cap_is_cut_to_whole_engine_pages() -> None:
    index = PrefixIndex(UNBOUNDED)
    index.add_engine("capped", 64, max_tokens=150)
    assert index.insert(SPACE, run_of(1, 1_000), "capped") == 8
    assert index.match(SPACE, run_of(1, 1_000)) == {"capped": 128}
    index.check()


def test_turns_of_a_session_stay_one_node() -> None:
    index = index_of("a")
    for turn in range(1, 50):
        assert index.insert(SPACE, run_of(1, 32 * turn), "a") == 2
        assert index.statistics().nodes == 1
    index.check()


def test_fragments_merge_once_the_same_engines_hold_them() -> None:
    index = index_of("a", "b")
    index.insert(SPACE, run_of(1, 64), "a")
    index.insert(SPACE, run_of(1, 32), "b")
    assert index.statistics().nodes == 2
    index.insert(SPACE, run_of(1, 64), "b")
    assert index.statistics().nodes == 1
    index.insert(SPACE, run_of(1, 32) + run_of(2, 32), "a")
    assert index.statistics().nodes == 3
    index.insert(SPACE, run_of(1, 64), "b")
    index.forget(SPACE, run_of(1, 32) + run_of(2, 32), "a", keep_tokens=32)  # the fork is gone
    assert index.statistics().nodes == 2  # the stem was in use without its other tail
    index.insert(SPACE, run_of(1, 64), "b")
    assert index.statistics().nodes == 1
    index.check()


def test_a_never_hit_tail_collapses_into_its_stem() -> None:
    """The stem is in steady use without the tail, so pressure takes the tail and leaves the stem."""
    index = index_of("a", max_bytes=20_000)
    index.insert(SPACE, run_of(1, 64) + run_of(2, 1_600), "a")
    index.insert(SPACE, run_of(1, 64) + run_of(3, 16), "a")
    for filler in range(10, 40):
        index.match(SPACE, run_of(1, 64))
        index.insert(SPACE, run_of(filler, 640), "a")
        index.check()
    for tail in (run_of(2, 1_600), run_of(3, 16)):
        assert index.match(SPACE, run_of(1, 64) + tail) == {"a": 64}


def test_a_dropped_engines_bit_is_not_reused_before_the_pass_is_over() -> None:
    index = index_of("old", "stays")
    for token in range(1, 20):
        index.insert(SPACE, run_of(token, 32), "old")
        index.insert(SPACE, run_of(token, 16), "stays")
    old = index.bit("old")
    index.drop_engine("old")
    index.sweep(5)
    assert index.add_engine("early", 1) != old
    assert index.match(SPACE, run_of(3, 32)) == {"stays": 16}
    sweep_all(index)
    assert index.add_engine("late", 1) == old
    assert index.match(SPACE, run_of(3, 32)) == {"stays": 16}
    index.check()


def test_sweep_is_bounded_and_says_when_it_is_done() -> None:
    index = index_of("a")
    for token in range(100):
        index.insert(SPACE, run_of(token, 16), "a")
    assert index.sweep(1_000) == 0
    index.drop_owner("run")
    assert index.sweep(30) == 30
    assert index.sweep(1_000) == 71  # 100 nodes and their root
    assert index.sweep(1_000) == 0


def test_a_sweep_counts_entries_in_the_orders_of_capped_engines() -> None:
    """A node that many capped engines end at is many steps, so a slice of steps has a bounded time."""
    names = [f"e{number}" for number in range(20)]
    index = index_of(*names, max_tokens=10_000)
    for token in range(10):
        for name in names:
            index.insert(SPACE, run_of(token, 32), name)
    index.drop_owner("run")
    assert index.sweep(1) == 1  # the root
    assert index.sweep(1) == 1 + len(names)
    assert index.statistics().dead_nodes == 9
    sweep_all(index)
    assert index.statistics().bytes == 0


def test_evict_takes_the_least_recent_ends_dead_ones_first() -> None:
    index = index_of("a")
    for token in range(1, 4):
        index.insert(SPACE, run_of(token, 32), "a")
    index.insert(SPACE._replace(owner="old"), run_of(9, 32), "a")
    index.drop_owner("old")
    index.match(SPACE, run_of(1, 32))
    assert index.evict(3) == 3  # the dead root and its node, then one end
    index.check()
    held = [index.match(SPACE, run_of(token, 32), touch=False) for token in range(1, 4)]
    assert held == [{"a": 32}, {}, {"a": 32}]
    assert index.evict(10) == 2
    assert index.statistics().bytes == 0


def test_hits_on_asks_only_for_some_engines() -> None:
    index = PrefixIndex(UNBOUNDED)
    bits = [index.add_engine(name, page) for name, page in (("a", 16), ("b", 64), ("c", 16))]
    for engine, length in (("a", 96), ("b", 64), ("c", 48)):
        index.insert(SPACE, run_of(1, length), engine)
    segments = index.segments(SPACE, run_of(1, 96))
    assert index.hits_on(segments, 1 << bits[1] | 1 << bits[2]) == {"b": 64, "c": 48}
    assert list(index.hits_on(segments, -1)) == ["a", "b", "c"]  # longest first
    assert index.match(SPACE, run_of(1, 48)) == {"a": 48, "c": 48}  # not a page of b
    index.drop_engine("b")
    assert index.hits_on(segments, 1 << bits[1]) == {}


def test_more_than_sixty_four_engines() -> None:
    names = [f"e{number}" for number in range(130)]
    index = index_of(*names)
    for number, name in enumerate(names):
        index.insert(SPACE, run_of(1, 16 * (1 + number % 5)), name)
    assert index.match(SPACE, run_of(1, 80)) == {name: 16 * (1 + number % 5) for number, name in enumerate(names)}
    index.check()


def test_accounting_follows_tracemalloc() -> None:
    """NODE_BYTES and the other constants, within a quarter, on chains with forks held by several engines."""
    rng = random.Random(1)
    gc.collect()
    tracemalloc.start()
    try:
        index = index_of("a", "b", "c")
        index.add_engine("capped", 16, 1_000_000)
        for _ in range(150):
            stem = ids(rng.getrandbits(17) for _ in range(512))
            for _ in range(8):
                tail = ids(rng.getrandbits(17) for _ in range(128))
                index.insert(SPACE, stem + tail, rng.choice(["a", "b", "c", "capped"]))
        gc.collect()
        real = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = index.statistics().bytes
    assert 0.8 < counted / real < 1.25, (counted, real)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrefixIndex(0), "max_bytes must be positive"),
        (lambda: PrefixIndex(1, page_tokens=0), "page_tokens must be positive"),
        (lambda: PrefixIndex(1, eviction="fifo"), "eviction must be one of lru"),
        (lambda: index_of("a", "a"), "already in the index"),
        (lambda: index_of("a", max_tokens=-1), "max_tokens -1"),
        (lambda: index_of("a").insert(SPACE, b"123", "a"), "3 bytes"),
        (lambda: index_of("a").advance_version("run", 1, -1), "ttl_versions must be >= 0"),
    ],
)
def test_nonsense_is_refused_with_a_reason(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
