"""What a run's data looks like: strata against their target mix, and how distinct outputs are.

Invariants
- A target that is stated has an `order`: a turn is taken with each dispatch of a sample to train on, and given back when the
  attempt ends without having made one, or the sample became too old before anybody took it. So it follows what was made and what
  is being made. What took no turn, or took it in the order of an earlier target, gives none back here.
- What is no sample to train on (evaluation, replays) takes no turn there. It has turns `beside` the samples, by its stratum's share:
  neither waits for the last of the other, and what there is of one changes nothing in the order of the other.
- Windows are bounded (256 rollouts, as the mixture is judged over windows of that size); strata beyond the configured number
  share one name, so counters are bounded too.

What this module does not know: why a rollout was chosen or used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from rolloutd.scheduler.scoring import diversity
from rolloutd.scheduler.scoring.total import clamp
from rolloutd.scheduler.share_clock import ShareClock
from rolloutd.scheduler.staleness import bound
from rolloutd.scheduler.states import SHORT_TASKS

if TYPE_CHECKING:
    from rolloutd.scheduler.lanes import Flow
    from rolloutd.scheduler.rollout import Rollout


WINDOW_ROLLOUTS: Final = 256
Name = TypeVar("Name", bound=Hashable)
OTHER: Final = "(other)"
# Who has turns beside whom: all samples to train on, and of each stratum the rest.
SAMPLES: Final = "samples"
REST_OF: Final = "rest of "


class Window(Generic[Name]):
    """Counts over the last `WINDOW_ROLLOUTS` names."""

    __slots__ = ("_names", "counts")

    def __init__(self) -> None:
        self._names: deque[Name] = deque()
        self.counts: dict[Name, int] = {}

    def add(self, name: Name) -> Name | None:
        """Count one more; returns the name that left for it, None while the window fills."""
        self._names.append(name)
        self.counts[name] = self.counts.get(name, 0) + 1
        if len(self._names) > WINDOW_ROLLOUTS:
            oldest = self._names.popleft()
            left = self.counts[oldest] - 1
            if left:
                self.counts[oldest] = left
            else:
                del self.counts[oldest]
            return oldest
        return None

    def __len__(self) -> int:
        return len(self._names)


class Share:
    """Of one stratum: its share of what was dispatched lately, the share it should have, and what the score's diversity term says
    of the two."""

    __slots__ = ("dispatched", "missing", "target")

    def __init__(self, dispatched: float, target: float) -> None:
        self.dispatched = dispatched
        self.target = target
        self.missing = clamp(diversity.missing(target, dispatched))


class Mix:
    __slots__ = ("_max_strata", "_outputs", "_shares", "_strata", "beside", "consumed", "dispatched", "order", "target")

    def __init__(self, target: Mapping[str, float], max_strata: int) -> None:
        self.target = dict(target)
        self.order: ShareClock | None = None
        self.beside: ShareClock | None = None
        if target:
            self.order = ShareClock(target, WINDOW_ROLLOUTS)
            total = sum(target.values())
            rest = {REST_OF + stratum: share / total for stratum, share in target.items()}
            self.beside = ShareClock({SAMPLES: 1.0, **rest}, 0.0)
        self._max_strata = max_strata
        self._strata: set[str] = set(target)
        self.dispatched: Window[str] = Window()
        self.consumed: Window[str] = Window()
        self._shares: dict[str, Share] = {}  # worked out since they changed: asked for every entry looked at
        self._outputs: Window[int] = Window()

    def name(self, stratum: str) -> str:
        """The stratum's name here: itself, or OTHER once there are too many."""
        if stratum in self._strata:
            return stratum
        if len(self._strata) >= self._max_strata:
            return OTHER
        self._strata.add(stratum)
        self._shares.clear()
        return stratum

    def target_share(self, stratum: str) -> float:
        """The share this stratum should have; equal shares of the strata seen where no target is set."""
        if self.target:
            total = sum(self.target.values())
            return self.target.get(stratum, 0.0) / total if total else 0.0
        return 1.0 / max(1, len(self._strata))

    def dispatched_share(self, stratum: str) -> float:
        return self.dispatched.counts.get(stratum, 0) / max(1, len(self.dispatched))

    def shares(self, stratum: str) -> tuple[float, float]:
        """(share of what was dispatched lately, target share)."""
        share = self._share(stratum)
        return share.dispatched, share.target

    def _share(self, stratum: str) -> Share:
        share = self._shares.get(stratum)
        if share is None:
            share = self._shares[stratum] = Share(self.dispatched_share(stratum), self.target_share(stratum))
        return share

    def missing(self, stratum: str) -> float:
        """How far a stratum is below its target, as the score's diversity term says it."""
        return self._share(stratum).missing

    def note_dispatched(self, stratum: str) -> None:
        oldest = self.dispatched.add(stratum)
        if oldest is None:
            self._shares.clear()
        else:
            self._shares.pop(stratum, None)
            self._shares.pop(oldest, None)

    def in_order(self, waiting: list[Flow], most: int) -> list[Flow]:
        """Of what waits, what goes first by a stated target: what is due beside the samples, then strata of samples, first the one
        that is furthest below its share; at most so many of each."""
        order = self.order
        beside = self.beside
        if order is None or beside is None:
            raise AssertionError("no target is stated")
        samples = [stratum for stratum, sample in waiting if sample and stratum in order.strides]
        samples.sort(key=order.finish)
        rest = [
            (beside.finish(REST_OF + stratum), stratum)
            for stratum, sample in waiting
            if not sample and REST_OF + stratum in beside.strides
        ]
        rest.sort()
        bar = beside.finish(SAMPLES)
        due = [(stratum, False) for finish, stratum in rest[:most] if finish < bar]
        return due + [(stratum, True) for stratum in samples[:most]]

    def note_begun(self, rollout: Rollout) -> None:
        """It went to an engine: it had the turn of its stratum, or one beside."""
        order = self.order
        beside = self.beside
        stratum = rollout.spec.stratum
        if order is None or beside is None or stratum not in order.strides or rollout.task_type in SHORT_TASKS:
            return
        if bound(rollout):
            order.take(stratum)
            rollout.turn = order
            beside.take(SAMPLES)
        elif REST_OF + stratum in beside.strides:
            beside.take(REST_OF + stratum)

    def note_output(self, fingerprint: int) -> None:
        self._outputs.add(fingerprint)

    def distinct_outputs(self) -> float:
        return len(self._outputs.counts) / len(self._outputs) if len(self._outputs) else 1.0

    def distance(self) -> float:
        """Total variation between consumed strata and their targets: half the sum of |share - target|."""
        total = len(self.consumed)
        if not total:
            return 0.0
        names = set(self.consumed.counts) | set(self.target or self._strata)
        return 0.5 * sum(abs(self.consumed.counts.get(name, 0) / total - self.target_share(name)) for name in names)

    def coverage(self) -> float:
        """Share of known strata that the consumed window contains."""
        names = set(self.target or self._strata)
        return len(names & set(self.consumed.counts)) / len(names) if names else 1.0


def give_back(rollout: Rollout) -> None:
    """Nothing to train on came or will come of it: its turn, if it took one, goes back to the order that gave it."""
    order = rollout.turn
    if order is not None:
        order.give_back(rollout.spec.stratum)
        rollout.turn = None
