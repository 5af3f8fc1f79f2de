"""What an engine reports of its KV cache becomes credit, and stops being it, at once."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from rolloutd.scheduler.index import Namespace, PrefixIndex
from rolloutd.scheduler.kv_cache_mirror import KvCacheMirror
from rolloutd.scheduler.kv_changes import KvCleared, KvRemoved, KvStored, KvUnknown
from tests.scheduler.index_kit import SPACE, ids

PAGE = 16
ENGINE = "e/0"
PROMPT = ids(range(160))  # ten blocks


def mirrored(max_bytes: int = 1 << 30, most_blocks: int = 1 << 20) -> tuple[KvCacheMirror, PrefixIndex]:
    index = PrefixIndex(1 << 30, PAGE)
    index.add_engine(ENGINE, PAGE)
    mirror = KvCacheMirror(index, max_bytes)
    mirror.follow(ENGINE, most_blocks)
    return mirror, index


class Owned:
    """Blocks of the one run, at one version, and of no other namespace but `also`."""

    def __init__(self, version: int = 0, *also: Namespace) -> None:
        self.version = version
        self.also = also

    def earning(self, salt: str, adapter: str) -> Namespace | None:
        return None if self.also else SPACE._replace(salt=salt, adapter=adapter, version=self.version)

    def losing(self, salt: str, adapter: str) -> tuple[Namespace, ...]:
        return (SPACE._replace(salt=salt, adapter=adapter, version=self.version), *self.also)


OURS = Owned()


def stored(tokens: bytes, first: int = 1, parent: int | None = None, **words: str) -> KvStored:
    """Blocks named first, first + 1, ..."""
    blocks = len(tokens) // (PAGE * 4)
    return KvStored(tuple(range(first, first + blocks)), parent, tokens, **words)


def held(index: PrefixIndex, tokens: bytes = PROMPT, namespace: Namespace = SPACE) -> int:
    return index.match(namespace, tokens).get(ENGINE, 0)


def test_what_the_engine_stored_earns_credit_though_we_did_not_send_it() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT[:256]), OURS)
    mirror.apply(ENGINE, stored(PROMPT[256:], 5, parent=4), OURS)
    assert held(index) == 160
    mirror.check()


def test_a_branch_in_the_middle_of_what_was_stored_together() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    other = PROMPT[:192] + ids(range(500, 532))
    mirror.apply(ENGINE, stored(other[192:], 50, parent=3), OURS)
    assert held(index, other) == 80
    mirror.apply(ENGINE, KvRemoved((4, 5, 6, 7, 8, 9, 10)), OURS)
    assert held(index) == 48 and held(index, other) == 80


def test_what_the_engine_evicted_earns_nothing_at_once_also_where_we_claimed_it() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    longer = PROMPT + ids(range(900, 964))
    index.insert(SPACE, longer, ENGINE)  # ours, told by an answer
    mirror.apply(ENGINE, KvRemoved((9, 10)), OURS)
    assert held(index, longer) == 128
    mirror.apply(ENGINE, KvRemoved((1, 2, 3, 4, 5, 6, 7, 8)), OURS)
    assert held(index, longer) == 0 and mirror.bytes == 0
    mirror.check()


@pytest.mark.parametrize("change", [KvCleared(), KvUnknown("messages 3 to 4 are missing")])
def test_a_flush_and_a_loss_of_messages_take_all_credit(change: KvCleared | KvUnknown) -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    index.insert(SPACE, ids(range(1000, 1100)), ENGINE)
    mirror.apply(ENGINE, change, OURS)
    assert held(index) == 0 and held(index, ids(range(1000, 1100))) == 0
    assert mirror.blocks(ENGINE) == 0 and mirror.bytes == 0
    mirror.apply(ENGINE, stored(PROMPT[256:], 5, parent=4), OURS)  # what it follows is not known any more
    assert held(index) == 0 and mirror.unplaced(ENGINE) == 6
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    assert held(index) == 160


def test_a_block_in_both_tiers_is_held_until_it_left_both() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    mirror.apply(ENGINE, KvStored(tuple(range(1, 11)), None, PROMPT, on_host=True), OURS)
    mirror.apply(ENGINE, KvRemoved(tuple(range(1, 11))), OURS)
    assert held(index) == 160
    mirror.apply(ENGINE, KvRemoved((10,), on_host=True), OURS)
    assert held(index) == 144


def test_salts_are_namespaces_of_their_own() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT, salt="3"), OURS)
    assert held(index) == 0 and held(index, namespace=SPACE._replace(salt="3")) == 160


def test_a_chain_begun_under_one_version_never_counts_for_the_next() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT[:256]), OURS)
    newer = SPACE._replace(version=1)
    later = Owned(1)
    mirror.apply(ENGINE, stored(PROMPT[256:], 5, parent=4), later)
    assert held(index, namespace=newer) == 0 and held(index) == 160
    index.insert(newer, PROMPT, ENGINE)
    mirror.apply(ENGINE, KvRemoved((4,)), later)  # which the new version may have been served from
    assert held(index, namespace=newer) == 48 and held(index) == 48


def test_a_block_whose_predecessor_went_earns_nothing_nor_does_what_comes_behind_it() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT[:256]), OURS)
    mirror.apply(ENGINE, KvRemoved((2,)), OURS)
    mirror.apply(ENGINE, stored(PROMPT[256:], 5, parent=4), OURS)
    assert held(index) == 16 and mirror.unplaced(ENGINE) == 6
    mirror.check()


def test_where_several_runs_share_an_engine_reports_only_take_away() -> None:
    mirror, index = mirrored()
    both = (SPACE, SPACE._replace(owner="other"))
    shared = Owned(0, both[1])
    mirror.apply(ENGINE, stored(PROMPT), shared)
    assert held(index) == 0
    for namespace in both:
        index.insert(namespace, PROMPT, ENGINE)
    mirror.apply(ENGINE, KvRemoved((10,)), shared)
    assert [held(index, namespace=namespace) for namespace in both] == [144, 144]


def test_records_are_bounded_and_the_index_gives_way() -> None:
    index = PrefixIndex(1 << 20, PAGE)
    index.add_engine(ENGINE, PAGE)
    mirror = KvCacheMirror(index, 1 << 18)
    mirror.follow(ENGINE, 1 << 20)
    rng = random.Random(0)
    for first in range(0, 100_000, 10):
        mirror.apply(ENGINE, stored(ids(rng.randrange(1 << 20) for _ in range(160)), first), OURS)
        assert mirror.bytes <= 1 << 18
        statistics = index.statistics()
        assert mirror.bytes + statistics.bytes <= 1 << 20 and statistics.max_bytes == (1 << 20) - mirror.bytes
    assert mirror.unplaced(ENGINE) > 0
    mirror.check()
    index.check()
    mirror.apply(ENGINE, KvRemoved(tuple(range(100_000))), OURS)
    assert mirror.bytes == 0 and index.statistics().max_bytes == 1 << 20


def test_an_engine_has_a_bound_of_its_own() -> None:
    mirror, index = mirrored(most_blocks=12)
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    mirror.apply(ENGINE, stored(ids(range(600, 664)), 30), OURS)
    assert mirror.blocks(ENGINE) == 10 and mirror.unplaced(ENGINE) == 4
    assert held(index, ids(range(600, 664))) == 0


def test_reports_of_an_engine_that_left_are_nothing() -> None:
    mirror, index = mirrored()
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    mirror.drop(ENGINE)
    index.drop_engine(ENGINE)
    mirror.apply(ENGINE, stored(PROMPT), OURS)
    assert mirror.bytes == 0 and held(index) == 0
    mirror.check()


def test_accounting_follows_tracemalloc() -> None:
    rng = random.Random(1)
    changes = [
        stored(ids(rng.randrange(1 << 20) for _ in range(PAGE * blocks)), rng.randrange(1 << 62))
        for blocks in (1, 4, 16, 64) * 100
    ]
    mirror, _ = mirrored()
    gc.collect()
    tracemalloc.start()
    try:
        for change in changes:
            # As they come: every report has numbers and bytes of its own, which the records keep alive.
            fresh = KvStored(tuple(number + 0 for number in change.hashes), None, bytes(bytearray(change.token_bytes)))
            mirror.apply(ENGINE, fresh, Owned(0, SPACE))
        del fresh
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 < mirror.bytes / used < 1.3
