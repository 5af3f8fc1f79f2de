"""Asserts that no more samples are on their way than staleness allows: see `rolloutd.scheduler.staleness`.

Derived from what is dispatched and acknowledged, not from the scheduler's own counters. When a group (or a rollout without one)
is started for the first time, its members and those of all others that were started and whose samples are neither taken nor
lost are no more than (max_staleness + 1) x batch_samples; unless there are no others. Of a group at most the samples count that its
first submission announced, or that it keeps: what joins it later is let in with it.

What this module does not know: who should be let in first.
"""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler import staleness
from rolloutd.scheduler.actions import Action, Deliver, Dispatch, Finished, Undelivered
from rolloutd.scheduler.events import ConfigureRun, Event, SubmitRollouts
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.intake import member_ids
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutState
from rolloutd.scheduler.world import World


class Windows:
    def __init__(self, world: World, counts: Counter[str]) -> None:
        self.world = world
        self.counts = counts
        self._started: dict[
            str, dict[str, tuple[set[str], int]]
        ] = {}  # run -> group -> members at its start, announced
        self._announced: dict[Group, int] = {}
        self._completed: set[tuple[str, str]] = set()  # (run, rollout)
        self._epochs: dict[Run, int] = {}
        self._capacity: dict[Run, int] = {}  # the largest since the bound is in force

    def observe(self, event: Event, actions: list[Action]) -> None:
        """After every event."""
        if isinstance(event, ConfigureRun) and event.run_id in self.world.runs:
            self._configured(self.world.runs[event.run_id])
        if isinstance(event, SubmitRollouts):
            self._submitted(event)
        for action in actions:
            if isinstance(action, Deliver | Undelivered) and isinstance(action.event, Finished):
                result = action.event.result
                if result.complete:
                    self._completed.add((result.run_id, result.rollout_id))
            elif isinstance(action, Dispatch) and self.world.runs[action.run_id] in self._capacity:
                self._check(self.world.attempts[action.attempt_id].rollout)
        for (
            run,
            started,
        ) in self._started.items():  # whoever joins a group after its last sample was taken has to be let in
            for one in [one for one in started if not self._on_their_way(run, one)]:
                del started[one]

    def _configured(self, run: Run) -> None:
        settings = run.settings
        if settings.max_staleness is None or not settings.batch_samples:
            self._capacity.pop(run, None)
            self._started.pop(run, None)
            return
        capacity = (settings.max_staleness + 1) * settings.batch_samples
        if run not in self._capacity and any(not r.in_window or r.attempts for r in run.rollouts.values()):
            return  # what ran before the bound came into force is not counted
        self._capacity[run] = max(capacity, self._capacity.get(run, 0))

    def _submitted(self, event: SubmitRollouts) -> None:
        run = self.world.runs.get(event.run_id)
        for spec in event.specs if run is not None else ():
            rollout = run.rollouts.get(member_ids(spec)[0])
            if rollout is not None and rollout.group is not None:
                announced = spec.group_keep or max(spec.samples, spec.group_size)
                self._announced.setdefault(rollout.group, announced)

    def _check(self, rollout: Rollout) -> None:
        run = rollout.run
        if not staleness.bound(rollout):
            return
        if self._epochs.setdefault(run, run.epoch) != run.epoch:  # a new trainer does not take the old one's samples
            self._epochs[run] = run.epoch
            self._started.pop(run, None)
        started = self._started.setdefault(run, {})
        group = rollout.group
        key: Group | Rollout = group if group is not None else rollout
        others = 0
        for one in list(started):
            left = self._on_their_way(run, one)
            if not left:
                started.pop(one)
            elif one is not key:
                others += min(left, self._first_size(one))
        if key in started:
            return
        started[key] = None
        self.counts["samples let in"] += 1
        count = min(self._on_their_way(run, key), self._first_size(key))
        capacity = self._capacity[run]
        assert not others or others + count <= capacity, (
            f"{run.run_id}: {count} samples, {rollout.rollout_id} the first, were started beside {others}; "
            f"{capacity} may be on their way"
        )

    def _first_size(self, one: Group | Rollout) -> int:
        return self._announced[one] if isinstance(one, Group) else 1

    def _on_their_way(self, run: Run, one: Group | Rollout) -> int:
        if not isinstance(one, Group):
            return int(self._on_its_way(run, one.rollout_id))
        count = sum(self._on_its_way(run, member) for member in one.members)
        if not one.keep:
            return count
        taken = sum(member not in run.rollouts and (run.run_id, member) in self._completed for member in one.members)
        return max(0, min(count, one.keep - taken))

    @staticmethod
    def _on_its_way(run: Run, rollout_id: str) -> bool:
        rollout = run.rollouts.get(rollout_id)
        if rollout is None or not staleness.bound(rollout):
            return False
        return rollout.state is not RolloutState.FINISHED or (rollout.result is not None and rollout.result.complete)
