"""New weights under work in flight, on both engines: every token is the version's that its span names.

The real engine's two checkpoints differ in their weights only. The simulated engine takes any path and writes by the
version's name, so there a version is all that a checkpoint is.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from rolloutd.engines.base import EngineFault, FaultKind, Slice
from rolloutd.engines.control import PauseMode, WeightsLoaded
from rolloutd.engines.sglang import SGLangEngine
from tests.conformance.conftest import REAL, VOCABULARY_SIZE, SimServer
from tests.conformance.support import Running, greedy, ids, run, same_tokens
from tests.sglang_servers import environment, start_server, wait_ready

OLD = "default"  # what both engines call the weights that they start with
NEW = "7"
PROMPT_TOKENS = 100
# Some seconds of work: the pause comes into the middle of it, also where the test is slow to send it.
TOKENS = 1200
LONG_TOKENS = 3000
CHECKED_TOKENS = 100  # of each span, from its start
# Longer than any work in flight here takes, on a machine that does other things as well.
FLUSHED_WITHIN_SECONDS = 60.0
ABORT, RETRACT, IN_PLACE = PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Paths on the engine's host."""

    old: str
    new: str


@pytest.fixture
def checkpoints(is_real: bool) -> Checkpoints:
    if not is_real:
        return Checkpoints("simulated", "next")
    folder = environment()
    return Checkpoints(str(folder / "model-0"), str(folder / "model-1"))


@pytest_asyncio.fixture
async def engine(door: SGLangEngine, checkpoints: Checkpoints) -> AsyncIterator[SGLangEngine]:
    """A door whose engine has its first weights again afterwards: other tests share it."""
    await door.load_weights(checkpoints.old, OLD, flush=True)
    yield door
    await door.resume()
    await door.load_weights(checkpoints.old, OLD, flush=True)


