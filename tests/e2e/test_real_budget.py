"""A budget that shrinks in the middle of work, checked from what the engines themselves report."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest

from tests.e2e.conftest import Rig
from tests.e2e.engine_http import near_ties
from tests.e2e.rollouts import prompt

BACKGROUND, CRITICAL = 32, 8
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 240
WIDE_ROLLOUTS, WIDE_KV_TOKENS = 40, 16_000
NARROW_ROLLOUTS, NARROW_KV_TOKENS = 12, 3_000
# An engine renews what /v1/loads says only every few steps, so one that ends here and one that starts there meanwhile show
# both. What is over a ceiling shows for longer than that: as long as rollouts run.
STALE_SECONDS = 0.5
WATCH_SECONDS = 2.0  # with work waiting, once the smaller budget must hold; however fast the engines are


@pytest.mark.sglang
async def test_engines_stay_below_a_budget_that_shrinks(real: Rig, random: np.random.Generator) -> None:
    prompts = {f"background-{index}": prompt(random, PROMPT_TOKENS) for index in range(BACKGROUND)}
    prompts |= {f"critical-{index}": prompt(random, PROMPT_TOKENS) for index in range(CRITICAL)}
    answers = await asyncio.gather(
        *(real.engines[0].uninterrupted(tokens, OUTPUT_TOKENS) for tokens in prompts.values())
    )
    references = dict(zip(prompts, answers, strict=True))
    for engine in real.engines:
        await engine.flush()

    loop = asyncio.get_running_loop()
    peak_rollouts = peak_tokens = samples = 0
    wide_rollouts = wide_tokens = 0
    async with real.client() as client:
        await client.set_budget(max_running_rollouts=WIDE_ROLLOUTS, max_kv_tokens=WIDE_KV_TOKENS)
        submitted = 0

        async def submit(rollout_id: str, tokens: np.ndarray) -> None:
            nonlocal submitted
            submitted += 1
            await client.submit(
                tokens,
                rollout_id=rollout_id,
                rollout_class="critical" if rollout_id.startswith("critical") else "background",
                max_new_tokens=OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
            )

        for rollout_id, tokens in prompts.items():
            await submit(rollout_id, tokens)
        async with asyncio.timeout(60):
            while wide_rollouts < WIDE_ROLLOUTS - 4 or wide_tokens < NARROW_KV_TOKENS:
                loads = [await engine.load() for engine in real.engines]
                wide_rollouts = sum(load.running for load in loads)
                wide_tokens = sum(load.used_tokens for load in loads)
        shrunk = await client.set_budget(max_running_rollouts=NARROW_ROLLOUTS, max_kv_tokens=NARROW_KV_TOKENS)
        assert shrunk.shrink_seconds > 0
        in_force_at = loop.time() + shrunk.shrink_seconds
        down_at = 0.0
        results = []

        async def collect() -> None:
            async for result in client.results():
                results.append(result)

        collecting = asyncio.create_task(collect())
        began = loop.time()
        readings: deque[tuple[float, int, int]] = deque()
        while len(results) < submitted:
            loads = await asyncio.gather(*(engine.load() for engine in real.engines))
            readings.append((loop.time(), sum(load.running for load in loads), sum(load.used_tokens for load in loads)))
            while readings[0][0] < loop.time() - STALE_SECONDS:
                readings.popleft()
            rollouts, used = min(one[1] for one in readings), min(one[2] for one in readings)
            if loop.time() >= in_force_at:
                samples += 1
                peak_rollouts, peak_tokens = max(peak_rollouts, rollouts), max(peak_tokens, used)
            elif not down_at and rollouts <= NARROW_ROLLOUTS and used <= NARROW_KV_TOKENS:
                down_at = loop.time() - began
            if loop.time() < in_force_at + WATCH_SECONDS and submitted - len(results) < BACKGROUND:
                name = f"background-{submitted % BACKGROUND}"
                await submit(f"{name}+{submitted}", prompts[name])
            await asyncio.sleep(0.02)
        collecting.cancel()

    interrupted = [result for result in results if result.preemptions]
    ties = near_ties(results, [references[result.rollout_id.partition("+")[0]] for result in results])
    print(
        f"\nfrom {wide_rollouts} rollouts and {wide_tokens} KV tokens down to {NARROW_ROLLOUTS} and {NARROW_KV_TOKENS} in "
        f"{down_at:.2f} s (stated {shrunk.shrink_seconds:g} s); then at most {peak_rollouts} and {peak_tokens} in {samples} "
        f"samples; {len(interrupted)} interrupted rollouts, near ties {ties} of {len(results)}"
    )
    assert len(results) == submitted == len({result.rollout_id for result in results})
    assert samples > 20, "the work ended before the budget was watched"
    assert peak_rollouts <= NARROW_ROLLOUTS
    assert peak_tokens <= NARROW_KV_TOKENS
    assert any(0 < result.spans[0].end < OUTPUT_TOKENS for result in interrupted), "nothing resumed from its tokens"
    assert not any(result.rollout_class == "critical" and result.preemptions for result in results)
