"""Later turns of a session wait for the engine that has their context.

Elsewhere the context would be computed again and push another session's out of a cache, whose next turn then computes that again:
where sessions need more memory than there is, one that moves makes the next ones move. So a turn stays out of other engines while
one has more of its context and lacks no more than room, for at most `scheduler.session_patience_seconds`. What an engine has is what
the index says, so a session whose context was evicted while its tool ran is free to go anywhere.

Invariants
- Asking books nothing but since when an entry waits; who waits stands in a lane with others that do (`lanes`).
- Interrupted rollouts do not wait here: their score says where to go on.

What this module does not know: scores, and who else may have the room.
"""

from __future__ import annotations

from rolloutd.scheduler import grouping
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.world import World


def waits(world: World, entry: Entry, missing_tokens: int) -> bool:
    """Whether a later turn stays out of an engine that has so many tokens less of its context than another one."""
    settings = world.config.queue
    if missing_tokens < settings.min_shared_tokens or not settings.session_patience_seconds:
        return False
    return grouping.within(world, entry, settings.session_patience_seconds)
