"""Diversity of the data: how far this stratum is below its target share of what was dispatched lately.

diversity = (target - share) / target, 0 at or above the target
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    return missing(facts.target_share, facts.stratum_share)


def missing(target_share: float, stratum_share: float) -> float:
    """The term from its two numbers alone, for ranking whole strata before any entry is looked at."""
    return max(0.0, target_share - stratum_share) / target_share if target_share > 0.0 else 0.0
