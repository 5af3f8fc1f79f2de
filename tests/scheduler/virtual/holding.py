"""Asserts what must hold of results that are kept back for a target mix: bounded in number, bytes and time, in none but their run's
order, and never where keeping them helps nobody. That each is delivered once, `auditor` sees.

What this module does not know: which strata are ahead; `Scheduler.check()` derives what is counted for that.
"""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler.actions import Action
from rolloutd.scheduler.events import Event, Tick
from rolloutd.scheduler.mix_hold import MOST_RESULTS
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Outcome, RolloutState, TrainerState
from rolloutd.scheduler.world import World


class Holding:
    def __init__(self, world: World, counts: Counter[str]) -> None:
        self.world = world
        self.counts = counts
        self._held: dict[Rollout, float] = {}  # -> since when

    def observe(self, event: Event, actions: list[Action]) -> None:
        """After every event."""
        held = {rollout: since for run in self.world.runs.values() for rollout, since in self._of(run, event).items()}
        for rollout in held.keys() - self._held.keys():
            self.counts["kept back for the mix"] += 1
            assert rollout.rollout_id in rollout.run.rollouts, f"{rollout.rollout_id} is gone and kept back"
        for rollout in self._held.keys() - held.keys():
            result = rollout.result
            assert result is not None, rollout.tell()
            if result.outcome is Outcome.STALE or result.stale:
                self.counts["stale while kept back"] += 1
            self.counts["let go"] += 1
        for rollout in held.keys() & self._held.keys():
            assert held[rollout] == self._held[rollout], f"{rollout.rollout_id} was kept back twice"
        self._held = held

    def _of(self, run: Run, event: Event) -> dict[Rollout, float]:
        hold = run.mix_hold
        if hold is None or not hold.held:
            return {}
        world = self.world
        name = run.run_id
        limit = run.settings.max_undelivered_bytes or world.config.delivery.max_undelivered_bytes
        assert run.settings.mix_hold_seconds == hold.seconds > 0.0, f"{name} keeps results back and was not asked to"
        assert len(hold.held) <= MOST_RESULTS and hold.size_bytes <= limit, f"{name} keeps back {len(hold.held)}"
        assert not run.ended and not world.shutting_down, f"{name} keeps results back at its end"
        waits = run.report.trainer_state is TrainerState.WAITING
        for rollout, since in hold.held.items():
            what = f"{rollout.rollout_id} is kept back; {rollout.tell()}"
            spec = rollout.spec
            assert rollout.state is RolloutState.FINISHED and rollout.result is not None and rollout.result.complete, (
                what
            )
            assert rollout.deadline_at is None and not spec.parent_rollout_id and not spec.session_id, what
            needed = rollout.needed_by_step is not None and rollout.needed_by_step <= run.step
            assert not (waits and needed), f"{what}: the trainer waits for it"
            late = isinstance(event, Tick) and world.now >= since + hold.seconds
            assert not late, f"{what} since {since:.3f}, now {world.now:.3f}"
        others = any(
            hold.counts(one) and one.state is not RolloutState.FINISHED and one.spec.stratum != rollout.spec.stratum
            for rollout in hold.held
            for one in run.rollouts.values()
        )
        assert others, f"{name} keeps {len(hold.held)} results back, and nothing else is coming"
        return dict(hold.held)

    def check_quiet(self) -> None:
        assert not self._held, f"still kept back: {[one.rollout_id for one in self._held]}"
