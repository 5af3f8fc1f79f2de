"""Where results come from, as the contract's messages: the lineage of a rollout, the completeness of a group.

Invariants
- A record is made from a rollout's and a group's view alone, so that GetRollout and the lineage file say the same.
- Everything a result says about itself is in its lineage, but for tokens, log-probs, text and the engine's extras.

What this module does not know: when records are asked for or written.
"""

from __future__ import annotations

from typing import Any

from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.views import GroupView, RolloutView
from rolloutd.server.errors import to_error
from rolloutd.server.translate_event import add_history, add_spans, set_times, to_batch_id, to_finish_reason
from rolloutd.v1 import Group, Lineage
from rolloutd.v1.lineage_pb2 import (
    GROUP_STATE_COMPLETE,
    GROUP_STATE_PARTIAL,
    GROUP_STATE_PENDING,
    GroupState,
)


def to_group(run_id: str, view: GroupView, with_members: bool = True) -> Group:
    """How far a group is, without the ids of its members if so asked."""
    return Group(
        run_id=run_id,
        group_id=view.group_id,
        state=_group_state(view),
        size=max(view.size, len(view.members)),
        rollout_ids=view.members if with_members else (),
        finished_rollouts=view.finished,
        failed_rollout_ids=view.failed,
        done=view.done,
        keep=view.keep,
        surplus_rollout_ids=view.surplus,
    )


def to_lineage(view: RolloutView, group: GroupView | None, unix_offset_seconds: float) -> Lineage | None:
    """The lineage of a rollout that has ended; None before. `unix_offset_seconds`: from the core's clock to that of Unix."""
    result = view.result
    if result is None:
        return None
    rollout_class: Any = result.rollout_class + 1
    task_type: Any = result.task_type + 1
    outcome: Any = result.outcome + 1
    origin: Any = view.origin + 1
    message = Lineage(
        rollout_id=result.rollout_id,
        run_id=result.run_id,
        step=result.step,
        group=None if group is None else to_group(result.run_id, group, with_members=False),
        sample_index=result.sample_index,
        seed=view.seed,
        session_id=result.session_id,
        turn=result.turn,
        parent_rollout_id=view.parent_rollout_id,
        rollout_class=rollout_class,
        task_type=task_type,
        stratum=result.stratum,
        origin=origin,
        outcome=outcome,
        error=None if result.error is None else to_error(result.error),
        complete=result.complete,
        clipped=result.clipped,
        stale=result.stale,
        policy_version=result.policy_version,
        staleness_versions=max(0, result.staleness),
        prompt_hash=result.prompt_hash,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        generated_tokens=result.generated_tokens,
        finish_reason=to_finish_reason(result),
        attempts=result.attempts,
        preemptions=result.preemptions,
        engine_ids=_engines(result),
        batch_ids=_batches(result),
        accepted_unix_seconds=view.accepted_at_seconds + unix_offset_seconds,
    )
    add_spans(message.spans, result.spans)
    add_history(message.history, result.history)
    set_times(message.times, result)
    return message


def _group_state(view: GroupView) -> GroupState.ValueType:
    spare = max(view.size, len(view.members)) - view.keep - len(view.surplus) if view.keep else 0
    if len(view.failed) > spare:
        return GROUP_STATE_PARTIAL
    there = view.completed >= view.keep if view.keep else view.done
    return GROUP_STATE_COMPLETE if there else GROUP_STATE_PENDING


def _engines(result: RolloutResult) -> list[str]:
    """Each engine once, by its first attempt; attempts that the history has forgotten may be left in the spans."""
    in_spans = [(span.attempt, span.engine_id) for span in result.spans]
    in_history = [(record.number, record.engine_id) for record in result.history]
    known = [engine_id for _, engine_id in sorted([*in_spans, *in_history])]
    return list(dict.fromkeys([*known, result.engine_id] if result.engine_id else known))


def _batches(result: RolloutResult) -> list[str]:
    known = [record.batch_id for record in result.history]
    return [to_batch_id(batch) for batch in dict.fromkeys([*known, result.batch_id]) if batch]
