"""`make bench-core`: what one dispatched rollout costs the core, and how near its bounded look comes to an exact one.

Cost: 100,000 queued rollouts of eight runs on 64 engines of 32 slots; per dispatch, the CPU time of ending the attempts that freed
the slots, of scheduling, and of the first tokens (submissions and acknowledgements are printed beside it). Of all calls, how long
each held the event loop.
Quality: the prefix hits of the same load (smaller queue) as it is, over those when every entry that may go is scored on every
engine with room.

What this module does not know: engines, sockets, and how the core decides (it widens the look by replacing a function and a bound).
"""

from __future__ import annotations

import argparse
import json
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from rolloutd.bench.core_load import CoreLoad
from rolloutd.scheduler import choosing
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.turns import Turn
from rolloutd.server.core_build import core_words
from rolloutd.server.garbage import Garbage

PURPOSES = ("end", "schedule", "first token")
QUEUED, ENGINES, SLOTS = 100_000, 64, 32
EXACT_QUEUED, EXACT_SLOTS = 4_000, 8
WARM_UP, MEASURED = 4_000, 8_000  # dispatches
EXACT_DISPATCHES = 1_200
EXACT_SEEDS = 24  # one seed moves by 0.04 either way, so their mean by 0.008


def measure(load: CoreLoad, free: int, dispatches: int) -> dict[str, float]:
    """Microseconds of CPU per dispatch by purpose, `free` slots freed per event."""
    load.meter.clear()
    before = load.dispatched
    while load.dispatched - before < dispatches:
        load.step(free)
    count = load.dispatched - before
    return {purpose: seconds * 1e6 / count for purpose, seconds in load.meter.seconds.items()}


def hit_share(seed: int, exact: bool, dispatches: int = EXACT_DISPATCHES) -> float:
    """Prompt tokens predicted as cached over prompt tokens, of rollouts that ended."""
    load = CoreLoad(EXACT_QUEUED, engines=ENGINES, slots=EXACT_SLOTS, seed=seed)
    if not exact:
        _run_steps(load, dispatches)
    else:
        with (
            mock.patch.object(choosing, "LOOK", _every_entry),
            mock.patch.object(choosing, "MAX_ENGINES_SCORED", ENGINES),
        ):
            _run_steps(load, dispatches)
    return load.hit_tokens / load.prompt_tokens


def _run_steps(load: CoreLoad, dispatches: int) -> None:
    while load.dispatched < dispatches + ENGINES * EXACT_SLOTS:
        load.step(1)


def _every_entry(turn: Turn, *others: object) -> list[Entry] | None:
    """In place of `choosing._bounded_look`, whose last argument is the number of the look."""
    return [entry for entry in turn.backlog.entries() if not entry.held] if others[-1] == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="cost and quality of the scheduling core")
    parser.add_argument("--queued", type=int, default=QUEUED)
    parser.add_argument("--no-quality", action="store_true", help="leave out the exact scan")
    parser.add_argument("--free", type=int, nargs="*", default=[1, 16])
    arguments = parser.parse_args()
    load = CoreLoad(arguments.queued, engines=ENGINES, slots=SLOTS)
    garbage = Garbage(is_quiet=lambda: False)
    garbage.start()  # as in the server
    figures: dict[str, object] = {"core": core_words()}
    calls: list[float] = []
    longest = (0.0, "")
    table = Table(title=f"{core_words()}, microseconds of CPU")
    for name in ("slots freed", "us per dispatch", "end", "schedule", "first token", "submit", "acknowledge"):
        table.add_column(name)
    measure(load, 16, WARM_UP)
    for free in arguments.free:
        by_purpose = measure(load, free, MEASURED)
        total = sum(by_purpose.get(purpose, 0.0) for purpose in PURPOSES)
        calls += load.meter.calls
        longest = max(longest, load.meter.longest)
        figures[f"us_per_dispatch_{free}"] = round(total, 1)
        cells = (by_purpose.get(one, 0.0) for one in (*PURPOSES, "submit", "acknowledge"))
        table.add_row(str(free), f"{total:.1f}", *(f"{cell:.1f}" for cell in cells))
    garbage.stop()
    figures["handle_p99_ms"] = round(float(np.percentile(calls, 99)) * 1e3, 3)
    figures["handle_max_ms"] = round(longest[0] * 1e3, 3)
    table.caption = f"longest call: {longest[1]}, {longest[0] * 1e3:.1f} ms"
    if not arguments.no_quality:
        shares = [(hit_share(seed, False), hit_share(seed, True)) for seed in range(EXACT_SEEDS)]
        figures["hit_share_of_exact"] = round(sum(ours / exact for ours, exact in shares) / len(shares), 4)
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
