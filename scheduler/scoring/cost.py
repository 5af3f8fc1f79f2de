"""Cost of serving here: how full the engine would be, the fuller of slots and KV."""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    return max(facts.slots_fill, facts.kv_fill)
