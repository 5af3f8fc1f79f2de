"""Which engines of a pool have a slot free: kept as permits come and go, so that nobody has to look through a full fleet.

Invariants
- An engine is in `free` when it has a slot for short work, and in `long` when it has one that long work may take while
  short slots are kept back. Whether it is open at all (ready, not lost, breaker shut) is not looked at here.
- Order is that of becoming free: the same events give the same order.

What this module does not know: runs, labels, memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine


class Room:
    """Of one pool. `members`: all its engines, by their name in the prefix index.

    `reserved_short`: slots per engine that long work leaves alone now. `short_seen_at`: when short work last came.
    """

    __slots__ = ("free", "long", "members", "paced_by", "reserved_short", "short_seen_at")

    def __init__(self) -> None:
        self.reserved_short = 0
        self.short_seen_at = -math.inf
        self.members: dict[str, Engine] = {}
        self.paced_by: Engine | None = None  # the first of them whose decoding speed was measured
        self.free: dict[Engine, None] = {}
        self.long: dict[Engine, None] = {}

    def join(self, engine: Engine) -> None:
        self.members[engine.cache_key] = engine
        engine.room = self
        self.note_pace(engine)
        self.note(engine)

    def leave(self, engine: Engine) -> None:
        self.members.pop(engine.cache_key, None)
        self.free.pop(engine, None)
        self.long.pop(engine, None)
        engine.room = None
        if self.paced_by is engine:
            self.paced_by = None
            for other in self.members.values():
                self.note_pace(other)

    def note_pace(self, engine: Engine) -> None:
        """An engine's speed was measured."""
        if self.paced_by is None and engine.decode_seconds_per_token:
            self.paced_by = engine

    def keep_back(self, reserved_short: int) -> None:
        """From now on long work leaves so many slots per engine alone."""
        if reserved_short != self.reserved_short:
            self.reserved_short = reserved_short
            for engine in self.members.values():
                self.note(engine)

    def note(self, engine: Engine) -> None:
        """Something that the engine's free slots depend on changed."""
        if engine.facts.slots > engine.slots_used:
            self.free[engine] = None
        else:
            self.free.pop(engine, None)
        if engine.free_slots(False, self.reserved_short) > 0:
            self.long[engine] = None
        else:
            self.long.pop(engine, None)
