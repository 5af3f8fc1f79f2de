"""`make report`: one page with tables and plots of what the benchmarks last printed here, `docs/report.md`.

Invariants
- Every number is one that a benchmark printed, or computed from such; no sentence about results is written by hand.
- What is missing is named with the command that makes it. Where rolloutd loses, and which bars are not met, the page says first.

What this module does not know: how anything is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rolloutd.bench.ablation import verdict
from rolloutd.bench.ablation_mechanisms import MECHANISMS
from rolloutd.bench.arms import ARMS
from rolloutd.bench.cost_table import FOLDER
from rolloutd.bench.figures import Figures, Spread, gap_closed, over_seeds
from rolloutd.bench.mix_error import BAR_POINTS
from rolloutd.bench.paired import Paired, summary
from rolloutd.bench.peers_report import DRAW, PAIRED, best_policies
from rolloutd.bench.quality_report import HEADINGS
from rolloutd.bench.report_bars import Bar, bars, seeds_of
from rolloutd.bench.report_comparisons import ORACLE, OWN, Comparison, comparisons, losses
from rolloutd.bench.report_inputs import Inputs, command, read_inputs
from rolloutd.bench.report_plots import Dot, Panel, dots_of, draw, draw_shares
from rolloutd.bench.simulate import PRODUCT

PAGE = Path("docs/report.md")
PLOTS = "figures"  # beside the page
EPOCHS = ("cold", "warm")
ENOUGH_SEEDS = 10  # as the bars are stated
_ROWS = (PRODUCT, *(arm for arm in ARMS if arm != ORACLE), ORACLE)
# Share of the bar, in a plot, for a figure of 0: nothing can be drawn there.
_LEAST_SHARE = 0.01


class Page:
    """Collects the text, and draws plots beside it."""

    def __init__(self, path: Path) -> None:
        self.parts: list[str] = []
        self._path = path
        self._plots: set[Path] = set()

    def text(self, *parts: str) -> None:
        self.parts += parts

    def plot(self, name: str, title: str, panels: Sequence[Panel], rows: Sequence[str]) -> None:
        """A grid of dots, where there is anything to show."""
        path = self._plot_path(name)
        if draw(panels, rows, title, path, bold=PRODUCT):
            self._show(path, title)

    def shares(self, name: str, title: str, rows: Sequence[tuple[str, float, str]]) -> None:
        path = self._plot_path(name)
        if draw_shares(rows, title, path, better=lambda share: share <= 1.0):
            self._show(path, title)

    def write(self) -> None:
        """The page; plots of an earlier one that this one does not have are removed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")
        for old in (self._path.parent / PLOTS).glob("report-*.png"):
            if old not in self._plots:
                old.unlink()

    def _plot_path(self, name: str) -> Path:
        return self._path.parent / PLOTS / f"report-{name}.png"

    def _show(self, path: Path, title: str) -> None:
        self._plots.add(path)
        self.text(f"![{title}]({path.relative_to(self._path.parent).as_posix()})")


def make_page(inputs: Inputs, path: Path) -> None:
    """Write the page and its plots."""
    page = Page(path)
    found = bars(inputs)
    compared = [*comparisons(inputs.of("quality")), *comparisons(inputs.of("loop"))]
    wire = _best_only(inputs.of("peers"))
    page.text("# How good are the schedules, and what do they cost?", _head(inputs))
    _in_short(page, inputs, found, compared, wire)
    _bars(page, found)
    _quality(page, inputs.of("quality"), compared)
    _loop(page, inputs.of("loop"))
    _wire(page, inputs.of("peers"), wire)
    _ablation(page, inputs)
    _scale_and_mix(page, inputs)
    page.write()


def _head(inputs: Inputs) -> str:
    made = ", ".join(f"{name} {when:%Y-%m-%d %H:%M}" for name, when in inputs.made.items())
    cores: dict[str, list[str]] = {}
    for name, one in inputs.objects.items():
        cores.setdefault(str(one.get("core", "core not said")), []).append(name)
    return (
        "Written by `make report` from what the benchmarks last printed on one machine; edit nothing here. "
        "[simulation.md](simulation.md) says what workloads, arms and figures are. Dots are seeds, strokes their means, "
        '"±" is one standard deviation over the seeds.\n\n'
        f"Printed (UTC): {made or 'nothing'}. "
        + "; ".join(f"{core}: {', '.join(names)}" for core, names in cores.items())
        + "."
    )


