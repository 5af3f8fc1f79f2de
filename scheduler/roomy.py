"""Engines that take work of one run and kind (short or long) now, and what is worked out of them once for a whole pass.

Invariants
- Valid within one pass of the placement: nothing but what the pass books changes engines, and it says so (`Pass.booked`).
- `keepers`: those that keep room for somebody, as of the begin of the pass.
- `mask` has the bits of `engines` in the prefix index; `keys` their names there, in the same order.

What this module does not know: entries, scores.
"""

from __future__ import annotations

from rolloutd.scheduler import gates
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.world import World


class Roomy:
    __slots__ = ("engines", "keepers", "keys", "least_fill", "mask")

    def __init__(self, world: World, engines: list[Engine]) -> None:
        self.engines = engines
        self.keys = [engine.cache_key for engine in engines]
        self.mask = 0
        self.keepers = [engine for engine in engines if engine.reserved_for is not None]
        self.least_fill = 1.0  # of slots, once one more runs on the emptiest; it does not fall within a pass
        index = world.index
        for engine in engines:
            self.mask |= index.flag(engine.cache_key)
            fill = (engine.slots_used + 1) / engine.facts.slots
            if fill < self.least_fill:
                self.least_fill = fill

    def leave(self, world: World, engine: Engine) -> None:
        """It takes no more of this."""
        if engine in self.engines:
            place = self.engines.index(engine)
            del self.engines[place]
            del self.keys[place]
            self.mask ^= self.mask & world.index.flag(engine.cache_key)
            if engine in self.keepers:
                self.keepers.remove(engine)


class Pass:
    """`roomy`: by run and kind, for whom it was asked so far."""

    __slots__ = ("_spaces", "_world", "roomy")

    def __init__(self, world: World) -> None:
        self._world = world
        self._spaces: dict[Engine, dict[Run, gates.Space]] = {}
        self.roomy: dict[tuple[Run, bool], Roomy] = {}

    def space(self, run: Run, engine: Engine) -> gates.Space:
        """What the engine has left for the run; of use until something is booked there."""
        spaces = self._spaces.get(engine)
        if spaces is None:
            spaces = self._spaces[engine] = {}
        space = spaces.get(run)
        if space is None:
            space = spaces[run] = gates.Space(self._world, run, engine)
        return space

    def booked(self, engine: Engine) -> None:
        """One more runs there."""
        self._spaces.pop(engine, None)
        room = engine.room
        takes_short = takes_long = False
        if room is not None and engine.is_open(self._world.now):
            takes_short, takes_long = engine in room.free, engine in room.long
            if takes_short and takes_long:
                return
        for (_, short), roomy in self.roomy.items():
            if not (takes_short if short else takes_long):
                roomy.leave(self._world, engine)
