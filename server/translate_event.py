"""From what the core says to the contract's messages: events of a stream, results, rollouts, decisions.

Invariants
- Enum values of the contract are the core's plus one (zero is UNSPECIFIED) where the lists agree; else a table.
- A result says exactly what the core's result says; nothing is rounded or left out.

What this module does not know: streams and RPCs.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf import struct_pb2

from rolloutd.scheduler import actions
from rolloutd.scheduler.result import AttemptRecord, RolloutResult, Span
from rolloutd.scheduler.states import Gate, RolloutState, TaskType
from rolloutd.scheduler.views import Decision, DecisionKind, RolloutView, StoryEntry
from rolloutd.server.errors import to_error
from rolloutd.server.outbox import ItemRefused
from rolloutd.v1 import (
    ITEM_KIND_SUBMISSION,
    Candidate,
    Event,
    Notice,
    Rejected,
    Rollout,
    ServerInfo,
    Times,
    TopLogprobs,
)
from rolloutd.v1 import Decision as DecisionMessage
from rolloutd.v1 import RolloutResult as ResultMessage
from rolloutd.v1 import StoryEntry as StoryMessage
from rolloutd.v1.result_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
)

_FINISH_REASONS: Mapping[str, FinishReason.ValueType] = {
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
    "abort": FINISH_REASON_ABORT,
}

# The contract shows a rollout that is held on purpose apart from one that waits for its turn.
_HELD_GATES = frozenset({Gate.HELD_FOR_LEADER, Gate.HELD_FOR_PREFIX})
_STATES = {
    RolloutState.QUEUED: 1,
    RolloutState.DISPATCHED: 3,
    RolloutState.RUNNING: 4,
    RolloutState.ABORTING: 5,
    RolloutState.FINISHED: 6,
}
_HELD_STATE = 2

_NOTICES = {
    actions.NoticeKind.NO_CAPACITY: 1,
    actions.NoticeKind.BUDGET_CHANGED: 3,
    actions.NoticeKind.BUDGET_LEASE_EXPIRED: 4,
    actions.NoticeKind.DRAINING: 5,
    actions.NoticeKind.RESULTS_EXPIRED: 9,
    actions.NoticeKind.VERSION_PUBLISHED: 10,
}

_DECISIONS = {
    DecisionKind.DISPATCHED: 1,
    DecisionKind.HELD: 2,
    DecisionKind.PREEMPTED: 3,
    DecisionKind.INTERRUPTED: 3,
    DecisionKind.RETRIED: 4,
    DecisionKind.PROMOTED: 5,
    DecisionKind.REFUSED: 6,
    DecisionKind.RULE_FIRED: 7,
    DecisionKind.RULE_ENDED: 8,
}


def to_state(state: RolloutState, gate: Gate = Gate.OPEN) -> Any:
    """The contract's state number."""
    if state is RolloutState.QUEUED and gate in _HELD_GATES:
        return _HELD_STATE
    return _STATES[state]


def to_event(
    entry: actions.Deliver | ItemRefused, server: ServerInfo, policy_version: int, into: Event | None = None
) -> Event:
    """One event of a stream, written in place where the caller has one (messages are copied on assignment). `server`
    goes into Attached."""
    message = Event() if into is None else into
    if isinstance(entry, ItemRefused):
        kind: Any = entry.kind
        message.rejected.MergeFrom(Rejected(rollout_id=entry.rollout_id, kind=kind, error=to_error(entry.error)))
        return message
    event = entry.event
    if entry.cursor:
        message.cursor = entry.cursor
    match event:
        case actions.Finished():
            to_result(event.result, message.finished)
        case actions.GroupFinished():
            group = message.group_finished
            group.group_id = event.group_id
            group.complete = event.complete
            group.rollout_ids.extend(event.rollout_ids)
            group.failed_rollout_ids.extend(event.failed_rollout_ids)
            group.surplus_rollout_ids.extend(event.surplus_rollout_ids)
        case actions.Accepted():
            accepted = message.accepted
            accepted.rollout_id = event.rollout_id
            accepted.state = to_state(event.state)
            accepted.queue_position = event.queue_position
            accepted.matched_prefix_tokens = event.matched_prefix_tokens
            accepted.estimated_start_seconds = event.estimated_start_seconds
            accepted.attached = event.attached
            accepted.policy_version = policy_version
        case actions.Rejected():
            rejected = Rejected(rollout_id=event.rollout_id, kind=ITEM_KIND_SUBMISSION, error=to_error(event.error))
            message.rejected.MergeFrom(rejected)
        case actions.Progressed():
            progress = message.progress
            progress.rollout_id = event.rollout_id
            progress.generated_tokens = event.generated_tokens
            progress.engine_id = event.engine_id
        case actions.Notice():
            notice: Any = _NOTICES[event.kind]
            message.notice.MergeFrom(
                Notice(kind=notice, message=event.message, seconds=event.seconds, policy_version=policy_version)
            )
        case actions.Attached():
            attached = message.attached
            attached.cursor = event.cursor
            attached.pending_events = event.undelivered_events
            attached.unfinished_rollouts = event.unfinished_rollouts
            attached.policy_version = policy_version
            attached.server.CopyFrom(server)
    return message


