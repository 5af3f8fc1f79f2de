"""One SGLang server (real or simulated) asked directly over HTTP, past everything of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from rolloutd.client import RolloutResult

Tokens = npt.NDArray[np.uint32]

# Two tokens whose log-probs are closer than this may swap between batch sizes.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Load:
    """What `/v1/loads` says, summed over ranks. `used_tokens` leaves evictable cache out."""

    running: int
    waiting: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer of the engine itself; `leads` is the best minus the second log-prob at each token."""

    tokens: Tokens
    leads: npt.NDArray[np.float64]
    cached_tokens: int

    def near_tie(self, tokens: Tokens) -> bool:
        """Whether `tokens` are the same (False) or differ first at a near tie (True); AssertionError otherwise."""
        assert len(tokens) == len(self.tokens), f"{len(tokens)} tokens, alone {len(self.tokens)}"
        different = np.flatnonzero(tokens != self.tokens)
        if not len(different):
            return False
        first = int(different[0])
        assert self.leads[first] < NEAR_TIE, f"differs from token {first} on, where the best led by {self.leads[first]}"
        return True


class EngineHttp:
    """Use as `async with`."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> EngineHttp:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self.url + path) as response:
            return response.status, await response.text()

    async def post(self, path: str, body: Any) -> Any:
        async with self._session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json(content_type=None)

    async def flush(self) -> None:
        """Empty its cache; waits until it is idle."""
        status, text = await self.get("/flush_cache?timeout=20")
        assert status == 200, text

    async def load(self) -> Load:
        async with self._session.get(self.url + "/v1/loads?include=core") as response:
            loads = (await response.json())["loads"]
        return Load(
            sum(load["num_running_reqs"] for load in loads),
            sum(load["num_waiting_reqs"] for load in loads),
            sum(load["num_used_tokens"] for load in loads),
        )

    async def load_becomes(self, wanted: Callable[[Load], bool], within_seconds: float) -> float:
        """Seconds until the load is as wanted; AssertionError with the last one when that takes too long."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            load = await self.load()
            passed = loop.time() - started
            if wanted(load):
                return passed
            assert passed < within_seconds, f"after {passed:.2f} s: {load}"
            await asyncio.sleep(0.02)

    async def fault(self, **order: Any) -> None:
        """Order a fault from a simulated engine."""
        await self.post("/sim/fault", order)

    async def alone(self, prompt: Sequence[int] | Tokens, max_new_tokens: int) -> Answer:
        """Greedy tokens with their log-probs, computed by an idle engine without anything cached."""
        await self.flush()
        answer = await self.uninterrupted(prompt, max_new_tokens)
        assert answer.cached_tokens == 0
        return answer

    async def uninterrupted(self, prompt: Sequence[int] | Tokens, max_new_tokens: int) -> Answer:
        """Greedy tokens with their log-probs, in one request."""
        answer = await self.post(
            "/generate",
            {
                "input_ids": [int(token) for token in prompt],
                "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": -1,
                "top_logprobs_num": 2,
            },
        )
        meta = answer["meta_info"]
        return Answer(
            np.array(answer["output_ids"], np.uint32),
            np.array([top[0][0] - top[1][0] for top in meta["output_top_logprobs"]]),
            meta["cached_tokens"],
        )


def near_ties(results: Sequence[RolloutResult], references: Sequence[Answer]) -> int:
    """Assert that every result completed with the tokens of its reference; returns how many differ at a near tie."""
    count = 0
    for result, reference in zip(results, references, strict=True):
        assert result.ok and result.complete, f"{result.rollout_id}: {result.outcome} {result.problem}"
        try:
            count += reference.near_tie(result.tokens)
        except AssertionError as error:
            raise AssertionError(f"{result.rollout_id} (spans {result.spans}): {error}") from error
    return count
