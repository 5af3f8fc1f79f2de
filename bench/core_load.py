"""A load on the core alone: many runs with full queues, engines that finish whatever the driver picks.

The queue is topped up to `queued` rollouts, in groups of `GROUP`; prompts are a head that many groups share and a tail of
their own. A step ends some attempts at random (`free`), ticks, answers every dispatch with its first token, and acknowledges
what was delivered. Interrupted attempts end in the step after the abort. Engines
hold what the index believes.

Invariants
- Deterministic by seed; time advances by what ended, never by the clock of the machine.
- Every call of `handle` goes through `Meter`, split by what it is for.

What this module does not know: how the core decides.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rolloutd.bench.simulated import clock_seconds
from rolloutd.scheduler.actions import Abort, Action, Deliver, Dispatch, Finished
from rolloutd.scheduler.config import QueueSettings, SchedulerConfig
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    AttemptEnded,
    AttemptProgress,
    ConfigureRun,
    Event,
    JoinEngine,
    ReportStep,
    SetBudget,
    SubmitRollouts,
    Tick,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import Piece, RolloutResult
from rolloutd.scheduler.spec import (
    TOKEN_BYTES,
    Acknowledgement,
    Budget,
    EngineFacts,
    Quota,
    RolloutSpec,
    RunSettings,
    StepReport,
)
from rolloutd.scheduler.states import RolloutClass, TaskType, TrainerState

_T = TypeVar("_T")
GROUP = 8
STRATA = 16
HEAD_TOKENS, TAIL_TOKENS = 1024, 1024
HEADS_PER_RUN = 50
SHORT_NEW_TOKENS = 16
NEW_TOKENS = {
    TaskType.GENERATION: 1024,
    TaskType.REWARD: SHORT_NEW_TOKENS,
    TaskType.STATE_QUERY: SHORT_NEW_TOKENS,
    TaskType.REPLAY: 0,
}
OUTPUT_TOKENS = (64, 512)  # uniform; short work writes at most SHORT_NEW_TOKENS
SHORT_SHARE = 0.3  # of ends are short work, while there is some: what runs of it is over soon
VOCABULARY = 32_000
KV_TOKENS_PER_SLOT = 8192
SECONDS_PER_SLOT = 10.0  # how long an attempt lasts on average
TIMED_SHARE = 0.3
DEADLINE_SECONDS = 3_000.0
CLASSES = ((RolloutClass.CRITICAL, 0.5), (RolloutClass.REUSABLE, 0.3), (RolloutClass.BACKGROUND, 0.2))
TASKS = (
    (TaskType.GENERATION, 0.85),
    (TaskType.REWARD, 0.09),
    (TaskType.STATE_QUERY, 0.03),
    (TaskType.REPLAY, 0.03),
)
ACKNOWLEDGE_AT = 64  # results kept before they are acknowledged
SUBMIT_AT = 8  # groups in one submission: 64 rollouts, as the server cuts its events


@dataclass(slots=True)
class Meter:
    """What `handle` cost. seconds: CPU by purpose. calls: wall seconds of every call, for which the event loop stands still.
    longest: of the longest call, with its purpose."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: list[float] = field(default_factory=list)
    longest: tuple[float, str] = (0.0, "")

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self.longest = (0.0, "")

    def add(self, purpose: str, cpu_seconds: float, wall_seconds: float) -> None:
        self.seconds[purpose] += cpu_seconds
        self.calls.append(wall_seconds)
        if wall_seconds > self.longest[0]:
            self.longest = wall_seconds, purpose


