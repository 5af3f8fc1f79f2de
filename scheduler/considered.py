"""What a dispatch was chosen from: numbers kept as they were, told in words only when somebody asks.

Invariants
- Reading changes nothing; the terms are the same pure functions of the same numbers that the choice was made with.

What this module does not know: why an engine was not considered at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.scoring import TERMS, Facts, clamp

CANDIDATES_TOLD: Final = 4  # engines a decision tells about


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine that was considered, with the value of each score term (already in [0,1], before weights)."""

    engine_id: str
    hit_tokens: int
    terms: dict[str, float]
    score: float


@mypyc_attr(acyclic=True)
class Row:
    """One engine as the choice saw it, for the entry that was chosen. (A plain class: made for every pair that is scored.)"""

    __slots__ = ("dearness", "engine_id", "hit_tokens", "kv_fill", "score", "siblings", "slots_fill")

    def __init__(
        self,
        engine_id: str,
        score: float,
        hit_tokens: int,
        dearness: float,
        slots_fill: float,
        kv_fill: float,
        siblings: int,
    ) -> None:
        self.engine_id = engine_id
        self.score = score
        self.hit_tokens = hit_tokens
        self.dearness = dearness
        self.slots_fill = slots_fill
        self.kv_fill = kv_fill
        self.siblings = siblings

    def __repr__(self) -> str:
        numbers = (self.score, self.hit_tokens, self.dearness, self.slots_fill, self.kv_fill, self.siblings)
        return f"Row({self.engine_id!r}, {numbers})"


@mypyc_attr(acyclic=True)
class Considered:
    """facts: the entry's side; its engine side is filled from a row when the terms are asked for. Left out of the words for it, which
    would name an address: events and actions in words are what runs are compared by."""

    __slots__ = ("facts", "rows")

    def __init__(self, facts: Facts, rows: list[Row]) -> None:
        self.facts = facts
        self.rows = rows

    def __repr__(self) -> str:
        return f"Considered(rows={self.rows!r})"

    def candidates(self) -> tuple[Candidate, ...]:
        """The best few, best first."""
        facts = self.facts
        told = []
        for row in sorted(self.rows, key=lambda one: -one.score)[:CANDIDATES_TOLD]:
            facts.hit_tokens, facts.dearness = row.hit_tokens, row.dearness
            facts.slots_fill, facts.kv_fill, facts.siblings = row.slots_fill, row.kv_fill, row.siblings
            terms = {term.name: round(clamp(term.score(facts)), 4) for term in TERMS}
            told.append(Candidate(row.engine_id, row.hit_tokens, terms, round(row.score, 5)))
        return tuple(told)


NOTHING: Final = Considered(Facts(), [])
