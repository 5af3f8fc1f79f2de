"""What following an engine's KV events costs: reading them, taking them into the prefix index, taking them out again.

Engines fill their caches with sessions of some turns (a branch off a shared stem, then stretches that continue it), block by
block as SGLang would tell; then every session is evicted, latest turn first. CPU time, so that neighbours do not count.

What this module does not know: sockets.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from rolloutd.engines.kv_events import BATCH_BLOCKS
from rolloutd.engines.kv_wire import decode, portions
from rolloutd.engines.sim.kv_log import BlockRemoved, BlockStored
from rolloutd.scheduler.index import Namespace, PrefixIndex
from rolloutd.scheduler.kv_cache_mirror import KvCacheMirror
from rolloutd.server.kv_following import change_of

PAGE_TOKENS = 16
STEM_BLOCKS = 64  # 1,024 tokens that all sessions of an engine share
TURNS, TURN_BLOCKS = 4, 32
INDEX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OneRun:
    """Every block belongs to the same namespace."""

    namespace: Namespace = Namespace(("run", "policy"), "", "", 0, "")

    def earning(self, salt: str, adapter: str) -> Namespace | None:
        return self.namespace

    def losing(self, salt: str, adapter: str) -> tuple[Namespace, ...]:
        return (self.namespace,)


def messages(sessions: int, rng: np.random.Generator) -> tuple[list[bytes], list[bytes]]:
    """(stores, removals) of one engine as they travel."""

    def encode(event: BlockStored | BlockRemoved) -> bytes:
        return msgspec.msgpack.encode([0.0, [event], 0])

    def stretch(parent: int | None, blocks: int) -> BlockStored:
        hashes = rng.integers(-(1 << 62), 1 << 62, blocks).tolist()
        tokens = rng.integers(0, 150_000, blocks * PAGE_TOKENS).tolist()
        return BlockStored(hashes, parent, tokens, PAGE_TOKENS, None, "GPU")

    stem = stretch(None, STEM_BLOCKS)
    stores = [stem]
    for _ in range(sessions):
        last = stem.block_hashes[-1]
        for _ in range(TURNS):
            stores.append(stretch(last, TURN_BLOCKS))
            last = stores[-1].block_hashes[-1]
    removals = [BlockRemoved(stored.block_hashes, "GPU") for stored in reversed(stores)]
    return [encode(stored) for stored in stores], [encode(removed) for removed in removals]


def measure(engines: int, sessions: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    index = PrefixIndex(INDEX_BYTES, PAGE_TOKENS)
    mirror = KvCacheMirror(index, INDEX_BYTES // 4)
    owners = OneRun()
    traffic = [messages(sessions, rng) for _ in range(engines)]
    blocks = engines * (STEM_BLOCKS + sessions * TURNS * TURN_BLOCKS)
    for number in range(engines):
        index.add_engine(f"e{number}", PAGE_TOKENS)
        mirror.follow(f"e{number}", 1 << 30)
    seconds = dict.fromkeys(("read_stored", "stored", "read_removed", "removed"), 0.0)
    longest = 0.0

    def take(engine: str, payload: bytes, purpose: str) -> None:
        nonlocal longest
        started = time.process_time()
        batches = list(portions(decode(payload)[1], BATCH_BLOCKS))
        read = time.process_time()
        seconds[f"read_{purpose}"] += read - started
        for batch in batches:
            begun = time.process_time()
            for event in batch:
                mirror.apply(engine, change_of(event), owners)
            spent = time.process_time() - begun
            seconds[purpose] += spent
            longest = max(longest, spent)

    gc.collect()
    gc.freeze()
    for purpose, which in (("stored", 0), ("removed", 1)):
        for place in range(1 + sessions * TURNS):
            for number, told in enumerate(traffic):
                take(f"e{number}", told[which][place], purpose)
        if purpose == "stored":
            assert sum(mirror.blocks(f"e{number}") for number in range(engines)) == blocks
            record_bytes = mirror.bytes / blocks
    gc.unfreeze()
    assert mirror.bytes == 0 and not any(index.statistics().engine_tokens.values())
    return {
        **{f"{purpose}_us_per_block": value * 1e6 / blocks for purpose, value in seconds.items()},
        "batch_ms_max": longest * 1e3,
        "record_bytes_per_block": record_bytes,
        "blocks": blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=400, help="per engine; 400 are 820,000 tokens")
    options = parser.parse_args()
    figures = measure(options.engines, options.sessions)
    print(json.dumps({key: float(f"{value:.4g}") for key, value in figures.items()}))


if __name__ == "__main__":
    main()
