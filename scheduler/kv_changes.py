"""What an engine reports about its KV cache, in the core's words.

Hashes are opaque numbers that name a block together with everything before it. Token bytes are little-endian uint32 ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class KvStored:
    """Consecutive blocks are held now. parent_hash: the block before the first; None where a prompt begins.

    salt, adapter: of the request that made them. on_host: held in the host's memory, not the device's.
    """

    hashes: tuple[int, ...]
    parent_hash: int | None
    token_bytes: bytes
    salt: str = ""
    adapter: str = ""
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks left the device's memory, or the host's; one that is in the other is still held."""

    hashes: tuple[int, ...]
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class KvCleared:
    """Nothing is held any more."""


@dataclass(frozen=True, slots=True)
class KvUnknown:
    """What was reported before is worth nothing now. What is held is not known until it is reported."""

    reason: str


KvChange: TypeAlias = KvStored | KvRemoved | KvCleared | KvUnknown
