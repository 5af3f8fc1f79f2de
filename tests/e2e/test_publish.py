"""Policy versions over two simulated engines: published in each mode under running work, every token by the version that it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolloutd import v1
from rolloutd.client import Client, PublishFailed, RolloutResult, connect
from rolloutd.client.words import UpdateMode
from rolloutd.engines.sim.tokens import verify
from tests.e2e.conftest import MakeServer, MakeSim, engines_ready
from tests.e2e.engine_http import EngineHttp, Tokens
from tests.e2e.processes import Rolloutd
from tests.e2e.rollouts import prompt, submit_running, take, until

ROLLOUTS = 16
TOKENS = 400
MODES: tuple[UpdateMode, ...] = ("drain", "abort_and_resume", "retract", "in_place")


def client_of(server: Rolloutd, **options: Any) -> Client:
    return connect(server.target, run="run", consumer="trainer", **options)


async def incarnations(client: Client) -> set[str]:
    return {engine.incarnation for engine in await client.list_engines()}


def assert_written_by_its_spans(result: RolloutResult, prompt_tokens: Tokens, tokens: int = TOKENS) -> None:
    assert result.complete, f"{result.rollout_id}: {result.outcome} {result.problem}"
    assert len(result.tokens) == tokens
    spans = [(span.engine_version, span.start, span.end) for span in result.spans]
    assert [span.policy_version for span in result.spans] == [
        0 if label == "default" else int(label) for label, _, _ in spans
    ]
    wrong = verify(prompt_tokens, result.tokens, result.logprobs, spans=spans, ignore_eos=True)
    assert wrong is None, f"{result.rollout_id} is wrong from token {wrong} on; spans {result.spans}"


async def test_running_work_crosses_a_version_as_its_mode_says(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    async with client_of(server) as client:
        for version, mode in enumerate(MODES, start=1):
            known = prompt(random, 64)
            for _ in range(4):  # whichever engine is asked afterwards may have it in its cache
                before = await client.generate_group(known, samples=2, max_new_tokens=1)
            assert before[1].cached_tokens > 0
            wanted = [prompt(random, 40) for _ in range(ROLLOUTS)]
            ids = await submit_running(client, wanted, mode, max_new_tokens=TOKENS, logprobs=True)
            updates = [update async for update in client.publish_policy(version, path="/weights", mode=mode)]
            results = await take(client, ROLLOUTS)
            for rollout_id, prompt_tokens in zip(ids, wanted, strict=True):
                assert_written_by_its_spans(results[rollout_id], prompt_tokens)
            both = {version - 1, version}
            crossed = sum({span.policy_version for span in result.spans} == both for result in results.values())
            assert (crossed == 0) == (mode == "drain")
            aborted = sum(update.aborted_attempts for update in updates if update.state == "updated")
            assert (aborted > 0) == (mode == "abort_and_resume")
            assert sum(result.attempts > 1 for result in results.values()) == aborted

            after = await client.generate(known, max_new_tokens=8)
            assert {span.policy_version for span in after.spans} == {version}
            assert after.cached_tokens == 0, f"a prefix that version {version - 1} computed was used"
            for engine in await client.list_engines():
                assert (engine.policy_version, engine.engine_policy_version) == (version, str(version))
    for process in engines:
        async with EngineHttp(process.url) as http:
            assert (await http.load()).running == 0


async def test_versions_are_published_while_work_streams_in(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    server = await serve(sim(), sim())
    wanted: dict[str, Tokens] = {}
    async with client_of(server) as client:
        for version, mode in enumerate((*MODES, *MODES), start=1):
            for _ in range(6):
                tokens = prompt(random, 20)
                submission = await client.submit(
                    tokens, max_new_tokens=150, temperature=0, ignore_eos=True, logprobs=True
                )
                wanted[submission.rollout_id] = tokens
            await client.publish_and_wait(version, path=f"/weights/{version}", mode=mode)
        results = await take(client, len(wanted))
        for rollout_id, tokens in wanted.items():
            assert_written_by_its_spans(results[rollout_id], tokens, 150)
        assert (await client.get_run()).state.policy_version == 2 * len(MODES)


async def test_rolling_updates_and_weights_pushed_by_the_trainer(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    async with client_of(server) as client:
        seen: dict[str, list[str]] = {}
        async for update in client.publish_policy(1, path="/weights/1", engines_at_once=1):
            seen.setdefault(update.engine_id, []).append(update.state)
            if update.state == "loading":
                ready = [one for one in await client.list_engines() if one.state == v1.ENGINE_STATE_READY]
                assert ready, "both engines were taken away at once"
        assert [states[-1] for states in seen.values()] == ["updated", "updated"]

        async with client.pushing_weights(2) as push:
            waiting = await push.ready()
            assert {engine.url for engine in waiting} == {engine.url for engine in engines}
            for engine in waiting:
                async with EngineHttp(engine.url) as http:
                    tensors = {"serialized_named_tensors": ["weights"], "flush_cache": False}
                    assert (await http.post("/update_weights_from_tensor", tensors))["success"]
            await push.confirm()
        result = await client.generate(prompt(random), max_new_tokens=8, ignore_eos=True)
        assert {span.policy_version for span in result.spans} == {2}
        for listed in await client.list_engines():
            assert (listed.policy_version, listed.state) == (2, v1.ENGINE_STATE_READY)


async def test_an_engine_that_was_away_gets_the_version_when_it_comes_back(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    async with client_of(server) as client:
        engines[1].kill()
        with pytest.raises(PublishFailed) as failure:
            await client.publish_and_wait(1, path="/weights/1")
        assert len(failure.value.updated) == len(failure.value.failed) == 1
        assert (await client.generate(prompt(random), max_new_tokens=8)).spans[0].policy_version == 1
        engines[1].start()
        await engines_ready(server.target, 2)
        assert {listed.policy_version for listed in await client.list_engines()} == {1}
        first = await incarnations(client)
        engines[0].kill()  # and one that had it, and lost it with its process
        engines[0].start()

        async def is_back() -> bool:
            return len(await incarnations(client) - first) == 1

        await until(is_back)
        await engines_ready(server.target, 2)
        assert {listed.engine_policy_version for listed in await client.list_engines()} == {"1"}
