"""Results of one run that are kept back until strata behind the target mix catch up.

What runs longer comes back later, so results do not come in the mix in which their rollouts were sent. A result whose stratum is
ahead waits here while something of a stratum that is behind is still coming.

Invariants
- A result goes when the next turn of its stratum comes before that of every stratum of which something is coming (`ShareClock`):
  what is delivered is less than one rollout of each stratum off the mix, unless a bound lets something go.
- Only work of its own class or a more urgent one is waited for.
- Results of one stratum and class go in the order in which they came.
- `most_results` and `most_bytes` bound what is held, `seconds` how long.

What this module does not know: consumers, and when nothing may be kept back at all (`delivering`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.share_clock import ShareClock
from rolloutd.scheduler.staleness import bound
from rolloutd.scheduler.states import RolloutClass, RolloutState

if TYPE_CHECKING:
    from rolloutd.scheduler.rollout import Rollout
    from rolloutd.scheduler.timers import Timer

MEMORY_TURNS: Final = 32.0  # made good after a stratum was late: an eighth of the window over which a mixture is judged
MOST_RESULTS: Final = 512  # held at once: two such windows
IN_FLIGHT: Final = frozenset({RolloutState.DISPATCHED, RolloutState.RUNNING, RolloutState.ABORTING})

Lane = tuple[str, RolloutClass]


class MixHold:
    __slots__ = ("_clock", "_coming", "_lanes", "_running", "held", "seconds", "size_bytes", "target", "timer")

    def __init__(self, target: Mapping[str, float], seconds: float) -> None:
        """target: stratum -> share. seconds: the longest that a result is held."""
        self.target = dict(target)
        self.seconds = seconds
        self.held: dict[Rollout, float] = {}  # -> since when, oldest first
        self.size_bytes = 0  # of their results
        self.timer: Timer | None = None  # when the oldest must go
        self._clock = ShareClock(target, MEMORY_TURNS)
        self._lanes: dict[Lane, dict[Rollout, None]] = {}  # of what is held
        self._coming: dict[Lane, int] = {}  # rollouts that have not ended; never 0
        self._running: dict[Lane, int] = {}  # of these, on engines

    # what is coming ----------------------------------------------------------------------------------------------------

    def counts(self, rollout: Rollout) -> bool:
        """Whether the mix is about it: a sample to train on, of a stratum with a share."""
        return rollout.spec.stratum in self._clock.strides and bound(rollout)

    def note_state(self, rollout: Rollout, before: RolloutState | None, after: RolloutState) -> None:
        """It was accepted (`before` None), moved, or ended."""
        if not self.counts(rollout):
            return
        lane = (rollout.spec.stratum, rollout.rollout_class)
        if before is None:
            _add(self._coming, lane, 1)
        elif after is RolloutState.FINISHED:
            _add(self._coming, lane, -1)
        ran, runs = before in IN_FLIGHT, after in IN_FLIGHT
        if ran != runs:
            _add(self._running, lane, 1 if runs else -1)

    def note_class(self, rollout: Rollout, before: RolloutClass) -> None:
        """One that has not ended is of another class now."""
        if not self.counts(rollout):
            return
        stratum = rollout.spec.stratum
        _add(self._coming, (stratum, before), -1)
        _add(self._coming, (stratum, rollout.rollout_class), 1)
        if rollout.state in IN_FLIGHT:
            _add(self._running, (stratum, before), -1)
            _add(self._running, (stratum, rollout.rollout_class), 1)

    def coming(self) -> tuple[dict[Lane, int], dict[Lane, int]]:
        """(not ended, running) by stratum and class; for checks."""
        return self._coming, self._running

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
        for (stratum, rollout_class), _ in (self._running if only_running else self._coming).items():
            finish = self._clock.finish(stratum)
            if finish < bars[rollout_class]:
                bars[rollout_class] = finish
        for one in range(1, len(bars)):
            bars[one] = min(bars[one], bars[one - 1])
        return bars


def _add(counts: dict[Lane, int], lane: Lane, change: int) -> None:
    count = counts.get(lane, 0) + change
    if count:
        counts[lane] = count
    else:
        del counts[lane]
