"""What routing relies on: prefix reuse, isolation by salt, and the engine's own counts."""

from __future__ import annotations

import asyncio

import numpy as np

from rolloutd.engines.base import EngineInfo
from rolloutd.engines.sglang import SGLangEngine
from tests.conformance.support import Running, gather, greedy, ids, load_shows, run

# Whole pages of a 240-token prompt that can be reused: at least one token is always computed, pages hold 16.
REUSABLE = 224


async def test_second_identical_prompt_is_cached(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 240)
    first = await run(door, greedy(prompt, 4))
    second = await run(door, greedy(prompt, 4))
    assert (first.cached_tokens, second.cached_tokens) == (0, REUSABLE)
    assert first.token_bytes == second.token_bytes


async def test_continuation_reuses_its_own_output(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 240)
    first = await run(door, greedy(prompt, 60))
    second = await run(door, greedy(prompt + first.token_bytes, 4))
    assert second.cached_tokens >= 288 - 16


async def test_siblings_together_do_not_share_but_do_after_the_leader(
    door: SGLangEngine, prompts: np.random.Generator
) -> None:
    prompt = ids(prompts, 240)
    # A long prompt in front keeps the engine busy until all siblings wait; then they are admitted as one batch.
    blocker = Running(door, greedy(ids(prompts, 3500), 1))
    siblings = [greedy(prompt, 8) for _ in range(6)]
    answers = await gather(door, siblings)
    await blocker.task
    # One that arrives before the long prompt may go alone and one behind it may come too late; sharing would leave one 0.
    cached = [answer.cached_tokens for answer in answers]
    assert cached.count(0) >= 3, f"equal prompts of one prefill batch share nothing, but they had {cached}"

    other = ids(prompts, 240)
    leader = Running(door, greedy(other, 60))
    await leader.first_token.wait()
    followers = await gather(door, [greedy(other, 8) for _ in range(5)])
    assert [answer.cached_tokens for answer in followers] == [REUSABLE] * 5
    assert (await leader.task).cached_tokens == 0


async def test_salt_isolates(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 240)
    await run(door, greedy(prompt, 4))
    salted = await run(door, greedy(prompt, 4, cache_salt="7"))
    again = await run(door, greedy(prompt, 4, cache_salt="7"))
    plain = await run(door, greedy(prompt, 4))
    assert [answer.cached_tokens for answer in (salted, again, plain)] == [0, REUSABLE, REUSABLE]


async def test_load_report_follows_the_work(door: SGLangEngine, info: EngineInfo, prompts: np.random.Generator) -> None:
    idle = await load_shows(door, lambda load: load.running_rollouts == 0 and load.kv_used_tokens == 0)
    assert idle.waiting_rollouts == 0
    assert idle.kv_capacity_tokens == info.kv_capacity_tokens
    running = [Running(door, greedy(ids(prompts, 160), 3000)) for _ in range(2)]
    for one in running:
        await one.first_token.wait()
    # The report is a snapshot from the last prefill batch or some decode steps ago; it catches up.
    busy = await load_shows(
        door,
        lambda load: load.running_rollouts == 2 and load.prefilled_tokens_total >= idle.prefilled_tokens_total + 320,
    )
    assert 2 * 160 <= busy.kv_used_tokens < 2 * 3160
    assert busy.prefill_busy_seconds_total > idle.prefill_busy_seconds_total
    assert busy.engine_time_seconds > idle.engine_time_seconds
    await asyncio.gather(*(door.abort(one.id) for one in running))
    await asyncio.gather(*(one.task for one in running))
    done = await load_shows(door, lambda load: load.running_rollouts == 0 and load.kv_used_tokens == 0)
    assert done.engine_time_seconds >= busy.engine_time_seconds


async def test_ready(door: SGLangEngine) -> None:
    assert await door.ready() is True
