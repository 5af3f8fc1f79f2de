"""Pairs: rolloutd and one peer on the same workload, seed and epoch, figure by figure.

Invariants
- A ratio is rolloutd's figure over the peer's, of one pair; means are of ratios, never ratios of means.
- A peer is represented by the policy that is best for it: on one workload and epoch, over all seeds, by that workload's own figure.
- `json_line` has exactly the keys that comparisons outside this repository read.

What this module does not know: how a figure was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.table import Table

from rolloutd.bench.figures import Figures
from rolloutd.bench.peers_arms import ARMS, PRODUCT

KEYS = (
    "arm",
    "workload",
    "seed",
    "epoch",
    "makespan_over_bound",
    "critical_over_bound",
    "reward_p99_seconds",
    "prefix_hit",
    "prefix_hit_ceiling",
    "imbalance",
)
# Heading, and whether more is better.
PAIRED = {
    "makespan_over_bound": ("makespan", False),
    "critical_over_bound": ("critical", False),
    "reward_p99_seconds": ("reward p99", False),
    "session_mean_seconds": ("session mean", False),
    "prefix_hit": ("prefix hit", True),
}
# Closer than this is a draw: two runs of one arm on one seed differ by as much, since requests that are sent at once arrive in
# another order each time.
DRAW = 0.05


def json_line(line: Figures) -> str:
    """One arm on one workload, seed and epoch."""
    values = asdict(line)
    return json.dumps({key: values[key] for key in KEYS}, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """rolloutd against one peer. ratios: figure -> rolloutd's over the peer's, of those that both have and that are not 0."""

    peer: str
    workload: str
    seed: int
    epoch: int
    ratios: dict[str, float]


def pairs(lines: Sequence[Figures]) -> list[Pair]:
    """All pairs, in the order of the peers' lines; a peer's line without its twin of rolloutd's has none."""
    ours = {(line.workload, line.seed, line.epoch): asdict(line) for line in lines if line.arm == PRODUCT}
    found = []
    for line in lines:
        mine = ours.get((line.workload, line.seed, line.epoch))
        if line.arm == PRODUCT or mine is None:
            continue
        theirs = asdict(line)
        ratios = {name: mine[name] / theirs[name] for name in PAIRED if mine[name] is not None and theirs[name]}
        found.append(Pair(line.arm, line.workload, line.seed, line.epoch, ratios))
    return found


def own_figure(lines: Iterable[Figures]) -> str:
    """What a workload is about: sessions where it has them, else its critical work, else all of it."""
    known = [asdict(line) for line in lines]
    for name in ("session_mean_seconds", "critical_over_bound"):
        if any(one[name] is not None for one in known):
            return name
    return "makespan_over_bound"


def best_policies(lines: Sequence[Figures]) -> dict[tuple[str, int, str], str]:
    """(workload, epoch, package) -> the arm of that package with the lowest mean of the workload's own figure."""
    best: dict[tuple[str, int, str], tuple[float, str]] = {}
    for workload, epoch in dict.fromkeys((line.workload, line.epoch) for line in lines):
        here = [line for line in lines if (line.workload, line.epoch) == (workload, epoch) and line.arm != PRODUCT]
        name = own_figure(here)
        for arm in dict.fromkeys(line.arm for line in here):
            values = [value for line in here if line.arm == arm and (value := asdict(line)[name]) is not None]
            if values:
                key = (workload, epoch, ARMS[arm].package)
                best[key] = min(best.get(key, (float("inf"), "")), (fmean(values), arm))
    return {key: arm for key, (_, arm) in best.items()}


def pair_table(lines: Sequence[Figures]) -> Table:
    """Pair by pair; each peer's best policy is marked."""
    best = set(best_policies(lines).items())
    table = Table(
        title="rolloutd / peer, pair by pair (below 1 rolloutd is faster; prefix hit: above 1 is more)",
        title_justify="left",
    )
    for heading in ("workload", "seed", "epoch", "peer"):
        table.add_column(heading, no_wrap=True)
    for heading, _ in PAIRED.values():
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for pair in sorted(pairs(lines), key=lambda one: (one.workload, one.epoch, one.seed)):
        group = (pair.workload, pair.epoch, pair.seed)
        if previous is not None and previous != group:
            table.add_section()
        previous = group
        mark = " *" if ((pair.workload, pair.epoch, ARMS[pair.peer].package), pair.peer) in best else ""
        cells = [f"{pair.ratios[name]:.3f}" if name in pair.ratios else "-" for name in PAIRED]
        table.add_row(pair.workload, str(pair.seed), str(pair.epoch), pair.peer + mark, *cells)
    table.caption = "* the best policy of that router on that workload, over the seeds"
    table.caption_justify = "left"
    return table


def verdicts(lines: Sequence[Figures]) -> list[str]:
    """One sentence per workload, epoch and router: rolloutd against its best policy, losses named as such."""
    paired = pairs(lines)
    sentences = []
    for (workload, epoch, package), arm in best_policies(lines).items():
        against = [pair for pair in paired if (pair.workload, pair.epoch, pair.peer) == (workload, epoch, arm)]
        parts = []
        for name, (heading, more_is_better) in PAIRED.items():
            ratios = [pair.ratios[name] for pair in against if name in pair.ratios]
            if not ratios:
                continue
            mean = fmean(ratios)
            gain = mean - 1.0 if more_is_better else 1.0 - mean
            word = "draws" if abs(gain) <= DRAW else "wins" if gain > 0 else "LOSES"
            spread = "" if len(ratios) == 1 else f", {min(ratios):.3f} to {max(ratios):.3f}"
            parts.append(f"{heading} {word} ({mean:.3f} x{spread})")
        if parts:
            name = f"{workload}, {'warm' if epoch else 'cold'}, against {package}'s best ({arm.partition(':')[2]})"
            sentences.append(f"{name}: {'; '.join(parts)}")
    return sentences


def twin_table(lines: Sequence[Figures], virtual: Sequence[Figures]) -> Table | None:
    """The same arm on the wire and in virtual time, where both exist: what stands between them is process and network."""
    by_key = {(line.arm, line.workload, line.seed, line.epoch): asdict(line) for line in virtual}
    table = Table(title="on the wire / in virtual time, same arm, workload and seed", title_justify="left")
    for heading in ("workload", "seed", "epoch", "arm", "simulated arm"):
        table.add_column(heading, no_wrap=True)
    for heading, _ in PAIRED.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        twin = ARMS[line.arm].twin
        other = by_key.get((twin or "", line.workload, line.seed, line.epoch))
        if other is None:
            continue
        mine = asdict(line)
        cells = [
            f"{mine[name] / other[name]:.3f}" if mine[name] is not None and other[name] else "-" for name in PAIRED
        ]
        table.add_row(line.workload, str(line.seed), str(line.epoch), line.arm, str(twin), *cells)
    return table if table.row_count else None
