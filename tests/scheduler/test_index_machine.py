"""The radix index against its naive twin: hypothesis drives both with the same calls.

Without a bound the two answer alike; with a bound or a cap the index may only claim less. `check()` after every step.
"""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rolloutd.scheduler.index import Namespace, PrefixIndex
from rolloutd.scheduler.index_naive import NaivePrefixIndex

CHUNK_TOKENS = 8  # half a page of 16: prompts part inside pages as well as between them
ENGINES = [f"engine-{number}/0" for number in range(5)]
NAMESPACES = [
    Namespace(owner, model, "", version, "")
    for owner in ("run", "pool")
    for model in ("m", "n")
    for version in range(4)
]

prompts = st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=24).map(
    lambda letters: struct.pack(f"<{len(letters) * CHUNK_TOKENS}I", *(x for x in letters for _ in range(CHUNK_TOKENS)))
)
engines = st.sampled_from(ENGINES)
namespaces = st.sampled_from(NAMESPACES[:3] * 8 + NAMESPACES)  # mostly the same few, so that histories meet


class _Mirrored(RuleBasedStateMachine):
    """Both, in step. Subclasses say how large the index may be and how its answers relate to the twin's."""

    max_bytes = 1 << 40
    caps: tuple[int, ...] = (0,)
    exact = True

    @initialize(page_tokens=st.sampled_from([1, 16]))
    def begin(self, page_tokens: int) -> None:
        self.index = PrefixIndex(self.max_bytes, page_tokens)
        self.twin = NaivePrefixIndex(page_tokens)
        self.bits: dict[str, int] = {}
        for engine, page in zip(ENGINES[:3], (1, 16, 64), strict=True):
            self.add(engine, page, self.caps[0])

    def add(self, engine: str, page_tokens: int, max_tokens: int) -> None:
        bit = self.index.add_engine(engine, page_tokens, max_tokens)
        assert bit not in self.bits.values()
        self.bits[engine] = bit
        self.twin.add_engine(engine, page_tokens)

    @rule(data=st.data(), engine=engines, page_tokens=st.sampled_from([1, 16, 64]))
    def add_or_drop(self, data: st.DataObject, engine: str, page_tokens: int) -> None:
        if engine in self.bits:
            assert self.index.drop_engine(engine)
            assert self.twin.drop_engine(engine)
            del self.bits[engine]
        else:
            self.add(engine, page_tokens, data.draw(st.sampled_from(self.caps)))

    @rule(engine=engines)
    def clear(self, engine: str) -> None:
        self.twin.clear_engine(engine)
        bit = self.index.clear_engine(engine)
        assert (bit is not None) == (engine in self.bits)
        if bit is not None:
            self.bits[engine] = bit
            assert bit == self.index.bit(engine)

    @rule(namespace=namespaces, tokens=prompts, engine=engines)
    def insert(self, namespace: Namespace, tokens: bytes, engine: str) -> None:
        fresh = self.index.insert(namespace, tokens, engine)
        expected = self.twin.insert(namespace, tokens, engine)
        if self.exact:
            assert fresh == expected
        self.compare(namespace, tokens)

    @rule(namespace=namespaces, work=st.lists(st.tuples(prompts, engines), min_size=2, max_size=8))
    def insert_several(self, namespace: Namespace, work: list[tuple[bytes, str]]) -> None:
        for tokens, engine in work:
            self.insert(namespace, tokens, engine)
            self.index.check()

    @rule(namespace=namespaces, tokens=prompts, engine=engines, keep_tokens=st.integers(0, 200))
    def forget(self, namespace: Namespace, tokens: bytes, engine: str, keep_tokens: int) -> None:
        self.index.forget(namespace, tokens, engine, keep_tokens)
        self.twin.forget(namespace, tokens, engine, keep_tokens)
        self.compare(namespace, tokens)
        assert self.index.match(namespace, tokens).get(engine, 0) <= keep_tokens

    @rule(namespace=namespaces, tokens=prompts, touch=st.booleans())
    def look_up(self, namespace: Namespace, tokens: bytes, touch: bool) -> None:
        self.compare(namespace, tokens, touch)

    @rule(owner=st.sampled_from(["run", "pool"]), version=st.integers(0, 3), ttl_versions=st.integers(0, 2))
    def advance(self, owner: str, version: int, ttl_versions: int) -> None:
        self.index.advance_version(owner, version, ttl_versions)
        self.twin.advance_version(owner, version, ttl_versions)

    @rule(owner=st.sampled_from(["run", "pool", "nobody"]))
    def drop_owner(self, owner: str) -> None:
        self.index.drop_owner(owner)
        self.twin.drop_owner(owner)

    @rule(max_steps=st.integers(0, 7))
    def sweep(self, max_steps: int) -> None:
        steps = self.index.sweep(max_steps)
        assert steps <= max_steps + len(ENGINES) if max_steps else steps == 0

    def compare(self, namespace: Namespace, tokens: bytes, touch: bool = True) -> None:
        expected = self.twin.match(namespace, tokens)
        segments = self.index.segments(namespace, tokens, touch)
        matched = {engine: self.index.matched(segments, bit) for engine, bit in self.bits.items()}
        found = self.index.match(namespace, tokens, touch=False)
        assert {engine: hit for engine, hit in matched.items() if hit} == found
        for step in (1, 2):
            some = list(self.bits)[::step]
            expected_some = {engine: found[engine] for engine in some if engine in found}
            assert self.index.hits_on(segments, sum(1 << self.bits[engine] for engine in some)) == expected_some
        assert all(
            self.index.hits_on(segments, 1 << bit).get(name, 0) == matched[name] for name, bit in self.bits.items()
        )
        for (mask, length), (next_mask, next_length) in itertools.pairwise(segments):
            assert length > next_length and mask != next_mask and mask & ~next_mask == 0
        if self.exact:
            assert found == expected
        else:
            assert all(hit <= expected.get(engine, 0) for engine, hit in found.items()), (found, expected)

    @invariant()
    def sound(self) -> None:
        self.index.check()
        statistics = self.index.statistics()
        assert statistics.engine_tokens.keys() == self.bits.keys()
        assert statistics.bytes <= self.max_bytes

    def teardown(self) -> None:
        for namespace in NAMESPACES:
            for _, _, tokens in self.twin.entries:
                self.compare(namespace, tokens)
        for engine in list(self.bits):
            self.index.drop_engine(engine)
        while self.index.sweep(5):
            self.index.check()
        statistics = self.index.statistics()
        assert (statistics.nodes, statistics.bytes, statistics.unswept_bits) == (0, 0, 0), statistics


