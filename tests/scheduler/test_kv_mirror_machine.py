"""The KV cache mirror against its naive twin: hypothesis lets engines report, in every order, and both must claim alike."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rolloutd.scheduler.index import Namespace, PrefixIndex
from rolloutd.scheduler.index_naive import NaivePrefixIndex
from rolloutd.scheduler.kv_cache_mirror import KvCacheMirror
from rolloutd.scheduler.kv_cache_naive import NaiveKvCacheMirror
from rolloutd.scheduler.kv_changes import KvChange, KvCleared, KvRemoved, KvStored, KvUnknown
from tests.scheduler.index_kit import ids

ENGINES = ("a/0", "b/0")
SALTS = ("", "", "v1")
CHUNK_TOKENS = 8  # half a page of the index, where its page is 16

letters = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=5)
engines = st.sampled_from(ENGINES)
salts = st.sampled_from(SALTS)


def name(salt: str, prompt: list[int]) -> int:
    digest = hashlib.sha256(repr((salt, prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def tokens_of(prompt: list[int], block_tokens: int) -> bytes:
    return ids(letter for letter in prompt for _ in range(block_tokens))


class MirrorMachine(RuleBasedStateMachine):
    @initialize(block=st.sampled_from([8, 16, 32]), page=st.sampled_from([1, 16]))
    def begin(self, block: int, page: int) -> None:
        self.block = block
        self.index = PrefixIndex(1 << 40, page)
        self.naive_index = NaivePrefixIndex(page)
        self.mirror = KvCacheMirror(self.index, 1 << 30)
        self.naive = NaiveKvCacheMirror(self.naive_index)
        self.version = 0
        self.sharing = False  # a second run uses the engines too
        for engine in ENGINES:
            self.index.add_engine(engine, block)
            self.naive_index.add_engine(engine, block)
            self.mirror.follow(engine, 1 << 20)

    def earning(self, salt: str, adapter: str) -> Namespace | None:
        return None if self.sharing else self.losing(salt, adapter)[0]

    def losing(self, salt: str, adapter: str) -> tuple[Namespace, ...]:
        spaces = (Namespace("run", "m", adapter, self.version, salt), Namespace("other", "m", adapter, 0, salt))
        return spaces if self.sharing else spaces[:1]

    def report(self, engine: str, change: KvChange) -> None:
        self.mirror.apply(engine, change, self)
        self.naive.apply(engine, change, self)

    @rule(engine=engines, salt=salts, prompt=letters, data=st.data(), on_host=st.sampled_from([False, False, True]))
    def store(self, engine: str, salt: str, prompt: list[int], data: st.DataObject, on_host: bool) -> None:
        start = data.draw(st.integers(0, len(prompt) - 1)) if data.draw(st.booleans()) else 0
        hashes = [name(salt, prompt[: end + 1]) for end in range(len(prompt))]
        stored = KvStored(
            tuple(hashes[start:]),
            hashes[start - 1] if start else None,
            tokens_of(prompt[start:], self.block),
            salt,
            "",
            on_host,
        )
        self.report(engine, stored)

    @rule(engine=engines, data=st.data(), on_host=st.sampled_from([False, False, True]))
    def remove(self, engine: str, data: st.DataObject, on_host: bool) -> None:
        known = sorted(block for owner, block in self.naive.blocks if owner == engine)
        gone = data.draw(st.lists(st.sampled_from([*known, 77]), max_size=6, unique=True))
        self.report(engine, KvRemoved(tuple(gone), on_host))

    @rule(engine=engines, salt=salts, prompt=letters, data=st.data())
    def remove_within(self, engine: str, salt: str, prompt: list[int], data: st.DataObject) -> None:
        """A block goes, what follows it stays: the engine would not, but then its reports make no sense to anybody."""
        end = data.draw(st.integers(1, len(prompt)))
        self.report(engine, KvRemoved((name(salt, prompt[:end]),)))

    @rule(engine=engines, salt=salts, prompt=letters)
    def insert_ourselves(self, engine: str, salt: str, prompt: list[int]) -> None:
        for namespace in self.losing(salt, ""):
            self.index.insert(namespace, tokens_of(prompt, CHUNK_TOKENS), engine)
            self.naive_index.insert(namespace, tokens_of(prompt, CHUNK_TOKENS), engine)

    @rule(engine=engines, salt=salts, prompt=letters, keep_tokens=st.integers(0, 64))
    def correct(self, engine: str, salt: str, prompt: list[int], keep_tokens: int) -> None:
        for namespace in self.losing(salt, ""):
            self.index.forget(namespace, tokens_of(prompt, self.block), engine, keep_tokens)
            self.naive_index.forget(namespace, tokens_of(prompt, self.block), engine, keep_tokens)

    @rule(engine=engines, data=st.data())
    def disturb(self, engine: str, data: st.DataObject) -> None:
        """One of what happens rarely."""
        calls = {
            "clear": lambda: self.report(engine, KvCleared()),
            "lose": lambda: self.report(engine, KvUnknown("a hole")),
            "restart": lambda: self.restart(engine),
            "publish": self.publish,
            "expire": self.expire,
            "share": self.share,
        }
        calls[data.draw(st.sampled_from([*calls, "publish", "publish"]))]()

    def publish(self) -> None:
        """New weights, under the same salts: what was stored before stays what it was."""
        self.version = min(self.version + 1, 3)

    def expire(self) -> None:
        self.index.advance_version("run", self.version)
        self.naive_index.advance_version("run", self.version)

    def share(self) -> None:
        self.sharing = not self.sharing

    def restart(self, engine: str) -> None:
        """As an engine that leaves and comes back under the same name."""
        self.mirror.drop(engine)
        self.naive.apply(engine, KvCleared(), self)
        self.index.drop_engine(engine)
        self.naive_index.drop_engine(engine)
        self.index.add_engine(engine, self.block)
        self.naive_index.add_engine(engine, self.block)
        self.mirror.follow(engine, 1 << 20)

    @invariant()
    def alike(self) -> None:
        self.mirror.check()
        self.index.check()
        for engine in ENGINES:
            assert self.mirror.blocks(engine) == sum(1 for owner, _ in self.naive.blocks if owner == engine)
        for salt in set(SALTS):
            for version in range(self.version + 1):
                namespace = Namespace("run", "m", "", version, salt)
                for prompt in ([1] * 6, [1, 1, 2, 1, 1, 1]):
                    tokens = tokens_of(prompt, self.block)
                    assert self.index.match(namespace, tokens) == self.naive_index.match(namespace, tokens)


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("salt", ["", "v1"])
def test_names_differ_by_salt(salt: str) -> None:
    assert name(salt, [1]) != name(salt + "x", [1])