def _in_short(
    page: Page, inputs: Inputs, found: Sequence[Bar], compared: Sequence[Comparison], wire: Sequence[Comparison]
) -> None:
    met = [bar for bar in found if bar.met]
    failed = [bar for bar in found if bar.met is False]
    open_bars = [bar for bar in found if bar.met is None]
    page.text(
        "## In short",
        f"Of {len(found)} bars {len(met)} are met, {len(failed)} are not, {len(open_bars)} not measured here.",
    )
    if failed:
        page.text("**Not met:**\n\n" + "\n".join(f"- {bar.what}: {_value(bar)} (bar {_limit(bar)})" for bar in failed))
    lost = [*losses(compared), *losses(wire)]
    against = _against(inputs, wire)
    if lost:
        page.text(
            "**Where rolloutd loses** (its figure over the other's, seed by seed; the oracle, which is told lengths, is left out;"
            " in brackets what the spread, or too few seeds, leave open):\n\n"
            + "\n".join(f"- {sentence}" for sentence in _sentences(lost))
        )
        page.text(f"Compared with {against}.")
    elif against:
        page.text(f"In these runs rolloutd is behind nobody who knows no more than it does. Compared with {against}.")
    for name in ("quality", "loop"):
        seeds = seeds_of(inputs.of(name))
        if 0 < len(seeds) < ENOUGH_SEEDS:
            page.text(
                f"`{command(name)}` had {len(seeds)} of the {ENOUGH_SEEDS} seeds that bars are stated for: a look, no result."
            )
    if inputs.missing:
        page.text(
            "**Missing:**\n\n"
            + "\n".join(f"- {name} {why}: `{command(name)}`" for name, why in sorted(inputs.missing.items()))
        )


def _against(inputs: Inputs, wire: Sequence[Comparison]) -> str:
    """Whom losses were looked for against, per benchmark; empty where there was nobody."""
    arms = {name: dict.fromkeys(line.arm for line in inputs.of(name)) for name in ("quality", "loop")}
    arms["peers"] = dict.fromkeys(one.arm for one in wire)
    others = {name: [arm for arm in found if arm not in (PRODUCT, ORACLE)] for name, found in arms.items()}
    return "; ".join(f"{', '.join(found)} (`{command(name)}`)" for name, found in others.items() if found)


def _sentences(lost: Sequence[Comparison]) -> list[str]:
    """One per workload, epoch and figure: against whom, surest and largest first."""
    grouped: dict[str, list[str]] = {}
    for one in lost:
        epoch = "" if one.workload.startswith("Q5") else f" {EPOCHS[one.epoch]}"
        wire = " on the wire" if one.draw else ""
        where = f"{one.workload}{epoch}{wire}, {HEADINGS[one.figure]}"
        against = f"{one.arm} {_paired(one.ratio)}"
        grouped.setdefault(where, []).append(against if one.verdict == "LOSES" else f"({against})")
    return [f"{where}: {'; '.join(against)}" for where, against in grouped.items()]


def _bars(page: Page, found: Sequence[Bar]) -> None:
    page.text("## Bars")
    lines = ["| bar | figure | wanted | met | |", "|---|---|---|---|---|"]
    for bar in found:
        met = "not measured" if bar.met is None else "yes" if bar.met else "**no**"
        note = f"`{command(bar.source)}`" if bar.value is None else bar.note
        lines.append(f"| {bar.what} | {_value(bar)} | {_limit(bar)} | {met} | {note} |")
    page.text("\n".join(lines))
    shares = [(bar.what, _share(bar), f"{_value(bar)} (bar {_limit(bar)})") for bar in found if bar.value is not None]
    cost = ("core", "data path", "publication")
    page.shares(
        "costs",
        "Cost bars: the figure over its bar; right of the line the bar is not met",
        [
            row
            for row, bar in zip(shares, (bar for bar in found if bar.value is not None), strict=True)
            if bar.area in cost
        ],
    )


