"""Two real SGLang servers for the whole run, and a fresh `rolloutd serve` in front of them for each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest
import pytest_asyncio

from rolloutd import v1
from rolloutd.client import Client, connect
from rolloutd.engines.sim.tokens import VOCABULARY_SIZE
from tests.e2e.engine_http import EngineHttp
from tests.e2e.engine_tap import EngineTap
from tests.e2e.processes import Rolloutd, SimEngine
from tests.e2e.published import PublishRig, restore
from tests.e2e.redecode import Transformers
from tests.sglang_servers import SGLangServer, shared_servers

REGISTERED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Rig:
    """A running server and its engines, asked past it."""

    server: Rolloutd
    engines: list[EngineHttp]

    def client(self, consumer: str = "trainer") -> Client:
        return connect(self.server.target, run="run", consumer=consumer)

    async def running(self) -> int:
        """Rollouts that the engines say they run."""
        return sum([(await engine.load()).running for engine in self.engines])


async def engines_ready(target: str, count: int) -> None:
    """Wait until the server takes work for `count` engines."""
    async with connect(target) as client, asyncio.timeout(REGISTERED_SECONDS):
        while True:
            engines = await client.list_engines()
            if sum(engine.state == v1.ENGINE_STATE_READY for engine in engines) >= count:
                return
            await asyncio.sleep(0.02)


@pytest.fixture(scope="session")
def sglang_servers(request: pytest.FixtureRequest) -> list[SGLangServer]:
    return shared_servers(request, 2)


@pytest_asyncio.fixture
async def sglang_engines(sglang_servers: list[SGLangServer]) -> AsyncIterator[list[EngineHttp]]:
    """The two servers with empty caches; at the end of a test they still live and hold no work."""
    async with EngineHttp(sglang_servers[0].url) as first, EngineHttp(sglang_servers[1].url) as second:
        engines = [first, second]
        for engine in engines:
            await engine.flush()
        yield engines
        for engine, server in zip(engines, sglang_servers, strict=True):
            assert server.process.poll() is None, server.log_tail()
            await engine.load_becomes(lambda load: not (load.running or load.waiting or load.used_tokens), 10.0)


@pytest.fixture
def started() -> Iterator[list[Rolloutd]]:
    """Servers that a test has started; ended at its end."""
    servers: list[Rolloutd] = []
    yield servers
    for server in servers:
        server.discard()


@pytest_asyncio.fixture
async def real(sglang_engines: list[EngineHttp], started: list[Rolloutd]) -> Rig:
    """`rolloutd serve` with default settings in front of both SGLang servers."""
    server = Rolloutd([engine.url for engine in sglang_engines])
    started.append(server)
    server.start()
    await engines_ready(server.target, 2)
    return Rig(server, sglang_engines)


@pytest.fixture(scope="session")
def transformers(sglang_servers: list[SGLangServer]) -> Iterator[Transformers]:
    with Transformers() as reference:
        yield reference


@pytest_asyncio.fixture
async def publishing(
    sglang_servers: list[SGLangServer],
    transformers: Transformers,
    sglang_engines: list[EngineHttp],
    started: list[Rolloutd],
) -> AsyncIterator[PublishRig]:
    """As `real`, with a tap before each engine; at the end the servers have the weights again that they came with."""
    async with EngineTap(sglang_engines[0].url) as first, EngineTap(sglang_engines[1].url) as second:
        server = Rolloutd([first.url, second.url])
        started.append(server)
        server.start()
        await engines_ready(server.target, 2)
        yield PublishRig(server, [first, second], sglang_engines, sglang_servers, transformers)
        server.discard()
    for engine in sglang_engines:
        await restore(engine)


class MakeSim(Protocol):
    """A simulated engine with these flags; ended when the test ends."""

    def __call__(self, *flags: str, start: bool = True) -> SimEngine: ...


class MakeServer(Protocol):
    """`rolloutd serve` in front of these engines, all of them ready; ended when the test ends."""

    def __call__(
        self, *engines: SimEngine, environment: Mapping[str, str] | None = None
    ) -> Coroutine[None, None, Rolloutd]: ...


@pytest.fixture
def sim() -> Iterator[MakeSim]:
    engines: list[SimEngine] = []

    def make(*flags: str, start: bool = True) -> SimEngine:
        engine = SimEngine("--time-scale", "4", "--stream-interval", "8", *flags)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in engines:
        engine.discard()


@pytest.fixture
def serve(started: list[Rolloutd]) -> MakeServer:
    async def make(*engines: SimEngine, environment: Mapping[str, str] | None = None) -> Rolloutd:
        urls = [engine.url for engine in engines]
        server = Rolloutd(urls, "--vocabulary-size", str(VOCABULARY_SIZE), environment=environment)
        started.append(server)
        server.start()
        await engines_ready(server.target, len(engines))
        return server

    return make


@pytest.fixture
def random(request: pytest.FixtureRequest) -> np.random.Generator:
    """The same in every run, different from every other test's."""
    return np.random.default_rng([ord(letter) for letter in request.node.name])
