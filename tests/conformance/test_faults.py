"""Faults on command: what the door makes of a simulated engine that breaks. Only that engine breaks on command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from rolloutd.engines.base import EngineFault, FaultKind
from rolloutd.engines.sglang import SGLangEngine, Timeouts
from tests.conformance.conftest import VOCABULARY_SIZE, SimServer
from tests.conformance.support import Running, greedy, ids, run

SHORT = Timeouts(connect_seconds=1, first_byte_seconds=1, idle_seconds=1, abort_seconds=0.3, control_seconds=1)


@pytest_asyncio.fixture
async def broken(sim_url: str) -> AsyncIterator[SGLangEngine]:
    """A door with short limits to a healthy server; its faults are taken back at the end."""
    engine = SGLangEngine(sim_url, vocabulary_size=VOCABULARY_SIZE, timeouts=SHORT)
    await engine.register()
    yield engine
    await engine.close()
    async with aiohttp.ClientSession() as session, session.delete(sim_url + "/sim/fault") as response:
        assert response.status == 200


async def order(engine: SGLangEngine, **fault: Any) -> None:
    async with aiohttp.ClientSession() as session, session.post(engine.url + "/sim/fault", json=fault) as response:
        assert response.status == 200, await response.text()


async def fault_of(engine: SGLangEngine, prompts: np.random.Generator, tokens: int = 64) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await run(engine, greedy(ids(prompts, 20), tokens, logprobs=True))
    return caught.value


async def test_busy_is_no_fault_of_the_engine(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    await order(broken, kind="busy", count=1)
    assert (await fault_of(broken, prompts)).kind is FaultKind.BUSY
    assert len((await run(broken, greedy(ids(prompts, 20), 8))).token_bytes) == 32


async def test_error_500_is_broken(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    await order(broken, kind="error_500", count=1)
    assert (await fault_of(broken, prompts)).kind is FaultKind.BROKEN


async def test_a_cut_stream_keeps_what_arrived(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 20)
    whole = await run(broken, greedy(prompt, 64))
    await order(broken, kind="cut_stream", count=1, tokens=20)
    with pytest.raises(EngineFault) as caught:
        await run(broken, greedy(prompt, 64, logprobs=True))
    partial = caught.value.partial
    assert caught.value.kind is FaultKind.BROKEN and partial is not None
    count = len(partial.token_bytes) // 4
    assert 1 <= count <= 64
    assert len(partial.logprob_bytes) == 4 * count
    assert partial.version_spans == (("default", 0, count),)
    rest = await run(broken, greedy(prompt + partial.token_bytes, 64 - count))
    assert partial.token_bytes + rest.token_bytes == whole.token_bytes


async def test_a_repeated_frame_never_doubles_a_token(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 20)
    whole = await run(broken, greedy(prompt, 64))
    await order(broken, kind="duplicate_frame")
    answer = await run(broken, greedy(prompt, 64))
    assert (answer.token_bytes, answer.text) == (whole.token_bytes, whole.text)


async def test_garbage_is_broken(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    await order(broken, kind="garbage_frame")
    fault = await fault_of(broken, prompts)
    assert fault.kind is FaultKind.BROKEN and "not understood" in fault.message


async def test_a_hanging_engine_is_silent(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    await order(broken, kind="hang", seconds=30)
    assert (await fault_of(broken, prompts)).kind is FaultKind.SILENT


async def test_silence_in_the_middle_keeps_what_arrived(broken: SGLangEngine, prompts: np.random.Generator) -> None:
    running = Running(broken, greedy(ids(prompts, 20), 3000))
    await running.first_token.wait()
    await order(broken, kind="stall", seconds=30)
    with pytest.raises(EngineFault) as caught:
        await running.task
    assert caught.value.kind is FaultKind.SILENT
    assert caught.value.partial is not None and caught.value.partial.token_bytes


async def test_an_abort_that_nobody_answers_still_ends_the_attempt(
    broken: SGLangEngine, prompts: np.random.Generator
) -> None:
    running = Running(broken, greedy(ids(prompts, 20), 3000, logprobs=True))
    await running.first_token.wait()
    await order(broken, kind="stall", seconds=30)
    await broken.abort(running.id)
    answer = await running.task
    count = len(answer.token_bytes) // 4
    assert answer.finish_reason == "abort" and count >= 1
    assert len(answer.logprob_bytes) == 4 * count
    assert answer.version_spans == (("default", 0, count),)


async def test_not_ready(broken: SGLangEngine) -> None:
    await order(broken, kind="not_ready")
    assert await broken.ready() is False
    with pytest.raises(EngineFault) as caught:
        await broken.register()
    assert caught.value.kind is FaultKind.BUSY


async def test_a_crash_and_a_restart_are_noticed(own_sim: SimServer, prompts: np.random.Generator) -> None:
    engine = SGLangEngine(own_sim.url, vocabulary_size=VOCABULARY_SIZE, timeouts=SHORT)
    before = await engine.register()
    running = Running(engine, greedy(ids(prompts, 20), 3000))
    await running.first_token.wait()
    own_sim.process.kill()
    with pytest.raises(EngineFault) as caught:
        await running.task
    assert caught.value.kind is FaultKind.BROKEN
    assert caught.value.partial is not None
    own_sim.process.wait(10)
    with pytest.raises(EngineFault) as refused:
        await engine.ready()
    assert refused.value.kind is FaultKind.BROKEN
    with pytest.raises(EngineFault) as unreached:
        await engine.generate(greedy(ids(prompts, 20), 1), lambda _: None)
    assert unreached.value.kind is FaultKind.UNREACHED, "it saw nothing of the attempt"
    own_sim.start()
    after = await engine.register()
    assert after.incarnation != before.incarnation
    await engine.close()
