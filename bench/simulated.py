"""A workload served in virtual time by whoever schedules: the production core or a control arm.

`Epochs` sets up the pool and runs one epoch after the other in the same scheduler, with a policy version between them; what each
epoch was like comes back as an `EpochRecord`.

Invariants
- Deterministic by seed: the same scheduler, pool and workload give the same record (but for the cost meter).
- A turn of a session arrives when the turn before it is back and its tool has answered, not earlier.
- Every rollout ends; one that does not is an error with its name, not a shorter epoch.
- The scheduler is told classes, steps, groups and sessions, and never a length: only the engines (and an oracle) know those.

What this module does not know: bounds and what the figures of an epoch are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rolloutd.bench.metrics import RolloutRecord
from rolloutd.bench.sessions import SessionsUnderWay
from rolloutd.bench.virtual import LATENCY_SECONDS, LOAD_PERIOD_SECONDS, Simulation
from rolloutd.bench.virtual_control import ControlTiming
from rolloutd.bench.virtual_core import Core
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.workload import Item, Session, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.actions import Action, Deliver, Dispatch, Finished, PublishEnded, Refuse, Rejected
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    Event,
    PublishPolicy,
    ReportStep,
    SubmitRollouts,
)
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import Acknowledgement, PolicyUpdate, RolloutSpec, StepReport
from rolloutd.scheduler.states import Outcome, RolloutClass, TaskType, TrainerState

RUN_ID = "run"
CONSUMER_ID = "trainer"
UPDATE_SECONDS = 2.0
ROLLOUTS_PER_EVENT = 64  # as the server cuts a message of a stream: `rollout_stream`
CLOCK_LOOKS = 200
PATIENCE_SECONDS = 3_600.0  # simulated: the longest output takes less than half of it


@dataclass(slots=True)
class EpochRecord:
    """What came of one epoch. Times are simulated seconds since its start, but for `handle_seconds` (CPU).

    prefill_seconds: that engines spent computing prompts, over all engines. session_ends: session id -> when its last turn was
    back. failed: rollouts that ended in anything but COMPLETED or SURPLUS. surplus: SURPLUS ones -> tokens that they had written.
    dispatches: attempts started. handle_seconds: inside the scheduler, over `events` calls, less what reading the clock costs.
    """

    records: dict[str, RolloutRecord] = field(default_factory=dict)
    engine_tokens: dict[str, int] = field(default_factory=dict)
    session_ends: dict[str, float] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    failed: dict[str, Outcome] = field(default_factory=dict)
    surplus: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    dispatches: int = 0
    preemptions: int = 0
    handle_seconds: float = 0.0
    events: int = 0


class Epochs:
    """One scheduler, one pool, one run with one consumer.

    update_seconds: that an engine takes to load the weights of a policy version.
    """

    def __init__(
        self,
        core: Core,
        machines: Sequence[MachineConfig],
        *,
        latency_seconds: float = LATENCY_SECONDS,
        load_period_seconds: float = LOAD_PERIOD_SECONDS,
        update_seconds: float = UPDATE_SECONDS,
    ) -> None:
        self.simulation = Simulation(core, latency_seconds=latency_seconds, load_period_seconds=load_period_seconds)
        self.version = 0
        self._handle = self.simulation.handle
        self._handle_seconds = 0.0
        self._clock_seconds = clock_seconds()
        self.simulation.handle = self._metered
        self.simulation.observers.append(self._watch)
        self._served: dict[str, Served] = {}  # rollout -> of which workload it is, while it is out
        self._published = 0
        self._last_end = 0.0
        timing = ControlTiming(load_seconds=update_seconds)
        for number, machine in enumerate(machines):
            self.simulation.add_engine(SimEngine(f"engine-{number}", machine, control=timing))
        self.simulation.connect(RUN_ID, CONSUMER_ID, self._receive)
        self.simulation.send(AttachConsumer(RUN_ID, CONSUMER_ID))

    def run(self, workload: Workload, step: int, on_progress: Callable[[int], None] | None = None) -> EpochRecord:
        """Serve it all, while the trainer waits. on_progress: called with the number of rollouts that came back so far."""
        simulation = self.simulation
        self.report(step, TrainerState.WAITING, samples_needed=workload.rollouts)
        before = (self._handle_seconds, simulation.events_handled, self._prefill_seconds())
        served = self.begin(workload, on_progress)
        self.until(lambda: served.over)
        record = served.record
        record.seconds = simulation.now - served.started
        record.handle_seconds = self._handle_seconds - before[0]
        record.events = simulation.events_handled - before[1]
        record.prefill_seconds = self._prefill_seconds() - before[2]
        self.report(step, TrainerState.TRAINING)
        return record

    def begin(self, workload: Workload, on_progress: Callable[[int], None] | None = None) -> Served:
        """Submit a workload beside whatever is there; its arrivals count from now."""
        served = Served(self.simulation, workload, self._served, on_progress)
        served.plan()
        return served

    def until(self, done: Callable[[], bool]) -> None:
        """Go on until that is so. Raises AssertionError where nothing comes back for `PATIENCE_SECONDS`."""
        simulation = self.simulation
        self._last_end = simulation.now
        while not done():
            simulation.run(stop=lambda: done() or simulation.now - self._last_end > PATIENCE_SECONDS)
            if not done():
                left = sorted(self._served)
                raise AssertionError(
                    f"{len(left)} rollouts do not end, nothing did for {PATIENCE_SECONDS} s: {left[:3]}"
                )

    def rest(self, seconds: float) -> None:
        """Let that time pass."""
        self.simulation.run(self.simulation.now + seconds)

    def publish(self) -> float:
        """The next policy version, on every engine; returns the simulated seconds that took."""
        self.version += 1
        started = self.simulation.now
        update = PolicyUpdate(version=self.version, path=f"weights-{self.version}")
        refused = [one for one in self.simulation.send(PublishPolicy(RUN_ID, update)) if isinstance(one, Refuse)]
        if refused:
            raise AssertionError(f"publication refused: {refused[0].error.message}")
        self.simulation.run(started + PATIENCE_SECONDS, stop=lambda: self._published >= self.version)
        if self._published < self.version:
            raise AssertionError(f"version {self.version} was never on all engines")
        return self.simulation.now - started

    def report(
        self, step: int, state: TrainerState, *, samples_needed: int = 0, policy_entropy: float | None = None
    ) -> None:
        """Tell the scheduler what the trainer does."""
        report = StepReport(
            step=step, trainer_state=state, samples_needed=samples_needed, policy_entropy=policy_entropy
        )
        self.simulation.send(ReportStep(RUN_ID, report))

    @property
    def handle_seconds(self) -> float:
        """Wall seconds inside the scheduler so far."""
        return self._handle_seconds

    def _prefill_seconds(self) -> float:
        loads = (engine.load(self.simulation.now) for engine in self.simulation.engines.values())
        return sum(load.prefill_busy_seconds_total for load in loads if load is not None)

    def _metered(self, event: Event, now: float) -> list[Action]:
        started = time.thread_time()
        actions = self._handle(event, now)
        self._handle_seconds += time.thread_time() - started - self._clock_seconds
        return actions

    def _watch(self, event: Event, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    self._served[action.rollout_id].started_one(action.rollout_id)
                case PublishEnded():
                    if action.failed:
                        raise AssertionError(f"version {action.version} failed on {', '.join(action.failed)}")
                    self._published = action.version

    def _receive(self, delivery: Deliver) -> None:
        match delivery.event:
            case Finished(result):
                self._last_end = self.simulation.now
                self._served.pop(result.rollout_id).finished(result)
            case Rejected(rollout_id, error):
                raise AssertionError(f"rollout {rollout_id} was rejected: {error.message}")


def clock_seconds() -> float:
    """What reading the clock of a thread's CPU adds to what is measured with it: the least of some tries. (It may be a
    microsecond and more, and most events are not dearer.)"""
    looks = [time.thread_time() for _ in range(CLOCK_LOOKS)]
    return min(after - before for before, after in zip(looks, looks[1:], strict=False))


class Served:
    """One workload on its way: submits, releases turns, acknowledges at once."""

    def __init__(
        self,
        simulation: Simulation,
        workload: Workload,
        out: dict[str, Served],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        """out: where each rollout is entered while it is out."""
        self.record = EpochRecord()
        self.started = simulation.now
        self._out = out
        self.left = workload.rollouts
        self._simulation = simulation
        self._workload = workload
        self._on_progress = on_progress
        self._total = workload.rollouts
        self._sessions = SessionsUnderWay(workload.sessions)
        self._group_sizes: dict[str, int] = {}
        for item in workload.items:
            if item.group_id:
                self._group_sizes[item.group_id] = self._group_sizes.get(item.group_id, 0) + 1

    @property
    def over(self) -> bool:
        return self.left == 0

    def plan(self) -> None:
        """Put every arrival into the calendar; what arrives together goes in one message."""
        by_time: dict[float, list[Item | Session]] = {}
        everything: tuple[Item | Session, ...] = (*self._workload.items, *self._workload.sessions)
        for one in everything:
            by_time.setdefault(one.arrival_seconds, []).append(one)
        for seconds, arriving in by_time.items():
            self._at(self.started + seconds, lambda arriving=arriving: self._submit(arriving))  # type: ignore[misc]

    def started_one(self, rollout_id: str) -> None:
        self.record.dispatches += 1
        record = self.record.records[rollout_id]
        if record.started_seconds is None:
            record.started_seconds = self._elapsed()

    def finished(self, result: RolloutResult) -> None:
        of = self.record
        record = of.records[result.rollout_id]
        completed = result.outcome is Outcome.COMPLETED
        if completed:
            record.deliveries = 1
            record.delivered_seconds = self._elapsed()
            record.prompt_tokens = result.prompt_tokens
            record.cached_tokens = result.cached_tokens
        elif result.outcome is Outcome.SURPLUS:
            of.surplus[result.rollout_id] = result.generated_tokens
        else:
            of.failed[result.rollout_id] = result.outcome
        for span in result.spans:
            of.engine_tokens[span.engine_id] = of.engine_tokens.get(span.engine_id, 0) + span.end - span.start
        of.preemptions += result.preemptions
        self.left -= 1
        self._at(self._simulation.now, lambda: self._acknowledge(result.rollout_id, completed))
        if result.session_id:
            self._turn_over(result)
        if self._on_progress is not None:
            self._on_progress(self._total - self.left)

    def _turn_over(self, result: RolloutResult) -> None:
        following = None
        if result.outcome is Outcome.COMPLETED:
            following = self._sessions.after(result.session_id, result.turn, result.token_bytes, self._elapsed())
        else:
            self.left -= self._sessions.give_up(result.session_id, result.turn)
        if following is None:
            self.record.session_ends[result.session_id] = self._elapsed()
        else:
            self._at(self.started + following.arrival_seconds, lambda: self._send([following]))

    def _submit(self, arriving: Sequence[Item | Session]) -> None:
        items = [self._sessions.first(one) if isinstance(one, Session) else one for one in arriving]
        self._send(items)

    def _send(self, items: Sequence[Item]) -> None:
        for item in items:
            self.record.records[item.rollout_id] = RolloutRecord(item.kind, self._elapsed())
            self._out[item.rollout_id] = self
        for start in range(0, len(items), ROLLOUTS_PER_EVENT):
            some = items[start : start + ROLLOUTS_PER_EVENT]
            self._simulation.send(SubmitRollouts(RUN_ID, CONSUMER_ID, tuple(self._spec(item) for item in some)))

    def _acknowledge(self, rollout_id: str, used: bool) -> None:
        self._simulation.send(AcknowledgeResults(RUN_ID, CONSUMER_ID, (Acknowledgement(rollout_id, used=used),)))

    def _spec(self, item: Item) -> RolloutSpec:
        return spec_of(item, self._group_sizes.get(item.group_id, 0))

    def _elapsed(self) -> float:
        return self._simulation.now - self.started

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        self._simulation.at(seconds, call)


def spec_of(item: Item, group_size: int) -> RolloutSpec:
    """An item as a trainer submits it; the hidden length goes to the engine, in words of its own."""
    return RolloutSpec(
        rollout_id=item.rollout_id,
        token_bytes=item.prompt_bytes,
        seeds=(item.sampling_seed,),
        rollout_class=RolloutClass[item.work_class.name],
        task_type=TaskType[item.task_type.name],
        group_id=item.group_id,
        group_size=group_size,
        group_keep=item.group_keep,
        session_id=item.session_id,
        turn=item.turn,
        stratum=item.stratum,
        needed_by_step=item.needed_by_step,
        max_new_tokens=item.max_new_tokens,
        sampling={"custom_params": {"end_at_tokens": item.prompt_tokens + item.output_tokens}},
    )
