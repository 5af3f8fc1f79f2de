"""A fake server for each test that asks for one; every test ends with nothing left running in its loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.client.fake_server import FakeServer


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.start()
    before = asyncio.all_tasks()
    yield fake
    ours = {task for task in asyncio.all_tasks() - before if task.get_name() == "rolloutd-stream"}
    await fake.stop()
    assert not ours, "a client left its stream running"
