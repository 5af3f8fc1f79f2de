"""A bench for the core: engines, specs and budgets with good defaults, and a scheduler that is checked after every event.

What an engine writes is a function of the position in the output (token n of a rollout is FIRST_TOKEN + n), so a lost,
repeated or misplaced token shows in the result. Every event ends with `check()` of the core and of the ceilings, and the
bench itself asserts that a rollout is finished once, an attempt id is used once, and an abort names a live attempt.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rolloutd.scheduler import audit
from rolloutd.scheduler.actions import (
    Abort,
    Accepted,
    Action,
    Control,
    Deliver,
    Dispatch,
    EndStream,
    Finished,
    Notice,
    NoticeKind,
    Record,
    Refuse,
    Rejected,
)
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    CancelRollouts,
    ConfigureRun,
    ControlEnded,
    ControlFailed,
    Event,
    JoinEngine,
    PublishPolicy,
    ReportStep,
    SetBudget,
    SubmitRollouts,
    Tick,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import Piece, RolloutResult
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import (
    TOKEN_BYTES,
    Acknowledgement,
    Budget,
    EngineFacts,
    PolicyUpdate,
    RolloutSpec,
    RunSettings,
    StepReport,
)
from rolloutd.scheduler.states import (
    AbortReason,
    FaultKind,
    Gate,
    Outcome,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
    Verb,
)
from rolloutd.scheduler.views import RolloutView, RunView

RUN = "run"
CONSUMER = "rank-0"
FIRST_TOKEN = 1000  # the first token any engine writes; the next is one more, and so on
MAX_PASSES = 1000  # ticks in a row without time passing before the bench calls it a live-lock

CRITICAL, REUSABLE, BACKGROUND = RolloutClass.CRITICAL, RolloutClass.REUSABLE, RolloutClass.BACKGROUND

INTERRUPTIONS = frozenset(
    {
        AbortReason.PREEMPT,
        AbortReason.BUDGET,
        AbortReason.NO_PROGRESS,
        AbortReason.PUBLISH,
        AbortReason.MEMORY,
        AbortReason.SLICE,
        AbortReason.MOVE,
    }
)

Kind = TypeVar("Kind")


def ids(tokens: Iterable[int]) -> bytes:
    listed = list(tokens)
    return struct.pack(f"<{len(listed)}I", *listed)


def unpack(token_bytes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(token_bytes) // TOKEN_BYTES}I", token_bytes))


def prompt(name: str, tokens: int = 8) -> bytes:
    """A prompt that shares nothing with prompts of other names."""
    return ids([zlib.crc32(name.encode()) % 99_000 + 1] * tokens)


def spec(rollout_id: str, tokens: int = 8, rollout_class: RolloutClass | None = CRITICAL, **fields: Any) -> RolloutSpec:
    """One rollout of `tokens` prompt tokens (too few to wait for a shared prefix) that may write 16."""
    fields.setdefault("max_new_tokens", 0 if fields.get("task_type") is TaskType.REPLAY else 16)
    if "text" not in fields:
        fields.setdefault("token_bytes", prompt(rollout_id, tokens))
    return RolloutSpec(rollout_id, rollout_class=rollout_class, **fields)


def specs(name: str, count: int, rollout_class: RolloutClass = CRITICAL, **fields: Any) -> list[RolloutSpec]:
    return [spec(f"{name}{index}", rollout_class=rollout_class, **fields) for index in range(count)]


def engine(engine_id: str = "e0", slots: int = 2, **fields: Any) -> EngineFacts:
    fields.setdefault("incarnation", "1")
    fields.setdefault("kv_capacity_tokens", 1 << 16)
    fields.setdefault("context_tokens", 4096)
    fields.setdefault("vocabulary_size", 100_000)
    return EngineFacts(engine_id, slots=slots, **fields)


def engines(count: int, slots: int = 2, **fields: Any) -> list[EngineFacts]:
    return [engine(f"e{index}", slots, **fields) for index in range(count)]


def config(**sections: Mapping[str, Any]) -> SchedulerConfig:
    """The default configuration with some fields of some sections replaced: config(preempt={"enabled": False})."""
    base = SchedulerConfig()
    return replace(base, **{name: replace(getattr(base, name), **fields) for name, fields in sections.items()})


class Bench:
    """A scheduler, its clock, and all that was said."""

    def __init__(self, *facts: EngineFacts, settings: SchedulerConfig | None = None, seed: int = 0) -> None:
        self.now = 100.0
        self.settings = settings if settings is not None else SchedulerConfig()
        self.core = Scheduler(self.settings, random.Random(seed), self.now)
        self.said: list[Action] = []  # everything, in order
        self.dispatched: list[Dispatch] = []
        self.live: dict[str, Dispatch] = {}  # rollout id -> its attempt that has not ended
        self.aborted: set[str] = set()  # attempt ids
        self.refusals: list[Refusal] = []
        self.controls: dict[str, Control] = {}  # engine id -> the call that is out there
        self.labels: dict[str, str] = {}  # engine id -> weights that it holds, in its own words
        self._attempt_ids: set[str] = set()
        self._prompt_tokens: dict[str, int] = {}  # rollout id -> tokens of its prompt as submitted
        self._ended: dict[str, RolloutResult] = {}
        for one in facts:
            self.do(JoinEngine(one))
        self.do(AttachConsumer(RUN, CONSUMER))

    # events

    def do(self, event: Event) -> list[Action]:
        """Handle one event now; everything is checked afterwards."""
        run = self.core._world.runs.get(getattr(event, "run_id", ""))
        epoch = run.epoch if run is not None else 0
        actions = self.core.handle(event, self.now)
        self.core.check()
        audit.check_ceilings(self.core._world)
        for action in actions:
            self._note(action)
        attempts = self.core._world.attempts
        self.live = {key: one for key, one in self.live.items() if one.attempt_id in attempts}
        self.said.extend(actions)
        if any(isinstance(action, Refuse) for action in actions):
            replaced = (getattr(event, "epoch", None) or 0) > epoch  # earlier trainers, whatever becomes of the event
            assert len(actions) == 1 or replaced, f"a refused event did more: {actions}"
        return actions

    def refused(self, event: Event) -> Refusal:
        """The refusal of an event that must be refused."""
        actions = self.do(event)
        assert len(actions) == 1 and isinstance(actions[0], Refuse), f"{event} was not refused: {actions}"
        return actions[0].error

    def submit(self, *wanted: RolloutSpec, run: str = RUN, consumer: str = CONSUMER) -> list[Accepted | Rejected]:
        """Submit in one message; returns what the consumer hears of it."""
        for one in wanted:
            self._prompt_tokens[one.rollout_id] = one.prompt_tokens
        actions = self.do(SubmitRollouts(run, consumer, wanted))
        heard = [action.event for action in actions if isinstance(action, Deliver)]
        return [event for event in heard if isinstance(event, Accepted | Rejected)]

    def rejected(self, one: RolloutSpec, run: str = RUN, consumer: str = CONSUMER) -> Refusal:
        """The refusal of a submission that must be rejected."""
        answers = self.submit(one, run=run, consumer=consumer)
        assert len(answers) == 1 and isinstance(answers[0], Rejected), f"{one.rollout_id} was not rejected: {answers}"
        return answers[0].error

    def tick(self, seconds: float = 0.0) -> list[Dispatch]:
        """Let time pass, then tick until the core wants no more; returns what was dispatched."""
        self.now += seconds
        before = len(self.dispatched)
        for _ in range(MAX_PASSES):
            self.do(Tick())
            if not self.core.wants_tick:
                return self.dispatched[before:]
        raise AssertionError("the core wants ticks for ever")

    def pass_time(self, seconds: float, step: float = 1.0) -> list[Dispatch]:
        """Tick every `step` seconds for `seconds`."""
        before = len(self.dispatched)
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.tick(min(step, end - self.now))
        return self.dispatched[before:]

    def run(self, *wanted: RolloutSpec, run: str = RUN, consumer: str = CONSUMER) -> list[Dispatch]:
        """Submit, tick and get the first token of all that started."""
        answers = self.submit(*wanted, run=run, consumer=consumer)
        assert all(isinstance(answer, Accepted) for answer in answers), answers
        started = self.tick()
        for one in started:
            self.write(one.rollout_id, 1)
        return started

    # what engines report

    def write(self, rollout_id: str, tokens: int, cached: int = 0) -> None:
        """The live attempt has written `tokens` so far."""
        one = self.live[rollout_id]
        self.do(AttemptProgress(one.attempt_id, tokens, len(one.token_bytes) // TOKEN_BYTES, cached))

    def piece(
        self,
        rollout_id: str,
        tokens: int,
        reason: str,
        attempt: Dispatch | None = None,
        spans: tuple[tuple[str, int, int], ...] | None = None,
    ) -> Piece:
        """What the engine hands back after `tokens` tokens of this attempt."""
        one = attempt if attempt is not None else self.live[rollout_id]
        sent = len(one.token_bytes) // TOKEN_BYTES
        submitted = self._prompt_tokens.get(rollout_id, self._prompt_tokens.get(rollout_id.rsplit("/", 1)[0], sent))
        start = FIRST_TOKEN + sent - submitted
        if spans is None:
            spans = ((self.labels.get(one.engine_id, "default"), 0, tokens),)
        return Piece(ids(range(start, start + tokens)), reason, prompt_tokens=sent, version_spans=spans)

    def finish(
        self,
        rollout_id: str,
        tokens: int = 16,
        reason: str = "stop",
        spans: tuple[tuple[str, int, int], ...] | None = None,
    ) -> None:
        one = self.live[rollout_id]
        self.do(AttemptEnded(one.attempt_id, self.piece(rollout_id, tokens, reason, spans=spans)))

    def stopped(self, rollout_id: str, tokens: int = 0) -> None:
        """The engine did what an abort asked for, after `tokens` tokens that count.

        Where the rollout goes on elsewhere it has written one more: the last token of an interrupted attempt is given up.
        """
        one = self.live[rollout_id]
        world = self.core._world
        goes_on = world.attempts[one.attempt_id].abort_reason in INTERRUPTIONS and not world.shutting_down
        given_up = 1 if tokens and goes_on and tokens < one.max_new_tokens else 0
        self.finish(rollout_id, tokens + given_up, "abort")

    def stop_aborted(self, tokens: int = 0) -> list[str]:
        """Every attempt that was asked to stop does; returns their rollouts."""
        leaving = [rollout_id for rollout_id, one in self.live.items() if one.attempt_id in self.aborted]
        for rollout_id in leaving:
            self.stopped(rollout_id, tokens)
        return leaving

    def fail(self, rollout_id: str, fault: FaultKind, tokens: int = 0, message: str = "it broke") -> None:
        one = self.live[rollout_id]
        partial = self.piece(rollout_id, tokens, "abort") if tokens else None
        self.do(AttemptFailed(one.attempt_id, fault, message, partial))

    # control calls

    def answer(self, engine_id: str = "e0", **fields: Any) -> None:
        """The control call that is out there succeeds."""
        one = self.controls.pop(engine_id)
        if one.verb is Verb.VERIFY:
            fields.setdefault("label", self.labels.get(engine_id, "default"))
        if one.verb in (Verb.LOAD, Verb.NAME):
            self.labels[engine_id] = one.label
        self.do(ControlEnded(engine_id, one.control_id, **fields))

    def call_fails(self, engine_id: str = "e0", fault: FaultKind = FaultKind.BROKEN, message: str = "it broke") -> None:
        one = self.controls.pop(engine_id)
        self.do(ControlFailed(engine_id, one.control_id, fault, message))

    def out(self, engine_id: str = "e0") -> Verb | None:
        """The control call that waits for its answer."""
        one = self.controls.get(engine_id)
        return None if one is None else one.verb

    def answer_through(self, verb: Verb, engine_id: str = "e0") -> None:
        """Calls succeed up to and including this one."""
        for _ in range(20):
            last = self.out(engine_id)
            assert last is not None, f"{engine_id} has no call out before {verb.name}"
            self.answer(engine_id)
            if last is verb:
                return
        raise AssertionError(f"{verb.name} never came")

    def gone(self, engine_id: str) -> None:
        """An engine's process is over, and with it what it was asked for and the weights that it had."""
        self.controls.pop(engine_id, None)
        self.labels.pop(engine_id, None)

    def finish_updates(self) -> None:
        """Every call succeeds until none is out."""
        for _ in range(1000):
            if not self.controls:
                return
            self.answer(next(iter(self.controls)))
        raise AssertionError("control calls without end")

    def publish(self, version: int, run: str = RUN, **fields: Any) -> list[Action]:
        fields.setdefault("path", f"/weights/{version}")
        return self.do(PublishPolicy(run, PolicyUpdate(version, **fields)))

    def published(self, version: int, **fields: Any) -> None:
        """Publish, and have it on every engine."""
        self.publish(version, **fields)
        self.finish_updates()

    # what trainers say

    def cancel(self, *rollout_ids: str, groups: tuple[str, ...] = (), run: str = RUN) -> None:
        self.do(CancelRollouts(run, rollout_ids, groups))

    def budget(self, run: str = RUN, **fields: Any) -> list[Action]:
        return self.do(SetBudget(run, Budget(**fields)))

    def configure(self, run: str = RUN, **fields: Any) -> list[Action]:
        return self.do(ConfigureRun(run, RunSettings(**fields)))

    def step(
        self, step: int, state: TrainerState = TrainerState.TRAINING, run: str = RUN, **fields: Any
    ) -> list[Action]:
        return self.do(ReportStep(run, StepReport(step, state, **fields)))

    def acknowledge(
        self, *rollout_ids: str, used: bool | None = None, run: str = RUN, consumer: str = CONSUMER
    ) -> None:
        known = tuple(Acknowledgement(rollout_id, used) for rollout_id in rollout_ids)
        self.do(AcknowledgeResults(run, consumer, known))

    # what can be seen

    def view(self, rollout_id: str, run: str = RUN) -> RolloutView:
        seen = self.core.rollout_view(run, rollout_id, self.now)
        assert seen is not None, f"{rollout_id} is not known"
        return seen

    def state(self, rollout_id: str, run: str = RUN) -> RolloutState:
        return self.view(rollout_id, run).state

    def run_view(self, run: str = RUN) -> RunView:
        seen = self.core.run_view(run, self.now)
        assert seen is not None, f"run {run} is not known"
        return seen

    def result(self, rollout_id: str) -> RolloutResult:
        """The one result of a rollout that has ended."""
        assert rollout_id in self._ended, f"{rollout_id} has not ended: {self.core.explain(RUN, rollout_id)}"
        return self._ended[rollout_id]

    def outcome(self, rollout_id: str) -> Outcome:
        return self.result(rollout_id).outcome

    @property
    def ended(self) -> set[str]:
        """Ids of the rollouts whose end was told to a consumer."""
        return set(self._ended)

    def whole(self, rollout_id: str) -> bool:
        """Whether a result has every token that was written, once and in order, and spans that cover them."""
        result = self.result(rollout_id)
        tokens = unpack(result.token_bytes)
        covered = [position for span in result.spans for position in range(span.start, span.end)]
        return (
            tokens == list(range(FIRST_TOKEN, FIRST_TOKEN + len(tokens)))
            and result.generated_tokens == len(tokens)
            and covered == list(range(len(tokens)))
        )

    def gates(self) -> Mapping[Gate, int]:
        return self.core.statistics().gates

    def engine(self, engine_id: str) -> Engine:
        return self.core._world.engines[engine_id]

    def its_run(self, run: str = RUN) -> Run:
        return self.core._world.runs[run]

    def heard(self, kind: type[Kind], consumer: str = CONSUMER, run: str = RUN) -> list[Kind]:
        """Events of one kind that a consumer's stream carried, in order."""
        return [
            action.event
            for action in self.said
            if isinstance(action, Deliver)
            and action.consumer_id == consumer
            and action.run_id == run
            and isinstance(action.event, kind)
        ]

    def notices(self, kind: NoticeKind, consumer: str = CONSUMER) -> list[Notice]:
        return [notice for notice in self.heard(Notice, consumer) if notice.kind is kind]

    def records(self, event: str) -> list[Record]:
        return [action for action in self.said if isinstance(action, Record) and action.event == event]

    def streams_ended(self) -> list[EndStream]:
        return [action for action in self.said if isinstance(action, EndStream)]

    def running_on(self, engine_id: str) -> list[str]:
        return sorted(rollout_id for rollout_id, one in self.live.items() if one.engine_id == engine_id)

    def leaving(self) -> set[str]:
        """Rollouts whose attempt was asked to stop and has not yet."""
        return {rollout_id for rollout_id, one in self.live.items() if one.attempt_id in self.aborted}

    def quiet(self) -> None:
        """Nothing is queued or running, and nothing is booked anywhere (property P2)."""
        world = self.core._world
        statistics = self.core.statistics()
        assert not statistics.running and not statistics.attempts and not sum(statistics.queued.values())
        assert not self.live and not len(world.computing)
        for one in world.engines.values():
            assert (one.slots_used, one.short_used, one.critical_used, one.kv_claimed_tokens) == (0, 0, 0, 0)
            assert not one.kv_by_run and one.reserved_for is None
        for run in world.runs.values():
            assert (run.unfinished, run.ledger.running, run.ledger.kv_tokens) == (0, 0, 0)
            assert run.queued_bytes == [0] * len(RolloutClass) and not run.by_step and run.reserved_for is None

    # book-keeping

    def _note(self, action: Action) -> None:
        match action:
            case Dispatch():
                assert action.attempt_id not in self._attempt_ids, "an attempt id was used twice"
                assert len(action.attempt_id) == 32, "attempt ids have one length"
                before = self.live.get(action.rollout_id)
                twice = before is not None and before.attempt_id in self.core._world.attempts
                assert not twice, f"{action.rollout_id} runs twice at once"
                self._attempt_ids.add(action.attempt_id)
                self.dispatched.append(action)
                self.live[action.rollout_id] = action
            case Abort():
                live = {one.attempt_id for one in self.live.values()}
                assert action.attempt_id in live, "an abort names an attempt that is not live"
                assert action.attempt_id not in self.aborted, "an attempt was asked to stop twice"
                self.aborted.add(action.attempt_id)
            case Control():
                assert action.engine_id not in self.controls, f"two calls at once to {action.engine_id}"
                self.controls[action.engine_id] = action
            case Refuse():
                self.refusals.append(action.error)
            case Deliver(event=Finished(result=result)):
                known = self._ended.get(result.rollout_id, result)
                # The one thing that may happen to a result which nobody took: it becomes too old.
                stale_since = known.complete and not known.stale and result.stale
                assert known is result or stale_since, (
                    f"{result.rollout_id} ended twice: {known.outcome} and {result.outcome}"
                )
                self._ended[result.rollout_id] = result
            case _:
                pass