async def post(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """What the engine itself answers, past the door."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        return response.status, await response.text()


async def page(url: str, path: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return dict(await response.json())


async def fault_of(call: Any) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await call
    return caught.value


async def begun(engine: SGLangEngine, prompt: bytes, tokens: int = TOKENS) -> Running:
    attempt = Running(engine, greedy(prompt, tokens, logprobs=True, top_logprobs=2))
    await attempt.first_token.wait()
    return attempt


async def again(engine: SGLangEngine, prompt: bytes, tokens: int) -> Slice:
    """What the weights that the engine holds write after a prompt, prefilled anew."""
    return await run(engine, greedy(prompt, tokens, logprobs=True, top_logprobs=2, cache_salt="again"))


def part(answer: Slice, start: int, end: int) -> Slice:
    return Slice(answer.attempt_id, answer.token_bytes[4 * start : 4 * end], answer.finish_reason)


async def is_written_by(engine: SGLangEngine, prompt: bytes, answer: Slice, start: int, end: int) -> None:
    """The weights that the engine holds write the first tokens of answer[start:end] where they are prefilled up to there."""
    end = min(end, start + CHECKED_TOKENS)
    expected = await again(engine, prompt + answer.token_bytes[: 4 * start], end - start)
    same_tokens(expected, part(answer, start, end))


def switch_of(answer: Slice) -> int:
    """The token at which the new weights came; both versions wrote some."""
    (old, start, at), (new, same, end) = answer.version_spans
    assert (old, start, new, end) == (OLD, 0, NEW, len(answer.token_bytes) // 4) and at == same
    assert 0 < at < end
    return at


# ---- each mode ------------------------------------------------------------------------------------------------------


async def test_retract_continues_under_the_new_weights(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    prompt = ids(prompts, PROMPT_TOKENS)
    attempt = await begun(engine, prompt)
    await engine.pause(RETRACT)
    assert await engine.flush(0) is True  # behind the pause, though its answer came before it took effect
    assert await engine.load_weights(checkpoints.new, NEW, flush=True) == WeightsLoaded(flushed=True)
    assert await engine.weight_version() == NEW
    await engine.resume()
    answer = await attempt.task
    at = switch_of(answer)
    assert answer.finish_reason == "length" and len(answer.token_bytes) == 4 * TOKENS
    await is_written_by(engine, prompt, answer, at, TOKENS)
    await engine.load_weights(checkpoints.old, OLD, flush=True)
    await is_written_by(engine, prompt, answer, 0, at)
    other = await again(engine, prompt + answer.token_bytes[: 4 * at], CHECKED_TOKENS)
    assert other.token_bytes != part(answer, at, at + CHECKED_TOKENS).token_bytes, "the two checkpoints write the same"


async def test_in_place_goes_on_from_the_old_cache(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    prompt = ids(prompts, PROMPT_TOKENS)
    attempt = await begun(engine, prompt)
    await engine.pause(IN_PLACE)
    assert await engine.flush(0) is False
    assert await engine.load_weights(checkpoints.new, NEW, flush=False) == WeightsLoaded(flushed=False)
    assert await engine.weight_version() == NEW
    await engine.resume()
    answer = await attempt.task
    at = switch_of(answer)
    assert answer.finish_reason == "length" and len(answer.token_bytes) == 4 * TOKENS
    # Nothing was dropped: without a namespace per version the old prompt would be reused under the new weights.
    assert (await run(engine, greedy(prompt, 1))).cached_tokens > 0
    assert (await run(engine, greedy(prompt, 1, cache_salt=NEW))).cached_tokens == 0
    await engine.load_weights(checkpoints.old, OLD, flush=True)
    await is_written_by(engine, prompt, answer, 0, at)


async def test_abort_gives_back_what_was_written_and_a_resumed_slice_is_the_new_version_s(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    prompt = ids(prompts, PROMPT_TOKENS)
    attempt = await begun(engine, prompt, LONG_TOKENS)
    await engine.pause(ABORT)
    first = await attempt.task
    written = len(first.token_bytes) // 4
    assert first.finish_reason == "abort" and first.version_spans == ((OLD, 0, written),) and written > 0
    assert await engine.load_weights(checkpoints.new, NEW, flush=True) == WeightsLoaded(flushed=True)
    await engine.resume()
    second = await run(engine, greedy(prompt + first.token_bytes, 40, logprobs=True))
    assert second.version_spans == ((NEW, 0, 40),)
    same_tokens(await again(engine, prompt + first.token_bytes, 40), second)
    await engine.load_weights(checkpoints.old, OLD, flush=True)
    await is_written_by(engine, prompt, first, 0, written)


async def test_without_a_pause_new_weights_wait_for_work_and_work_for_them(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    attempt = await begun(engine, ids(prompts, PROMPT_TOKENS), 300)
    load = asyncio.create_task(engine.load_weights(checkpoints.new, NEW, flush=True))
    ended: list[str] = []
    for name, task in (("attempt", attempt.task), ("load", load)):
        task.add_done_callback(lambda _, name=name: ended.append(name))
    assert await load == WeightsLoaded(flushed=True)
    assert (await attempt.task).version_spans == ((OLD, 0, 300),)
    assert ended == ["attempt", "load"]
    assert (await run(engine, greedy(ids(prompts, 20), 3))).version_spans == ((NEW, 0, 3),)


@pytest.mark.parametrize("mode", [ABORT, RETRACT, IN_PLACE])
async def test_new_work_waits_for_the_end_of_a_pause(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator, mode: PauseMode
) -> None:
    await engine.pause(mode)
    gated = Running(engine, greedy(ids(prompts, 20), 5))
    assert await engine.ready() is False
    report = await engine.load()
    assert (report.running_rollouts, report.waiting_rollouts) == (0, 0)
    if mode is not ABORT:
        assert (await engine.load()).engine_time_seconds == report.engine_time_seconds
    assert await engine.load_weights(checkpoints.new, NEW, flush=True) == WeightsLoaded(flushed=True)
    assert not gated.task.done()
    await engine.resume()
    assert (await gated.task).version_spans == ((NEW, 0, 5),)


# ---- flushes, names, brackets ---------------------------------------------------------------------------------------


async def test_weights_whose_flush_is_refused_are_in_force_under_the_old_name(
    engine: SGLangEngine, engine_url: str, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    attempt = await begun(engine, ids(prompts, PROMPT_TOKENS))
    await engine.pause(IN_PLACE)
    assert await engine.load_weights(checkpoints.new, NEW, flush=True) == WeightsLoaded(flushed=False)
    assert await engine.weight_version() == OLD
    assert (await page(engine_url, "/model_info"))["served_model_name"] == checkpoints.old
    await engine.resume()
    assert await engine.flush(FLUSHED_WITHIN_SECONDS) is True
    switch_of(await attempt.task)
    await engine.name_version(NEW)
    assert await engine.weight_version() == NEW


async def test_naming_a_version_aborts_nothing_unless_the_engine_is_left_its_default(
    engine: SGLangEngine, engine_url: str, prompts: np.random.Generator
) -> None:
    attempt = await begun(engine, ids(prompts, PROMPT_TOKENS), LONG_TOKENS)
    await engine.name_version(NEW)
    await attempt.writes(CHECKED_TOKENS)  # more than was on its way when the version was named
    assert not attempt.task.done()
    assert (await post(engine_url, "/update_weight_version", {"new_version": "8"}))[0] == 200
    answer = await attempt.task
    assert answer.finish_reason == "abort" and [span[0] for span in answer.version_spans][:2] == [OLD, NEW]


async def test_the_engine_s_own_wait_for_a_flush_never_ends_in_a_retract_pause(
    engine: SGLangEngine, engine_url: str, prompts: np.random.Generator
) -> None:
    attempt = await begun(engine, ids(prompts, PROMPT_TOKENS))
    await engine.pause(RETRACT)
    assert await post(engine_url, "/flush_cache?timeout=0.5") == (400, "Timed out waiting for idle state.")
    assert await engine.flush(0) is True
    await engine.resume()
    assert (await attempt.task).finish_reason == "length"


async def test_weights_from_a_trainer_need_the_bracket(
    engine: SGLangEngine, engine_url: str, prompts: np.random.Generator
) -> None:
    prompt = ids(prompts, PROMPT_TOKENS)
    before = await run(engine, greedy(prompt, 40, logprobs=True, top_logprobs=2))
    bucket = {"serialized_named_tensors": ["AA=="], "flush_cache": False}
    status, answer = await post(engine_url, "/update_weights_from_tensor", bucket)
    assert status == 400 and "must run between begin_weight_update() and end_weight_update()" in answer
    await engine.pause(RETRACT)
    fault = await fault_of(engine.end_update())
    assert fault.kind is FaultKind.REFUSED and "call begin_weight_update() first" in fault.message
    await engine.begin_update()
    fault = await fault_of(engine.begin_update())
    assert fault.kind is FaultKind.REFUSED and "call end_weight_update() first" in fault.message
    await engine.end_update()
    await engine.resume()
    assert await engine.weight_version() == OLD
    same_tokens(before, await run(engine, greedy(prompt, 40)))


async def test_a_path_without_weights_changes_nothing(
    engine: SGLangEngine, engine_url: str, is_real: bool, prompts: np.random.Generator, tmp_path: Path
) -> None:
    prompt = ids(prompts, PROMPT_TOKENS)
    before = await run(engine, greedy(prompt, 40, logprobs=True, top_logprobs=2))
    if not is_real:
        await post(engine_url, "/sim/fault", {"kind": "load_fails"})
    fault = await fault_of(engine.load_weights(str(tmp_path), NEW, flush=True))
    assert fault.kind is FaultKind.REFUSED and f"Cannot find any model weights with `{tmp_path}`" in fault.message
    assert await engine.weight_version() == OLD
    after = await run(engine, greedy(prompt, 40))
    assert after.version_spans == ((OLD, 0, 40),)
    same_tokens(before, after)


async def test_a_load_renames_the_model_but_not_what_registration_says(
    engine: SGLangEngine, engine_url: str, checkpoints: Checkpoints
) -> None:
    before = await engine.register()
    await engine.load_weights(checkpoints.new, NEW, flush=True)
    assert (await page(engine_url, "/model_info"))["served_model_name"] == checkpoints.new
    assert (await page(engine_url, "/server_info"))["weight_version"] == OLD
    after = await engine.register()
    assert (after.model, after.incarnation, after.weight_version) == (before.model, before.incarnation, NEW)


# ---- memory, and what kills -----------------------------------------------------------------------------------------


async def test_memory_goes_and_comes_back_under_retracted_work(
    engine: SGLangEngine, checkpoints: Checkpoints, prompts: np.random.Generator
) -> None:
    attempt = await begun(engine, ids(prompts, PROMPT_TOKENS))
    fault = await fault_of(engine.release_memory(("kv_cache",)))
    assert fault.kind is FaultKind.REFUSED and "1 attempts are running" in fault.message
    await engine.pause(RETRACT)
    await engine.release_memory(("weights", "kv_cache"))
    assert await engine.ready() is False
    assert (await fault_of(engine.resume())).kind is FaultKind.REFUSED
    assert (await fault_of(engine.resume_memory(("cuda_graph",)))).kind is FaultKind.REFUSED
    await engine.resume_memory(("weights",))
    assert await engine.load_weights(checkpoints.new, NEW, flush=True) == WeightsLoaded(flushed=True)
    await engine.resume_memory(("kv_cache",))
    await engine.resume()
    switch_of(await attempt.task)


async def _dies_of(url: str, path: str, vocabulary_size: int, prompts: np.random.Generator) -> None:
    door = SGLangEngine(url, vocabulary_size=vocabulary_size)
    await door.register()
    attempt = await begun(door, ids(prompts, PROMPT_TOKENS), LONG_TOKENS)
    await door.pause(RETRACT)
    assert (await fault_of(door.load_weights(path, NEW, flush=True))).kind is FaultKind.BROKEN
    fault = await fault_of(attempt.task)
    assert fault.kind is FaultKind.BROKEN and fault.partial is not None and fault.partial.token_bytes
    await door.close()


async def test_a_simulated_engine_that_dies_of_new_weights(own_sim: SimServer, prompts: np.random.Generator) -> None:
    await post(own_sim.url, "/sim/fault", {"kind": "load_kills"})
    await _dies_of(own_sim.url, "next", VOCABULARY_SIZE, prompts)
    assert own_sim.process.wait(30) == 131


@REAL[0]
@REAL[1]
async def test_a_real_engine_dies_of_a_checkpoint_that_is_cut_short(
    prompts: np.random.Generator, tmp_path: Path
) -> None:
    """Its roll-back reads the same path again. Nothing tells the files from good ones before they are read."""
    folder = environment()
    broken = tmp_path / "broken"
    shutil.copytree(folder / "model-1", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    server = start_server(folder)
    try:
        wait_ready([server])
        await _dies_of(server.url, str(broken), 0, prompts)
        assert server.process.wait(60) != 0
    finally:
        server.stop()
        server.log.unlink(missing_ok=True)
