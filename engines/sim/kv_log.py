"""What the simulated engine's cache did, as the events that SGLang 0.5.23 publishes.

Invariants
- Events are in the order of what happened; neighbours are joined as SGLang joins them: stores that continue a chain, and
  removals.
- A block's hash is that of all tokens up to its end and of the salt. `extra_key` does not enter, as in SGLang's default
  format.

What this module does not know: sockets, when events are published.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable

import msgspec

TOKEN_BYTES = 4
_HASH_BYTES = 8
_DEVICE = "GPU"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Field names are SGLang's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Field names are SGLang's."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheLog:
    """Of one cache with pages of `page_tokens` tokens. A namespace is (cache_salt, extra_key)."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._events: list[CacheEvent] = []

    def stored(self, namespace: Hashable, parent_hash: int | None, edge: bytes) -> tuple[int, ...]:
        """Whole pages of token bytes were added below the block `parent_hash`; returns their hashes."""
        salt = str(namespace[0]) if isinstance(namespace, tuple) else ""
        last = hashlib.sha256(salt.encode()).digest()[:_HASH_BYTES]
        if parent_hash is not None:
            last = parent_hash.to_bytes(_HASH_BYTES, "big", signed=True)
        hashes = []
        width = self._page_tokens * TOKEN_BYTES
        for start in range(0, len(edge), width):
            last = hashlib.sha256(last + edge[start : start + width]).digest()[:_HASH_BYTES]
            hashes.append(int.from_bytes(last, "big", signed=True))
        tokens = array("I", edge).tolist()
        event = BlockStored(list(hashes), parent_hash, tokens, self._page_tokens, None, _DEVICE, salt or None)
        tail = self._events[-1] if self._events else None
        if (
            isinstance(tail, BlockStored)
            and tail.cache_salt == event.cache_salt
            and tail.block_hashes[-1] == event.parent_block_hash
        ):
            tail.block_hashes += event.block_hashes
            tail.token_ids += event.token_ids
        else:
            self._events.append(event)
        return tuple(hashes)

    def removed(self, hashes: tuple[int, ...]) -> None:
        """One node was evicted."""
        tail = self._events[-1] if self._events else None
        if isinstance(tail, BlockRemoved):
            tail.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(list(hashes), _DEVICE))

    def cleared(self) -> None:
        """The cache was flushed."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[CacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def __len__(self) -> int:
        return len(self._events)
