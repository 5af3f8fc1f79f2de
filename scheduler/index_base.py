"""Vocabulary of the prefix index: namespaces, statistics, and the protocol that the radix index and its naive twin share.

Token sequences are `bytes` of little-endian uint32 ids, 4 bytes per token; a ragged tail shorter than a page is ignored.
An engine is named by a string that identifies one incarnation of it: a restarted engine is another engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

TOKEN_BYTES: Final = 4  # one little-endian uint32 id


class Namespace(NamedTuple):
    """What must be equal for two prompts to share KV. Compared field by field, never as joined text.

    owner: whose policy versions count: (run, pool), or whatever names it. adapter, salt: empty for none.
    """

    owner: Hashable
    model: str
    adapter: str
    version: int
    salt: str


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """A snapshot. Memory not swept yet, of expired namespaces and dropped engines, is in `pages` and `bytes`."""

    nodes: int  # without dead_nodes
    pages: int  # of the index's page size, each counted once however many engines hold it
    bytes: int  # by the index's own accounting; never above `max_bytes`
    max_bytes: int
    namespaces: int
    dead_nodes: int  # of expired namespaces, not swept yet
    unswept_bits: int  # dropped or cleared engines whose bit is not free yet
    engine_tokens: Mapping[str, int]  # engine -> tokens credited to it


class EngineCacheMirror(Protocol):
    """What we believe engines hold in their prefix caches."""

    def add_engine(self, engine: str, page_tokens: int, max_tokens: int = 0) -> int: ...

    def drop_engine(self, engine: str) -> bool: ...

    def clear_engine(self, engine: str) -> int | None: ...

    def match(self, namespace: Namespace, tokens: bytes) -> dict[str, int]: ...

    def insert(self, namespace: Namespace, tokens: bytes, engine: str) -> int: ...

    def forget(self, namespace: Namespace, tokens: bytes, engine: str, keep_tokens: int) -> None: ...

    def advance_version(self, owner: Hashable, version: int, ttl_versions: int = 0) -> int: ...

    def drop_owner(self, owner: Hashable) -> int: ...
