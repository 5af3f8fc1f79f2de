"""The weighted score: which terms there are. Each term is one pure function in a file of its own.

    score = sum over terms of weight x term, where cost counts against

A term maps `Facts` to [0,1]; the caller's clamp makes sure of it. Terms that do not depend on the engine are computed once
per entry. To change a term touch its file; to add one, add a file and a row here, and a weight of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rolloutd.scheduler.scoring import cost, diversity, prefix, urgency, waiting
from rolloutd.scheduler.scoring.facts import Facts

__all__ = [
    "ENGINE_TERMS",
    "ENTRY_TERMS",
    "TERMS",
    "Facts",
    "Term",
    "clamp",
    "SignedTerms",
    "signed",
    "static_key",
    "weighted",
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


ENTRY_TERMS = tuple(term for term in TERMS if not term.per_engine)
ENGINE_TERMS = tuple(term for term in TERMS if term.per_engine)


SignedTerms = Sequence[tuple[float, Callable[[Facts], float]]]  # (signed weight, term)


def signed(terms: tuple[Term, ...], weights: Mapping[str, float]) -> SignedTerms:
    """Terms with their weights, costs against."""
    return tuple((term.sign * weights[term.weight], term.score) for term in terms)


def weighted(terms: SignedTerms, facts: Facts) -> float:
    """Sum over some terms of signed weight x term. On the hot path: a term within its bounds is not clamped."""
    total = 0.0
    for weight, term in terms:
        value = term(facts)
        total += weight * (value if 0.0 <= value <= 1.0 else clamp(value))
    return total


def clamp(value: float) -> float:
    """Into [0,1]; a NaN (a bug in a term) becomes 0 so that order stays total."""
    return value if 0.0 <= value <= 1.0 else (1.0 if value > 1.0 else 0.0)


def static_key(facts: Facts, queued_at: float, deadline_at: float | None, weights: Mapping[str, float]) -> float:
    """The part of minus the score that does not move relative to other entries of the same lane; lower goes first."""
    return weights["waiting"] * waiting.static(queued_at, facts) + weights["critical"] * urgency.static(
        deadline_at, facts
    )
