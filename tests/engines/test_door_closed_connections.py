"""Connections that the other side closes before anything was sent, as a proxy does whose engine is gone.

On both event loops: the server runs on uvloop, whose transports raise where those of asyncio say nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from rolloutd.engines.base import EngineFault, FaultKind, Slice
from rolloutd.engines.http_client import Connection, HttpClient, Unreached
from rolloutd.engines.sglang import SGLangEngine, Timeouts
from tests.engines.scripted_server import FakeServer
from tests.engines.test_sglang_door import VOCABULARY_SIZE, ask

# No limit of the door comes to help within a test's own.
PATIENT = Timeouts(connect_seconds=60, first_byte_seconds=60, idle_seconds=60, abort_seconds=60, control_seconds=60)
TEST_SECONDS = 10.0
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine; an exception that only the event loop heard of fails it."""

    def guarded(test: Coroutine[Any, Any, None]) -> None:
        troubles: list[dict[str, Any]] = []

        async def limited() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
            async with asyncio.timeout(TEST_SECONDS):
                await test

        request.param(limited())
        assert not troubles

    return guarded


@pytest.fixture(params=["fin", "rst"])
def farewell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def closing_at_once(farewell: str, port: int = 0) -> AsyncIterator[int]:
    """A port that accepts connections and closes them."""

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if farewell == "rst":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", port)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def door_whose_engine_is_gone(farewell: str) -> AsyncIterator[SGLangEngine]:
    runner, url = await FakeServer().start()
    door = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE, timeouts=PATIENT)
    await door.register()
    await runner.cleanup()
    async with closing_at_once(farewell, int(url.rpartition(":")[2])):
        yield door
        await door.close()


def hand_on_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a new connection is handed on when the other side's farewell has been read."""
    connect = HttpClient.connect

    async def connect_and_wait(client: HttpClient) -> Connection:
        connection = await connect(client)
        while not connection.is_closing:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return connection

    monkeypatch.setattr(HttpClient, "connect", connect_and_wait)


class Ends:
    """Collects the ends of attempts."""

    def __init__(self) -> None:
        self.told: list[Slice | Exception] = []
        self._more = asyncio.Event()

    def tell(self, end: Slice | Exception) -> None:
        self.told.append(end)
        self._more.set()

    async def all(self, count: int) -> list[Slice | Exception]:
        while len(self.told) < count:
            self._more.clear()
            await self._more.wait()
        return self.told


def test_an_attempt_ends_at_once_as_unreached(run: Run, farewell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with door_whose_engine_is_gone(farewell) as door:
            hand_on_late(monkeypatch)
            request, ends = ask(), Ends()
            for count in (1, 2):  # its id is free again
                door.begin(request, lambda _: None, ends.tell)
                end = (await ends.all(count))[-1]
                assert isinstance(end, EngineFault) and end.kind is FaultKind.UNREACHED
        assert len(ends.told) == 2, "each end is told once"

    run(test())


def test_attempts_end_whenever_the_farewell_comes(run: Run, farewell: str) -> None:
    async def test() -> None:
        async with door_whose_engine_is_gone(farewell) as door:
            ends = Ends()
            for _ in range(50):
                door.begin(ask(), lambda _: None, ends.tell)
                await asyncio.sleep(0)
            for end in await ends.all(50):
                assert isinstance(end, EngineFault) and end.kind in (FaultKind.UNREACHED, FaultKind.BROKEN)
        assert len(ends.told) == 50

    run(test())


def test_an_attempt_that_was_given_up_is_not_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with door_whose_engine_is_gone("fin") as door:
            hand_on_late(monkeypatch)
            given_up, ends = Ends(), Ends()
            request = ask()
            door.begin(request, lambda _: None, given_up.tell).hang_up()
            door.begin(request, lambda _: None, ends.tell)
            await ends.all(1)
        assert not given_up.told

    run(test())


@pytest.mark.parametrize("is_pooled", [True, False])
def test_whatever_sending_raises_is_the_attempts_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_pooled: bool
) -> None:
    async def test() -> None:
        runner, url = await FakeServer().start()
        door = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE, timeouts=PATIENT)
        await door.register()
        if not is_pooled:
            monkeypatch.setattr(HttpClient, "free", lambda _: None)
        bug = RuntimeError("a bug")

        def send(*_: object) -> None:
            raise bug

        request, ends = ask(), Ends()
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "send", send)
            door.begin(request, lambda _: None, ends.tell)
            assert not ends.told, "never from inside `begin`"
            assert await ends.all(1) == [bug]
        assert isinstance(await door.generate(request, lambda _: None), Slice), "its id is free, and the door works"
        await door.close()
        await runner.cleanup()
        assert ends.told == [bug]

    run(test())


def test_a_call_is_unreached(run: Run, farewell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        hand_on_late(monkeypatch)
        async with closing_at_once(farewell) as port:
            client = HttpClient(f"http://127.0.0.1:{port}", connect_seconds=60, keepalive_seconds=60)
            with pytest.raises(Unreached, match="closed"):
                await client.call(client.head("GET", "/", {}), b"")
            client.close()

    run(test())
