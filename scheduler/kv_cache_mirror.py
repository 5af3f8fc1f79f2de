"""Keeps the prefix index in step with what engines report of their KV caches.

Invariants
- A block is known by its hash from the report that stored it to the one that removed it from every tier. Its tokens are
  those of the chain of blocks before it.
- A chain earns credit under the namespace that it belonged to when its first block was stored, and under no other: KV
  that was begun under one policy version never counts for another. Where nobody can say whose it is, only our own
  inserts claim.
- A removed block takes the engine's credit for it and for all that follows it, at once, under that namespace and under
  all that may be matched now, whoever claimed it: a claim of our own for what the engine had already is lost with it.
- A block whose predecessor is not known, or not held any more, is not recorded and earns nothing, and neither does one
  for which there is no room. Such a block may still be claimed by an insert of our own, which only `cached_tokens` corrects.
- `bytes` is what the records cost, at most `max_bytes`; the index gets what is left of the bound that it was made with.

What it deliberately does not know: runs, whose a block is (the caller says), sequence numbers, time.
`kv_cache_naive.py` is the semantics in eighty lines.
"""

from __future__ import annotations

from array import array
from typing import Final, Protocol

from rolloutd.scheduler.index import Namespace, PrefixIndex
from rolloutd.scheduler.index_base import TOKEN_BYTES
from rolloutd.scheduler.kv_changes import KvChange, KvCleared, KvRemoved, KvStored, KvUnknown


class Owners(Protocol):
    """Whose an engine's blocks are at present, by the salt and the adapter that they were made under."""

    def earning(self, salt: str, adapter: str) -> Namespace | None:
        """The namespace that new chains belong to; None where that cannot be said."""
        ...

    def losing(self, salt: str, adapter: str) -> tuple[Namespace, ...]:
        """All namespaces that such blocks may be credited under."""
        ...


# Measured with tracemalloc on CPython 3.11 (`test_accounting_follows_tracemalloc`).
SEGMENT_BYTES: Final = 320  # object, arrays and bytes with their headers
BLOCK_BYTES: Final = 100  # its hash as a number and in the array, its place in the dict, its tiers
DEVICE: Final = 1
HOST: Final = 2


class Segment:
    """Consecutive blocks that were stored together."""

    __slots__ = (
        "adapter",
        "hashes",
        "holders",
        "namespace",
        "parent",
        "parent_blocks",
        "salt",
        "tiers",
        "tokens",
        "width",
    )

    def __init__(self, parent: Segment | None, parent_blocks: int, stored: KvStored, first: int, last: int) -> None:
        """Blocks `first` to `last`, exclusive, of `stored`."""
        self.parent = parent
        self.parent_blocks = parent_blocks  # of the parent's blocks, those before ours
        self.width = len(stored.token_bytes) // len(stored.hashes)  # bytes of a block's tokens
        self.tokens = stored.token_bytes[first * self.width : last * self.width]
        self.hashes = array("q", stored.hashes[first:last])
        self.tiers = bytearray([HOST if stored.on_host else DEVICE]) * (last - first)
        self.holders = last - first + 1  # blocks held, segments that continue this one, and the one under construction
        self.salt = stored.salt
        self.adapter = stored.adapter
        self.namespace: Namespace | None = parent.namespace if parent is not None else None  # it earns credit under

    @property
    def size_bytes(self) -> int:
        return SEGMENT_BYTES + len(self.hashes) * BLOCK_BYTES + len(self.tokens)

    def path(self) -> bytes:
        """Tokens of the whole prompt up to the end of this segment."""
        parts = [self.tokens]
        segment = self
        while segment.parent is not None:
            parts.append(segment.parent.tokens[: segment.parent_blocks * segment.parent.width])
            segment = segment.parent
        parts.reverse()
        return b"".join(parts)

    def is_held(self, blocks: int) -> bool:
        """Whether the first `blocks` blocks and everything before them are held."""
        segment = self
        while 0 not in segment.tiers[:blocks]:
            if segment.parent is None:
                return True
            blocks = segment.parent_blocks
            segment = segment.parent
        return False


class Held:
    """What one engine reported to hold."""

    __slots__ = ("blocks", "bytes", "most_blocks", "unplaced")

    def __init__(self, most_blocks: int) -> None:
        self.blocks: dict[int, Segment] = {}
        self.bytes = 0
        self.most_blocks = most_blocks
        self.unplaced = 0  # blocks that were not recorded: predecessor unknown, or no room


