"""The time below which no scheduler can serve a set of rollouts: the bound that results are divided by.

    bound = max( sum L / sum_r max_{b <= b*_r} b / tau_r(b)         all decode work at full batches
                 max_i min_r (P_i / v_r + L_i * tau_r(1))           the longest rollout, alone on the fastest engine
                 sum_i U_i / sum_r v_r                              all prefill, at the ideal hit
                 min_r tau_r(1) * sum_i (U_i * L_i + L_i^2 / 2) / sum_r C_r )    memory: tokens held times time
    b*_r  = min(slots_r, C_r / c)      c = sum (U_i * L_i + L_i^2 / 2) / sum L, the mean context held by a decode step

L output tokens, P prompt tokens, U the part of P that an infinite cache would not serve, tau(b) seconds per decode step
with b running, v prefill tokens per second, C KV tokens. Source: WORKLOADS D.2, written for engines that may differ;
for equal ones it is D.2, except that siblings hold their common prompt once (U for P in the memory terms), without
which the bound would overstate what a shared prompt needs.

Invariants
- Every term alone is a lower bound where caches are cold at the start, tau is convex in b, and each output token takes
  one decode step; the bound is their maximum. (An engine that samples the first token in the prefill step can end one
  decode step earlier.)
- Arrival times are ignored, which can only make the bound smaller.

What this module does not know: overlap of prefill and decode (where prefill stalls decode, the two work terms would
add up), tool gaps between turns, training phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rolloutd.bench.ceiling import cacheable_prefix_tokens
from rolloutd.bench.workload import Item


class Timing(Protocol):
    """How fast one engine is."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Uncached prompt tokens that one engine computes per second."""
        ...

    def decode_step_seconds(self, running_rollouts: int) -> float:
        """tau(b): seconds of one decode step with `running_rollouts` >= 1 in the batch."""
        ...


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the bound needs to know of one engine."""

    timing: Timing
    slots: int
    kv_capacity_tokens: int
    page_size_tokens: int

    def __post_init__(self) -> None:
        for name, value in (
            ("slots", self.slots),
            ("kv_capacity_tokens", self.kv_capacity_tokens),
            ("page_size_tokens", self.page_size_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Bound:
    """The terms of a bound, in seconds; `seconds` is the bound."""

    decode_work_seconds: float
    longest_alone_seconds: float
    prefill_work_seconds: float
    kv_seconds: float

    @property
    def seconds(self) -> float:
        """No schedule ends earlier."""
        return max(self.decode_work_seconds, self.longest_alone_seconds, self.prefill_work_seconds, self.kv_seconds)


def bound(items: Sequence[Item], engines: Sequence[EngineShape]) -> Bound:
    """The bound of these rollouts on these engines, all free at the start and with cold caches.

    Raises ValueError when there is no item or no engine.
    """
    if not items or not engines:
        raise ValueError(f"{len(items)} items on {len(engines)} engines: a bound needs at least one of each")
    prompt_tokens = np.array([item.prompt_tokens for item in items], dtype=np.int64)
    output_tokens = np.array([item.output_tokens for item in items], dtype=np.int64)
    # Page sizes are powers of two: the smallest shares most, which keeps the bound valid where they differ.
    page_size_tokens = min(engine.page_size_tokens for engine in engines)
    cacheable_tokens = cacheable_prefix_tokens([item.prompt_bytes for item in items], page_size_tokens)
    return bound_of_lengths(prompt_tokens, prompt_tokens - cacheable_tokens, output_tokens, engines)


def bound_of_lengths(
    prompt_tokens: npt.NDArray[np.int64],
    uncached_tokens: npt.NDArray[np.int64],
    output_tokens: npt.NDArray[np.int64],
    engines: Sequence[EngineShape],
) -> Bound:
    """The same from lengths alone; the three arrays have one entry per rollout, shape (n,), n >= 1, outputs >= 1."""
    decode_tokens = float(output_tokens.sum())
    held_token_steps = float((uncached_tokens * output_tokens + output_tokens.astype(np.float64) ** 2 / 2.0).sum())
    mean_context_tokens = held_token_steps / decode_tokens
    alone_seconds = np.min(
        [
            prompt_tokens / engine.timing.prefill_tokens_per_second
            + output_tokens * engine.timing.decode_step_seconds(1)
            for engine in engines
        ],
        axis=0,
    )
    return Bound(
        decode_work_seconds=decode_tokens
        / sum(_decode_tokens_per_second(engine, mean_context_tokens) for engine in engines),
        longest_alone_seconds=float(alone_seconds.max()),
        prefill_work_seconds=float(uncached_tokens.sum())
        / sum(engine.timing.prefill_tokens_per_second for engine in engines),
        kv_seconds=min(engine.timing.decode_step_seconds(1) for engine in engines)
        * held_token_steps
        / sum(engine.kv_capacity_tokens for engine in engines),
    )


def _decode_tokens_per_second(engine: EngineShape, mean_context_tokens: float) -> float:
    """max b / tau(b) over batches up to b* = min(slots, C / mean context).

    b* is an average over steps and need not be whole; between whole batches tau is taken as linear, which a mixture of
    the two neighbours attains.
    """
    largest = max(1.0, min(float(engine.slots), engine.kv_capacity_tokens / mean_context_tokens))
    whole = math.floor(largest)
    tau = engine.timing.decode_step_seconds
    best = max(batch / tau(batch) for batch in range(1, whole + 1))
    fraction = largest - whole
    if fraction > 0.0:
        mixed_seconds = (1.0 - fraction) * tau(whole) + fraction * tau(whole + 1)
        best = max(best, largest / mixed_seconds)
    return best
