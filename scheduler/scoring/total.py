"""The weighted score spelled out: what the hot path of `choosing` adds up, with the terms of `TERMS` inlined.

Invariants
- `entry_score` + `engine_score` is the sum of all `TERMS` under their weights; `EntryTerms` and `engine_total` give the
  same from plain numbers, without filling `Facts`. A test compares them.

What this module does not know: entries and engines.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.scoring import cost, crowding, diversity, duplicate, prefix, urgency, waiting
from rolloutd.scheduler.scoring.facts import Facts
from rolloutd.scheduler.states import RolloutClass


@mypyc_attr(acyclic=True)
class Weights:
    """Weights in force for one run. A plain class, because the hot path reads it by attribute."""

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
    reuse = clamp(prefix.score(facts)) - clamp(duplicate.score(facts))
    return weights.prefix * reuse - weights.cost * (clamp(cost.score(facts)) + clamp(crowding.score(facts)))


def clamp(value: float) -> float:
    """Into [0,1]; a NaN (a bug in a term) becomes 0 so that order stays total."""
    return value if 0.0 <= value <= 1.0 else (1.0 if value > 1.0 else 0.0)


def static_key(facts: Facts, queued_at: float, deadline_at: float | None, weights: Weights) -> float:
    """The part of minus the score that does not move relative to other entries of the same lane; lower goes first."""
    return weights.waiting * waiting.static(queued_at, facts) + weights.critical * urgency.static(deadline_at, facts)


@mypyc_attr(acyclic=True)
class EntryTerms:
    """`entry_score` for many entries of one class and pool at one moment."""

    __slots__ = ("_aging_seconds", "_critical", "_is_critical", "_now", "_token_seconds", "_waiting")

    def __init__(
        self, weights: Weights, rollout_class: RolloutClass, now: float, aging_seconds: float, token_seconds: float
    ) -> None:
        self._critical = weights.critical
        self._waiting = weights.waiting
        self._is_critical = rollout_class is RolloutClass.CRITICAL
        self._now = now
        self._aging_seconds = aging_seconds
        self._token_seconds = token_seconds

    def score(
        self,
        queued_at: float,
        deadline_at: float | None,
        expected_tokens: float,
        worst_tokens: float,
        steps_away: int | None,
        diverse: float,
    ) -> float:
        """diverse: what the entry's stratum is worth now, weight included."""
        if deadline_at is not None:
            urgent = urgency.timed(deadline_at - self._now - expected_tokens * self._token_seconds)
        elif self._is_critical:
            urgent = urgency.untimed(worst_tokens)
        else:
            urgent = urgency.later(steps_away, worst_tokens)
        waited = waiting.grown(self._now - queued_at, self._aging_seconds)
        return self._critical * clamp(urgent) + self._waiting * clamp(waited) + diverse


def engine_total(
    weights: Weights,
    uncommon_tokens: int,
    missing_tokens: int,
    prompt_tokens: int,
    dearness: float,
    slots_fill: float,
    kv_fill: float,
    siblings: int,
) -> float:
    """`engine_score` from plain numbers. uncommon_tokens: of the hit, those that not every engine has.

    missing_tokens: of the longest hit, what is not cached here.
    """
    served = slots_fill if slots_fill > kv_fill else kv_fill
    reuse = clamp(prefix.saved(uncommon_tokens, prompt_tokens, dearness))
    if missing_tokens > 0:
        reuse -= clamp(prefix.saved(missing_tokens, prompt_tokens, dearness))
    against = clamp(served)
    if siblings > 0:
        against += clamp(crowding.crowded(siblings, dearness))
    return weights.prefix * reuse - weights.cost * against
