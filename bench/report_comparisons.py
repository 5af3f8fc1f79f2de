"""rolloutd beside each other arm, seed by seed: where it wins, draws and loses.

Invariants
- A ratio is rolloutd's figure over the other's, on the same workload, seed and epoch. Nothing is left out because it is bad.
- The oracle is told what nobody knows; it is compared, but behind it is no loss.

What this module does not know: how figures are measured, how a page looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rolloutd.bench.ablation_mechanisms import MORE_IS_BETTER
from rolloutd.bench.figures import Figures
from rolloutd.bench.paired import LEAST_SEEDS, Paired, ratios
from rolloutd.bench.simulate import PRODUCT

ORACLE = "oracle"
# What each workload is about, the first foremost.
OWN: dict[str, tuple[str, ...]] = {
    "Q1": ("makespan_over_bound",),
    "Q1s": ("makespan_over_bound",),
    "Q2": ("makespan_over_bound", "prefix_hit"),
    # Its makespan is the end of the background.
    "Q3": ("critical_over_bound", "reward_p99_seconds", "reusable_over_bound", "background_over_bound"),
    "Q4": ("session_mean_seconds", "makespan_over_bound", "prefix_hit"),
    "Q5": ("idle_ratio", "samples_per_second"),
    "Q5-off": ("idle_ratio", "samples_per_second"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """ratio: rolloutd's figure over the arm's, per seed. draw: how far from 1 is none (0: only the seeds decide)."""

    workload: str
    epoch: int
    figure: str
    arm: str
    ratio: Paired
    draw: float = 0.0

    @property
    def gain(self) -> float:
        """How much better rolloutd is, as a share; negative: worse."""
        return self.ratio.mean - 1.0 if self.figure in MORE_IS_BETTER else 1.0 - self.ratio.mean

    @property
    def verdict(self) -> str:
        """wins, draws, loses; or ahead, behind where too few seeds, or too unlike ones, say so."""
        if abs(self.gain) <= max(self.draw, 0.0005):
            return "draws"
        better = self.gain > 0.0
        # With a draw given, one pair decides beyond it, as `peers_report` has it.
        if self.draw or self.ratio.sure(1.0):
            return "wins" if better else "LOSES"
        few = len(self.ratio.values) < LEAST_SEEDS
        return ("ahead" if better else "behind") + (", too few seeds to say" if few else ", within the spread")


def comparisons(lines: Sequence[Figures], *, draw: float = 0.0) -> list[Comparison]:
    """Of every workload, epoch, own figure and other arm that has pairs."""
    found = []
    for workload, epoch in dict.fromkeys((line.workload, line.epoch) for line in lines):
        here = [line for line in lines if (line.workload, line.epoch) == (workload, epoch)]
        for figure in OWN.get(workload, ("makespan_over_bound",)):
            ours = _by_seed(here, PRODUCT, figure)
            for arm in dict.fromkeys(line.arm for line in here if line.arm != PRODUCT):
                ratio = ratios(ours, _by_seed(here, arm, figure))
                if ratio is not None:
                    found.append(Comparison(workload, epoch, figure, arm, ratio, draw))
    return found


def losses(found: Sequence[Comparison]) -> list[Comparison]:
    """Where rolloutd is worse than somebody who knows no more than it does, surest and largest first."""
    worse = [one for one in found if one.verdict.startswith(("LOSES", "behind")) and one.arm != ORACLE]
    return sorted(worse, key=lambda one: (one.verdict != "LOSES", one.gain))


def _by_seed(lines: Sequence[Figures], arm: str, figure: str) -> dict[int, float]:
    return {
        line.seed: float(value) for line in lines if line.arm == arm and (value := asdict(line)[figure]) is not None
    }
