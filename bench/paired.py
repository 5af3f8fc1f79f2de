"""Two ways to serve the same workloads, seed by seed: the mean of their differences, and how sure it is.

Invariants
- Only seeds that both have are compared; what they have in common (prompts, lengths, engines) is in neither mean nor spread.
- Nothing is called a difference whose 95 % interval (Student's t) reaches none, or that rests on fewer than `LEAST_SEEDS`. Of 20
  comparisons of like with like one is called a difference all the same.

What this module does not know: what is compared, and which way is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEAST_SEEDS = 3
# Student's t: standard errors to either side that hold 95 %, for 1 to 10 degrees of freedom, then what holds for more.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T_MORE = 2.2


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences or ratios, one per seed. deviation: one standard deviation of them, None of one seed."""

    values: tuple[float, ...]
    mean: float
    deviation: float | None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None of one seed."""
        return None if self.deviation is None else self.deviation / math.sqrt(len(self.values))

    def sure(self, none: float = 0.0) -> bool:
        """Whether the mean is further from `none` (0 of differences, 1 of ratios) than the seeds explain."""
        if self.error is None or len(self.values) < LEAST_SEEDS:
            return False
        freedom = len(self.values) - 1
        errors = _T[freedom - 1] if freedom <= len(_T) else _T_MORE
        return abs(self.mean - none) > errors * self.error


def summary(values: Sequence[float]) -> Paired | None:
    """Of values per seed; None of none."""
    if not values:
        return None
    return Paired(tuple(values), fmean(values), stdev(values) if len(values) > 1 else None)


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """ours - theirs over the seeds of both, in order of seeds; None where they share none."""
    return summary([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """ours / theirs likewise; seeds where theirs is 0 are left out."""
    return summary([ours[seed] / theirs[seed] for seed in sorted(ours.keys() & theirs.keys()) if theirs[seed]])
