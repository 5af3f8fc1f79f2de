"""SGLang's KV-cache events: what a message of its stream says, in words of our own.

Invariants
- A message is msgpack `[timestamp, [event, ...], rank]`; an event is a map whose `type` names it (SGLang 0.5.23,
  `disaggregation/kv_events.py`). Keys that we do not know are passed over; an event that we do not know is an error,
  since a stream that is read with holes tells nothing.
- Events of tiers outside the engine (disk, shared stores) are left out: what lies there belongs to no engine.
- Hashes are opaque: signed 64-bit numbers that name a block together with all blocks before it.

What this module does not know: sockets, sequence numbers, what is done with events.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec

TOKEN_BYTES: Final = 4
_DEVICE_TIERS: Final = (None, "GPU")
_HOST_TIER: Final = "CPU_PINNED"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks are in the engine's cache now.

    hashes: one per block. parent_hash: the block before the first, None where a prompt begins. token_bytes: the tokens of
    all blocks, little-endian uint32. salt: `cache_salt` of the request, "" for none. adapter: LoRA adapter, "" for none.
    on_host: in the host's memory instead of the device's.
    """

    hashes: tuple[int, ...]
    parent_hash: int | None
    token_bytes: bytes
    block_tokens: int
    salt: str = ""
    adapter: str = ""
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks left one tier of the cache; one that was in both is still in the other."""

    hashes: tuple[int, ...]
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine flushed its cache."""


@dataclass(frozen=True, slots=True)
class Reset:
    """What was told before holds no longer: messages are missing for good, or another process speaks now."""

    reason: str


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared | Reset


_Hash = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Message(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_decoder = msgspec.msgpack.Decoder(_Message)


def decode(payload: bytes) -> tuple[float, list[KvEvent]]:
    """(time by the publisher's clock in seconds since the epoch, events); ValueError for what is no such message."""
    message = _decoder.decode(payload)  # msgspec's errors are ValueErrors
    # What a flush in the same message undid is left out: it would be believed for a moment.
    wanted = message.events
    for place in range(len(wanted) - 1, 0, -1):
        if isinstance(wanted[place], _Cleared):
            wanted = wanted[place:]
            break
    return message.ts, [event for wire in wanted if (event := _read(wire)) is not None]


def _read(wire: _Stored | _Removed | _Cleared) -> KvEvent | None:
    if isinstance(wire, _Cleared):
        return AllCleared()
    if wire.medium not in _DEVICE_TIERS and wire.medium != _HOST_TIER:
        return None
    on_host = wire.medium == _HOST_TIER
    if isinstance(wire, _Removed):
        return BlocksRemoved(tuple(wire.block_hashes), on_host)
    if wire.block_size < 1 or len(wire.token_ids) != len(wire.block_hashes) * wire.block_size:
        raise ValueError(
            f"BlockStored: {len(wire.token_ids)} token_ids do not fill {len(wire.block_hashes)} blocks of {wire.block_size}"
        )
    try:
        tokens = array("I", wire.token_ids)
    except OverflowError:
        raise ValueError("BlockStored: token_ids: an id is not in [0, 2^32)") from None
    return BlocksStored(
        tuple(wire.block_hashes),
        wire.parent_block_hash,
        little_endian(tokens),
        wire.block_size,
        wire.cache_salt or "",
        wire.lora_name or "",
        on_host,
    )


def little_endian(tokens: array[int]) -> bytes:
    """Token ids as they travel here, whatever the machine's own order."""
    if tokens.itemsize != TOKEN_BYTES:
        raise ValueError(f"tokens: {tokens.itemsize} bytes each, {TOKEN_BYTES} expected")
    if not _IS_LITTLE_ENDIAN:
        tokens.byteswap()
    return tokens.tobytes()


_IS_LITTLE_ENDIAN: Final = array("I", [1]).tobytes()[0] == 1


def portions(events: Iterable[KvEvent], most_blocks: int) -> Iterator[tuple[KvEvent, ...]]:
    """The same events in order, at most so many blocks at a time; an event that is larger is cut."""
    portion: list[KvEvent] = []
    blocks = 0
    for event in events:
        for piece in _pieces(event, most_blocks):
            size = len(piece.hashes) if isinstance(piece, BlocksStored | BlocksRemoved) else 1
            if portion and blocks + size > most_blocks:
                yield tuple(portion)
                portion, blocks = [], 0
            portion.append(piece)
            blocks += size
    if portion:
        yield tuple(portion)


def _pieces(event: KvEvent, most_blocks: int) -> Iterator[KvEvent]:
    if not isinstance(event, BlocksStored | BlocksRemoved) or len(event.hashes) <= most_blocks:
        yield event
        return
    for start in range(0, len(event.hashes), most_blocks):
        hashes = event.hashes[start : start + most_blocks]
        if isinstance(event, BlocksRemoved):
            yield BlocksRemoved(hashes, event.on_host)
            continue
        width = event.block_tokens * TOKEN_BYTES
        yield BlocksStored(
            hashes,
            event.hashes[start - 1] if start else event.parent_hash,
            event.token_bytes[start * width : (start + len(hashes)) * width],
            event.block_tokens,
            event.salt,
            event.adapter,
            event.on_host,
        )
