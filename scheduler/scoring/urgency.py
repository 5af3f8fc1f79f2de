"""Urgency of the training step: how much later the step ends if this waits.

With a deadline: 1 - slack / HORIZON_SECONDS, where slack = deadline - now - expected running time.
Without one, for CRITICAL work: ln(worst) / ln(LONGEST_TOKENS), where worst is what the rollout may still write at worst: a step
ends with its slowest rollout, so what may take longest goes first. The scale is fixed, so keys made at different times compare.
For other classes (1 + that) / (2 x steps until needed), so the nearest step goes first and in it what may take longest. Where
nobody needs it by a step a little of that is left: among equals, what takes longest decides when all of it is done.
"""

from __future__ import annotations

import math
from typing import Final

from rolloutd.scheduler.scoring.facts import Facts
from rolloutd.scheduler.states import RolloutClass

HORIZON_SECONDS: Final = 60.0  # a slack beyond this is no hurry
LONGEST_TOKENS: Final = 131_072  # outputs beyond this are as urgent as this
LEAST_NEEDED: Final = 0.05  # however far the step is
UNNEEDED: Final = 0.05
LOG_LONGEST: Final = math.log(LONGEST_TOKENS)


def score(facts: Facts) -> float:
    if facts.slack_seconds is not None:
        return timed(facts.slack_seconds)
    return _untimed(facts)


def static(deadline_at: float | None, facts: Facts) -> float:
    """The part of minus the score that keeps its distance to others of the same kind as time passes."""
    if deadline_at is not None:
        return (deadline_at - facts.expected_seconds) / HORIZON_SECONDS
    return -_untimed(facts)


def _untimed(facts: Facts) -> float:
    if facts.rollout_class is RolloutClass.CRITICAL:
        return untimed(facts.worst_tokens)
    return later(facts.steps_away, facts.worst_tokens)


def timed(slack_seconds: float) -> float:
    """With a deadline."""
    return min(1.0, max(0.0, 1.0 - slack_seconds / HORIZON_SECONDS))


def untimed(worst_tokens: float) -> float:
    """CRITICAL without a deadline."""
    return min(1.0, math.log(max(1.0, worst_tokens)) / LOG_LONGEST)


def later(steps_away: int | None, worst_tokens: float) -> float:
    """Of other classes."""
    longest = untimed(worst_tokens)
    return UNNEEDED * longest if steps_away is None else max(LEAST_NEEDED, 0.5 / max(1, steps_away)) * (1.0 + longest)
