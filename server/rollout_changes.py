"""Finding and changing rollouts by the id a caller knows: a rollout's own, or that of a submission with samples.

Invariants
- What cannot be changed is refused with the reason; the core itself passes over ids that it does not know.

What this module does not know: streams and calls.
"""

from __future__ import annotations

import dataclasses
from itertools import takewhile

from rolloutd.scheduler import events
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import Code, RolloutState
from rolloutd.scheduler.views import RolloutView
from rolloutd.server.errors import FieldErrors, not_found
from rolloutd.server.state import ServerState
from rolloutd.server.translate_request import MAX_SAMPLES, to_update
from rolloutd.v1 import RolloutUpdate as RolloutUpdateMessage

# Members that are tried by name before the run's rollouts are searched: earlier ones may be acknowledged and gone.
_PROBED_MEMBERS = 16


def find_rollouts(state: ServerState, run_id: str, rollout_id: str) -> list[RolloutView]:
    """The rollout of this id, or the members that are still known of a submission of this id; empty when unknown."""
    core, now = state.loop.core, state.loop.clock()
    exact = core.rollout_view(run_id, rollout_id, now)
    if exact is not None:
        return [exact]
    if "/" in rollout_id:
        return []
    prefix = f"{rollout_id}/"
    known = any(core.rollout_view(run_id, f"{prefix}{index}", now) for index in range(_PROBED_MEMBERS))
    views = core.list_rollouts(run_id, now, after=prefix, limit=MAX_SAMPLES if known else 1)
    return list(takewhile(lambda view: view.rollout_id.startswith(prefix), views))


def apply_update(state: ServerState, run_id: str, message: RolloutUpdateMessage, epoch: int) -> Refusal | None:
    """Change one rollout, or all members of a submission that have not ended."""
    try:
        update = to_update(message)
    except FieldErrors as error:
        return error.refusal()
    found = find_rollouts(state, run_id, message.rollout_id)
    if not found:
        return not_found("rollout", message.rollout_id)
    alive = [view.rollout_id for view in found if view.state is not RolloutState.FINISHED]
    if not alive:
        return Refusal(
            Code.FAILED_PRECONDITION,
            "FINISHED",
            f"rollout {message.rollout_id!r} has ended: it cannot be changed any more",
        )
    changes = tuple(dataclasses.replace(update, rollout_id=rollout_id) for rollout_id in alive)
    return state.loop.refusal(events.UpdateRollouts(run_id, changes, epoch))
