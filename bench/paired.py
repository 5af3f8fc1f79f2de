"""Two ways to serve the same workloads, seed by seed: the mean of their differences, and how sure it is.

Invariants
- Only seeds that both have are compared; what they have in common (prompts, lengths, engines) is in neither mean nor spread.
- Nothing is called a difference that is within `SURE_ERRORS` standard errors of none, or that rests on fewer than `LEAST_SEEDS`.

What this module does not know: what is compared, and which way is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

SURE_ERRORS = 2.0  # about 19 in 20, were the differences normal
LEAST_SEEDS = 3


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
        return self.mean != none and abs(self.mean - none) > SURE_ERRORS * self.error


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