def _share(bar: Bar) -> float:
    """The figure in bars, turned so that more than 1 is not met."""
    value = bar.value or 0.0
    if bar.at_most:
        return max(_LEAST_SHARE, value / bar.limit if bar.limit else (1.0 if not value else 1.0 + value))
    return max(_LEAST_SHARE, bar.limit / value) if value else 1.0 / _LEAST_SHARE


def _quality(page: Page, lines: Sequence[Figures], compared: Sequence[Comparison]) -> None:
    if not lines:
        return
    page.text(
        "## In virtual time", "Lower is better, but for prefix hits. Arms: rolloutd, the controls, and the oracle."
    )
    steps = ("Q1", "Q1s", "Q2")
    page.plot(
        "steps",
        "One training step: makespan over the bound that no schedule can beat",
        [Panel(one, dots_of(lines, one, "makespan_over_bound"), 1.0, "bound") for one in steps],
        _ROWS,
    )
    page.plot(
        "mixed",
        "Q3, mixed classes: the critical work, reward queries beside it, and what runs behind",
        [
            Panel("critical / its bound", dots_of(lines, "Q3", "critical_over_bound"), 1.0, "bound"),
            Panel("reward p99, simulated s", dots_of(lines, "Q3", "reward_p99_seconds"), 2.0, "bar"),
            Panel("last reusable / bound", dots_of(lines, "Q3", "reusable_over_bound"), 0.8, "bar"),
            Panel("last background / bound", dots_of(lines, "Q3", "background_over_bound"), 1.4, "bar"),
        ],
        _ROWS,
    )
    ceilings = [line.prefix_hit_ceiling for line in lines if line.workload == "Q4" and line.prefix_hit_ceiling]
    page.plot(
        "agents",
        "Q4, agents in a closed loop",
        [
            Panel("mean session, simulated s", dots_of(lines, "Q4", "session_mean_seconds")),
            Panel("makespan / bound", dots_of(lines, "Q4", "makespan_over_bound"), 1.0, "bound"),
            Panel("prefix hit", dots_of(lines, "Q4", "prefix_hit"), max(ceilings, default=None), "ceiling"),
        ],
        _ROWS,
    )
    for workload in dict.fromkeys(line.workload for line in lines):
        page.text(f"### {workload}", _table([line for line in lines if line.workload == workload]))
    page.plot(
        "pairs",
        "Seed by seed: rolloutd's figure over the other arm's; left of the line rolloutd is faster",
        [
            Panel(f"{workload} {HEADINGS[OWN[workload][0]]}", _ratio_dots(compared, workload), 1.0)
            for workload in OWN
            if not workload.startswith("Q5")
        ],
        [arm for arm in _ROWS if arm != PRODUCT],
    )


def _ratio_dots(compared: Iterable[Comparison], workload: str) -> list[Dot]:
    figure = OWN[workload][0]
    return [
        Dot(one.arm, value, one.epoch)
        for one in compared
        if (one.workload, one.figure) == (workload, figure)
        for value in one.ratio.values
    ]


def _table(lines: Sequence[Figures]) -> str:
    """Means and spreads of a workload's own figures, per arm and epoch, and where the time of the engines went."""
    workload = lines[0].workload
    names = [*OWN.get(workload, ("makespan_over_bound",)), "imbalance", "used", "prefill_share", "moves"]
    spreads = over_seeds(lines)
    names = [name for name in names if any(name in spread for spread in spreads.values())]
    gaps = {(arm, epoch): gap_closed(lines, arm, workload, epoch) for _, arm, epoch in spreads}
    with_gaps = workload in ("Q1", "Q1s") and any(gaps.values())
    heads = ["arm", *(HEADINGS[name] for name in names), *(["gap closed"] if with_gaps else [])]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    epochs = len({line.epoch for line in lines}) > 1
    for (_, arm, epoch), spread in spreads.items():
        name = f"**{arm}**" if arm == PRODUCT else arm
        cells = [f"{name} {EPOCHS[epoch]}" if epochs else name, *(_spread(spread.get(one)) for one in names)]
        if with_gaps:
            cells.append(_spread(gaps[arm, epoch]))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _loop(page: Page, lines: Sequence[Figures]) -> None:
    if not lines:
        return
    page.text("## Training loops")
    panels = []
    for workload in ("Q5", "Q5-off"):
        least = [line.idle_ratio_least for line in lines if line.workload == workload and line.idle_ratio_least]
        panels.append(
            Panel(
                f"{workload}: trainer idle", dots_of(lines, workload, "idle_ratio"), min(least, default=None), "bound"
            )
        )
        panels.append(Panel(f"{workload}: samples/s", dots_of(lines, workload, "samples_per_second")))
    title = "Q5, synchronous and one step off-policy: trainer idle ratio, samples trained on per second"
    page.plot("loops", title, panels, _ROWS)
    for workload in dict.fromkeys(line.workload for line in lines):
        page.text(f"### {workload}", _table([line for line in lines if line.workload == workload]))


