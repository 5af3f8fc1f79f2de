"""The report's plots: one dot per seed, a stroke for the mean, one row per arm.

Invariants
- Files are the same for the same figures and version of matplotlib. Colours are told apart without colour vision (Okabe and Ito's
  blue and vermilion), and marks differ in shape too.
- A panel without data is not drawn; a plot without panels is not written.

What this module does not know: what is good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from rolloutd.bench.figures import Figures

BLUE, VERMILION, GREY, FAINT = "#0072B2", "#D55E00", "#555555", "#dddddd"
EPOCH_COLOURS, EPOCH_MARKS, EPOCH_NAMES = (BLUE, VERMILION), ("o", "D"), ("cold", "warm")
WIDE_INCHES, DOTS_PER_INCH = 10.0, 120
ROW_INCHES, TWO_EPOCHS_INCHES, HEAD_INCHES = 0.25, 0.32, 1.25
LOG_SPAN = 4.0  # largest over smallest value from which a panel is logarithmic


@dataclass(frozen=True, slots=True)
class Dot:
    """One seed of one row. epoch: 0 cold, 1 warm."""

    row: str
    value: float
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One axis. reference: a line, with its name."""

    title: str
    dots: Sequence[Dot]
    reference: float | None = None
    reference_name: str = ""


def dots_of(lines: Iterable[Figures], workload: str, name: str) -> list[Dot]:
    """A figure of a workload, one dot per arm, seed and epoch."""
    return [
        Dot(line.arm, float(value), line.epoch)
        for line in lines
        if line.workload == workload and (value := asdict(line)[name]) is not None
    ]


def draw(panels: Sequence[Panel], rows: Sequence[str], title: str, path: Path, *, bold: str = "") -> bool:
    """Panels side by side over common rows; False, and no file, where nothing is to be drawn. bold: the row that stands out."""
    shown = [panel for panel in panels if panel.dots]
    if not shown:
        return False
    used = [row for row in rows if any(dot.row == row for panel in shown for dot in panel.dots)]
    epochs = sorted({dot.epoch for panel in shown for dot in panel.dots})
    row_inches = TWO_EPOCHS_INCHES if len(epochs) > 1 else ROW_INCHES
    with _style():
        figure = Figure(figsize=(WIDE_INCHES, HEAD_INCHES + row_inches * len(used)), layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
        for axis, panel in zip(axes, shown, strict=True):
            _panel(axis, panel, used)
        axes[0].set_yticks(range(len(used)), used)
        axes[0].set_ylim(len(used) - (0.1 if any(panel.reference_name for panel in shown) else 0.5), -0.5)
        for label in axes[0].get_yticklabels():
            if label.get_text() == bold:
                label.set_fontweight("bold")
        if len(epochs) > 1:
            _name_epochs(figure, epochs)
        save(figure, path)
    return True


def _style() -> AbstractContextManager[None]:
    """Whatever the user's own settings are; the font comes with matplotlib."""
    return matplotlib.rc_context({"font.size": 9.0, "font.family": "DejaVu Sans"})


def _panel(axis: Axes, panel: Panel, rows: Sequence[str]) -> None:
    values = [dot.value for dot in panel.dots]
    everything = [*values, *([] if panel.reference is None else [panel.reference])]
    if min(everything) > 0.0 and max(everything) / min(everything) > LOG_SPAN:
        logarithmic(axis)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
    epochs = sorted({dot.epoch for dot in panel.dots})
    for epoch in epochs:
        shift = 0.0 if len(epochs) == 1 else 0.34 * (epoch - 0.5)
        for number, row in enumerate(rows):
            of_row = [dot.value for dot in panel.dots if (dot.row, dot.epoch) == (row, epoch)]
            if not of_row:
                continue
            colour = EPOCH_COLOURS[epoch]
            height = number + shift
            axis.plot(
                of_row, [height] * len(of_row), EPOCH_MARKS[epoch], ms=4, mec="none", mfc=colour, alpha=0.45, ls="none"
            )
            mean = fmean(of_row)
            axis.plot([mean, mean], [height - 0.17, height + 0.17], color=colour, lw=2.2, solid_capstyle="butt")
    if panel.reference is not None:
        axis.axvline(panel.reference, color=GREY, lw=0.9, ls=(0, (4, 3)), zorder=1.5)
        if panel.reference_name:
            axis.annotate(
                panel.reference_name,
                (panel.reference, 0.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, 2),
                textcoords="offset points",
                va="bottom",
                fontsize=7.5,
                color=GREY,
            )
    axis.set_title(panel.title, fontsize=9, loc="left")
    tidy(axis)


def logarithmic(axis: Axes) -> None:
    """With plain numbers for labels, few of them."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def tidy(axis: Axes) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False, labelsize=8.5)
    axis.grid(axis="x", color=FAINT, lw=0.6)
    axis.set_axisbelow(True)


def _name_epochs(figure: Figure, epochs: Sequence[int]) -> None:
    """In the top right corner, in the colours."""
    for place, epoch in enumerate(reversed(epochs)):
        name = f"{'●◆'[epoch]} {EPOCH_NAMES[epoch]}"
        figure.text(
            0.99 - 0.065 * place,
            1.0 - 0.07 / figure.get_figheight(),
            name,
            ha="right",
            va="top",
            color=EPOCH_COLOURS[epoch],
        )


def draw_shares(
    rows: Sequence[tuple[str, float, str]], title: str, path: Path, *, better: Callable[[float], bool]
) -> bool:
    """Figures over their bars, one row each: (name, share, what is written beside it); `better`: which shares are met."""
    if not rows:
        return False
    with _style():
        figure = Figure(figsize=(WIDE_INCHES, HEAD_INCHES - 0.3 + 0.27 * len(rows)), layout="constrained")
        axis = figure.subplots()
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
        for number, (_, share, beside) in enumerate(rows):
            met = better(share)
            colour = BLUE if met else VERMILION
            axis.plot([1.0, share], [number, number], color=colour, lw=1.2, alpha=0.6)
            axis.plot([share], [number], "o" if met else "X", color=colour, ms=6, mec="none")
            axis.annotate(
                beside,
                (max(share, 1.0), number),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=colour,
            )
        axis.axvline(1.0, color=GREY, lw=1.0)
        axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        logarithmic(axis)
        shares = [share for _, share, _ in rows]
        axis.set_xlim(min([0.5, *shares]) / 1.5, max([2.0, *shares]) * 9.0)
        axis.set_xlabel("figure / bar", fontsize=8.5)
        tidy(axis)
        save(figure, path)
    return True


def save(figure: Figure, path: Path) -> None:
    """As PNG: a third of what the same dots take as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
