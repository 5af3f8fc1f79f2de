"""Diversity of the data: how far this stratum is below its target share of what was dispatched lately.

diversity = (target - share) / target, 0 at or above the target
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    if facts.target_share <= 0.0:
        return 0.0
    return max(0.0, facts.target_share - facts.stratum_share) / facts.target_share
