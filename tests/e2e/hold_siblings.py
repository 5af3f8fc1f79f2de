"""What a trainer without a scheduler would write: a group's siblings wait for their leader's first token.

The figures of the groups test stand beside its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson


@dataclass(frozen=True, slots=True)
class Figures:
    cached_share: float
    wall_seconds: float


async def hold_siblings(urls: Sequence[str], prompts: Sequence[Sequence[int]], samples: int, tokens: int) -> Figures:
    """Each prompt's group on one engine, engines in turn; all greedy."""
    cached = total = 0

    async def one(url: str, prompt: Sequence[int], first_token: asyncio.Event) -> None:
        nonlocal cached, total
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        async with session.post(url + "/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first_token.set()
                    meta = orjson.loads(line[6:])["meta_info"]
        cached += meta["cached_tokens"]
        total += meta["prompt_tokens"]

    async def group(url: str, prompt: Sequence[int]) -> None:
        first_token = asyncio.Event()
        leader = asyncio.create_task(one(url, prompt, first_token))
        await first_token.wait()
        await asyncio.gather(leader, *(one(url, prompt, first_token) for _ in range(samples - 1)))

    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = loop.time()
        await asyncio.gather(*map(group, itertools.cycle(urls), prompts))
        return Figures(cached / total, loop.time() - started)
