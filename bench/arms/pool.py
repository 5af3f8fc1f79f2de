"""What every control arm needs: the engines it knows, the rollouts it sent there, results for the trainer, new weights.

Invariants
- One attempt per rollout, but for engines that fail it: then it goes through the arm's own choice again.
- In-flight counts are those of attempts that have not ended.
- New weights come as a trainer brings them to bare engines: pause (running work goes back to the engine's queue), flush, load,
  resume; nothing is sent to an engine meanwhile.
- Each event is handled at once: an arm never asks for a Tick.

What this module does not know: how an engine is chosen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rolloutd.bench.arms.result import completed
from rolloutd.engines.sim.radix import RadixCache
from rolloutd.scheduler.actions import Action, Control, Deliver, Dispatch, Finished, PublishEnded
from rolloutd.scheduler.events import (
    AttemptEnded,
    AttemptFailed,
    ControlEnded,
    ControlFailed,
    Event,
    JoinEngine,
    PublishPolicy,
    SubmitRollouts,
)
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import TOKEN_BYTES, EngineFacts, PolicyUpdate, RolloutSpec
from rolloutd.scheduler.states import PauseMode, TaskType, Verb

UPDATE = (Verb.PAUSE, Verb.FLUSH, Verb.LOAD, Verb.RESUME)


@dataclass(slots=True)
class ArmRollout:
    """One rollout that an arm has; `number` counts arrivals."""

    number: int
    run_id: str
    consumer_id: str
    spec: RolloutSpec
    submitted_at: float
    started_at: float = 0.0
    attempts: int = 0

    @property
    def hidden_output_tokens(self) -> int:
        """What only an oracle may look at."""
        end: int = self.spec.sampling["custom_params"]["end_at_tokens"]
        return end - self.spec.prompt_tokens


@dataclass(slots=True, eq=False)
class ArmEngine:
    """One engine as an arm sees it. `sent`: prefixes that went there (and, as routers do, never what was evicted there)."""

    facts: EngineFacts
    number: int
    in_flight: int = 0
    sent: RadixCache = field(init=False)
    update: deque[Verb] = field(default_factory=deque)  # calls that are still to come

    def __post_init__(self) -> None:
        self.sent = RadixCache(self.facts.page_tokens)

    @property
    def updating(self) -> bool:
        return bool(self.update)

    def matched_tokens(self, prompt: bytes) -> int:
        """Of the prompt, tokens that were sent there before, in whole pages."""
        return self.sent.peek_pages("", prompt, len(prompt) // TOKEN_BYTES) * self.facts.page_tokens


class ArmPool:
    """An arm without its choice: subclasses say what happens to what `arrived`, and what to do when something `ended`."""

    def __init__(self) -> None:
        self.engines: list[ArmEngine] = []
        self.now = 0.0
        self._by_id: dict[str, ArmEngine] = {}
        self._running: dict[str, tuple[ArmRollout, ArmEngine]] = {}
        self._actions: list[Action] = []
        self._arrivals = 0
        self._attempts = 0
        self._cursors: dict[tuple[str, str], int] = {}
        self._controls = 0
        self._publication: tuple[str, PolicyUpdate] | None = None

    # what a subclass has -----------------------------------------------------------------------------------------------

    def arrived(self, rollouts: Sequence[ArmRollout]) -> None:
        """These are to be served."""
        raise NotImplementedError

    def ended(self, engine: ArmEngine) -> None:
        """An engine has room again, for one rollout or for all."""

    # the machine -------------------------------------------------------------------------------------------------------

    @property
    def wants_tick(self) -> bool:
        return False

    def next_due(self) -> float:
        return math.inf

    def handle(self, event: Event, now: float) -> list[Action]:
        self.now = now
        match event:
            case JoinEngine():
                engine = ArmEngine(event.facts, len(self.engines))
                self.engines.append(engine)
                self._by_id[event.facts.engine_id] = engine
            case SubmitRollouts():
                self._submit(event)
            case AttemptEnded():
                self._end(event.attempt_id, event.piece)
            case AttemptFailed():
                self._again(event.attempt_id)
            case PublishPolicy():
                self._publish(event)
            case ControlEnded():
                self._next_call(self._by_id[event.engine_id])
            case ControlFailed():
                raise AssertionError(f"{event.engine_id} failed a control call: {event.message}")
            case _:
                pass  # loads, progress, steps and acknowledgements tell these arms nothing
        actions, self._actions = self._actions, []
        return actions

    def send(self, rollout: ArmRollout, engine: ArmEngine) -> None:
        """Dispatch it there."""
        self._attempts += 1
        rollout.attempts += 1
        if rollout.attempts == 1:
            rollout.started_at = self.now
        attempt_id = f"{self._attempts:032x}"
        self._running[attempt_id] = (rollout, engine)
        engine.in_flight += 1
        spec = rollout.spec
        engine.sent.insert("", spec.token_bytes)
        sampling = dict(spec.sampling)
        if spec.seeds:
            sampling["sampling_seed"] = spec.seeds[0]
        self._actions.append(
            Dispatch(
                attempt_id=attempt_id,
                engine_id=engine.facts.engine_id,
                batch_id=self._attempts,
                run_id=rollout.run_id,
                rollout_id=spec.rollout_id,
                token_bytes=spec.token_bytes,
                text=None,
                max_new_tokens=spec.max_new_tokens,
                sampling=sampling,
                logprobs=spec.logprobs,
                top_logprobs=0,
                prompt_logprobs_from=0 if spec.task_type is TaskType.REPLAY else None,
                engine_params={},
            )
        )

    def _submit(self, event: SubmitRollouts) -> None:
        rollouts = []
        for spec in event.specs:
            if spec.samples != 1:
                raise ValueError(f"rollout {spec.rollout_id}: a control arm takes one sample per submission")
            self._arrivals += 1
            rollouts.append(ArmRollout(self._arrivals, event.run_id, event.consumer_id, spec, self.now))
        self.arrived(rollouts)

    def _end(self, attempt_id: str, piece: Piece) -> None:
        rollout, engine = self._running.pop(attempt_id)
        engine.in_flight -= 1
        key = (rollout.run_id, rollout.consumer_id)
        self._cursors[key] = cursor = self._cursors.get(key, 0) + 1
        times = (rollout.submitted_at, rollout.started_at, self.now)
        result = completed(rollout.run_id, rollout.spec, piece, engine.facts.engine_id, rollout.attempts, times)
        self._actions.append(Deliver(*key, cursor, Finished(result)))
        self.ended(engine)

    def _again(self, attempt_id: str) -> None:
        rollout, engine = self._running.pop(attempt_id)
        engine.in_flight -= 1
        self.arrived([rollout])
        self.ended(engine)

    # new weights -------------------------------------------------------------------------------------------------------

    def _publish(self, event: PublishPolicy) -> None:
        if self._publication is not None:
            raise AssertionError("a control arm takes one publication at a time")
        self._publication = (event.run_id, event.update)
        for engine in self.engines:
            engine.update = deque(UPDATE)
            self._call(engine)

    def _call(self, engine: ArmEngine) -> None:
        assert self._publication is not None
        update = self._publication[1]
        self._controls += 1
        self._actions.append(
            Control(
                self._controls,
                engine.facts.engine_id,
                engine.update[0],
                mode=PauseMode.RETRACT,
                path=update.path,
                label=str(update.version),
            )
        )

    def _next_call(self, engine: ArmEngine) -> None:
        assert self._publication is not None
        engine.update.popleft()
        if engine.update:
            self._call(engine)
            return
        if not any(other.updating for other in self.engines):
            run_id, update = self._publication
            self._publication = None
            updated = tuple(one.facts.engine_id for one in self.engines)
            self._actions.append(PublishEnded(run_id, update.pool, update.version, updated, ()))
        self.ended(engine)
