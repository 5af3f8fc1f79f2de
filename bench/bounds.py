"""The time below which no scheduler can serve a set of rollouts: the bound that results are divided by.

    bound = max( sum L / sum_r max_{b <= b*_r} b / tau_r(b)         all decode work at full batches
                 max_i min_r (P_i / v_r + L_i * tau_r(1))           the longest rollout, alone on the fastest engine
                 sum_i U_i / sum_r v_r                              all prefill, at the ideal hit
                 min_r tau_r(1) * sum_i (U_i * L_i + L_i^2 / 2) / sum_r C_r,     memory: tokens held times time
                 decode work + prefill work )                    both, where every engine's prefill stalls its decode
    b*_r  = min(slots_r, C_r / c)      c = sum (U_i * L_i + L_i^2 / 2) / sum L, the mean context held by a decode step

L output tokens, P prompt tokens, U the part of P that an infinite cache would not serve, tau(b) seconds per decode step
with b running, v prefill tokens per second, C KV tokens. Engines may differ. Siblings hold their common prompt
once (U for P in the memory terms): otherwise the bound would overstate what a shared prompt needs.

Invariants
- Every term alone is a lower bound where caches are cold at the start, tau is convex in b, and each output token takes
  one decode step; the bound is their maximum. (An engine that samples the first token in the prefill step can end one
  decode step earlier; the sum of both works leaves those first tokens out of the decode work.)
- Arrival times are ignored, which can only make the bound smaller.
- The turns of a session follow one another: "alone" is the sum over its turns, each with the cache of the turn before, and of
  the tool gaps between them. While a turn decodes it holds all its context but what other sessions share.

What this module does not know: how much prefill and decode slow each other down where they overlap, training phases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rolloutd.bench.ceiling import cacheable_prefix_tokens, cacheable_turn_tokens
from rolloutd.bench.workload import Item, Kind, Session, Workload

Tokens = npt.NDArray[np.int64]


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
    """What the bound needs to know of one engine. stalls: while it computes prompts it decodes nothing."""

    timing: Timing
    slots: int
    kv_capacity_tokens: int
    page_size_tokens: int
    stalls: bool = False

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
    """The terms of a bound, in seconds; `seconds` is the bound. both_works_seconds: 0 where an engine overlaps the two."""

    decode_work_seconds: float
    longest_alone_seconds: float
    prefill_work_seconds: float
    kv_seconds: float
    both_works_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """No schedule ends earlier."""
        return max(
            self.decode_work_seconds,
            self.longest_alone_seconds,
            self.prefill_work_seconds,
            self.kv_seconds,
            self.both_works_seconds,
        )


def workload_bound(workload: Workload, engines: Sequence[EngineShape], kind: Kind | None = None) -> Bound:
    """The bound of a workload, or of what it has of one kind; ValueError where that is nothing."""
    items = [item for item in workload.items if kind in (None, item.kind)]
    sessions = [session for session in workload.sessions if kind in (None, session.kind)]
    return bound(items, engines, sessions)


def bound(items: Sequence[Item], engines: Sequence[EngineShape], sessions: Sequence[Session] = ()) -> Bound:
    """The bound of these rollouts on these engines, all free at the start and with cold caches.

    Raises ValueError when there is no item or no engine.
    """
    if not (items or sessions) or not engines:
        count = len(items) + len(sessions)
        raise ValueError(f"{count} items on {len(engines)} engines: a bound needs at least one of each")
    # Page sizes are powers of two: the smallest shares most, which keeps the bound valid where they differ.
    page_size_tokens = min(engine.page_size_tokens for engine in engines)
    prompts = _tokens(item.prompt_tokens for item in items)
    outputs = _tokens(item.output_tokens for item in items)
    uncached = prompts - cacheable_prefix_tokens([item.prompt_bytes for item in items], page_size_tokens)
    turns = [length for session in sessions for length in session.lengths()]
    turn_prompts = _tokens(prompt for prompt, _ in turns)
    turn_uncached = turn_prompts - cacheable_turn_tokens(sessions, page_size_tokens)
    shared: list[int] = []
    chains = []
    first = len(items)
    for session in sessions:
        count = len(session.turns)
        start = len(shared)
        shared += [int(turn_prompts[start] - turn_uncached[start])] * count
        chains.append(Chain(first, first + count, sum(turn.gap_seconds for turn in session.turns)))
        first += count
    return bound_of_lengths(
        np.concatenate((prompts, turn_uncached)),
        np.concatenate((uncached, turn_uncached)),
        np.concatenate((outputs, _tokens(output for _, output in turns))),
        engines,
        held_tokens=np.concatenate((uncached, turn_prompts - _tokens(shared))),
        chains=chains,
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """Rollouts [start, stop) follow one another, with `gap_seconds` between them in all."""

    start: int
    stop: int
    gap_seconds: float


def bound_of_lengths(
    prompt_tokens: Tokens,
    uncached_tokens: Tokens,
    output_tokens: Tokens,
    engines: Sequence[EngineShape],
    *,
    held_tokens: Tokens | None = None,
    chains: Sequence[Chain] = (),
) -> Bound:
    """The same from lengths alone; the arrays have one entry per rollout, shape (n,), n >= 1, outputs >= 1.

    prompt_tokens: that each would have to compute alone. held_tokens: prompt tokens that each holds for itself while it
    decodes; None: the uncached ones.
    """
    held_tokens = uncached_tokens if held_tokens is None else held_tokens
    decode_tokens = float(output_tokens.sum())
    held_token_steps = float((held_tokens * output_tokens + output_tokens.astype(np.float64) ** 2 / 2.0).sum())
    mean_context_tokens = held_token_steps / decode_tokens
    alone_seconds = np.min(
        [
            prompt_tokens / engine.timing.prefill_tokens_per_second
            + output_tokens * engine.timing.decode_step_seconds(1)
            for engine in engines
        ],
        axis=0,
    )
    chained = [float(alone_seconds[chain.start : chain.stop].sum()) + chain.gap_seconds for chain in chains]
    rates = [_decode_tokens_per_second(engine, mean_context_tokens) for engine in engines]
    both_works = 0.0
    if all(engine.stalls for engine in engines):
        both_works = _both_works_seconds(
            decode_tokens - len(output_tokens),
            float(uncached_tokens.sum()),
            rates,
            [engine.timing.prefill_tokens_per_second for engine in engines],
        )
    return Bound(
        decode_work_seconds=decode_tokens / sum(rates),
        longest_alone_seconds=max(float(alone_seconds.max()), *chained, 0.0),
        prefill_work_seconds=float(uncached_tokens.sum())
        / sum(engine.timing.prefill_tokens_per_second for engine in engines),
        kv_seconds=min(engine.timing.decode_step_seconds(1) for engine in engines)
        * held_token_steps
        / sum(engine.kv_capacity_tokens for engine in engines),
        both_works_seconds=both_works,
    )


def _both_works_seconds(
    decode_tokens: float, prefill_tokens: float, decode_rates: Sequence[float], prefill_rates: Sequence[float]
) -> float:
    """Decode and prefill one after the other on every engine.

    Engine r is busy for D_r / d_r + P_r / v_r seconds. Any weighted mean of these is a lower bound of the longest; weights in
    proportion to d, then to v, give the two that are taken here. Where engines differ by a factor only they are the sum.
    """
    pairs = list(zip(decode_rates, prefill_rates, strict=True))
    by_decode = (decode_tokens + prefill_tokens * min(d / v for d, v in pairs)) / sum(decode_rates)
    by_prefill = (prefill_tokens + decode_tokens * min(v / d for d, v in pairs)) / sum(prefill_rates)
    return max(by_decode, by_prefill)


def _tokens(counts: Iterable[int]) -> Tokens:
    return np.fromiter(counts, dtype=np.int64)


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
