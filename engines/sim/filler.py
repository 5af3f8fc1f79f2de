"""Output for large virtual pools: ids cut from a table, a thousand times cheaper than what the weights would write.

Invariants
- A function of the prompt, the seed and the length alone; ids are ordinary ones below the vocabulary size.
- Two outputs of one prompt start at different places of the table, but for one chance in `TABLE_IDS`.

What this module does not know: weights. Nobody can check such tokens against the model's function.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from rolloutd.engines.sim.tokens import FIRST_ORDINARY_TOKEN

TABLE_IDS = 1 << 17  # a power of two, and longer than an output can be
_GOLDEN = 0x9E3779B1  # spreads neighbouring seeds over the table


@lru_cache(maxsize=4)
def _table(vocabulary_size: int) -> list[int]:
    """Twice the same random ids, so that every place has `TABLE_IDS` after it. A slice shares the int objects."""
    ids: list[int] = np.random.default_rng(0).integers(FIRST_ORDINARY_TOKEN, vocabulary_size, TABLE_IDS).tolist()
    return ids + ids


def filler_tokens(prompt: bytes, sampling_seed: int | None, count: int, vocabulary_size: int) -> list[int]:
    """`count` ids, at most `TABLE_IDS`."""
    if count > TABLE_IDS:
        raise ValueError(f"count: {count} is above {TABLE_IDS}; such long outputs need write_tokens")
    start = (zlib.crc32(prompt) + (sampling_seed or 0) * _GOLDEN) % TABLE_IDS
    return _table(vocabulary_size)[start : start + count]
