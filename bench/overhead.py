"""`make bench-overhead`: what our whole server costs on the way to an engine, next to a router's cost.

Closed loop: 64 rollouts in flight, 64 output tokens with log-probs, at three prompt lengths; CPU of the process under
test per 1,000 rollouts, and rollouts per second. Ours is driven over its stream and streams from the engine; the router
is asked for whole answers on kept connections, which is its cheapest form. Paced: 500 single submissions a second of
4,096 tokens; "added" is over the same client straight to an engine.

Pairs run in turn; each figure is the median over the pairs, `throughput_ratio` the median of the pairs' ratios.

What this module does not know: how either of the two works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from rolloutd.bench.overhead_clients import HttpClient, Measured, StreamClient, prompts
from rolloutd.bench.overhead_stack import HOST, Stack, cpu_seconds, router_command, stack
from rolloutd.server.core_build import core_words

PROMPT_TOKENS = (16, 2048, 16384)
PACED_TOKENS = 4096
PACED_PER_SECOND = 500.0
IN_FLIGHT = 64
RATIO_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    pairs: int
    closed_seconds: float
    paced_seconds: float


FULL = Effort(pairs=5, closed_seconds=3.0, paced_seconds=5.0)
QUICK = Effort(pairs=2, closed_seconds=1.5, paced_seconds=2.0)


class Figures:
    """What was measured, by name and prompt tokens."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, name: str, tokens: int, value: float) -> None:
        self.values[name, tokens].append(value)

    def median(self, name: str, tokens: int) -> float:
        return statistics.median(self.values[name, tokens])

    def spread(self, name: str, tokens: int) -> str:
        values = self.values[name, tokens]
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def ratio(self, above: str, below: str, tokens: int) -> float:
        pairs = zip(self.values[above, tokens], self.values[below, tokens], strict=True)
        return statistics.median(first / second for first, second in pairs)

    def difference(self, name: str, less: str, tokens: int) -> float:
        pairs = zip(self.values[name, tokens], self.values[less, tokens], strict=True)
        return statistics.median(first - second for first, second in pairs)


async def _closed(
    figures: Figures, who: str, pid: int, client: HttpClient | StreamClient, tokens: int, seconds: float
) -> None:
    before = cpu_seconds(pid)
    measured = await client.closed(IN_FLIGHT, seconds)
    used = cpu_seconds(pid) - before
    figures.add(f"{who} cpu", tokens, used * 1000 / measured.rollouts)
    figures.add(f"{who} per second", tokens, measured.rollouts / measured.seconds)


def _latencies(figures: Figures, who: str, measured: Measured) -> None:
    for percentile in (50, 99):
        figures.add(f"{who} p{percentile}", PACED_TOKENS, float(np.percentile(measured.latencies_ms, percentile)))


async def measure(running: Stack, effort: Effort, console: Console) -> Figures:
    figures = Figures()
    for tokens in PROMPT_TOKENS:
        await running.say_prompt_tokens(tokens)
        texts = prompts(tokens, seed=tokens)
        ours = StreamClient(HOST, running.server_port, f"closed-{tokens}", texts)
        await ours.open()
        router = HttpClient(HOST, running.router_port, texts)
        warmed: tuple[HttpClient | StreamClient, ...] = (ours, router)
        for client in warmed:
            await client.closed(IN_FLIGHT, effort.closed_seconds / 3)
        for number in range(effort.pairs):
            console.print(f"closed, {tokens} tokens, pair {number + 1} of {effort.pairs}", highlight=False)
            await _closed(figures, "ours", running.server_pid, ours, tokens, effort.closed_seconds)
            await _closed(figures, "router", running.router_pid, router, tokens, effort.closed_seconds)
        await ours.close()
        router.close()
    await running.say_prompt_tokens(PACED_TOKENS)
    texts = prompts(PACED_TOKENS, seed=0)
    ours = StreamClient(HOST, running.server_port, "paced", texts)
    await ours.open()
    clients: dict[str, HttpClient | StreamClient] = {
        "engine": HttpClient(HOST, running.engine_ports[0], texts),
        "ours": ours,
        "router": HttpClient(HOST, running.router_port, texts),
    }
    for client in clients.values():
        await client.paced(PACED_PER_SECOND, 1.0)
    for number in range(effort.pairs):
        console.print(f"paced, round {number + 1} of {effort.pairs}", highlight=False)
        for who, client in clients.items():
            _latencies(figures, who, await client.paced(PACED_PER_SECOND, effort.paced_seconds))
    await ours.close()
    return figures


def summary(figures: Figures) -> dict[str, object]:
    """The keys of the last line."""

    def added(who: str, percentile: int) -> float:
        return round(figures.difference(f"{who} p{percentile}", f"engine p{percentile}", PACED_TOKENS), 3)

    def cpu(who: str) -> dict[str, float]:
        return {str(tokens): round(figures.median(f"{who} cpu", tokens), 4) for tokens in PROMPT_TOKENS}

    return {
        "core": core_words(),
        "added_p50_ms": added("ours", 50),
        "added_p99_ms": added("ours", 99),
        "router_added_p50_ms": added("router", 50),
        "router_added_p99_ms": added("router", 99),
        "cpu_s_per_1000": cpu("ours"),
        "router_cpu_s_per_1000": cpu("router"),
        "throughput_ratio": round(figures.ratio("ours per second", "router per second", RATIO_TOKENS), 2),
    }


def table(figures: Figures) -> Table:
    grid = Table("figure", "prompt tokens", "ours", "router", "ours / router")
    rows = [("CPU s per 1,000 rollouts", "cpu", tokens) for tokens in PROMPT_TOKENS]
    rows += [("rollouts per second", "per second", tokens) for tokens in PROMPT_TOKENS]
    rows += [(f"latency {name} ms, paced", name, PACED_TOKENS) for name in ("p50", "p99")]
    for title, name, tokens in rows:
        ours, router = f"ours {name}", f"router {name}"
        ratio = figures.ratio(ours, router, tokens)
        grid.add_row(title, str(tokens), figures.spread(ours, tokens), figures.spread(router, tokens), f"{ratio:.2f}")
    straight = " / ".join(f"{figures.median(f'engine p{p}', PACED_TOKENS):.3f}" for p in (50, 99))
    grid.title = core_words()
    grid.caption = f"medians (lowest to highest); straight to an engine p50 / p99: {straight} ms"
    return grid


async def _main(effort: Effort) -> None:
    console = Console(stderr=True)
    async with stack(router=await router_command()) as running:
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection of the client would be counted as latency of what it measures
        figures = await measure(running, effort, console)
    Console(width=120).print(table(figures))
    print(json.dumps(summary(figures)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="cost and latency of the data path, next to a router's")
    parser.add_argument("--quick", action="store_true", help="two short pairs: a look, not a result")
    options = parser.parse_args()
    uvloop.run(_main(QUICK if options.quick else FULL))


if __name__ == "__main__":
    main()
