"""Urgency of the training step: how much later the step ends if this waits.

With a deadline: 1 - slack / HORIZON_SECONDS, where slack = deadline - now - expected running time (WORKLOADS B.12).
Without one, for CRITICAL work: expected / (expected + mean output), so the longest go first; a step ends with its slowest
rollout. For other classes: 1 / (2 x steps until needed); 0 where nobody needs it by a step.
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts
from rolloutd.scheduler.states import RolloutClass

HORIZON_SECONDS = 60.0  # a slack beyond this is no hurry


def score(facts: Facts) -> float:
    if facts.slack_seconds is not None:
        return min(1.0, max(0.0, 1.0 - facts.slack_seconds / HORIZON_SECONDS))
    return _untimed(facts)


def static(deadline_at: float | None, facts: Facts) -> float:
    """The part of minus the score that keeps its distance to others of the same kind as time passes."""
    if deadline_at is not None:
        return (deadline_at - facts.expected_seconds) / HORIZON_SECONDS
    return -_untimed(facts)


def _untimed(facts: Facts) -> float:
    if facts.rollout_class is RolloutClass.CRITICAL:
        return facts.expected_tokens / (facts.expected_tokens + facts.mean_tokens) if facts.mean_tokens > 0 else 0.0
    if facts.steps_away is not None:
        return 0.5 / max(1, facts.steps_away)
    return 0.0