def to_result(result: RolloutResult, into: ResultMessage | None = None) -> ResultMessage:
    """The end of one rollout, written in place where the caller has a message."""
    message = ResultMessage() if into is None else into
    message.rollout_id = result.rollout_id
    _add_plain(message, result)
    rollout_class: Any = result.rollout_class + 1
    task_type: Any = result.task_type + 1
    outcome: Any = result.outcome + 1
    message.rollout_class = rollout_class
    message.task_type = task_type
    message.outcome = outcome
    message.finish_reason = to_finish_reason(result)
    add_spans(message.spans, result.spans)
    add_history(message.history, result.history)
    if result.batch_id:
        message.batch_id = to_batch_id(result.batch_id)
    set_times(message.times, result)
    if result.step is not None:
        message.step = result.step
    if result.error is not None:
        message.error.CopyFrom(to_error(result.error))
    for row in result.top_logprobs:
        message.top_logprobs.append(
            TopLogprobs(token_ids=[token for _, token in row], logprobs=[logprob for logprob, _ in row])
        )
    if isinstance(result.matched_stop, int):
        message.matched_token_id = result.matched_stop
    elif isinstance(result.matched_stop, str):
        message.matched_string = result.matched_stop
    if result.extras:
        message.extras.CopyFrom(to_struct(result.extras))
    return message


def _add_plain(message: ResultMessage, result: RolloutResult) -> None:
    """Fields that the contract has under the same name and type. What is absent reads as zero or empty."""
    if result.run_id:
        message.run_id = result.run_id
    if result.group_id:
        message.group_id = result.group_id
    if result.sample_index:
        message.sample_index = result.sample_index
    if result.session_id:
        message.session_id = result.session_id
    if result.turn:
        message.turn = result.turn
    if result.complete:
        message.complete = result.complete
    if result.text:
        message.text = result.text
    if result.prompt_token_bytes:
        message.prompt_token_bytes = result.prompt_token_bytes
    if result.prompt_logprob_bytes:
        message.prompt_logprob_bytes = result.prompt_logprob_bytes
    if result.engine_id:
        message.engine_id = result.engine_id
    if result.attempts:
        message.attempts = result.attempts
    if result.preemptions:
        message.preemptions = result.preemptions
    if result.prompt_tokens:
        message.prompt_tokens = result.prompt_tokens
    if result.cached_tokens:
        message.cached_tokens = result.cached_tokens
    if result.generated_tokens:
        message.generated_tokens = result.generated_tokens
    if result.clipped:
        message.clipped = result.clipped
    if result.prompt_hash:
        message.prompt_hash = result.prompt_hash
    if result.token_bytes:
        message.token_bytes = result.token_bytes
    if result.logprob_bytes:
        message.logprob_bytes = result.logprob_bytes
    if result.policy_version:
        message.policy_version = result.policy_version
    if result.stale:
        message.stale = result.stale


