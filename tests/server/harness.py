"""A real server in the test's event loop, reached over a real channel, with fake engine doors behind it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from rolloutd.server.config import EngineManagerSettings, EngineSettings, ServerConfig, load_config
from rolloutd.server.process import Server
from rolloutd.v1 import (
    EngineServiceStub,
    Event,
    Hello,
    RolloutServiceStub,
    RolloutSubmission,
    RunServiceStub,
    SamplingParams,
    SubmitRolloutRequest,
    TrainerServiceStub,
)
from tests.server.fake_door import FakeDoor, tokens

WAIT_SECONDS = 5.0


class Rig:
    """One server, its doors by URL, and stubs on one channel."""

    def __init__(self, server: Server, doors: dict[str, FakeDoor], channel: grpc.aio.Channel) -> None:
        self.server = server
        self.doors = doors
        self.channel = channel
        self.rollouts = RolloutServiceStub(channel)
        self.runs = RunServiceStub(channel)
        self.trainer = TrainerServiceStub(channel)
        self.engines = EngineServiceStub(channel)

    @property
    def door(self) -> FakeDoor:
        return next(iter(self.doors.values()))

    def stream(self, consumer_id: str = "trainer", run_id: str = "run", **hello: Any) -> Stream:
        return Stream(self.rollouts, Hello(run_id=run_id, consumer_id=consumer_id, **hello))

    async def engines_joined(self) -> None:
        for engine in self.server.engines.engines():
            await asyncio.wait_for(engine.registered.wait(), WAIT_SECONDS)


class Stream:
    """One SubmitRollout stream, read event by event."""

    def __init__(self, stub: Any, hello: Hello | None) -> None:
        self.call = stub.SubmitRollout()
        self._hello = hello
        self._pending: list[Event] = []

    async def __aenter__(self) -> Stream:
        if self._hello is not None:
            await self.call.write(SubmitRolloutRequest(hello=self._hello))
            self.attached = await self.next("attached")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.call.cancel()

    async def send(self, **fields: Any) -> None:
        await self.call.write(SubmitRolloutRequest(**fields))

    async def submit(self, *submissions: RolloutSubmission) -> None:
        await self.send(submissions=submissions)

    async def close(self) -> None:
        await self.call.done_writing()

    async def event(self) -> Event | None:
        """The next event; None at the end of the stream."""
        while not self._pending:
            try:
                message = await asyncio.wait_for(self.call.read(), WAIT_SECONDS)
            except grpc.aio.AioRpcError:
                return None  # `code` says how it ended
            if message is grpc.aio.EOF:
                return None
            self._pending.extend(message.events)
        return self._pending.pop(0)

    async def next(self, kind: str) -> Any:
        """The next event of this kind; others are skipped."""
        while True:
            event = await self.event()
            assert event is not None, f"the stream ended before an event {kind!r}: {await self.call.code()}"
            if event.WhichOneof("event") == kind:
                self.cursor = event.cursor
                return getattr(event, kind)

    async def finished(self, count: int) -> list[Any]:
        return [await self.next("finished") for _ in range(count)]

    async def code(self) -> grpc.StatusCode:
        """The status of the stream once it has ended."""
        return await asyncio.wait_for(self.call.code(), WAIT_SECONDS)


@asynccontextmanager
async def running_server(
    *,
    engines: Iterable[str] = ("http://engine-0:1",),
    make_door: Callable[[EngineSettings], FakeDoor] | None = None,
    auto: bool = True,
    slots: int = 8,
    flags: dict[str, Any] | None = None,
    channel_options: Iterable[tuple[str, Any]] = (),
    wait: bool = True,
    **changes: Any,
) -> AsyncIterator[Rig]:
    """A started server with fast engine polling; `changes` go into its ServerConfig."""
    config: ServerConfig = load_config(flags={"server.port": 0, "engines": list(engines), **(flags or {})})
    fast = EngineManagerSettings(
        poll_seconds=0.02,
        register_backoff_seconds=0.01,
        register_backoff_max_seconds=0.05,
        lose_failures=3,
        lose_seconds=0.05,
    )
    config = dataclasses.replace(config, **{"engine_manager": fast, "shutdown_grace_seconds": 0.0, **changes})
    doors: dict[str, FakeDoor] = {}

    def door_of(settings: EngineSettings) -> FakeDoor:
        door = make_door(settings) if make_door is not None else FakeDoor(settings.url, auto=auto, slots=slots)
        doors[settings.url] = door
        return door

    server = Server(config, make_door=door_of)
    await server.start()
    try:
        limit = ("grpc.max_receive_message_length", 64 << 20)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=[limit, *channel_options]) as channel:
            rig = Rig(server, doors, channel)
            if wait:
                await rig.engines_joined()
            yield rig
            server.loop.core.check()
    finally:
        for door in doors.values():
            door.finish_all()
        await server.stop()


def submission(rollout_id: str, prompt: int = 4, max_new_tokens: int = 2, **fields: Any) -> RolloutSubmission:
    """A valid submission with `prompt` tokens."""
    sampling = fields.pop("sampling", SamplingParams(max_new_tokens=max_new_tokens))
    if not {"token_bytes", "token_ids", "text"} & fields.keys():
        fields["token_bytes"] = tokens(prompt)
    return RolloutSubmission(rollout_id=rollout_id, sampling=sampling, **fields)


class Details:
    """What a failed call said."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.reason = ""
        self.fields: list[str] = []
        self.retry_seconds = 0.0
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                self.reason = info.reason
                assert info.domain == "rolloutd"
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest()
                detail.Unpack(bad)
                self.fields = [violation.field for violation in bad.field_violations]
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                self.retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9


async def refused(call: Any) -> Details:
    """Await a call that must fail, and say how."""
    try:
        answer = await asyncio.wait_for(call, WAIT_SECONDS)
    except grpc.aio.AioRpcError as error:
        return Details(error)
    raise AssertionError(f"expected a refusal, got {answer}")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