def _best_only(lines: Sequence[Figures]) -> list[Comparison]:
    """Pairs on the wire against each router's best policy, workload by workload."""
    best = {(workload, epoch, arm) for (workload, epoch, _), arm in best_policies(lines).items()}
    return [
        one
        for one in comparisons(lines, draw=DRAW)
        if (one.workload, one.epoch, one.arm) in best and one.figure in PAIRED
    ]


def _wire(page: Page, lines: Sequence[Figures], best: Sequence[Comparison]) -> None:
    if not lines:
        return
    page.text(
        "## On the wire",
        "Real processes in front of the same simulated engines. A gap under "
        f"{DRAW:.0%} is a draw: two runs of one arm differ by as much. Against each router's best policy:",
    )
    rows = ["| workload | | router | figure | rolloutd / router | |", "|---|---|---|---|---|---|"]
    for one in best:
        cells = (one.workload, EPOCHS[one.epoch], one.arm, HEADINGS[one.figure], _paired(one.ratio), one.verdict)
        rows.append("| " + " | ".join(cells) + " |")
    page.text("\n".join(rows))
    arms = [PRODUCT, *dict.fromkeys(line.arm for line in lines if line.arm != PRODUCT)]
    panels = [
        Panel(f"{workload} {HEADINGS[figure]}", dots_of(lines, workload, figure), 1.0, "bound")
        for workload, figure in (
            ("Q1", "makespan_over_bound"),
            ("Q2", "makespan_over_bound"),
            ("Q3", "critical_over_bound"),
            ("Q4", "makespan_over_bound"),
        )
    ]
    page.plot("wire", "On the wire: rolloutd and the routers' policies", panels, arms)


def _ablation(page: Page, inputs: Inputs) -> None:
    found = inputs.objects.get("ablation")
    if found is None:
        return
    page.text(
        "## What each mechanism carries",
        "Each switched off, on the workloads where it should matter: how much worse the figure is without it (of prefix hits and "
        f"samples/s: how much less), over {found['seeds']} seeds; a mechanism that helps has a positive number. It is called so "
        "where the 95 % interval of the mean leaves out 0; of 20 that do nothing, one is so by chance.",
        "After a workload's name:\n\n" + "\n".join(f"- {word}: {what}" for word, what in found["variants"].items()),
    )
    rows = ["| mechanism | workload | figure | with it | worse without | |", "|---|---|---|---|---|---|"]
    order = {one.name: place for place, one in enumerate(MECHANISMS)}
    ordered = sorted(found["rows"], key=lambda row: order.get(row["mechanism"], len(order)))
    for row in ordered:
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
        epoch = " warm" if row["epoch"] else ""
        worse = summary(row["values"])
        word = "-" if worse is None else verdict(worse)
        cells = (row["mechanism"], row["workload"] + epoch, HEADINGS[row["figure"]], f"{row['on']:.3f}")
        word = f"**{word}**" if word in ("helps", "HARMS") else word
        rows.append("| " + " | ".join((*cells, f"{row['worse']:+.3f}{spread}", word)) + " |")
    page.text("\n".join(rows))
    dots = [
        Dot(f"{row['mechanism']}: {row['workload']}", 100.0 * value / row["on"], row["epoch"])
        for row in ordered
        if row["on"] and row["figure"] == _foremost(row["workload"])
        for value in row["values"]
    ]
    page.plot(
        "ablation",
        "Without the mechanism: how much worse the workload's foremost figure is; right of the line it helps",
        [Panel("percent worse", dots, 0.0)],
        list(dict.fromkeys(dot.row for dot in dots)),
    )
    page.text(
        "Measured elsewhere:\n\n" + "\n".join(f"- {name}: {how}" for name, how in found["measured_elsewhere"].items())
    )