def add_spans(target: Any, spans: Iterable[Span]) -> None:
    """`target`: a repeated field of the contract's spans."""
    for span in spans:
        target.add(
            policy_version=span.policy_version,
            engine_version=span.engine_version,
            start=span.start,
            end=span.end,
            engine_id=span.engine_id,
            attempt=span.attempt,
        )


def add_history(target: Any, history: Iterable[AttemptRecord]) -> None:
    """`target`: a repeated field of the contract's attempts."""
    for record in history:
        target.add(
            number=record.number,
            engine_id=record.engine_id,
            batch_id=to_batch_id(record.batch_id),
            policy_version=record.policy_version,
            started_seconds=record.started_seconds,
            ended_seconds=record.ended_seconds,
            generated_tokens=record.generated_tokens,
            end=record.end,
        )


def set_times(times: Times, result: RolloutResult) -> None:
    times.queued_seconds = result.queued_seconds
    times.first_token_seconds = result.first_token_seconds
    times.running_seconds = result.running_seconds
    times.total_seconds = result.total_seconds


def to_batch_id(batch_id: int) -> str:
    """Batches are numbered from 1 in the core; 0 is none."""
    return str(batch_id) if batch_id else ""


def to_rollout(view: RolloutView, now: float, with_result: bool) -> Rollout:
    """A rollout as it is `now`, on the core's clock."""
    rollout_class: Any = view.rollout_class + 1
    task_type: Any = view.task_type + 1
    origin: Any = view.origin + 1
    message = Rollout(
        rollout_id=view.rollout_id,
        run_id=view.run_id,
        consumer_id=view.consumer_id,
        state=to_state(view.state, view.gate),
        rollout_class=rollout_class,
        task_type=task_type,
        pool=view.pool,
        group_id=view.group_id,
        sample_index=view.sample_index,
        session_id=view.session_id,
        turn=view.turn,
        parent_rollout_id=view.parent_rollout_id,
        stratum=view.stratum,
        origin=origin,
        needed_by_step=view.needed_by_step,
        prompt_tokens=view.prompt_tokens,
        max_new_tokens=view.max_new_tokens,
        generated_tokens=view.generated_tokens,
        attempts=view.attempts,
        preemptions=view.preemptions,
        engine_id=view.engine_id,
        batch_id=to_batch_id(view.batch_id),
        age_seconds=max(0.0, now - view.accepted_at_seconds),
    )
    if with_result and view.result is not None:
        message.result.CopyFrom(to_result(view.result))
    return message


def to_decision(decision: Decision, now: float, policy_version: int) -> DecisionMessage:
    """`now` on the core's clock, for the age."""
    kind: Any = _DECISIONS[decision.kind]
    return DecisionMessage(
        age_seconds=max(0.0, now - decision.at_seconds),
        kind=kind,
        batch_id=to_batch_id(decision.batch_id),
        engine_id=decision.engine_id,
        gate="" if decision.gate is Gate.OPEN else decision.gate.name.lower(),
        candidates=[
            Candidate(
                engine_id=candidate.engine_id,
                hit_tokens=candidate.hit_tokens,
                terms=dict(candidate.terms),
                score=candidate.score,
            )
            for candidate in decision.candidates
        ],
        message=decision.message,
        policy_version=policy_version,
    )


def to_story_entry(entry: StoryEntry, now: float) -> StoryMessage:
    """The core tells a move as "FROM -> TO: cause"; anything else is a cause alone."""
    move, separator, cause = entry.text.partition(": ")
    before, arrow, after = move.partition(" -> ")
    if not separator or not arrow:
        before, after, cause = "", "", entry.text
    return StoryMessage(age_seconds=max(0.0, now - entry.at_seconds), from_state=before, to_state=after, cause=cause)


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Plain values as a Struct; bytes as base64 text, numbers that JSON has no form for as text."""
    message = struct_pb2.Struct()
    message.update({str(key): _plain(value) for key, value in values.items()})
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def to_finish_reason(result: RolloutResult) -> FinishReason.ValueType:
    """Why generation ended; UNSPECIFIED where there was none."""
    if result.task_type is TaskType.REPLAY:
        return FINISH_REASON_UNSPECIFIED
    return _FINISH_REASONS.get(result.finish_reason, FINISH_REASON_UNSPECIFIED)
