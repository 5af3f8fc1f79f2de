"""The weighted score: which terms there are. Each term is one pure function in a file of its own.

    score = sum over terms of weight x term, where cost counts against

A term maps `Facts` to [0,1]; the caller's clamp makes sure of it. Terms that do not depend on the engine are computed once
per entry. To change a term touch its file; to add one, add a file, a row in `TERMS`, a weight of the same name, and its product
in `entry_score` or `engine_score`: these spell out the sum, which is the hot path, and a test compares them with `TERMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rolloutd.scheduler.scoring import cost, diversity, prefix, urgency, waiting
from rolloutd.scheduler.scoring.facts import Facts

__all__ = [
    "TERMS",
    "Facts",
    "Term",
    "Weights",
    "clamp",
    "engine_score",
    "entry_score",
    "static_key",
]


class Term(NamedTuple):
    """weight: name of the weight in configuration; sign: +1 benefit, -1 cost."""

    name: str
    weight: str
    sign: int
    per_engine: bool
    score: Callable[[Facts], float]


TERMS: tuple[Term, ...] = (
    Term("prefix", "prefix", 1, True, prefix.score),
    Term("urgency", "critical", 1, False, urgency.score),
    Term("waiting", "waiting", 1, False, waiting.score),
    Term("diversity", "diversity", 1, False, diversity.score),
    Term("cost", "cost", -1, True, cost.score),
)


class Weights:
    """What each term counts."""

    __slots__ = ("cost", "critical", "diversity", "prefix", "waiting")

    def __init__(self, prefix: float, critical: float, waiting: float, diversity: float, cost: float) -> None:
        self.prefix = prefix
        self.critical = critical
        self.waiting = waiting
        self.diversity = diversity
        self.cost = cost


def entry_score(facts: Facts, weights: Weights) -> float:
    """The part of the score that no engine changes."""
    return (
        weights.critical * clamp(urgency.score(facts))
        + weights.waiting * clamp(waiting.score(facts))
        + weights.diversity * clamp(diversity.score(facts))
    )


def engine_score(facts: Facts, weights: Weights) -> float:
    """The part of the score that depends on the engine."""
    return weights.prefix * clamp(prefix.score(facts)) - weights.cost * clamp(cost.score(facts))


def clamp(value: float) -> float:
    """Into [0,1]; a NaN (a bug in a term) becomes 0 so that order stays total."""
    return value if 0.0 <= value <= 1.0 else (1.0 if value > 1.0 else 0.0)


def static_key(facts: Facts, queued_at: float, deadline_at: float | None, weights: Weights) -> float:
    """The part of minus the score that does not move relative to other entries of the same lane; lower goes first."""
    return weights.waiting * waiting.static(queued_at, facts) + weights.critical * urgency.static(deadline_at, facts)
