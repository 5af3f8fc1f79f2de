"""The simulated prefix cache against a naive twin, and its eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutd.engines.sim.radix import RadixCache

PAGE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=14)


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


class NaiveCache:
    """Every cached whole-page prefix, as tuples."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[str, tuple[int, ...]]] = set()

    def insert(self, namespace: str, tokens: list[int]) -> None:
        for pages in range(1, len(tokens) // PAGE + 1):
            self.prefixes.add((namespace, tuple(tokens[: pages * PAGE])))

    def match(self, namespace: str, tokens: list[int], limit: int) -> int:
        pages = 0
        while (pages + 1) * PAGE <= min(limit, len(tokens)) and (
            namespace,
            tuple(tokens[: (pages + 1) * PAGE]),
        ) in self.prefixes:
            pages += 1
        return pages


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), TOKENS, st.integers(0, 14), st.booleans()), max_size=30))
def test_matches_equal_the_naive_twin(steps: list[tuple[str, list[int], int, bool]]) -> None:
    cache, naive = RadixCache(PAGE), NaiveCache()
    for namespace, tokens, limit, insert in steps:
        if insert:
            cache.insert(namespace, pack(tokens))
            naive.insert(namespace, tokens)
        expected = naive.match(namespace, tokens, limit)
        assert cache.peek_pages(namespace, pack(tokens), limit) == expected
        assert cache.match(namespace, pack(tokens), limit)[1] == expected
        assert cache.cached_pages == len(naive.prefixes)
        cache.check()


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.sampled_from(["hold", "drop", "evict", "insert"])), max_size=40))
def test_locked_prefixes_survive_eviction(steps: list[tuple[list[int], str]]) -> None:
    cache = RadixCache(PAGE)
    held = []
    for tokens, action in steps:
        if action == "insert":
            cache.insert("", pack(tokens))
        elif action == "hold":
            cache.insert("", pack(tokens))
            node, pages = cache.match("", pack(tokens), len(tokens))
            cache.lock(node)
            held.append((node, pack(tokens), pages))
        elif action == "drop" and held:
            cache.unlock(held.pop(0)[0])
        else:
            before = cache.evictable_pages
            freed = cache.evict(len(tokens))
            assert freed >= min(before, len(tokens))
        for _, packed, pages in held:
            assert cache.peek_pages("", packed, 100) == pages
        cache.check()
    for node, _, _ in held:
        cache.unlock(node)
    assert cache.evictable_pages == cache.cached_pages
    cache.evict(cache.cached_pages)
    assert cache.cached_pages == 0
    cache.check()


def test_least_recently_used_leaf_goes_first_and_outputs_before_their_prompt() -> None:
    cache = RadixCache(PAGE)
    cache.insert("", pack([1, 1, 2, 2]))
    cache.insert("", pack([1, 1, 3, 3]))
    cache.match("", pack([1, 1, 2, 2]), 4)
    cache.evict(1)
    assert cache.peek_pages("", pack([1, 1, 3, 3]), 4) == 1
    assert cache.peek_pages("", pack([1, 1, 2, 2]), 4) == 2


def test_clear_refuses_while_pages_are_locked() -> None:
    cache = RadixCache(PAGE)
    node, _ = cache.insert("", pack([1, 1]))
    cache.lock(node)
    with pytest.raises(ValueError, match="in use"):
        cache.clear()
    cache.unlock(node)
    cache.clear()
    assert cache.cached_pages == 0 and cache.peek_pages("", pack([1, 1]), 2) == 0
