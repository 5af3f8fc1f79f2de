"""The radix index where other routers failed: `test_index_<n>_...` is one such failure each."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from tests.scheduler.index_kit import SPACE, ids, index_of, run_of, sweep_all


def test_split_keeps_the_stem() -> None:
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


def test_splits_do_not_keep_the_whole_buffer() -> None:
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


def test_eviction_of_one_half_frees_it() -> None:
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


def test_the_bound_holds_at_every_insert_without_a_sweep() -> None:
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


def test_side_maps_and_tree_agree_down_to_empty() -> None:
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
def test_engines_that_come_and_go_leave_nothing(max_tokens: int) -> None:
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


def test_a_new_version_matches_nothing_and_frees_the_old() -> None:
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
