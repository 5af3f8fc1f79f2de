"""Computing again what another engine has: the share of the prompt that is cached somewhere but not here, as far as it is dear.

    duplicate = (longest hit of all engines - hit) / prompt x dearness

What nobody has must be computed once wherever it goes, so it costs nothing to take that first and leave this to the engine that
has it. Where only such work waits, it is taken all the same. Counts against, with the weight of the prefix.
"""

from __future__ import annotations

from rolloutd.scheduler.scoring.facts import Facts
from rolloutd.scheduler.scoring.prefix import saved


def score(facts: Facts) -> float:
    return saved(facts.longest_tokens - facts.hit_tokens, facts.prompt_tokens, facts.dearness)
