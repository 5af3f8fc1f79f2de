"""Fixtures of the engine doors' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engines.scripted_server import FakeServer
from tests.engines.sim_wire_kit import Client, engine


@pytest.fixture
async def sim() -> AsyncIterator[Client]:
    async with engine() as client:
        yield client


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer()
    runner, url = await server.start()
    yield server, url
    await runner.cleanup()