class CoreLoad:
    """See the module. Sizes: rollouts queued over all runs, engines, slots of each."""

    def __init__(self, queued: int, *, runs: int = 8, engines: int = 64, slots: int = 32, seed: int = 0) -> None:
        self.meter = Meter()
        self._clock_seconds = clock_seconds()
        self.now = 0.0
        self.dispatched = 0
        self.ended = 0
        self.prompt_tokens = 0  # of results
        self.hit_tokens = 0  # of these, what the index predicted at the first dispatch
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        queue = QueueSettings(queue_capacity=queued + GROUP, queue_capacity_bytes=1 << 40)
        self.scheduler = Scheduler(SchedulerConfig(queue=queue), random.Random(seed), 0.0)
        self._live: list[str] = []  # attempt ids
        self._place: dict[str, int] = {}  # attempt id -> its place in `_live`
        self._stopping: deque[str] = deque()
        self._short: deque[str] = deque()  # attempts of short work, oldest first: they end soon
        self._acknowledgements: defaultdict[str, list[Acknowledgement]] = defaultdict(list)
        self._most: dict[str, int] = {}  # tokens an attempt may write
        self._queued = 0
        self._groups = 0
        self._wanted = queued
        self._slots = engines * slots
        for number in range(engines):
            facts = EngineFacts(
                engine_id=f"engine-{number:02d}",
                incarnation="1",
                slots=slots,
                kv_capacity_tokens=slots * KV_TOKENS_PER_SLOT,
                page_tokens=16,
            )
            self._send("set up", JoinEngine(facts))
        self._runs = [f"run-{number}" for number in range(runs)]
        self._heads = {run: [self._tokens(HEAD_TOKENS) for _ in range(HEADS_PER_RUN)] for run in self._runs}
        for number, run in enumerate(self._runs):
            state = TrainerState.WAITING if number % 2 else TrainerState.TRAINING
            self._send("set up", ConfigureRun(run, RunSettings()))
            self._send("set up", AttachConsumer(run, "trainer"))
            self._send("set up", ReportStep(run, StepReport(step=1, trainer_state=state)))
            self._send("set up", SetBudget(run, self._budget(runs)))
        self.top_up()
        self.settle()

    def top_up(self) -> None:
        """Submit whole groups until the queue is full again."""
        while self._queued + GROUP <= self._wanted:
            room = (self._wanted - self._queued) // GROUP
            run = self._random.choice(self._runs)
            specs = tuple(self._group(run) for _ in range(min(room, SUBMIT_AT)))
            self._send("submit", SubmitRollouts(run, "trainer", specs))

    def settle(self) -> None:
        """Tick until nothing more can be placed."""
        while self.scheduler.wants_tick:
            self._send("schedule", Tick())

    def step(self, free: int) -> None:
        """`free` attempts end, and the core fills what that frees."""
        self.now += free * SECONDS_PER_SLOT / self._slots
        while self._stopping:
            self._end(self._stopping.popleft(), "abort")
        for _ in range(min(free, len(self._live))):
            while self._short and self._short[0] not in self._place:
                self._short.popleft()
            brief = self._short and self._random.random() < SHORT_SHARE
            self._end(self._short.popleft() if brief else self._random.choice(self._live), "stop")
        self.settle()
        if self._queued + GROUP * SUBMIT_AT <= self._wanted:
            self.top_up()
            self.settle()

    def _end(self, attempt_id: str, reason: str) -> None:
        place = self._place.pop(attempt_id, None)
        if place is None:
            return
        last = self._live.pop()
        if last != attempt_id:
            self._live[place] = last
            self._place[last] = place
        most = self._most.pop(attempt_id)
        tokens = self._tokens(min(most, self._random.randint(*OUTPUT_TOKENS)))
        piece = Piece(tokens, reason, logprob_bytes=bytes(len(tokens)), prompt_tokens=HEAD_TOKENS + TAIL_TOKENS)
        self._send("end", AttemptEnded(attempt_id, piece))

    def _send(self, purpose: str, event: Event) -> None:
        started, cpu_started = time.perf_counter(), time.thread_time()
        actions = self.scheduler.handle(event, self.now)
        cpu_seconds = time.thread_time() - cpu_started - self._clock_seconds
        self.meter.add(purpose, cpu_seconds, time.perf_counter() - started)
        self._take(actions)

    def _take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    self._queued -= 1
                    self.dispatched += 1
                    self._place[action.attempt_id] = len(self._live)
                    self._live.append(action.attempt_id)
                    self._most[action.attempt_id] = action.max_new_tokens
                    if action.max_new_tokens == SHORT_NEW_TOKENS:
                        self._short.append(action.attempt_id)
                    prompt_tokens = len(action.token_bytes) // TOKEN_BYTES
                    cached_tokens = self.scheduler._world.attempts[action.attempt_id].predicted_tokens
                    self._send("first token", AttemptProgress(action.attempt_id, 1, prompt_tokens, cached_tokens))
                case Abort():
                    self._queued += 1  # it comes back
                    self._stopping.append(action.attempt_id)
                case Deliver():
                    if isinstance(action.event, Finished):
                        self._note_result(action.run_id, action.event.result)
                case _:
                    pass

    def _note_result(self, run: str, result: RolloutResult) -> None:
        self.ended += 1
        self.prompt_tokens += result.prompt_tokens
        self.hit_tokens += result.predicted_cached_tokens
        waiting = self._acknowledgements[run]
        waiting.append(Acknowledgement(result.rollout_id, used=True))
        if len(waiting) >= ACKNOWLEDGE_AT:
            self._acknowledgements[run] = []
            self._send("acknowledge", AcknowledgeResults(run, "trainer", tuple(waiting)))

    def _group(self, run: str) -> RolloutSpec:
        self._groups += 1
        self._queued += GROUP
        task = self._pick(TASKS)
        return RolloutSpec(
            rollout_id=f"group-{self._groups}",
            token_bytes=self._random.choice(self._heads[run]) + self._tokens(TAIL_TOKENS),
            samples=GROUP,
            rollout_class=self._pick(CLASSES),
            task_type=task,
            stratum=f"stratum-{self._random.randrange(STRATA)}",
            deadline_seconds=DEADLINE_SECONDS if self._random.random() < TIMED_SHARE else 0.0,
            max_new_tokens=NEW_TOKENS[task],
            logprobs=True,
        )

    def _budget(self, runs: int) -> Budget:
        share = self._slots // runs
        return Budget(
            max_rollouts=2 * share,
            max_kv_tokens=2 * share * KV_TOKENS_PER_SLOT,
            classes={RolloutClass.BACKGROUND: Quota(share=0.3), RolloutClass.REUSABLE: Quota(floor_rollouts=2)},
            tasks={TaskType.REWARD: Quota(floor_rollouts=1)},
        )

    def _tokens(self, count: int) -> bytes:
        return self._numbers.integers(3, VOCABULARY, count, dtype=np.uint32).tobytes()

    def _pick(self, shares: tuple[tuple[_T, float], ...]) -> _T:
        return self._random.choices([one for one, _ in shares], [share for _, share in shares])[0]
