"""What the tests of the prefix index share: prompts as bytes, and an index with engines in it."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from rolloutd.scheduler.index import Namespace, PrefixIndex

UNBOUNDED = 1 << 40
SPACE = Namespace("run", "m", "", 0, "")


def ids(tokens: Iterable[int]) -> bytes:
    tokens = list(tokens)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def run_of(token: int, length: int) -> bytes:
    return ids([token] * length)


def index_of(*engines: str, max_bytes: int = UNBOUNDED, page_tokens: int = 16, max_tokens: int = 0) -> PrefixIndex:
    index = PrefixIndex(max_bytes, page_tokens)
    for engine in engines:
        index.add_engine(engine, 1, max_tokens)
    return index


def sweep_all(index: PrefixIndex) -> None:
    while index.sweep(100):
        index.check()
