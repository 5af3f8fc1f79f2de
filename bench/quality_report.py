"""Shows figures: one aligned table of means and spreads for people, one line of JSON per epoch for programs.

Invariants
- A number of the table is the mean over the seeds of the JSON lines; "±" is one standard deviation.
- Columns without any number are left out of the table; the JSON has every key of `Figures`.

What this module does not know: what a figure means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rolloutd.bench.figures import NAMES, Figures, Spread, gap_closed, over_seeds

HEADINGS = {
    "makespan_over_bound": "makespan / bound",
    "critical_over_bound": "critical / its bound",
    "reward_p99_seconds": "reward p99 s",
    "prefix_hit": "hit",
    "prefix_hit_ceiling": "its ceiling",
    "prefix_hit_lru": "with its memory",
    "imbalance": "imbalance",
    "reusable_over_bound": "reusable / bound",
    "background_over_bound": "background / bound",
    "session_mean_seconds": "session mean s",
    "session_over_alone": "session / alone",
    "idle_ratio": "trainer idle",
    "idle_ratio_least": "its least",
    "samples_per_second": "samples/s",
    "bound_seconds": "bound s",
    "used": "capacity used",
    "prefill_share": "prefill share",
    "moves": "moves",
    "failed": "failed",
    "handle_us_per_rollout": "us/rollout",
}
GAP = "gap closed"
_NOTHING = "-"
_ANY_WIDTH = 10_000  # columns; wider than any table here


def json_line(line: Figures) -> str:
    """One epoch as one line of JSON. Raises ValueError for a number that JSON cannot hold."""
    return json.dumps(asdict(line), allow_nan=False)


def print_table(lines: Sequence[Figures], out: TextIO) -> None:
    """One row per workload, arm and epoch, in the order in which they first occur."""
    spreads = over_seeds(lines)
    gaps = {
        (workload, arm, epoch): gap
        for workload, arm, epoch in spreads
        if (gap := gap_closed(lines, arm, workload, epoch)) is not None
    }
    names = [
        name
        for name in NAMES
        if name in HEADINGS
        and any(name in spread for spread in spreads.values())
        and not (name == "failed" and all(not line.failed for line in lines))
    ]
    seeds = len({line.seed for line in lines})
    epochs = len({line.epoch for line in lines}) > 1
    table = Table(title=f"{seeds} seed{'s' if seeds != 1 else ''}", title_justify="left")
    for heading in ("workload", "arm", *(["epoch"] if epochs else [])):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    if gaps:
        table.add_column(GAP, justify="right", no_wrap=True)
    previous = None
    for (workload, arm, epoch), spread in spreads.items():
        if previous is not None and previous != workload:
            table.add_section()
        previous = workload
        cells = [_cell(spread.get(name)) for name in names]
        if gaps:
            cells.append(_cell(gaps.get((workload, arm, epoch))))
        table.add_row(
            workload, arm, *([("cold", "warm")[epoch] if epoch < 2 else str(epoch)] if epochs else []), *cells
        )
    print_wide(table, out)


def print_wide(table: Table, out: TextIO) -> None:
    """Print a table whole: on a narrow terminal a wide one is better than figures cut short."""
    console = Console(file=out)
    needed = Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return _NOTHING
    digits = 3 if abs(spread.mean) < 10 else 1 if abs(spread.mean) < 1_000 else 0
    value = f"{spread.mean:.{digits}f}"
    return value if spread.deviation is None else f"{value} ± {spread.deviation:.{digits}f}"
