"""Everything the core can ask for. The server turns actions into awaits and their results into events.

Invariants
- One `Dispatch` per attempt id, ever; an `Abort` names an attempt that was dispatched and has not ended.
- `Deliver` with a cursor > 0 is durable: it is repeated on re-attachment until acknowledged.
- Nothing here changes once it is made, also what is not frozen because it is made for every rollout (see `result`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.states import AbortReason, PauseMode, RolloutState, UpdateState, Verb
from rolloutd.scheduler.views import Decision


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Dispatch:
    """Start one attempt on one engine. `token_bytes` is prompt plus kept partial tokens."""

    attempt_id: str
    engine_id: str
    batch_id: int
    run_id: str
    rollout_id: str
    token_bytes: bytes
    text: str | None
    max_new_tokens: int
    sampling: Mapping[str, Any]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs_from: int | None
    engine_params: Mapping[str, Any]
    cache_salt: str = ""  # where its KV may be matched

    def __init__(
        self,
        attempt_id: str,
        engine_id: str,
        batch_id: int,
        run_id: str,
        rollout_id: str,
        token_bytes: bytes,
        text: str | None,
        max_new_tokens: int,
        sampling: Mapping[str, Any],
        logprobs: bool,
        top_logprobs: int,
        prompt_logprobs_from: int | None,
        engine_params: Mapping[str, Any],
        cache_salt: str = "",
    ) -> None:
        self.attempt_id = attempt_id
        self.engine_id = engine_id
        self.batch_id = batch_id
        self.run_id = run_id
        self.rollout_id = rollout_id
        self.token_bytes = token_bytes
        self.text = text
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.logprobs = logprobs
        self.top_logprobs = top_logprobs
        self.prompt_logprobs_from = prompt_logprobs_from
        self.engine_params = engine_params
        self.cache_salt = cache_salt


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class Abort:
    """Stop one attempt; its end still comes as AttemptEnded or AttemptFailed."""

    attempt_id: str
    engine_id: str
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class Control:
    """One control call to an engine; ends with ControlEnded or ControlFailed. An engine has one at a time.

    mode: of PAUSE. path: of LOAD. label: of LOAD and NAME. tags: of RELEASE_MEMORY and RESUME_MEMORY.
    """

    control_id: int
    engine_id: str
    verb: Verb
    mode: PauseMode = PauseMode.RETRACT
    path: str = ""
    label: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """One engine went on with a publication. `aborted`: attempts of the run that were interrupted for it so far."""

    run_id: str
    pool: str
    version: int
    engine_id: str
    state: UpdateState
    message: str = ""
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """A publication is over: engines that hold the version now, and those that do not."""

    run_id: str
    pool: str
    version: int
    updated: tuple[str, ...]
    failed: tuple[str, ...]


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Accepted:
    rollout_id: str
    state: RolloutState
    queue_position: int
    matched_prefix_tokens: int
    estimated_start_seconds: float
    attached: bool  # the id was known already: this is the same rollout

    def __init__(
        self,
        rollout_id: str,
        state: RolloutState,
        queue_position: int,
        matched_prefix_tokens: int,
        estimated_start_seconds: float,
        attached: bool,
    ) -> None:
        self.rollout_id = rollout_id
        self.state = state
        self.queue_position = queue_position
        self.matched_prefix_tokens = matched_prefix_tokens
        self.estimated_start_seconds = estimated_start_seconds
        self.attached = attached


@dataclass(frozen=True, slots=True)
class Rejected:
    rollout_id: str
    error: Refusal


@dataclass(frozen=True, slots=True)
class Progressed:
    rollout_id: str
    generated_tokens: int
    engine_id: str


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Finished:
    result: RolloutResult

    def __init__(
        self,
        result: RolloutResult,
    ) -> None:
        self.result = result


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class GroupFinished:
    group_id: str
    complete: bool
    rollout_ids: tuple[str, ...]
    failed_rollout_ids: tuple[str, ...]
    surplus_rollout_ids: tuple[str, ...]

    def __init__(
        self,
        group_id: str,
        complete: bool,
        rollout_ids: tuple[str, ...],
        failed_rollout_ids: tuple[str, ...],
        surplus_rollout_ids: tuple[str, ...] = (),
    ) -> None:
        self.group_id = group_id
        self.complete = complete
        self.rollout_ids = rollout_ids
        self.failed_rollout_ids = failed_rollout_ids
        self.surplus_rollout_ids = surplus_rollout_ids


class NoticeKind(enum.IntEnum):
    NO_CAPACITY = 0
    BUDGET_CHANGED = 1
    BUDGET_LEASE_EXPIRED = 2
    DRAINING = 3
    RESULTS_EXPIRED = 4
    VERSION_PUBLISHED = 5


@dataclass(frozen=True, slots=True)
class Notice:
    kind: NoticeKind
    message: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Attached:
    """Answer to AttachConsumer: where the stream stands."""

    cursor: int
    unfinished_rollouts: int
    undelivered_events: int


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Deliver:
    """One event for one consumer's stream; dropped by the server when the consumer is not connected."""

    run_id: str
    consumer_id: str
    cursor: int
    event: Accepted | Rejected | Progressed | Finished | GroupFinished | Notice | Attached

    def __init__(
        self,
        run_id: str,
        consumer_id: str,
        cursor: int,
        event: Accepted | Rejected | Progressed | Finished | GroupFinished | Notice | Attached,
    ) -> None:
        self.run_id = run_id
        self.consumer_id = consumer_id
        self.cursor = cursor
        self.event = event


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A durable event happened whose consumer is not connected: it is delivered when one attaches."""

    run_id: str
    event: Finished | GroupFinished


@dataclass(frozen=True, slots=True)
class EndStream:
    """Close a consumer's stream; `error` None means a clean end."""

    run_id: str
    consumer_id: str
    error: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event was not accepted; nothing changed. Always the only action of a refused event."""

    error: Refusal


@dataclass(frozen=True, slots=True)
class Record:
    """Something a person should find in the log. `level`: "info" or "warning"."""

    level: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision about a run rather than about one of its rollouts."""

    decision: Decision


def ended(action: Action) -> RolloutResult | None:
    """The result of a rollout that ended just now; None for all else, also for a result that is delivered once more because its
    rollout was submitted once more: that has no cursor. (After an AttachConsumer, results that ended before have one.)
    """
    if isinstance(action, Undelivered) or (isinstance(action, Deliver) and action.cursor):
        return action.event.result if isinstance(action.event, Finished) else None
    return None


Action = (
    Dispatch
    | Abort
    | Control
    | PublishProgress
    | PublishEnded
    | Deliver
    | Undelivered
    | EndStream
    | Refuse
    | Record
    | Decided
)
