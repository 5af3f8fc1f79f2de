"""Prefix reuse: the share of the prompt that this engine has and the others lack, as far as computing it is dear.

    prefix = (hit - common) / prompt x dearness

Credit is marginal: what every open engine holds attracts nobody. Dearness is the cost of one prefill of this prompt over
the decode cost of one rollout (WORKLOADS B.3's rho, clipped): where prefill is cheap, balance matters more than reuse.
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts


def score(facts: Facts) -> float:
    if facts.prompt_tokens <= 0:
        return 0.0
    return max(0, facts.hit_tokens - facts.common_tokens) / facts.prompt_tokens * facts.dearness
