"""Stopping work: abort and hang-up reach the engine, touch nothing else and lose no token."""

from __future__ import annotations

import asyncio
import time
import uuid

import numpy as np
import pytest

from rolloutd.engines.base import EngineFault, EngineInfo, FaultKind
from rolloutd.engines.sglang import SGLangEngine
from tests.conformance.support import Running, greedy, ids, load_shows, run

LONG = 3000  # tokens that no test waits for


async def test_abort_of_running_work_keeps_its_tokens(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 30)
    running = Running(door, greedy(prompt, LONG, logprobs=True))
    await running.first_token.wait()
    await door.abort(running.id)
    answer = await running.task
    count = len(answer.token_bytes) // 4
    assert answer.finish_reason == "abort"
    assert 1 <= count < LONG
    assert len(answer.logprob_bytes) == 4 * count
    assert answer.version_spans == (("default", 0, count),)
    reference = await run(door, greedy(prompt, count))
    assert reference.token_bytes == answer.token_bytes
    await load_shows(door, lambda load: load.running_rollouts == 0)


async def test_abort_of_queued_work(door: SGLangEngine, info: EngineInfo, prompts: np.random.Generator) -> None:
    fill = [Running(door, greedy(ids(prompts, 16), 450)) for _ in range(info.max_running_rollouts)]
    for running in fill:
        await running.first_token.wait()
    queued = Running(door, greedy(ids(prompts, 16), 450, logprobs=True))
    await load_shows(door, lambda load: load.waiting_rollouts == 1)
    await door.abort(queued.id)
    answer = await queued.task
    assert answer.finish_reason == "abort"
    assert answer.token_bytes == b"" and answer.logprob_bytes == b""
    assert not queued.first_token.is_set()
    for running in fill:
        await door.abort(running.id)
    answers = await asyncio.gather(*(running.task for running in fill))
    assert {answer.finish_reason for answer in answers} <= {"abort", "length"}
    await load_shows(door, lambda load: load.running_rollouts == 0 and load.kv_used_tokens == 0)


async def test_abort_of_unknown_and_finished_ids_changes_nothing(
    door: SGLangEngine, prompts: np.random.Generator
) -> None:
    finished = greedy(ids(prompts, 20), 4)
    await run(door, finished)
    running = Running(door, greedy(ids(prompts, 20), 150))
    await running.first_token.wait()
    await door.abort(uuid.uuid4().hex)
    await door.abort(finished.attempt_id)
    answer = await running.task
    assert answer.finish_reason == "length" and len(answer.token_bytes) == 600


async def test_abort_of_an_empty_id_is_refused(door: SGLangEngine) -> None:
    with pytest.raises(EngineFault) as caught:
        await door.abort("")
    assert caught.value.kind is FaultKind.REFUSED


async def test_abort_stops_exactly_one_of_similar_ids(door: SGLangEngine, prompts: np.random.Generator) -> None:
    """The engine matches ids by prefix, so ids of equal length are what keeps neighbours apart."""
    stem = uuid.uuid4().hex[:-1]
    some = [greedy(ids(prompts, 20), 150) for _ in range(3)]
    named = [type(r)(stem + str(n), r.max_new_tokens, r.token_bytes, sampling=r.sampling) for n, r in enumerate(some)]
    running = [Running(door, request) for request in named]
    for one in running:
        await one.first_token.wait()
    await door.abort(stem + "1")
    answers = [await one.task for one in running]
    assert [answer.finish_reason for answer in answers] == ["length", "abort", "length"]
    assert len(answers[0].token_bytes) == len(answers[2].token_bytes) == 600


async def test_cancelling_the_task_stops_the_engine_within_a_second(
    door: SGLangEngine, prompts: np.random.Generator
) -> None:
    seconds = []
    for _ in range(3):
        running = Running(door, greedy(ids(prompts, 20), LONG))
        await running.first_token.wait()
        await load_shows(door, lambda load: load.running_rollouts == 1)
        cancelled = time.monotonic()
        running.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.task
        await load_shows(door, lambda load: load.running_rollouts == 0 and load.kv_used_tokens == 0)
        seconds.append(time.monotonic() - cancelled)
        if seconds[-1] < 1.0:
            return
    pytest.fail(f"the engine stopped {seconds} s after the hang-up; a busy machine excuses one such time, not three")


async def test_aborted_work_is_resumed_from_its_tokens(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 64)
    whole = await run(door, greedy(prompt, 120, sampling={}))
    running = Running(door, greedy(prompt, 120))
    await running.first_token.wait()
    await door.abort(running.id)
    part = await running.task
    if part.finish_reason == "length":
        pytest.fail("120 tokens were generated before the abort arrived: make the request longer")
    rest = await run(door, greedy(prompt + part.token_bytes, 120 - len(part.token_bytes) // 4))
    assert part.token_bytes + rest.token_bytes == whole.token_bytes
