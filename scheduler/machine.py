"""The door of the core: `Scheduler.handle(event, now) -> actions`.

Invariants
- Synchronous, no I/O, no clock, no randomness but the one given: the same events at the same times give the same actions.
- A refused event changes nothing, but for one thing: who speaks with a higher epoch has replaced earlier trainers. The
  `Refuse` comes first, and after it only what follows from that.
- Scheduling happens on `Tick` only; `wants_tick` says whether one is worth sending, `next_due` when one is due anyway.
- `check()` re-derives every counter from the items it counts.

What this module does not know: how anything is done; it routes.
"""

from __future__ import annotations

import random

from rolloutd.scheduler import (
    attempts,
    audit,
    budgeting,
    clock,
    consolidation,
    consumers,
    delivering,
    ending,
    fleet,
    intake,
    kv_reports,
    letting_in,
    lifecycle,
    placement,
    promoting,
    publishing,
    reconfiguring,
    reordering,
    snapshot,
    trainer,
    version_change,
)
from rolloutd.scheduler.actions import Action, Refuse
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    BeginShutdown,
    CancelRollouts,
    CloseConsumer,
    ConfigureRun,
    ControlEnded,
    ControlFailed,
    DetachConsumer,
    DrainEngine,
    EndRun,
    EngineLoad,
    EngineReadiness,
    Event,
    JoinEngine,
    KvCacheChanged,
    LoseEngine,
    PauseRun,
    PublishPolicy,
    Reconfigure,
    RemoveEngine,
    ReportStep,
    ResumeRun,
    SetBudget,
    SubmitRollouts,
    Tick,
    UpdateRollouts,
    WeightsPushed,
)
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rules import watch
from rolloutd.scheduler.rules.rule import problem_of_all
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Code, RolloutClass, RolloutState
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.views import Decision, EngineView, GroupView, RolloutView, RunView, Statistics, StoryEntry
from rolloutd.scheduler.world import World


