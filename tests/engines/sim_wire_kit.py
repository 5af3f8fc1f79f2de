"""A simulated engine's process, and a client that talks to it over real HTTP in SGLang's words.

Time scale 50 unless told otherwise: a simulated second is 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

PROMPT = list(range(10, 250))
LONG = {"max_new_tokens": 20_000, "ignore_eos": True}
SHORT = {"sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}


class Client:
    """Talks to one engine process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self.session = session

    async def call(self, method: str, path: str, **words: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **words) as response:
            text = await response.text()
            if response.content_type == "application/json":
                return response.status, json.loads(text)
            return response.status, text

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.call("POST", path, json=body if body is not None else {})

    async def state(self) -> dict[str, Any]:
        status, body = await self.call("GET", "/sim/state")
        assert status == 200
        return dict(body)

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll `/sim/state` until the condition holds; pytest's time-out is the limit."""
        while True:
            state = await self.state()
            if condition(state):
                return state
            await asyncio.sleep(0.005)

    async def stream(self, body: dict[str, Any]) -> list[Any]:
        return [frame async for frame in self.frames(body)]

    async def frames(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Frames of a stream, decoded; the last one is the string [DONE]."""
        async with self.session.post(self.url + "/generate", json=generate(**body, stream=True)) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            async for line in response.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    data = line[6:].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def generate(**words: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": PROMPT, "return_logprob": True, "rid": uuid.uuid4().hex}
    return body | words


def joined(frames: list[Any]) -> tuple[list[int], list[float], dict[str, Any]]:
    """Tokens, log-probs and the last meta_info of an incremental stream."""
    assert frames[-1] == "[DONE]"
    tokens: list[int] = []
    logprobs: list[float] = []
    for frame in frames[:-1]:
        tokens += frame["output_ids"]
        pairs = frame["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in pairs] == frame["output_ids"]
        logprobs += [logprob for logprob, _, _ in pairs]
    return tokens, logprobs, frames[-2]["meta_info"]


@asynccontextmanager
async def engine(*flags: str, scale: float = 50) -> AsyncIterator[Client]:
    """An engine process, ready; killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutd.engines.sim.server", "--port", "0", "--time-scale", str(scale), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        if b"listening" not in line:
            _, errors = await process.communicate()
            raise AssertionError(line.decode() + errors.decode())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(process, line.split()[-1].decode(), session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
