"""Words of the control side of a door: how an engine is paused, what came of new weights, which memory it can let go.

What this module does not know: who publishes a policy, and when.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PauseMode(enum.Enum):
    """What becomes of work in flight. New attempts wait in the engine until `resume`, whatever the mode."""

    ABORT = "abort"  # it ends now with what it has; a flush works afterwards
    RETRACT = "retract"  # it stays open without its KV and is prefilled again after `resume`; a flush works meanwhile
    IN_PLACE = "in_place"  # it stays open and goes on from its old KV; a flush is refused meanwhile


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The new weights are in force.

    flushed: the prefix cache was dropped with them. False although a flush was asked for: the engine was busy, and it
        still reports its old `weight_version`. Then `flush`, then `name_version`; never load again.
    """

    flushed: bool


# What SGLang can release, in its own words (srt/constants.py).
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
