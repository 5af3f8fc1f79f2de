"""Short words for end-to-end tests: submit work and wait until it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Unpack

import numpy as np

from rolloutd.client import Client, Progress, RolloutResult
from rolloutd.client.submissions import RolloutOptions
from tests.e2e.engine_http import Tokens

# Tokens that no test waits for: half a minute of an engine that has nothing else to do, minutes of a full one.
LONG = 3000


def prompt(random: np.random.Generator, tokens: int = 30) -> Tokens:
    """Random ordinary ids."""
    return random.integers(3, 1000, tokens).astype(np.uint32)


async def submit_running(
    client: Client, prompts: Sequence[Tokens], name: str, **options: Unpack[RolloutOptions]
) -> list[str]:
    """Submit greedy rollouts, one per prompt, and return their ids once every one has written a token."""
    words: RolloutOptions = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True, **options}
    silent = {f"{name}-{index}": tokens for index, tokens in enumerate(prompts)}
    all_run = asyncio.Event()

    def on_progress(progress: Progress) -> None:
        silent.pop(progress.rollout_id, None)
        if not silent:
            all_run.set()

    ids = list(silent)
    for rollout_id, tokens in list(silent.items()):
        words["rollout_id"] = rollout_id
        await client.submit(tokens, on_progress=on_progress, **words)
    await all_run.wait()
    return ids


async def until(condition: Callable[[], Awaitable[bool]], within_seconds: float = 60.0) -> None:
    """Wait for what no event announces."""
    async with asyncio.timeout(within_seconds):
        while not await condition():  # noqa: ASYNC110 - another process's state sets no event of ours
            await asyncio.sleep(0.02)


async def take(client: Client, count: int) -> dict[str, RolloutResult]:
    """The next `count` results, by id."""
    found: dict[str, RolloutResult] = {}
    if count:
        async for result in client.results():
            assert result.rollout_id not in found, f"{result.rollout_id} was delivered twice"
            found[result.rollout_id] = result
            if len(found) == count:
                break
    return found
