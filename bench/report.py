"""Shows a summary: a table for people, then one line of JSON with the same numbers as the very last line.

Invariants
- A number in the table is written exactly as in the JSON.
- The JSON line holds the keys of `Summary` in their order, no NaN, no line break and no colour.

What this module does not know: what the numbers mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rolloutd.bench.metrics import Summary
from rolloutd.bench.workload import Kind

_NOTHING = "-"
_ANY_WIDTH = 10_000  # columns; wider than any table here


def json_line(summary: Summary) -> str:
    """The summary as one line of JSON. Raises ValueError for a number that JSON cannot hold."""
    return json.dumps(asdict(summary), allow_nan=False)


def table(summary: Summary, title: str) -> Table:
    """One row per figure; figures that differ by kind have a row in a column per kind."""
    kinds = [kind.value for kind in Kind]
    grid = Table(title=title, title_justify="left")
    grid.add_column("figure", no_wrap=True)
    for heading in ("all", *kinds):
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, value in asdict(summary).items():
        if isinstance(value, Mapping):
            grid.add_row(name, "", *(_cell(value[kind]) for kind in kinds))
        else:
            grid.add_row(name, _cell(value), *("" for _ in kinds))
    return grid


def print_report(summary: Summary, title: str, out: TextIO | None = None) -> None:
    """Write the table and the JSON line to `out` (standard output by default) and flush it."""
    out = sys.stdout if out is None else out
    # Worked out first: a number that JSON cannot hold must not leave half a report behind.
    line = json_line(summary)
    grid = table(summary, title)
    console = Console(file=out)
    # On a narrow terminal or in a log, a wide table is better than figures cut short.
    needed_columns = Measurement.get(console, console.options.update(width=_ANY_WIDTH), grid).maximum
    console.width = max(console.width, needed_columns)
    console.print(grid)
    out.write(line + "\n")
    out.flush()


def _cell(value: float | None) -> str:
    return _NOTHING if value is None else json.dumps(value)
