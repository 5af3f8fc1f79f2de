"""A listener between `rolloutd serve` and one SGLang server: passes everything on and remembers what the engine said.

Invariants
- Bytes pass unchanged and in order, a hang-up on either side is one on the other.
- Times are of one monotonic clock, taken before a message is passed on: what a frame holds was generated before its time, what
  a request asks for is generated after its.

What this module does not know: rollouts, and whether what it heard is right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

DATA = b"data: "
DONE = b"[DONE]"
VersionSpans = list[tuple[str, int, int]]
# What concerns one connection only.
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass(slots=True)
class Frame:
    """Output tokens that had arrived by `at`."""

    at: float
    tokens: int


@dataclass(slots=True)
class Generation:
    """One request to generate, as the engine answered it. `spans`: (weights' label, start, end) over `output`."""

    engine: str
    asked_at: float
    rid: str
    input_ids: list[int]
    cache_salt: str
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    spans: VersionSpans = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rid} on {self.engine} at {self.asked_at:.3f}: {len(self.input_ids)} + {len(self.output)} tokens, "
            f"{self.finish_reason or 'no end'}, {self.spans}"
        )

    def take(self, at: float, frame: dict[str, Any]) -> None:
        """Add one frame of an incremental stream."""
        meta = frame["meta_info"]
        # An abort outside the running batch ends with known tokens once more; the counter says what is new.
        new = meta["completion_tokens"] - len(self.output)
        if new:
            assert new > 0 and len(frame["output_ids"]) >= new, f"{self.rid}: {len(frame['output_ids'])} ids, {new} new"
            self.output += frame["output_ids"][:new]
            self.logprobs += [entry[0] for entry in meta.get("output_token_logprobs", [])[:new]]
            self.frames.append(Frame(at, len(self.output)))
        self.cached_tokens = meta.get("cached_tokens") or self.cached_tokens
        if meta.get("weight_versions") is not None:
            self.spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        if meta["finish_reason"] is not None:
            self.finish_reason = meta["finish_reason"]["type"]


@dataclass(slots=True)
class Order:
    """A controlling call: POST to `path`. `status` 0: not answered."""

    path: str
    body: dict[str, Any]
    asked_at: float
    answered_at: float = 0.0
    status: int = 0
    answer: str = ""


class EngineTap:
    """Use as `async with`; `url` is where rolloutd finds the engine."""

    def __init__(self, engine_url: str) -> None:
        self.engine_url = engine_url
        self.generations: list[Generation] = []
        self.orders: list[Order] = []
        # Called when an order was answered, before its answer is passed on, and when the engine cut a connection, before we do.
        self.on_answer: Callable[[Order], Awaitable[None]] = _nothing
        self.on_cut: Callable[[str], None] = lambda path: None

    async def __aenter__(self) -> EngineTap:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass)
        # A caller that hangs up cancels the handler, and with it the request to the engine.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def told(self, path: str) -> list[Order]:
        """Controlling calls to this path, oldest first."""
        return [order for order in self.orders if order.path == path]

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        at = time.monotonic()
        body = await request.read()
        generation: Generation | None = None
        order: Order | None = None
        if request.path == "/generate":
            asked = orjson.loads(body)
            generation = Generation(
                self.engine_url, at, asked["rid"], asked["input_ids"], asked.get("cache_salt") or ""
            )
            self.generations.append(generation)
        elif request.method == "POST":
            order = Order(request.path, orjson.loads(body) if body else {}, at)
            self.orders.append(order)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = self.engine_url + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                if order is not None:
                    order.answer = await answer.text()
                    order.answered_at, order.status = time.monotonic(), answer.status
                    await self.on_answer(order)
                    await response.write(order.answer.encode())
                rest = b""
                async for chunk in answer.content.iter_any():
                    if generation is not None and answer.status == 200:
                        rest = _take_frames(generation, rest + chunk)
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            self.on_cut(request.path)
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None


async def _nothing(order: Order) -> None:
    pass


def _take_frames(generation: Generation, received: bytes) -> bytes:
    """Take the whole frames; returns what is left."""
    at = time.monotonic()
    *events, rest = received.split(b"\n\n")
    for event in events:
        if event.startswith(DATA) and event != DATA + DONE:
            frame = orjson.loads(event.removeprefix(DATA))
            if "meta_info" in frame:
                generation.take(at, frame)
    return rest
