"""What computing a prompt costs, measured in what decoding its output costs.

Invariants
- In [`CHEAP_PREFILL`, 1]; 1 before the engine's speeds are known.

What this module does not know: what is cached.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry

# Dearness never falls below this: among equals a cached prefix is still better than none. More would outweigh lengths.
CHEAP_PREFILL: Final = 0.005


def dearness(entry: Entry, engine: Engine) -> float:
    """Seconds to compute this prompt over the engine time that decoding one output takes.

    An output of L tokens takes L x seconds per token, shared with the others of its batch. 1 before speeds are known.
    """
    if not engine.prefill_tokens_per_second or not engine.decode_seconds_per_token:
        return 1.0
    prefill = entry.prompt_tokens / engine.prefill_tokens_per_second
    batch = max(1, engine.facts.slots)
    decode = entry.expected_tokens * engine.decode_seconds_per_token / batch
    return min(1.0, max(CHEAP_PREFILL, prefill / decode)) if decode > 0.0 else 1.0
