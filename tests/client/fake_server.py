"""A scripted rolloutd: enough of the contract to try a client, and badly behaved on command.

Keeps what a real server keeps (rollouts by id, durable events by consumer until acknowledged), runs no engine: a rollout
finishes when the test says so, or at once with `finish_at_once`. Its output is its prompt reversed plus its sample index.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from rolloutd import v1

PATIENCE_SECONDS = 20.0  # a wait of a test that takes longer has failed
Context = Any


def status_details(
    code: grpc.StatusCode, message: str, reason: str, retry_seconds: float = 0.0
) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata as the real server sends it."""
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="rolloutd"))
    if reason == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(field="run_id", description="must not be empty")
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_seconds:
        delay = Duration(seconds=int(retry_seconds), nanos=int(retry_seconds % 1 * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return (("grpc-status-details-bin", status.SerializeToString()),)


def output_of(submission: v1.RolloutSubmission, index: int) -> bytes:
    """What a rollout of this submission generates."""
    return bytes(
        np.append(np.frombuffer(submission.token_bytes, "<u4")[::-1], np.uint32(index)).astype("<u4").tobytes()
    )


@dataclass
class FakeRollout:
    """One rollout as the server knows it."""

    submission: v1.RolloutSubmission
    index: int
    consumer_id: str
    result: v1.RolloutResult | None = None


@dataclass
class Abort:
    """End a stream with this status."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_seconds: float = 0.0


@dataclass
class Consumer:
    """What is kept for a consumer between its streams."""

    cursor: int = 0
    events: dict[int, v1.Event] = field(default_factory=dict)  # durable and not acknowledged
    outgoing: asyncio.Queue[v1.SubmitRolloutResponse | Abort | None] | None = None


class FakeServer(v1.RolloutServiceServicer, v1.RunServiceServicer, v1.TrainerServiceServicer, v1.EngineServiceServicer):
    """See the module."""

    def __init__(self) -> None:
        self.port = 0
        self.starts = 0
        self.finish_at_once = True
        self.accept = asyncio.Event()  # cleared: submissions are read and not answered
        self.accept.set()
        self.read = asyncio.Event()  # cleared: the stream is not read
        self.read.set()
        self.attach_error: Abort | None = None
        self.unary_error: Abort | None = None
        self.refusals: list[v1.Error | None] = []  # for the next submissions; None: take it
        self.limits = v1.Limits(max_message_bytes=64 * 1024 * 1024, max_items_per_message=1000, max_samples=256)
        self.rollouts: dict[str, FakeRollout] = {}
        self.consumers: dict[str, Consumer] = {}
        self.hellos: list[v1.Hello] = []
        self.messages: list[v1.SubmitRolloutRequest] = []
        self.acknowledgements: list[v1.Acknowledgement] = []
        self.runs_started: dict[str, int] = {}  # rollout id to how often it was started anew
        self.goodbyes = 0
        self.calls: list[Any] = []
        # What each PublishPolicy call says; an event is waited for.
        self.publications: list[list[v1.PublishPolicyResponse | Abort | asyncio.Event]] = []
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def submissions(self) -> list[v1.RolloutSubmission]:
        return [submission for message in self.messages for submission in message.submissions]

    @property
    def kept_results(self) -> list[str]:
        """Results nobody acknowledged yet."""
        events = [event for consumer in self.consumers.values() for event in consumer.events.values()]
        return [event.finished.rollout_id for event in events if event.HasField("finished")]

    async def start(self) -> None:
        self.starts += 1
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 64 * 1024 * 1024),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        v1.add_RolloutServiceServicer_to_server(self, self._server)
        v1.add_RunServiceServicer_to_server(self, self._server)
        v1.add_TrainerServiceServicer_to_server(self, self._server)
        v1.add_EngineServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")  # any at first, then the same again
        await self._server.start()

    async def stop(self, *, forget: bool = False) -> None:
        """Dies; with `forget` it has lost its memory when it comes back."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        for consumer in self.consumers.values():
            consumer.outgoing = None
        if forget:
            self.rollouts.clear()
            self.consumers.clear()

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns once the condition holds; it is looked at whenever something arrived."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # ---- commands

    def break_streams(self, abort: Abort | None = None) -> None:
        """Ends every stream, as a cut connection or with the given status."""
        for consumer in self.consumers.values():
            if consumer.outgoing is not None:
                consumer.outgoing.put_nowait(abort or Abort(grpc.StatusCode.UNAVAILABLE, "connection reset by test"))
                consumer.outgoing = None

    def send(self, *events: v1.Event, consumer_id: str = "c") -> None:
        """Sends events as they are."""
        outgoing = self.consumers[consumer_id].outgoing
        assert outgoing is not None
        outgoing.put_nowait(v1.SubmitRolloutResponse(events=events))

    def notice(self, kind: v1.NoticeKind.ValueType, message: str, seconds: float) -> None:
        self.send(v1.Event(notice=v1.Notice(kind=kind, message=message, seconds=seconds)))

    def finish(
        self, rollout_id: str, outcome: v1.Outcome.ValueType = v1.OUTCOME_COMPLETED, padding_tokens: int = 0
    ) -> None:
        """Ends a rollout that has not ended."""
        rollout = self.rollouts[rollout_id]
        if rollout.result is not None:
            return
        completed = outcome == v1.OUTCOME_COMPLETED
        tokens = output_of(rollout.submission, rollout.index) + bytes(4 * padding_tokens) if completed else b""
        rollout.result = v1.RolloutResult(
            rollout_id=rollout_id,
            run_id="r",
            group_id=rollout.submission.group_id
            or (rollout.submission.rollout_id if rollout.submission.samples > 1 else ""),
            sample_index=rollout.index,
            outcome=outcome,
            complete=completed,
            token_bytes=tokens,
            finish_reason=v1.FINISH_REASON_STOP if completed else v1.FINISH_REASON_UNSPECIFIED,
        )
        if not completed:
            rollout.result.error.CopyFrom(v1.Error(code=1, reason="CANCELLED", message="ended by test"))
        self._durable(rollout.consumer_id, v1.Event(finished=rollout.result))

    def repeat(self, rollout_id: str, *, new_cursor: bool) -> None:
        """Sends a result again, under a new cursor or the old one."""
        rollout = self.rollouts[rollout_id]
        consumer = self.consumers[rollout.consumer_id]
        if new_cursor:
            self._durable(rollout.consumer_id, v1.Event(finished=rollout.result))
        else:
            self.send(v1.Event(cursor=consumer.cursor, finished=rollout.result), consumer_id=rollout.consumer_id)

    # ---- RolloutService

    async def SubmitRollout(
        self, request_iterator: AsyncIterator[v1.SubmitRolloutRequest], context: Context
    ) -> AsyncIterator[Any]:
        hello = (await anext(request_iterator)).hello
        self.hellos.append(hello)
        self._changed.set()
        if self.attach_error is not None:
            await self._abort(context, self.attach_error)
        consumer = self.consumers.setdefault(hello.consumer_id, Consumer())
        if consumer.outgoing is not None:
            consumer.outgoing.put_nowait(Abort(grpc.StatusCode.ABORTED, "a newer stream took over", "FENCED"))
        outgoing = consumer.outgoing = asyncio.Queue()
        for cursor in [cursor for cursor in consumer.events if cursor <= hello.resume_cursor]:
            del consumer.events[cursor]
        missed = [event for cursor, event in consumer.events.items() if cursor > hello.resume_cursor]
        attached = v1.Attached(
            cursor=consumer.cursor,
            pending_events=len(missed),
            server=v1.ServerInfo(version="fake", instance_id=str(self.starts), limits=self.limits),
        )
        outgoing.put_nowait(v1.SubmitRolloutResponse(events=[v1.Event(attached=attached), *missed[:1]]))
        for event in missed[1:]:
            outgoing.put_nowait(v1.SubmitRolloutResponse(events=[event]))
        reading = asyncio.create_task(self._read(hello.consumer_id, request_iterator, outgoing))
        try:
            while (item := await outgoing.get()) is not None:
                if isinstance(item, Abort):
                    await self._abort(context, item)
                yield item
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if consumer.outgoing is outgoing:
                consumer.outgoing = None
            self._changed.set()

    async def _read(
        self, consumer_id: str, requests: AsyncIterator[v1.SubmitRolloutRequest], outgoing: asyncio.Queue[Any]
    ) -> None:
        while True:
            await self.read.wait()
            try:
                message = await anext(requests)
            except StopAsyncIteration:
                break
            self.messages.append(message)
            self._changed.set()
            await self.accept.wait()
            self._apply(consumer_id, message, outgoing)
            self._changed.set()
        self.goodbyes += 1
        outgoing.put_nowait(None)

    def _apply(self, consumer_id: str, message: v1.SubmitRolloutRequest, outgoing: asyncio.Queue[Any]) -> None:
        events: list[v1.Event] = []
        started: list[str] = []
        for submission in message.submissions:
            refusal = self.refusals.pop(0) if self.refusals else None
            if refusal is None and not submission.token_bytes and not submission.text:
                refusal = v1.Error(code=3, reason="INVALID_ARGUMENT", message="empty prompt")
                refusal.field_violations.add(field="token_bytes", description="at least one token")
            if refusal is not None:
                rejected = v1.Rejected(rollout_id=submission.rollout_id, kind=v1.ITEM_KIND_SUBMISSION, error=refusal)
                events.append(v1.Event(rejected=rejected))
                continue
            started += self._take(consumer_id, submission, events)
        outgoing.put_nowait(v1.SubmitRolloutResponse(events=events))
        if self.finish_at_once:
            for rollout_id in started:
                self.finish(rollout_id)
        for rollout_id in message.cancel_rollout_ids:
            self.cancel(rollout_id)
        consumer = self.consumers[consumer_id]
        for acknowledgement in message.acknowledgements:
            self.acknowledgements.append(acknowledgement)
            for cursor, event in list(consumer.events.items()):
                if event.finished.rollout_id == acknowledgement.rollout_id:
                    del consumer.events[cursor]
        for cursor in [cursor for cursor in consumer.events if cursor <= message.acknowledge_through_cursor]:
            del consumer.events[cursor]

    def _take(self, consumer_id: str, submission: v1.RolloutSubmission, events: list[v1.Event]) -> list[str]:
        samples = max(1, submission.samples)
        ids = [submission.rollout_id] if samples == 1 else [f"{submission.rollout_id}/{i}" for i in range(samples)]
        new = [rollout_id for rollout_id in ids if rollout_id not in self.rollouts]
        if all(self._forgotten(rollout_id) for rollout_id in ids):
            error = v1.Error(code=6, reason="ALREADY_DELIVERED", message="delivered and acknowledged before")
            rejected = v1.Rejected(rollout_id=submission.rollout_id, kind=v1.ITEM_KIND_SUBMISSION, error=error)
            events.append(v1.Event(rejected=rejected))
            return []
        for index, rollout_id in enumerate(ids):
            if rollout_id in new:
                self.rollouts[rollout_id] = FakeRollout(submission, index, consumer_id)
                self.runs_started[rollout_id] = self.runs_started.get(rollout_id, 0) + 1
        accepted = v1.Accepted(rollout_id=submission.rollout_id, state=v1.ROLLOUT_STATE_QUEUED, attached=not new)
        events.append(v1.Event(accepted=accepted))
        for rollout_id in ids:  # whoever asks again gets it again
            if (result := self.rollouts[rollout_id].result) is not None and not self._forgotten(rollout_id):
                events.append(v1.Event(finished=result))
        return new

    def _forgotten(self, rollout_id: str) -> bool:
        """Whether its result was acknowledged."""
        rollout = self.rollouts.get(rollout_id)
        return rollout is not None and rollout.result is not None and rollout_id not in self.kept_results

    def cancel(self, any_id: str) -> int:
        """Cancels what the id names and has not ended; how many."""
        members = [
            rollout_id
            for rollout_id, rollout in self.rollouts.items()
            if any_id in (rollout_id, rollout.submission.rollout_id) and rollout.result is None
        ]
        for rollout_id in members:
            self.finish(rollout_id, v1.OUTCOME_CANCELLED)
        return len(members)

    def _durable(self, consumer_id: str, event: v1.Event) -> None:
        consumer = self.consumers[consumer_id]
        consumer.cursor += 1
        event.cursor = consumer.cursor
        consumer.events[consumer.cursor] = event
        if consumer.outgoing is not None:
            consumer.outgoing.put_nowait(v1.SubmitRolloutResponse(events=[event]))

    async def _abort(self, context: Context, abort: Abort) -> None:
        trailing = status_details(abort.code, abort.message, abort.reason, abort.retry_seconds) if abort.reason else ()
        await context.abort(abort.code, abort.message, trailing)

    async def _note(self, request: Any, context: Context) -> None:
        self.calls.append(request)
        self._changed.set()
        if self.unary_error is not None:
            await self._abort(context, self.unary_error)

    async def RunRollout(self, request: v1.RunRolloutRequest, context: Context) -> v1.RunRolloutResponse:
        await self._note(request, context)
        results = [
            v1.RolloutResult(
                rollout_id=request.submission.rollout_id,
                run_id=request.run_id,
                outcome=v1.OUTCOME_COMPLETED,
                sample_index=index,
                token_bytes=output_of(request.submission, index),
            )
            for index in range(max(1, request.submission.samples))
        ]
        return v1.RunRolloutResponse(results=results)

    async def CancelRollouts(self, request: v1.CancelRolloutsRequest, context: Context) -> v1.CancelRolloutsResponse:
        await self._note(request, context)
        known = {rollout.submission.rollout_id for rollout in self.rollouts.values()} | self.rollouts.keys()
        return v1.CancelRolloutsResponse(
            cancelled_rollouts=sum(self.cancel(rollout_id) for rollout_id in request.rollout_ids),
            unknown_ids=[rollout_id for rollout_id in request.rollout_ids if rollout_id not in known],
        )

    async def UpdateRollouts(self, request: v1.UpdateRolloutsRequest, context: Context) -> v1.UpdateRolloutsResponse:
        await self._note(request, context)
        return v1.UpdateRolloutsResponse(updated_rollouts=len(request.updates))

    async def GetRollout(self, request: v1.GetRolloutRequest, context: Context) -> v1.GetRolloutResponse:
        await self._note(request, context)
        ended = request.rollout_id != "not ended"
        return v1.GetRolloutResponse(
            rollout=v1.Rollout(rollout_id=request.rollout_id),
            lineage=v1.Lineage(rollout_id=request.rollout_id) if ended else None,
        )

    async def GetGroup(self, request: v1.GetGroupRequest, context: Context) -> v1.GetGroupResponse:
        await self._note(request, context)
        return v1.GetGroupResponse(group=v1.Group(run_id=request.run_id, group_id=request.group_id))

    async def ListRollouts(self, request: v1.ListRolloutsRequest, context: Context) -> v1.ListRolloutsResponse:
        await self._note(request, context)
        page = int(request.page_token or 0)
        return v1.ListRolloutsResponse(
            rollouts=[v1.Rollout(rollout_id=f"x{page}")], next_page_token=str(page + 1) if page < 2 else ""
        )

    async def ExplainRollout(self, request: v1.ExplainRolloutRequest, context: Context) -> v1.ExplainRolloutResponse:
        await self._note(request, context)
        return v1.ExplainRolloutResponse(rollout=v1.Rollout(rollout_id=request.rollout_id))

    # ---- RunService, TrainerService, EngineService

    async def ConfigureRun(self, request: v1.ConfigureRunRequest, context: Context) -> v1.ConfigureRunResponse:
        await self._note(request, context)
        return v1.ConfigureRunResponse(run=v1.Run(run_id=request.run_id, config=request.config))

    async def GetRun(self, request: v1.GetRunRequest, context: Context) -> v1.GetRunResponse:
        await self._note(request, context)
        return v1.GetRunResponse(run=v1.Run(run_id=request.run_id))

    async def ListRuns(self, request: v1.ListRunsRequest, context: Context) -> v1.ListRunsResponse:
        await self._note(request, context)
        page = int(request.page_token or 0)
        return v1.ListRunsResponse(runs=[v1.Run(run_id=f"r{page}")], next_page_token="1" if page == 0 else "")

    async def PauseRun(self, request: v1.PauseRunRequest, context: Context) -> v1.PauseRunResponse:
        await self._note(request, context)
        return v1.PauseRunResponse(state=v1.RunState(status=v1.RUN_STATUS_PAUSED))

    async def ResumeRun(self, request: v1.ResumeRunRequest, context: Context) -> v1.ResumeRunResponse:
        await self._note(request, context)
        return v1.ResumeRunResponse(state=v1.RunState(status=v1.RUN_STATUS_ACTIVE))

    async def EndRun(self, request: v1.EndRunRequest, context: Context) -> v1.EndRunResponse:
        await self._note(request, context)
        return v1.EndRunResponse(ended_rollouts=3)

    async def WatchRun(self, request: v1.WatchRunRequest, context: Context) -> AsyncIterator[v1.WatchRunResponse]:
        self.calls.append(request)
        watches = sum(isinstance(call, v1.WatchRunRequest) for call in self.calls)
        yield v1.WatchRunResponse(state=v1.RunState(run_id=request.run_id, step=watches))
        if watches == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset by test")

    async def SetBudget(self, request: v1.SetBudgetRequest, context: Context) -> v1.SetBudgetResponse:
        await self._note(request, context)
        return v1.SetBudgetResponse(budget=request.budget)

    async def GetBudget(self, request: v1.GetBudgetRequest, context: Context) -> v1.GetBudgetResponse:
        await self._note(request, context)
        return v1.GetBudgetResponse(is_default=True)

    async def ReportStep(self, request: v1.ReportStepRequest, context: Context) -> v1.ReportStepResponse:
        await self._note(request, context)
        return v1.ReportStepResponse(promoted_rollouts=2)

    async def PublishPolicy(
        self, request: v1.PublishPolicyRequest, context: Context
    ) -> AsyncIterator[v1.PublishPolicyResponse]:
        await self._note(request, context)
        for news in self.publications.pop(0):
            if isinstance(news, Abort):
                await self._abort(context, news)
            elif isinstance(news, asyncio.Event):
                await news.wait()
            else:
                yield news

    async def ConfirmWeights(self, request: v1.ConfirmWeightsRequest, context: Context) -> v1.ConfirmWeightsResponse:
        await self._note(request, context)
        return v1.ConfirmWeightsResponse(policy_version=request.version)

    async def ListEngines(self, request: v1.ListEnginesRequest, context: Context) -> v1.ListEnginesResponse:
        await self._note(request, context)
        page = int(request.page_token or 0)
        return v1.ListEnginesResponse(
            engines=[v1.Engine(engine_id=f"e{page}")], next_page_token="1" if page == 0 else ""
        )

    async def RegisterEngine(self, request: v1.RegisterEngineRequest, context: Context) -> v1.RegisterEngineResponse:
        await self._note(request, context)
        return v1.RegisterEngineResponse(engine=v1.Engine(url=request.url))

    async def DrainEngine(self, request: v1.DrainEngineRequest, context: Context) -> v1.DrainEngineResponse:
        await self._note(request, context)
        return v1.DrainEngineResponse(engine=v1.Engine(engine_id=request.engine_id))

    async def RemoveEngine(self, request: v1.RemoveEngineRequest, context: Context) -> v1.RemoveEngineResponse:
        await self._note(request, context)
        return v1.RemoveEngineResponse(stopped_rollouts=1)

    async def GetServerInfo(self, request: v1.GetServerInfoRequest, context: Context) -> v1.GetServerInfoResponse:
        await self._note(request, context)
        return v1.GetServerInfoResponse(server=v1.ServerInfo(version="fake", limits=self.limits))
