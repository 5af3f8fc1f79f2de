"""The weighted score: which terms there are. Each term is one pure function in a file of its own.

    score = sum over terms of weight x term, where cost counts against

A term maps `Facts` to [0,1]; the caller's clamp makes sure of it. Terms that do not depend on the engine are computed once
per entry. To change a term touch its file; to add one, add a file, a row in `TERMS`, a weight of the same name, and its product
in `total.py`, which spells out the sum: that is the hot path, and a test compares it with `TERMS`. (Nothing of it is here because
an `__init__.py` is not compiled.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rolloutd.scheduler.scoring import cost, crowding, diversity, duplicate, prefix, urgency, waiting
from rolloutd.scheduler.scoring.facts import Facts
from rolloutd.scheduler.scoring.total import (
    EntryTerms,
    Weights,
    clamp,
    engine_score,
    engine_total,
    entry_score,
    static_key,
)

__all__ = [
    "TERMS",
    "EntryTerms",
    "Facts",
    "Term",
    "Weights",
    "clamp",
    "engine_score",
    "engine_total",
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
    Term("duplicate", "prefix", -1, True, duplicate.score),
    Term("urgency", "critical", 1, False, urgency.score),
    Term("waiting", "waiting", 1, False, waiting.score),
    Term("diversity", "diversity", 1, False, diversity.score),
    Term("cost", "cost", -1, True, cost.score),
    Term("crowding", "cost", -1, True, crowding.score),
)
