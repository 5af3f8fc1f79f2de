"""A door to a simulated server, and attempts through it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rolloutd.engines.base import AttemptRequest, EngineFault, Progress, Slice
from rolloutd.engines.control import PauseMode
from rolloutd.engines.sglang import SGLangEngine, Timeouts
from rolloutd.engines.sim.tokens import verify
from tests.engines.sim_wire_kit import PROMPT, Client, engine

VOCABULARY_SIZE = 32_000
LONG = 20_000
ABORT, RETRACT, IN_PLACE = PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE


@asynccontextmanager
async def door_to(url: str, **limits: float) -> AsyncIterator[SGLangEngine]:
    door = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE, timeouts=Timeouts(**limits))
    await door.register()
    yield door
    await door.close()


@asynccontextmanager
async def both(*flags: str, scale: float = 20, **limits: float) -> AsyncIterator[tuple[Client, SGLangEngine]]:
    async with engine(*flags, scale=scale) as sim, door_to(sim.url, **limits) as door:
        yield sim, door


class Attempt:
    """One attempt in the background."""

    def __init__(self, door: SGLangEngine, max_new_tokens: int) -> None:
        self.id = uuid.uuid4().hex
        self.began = asyncio.Event()
        request = AttemptRequest(
            self.id,
            max_new_tokens,
            np.array(PROMPT, "<u4").tobytes(),
            sampling={"ignore_eos": True},
            logprobs=True,
        )
        self.task = asyncio.create_task(door.generate(request, self._progress))

    def _progress(self, _: Progress) -> None:
        self.began.set()


async def begun(door: SGLangEngine, max_new_tokens: int) -> Attempt:
    attempt = Attempt(door, max_new_tokens)
    await attempt.began.wait()
    return attempt


async def fault_of(call: Awaitable[Any]) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await call
    return caught.value


def are_its_own(answer: Slice) -> bool:
    """Whether the engine's model writes these tokens under the versions that the slice names."""
    tokens = np.frombuffer(answer.token_bytes, "<u4").tolist()
    return verify(PROMPT, tokens, ignore_eos=True, spans=answer.version_spans) is None


def versions(answer: Slice) -> list[str]:
    return [version for version, _, _ in answer.version_spans]