class Scheduler:
    def __init__(self, config: SchedulerConfig, rng: random.Random, now: float) -> None:
        """Raises ValueError for a rule that cannot be used."""
        problem = problem_of_all(config.rules)
        if problem is not None:
            raise ValueError(": ".join(problem))
        self._world = World(config, rng, now)
        self._world.timers.add(now + clock.HOUSEKEEPING_SECONDS, TimerKind.HOUSEKEEPING, True)
        watch.arm(self._world)

    # events ------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, monotonic); returns what is to be done about it."""
        world = self._world
        world.now = max(world.now, now)
        refusal = self._route(event)
        if world.clearing or world.ended_updates or world.releasing or world.returned:
            publishing.settle(world)
        actions, world.actions = world.actions, []
        if refusal is not None:
            return [Refuse(refusal), *actions]
        return actions

    @property
    def wants_tick(self) -> bool:
        world = self._world
        return world.dirty or bool(world.unseen or world.reordering or world.promoting or world.ending)

    def next_due(self) -> float:
        return self._world.timers.next_due()

    def _route(self, event: Event) -> Refusal | None:
        world = self._world
        match event:
            case AttemptProgress():
                attempts.progress(world, event)
            case AttemptEnded():
                attempts.ended(world, event)
                fleet.forget_removed(world)
            case AttemptFailed():
                attempts.failed(world, event)
                fleet.forget_removed(world)
            case Tick():
                clock.fire_due(world)
                fleet.forget_removed(world)
                if world.unseen:
                    version_change.go_on(world)
                if world.ending:
                    ending.go_on(world)
                if world.stirred:
                    letting_in.settle(world)
                if world.promoting:
                    promoting.go_on(world)
                if world.reordering:
                    reordering.go_on(world)
                if world.dirty:
                    placement.schedule(world)
                if world.kept and not world.dirty:
                    consolidation.go_on(world)
                clock.end_drained_streams(world)
            case EngineLoad():
                fleet.load(world, event)
            case KvCacheChanged():
                kv_reports.changed(world, event)
            case EngineReadiness():
                fleet.readiness(world, event)
            case JoinEngine():
                return fleet.join(world, event)
            case LoseEngine():
                fleet.lose(world, event)
            case DrainEngine() | RemoveEngine():
                return self._engine_command(event)
            case ControlEnded() | ControlFailed():
                publishing.answered(world, event)
            case Reconfigure():
                return reconfiguring.adopt(world, event.config)
            case BeginShutdown():
                clock.begin_shutdown(world, event.grace_seconds)
            case ConfigureRun() | AttachConsumer() | SubmitRollouts() | SetBudget() | ReportStep() | PublishPolicy():
                return self._on_run(event)
            case _:
                return self._on_known_run(event)
        return None

    def _on_run(
        self, event: ConfigureRun | AttachConsumer | SubmitRollouts | SetBudget | ReportStep | PublishPolicy
    ) -> Refusal | None:
        """Events that make their run on first use."""
        world = self._world
        if not event.run_id:
            return Refusal(
                Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "run_id: is empty; name the run", (("run_id", "is empty"),)
            )
        is_new = event.run_id not in world.runs
        run = world.ensure_run(event.run_id)
        if isinstance(run, Refusal):
            return run
        refusal = self._tell_run(run, event)
        if refusal is not None and is_new:
            del world.runs[event.run_id]
        return refusal

    def _tell_run(
        self, run: Run, event: ConfigureRun | AttachConsumer | SubmitRollouts | SetBudget | ReportStep | PublishPolicy
    ) -> Refusal | None:
        world = self._world
        match event:
            case ConfigureRun():
                return trainer.configure(world, run, event.settings)
            case AttachConsumer():
                return consumers.fence(run, event.epoch) or consumers.attach(world, run, event)
            case SubmitRollouts():
                return self._submit(run, event)
            case SetBudget():
                return self._of_trainer(run, event.epoch) or budgeting.set_budget(world, run, event.budget)
            case ReportStep():
                return self._of_trainer(run, event.epoch) or trainer.report_step(world, run, event.report)
            case PublishPolicy():
                return self._of_trainer(run, event.epoch) or publishing.publish(world, run, event.update)

    def _of_trainer(self, run: Run, epoch: int) -> Refusal | None:
        """Refuses the call of a trainer that was replaced; that of one which started later replaces the others."""
        refusal = consumers.fence(run, epoch)
        if refusal is None:
            consumers.raise_epoch(self._world, run, epoch)
        return refusal

    def _submit(self, run: Run, event: SubmitRollouts) -> Refusal | None:
        world = self._world
        refusal = consumers.fence(run, event.epoch)
        if refusal is not None:
            return refusal
        consumer = consumers.ensure(world, run, event.consumer_id, event.epoch)
        if isinstance(consumer, Refusal):
            return consumer
        intake.submit(world, run, consumer, event)
        return None

    def _on_known_run(
        self,
        event: PauseRun
        | ResumeRun
        | EndRun
        | DetachConsumer
        | CloseConsumer
        | UpdateRollouts
        | CancelRollouts
        | AcknowledgeResults
        | WeightsPushed,
    ) -> Refusal | None:
        world = self._world
        run = world.runs.get(event.run_id)
        if run is None:
            return Refusal(Code.NOT_FOUND, "RUN_NOT_FOUND", f"run_id: {event.run_id!r} is not known here")
        match event:
            case PauseRun():
                run.paused = True
                delivering.settle(world, run)
            case ResumeRun():
                run.paused = False
                world.dirty = True
            case EndRun():
                trainer.end_run(world, run)
            case DetachConsumer():
                consumers.detach(world, run, event.consumer_id)
            case CloseConsumer():
                consumers.close(world, run, event.consumer_id)
            case UpdateRollouts():
                return consumers.fence(run, event.epoch) or trainer.update(world, run, event.updates)
            case CancelRollouts():
                return self._cancel(run, event)
            case WeightsPushed():
                return consumers.fence(run, event.epoch) or publishing.confirm(world, run, event)
            case AcknowledgeResults():
                consumer = run.consumers.get(event.consumer_id)
                if consumer is not None:
                    consumers.acknowledge(world, run, consumer, event)
        return None

    def _cancel(self, run: Run, event: CancelRollouts) -> Refusal | None:
        if event.epoch is not None:
            refusal = consumers.fence(run, event.epoch)
            if refusal is not None:
                return refusal
        wanted = list(event.rollout_ids)
        for group_id in event.group_ids:
            group = run.groups.get(group_id)
            wanted.extend(group.members if group is not None else ())
        for rollout_id in wanted:
            for member in self._members(run, rollout_id):
                lifecycle.cancel_subtree(self._world, run, member)
        return None

    @staticmethod
    def _members(run: Run, rollout_id: str) -> list[str]:
        """The rollout of this id, or the samples that were submitted under it."""
        return list(run.sampled.get(rollout_id, ())) or [rollout_id]

    def _engine_command(self, event: DrainEngine | RemoveEngine) -> Refusal | None:
        engine = self._world.engines.get(event.engine_id)
        if engine is None:
            return Refusal(Code.NOT_FOUND, "ENGINE_NOT_FOUND", f"engine_id: {event.engine_id!r} is not registered here")
        if isinstance(event, DrainEngine):
            fleet.drain(self._world, engine)
        else:
            fleet.remove(self._world, engine)
        return None

    # reads -------------------------------------------------------------------------------------------------------------

    def run_view(self, run_id: str, now: float) -> RunView | None:
        run = self._world.runs.get(run_id)
        return None if run is None else snapshot.run_view(self._world, run, now)

    def run_views(self, now: float) -> list[RunView]:
        return [snapshot.run_view(self._world, run, now) for run in self._world.runs.values()]

    def rollout_view(self, run_id: str, rollout_id: str, now: float) -> RolloutView | None:
        run = self._world.runs.get(run_id)
        rollout = None if run is None else run.rollouts.get(rollout_id)
        return None if rollout is None else snapshot.rollout_view(rollout, now)

    def group_view(self, run_id: str, group_id: str) -> GroupView | None:
        """None also once the last result of the group was acknowledged."""
        run = self._world.runs.get(run_id)
        group = None if run is None else run.groups.get(group_id)
        return None if group is None else snapshot.group_view(group)

    def list_rollouts(
        self,
        run_id: str,
        now: float,
        after: str = "",
        limit: int = 100,
        state: RolloutState | None = None,
        rollout_class: RolloutClass | None = None,
    ) -> list[RolloutView]:
        """Rollouts of a run ordered by id, those after `after`; empty for an unknown run."""
        run = self._world.runs.get(run_id)
        if run is None:
            return []
        ids = sorted(
            rollout.rollout_id
            for rollout in run.rollouts.values()
            if rollout.rollout_id > after
            and (state is None or rollout.state is state)
            and (rollout_class is None or rollout.rollout_class is rollout_class)
        )
        return [snapshot.rollout_view(run.rollouts[rollout_id], now) for rollout_id in ids[:limit]]

    def explain(self, run_id: str, rollout_id: str) -> tuple[list[Decision], list[StoryEntry]] | None:
        """Decisions about a rollout that the ring still holds, and its story while its record is kept."""
        return snapshot.explain(self._world, run_id, rollout_id)

    def engine_views(self) -> list[EngineView]:
        return [snapshot.engine_view(self._world, engine) for engine in self._world.engines.values()]

    def statistics(self) -> Statistics:
        return snapshot.statistics(self._world)

    def check(self) -> None:
        """Re-derive every counter; AssertionError names the first that is off."""
        audit.check(self._world)
