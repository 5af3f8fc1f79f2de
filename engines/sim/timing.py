"""How long a simulated engine's forward passes take.

Invariants
- Times are simulated seconds; the same model serves the engine process and the virtual-time benches.
- A prefill pass stalls decode for its whole length, and no pass is shorter than the decode pass of as many sequences.

What this module does not know: queues, memory, wall time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Curve = Literal["flat", "steep"]
CURVES: tuple[str, ...] = get_args(Curve)

# Decode step of b sequences. Flat: memory-bound, a whole batch costs little more than one sequence; steep: each further
# sequence is felt. `rolloutd calibrate` measures an engine's own.
FLAT_BASE_SECONDS = 0.007
FLAT_PER_SEQUENCE_SECONDS = 0.000045
STEEP_BASE_SECONDS = 0.006
STEEP_ROOT_FACTOR = 0.35
PREFILL_TOKENS_PER_SECOND = 20_000.0


@dataclass(frozen=True, slots=True)
class TimingModel:
    """Curve and prefill speed of one engine.

    slowdown: factor on every pass; above 1 is a slow engine. base_seconds, growth: of a fitted curve, None for the one above:
    base + growth x b (flat; growth in seconds), base x (1 + growth x sqrt(b)) (steep).
    """

    curve: Curve = "flat"
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND
    slowdown: float = 1.0
    base_seconds: float | None = None
    growth: float | None = None

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"curve: {self.curve!r} is not one of {', '.join(CURVES)}")
        if not (math.isfinite(self.prefill_tokens_per_second) and self.prefill_tokens_per_second > 0):
            raise ValueError(f"prefill_tokens_per_second: {self.prefill_tokens_per_second} must be above 0")
        if not (math.isfinite(self.slowdown) and self.slowdown > 0):
            raise ValueError(f"slowdown: {self.slowdown} must be above 0")
        if self.base_seconds is not None and not (math.isfinite(self.base_seconds) and self.base_seconds > 0):
            raise ValueError(f"base_seconds: {self.base_seconds} must be above 0")
        if self.growth is not None and not (math.isfinite(self.growth) and self.growth >= 0):
            raise ValueError(f"growth: {self.growth} must not be negative")

    def decode_step_seconds(self, sequences: int) -> float:
        """One token for each of `sequences` running sequences (tau)."""
        if self.curve == "flat":
            base = FLAT_BASE_SECONDS if self.base_seconds is None else self.base_seconds
            seconds = base + (FLAT_PER_SEQUENCE_SECONDS if self.growth is None else self.growth) * sequences
        else:
            base = STEEP_BASE_SECONDS if self.base_seconds is None else self.base_seconds
            growth = STEEP_ROOT_FACTOR if self.growth is None else self.growth
            seconds = base * (1.0 + growth * math.sqrt(sequences))
        return seconds * self.slowdown

    def prefill_seconds(self, uncached_tokens: int, sequences: int) -> float:
        """One prefill pass over `uncached_tokens` of `sequences` sequences; it also yields their first token."""
        compute = uncached_tokens / self.prefill_tokens_per_second * self.slowdown
        return max(compute, self.decode_step_seconds(sequences))