def _foremost(workload: str) -> str:
    return OWN.get(workload.split(" ")[0], ("makespan_over_bound",))[0]


def _scale_and_mix(page: Page, inputs: Inputs) -> None:
    scale, mix = inputs.objects.get("scale"), inputs.objects.get("mix")
    if scale is not None:
        page.text("## More engines")
        rows = ["| engines | rollouts | us per rollout | us per decision | makespan / bound |", "|---|---|---|---|---|"]
        for engines, rollouts in scale["rollouts"].items():
            figures = [scale[name][engines] for name in ("us_per_rollout", "us_per_decision", "makespan_over_bound")]
            rows.append(f"| {int(engines):,} | {rollouts:,} | " + " | ".join(f"{one:.4g}" for one in figures) + " |")
        page.text("\n".join(rows))
        parts = next(reversed(scale["us_per_rollout_by_event"].values()))
        page.text(
            "Of the last row, us per rollout by event: "
            + ", ".join(f"{name} {of:.4g}" for name, of in parts.items())
            + "."
        )
    if mix is not None:
        page.text(
            "## Mixture",
            f"Total variation to the target mix, percentage points, over windows of {mix['window']} rollouts that the trainer "
            f"consumed, {mix['seeds']} seed(s). Whole rollouts alone make {mix['rounding_points']:.2f}. Were each dispatch exactly the "
            "one that the mix lacks, what is consumed as it comes back would still be off, by "
            + ", ".join(f"{of:.2f} ({lengths} lengths)" for lengths, of in mix["in_order_of_mix_points"].items())
            + (
                ": more than the bar, whatever the order. `held` keeps results back (`mix_hold_seconds`)."
                if min(mix["in_order_of_mix_points"].values()) > BAR_POINTS
                else "."
            ),
        )
        heads = {
            "worst_points": "worst window",
            "dispatched_points": "of what was dispatched",
            "makespan_seconds": "makespan, s",
            "samples_per_second": "samples/s",
            "held_seconds": "kept back, mean s",
        }
        rows = ["| lengths | settings | mean | " + " | ".join(heads.values()) + " |", "|---" * (3 + len(heads)) + "|"]
        for lengths, by_settings in mix["mean_points"].items():
            for settings, mean in by_settings.items():
                others = (mix[name][lengths][settings] for name in heads)
                rows.append(
                    f"| {lengths} | {settings} | {mean:.2f} | " + " | ".join(f"{one:.2f}" for one in others) + " |"
                )
        page.text("\n".join(rows))


def _value(bar: Bar) -> str:
    return (
        "-"
        if bar.value is None
        else f"{bar.value:.3g}{bar.unit}"
        if bar.value < 1000
        else f"{bar.value:,.0f}{bar.unit}"
    )


def _limit(bar: Bar) -> str:
    return f"{'at most' if bar.at_most else 'at least'} {bar.limit:.3g}{bar.unit}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    digits = 3 if abs(spread.mean) < 10 else 1
    return f"{spread.mean:.{digits}f}" + ("" if spread.deviation is None else f" ± {spread.deviation:.{digits}f}")


def _paired(ratio: Paired) -> str:
    return f"{ratio.mean:.3f}" + ("" if ratio.deviation is None else f" ± {ratio.deviation:.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, 1 nothing to write from, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--inputs", type=Path, default=FOLDER, help=f"where outputs of benchmarks are (default {FOLDER})"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help=f"default {PAGE}")
    options = parser.parse_args(argv)
    inputs = read_inputs(options.inputs)
    for name, why in sorted(inputs.missing.items()):
        print(f"left out: {name} {why}; `{command(name)}` makes it", file=sys.stderr)
    if not inputs.made:
        print(f"no benchmark has been run here: nothing in {options.inputs}", file=sys.stderr)
        return 1
    make_page(inputs, options.page)
    print(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
