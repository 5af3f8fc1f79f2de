"""Everything that can happen to the core. Frozen, comparable, replayable.

Callers' requests carry what the caller said; engines' reports carry what the engine said. No event carries a clock reading:
the time of an event is the `now` that it is handled with.
"""

from __future__ import annotations

from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.kv_changes import KvChange
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import (
    Acknowledgement,
    Budget,
    EngineFacts,
    PolicyUpdate,
    RolloutSpec,
    RolloutUpdate,
    RunSettings,
    StepReport,
)
from rolloutd.scheduler.states import FaultKind


@dataclass(frozen=True, slots=True)
class ConfigureRun:
    run_id: str
    settings: RunSettings


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Other settings from now on, rules among them. Refused when one differs that is fixed while the core runs."""

    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class PauseRun:
    """Admit nothing more for this run; what runs, runs on."""

    run_id: str


@dataclass(frozen=True, slots=True)
class ResumeRun:
    run_id: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """Finish everything of the run with RUN_ENDED; undelivered results stay until acknowledged or expired."""

    run_id: str


@dataclass(frozen=True, slots=True)
class AttachConsumer:
    """A stream opened. `cursor`: the last durable event this consumer has; older ones count as acknowledged.

    An epoch below the run's is refused (FENCED); a higher one fences the older. `take_over`: consumers whose unfinished
    rollouts and undelivered events move to this one.
    """

    run_id: str
    consumer_id: str
    epoch: int = 0
    cursor: int = 0
    take_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DetachConsumer:
    """The consumer's stream is gone (not merely half-closed)."""

    run_id: str
    consumer_id: str


@dataclass(frozen=True, slots=True)
class CloseConsumer:
    """The consumer will submit nothing more: end its stream when everything it submitted was delivered."""

    run_id: str
    consumer_id: str


@dataclass(frozen=True, slots=True)
class SubmitRollouts:
    run_id: str
    consumer_id: str
    specs: tuple[RolloutSpec, ...]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class UpdateRollouts:
    run_id: str
    updates: tuple[RolloutUpdate, ...]
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CancelRollouts:
    """By id, or whole groups. Children of a cancelled parent go with it."""

    run_id: str
    rollout_ids: tuple[str, ...] = ()
    group_ids: tuple[str, ...] = ()
    epoch: int | None = None  # None: not a trainer's call, not fenced


@dataclass(frozen=True, slots=True)
class AcknowledgeResults:
    run_id: str
    consumer_id: str
    acknowledgements: tuple[Acknowledgement, ...] = ()
    through_cursor: int = 0


@dataclass(frozen=True, slots=True)
class SetBudget:
    run_id: str
    budget: Budget
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ReportStep:
    run_id: str
    report: StepReport
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    run_id: str
    update: PolicyUpdate
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class WeightsPushed:
    """The trainer's word that it pushed the weights of a version to an engine, or failed to."""

    run_id: str
    pool: str
    version: int
    engine_id: str = ""  # "": to every engine that waits for them
    error: str = ""  # "": they are there
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ControlEnded:
    """A control call to an engine was answered."""

    engine_id: str
    control_id: int
    flushed: bool = True  # FLUSH and LOAD: whether the cache was dropped
    label: str = ""  # VERIFY: of the weights that it holds


@dataclass(frozen=True, slots=True)
class ControlFailed:
    engine_id: str
    control_id: int
    fault: FaultKind
    message: str


@dataclass(frozen=True, slots=True)
class JoinEngine:
    """A door registered an engine (again). A new incarnation means its cache and its attempts are gone."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class LoseEngine:
    """The engine cannot be reached: place nothing there. Its attempts end by their own reports."""

    engine_id: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineReadiness:
    """The engine is reachable but does not want work now (starting, paused, shutting down), or wants it again."""

    engine_id: str
    ready: bool
    age_seconds: float = 0.0  # since the engine was asked


@dataclass(frozen=True, slots=True)
class DrainEngine:
    engine_id: str


@dataclass(frozen=True, slots=True)
class RemoveEngine:
    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A load report; totals are cumulative since the engine's start, tokens unless the name says otherwise."""

    engine_id: str
    running_rollouts: int
    waiting_rollouts: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    generated_tokens_per_second: float
    prefilled_tokens_total: int
    prefill_busy_seconds_total: float


@dataclass(frozen=True, slots=True)
class KvCacheChanged:
    """What an engine's process reported of its KV cache, in order."""

    engine_id: str
    incarnation: str
    changes: tuple[KvChange, ...]


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """Tokens of one attempt so far; the first report is the first token."""

    attempt_id: str
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The engine ended an attempt by itself or after an abort."""

    attempt_id: str
    piece: Piece


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class AttemptFailed:
    attempt_id: str
    fault: FaultKind
    message: str
    partial: Piece | None = None


@dataclass(frozen=True, slots=True)
class BeginShutdown:
    """Accept nothing, end what is queued with SHUTDOWN, abort what still runs after the grace."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed or events came in: do what is due, then schedule."""


Event = (
    ConfigureRun
    | Reconfigure
    | PauseRun
    | ResumeRun
    | EndRun
    | AttachConsumer
    | DetachConsumer
    | CloseConsumer
    | SubmitRollouts
    | UpdateRollouts
    | CancelRollouts
    | AcknowledgeResults
    | SetBudget
    | ReportStep
    | PublishPolicy
    | WeightsPushed
    | ControlEnded
    | ControlFailed
    | JoinEngine
    | LoseEngine
    | EngineReadiness
    | DrainEngine
    | RemoveEngine
    | EngineLoad
    | KvCacheChanged
    | AttemptProgress
    | AttemptEnded
    | AttemptFailed
    | BeginShutdown
    | Tick
)