class Unbounded(_Mirrored):
    pass


class Bounded(_Mirrored):
    max_bytes = 6_000
    exact = False

    @rule(max_nodes=st.integers(0, 3))
    def evict(self, max_nodes: int) -> None:
        before = self.index.statistics()
        evicted = self.index.evict(max_nodes)
        after = self.index.statistics()
        assert evicted == max_nodes or (after.nodes, after.dead_nodes) == (0, 0)
        assert after.bytes < before.bytes or not evicted


class Capped(_Mirrored):
    caps = (64, 0, 200)
    exact = False


class BoundedAndCapped(Bounded):
    max_bytes = 9_000
    caps = (200, 0, 64)
    exact = False


_long = settings(max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
TestUnbounded = Unbounded.TestCase
TestUnbounded.settings = _long
TestBounded = Bounded.TestCase
TestBounded.settings = _long
TestCapped = Capped.TestCase
TestCapped.settings = _long
TestBoundedAndCapped = BoundedAndCapped.TestCase
TestBoundedAndCapped.settings = _long


@pytest.mark.parametrize(
    ("max_bytes", "caps"), [(1 << 40, (0,)), (5_000, (0,)), (1 << 40, (64, 0, 160)), (12_000, (160, 64))]
)
def test_dense_random_histories(max_bytes: int, caps: tuple[int, ...]) -> None:
    """Longer and denser than the state machine draws: few namespaces, many shared prefixes, passes always half done."""
    exact = max_bytes == 1 << 40 and caps == (0,)
    for seed in range(10):
        rng = random.Random(seed)
        page_tokens = rng.choice([1, 16])
        index, twin = PrefixIndex(max_bytes, page_tokens), NaivePrefixIndex(page_tokens)
        present: set[str] = set()
        for _ in range(300):
            namespace = NAMESPACES[rng.randrange(2)]
            letters = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(20))]
            tokens = b"".join(struct.pack("<I", letter) * CHUNK_TOKENS for letter in letters)
            engine = rng.choice(ENGINES)
            draw = rng.random()
            if engine not in present:
                page, cap = rng.choice([1, 16, 64]), rng.choice(caps)
                index.add_engine(engine, page, cap)
                twin.add_engine(engine, page)
                present.add(engine)
            if draw < 0.65:
                fresh, expected = index.insert(namespace, tokens, engine), twin.insert(namespace, tokens, engine)
                assert fresh == expected or not exact
            elif draw < 0.8:
                keep = rng.randrange(160)
                index.forget(namespace, tokens, engine, keep)
                twin.forget(namespace, tokens, engine, keep)
            elif draw < 0.83:
                assert index.clear_engine(engine) is not None
                twin.clear_engine(engine)
            elif draw < 0.87:
                assert index.drop_engine(engine)
                twin.drop_engine(engine)
                present.remove(engine)
            elif draw < 0.89:
                index.drop_owner(namespace.owner)
                twin.drop_owner(namespace.owner)
            index.sweep(rng.choice([0, 0, 1, 2, 3]))
            found, expected_hits = index.match(namespace, tokens), twin.match(namespace, tokens)
            assert found == expected_hits or not exact
            assert all(hit <= expected_hits.get(name, 0) for name, hit in found.items())
            index.check()