class KvCacheMirror:
    """See the module. One for all engines."""

    def __init__(self, index: PrefixIndex, max_bytes: int) -> None:
        """max_bytes: of the index's bound, the part that records may take."""
        self.max_bytes = max_bytes
        self.bytes = 0
        self._index = index
        self._total_bytes = index.max_bytes
        self._engines: dict[str, Held] = {}

    def follow(self, engine: str, most_blocks: int) -> None:
        """The engine reports; at most so many of its blocks are recorded. Again: no effect."""
        if engine not in self._engines:
            self._engines[engine] = Held(most_blocks)

    def apply(self, engine: str, change: KvChange, owners: Owners) -> None:
        """Take in one report, in order. Ignored for an engine that is not followed."""
        held = self._engines.get(engine)
        if held is None:
            return
        match change:
            case KvStored():
                self._stored(engine, held, change, owners)
            case KvRemoved():
                self._removed(engine, held, change, owners)
            case KvCleared() | KvUnknown():
                self._forget_all(held)
                self._index.clear_engine(engine)
        self._index.set_max_bytes(self._total_bytes - self.bytes)

    def drop(self, engine: str) -> None:
        """The engine is gone. Its credit is the index's own business."""
        held = self._engines.pop(engine, None)
        if held is not None:
            self._forget_all(held)
            self._index.set_max_bytes(self._total_bytes - self.bytes)

    def blocks(self, engine: str) -> int:
        """Blocks of the engine that are recorded."""
        held = self._engines.get(engine)
        return len(held.blocks) if held is not None else 0

    def unplaced(self, engine: str) -> int:
        """Blocks that were reported and not recorded, since the engine is followed."""
        held = self._engines.get(engine)
        return held.unplaced if held is not None else 0

    # ---- changes

    def _stored(self, engine: str, held: Held, stored: KvStored, owners: Owners) -> None:
        """Record runs of blocks that are new; of known ones, the tier."""
        hashes = stored.hashes
        tier = HOST if stored.on_host else DEVICE
        parent: Segment | None = None
        place = -1  # of the block before, in `parent`
        if stored.parent_hash is not None:
            parent = held.blocks.get(stored.parent_hash)
            if parent is None:
                held.unplaced += len(hashes)
                return
            place = parent.hashes.index(stored.parent_hash)
        first, count = 0, len(hashes)
        while first < count:
            known = held.blocks.get(hashes[first])
            if known is not None:
                place = _place(known, place + 1 if known is parent else 0, hashes[first])
                parent = known
                known.tiers[place] |= tier
                first += 1
                continue
            last = first + 1
            while last < count and hashes[last] not in held.blocks:
                last += 1
            if parent is not None and not parent.is_held(place + 1):
                held.unplaced += count - first
                return
            segment = Segment(parent, place + 1, stored, first, last)
            if self.bytes + segment.size_bytes > self.max_bytes or len(held.blocks) + last - first > held.most_blocks:
                held.unplaced += count - first
                return
            if parent is not None:
                parent.holders += 1
            else:
                segment.namespace = owners.earning(stored.salt, stored.adapter)
            self._record(held, segment)
            if segment.namespace is not None:
                self._index.insert(segment.namespace, segment.path(), engine)
            parent = segment
            place = last - first - 1
            first = last

    def _record(self, held: Held, segment: Segment) -> None:
        for block in segment.hashes:
            held.blocks[block] = segment
        held.bytes += segment.size_bytes
        self.bytes += segment.size_bytes
        segment.holders -= 1  # built

    def _removed(self, engine: str, held: Held, removed: KvRemoved, owners: Owners) -> None:
        tier = HOST if removed.on_host else DEVICE
        cuts: dict[Segment, int] = {}  # segment -> first block that is gone
        last: Segment | None = None
        place = -1
        for block in removed.hashes:
            segment = held.blocks.get(block)
            if segment is None:
                continue
            place = _place(segment, place + 1 if segment is last else 0, block)
            last = segment
            segment.tiers[place] &= ~tier
            if not segment.tiers[place]:
                del held.blocks[block]
                cuts[segment] = min(place, cuts.get(segment, place))
                self._release(held, segment)
        for segment, first in cuts.items():
            path = segment.path()
            keep = (len(path) - len(segment.tokens) + first * segment.width) // TOKEN_BYTES
            losing = owners.losing(segment.salt, segment.adapter)
            for namespace in losing:
                self._index.forget(namespace, path, engine, keep)
            if segment.namespace is not None and segment.namespace not in losing:
                self._index.forget(segment.namespace, path, engine, keep)

    def _release(self, held: Held, segment: Segment | None) -> None:
        """One block or continuation less; what nothing needs any more is given back, up the chain."""
        while segment is not None:
            segment.holders -= 1
            if segment.holders:
                return
            held.bytes -= segment.size_bytes
            self.bytes -= segment.size_bytes
            segment = segment.parent

    def _forget_all(self, held: Held) -> None:
        held.blocks.clear()
        self.bytes -= held.bytes
        held.bytes = 0

    # ---- insight

    def check(self) -> None:
        """Re-derive every counter from the records; AssertionError naming what is off."""
        for engine, held in self._engines.items():
            segments = set(held.blocks.values())
            for segment in list(segments):
                parent = segment.parent
                while parent is not None and parent not in segments:
                    segments.add(parent)
                    parent = parent.parent
            assert len(held.blocks) <= held.most_blocks, f"{engine}: {len(held.blocks)} blocks, over its bound"
            assert held.bytes == sum(segment.size_bytes for segment in segments), (
                f"{engine}: {held.bytes} bytes counted"
            )
            for segment in segments:
                live = [block for block, tiers in zip(segment.hashes, segment.tiers, strict=True) if tiers]
                assert all(held.blocks.get(block) is segment for block in live), f"{engine}: a held block is not known"
                continuing = sum(1 for other in segments if other.parent is segment)
                assert segment.holders == len(live) + continuing, f"{engine}: {segment.holders} holders counted"
                assert segment.parent is None or 0 < segment.parent_blocks <= len(segment.parent.hashes), engine
            assert len(held.blocks) == sum(len(s.tiers) - s.tiers.count(0) for s in segments), f"{engine}: strangers"
        assert self.bytes == sum(held.bytes for held in self._engines.values()) <= self.max_bytes, f"{self.bytes} bytes"
        assert self._index.max_bytes == self._total_bytes - self.bytes, "the index has another bound"


def _place(segment: Segment, guess: int, block: int) -> int:
    """Where the block is in its segment; most often right behind the one before."""
    if guess < len(segment.hashes) and segment.hashes[guess] == block:
        return guess
    return segment.hashes.index(block)
