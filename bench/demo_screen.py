"""What a person sees while the demonstration runs, on standard error.

On a terminal: lines that stay, and below them a picture that is drawn again and again. Elsewhere: the same lines, and
one line of figures now and then.

Invariants
- Standard output is left alone.

What this module does not know: where the figures come from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rolloutd.bench.workload import Kind

PLAIN_SECONDS = 10.0
REFRESHES_PER_SECOND = 4.0
_BAR_COLUMNS = 24
_CRITICAL_BAR = "  critical, this step"
_RUNNING_BAR = "  running / budget"
_MEANINGS = {
    Kind.CRITICAL: "the step waits for these",
    Kind.REUSABLE: "useful soon, may wait for cache",
    Kind.BACKGROUND: "only when there is room",
    Kind.REWARD: "short queries all along",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of one kind since the start."""

    submitted: int = 0
    queued: int = 0
    running: int = 0
    delivered: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """One moment. step from 0; critical_done of critical_all belong to that step. running of ceiling: all rollouts."""

    simulated_seconds: float
    time_scale: float
    step: int
    steps: int
    doing: str
    critical_done: int
    critical_all: int
    running: int
    ceiling: int
    rows: Mapping[Kind, Row] = field(default_factory=dict)


class Screen:
    """Use as `with`. `quiet` shows nothing at all."""

    def __init__(self, out: TextIO, quiet: bool = False) -> None:
        self._console = Console(file=out, quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._plain_due = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=REFRESHES_PER_SECOND, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str, style: str = "") -> None:
        """A line that stays."""
        self._console.print(Text(line, style=style), soft_wrap=True)

    def ready(self, what: str, detail: str = "") -> None:
        """A part of the cast is there."""
        self._console.print(Text.assemble(("  ready  ", "green"), f"{what:<12}", (detail, "dim")), soft_wrap=True)

    def show(self, view: View) -> None:
        """The moment as a picture; elsewhere than on a terminal a line, at most every `PLAIN_SECONDS`."""
        if self._live is not None:
            self._live.update(picture(view))
        elif time.monotonic() >= self._plain_due:
            self._plain_due = time.monotonic() + PLAIN_SECONDS
            self.say(line(view))


def line(view: View) -> str:
    """A view in one line."""
    done = " ".join(f"{kind.value} {row.delivered}/{row.submitted}" for kind, row in view.rows.items())
    return (
        f"  {view.simulated_seconds:5.0f} s  step {view.step + 1}/{view.steps} {view.doing}; "
        f"running {view.running}/{view.ceiling}; delivered: {done}"
    )


def picture(view: View) -> RenderableType:
    """A view as head, bar and table."""
    head = Text.assemble(
        ("  step ", "dim"),
        (f"{view.step + 1} of {view.steps}", "bold"),
        "   ",
        (view.doing, "bold cyan"),
        ("   simulated time ", "dim"),
        f"{view.simulated_seconds:.0f} s",
        (f" ({view.time_scale:g} per second)" if view.time_scale != 1 else "", "dim"),
    )
    bars = Table.grid(padding=(0, 1))
    for name, done, total in (
        (_CRITICAL_BAR, view.critical_done, view.critical_all),
        (_RUNNING_BAR, view.running, view.ceiling),
    ):
        bars.add_row(
            Text(name, style="dim"),
            ProgressBar(total=max(1, total), completed=min(done, max(1, total)), width=_BAR_COLUMNS),
            f"{done} of {total}",
        )
    grid = Table(box=None, padding=(0, 1, 0, 1), header_style="dim")
    grid.add_column("", min_width=len(_RUNNING_BAR) - 1)
    for heading in ("submitted", "queued", "running", "delivered"):
        grid.add_column(heading, justify="right")
    cancelled = any(row.cancelled for row in view.rows.values())
    if cancelled:
        grid.add_column("cancelled", justify="right")
    grid.add_column("", no_wrap=True, overflow="ellipsis")
    for kind, row in view.rows.items():
        cells = [row.submitted, row.queued, row.running, row.delivered, *([row.cancelled] if cancelled else [])]
        grid.add_row(
            f"{kind.value}", *(str(cell) if cell else "-" for cell in cells), Text(_MEANINGS[kind], style="dim")
        )
    return Group(Text(), head, bars, grid)
