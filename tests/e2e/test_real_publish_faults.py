"""Publications that go wrong on real SGLang servers: nothing is lost, and what was written is of the version that it names."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutd import v1
from rolloutd.client import Client, PublishFailed, RolloutResult
from tests.e2e.engine_http import EngineHttp, Tokens
from tests.e2e.engine_tap import Order
from tests.e2e.published import PublishRig, checkpoint
from tests.e2e.redecode import check_greedy, parts_of
from tests.e2e.rollouts import prompt, submit_running, take, until
from tests.e2e.witness import LOAD, delivered
from tests.sglang_servers import environment, wait_ready

UNDER_WAY = 8
OUTPUT_TOKENS = 200
TRAINER_SECONDS = 60.0
SUCCESS = '{"success":true,"message":"Success"}'
TORN_BYTES = 1_000_000  # of a checkpoint's 2.2 MB

pytestmark = pytest.mark.sglang


class Work:
    """Greedy rollouts and how they ended."""

    def __init__(self, client: Client, random: np.random.Generator) -> None:
        self.results: dict[str, RolloutResult] = {}
        self.prompts: dict[str, Tokens] = {}
        self._client = client
        self._random = random

    async def begin(self, name: str) -> None:
        """Start some, and return once all have written a token."""
        self._add(name)
        prompts = [self.prompts[f"{name}-{index}"] for index in range(UNDER_WAY)]
        await submit_running(self._client, prompts, name, max_new_tokens=OUTPUT_TOKENS, logprobs=True)

    async def queue(self, name: str) -> None:
        """Submit some."""
        for rollout_id in self._add(name):
            await self._client.submit(
                self.prompts[rollout_id],
                rollout_id=rollout_id,
                max_new_tokens=OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
                logprobs=True,
            )

    async def end(self, name: str) -> list[RolloutResult]:
        """Results of those with this name; all that were submitted so far."""
        results = await take(self._client, UNDER_WAY)
        assert results.keys() == {f"{name}-{index}" for index in range(UNDER_WAY)}
        assert all(one.ok and len(one.tokens) == OUTPUT_TOKENS for one in results.values()), results
        self.results |= results
        return list(results.values())

    async def check(self, rig: PublishRig) -> None:
        """Everything that was written, decoded again. No version in these tests is swapped in place."""
        results = list(self.results.values())
        engine_urls = await rig.engine_urls(self._client)
        for result in results:
            delivered(result, engine_urls)
        keeps_kv = dict.fromkeys((0, 1), False)
        parts = [parts_of(result, self.prompts[result.rollout_id].tolist(), keeps_kv) for result in results]
        ties = check_greedy(results, await rig.transformers.decode(parts, {0: checkpoint(0), 1: checkpoint(1)}))
        print(f"\n{ties} near ties in {sum(len(result.tokens) for result in results)} tokens")

    def _add(self, name: str) -> list[str]:
        ids = [f"{name}-{index}" for index in range(UNDER_WAY)]
        self.prompts |= {rollout_id: prompt(self._random) for rollout_id in ids}
        return ids


def versions(results: Sequence[RolloutResult]) -> set[tuple[int, ...]]:
    """Which versions wrote each result, in order; whoever was sent again under the same one has two spans of it."""
    return {
        tuple(version for version, _ in groupby(span.policy_version for span in result.spans)) for result in results
    }


async def test_a_refused_flush_is_repeated_and_the_weights_are_loaded_once(
    publishing: PublishRig, random: np.random.Generator
) -> None:
    engine, tap = publishing.engines[0], publishing.taps[0]

    async def meddle(order: Order) -> None:
        """Somebody else lets the engine go on behind our pause, and sees the mistake when our flush was refused."""
        if order.path == "/pause_generation":
            await engine.post("/continue_generation", {})
        elif order.path == "/flush_cache" and order.status == 400:
            await engine.post("/pause_generation", {"mode": "retract"})

    tap.on_answer = meddle
    async with publishing.client() as client:
        work = Work(client, random)
        await work.begin("crossing")
        await client.publish_and_wait(1, path=str(checkpoint(1)), mode="retract")
        assert versions(await work.end("crossing")) == {(0, 1)}
        assert [order.status for order in tap.told("/flush_cache")] == [400, 200]
        assert [order.status for order in tap.told(LOAD)] == [200]

        # The same version again changes nothing.
        before = [len(tap.orders) for tap in publishing.taps]
        await client.publish_and_wait(1, path=str(checkpoint(1)), mode="retract")
        assert [len(tap.orders) for tap in publishing.taps] == before
        await work.check(publishing)


async def test_a_wrong_path_leaves_the_old_version_running_and_the_right_one_is_loaded_by_a_retry(
    publishing: PublishRig, random: np.random.Generator, tmp_path: Path
) -> None:
    async with publishing.client() as client:
        work = Work(client, random)
        await work.begin("old")
        with pytest.raises(PublishFailed, match="nothing-here") as caught:
            await client.publish_and_wait(1, path=str(tmp_path / "nothing-here"), mode="retract")
        assert len(caught.value.failed) == 2 and caught.value.updated == ()
        for engine in await client.list_engines():
            assert engine.state == v1.ENGINE_STATE_HELD and "nothing-here" in engine.held_because
            assert engine.policy_version == 0
        assert versions(await work.end("old")) == {(0,)}

        await work.queue("new")
        published = await client.publish_and_wait(1, path=str(checkpoint(1)), mode="retract")
        assert len(published.updated) == 2
        assert versions(await work.end("new")) == {(1,)}
        assert all([order.status for order in tap.told(LOAD)] == [400, 200] for tap in publishing.taps)
        await work.check(publishing)


class Trainer:
    """A process with the weights of a version, which sends them to engines. Use as `async with`."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def __aenter__(self) -> Trainer:
        self._process = await asyncio.create_subprocess_exec(
            str(environment() / "venv" / "bin" / "python"),
            str(Path(__file__).with_name("push_weights.py")),
            str(checkpoint(self._version)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await self._says() == "ready"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._process.kill()
        await self._process.communicate()

    async def push(self, engine: EngineHttp) -> tuple[int, str]:
        """Status and answer of the engine."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{engine.url}\n".encode())
        status, answer = await self._says()
        return status, answer

    async def _says(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(TRAINER_SECONDS):
            while line := await self._process.stdout.readline():
                if line[:1] in b'["':  # libraries print there too
                    return json.loads(line)
        raise AssertionError(f"the trainer ended with {await self._process.wait()}")


async def test_weights_that_the_trainer_pushes_at_the_second_try(
    publishing: PublishRig, random: np.random.Generator
) -> None:
    async with Trainer(1) as trainer, publishing.client() as client:
        status, answer = await trainer.push(publishing.engines[0])
        assert status == 400 and "begin_weight_update" in answer  # the engine is open only while rolloutd says so

        work = Work(client, random)
        await work.begin("crossing")
        with pytest.raises(ConnectionError):
            async with client.pushing_weights(1, mode="retract") as weights:
                assert len(await weights.ready()) == 2
                raise ConnectionError("the trainer lost its link")
        for held in await client.list_engines():
            assert held.state == v1.ENGINE_STATE_HELD and "lost its link" in held.held_because

        engine_of = {tap.url: engine for tap, engine in zip(publishing.taps, publishing.engines, strict=True)}
        async with client.pushing_weights(1, mode="retract") as weights:
            for update in await weights.ready():
                assert await trainer.push(engine_of[update.url]) == (200, SUCCESS)
                await weights.confirm(update)
        # One that had a single token when it was interrupted writes that again; on a busy machine all of them may.
        assert versions(await work.end("crossing")) <= {(0, 1), (1,)}
        for tap in publishing.taps:
            # The first try left the engine open, which refuses to be opened again before it was closed.
            assert [order.status for order in tap.told("/begin_weight_update")] == [200, 400, 200]
            assert [order.status for order in tap.told("/end_weight_update")] == [200, 200]
            assert [order.body["new_version"] for order in tap.told("/update_weight_version")] == ["1"]
        await work.check(publishing)


@pytest.mark.timeout(900)  # a server starts anew in it, which takes minutes beside other work
async def test_an_engine_that_dies_of_a_torn_checkpoint_catches_up_when_it_is_back(
    publishing: PublishRig, random: np.random.Generator, tmp_path: Path
) -> None:
    """SGLang ends when a checkpoint stops in the middle: it reads it once more to roll back, and that fails outside any care."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(1), folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:TORN_BYTES])

    def complete(path: str) -> None:
        if path == LOAD:
            weights.write_bytes(whole)

    for tap in publishing.taps:
        tap.on_cut = complete
    async with publishing.client() as client:
        work = Work(client, random)
        await work.begin("crossing")
        with pytest.raises(PublishFailed) as caught:
            await client.publish_and_wait(1, path=str(folder), mode="retract", engines_at_once=1)
        (failed,), (updated,) = caught.value.failed, caught.value.updated
        results = await work.end("crossing")
        moved = [result for result in results if result.attempts > 1]
        assert moved and all(
            result.spans[0].engine_id == failed.engine_id and result.spans[-1].engine_id == updated for result in moved
        )

        urls = await publishing.engine_urls(client)
        (dead,) = (one for one in publishing.processes if one.url == urls[failed.engine_id])
        dead.start_again()  # on this thread: it dies with the one that started it
        await asyncio.to_thread(wait_ready, [dead])

        async def is_back() -> bool:
            (engine,) = (one for one in await client.list_engines() if one.engine_id == failed.engine_id)
            return engine.state == v1.ENGINE_STATE_READY

        await until(is_back)
        (tap,) = (one for one in publishing.taps if one.engine_url == dead.url)
        assert [order.status for order in tap.told(LOAD)] == [0, 200]
        await work.queue("later")
        later = await work.end("later")
        assert versions(later) == {(1,)}
        assert {result.engine_id for result in later} == {failed.engine_id, updated}
        await work.check(publishing)
