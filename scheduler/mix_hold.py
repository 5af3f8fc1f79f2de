"""Results of one run that are kept back until strata behind the target mix catch up.

What runs longer comes back later, so results do not come in the mix in which their rollouts were sent. A result whose stratum is
ahead waits here while something of a stratum that is behind is still coming.

Invariants
- A result goes when the next turn of its stratum comes before that of every stratum of which something is coming (`ShareClock`):
  what is delivered is less than one rollout of each stratum off the mix, unless a bound lets something go.
- Only work of its own class or a more urgent one is waited for, and what is queued only where an engine takes such work.
- Results of one stratum and class go in the order in which they came.
- `most_results` and `most_bytes` bound what is held, `seconds` how long.

What this module does not know: consumers, and when nothing may be kept back at all (`delivering`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from rolloutd.scheduler.share_clock import ShareClock
from rolloutd.scheduler.spec import RolloutSpec, label_key
from rolloutd.scheduler.staleness import bound
from rolloutd.scheduler.states import RolloutClass, RolloutState

if TYPE_CHECKING:
    from rolloutd.scheduler.rollout import Rollout
    from rolloutd.scheduler.timers import Timer

MEMORY_TURNS: Final = 32.0  # made good after a stratum was late: an eighth of the window over which a mixture is judged
MOST_RESULTS: Final = 512  # held at once: two such windows
IN_FLIGHT: Final = frozenset({RolloutState.DISPATCHED, RolloutState.RUNNING, RolloutState.ABORTING})

Lane = tuple[str, RolloutClass]
Place = tuple[str, tuple[tuple[str, str], ...]]  # pool and labels: where something may run
Queued = tuple[str, RolloutClass, Place]
Key = TypeVar("Key", bound=Hashable)


class MixHold:
    __slots__ = (
        "_clock",
        "_lanes",
        "_queued",
        "_running",
        "_served",
        "held",
        "places_mark",
        "seconds",
        "size_bytes",
        "target",
        "timer",
    )

    def __init__(self, target: Mapping[str, float], seconds: float) -> None:
        """target: stratum -> share. seconds: the longest that a result is held."""
        self.target = dict(target)
        self.seconds = seconds
        self.held: dict[Rollout, float] = {}  # -> since when, oldest first
        self.size_bytes = 0  # of their results
        self.timer: Timer | None = None  # when the oldest must go
        self._clock = ShareClock(target, MEMORY_TURNS)
        self._lanes: dict[Lane, dict[Rollout, None]] = {}  # of what is held
        self._running: dict[Lane, int] = {}  # rollouts on engines; never 0
        self._queued: dict[Queued, int] = {}  # rollouts that wait; never 0
        self._served: dict[Place, bool] = {}  # whether an engine takes what is queued for it, as of `places_mark`
        self.places_mark = -1  # -1: something is queued for another place since

    # what is coming ----------------------------------------------------------------------------------------------------

    def counts(self, rollout: Rollout) -> bool:
        """Whether the mix is about it: a sample to train on, of a stratum with a share."""
        return rollout.spec.stratum in self._clock.strides and bound(rollout)

    def note_state(self, rollout: Rollout, before: RolloutState | None, after: RolloutState) -> None:
        """It was accepted (`before` None), moved, or ended."""
        if not self.counts(rollout):
            return
        if before is not None:
            self._count(rollout, rollout.rollout_class, before, -1)
        self._count(rollout, rollout.rollout_class, after, 1)

    def note_class(self, rollout: Rollout, before: RolloutClass) -> None:
        """One that has not ended is of another class now."""
        if not self.counts(rollout):
            return
        self._count(rollout, before, rollout.state, -1)
        self._count(rollout, rollout.rollout_class, rollout.state, 1)

    def coming(self) -> tuple[dict[Queued, int], dict[Lane, int]]:
        """(queued by stratum, class and place; running by stratum and class); for checks."""
        return self._queued, self._running

    def places(self) -> list[Place]:
        """Where something is queued for, each once."""
        return list({place: None for _, _, place in self._queued})

    def note_places(self, served: dict[Place, bool]) -> None:
        """Whether an engine takes what is queued for each of `places`."""
        self._served = served

    def _count(self, rollout: Rollout, rollout_class: RolloutClass, state: RolloutState, change: int) -> None:
        spec = rollout.spec
        if state in IN_FLIGHT:
            _add(self._running, (spec.stratum, rollout_class), change)
        elif state is RolloutState.QUEUED:
            place = place_of(spec)
            _add(self._queued, (spec.stratum, rollout_class, place), change)
            if place not in self._served:
                self.places_mark = -1

    # what is held ------------------------------------------------------------------------------------------------------

    def keep(self, rollout: Rollout, now: float, size_bytes: int) -> None:
        self.held[rollout] = now
        self.size_bytes += size_bytes
        self._lanes.setdefault((rollout.spec.stratum, rollout.rollout_class), {})[rollout] = None

    def leave(self, rollout: Rollout, size_bytes: int) -> None:
        del self.held[rollout]
        self.size_bytes -= size_bytes
        lane = (rollout.spec.stratum, rollout.rollout_class)
        del self._lanes[lane][rollout]
        if not self._lanes[lane]:
            del self._lanes[lane]

    def note_delivered(self, rollout: Rollout) -> None:
        """A result to train on went to its consumer."""
        if self.counts(rollout):
            self._clock.take(rollout.spec.stratum)

    def is_ahead(self, rollout: Rollout, only_running: bool) -> bool:
        """Whether its stratum's turn comes after that of one of which something is coming.

        only_running: what is queued does not start for now, so it is not waited for.
        """
        return self._clock.finish(rollout.spec.stratum) > self._bars(only_running)[rollout.rollout_class]

    def next(self, only_running: bool) -> Rollout | None:
        """Of what is held, the one that may go and goes first."""
        clock = self._clock
        bars = self._bars(only_running) if self._lanes else []
        best: Rollout | None = None
        least = math.inf
        for (stratum, rollout_class), lane in self._lanes.items():
            finish = clock.finish(stratum)
            if finish > bars[rollout_class]:
                continue
            if best is None or finish < least or (finish == least and rollout_class < best.rollout_class):
                best, least = next(iter(lane)), finish
        return best

    def oldest(self) -> Rollout | None:
        return next(iter(self.held), None)

    def _bars(self, only_running: bool) -> list[float]:
        """By class: where the next turn of the strata ends of which something of it, or of a more urgent class, is coming."""
        bars = [math.inf] * len(RolloutClass)
        for stratum, rollout_class in self._running:
            bars[rollout_class] = min(bars[rollout_class], self._clock.finish(stratum))
        if not only_running:
            for stratum, rollout_class, place in self._queued:
                if self._served.get(place, True):
                    bars[rollout_class] = min(bars[rollout_class], self._clock.finish(stratum))
        for one in range(1, len(bars)):
            bars[one] = min(bars[one], bars[one - 1])
        return bars


def place_of(spec: RolloutSpec) -> Place:
    return spec.pool, label_key(spec.engine_labels)


def _add(counts: dict[Key, int], key: Key, change: int) -> None:
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]
