"""The rules of routers: which engine gets a request that has just arrived.

Invariants
- Ties go to the engine that joined first, so a rule is deterministic.
- A rule looks at what a router can know: requests in flight, prompts sent before, session ids.

What this module does not know: sending.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.bench.arms.pool import ArmEngine, ArmRollout
from rolloutd.bench.arms.routing import Rule

# Defaults of SGLang's router and of smg: below this share of the prompt a match counts for nothing; loads are out of balance when
# the fullest has so many more than the emptiest, and so many times as many.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


def least_in_flight(_: ArmRollout, engines: Sequence[ArmEngine]) -> ArmEngine:
    """The one with the fewest requests that have not ended."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.number))


def round_robin() -> Rule:
    """One after the other."""
    turn = -1

    def rule(_: ArmRollout, engines: Sequence[ArmEngine]) -> ArmEngine:
        nonlocal turn
        turn += 1
        return engines[turn % len(engines)]

    return rule


def sticky() -> Rule:
    """A session stays where its first turn went, the least loaded then; what has no session goes to the least loaded."""
    homes: dict[str, ArmEngine] = {}

    def rule(rollout: ArmRollout, engines: Sequence[ArmEngine]) -> ArmEngine:
        session_id = rollout.spec.session_id
        if not session_id:
            return least_in_flight(rollout, engines)
        if session_id not in homes:
            homes[session_id] = least_in_flight(rollout, engines)
        return homes[session_id]

    return rule


def prefix_first(rollout: ArmRollout, engines: Sequence[ArmEngine]) -> ArmEngine:
    """The longest prefix that was sent somewhere before, whatever the load; among equals the least loaded."""
    prompt = rollout.spec.token_bytes
    return min(engines, key=lambda one: (-one.matched_tokens(prompt), one.in_flight, one.number))


def cache_aware(rollout: ArmRollout, engines: Sequence[ArmEngine]) -> ArmEngine:
    """Balanced loads: the longest prefix where it is long enough, else, and out of balance, the least loaded."""
    loads = [engine.in_flight for engine in engines]
    most, least = max(loads), min(loads)
    if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
        return least_in_flight(rollout, engines)
    best = prefix_first(rollout, engines)
    if best.matched_tokens(rollout.spec.token_bytes) > CACHE_THRESHOLD * rollout.spec.prompt_tokens:
        return best
    return least_in_flight(rollout, engines)
