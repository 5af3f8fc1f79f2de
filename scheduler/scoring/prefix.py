"""Prefix reuse: the share of the prompt that this engine has and the others lack, as far as computing it is dear.

    prefix = (hit - common) / prompt x dearness

Credit is marginal: what every open engine holds attracts nobody. Dearness is the cost of one prefill of this prompt over
the decode cost of one rollout (`dearness`): where prefill is cheap, balance matters more than reuse.
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    return saved(facts.hit_tokens - facts.common_tokens, facts.prompt_tokens, facts.dearness)


def saved(uncommon_tokens: int, prompt_tokens: int, dearness: float) -> float:
    """The term from its numbers alone; fewer than 0 uncommon tokens count as none."""
    return max(0, uncommon_tokens) / prompt_tokens * dearness if prompt_tokens > 0 else 0.0
