"""Crowding: siblings that run on this engine already, where their prompt is cheap to compute again.

    crowding = siblings / CROWD where dearness < SPREAD_BELOW, else 0

Siblings' lengths are alike (71 % of the variance of log-length lies between prompts), so together the long ones make one engine the
last. Counts against, with the weight of cost: it is a cost of serving here.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler.scoring.facts import Facts

SPREAD_BELOW: Final = 0.1  # of dearness; below it a prefix is not worth staying together for
CROWD: Final = 4  # siblings that count as the worst


def score(facts: Facts) -> float:
    return crowded(facts.siblings, facts.dearness)


def crowded(siblings: int, dearness: float) -> float:
    """The term from its two numbers alone."""
    return siblings / CROWD if dearness < SPREAD_BELOW else 0.0
