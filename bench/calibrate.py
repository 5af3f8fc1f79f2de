"""`rolloutd calibrate URL`: how fast one real engine is, as the curve that `rolloutd simulate --fitted FILE` runs on, and its sizes.

    decode    b sequences at a time that ignore their end, b = 1, 2, 4, ...: seconds per token while all of them run, fitted by
              base + growth x b and by base x (1 + growth x sqrt(b)); the curve that fits better is taken
    prefill   two lengths of fresh prompts, one token each: the slope

Invariants
- Prompts are random and fresh, so nothing comes from a cache.
- Measured in wall time from reports on the stream: an engine that reports seldom needs longer outputs (`--tokens`).

What this module does not know: other load on the engine. Calibrate an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.table import Table

from rolloutd.bench.workload import FIRST_TOKEN_ID
from rolloutd.engines.base import AttemptRequest, Engine, EngineFault, EngineInfo, Progress
from rolloutd.engines.sglang import SGLangEngine
from rolloutd.engines.sim.timing import Curve, TimingModel

DECODE_PROMPT_TOKENS = 32
TOKENS = 256
DECODE_REPEATS = 2  # the faster counts: other load only ever adds time
PREFILL_REPEATS = 3
SUSPECT_MISFIT = 0.1
LONGEST_PREFILL_TOKENS = 8_192  # SGLang's usual chunk: a longer prompt is computed in parts
MOST_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is written; `measured` is (sequences, seconds per decode step), `error` the largest relative misfit of them."""

    curve: Curve
    base_seconds: float
    growth: float
    prefill_tokens_per_second: float
    measured: tuple[tuple[int, float], ...]
    error: float
    model: str
    slots: int
    kv_tokens: int
    page_size_tokens: int
    context_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="rolloutd calibrate",
        description="Measure an idle engine's decode and prefill speed, for `rolloutd simulate --fitted FILE`.",
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (standard output)")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"output of each sequence ({TOKENS})")
    parser.add_argument(
        "--most-sequences", type=int, default=MOST_SEQUENCES, metavar="N", help=f"at a time ({MOST_SEQUENCES})"
    )
    parser.add_argument("--vocabulary-size", type=int, default=0, help="where it cannot be read from the engine")
    options = parser.parse_args(argv)
    if options.tokens < 16 or options.most_sequences < 2:
        print("rolloutd calibrate: --tokens must be at least 16, --most-sequences at least 2", file=sys.stderr)
        return 1
    try:
        fitted = asyncio.run(_calibrate(options.url, options.vocabulary_size, options.tokens, options.most_sequences))
        text = json.dumps(asdict(fitted))
        if options.out is not None:
            options.out.write_text(text + "\n", encoding="utf-8")
    except EngineFault as fault:
        print(f"rolloutd calibrate: {options.url}: {fault.message}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"rolloutd calibrate: {error}", file=sys.stderr)
        return 1
    Console(stderr=options.out is None).print(table_of(fitted))
    if fitted.error > SUSPECT_MISFIT:
        print(
            f"rolloutd calibrate: a measured step is {fitted.error:.0%} off the curve: was the engine idle, and the machine too?",
            file=sys.stderr,
        )
    if options.out is None:
        print(text)
    return 0


def table_of(fitted: Fitted) -> Table:
    """Measured against fitted."""
    timing = TimingModel(
        fitted.curve, fitted.prefill_tokens_per_second, base_seconds=fitted.base_seconds, growth=fitted.growth
    )
    title = f"{fitted.curve} curve, prefill {fitted.prefill_tokens_per_second:,.0f} tokens/s"
    table = Table("sequences", "ms per step", "fitted", title=title, title_justify="left")
    for sequences, seconds in fitted.measured:
        fit = timing.decode_step_seconds(sequences)
        table.add_row(str(sequences), f"{seconds * 1e3:.3f}", f"{fit * 1e3:.3f}")
    return table


async def _calibrate(url: str, vocabulary_size: int, tokens: int, most_sequences: int) -> Fitted:
    door = SGLangEngine(url, vocabulary_size=vocabulary_size)
    try:
        return await measure(door, await door.register(), tokens, most_sequences)
    finally:
        await door.close()


async def measure(
    door: Engine,
    info: EngineInfo,
    tokens: int = TOKENS,
    most_sequences: int = MOST_SEQUENCES,
    clock: Callable[[], float] = time.perf_counter,
) -> Fitted:
    """Of one engine that does nothing else; `clock` in seconds.

    Raises EngineFault, and ValueError where its reports are too few to tell.
    """
    prober = _Prober(door, info, clock)
    room = info.context_tokens - DECODE_PROMPT_TOKENS - 1
    tokens = min(tokens, room)
    fits = info.kv_capacity_tokens // (DECODE_PROMPT_TOKENS + tokens + info.page_size_tokens)
    most = max(2, min(most_sequences, info.max_running_rollouts, fits))
    await prober.decode(1, min(tokens, 32))  # what an engine does for the first time takes longer
    measured = [
        (sequences, min([await prober.decode(sequences, tokens) for _ in range(DECODE_REPEATS)]))
        for sequences in _doubling(most)
    ]
    curve, base, growth, error = fit(measured)
    return Fitted(
        curve=curve,
        base_seconds=base,
        growth=growth,
        prefill_tokens_per_second=await prober.prefill(),
        measured=tuple(measured),
        error=error,
        model=info.model,
        slots=info.max_running_rollouts,
        kv_tokens=info.kv_capacity_tokens,
        page_size_tokens=info.page_size_tokens,
        context_tokens=info.context_tokens,
    )


def fit(measured: Sequence[tuple[int, float]]) -> tuple[Curve, float, float, float]:
    """(curve, base seconds, growth, largest relative misfit) of the curve with the smaller squared relative misfit.

    A curve that falls with the batch, which only noise gives, is taken as level. Raises ValueError for fewer than two points.
    """
    if len(measured) < 2:
        raise ValueError(f"{len(measured)} batch sizes were measured; a curve needs two")
    sizes = np.array([sequences for sequences, _ in measured], dtype=float)
    seconds = np.array([second for _, second in measured])
    best: tuple[float, Curve, float, float, float] | None = None
    curves: tuple[tuple[Curve, np.ndarray[tuple[int], np.dtype[np.float64]]], ...] = (
        ("flat", sizes),
        ("steep", np.sqrt(sizes)),
    )
    for curve, over in curves:
        # Divided by what was measured: a misfit of one percent counts the same at every batch size.
        columns = np.stack((1.0 / seconds, over / seconds), axis=1)
        (base, slope), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
        if slope < 0.0:
            base, slope = seconds.mean(), 0.0
        elif base <= 0.0:
            continue  # of this form only where a batch of none would take some time
        misfit = (base + slope * over) / seconds - 1.0
        growth = float(slope) if curve == "flat" else float(slope / base)
        found = (float((misfit**2).sum()), curve, float(base), growth, float(np.abs(misfit).max()))
        if best is None or found[0] < best[0]:
            best = found
    if best is None:
        raise ValueError(
            f"no curve fits {[(size, round(second, 5)) for size, second in measured]}: was the engine idle?"
        )
    return best[1], best[2], best[3], best[4]


class _Prober:
    """Sends fresh prompts to one engine and times what comes back."""

    def __init__(self, door: Engine, info: EngineInfo, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._door = door
        self._info = info
        self._rng = np.random.default_rng()

    async def decode(self, sequences: int, tokens: int) -> float:
        """Seconds per decode step with so many sequences, while all of them run."""
        reports: list[list[tuple[float, int]]] = [[] for _ in range(sequences)]
        await asyncio.gather(*(self._one(DECODE_PROMPT_TOKENS, tokens, of) for of in reports))
        begun = max(of[0][0] for of in reports)
        over = min(of[-1][0] for of in reports)
        rates = []
        for of in reports:
            inside = [(at, count) for at, count in of if begun <= at <= over]
            if len(inside) >= 2 and inside[-1][1] > inside[0][1]:
                rates.append((inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]))
        if not rates:
            raise ValueError(
                f"{sequences} sequences of {tokens} tokens gave too few reports while all ran; raise --tokens, or start the "
                "engine with a smaller --stream-interval"
            )
        return 1.0 / fmean(rates)

    async def prefill(self) -> float:
        """Uncached prompt tokens per second."""
        long = min(LONGEST_PREFILL_TOKENS, self._info.max_prompt_tokens // 2, self._info.kv_capacity_tokens // 2)
        short = max(1, long // 4)
        seconds = {
            length: [await self._first_token(length) for _ in range(PREFILL_REPEATS)] for length in (short, long)
        }
        more = median(seconds[long]) - median(seconds[short])
        if more <= 0.0:
            raise ValueError(
                f"{long} prompt tokens took no longer than {short}: the engine is busy, or the clock too coarse"
            )
        return (long - short) / more

    async def _first_token(self, prompt_tokens: int) -> float:
        started = self._clock()
        await self._one(prompt_tokens, 1, [])
        return self._clock() - started

    async def _one(self, prompt_tokens: int, tokens: int, reports: list[tuple[float, int]]) -> None:
        def note(progress: Progress) -> None:
            reports.append((self._clock(), progress.generated_tokens))

        ids = self._rng.integers(FIRST_TOKEN_ID, self._info.vocabulary_size, prompt_tokens, dtype=np.uint32)
        request = AttemptRequest(
            attempt_id=secrets.token_hex(16),
            max_new_tokens=tokens,
            token_bytes=ids.astype("<u4").tobytes(),
            sampling={"ignore_eos": True},
        )
        await self._door.generate(request, note)
        reports.append((self._clock(), tokens))


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`."""
    yield from itertools.takewhile(lambda size: size < most, (1 << n for n in range(math.ceil(math.log2(most)) + 1)))
    yield most


if __name__ == "__main__":
    raise SystemExit(main())
