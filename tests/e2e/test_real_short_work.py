"""Reward queries are served while long generations hold every slot and more wait for one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rolloutd.client.words import RolloutClass
from tests.e2e.conftest import Rig
from tests.e2e.rollouts import LONG, prompt
from tests.sglang_servers import MAX_RUNNING_ROLLOUTS

QUERIES = 20
# Seconds from submitting 20 queries to the last answer; the long generations need minutes.
WITHIN_SECONDS = 15.0

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("rollout_class", ["critical", "background"])
async def test_reward_queries_pass_long_generations(
    real: Rig, random: np.random.Generator, rollout_class: RolloutClass
) -> None:
    loop = asyncio.get_running_loop()
    long = 2 * MAX_RUNNING_ROLLOUTS + 40
    async with real.client("long") as client, real.client("judge") as judge:
        for index in range(long):
            await client.submit(
                prompt(random, 16),
                rollout_id=f"long-{index}",
                rollout_class=rollout_class,
                max_new_tokens=LONG,
                temperature=0,
                ignore_eos=True,
            )
        async with asyncio.timeout(60):
            while (await client.get_budget()).running_rollouts < 40 or await real.running() < 20:
                await asyncio.sleep(0.05)
        began = loop.time()
        answers = await asyncio.gather(
            *(
                judge.generate(
                    prompt(random, 200), task_type="reward", max_new_tokens=4, temperature=0, ignore_eos=True
                )
                for _ in range(QUERIES)
            )
        )
        seconds = loop.time() - began
        assert all(len(answer.tokens) == 4 for answer in answers)
        waits = sorted(answer.times.total_seconds for answer in answers)
        states = [rollout.state async for rollout in client.list_rollouts(states=["running", "queued", "dispatched"])]
        print(f"\n{QUERIES} reward queries in {seconds:.2f} s, slowest {waits[-1]:.2f} s; {len(states)} long ones unfinished")
        assert seconds < WITHIN_SECONDS
        await client.cancel(*(f"long-{index}" for index in range(long)))
