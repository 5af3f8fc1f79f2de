"""Reward queries are served while long generations hold everything an engine has and more of them wait."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rolloutd.client.words import RolloutClass, RolloutState
from tests.e2e.conftest import Rig
from tests.e2e.rollouts import LONG, prompt, until
from tests.sglang_servers import MAX_RUNNING_ROLLOUTS

QUERIES = 20
LONG_ROLLOUTS = 2 * MAX_RUNNING_ROLLOUTS + 40
# From submitting the queries to the last answer. The long generations of a full engine need minutes.
WITHIN_SECONDS = 20.0

UNFINISHED: list[RolloutState] = ["queued", "held", "dispatched", "running", "stopping"]

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("rollout_class", "max_new_tokens", "running"),
    [
        # 5 of 3,000 tokens are all that SGLang admits into 16,384: the rest of what it got stands in its own queue.
        pytest.param("critical", LONG, 10, id="memory is full"),
        pytest.param("critical", 450, 2 * MAX_RUNNING_ROLLOUTS - 4, id="slots are full"),
        pytest.param("background", LONG, 10, id="of background work"),
    ],
)
async def test_reward_queries_pass_long_generations(
    real: Rig, random: np.random.Generator, rollout_class: RolloutClass, max_new_tokens: int, running: int
) -> None:
    loop = asyncio.get_running_loop()
    ids = [f"long-{index}" for index in range(LONG_ROLLOUTS)]
    async with real.client("long") as client, real.client("judge") as judge:
        for rollout_id in ids:
            await client.submit(
                prompt(random, 16),
                rollout_id=rollout_id,
                rollout_class=rollout_class,
                max_new_tokens=max_new_tokens,
                temperature=0,
                ignore_eos=True,
            )

        async def is_full() -> bool:
            return await real.running() >= running

        await until(is_full)
        began = loop.time()
        queries = [
            judge.generate(prompt(random, 200), task_type="reward", max_new_tokens=4, temperature=0, ignore_eos=True)
            for _ in range(QUERIES)
        ]
        answers = await asyncio.gather(*queries)
        seconds = loop.time() - began
        left = sum(
            [rollout.rollout_id.startswith("long-") async for rollout in client.list_rollouts(states=UNFINISHED)]
        )
        slowest = max(answer.times.total_seconds for answer in answers)
        print(
            f"\n{QUERIES} reward queries in {seconds:.2f} s, slowest {slowest:.2f} s; "
            f"{left} of {LONG_ROLLOUTS} long generations have not ended"
        )
        assert all(len(answer.tokens) == 4 for answer in answers)
        assert seconds < WITHIN_SECONDS
        await client.cancel(*ids)
