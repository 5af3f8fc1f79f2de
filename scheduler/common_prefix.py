"""Tokens of a prompt that every live engine has: they favour nobody (`scheduler.marginal_credit` off: they are not looked for).

Invariants
- The work does not grow with the number of engines, but for prompts that only some engines can take at all.

What this module does not know: scores.
"""

from __future__ import annotations

from rolloutd.scheduler import gates
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.world import World


def common_hit(world: World, entry: Entry) -> int:
    """Of the entry's prompt, what all live engines hold that could serve it; 0 where that is one engine."""
    having = 0
    for holders, _ in entry.segments:
        having |= holders
    everyone = _servers(world, entry)
    # Asked first: mostly some engine has nothing of it. (Masks of many engines are long numbers, and each operation counts.)
    if having & everyone != everyone or not everyone & (everyone - 1):
        return 0
    having = 0
    for holders, tokens in entry.segments:  # longest first
        having |= holders
        if not everyone & ~having:
            return tokens
    return 0


def _servers(world: World, entry: Entry) -> int:
    """Bits in the prefix index of the live engines that could run the entry's first member when they are empty."""
    shape = world.pool_shape(entry.run, entry.pool, entry.key.labels)
    if entry.text is not None or not shape.mask:
        return shape.mask
    remaining = entry.members[0].remaining_tokens
    if entry.prompt_tokens <= shape.least_prompt and entry.prompt_tokens + remaining <= shape.least_whole:
        return shape.mask
    mask = 0
    for engine in shape.engines:
        if gates.could_serve(world, entry, engine, remaining):
            mask |= world.index.flag(engine.cache_key)
    return mask
