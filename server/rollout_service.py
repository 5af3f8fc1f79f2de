"""RolloutService: rollouts in, results out.

Invariants
- A unary RunRollout is a consumer of its own for as long as its rollouts live; when the call is cancelled its rollouts
  are, and what they leave behind is acknowledged.
- Updates and cancellations are applied item by item: one bad item does not spoil the others.

What this module does not know: how rollouts are scheduled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from typing import Any

from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Abort, Accepted, Finished, Rejected
from rolloutd.scheduler.delivering import UNARY
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import AbortReason, Outcome, RolloutClass, RolloutState
from rolloutd.scheduler.views import RolloutView
from rolloutd.server.errors import SHUTTING_DOWN, FieldErrors, field_error, not_found, to_error
from rolloutd.server.handler import Refused, check, handler
from rolloutd.server.loop import RunLoop, refusal_of
from rolloutd.server.outbox import ItemRefused, Outbox
from rolloutd.server.paging import decode_token, encode_token, page_size
from rolloutd.server.rollout_changes import apply_update, find_rollouts
from rolloutd.server.rollout_stream import RolloutStream, StreamContext
from rolloutd.server.state import ServerState
from rolloutd.server.translate_event import to_decision, to_result, to_rollout, to_state, to_story_entry
from rolloutd.server.translate_lineage import to_group
from rolloutd.server.translate_request import MAX_SECONDS, to_spec
from rolloutd.v1 import (
    ITEM_KIND_UPDATE,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    ExplainRolloutRequest,
    ExplainRolloutResponse,
    GetGroupRequest,
    GetGroupResponse,
    GetRolloutRequest,
    GetRolloutResponse,
    ListRolloutsRequest,
    ListRolloutsResponse,
    RolloutServiceServicer,
    RunRolloutRequest,
    RunRolloutResponse,
    UpdateRolloutsRequest,
    UpdateRolloutsResponse,
)
from rolloutd.v1 import Rejected as RejectedMessage

# Rollouts looked at per page of a filtered listing; the page may be short, its token goes on from there.
_MAX_SCANNED = 20_000


class RolloutService(RolloutServiceServicer):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._loop = state.loop

    @handler
    async def SubmitRollout(self, request: Any, context: StreamContext) -> None:  # type: ignore[override]
        await RolloutStream(self._state, context).serve()

    @handler
    async def RunRollout(self, request: RunRolloutRequest, context: Any) -> RunRolloutResponse:
        _require_run(request.run_id)
        if not request.HasField("submission"):
            raise field_error("submission", "is required")
        if self._state.draining:
            raise Refused(SHUTTING_DOWN)
        try:
            spec = to_spec(request.submission)
        except FieldErrors as error:
            raise FieldErrors([(f"submission.{field}", problem) for field, problem in error.fields]) from error
        if self._state.tokenizers.wants(spec):
            spec = await self._state.tokenizers.apply(spec)
        remaining = context.time_remaining()
        if remaining is not None and remaining < MAX_SECONDS:
            deadline = min(spec.deadline_seconds or remaining, remaining)
            spec = dataclasses.replace(spec, deadline_seconds=max(deadline, 1e-3))
        call = UnaryRollout(self._loop, request.run_id, request.trainer_epoch, spec)
        check(call.submit())
        results = await call.wait()
        return RunRolloutResponse(
            results=[to_result(result) for result in results],
            policy_version=self._state.policy_version(request.run_id),
        )

    @handler
    async def UpdateRollouts(self, request: UpdateRolloutsRequest, context: Any) -> UpdateRolloutsResponse:
        _require_run(request.run_id)
        if not request.updates:
            raise field_error("updates", "give at least one")
        epoch = self._epoch(request.run_id, request.trainer_epoch if request.HasField("trainer_epoch") else None)
        response = UpdateRolloutsResponse()
        for update in request.updates:
            refusal = apply_update(self._state, request.run_id, update, epoch)
            if refusal is None:
                response.updated_rollouts += 1
            else:
                response.rejected.append(
                    RejectedMessage(rollout_id=update.rollout_id, kind=ITEM_KIND_UPDATE, error=to_error(refusal))
                )
        return response

    @handler
    async def CancelRollouts(self, request: CancelRolloutsRequest, context: Any) -> CancelRolloutsResponse:
        _require_run(request.run_id)
        if not request.rollout_ids and not request.group_ids:
            raise field_error("rollout_ids", "give at least one of rollout_ids and group_ids")
        if "" in request.rollout_ids or "" in request.group_ids:
            raise field_error("rollout_ids", "an id must not be empty")
        epoch = self._epoch(request.run_id, request.trainer_epoch if request.HasField("trainer_epoch") else None)
        response = CancelRolloutsResponse()
        known: list[str] = []
        for rollout_id in request.rollout_ids:
            found = find_rollouts(self._state, request.run_id, rollout_id)
            if not found:
                response.unknown_ids.append(rollout_id)
            response.finished_rollouts += sum(view.state is RolloutState.FINISHED for view in found)
            known.extend(view.rollout_id for view in found)
        if known or request.group_ids:
            result = self._loop.post(
                events.CancelRollouts(request.run_id, tuple(known), tuple(request.group_ids), epoch)
            )
            check(refusal_of(result))
            response.cancelled_rollouts = sum(_ends_by_cancel(action) for action in result)
        return response

    @handler
    async def GetRollout(self, request: GetRolloutRequest, context: Any) -> GetRolloutResponse:
        view = self._view(request.run_id, request.rollout_id)
        return GetRolloutResponse(
            rollout=to_rollout(view, self._loop.clock(), with_result=True),
            lineage=self._state.lineage(request.run_id, request.rollout_id),
        )

    @handler
    async def GetGroup(self, request: GetGroupRequest, context: Any) -> GetGroupResponse:
        _require_run(request.run_id)
        if not request.group_id:
            raise field_error("group_id", "is required")
        view = self._loop.core.group_view(request.run_id, request.group_id)
        if view is None:
            raise Refused(not_found("group", request.group_id))
        return GetGroupResponse(
            group=to_group(request.run_id, view), policy_version=self._state.policy_version(request.run_id)
        )

    @handler
    async def ListRollouts(self, request: ListRolloutsRequest, context: Any) -> ListRolloutsResponse:
        _require_run(request.run_id)
        run = self._state.run_view(request.run_id)
        if run is None:
            raise Refused(not_found("run", request.run_id))
        states, classes = sorted(request.states), sorted(request.rollout_classes)
        if 0 in states or 0 in classes:
            raise field_error("states", "UNSPECIFIED is not a state or class; leave the list empty for all")
        filters = (request.run_id, states, classes)
        size = page_size(request.page_size)
        after = decode_token(request.page_token, filters)
        only_class = RolloutClass(classes[0] - 1) if len(classes) == 1 else None
        response = ListRolloutsResponse(policy_version=run.policy_version)
        scanned = 0
        more = True
        while more and len(response.rollouts) < size and scanned < _MAX_SCANNED:
            wanted = size - len(response.rollouts)
            views = self._loop.core.list_rollouts(
                request.run_id, self._loop.clock(), after=after, limit=wanted, rollout_class=only_class
            )
            more = len(views) == wanted
            scanned += len(views)
            for view in views:
                after = view.rollout_id
                if states and to_state(view.state, view.gate) not in states:
                    continue
                if classes and view.rollout_class + 1 not in classes:
                    continue
                response.rollouts.append(to_rollout(view, self._loop.clock(), with_result=False))
        if more:
            response.next_page_token = encode_token(after, filters)
        return response

    @handler
    async def ExplainRollout(self, request: ExplainRolloutRequest, context: Any) -> ExplainRolloutResponse:
        view = self._view(request.run_id, request.rollout_id)
        explained = self._loop.core.explain(request.run_id, request.rollout_id)
        if explained is None:
            raise Refused(not_found("rollout", request.rollout_id))
        decisions, story = explained
        now = self._loop.clock()
        version = self._state.policy_version(request.run_id)
        return ExplainRolloutResponse(
            rollout=to_rollout(view, now, with_result=False),
            decisions=[to_decision(decision, now, version) for decision in decisions],
            story=[to_story_entry(entry, now) for entry in story],
            policy_version=version,
        )

    def _view(self, run_id: str, rollout_id: str) -> RolloutView:
        _require_run(run_id)
        if not rollout_id:
            raise field_error("rollout_id", "is required")
        view = self._loop.core.rollout_view(run_id, rollout_id, self._loop.clock())
        if view is None:
            raise Refused(not_found("rollout", rollout_id))
        return view

    def _epoch(self, run_id: str, epoch: int | None) -> int:
        found = self._state.fence(run_id, epoch)
        if isinstance(found, Refusal):
            raise Refused(found)
        return found


class UnaryRollout:
    """One RunRollout call as a consumer of its own."""

    def __init__(self, loop: RunLoop, run_id: str, epoch: int, spec: RolloutSpec) -> None:
        self._loop = loop
        self._run_id = run_id
        self._epoch = epoch
        self._spec = spec
        self._attached = False
        self._consumer_id = UNARY + uuid.uuid4().hex
        self._outbox = Outbox(run_id, self._consumer_id, ttl_seconds=MAX_SECONDS)
        self._results: asyncio.Future[list[RolloutResult]] = asyncio.get_running_loop().create_future()

    def submit(self) -> Refusal | None:
        """Attach and submit. After a refusal nothing is left behind."""
        self._loop.open_outbox(self._outbox)
        refusal = self._loop.refusal(events.AttachConsumer(self._run_id, self._consumer_id, self._epoch))
        if refusal is not None:
            self._loop.close_outbox(self._outbox)
            return refusal
        result = self._loop.post(events.SubmitRollouts(self._run_id, self._consumer_id, (self._spec,), self._epoch))
        refusal = refusal_of(result)
        for action in result:
            match getattr(action, "event", None):
                case Rejected(error=error):
                    refusal = error
                case Accepted(attached=attached):
                    self._attached = attached
        if refusal is not None:
            self._close()
            return refusal
        self._loop.spawn(self._collect(), f"collect {self._consumer_id}")
        return None

    async def wait(self) -> list[RolloutResult]:
        """The results, by sample. Cancelling the wait cancels the rollouts, unless they were somebody else's before."""
        try:
            return await asyncio.shield(self._results)
        except asyncio.CancelledError:
            if not self._attached and not self._results.done():
                self._loop.post(
                    events.CancelRollouts(self._run_id, rollout_ids=(self._spec.rollout_id,), epoch=self._epoch)
                )
            raise

    async def _collect(self) -> None:
        results: dict[str, RolloutResult] = {}
        try:
            while len(results) < self._spec.samples and self._outbox.end is None:
                await self._outbox.wait()
                for entry in self._outbox.take():
                    if isinstance(entry, ItemRefused):
                        continue
                    if isinstance(entry.event, Finished):
                        results[entry.event.result.rollout_id] = entry.event.result
                    if entry.cursor:
                        self._acknowledge(entry.cursor)
        finally:
            self._close()
            if not self._results.done():
                if len(results) < self._spec.samples:
                    end = self._outbox.end
                    self._results.set_exception(Refused(end.error if end and end.error else SHUTTING_DOWN))
                    self._results.exception()  # the caller may be gone
                else:
                    self._results.set_result(sorted(results.values(), key=lambda result: result.sample_index))

    def _acknowledge(self, cursor: int) -> None:
        self._loop.post(events.AcknowledgeResults(self._run_id, self._consumer_id, through_cursor=cursor))

    def _close(self) -> None:
        # Late group events of this consumer are not wanted: it is closed, not merely detached.
        self._loop.post(events.CloseConsumer(self._run_id, self._consumer_id))
        self._loop.post(events.DetachConsumer(self._run_id, self._consumer_id))
        self._loop.close_outbox(self._outbox)


def _require_run(run_id: str) -> None:
    if not run_id:
        raise field_error("run_id", "is required")


def _ends_by_cancel(action: Any) -> bool:
    if isinstance(action, Abort):
        return action.reason is AbortReason.CANCEL
    event = getattr(action, "event", None)
    return isinstance(event, Finished) and event.result.outcome is Outcome.CANCELLED
