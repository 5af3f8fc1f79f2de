"""Short words for the conformance suite: make a request, run it, compare answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolloutd.engines.base import AttemptRequest, Engine, EngineLoad, Progress, Slice

# Between prefill and decode the same log-prob is computed in another order of sums, in float32.
LOGPROB_TOLERANCE = 1e-3
# Two tokens whose log-probs are closer than this may swap between batch sizes.
NEAR_TIE = 1e-3
# How long the engine's own counts may take to show what it did. It is a fraction of a second on an idle machine; this is
# for a machine that runs other things as well.
SHOWN_WITHIN_SECONDS = 20.0


def ids(generator: np.random.Generator, count: int) -> bytes:
    """Random ordinary token ids."""
    return generator.integers(3, 1000, count).astype("<u4").tobytes()


def ask(token_bytes: bytes, max_new_tokens: int, **fields: Any) -> AttemptRequest:
    return AttemptRequest(uuid.uuid4().hex, max_new_tokens, token_bytes, **fields)


def greedy(
    token_bytes: bytes, max_new_tokens: int, *, sampling: dict[str, Any] | None = None, **fields: Any
) -> AttemptRequest:
    """A request whose length is exact: greedy, without the model's own end token."""
    words = {"temperature": 0.0, "ignore_eos": True} | (sampling or {})
    return ask(token_bytes, max_new_tokens, sampling=words, **fields)


async def run(
    engine: Engine, request: AttemptRequest, on_progress: Callable[[Progress], None] = lambda _: None
) -> Slice:
    return await engine.generate(request, on_progress)


async def gather(engine: Engine, requests: Sequence[AttemptRequest]) -> list[Slice]:
    return await asyncio.gather(*(run(engine, request) for request in requests))


def same_tokens(whole: Slice, *parts: Slice) -> int:
    """Assert that the parts make the whole. Returns 1 if they differ from a near tie on, which only `whole` with
    top_logprobs can show, else 0."""
    expected = np.frombuffer(whole.token_bytes, "<u4")
    got = np.frombuffer(b"".join(part.token_bytes for part in parts), "<u4")
    assert len(expected) == len(got)
    different = np.flatnonzero(expected != got)
    if not len(different):
        return 0
    first = int(different[0])
    assert whole.top_logprobs, f"tokens differ from {first} on"
    (best, _), (second, _) = whole.top_logprobs[first][:2]
    assert best - second < NEAR_TIE, f"tokens differ from {first} on, where the best leads by {best - second}"
    return 1


async def load_shows(
    engine: Engine, wanted: Callable[[EngineLoad], bool], within_seconds: float = SHOWN_WITHIN_SECONDS
) -> EngineLoad:
    """The first load report that is as wanted; AssertionError with the last one when none is in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    while True:
        report = await engine.load()
        if wanted(report):
            return report
        assert loop.time() < deadline, f"after {within_seconds} s: {report}"
        await asyncio.sleep(0.02)


class Running:
    """An attempt in the background that can be waited for at its first token, and at later ones."""

    def __init__(self, engine: Engine, request: AttemptRequest) -> None:
        self.id = request.attempt_id
        self.first_token = asyncio.Event()
        self.moved = asyncio.Event()
        self.generated_tokens = 0
        self.cached_tokens = -1
        self.task = asyncio.create_task(engine.generate(request, self._progress))

    def _progress(self, progress: Progress) -> None:
        self.cached_tokens = progress.cached_tokens
        self.generated_tokens = progress.generated_tokens
        self.first_token.set()
        self.moved.set()

    async def writes(self, tokens: int) -> None:
        """Until so many more tokens are here than now."""
        wanted = self.generated_tokens + tokens
        while self.generated_tokens < wanted:
            self.moved.clear()
            await self.moved.wait()
