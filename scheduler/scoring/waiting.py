"""Waiting time: grows linearly to 1 over `aging_seconds`, so its order among the waiting never changes until it clips."""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    return grown(facts.waited_seconds, facts.aging_seconds)


def grown(waited_seconds: float, aging_seconds: float) -> float:
    """The term from its two numbers alone."""
    return min(1.0, max(0.0, waited_seconds) / aging_seconds) if aging_seconds > 0 else 1.0


def static(queued_at: float, facts: Facts) -> float:
    """The part of minus the score that keeps its distance to others as time passes."""
    return queued_at / facts.aging_seconds if facts.aging_seconds > 0 else 0.0
