"""The prefix index, case by case. `test_index_<n>_...` are failures that other routers had."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
from collections.abc import Iterable, Iterator

import pytest

from rolloutd.scheduler.index import EngineCacheMirror, Namespace, PrefixIndex
from rolloutd.scheduler.index_naive import NaivePrefixIndex

UNBOUNDED = 1 << 40
SPACE = Namespace("run", "m", "", 0, "")


def ids(tokens: Iterable[int]) -> bytes:
    tokens = list(tokens)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def run_of(token: int, length: int) -> bytes:
    return ids([token] * length)


def index_of(*engines: str, max_bytes: int = UNBOUNDED, page_tokens: int = 16, max_tokens: int = 0) -> PrefixIndex:
    index = PrefixIndex(max_bytes, page_tokens)
    for engine in engines:
        index.add_engine(engine, 1, max_tokens)
    return index


def sweep_all(index: PrefixIndex) -> None:
    while index.sweep(100):
        index.check()


@pytest.fixture(params=["radix", "naive"])
def mirror(request: pytest.FixtureRequest) -> Iterator[EngineCacheMirror]:
    mirror = PrefixIndex(UNBOUNDED) if request.param == "radix" else NaivePrefixIndex()
    yield mirror
    if isinstance(mirror, PrefixIndex):
        mirror.check()


# ---- what every mirror of engine caches must do


def test_a_match_is_the_longest_insert_in_common(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    assert mirror.insert(SPACE, run_of(1, 64), "a") == 4
    assert mirror.insert(SPACE, run_of(1, 32) + run_of(2, 32), "b") == 4
    assert mirror.insert(SPACE, run_of(1, 96), "a") == 2
    assert mirror.match(SPACE, run_of(1, 80)) == {"a": 80, "b": 32}
    assert mirror.match(SPACE, run_of(1, 32) + run_of(2, 16)) == {"a": 32, "b": 48}
    assert mirror.match(SPACE, run_of(3, 32)) == {}
    assert mirror.match(SPACE, b"") == {}


def test_credit_is_whole_pages_of_index_and_engine(mirror: EngineCacheMirror) -> None:
    for engine, page_tokens in (("one", 1), ("sixteen", 16), ("sixty-four", 64), ("odd", 24)):
        mirror.add_engine(engine, page_tokens)
        mirror.insert(SPACE, run_of(1, 150), engine)
    assert mirror.match(SPACE, run_of(1, 200)) == {"one": 144, "sixteen": 144, "sixty-four": 128, "odd": 144}
    assert mirror.match(SPACE, run_of(1, 127)) == {"one": 112, "sixteen": 112, "sixty-four": 64, "odd": 96}
    assert mirror.match(SPACE, run_of(1, 47)) == {"one": 32, "sixteen": 32}
    assert mirror.insert(SPACE, run_of(2, 63), "sixty-four") == 0


def test_forget_cuts_the_engine_and_its_branches_and_nobody_else(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    stem = run_of(1, 64)
    for tail in (2, 3):
        for engine in ("a", "b"):
            mirror.insert(SPACE, stem + run_of(tail, 32), engine)
    mirror.insert(SPACE, run_of(1, 16) + run_of(4, 32), "a")
    mirror.forget(SPACE, stem + run_of(2, 32), "a", keep_tokens=40)
    assert mirror.match(SPACE, stem + run_of(2, 32)) == {"a": 32, "b": 96}
    assert mirror.match(SPACE, stem + run_of(3, 32)) == {"a": 32, "b": 96}
    assert mirror.match(SPACE, run_of(1, 16) + run_of(4, 32)) == {"a": 48, "b": 16}
    mirror.forget(SPACE, stem, "a", keep_tokens=0)
    assert mirror.match(SPACE, run_of(1, 16) + run_of(4, 32)) == {"b": 16}
    mirror.forget(SPACE, stem, "nobody", keep_tokens=0)


def test_clear_engine_keeps_the_engine(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    mirror.insert(SPACE, run_of(1, 64), "a")
    mirror.insert(SPACE, run_of(1, 64), "b")
    assert mirror.clear_engine("a") is not None
    assert mirror.match(SPACE, run_of(1, 64)) == {"b": 64}
    assert mirror.insert(SPACE, run_of(1, 32), "a") == 2
    assert mirror.match(SPACE, run_of(1, 64)) == {"a": 32, "b": 64}
    assert mirror.clear_engine("nobody") is None


def test_versions_expire_per_owner_and_stay_expired(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    spaces = [SPACE._replace(version=version) for version in range(4)]
    shared = SPACE._replace(owner="pool", version=1)
    for space in [*spaces, shared]:
        mirror.insert(space, run_of(1, 32), "a")
    assert mirror.advance_version("run", 3, ttl_versions=1) == 2
    assert [bool(mirror.match(space, run_of(1, 32))) for space in spaces] == [False, False, True, True]
    assert mirror.match(shared, run_of(1, 32)) == {"a": 32}
    assert mirror.insert(spaces[1], run_of(1, 32), "a") == 0  # a late answer of an old version
    assert mirror.match(spaces[1], run_of(1, 32)) == {}
    mirror.advance_version("run", 2)  # late news moves nothing back
    assert mirror.insert(spaces[1], run_of(1, 32), "a") == 0
    assert mirror.drop_owner("run") == 2
    assert mirror.insert(spaces[0], run_of(1, 32), "a") == 2  # the owner's name is free again
    assert mirror.match(spaces[2], run_of(1, 32)) == {}


def test_index_10_a_partial_descent_gets_only_its_part() -> None:
    for mirror in (PrefixIndex(UNBOUNDED, page_tokens=1), NaivePrefixIndex(page_tokens=1)):
        mirror.add_engine("a", 1)
        mirror.insert(SPACE, ids(range(512)), "a")
        assert mirror.match(SPACE, ids([*range(100), 7, 7, 7])) == {"a": 100}
        assert mirror.match(SPACE, ids(range(100))) == {"a": 100}
        assert mirror.match(SPACE, ids(range(512))) == {"a": 512}
        assert mirror.match(SPACE, ids(range(600))) == {"a": 512}
        assert mirror.match(SPACE, b"") == {}


def test_index_14_an_unknown_engine_is_ignored_and_pools_are_apart(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.add_engine("b", 1)
    other = SPACE._replace(model="other")
    mirror.insert(SPACE, run_of(1, 32), "a")
    mirror.insert(other, run_of(1, 32), "b")
    assert mirror.match(SPACE, run_of(1, 32)) == {"a": 32}
    assert mirror.match(other, run_of(1, 32)) == {"b": 32}
    assert mirror.insert(SPACE, run_of(1, 32), "nobody") == 0
    assert mirror.drop_engine("nobody") is False
    assert mirror.match(SPACE._replace(owner="someone"), run_of(1, 32)) == {}


def test_index_15_namespaces_are_tuples_not_text(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.insert(Namespace("run", "a", "", 1, "23"), run_of(1, 32), "a")
    for space in (
        Namespace("run", "a", "", 12, "3"),
        Namespace("run", "", "a", 1, "23"),
        Namespace("runa", "", "", 1, "23"),
        Namespace("run", "a", "", 1, "2"),
    ):
        assert mirror.match(space, run_of(1, 32)) == {}
    assert mirror.match(Namespace("run", "a", "", 1, "23"), run_of(1, 32)) == {"a": 32}


def test_client_102_equal_text_is_not_equal_tokens(mirror: EngineCacheMirror) -> None:
    mirror.add_engine("a", 1)
    mirror.insert(SPACE, ids([5, 6] * 16), "a")
    assert mirror.match(SPACE, ids([56] * 32)) == {}


# ---- the radix index: failures of others


def test_index_1_split_keeps_the_stem() -> None:
    index = index_of("E1")
    stem, a, b = run_of(1, 48), run_of(2, 32), run_of(3, 64)
    index.insert(SPACE, stem + a, "E1")
    assert index.statistics().engine_tokens == {"E1": 80}
    index.insert(SPACE, stem + b, "E1")
    assert index.statistics().engine_tokens == {"E1": 144}
    assert index.statistics().nodes == 3
    assert index.match(SPACE, stem + run_of(4, 16)) == {"E1": 48}
    assert index.match(SPACE, stem + a) == {"E1": 80}
    assert index.match(SPACE, stem + b) == {"E1": 112}
    index.check()


def test_index_3_splits_do_not_keep_the_whole_buffer() -> None:
    rng = random.Random(3)
    prompt = ids(rng.getrandbits(17) for _ in range(100_000))
    gc.collect()
    tracemalloc.start()
    try:
        index = index_of("a")
        index.insert(SPACE, bytes(bytearray(prompt)), "a")  # a buffer nobody else keeps
        for fork in reversed(range(1_000)):  # from the far end, so that walks stay short
            index.insert(SPACE, prompt[: 4 * 96 * (fork + 1)] + run_of(1_000_000 + fork, 16), "a")
        index.check()
        full = tracemalloc.get_traced_memory()[0]
        assert full > len(prompt)
        index.forget(SPACE, prompt, "a", keep_tokens=16)
        index.check()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
        assert index.match(SPACE, prompt) == {"a": 16}
        assert index.statistics().bytes < 2_000
        assert left < 200_000, f"{left} bytes of {full} are still there"
    finally:
        tracemalloc.stop()


def test_index_3_eviction_of_one_half_frees_it() -> None:
    """A 4 MB prompt, a fork after its first page; the long tail is evicted while the stem stays in use."""
    prompt = ids(range(1_000_000))
    index = index_of("a", max_bytes=4_010_000)
    gc.collect()
    tracemalloc.start()
    try:
        index.insert(SPACE, bytes(bytearray(prompt)), "a")
        index.insert(SPACE, prompt[:64] + run_of(9, 16), "a")
        index.match(SPACE, prompt[:64] + run_of(9, 16))
        index.insert(SPACE, run_of(8, 4_000), "a")
        assert index.match(SPACE, prompt) == {"a": 16}
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 100_000
        index.check()
    finally:
        tracemalloc.stop()


def test_index_5_the_bound_holds_at_every_insert_without_a_sweep() -> None:
    """A burst of 5,000 unique prompts of 8k tokens (160 MB) into 4 MB; nobody sweeps."""
    max_bytes = 4_000_000
    index = index_of("a", "b", max_bytes=max_bytes)
    body = run_of(7, 8_176)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(5_000):
            prompt = run_of(number + 10, 16) + body
            assert index.insert(SPACE, prompt, "ab"[number % 2]) == 512
            assert index.statistics().bytes <= max_bytes
            assert index.match(SPACE, prompt, touch=False) == {"ab"[number % 2]: 8_192}
        del prompt
        # One prompt is stored before its room is made.
        assert tracemalloc.get_traced_memory()[1] < max_bytes + 3 * len(body)
    finally:
        tracemalloc.stop()
    index.check()
    assert index.statistics().bytes > max_bytes * 0.9


def test_index_7_side_maps_and_tree_agree_down_to_empty() -> None:
    index = index_of("upper", "lower", max_tokens=10_000)
    stem, tail = run_of(1, 32), run_of(2, 32)
    index.insert(SPACE, stem + tail, "lower")
    index.check()
    index.insert(SPACE, stem, "upper")  # splits the node of "lower"
    index.check()
    index.forget(SPACE, stem, "upper", keep_tokens=0)
    index.check()
    assert index.match(SPACE, stem + tail) == {"lower": 64}
    index.forget(SPACE, stem + tail, "lower", keep_tokens=0)
    index.check()
    statistics = index.statistics()
    assert (statistics.nodes, statistics.bytes, statistics.namespaces) == (0, 0, 0)
    assert statistics.engine_tokens == {"upper": 0, "lower": 0}


@pytest.mark.parametrize("max_tokens", [0, 5_000])
def test_index_11_engines_that_come_and_go_leave_nothing(max_tokens: int) -> None:
    index = index_of("stays")
    index.insert(SPACE, run_of(1, 512), "stays")

    def cycle(number: int) -> None:
        index.add_engine(f"e{number}", 16, max_tokens)
        index.insert(SPACE, run_of(1, 512) + run_of(2 + number, 512), f"e{number}")
        assert index.match(SPACE, run_of(1, 600))[f"e{number}"] == 512
        index.drop_engine(f"e{number}")
        assert index.match(SPACE, run_of(1, 600)) == {"stays": 512}
        index.sweep(8)

    for number in range(50):
        cycle(number)
    gc.collect()
    tracemalloc.start()
    try:
        cycle(50)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(51, 500):
            cycle(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < before + 10_000
    finally:
        tracemalloc.stop()
    sweep_all(index)
    statistics = index.statistics()
    assert statistics.engine_tokens == {"stays": 512}
    assert (statistics.pages, statistics.nodes, statistics.unswept_bits) == (32, 1, 0)
    assert index.add_engine("next", 1) <= 2, "bits are not given out again"


def test_index_13_a_new_version_matches_nothing_and_frees_the_old() -> None:
    index = index_of("a", "b")
    v3, v4 = SPACE._replace(version=3), SPACE._replace(version=4)
    for number in range(50):
        index.insert(v3, run_of(1, 64) + run_of(number, 64), "ab"[number % 2])
    assert index.advance_version("run", 4) == 1
    index.clear_engine("a")
    assert index.match(v4, run_of(1, 64)) == {}
    assert index.match(v3, run_of(1, 64)) == {}
    index.check()
    statistics = index.statistics()
    assert (statistics.nodes, statistics.dead_nodes) == (0, 51)  # declared, not yet swept
    assert statistics.engine_tokens == {"a": 0, "b": 0}
    assert index.sweep(10) == 10
    index.check()
    assert index.statistics().dead_nodes > 0
    sweep_all(index)
    statistics = index.statistics()
    assert (statistics.dead_nodes, statistics.bytes, statistics.pages) == (0, 0, 0)
    index.insert(v4, run_of(1, 64), "a")
    assert index.match(v4, run_of(1, 64)) == {"a": 64}


# ---- the radix index: its own promises


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
