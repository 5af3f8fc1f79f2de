"""Engines, streams and servers that break under a running server: every rollout still ends once, with the right tokens."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import Any

import numpy as np

from rolloutd import v1
from rolloutd.client import Client, RolloutResult, connect
from rolloutd.engines.sim.tokens import verify
from tests.e2e.conftest import MakeServer, MakeSim, engines_ready
from tests.e2e.engine_http import EngineHttp, Tokens
from tests.e2e.processes import Rolloutd
from tests.e2e.rollouts import prompt, submit_running, take, until

ROLLOUTS = 24
TOKENS = 400


def prompts(random: np.random.Generator, count: int = ROLLOUTS) -> list[Tokens]:
    return [prompt(random, 40) for _ in range(count)]


def client_of(server: Rolloutd, **options: Any) -> Client:
    return connect(server.target, run="run", consumer="trainer", **options)


async def submit(client: Client, wanted: list[Tokens], **options: Any) -> None:
    for index, tokens in enumerate(wanted):
        await client.submit(
            tokens,
            rollout_id=f"r-{index}",
            **{"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True, **options},
        )


def assert_right(results: dict[str, RolloutResult], wanted: list[Tokens], tokens: int = TOKENS) -> None:
    """Every rollout is there, complete, with the tokens and log-probs of the simulated model."""
    assert set(results) == {f"r-{index}" for index in range(len(wanted))}
    for index, tokens_in in enumerate(wanted):
        result = results[f"r-{index}"]
        assert result.complete, f"{result.rollout_id}: {result.outcome} {result.problem}"
        assert len(result.tokens) == tokens
        wrong = verify(tokens_in, result.tokens, result.logprobs if len(result.logprobs) else None, ignore_eos=True)
        assert wrong is None, f"{result.rollout_id} is wrong from token {wrong} on; spans {result.spans}"


async def test_an_engine_killed_in_the_middle(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    wanted = prompts(random)
    async with client_of(server) as client:
        await submit_running(client, wanted, "r", max_new_tokens=TOKENS, logprobs=True)
        engines[0].kill()
        results = await take(client, ROLLOUTS)
    assert_right(results, wanted)
    moved = [result for result in results.values() if len({span.engine_id for span in result.spans}) == 2]
    assert moved, "nothing went on elsewhere from its tokens"


async def test_cut_streams(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    wanted = prompts(random)
    for engine in engines:
        async with EngineHttp(engine.url) as http:
            await http.fault(kind="cut_stream", count=6, tokens=100)
    async with client_of(server) as client:
        await submit(client, wanted, max_attempts=20)
        results = await take(client, ROLLOUTS)
    assert_right(results, wanted)
    assert sum(len(result.spans) > 1 for result in results.values()) >= 6


async def test_a_hung_engine_does_not_hold_up_the_others(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    async with EngineHttp(engines[0].url) as http:
        await http.fault(kind="hang")
    wanted = prompts(random)
    async with client_of(server) as client:
        await submit(client, wanted)
        results = await take(client, ROLLOUTS)
    assert_right(results, wanted)
    unhurt = [result for result in results.values() if result.attempts == 1]
    assert {result.engine_id for result in results.values()} == {engines[1].url.removeprefix("http://")}
    assert unhurt and max(result.times.total_seconds for result in unhurt) < min(
        result.times.total_seconds for result in results.values() if result.attempts > 1
    )


async def test_busy_is_waited_for_without_a_breaker(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    engine = sim()
    server = await serve(engine)
    async with EngineHttp(engine.url) as http:
        await http.fault(kind="busy", seconds=1.5)
    wanted = prompts(random, 8)
    async with client_of(server) as client:
        await submit(client, wanted, max_new_tokens=50)
        results = await take(client, 8)
        (seen,) = await client.list_engines()
    assert_right(results, wanted, 50)
    assert seen.breaker == v1.BREAKER_STATE_CLOSED
    assert max(result.attempts for result in results.values()) > 3, "the engine was never busy"


async def test_an_engine_that_starts_late(sim: MakeSim, started: list[Rolloutd], random: np.random.Generator) -> None:
    engine = sim(start=False)
    server = Rolloutd([engine.url], "--vocabulary-size", "32000")
    started.append(server)
    server.start()
    wanted = prompts(random, 8)
    async with client_of(server) as client:
        await submit(client, wanted, max_new_tokens=50)
        (seen,) = await client.list_engines()
        assert seen.state == v1.ENGINE_STATE_STARTING
        assert {rollout.state async for rollout in client.list_rollouts()} <= {v1.ROLLOUT_STATE_QUEUED}
        engine.start()
        results = await take(client, 8)
    assert_right(results, wanted, 50)


async def test_unique_prompts_spread(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engines = [sim("--slots", "64"), sim("--slots", "64")]
    server = await serve(*engines)
    wanted = prompts(random, 100)
    async with client_of(server) as client:
        await submit_running(client, wanted, "r", max_new_tokens=4 * TOKENS, logprobs=True)
        loads = [seen.in_flight_rollouts for seen in await client.list_engines()]
        results = await take(client, 100)
    assert_right(results, wanted, 4 * TOKENS)
    used = Counter(result.engine_id for result in results.values())
    assert len(used) == 2 and all(40 <= count <= 60 for count in used.values()), used
    assert min(loads) > 0


async def test_sigterm(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engine = sim("--slots", "20")
    server = await serve(engine, environment={"ROLLOUTD_SERVER__SHUTDOWN_GRACE_SECONDS": "20"})
    wanted = prompts(random, 20)
    async with client_of(server, reconnect_seconds=0.5) as client:
        await submit_running(client, wanted, "r", max_new_tokens=TOKENS, logprobs=True)
        for index in range(10):
            await client.submit(prompt(random), rollout_id=f"queued-{index}", max_new_tokens=TOKENS)

        async def all_known() -> bool:
            return len([rollout async for rollout in client.list_rollouts(states=["queued", "held"])]) == 10

        await until(all_known)
        server.process.send_signal(signal.SIGTERM)
        results = await take(client, 30)
        queued = [result for name, result in results.items() if name.startswith("queued")]
        assert {result.outcome for result in queued} == {"shutdown"}
        assert {result.problem.code for result in queued if result.problem} == {"UNAVAILABLE"}
        assert_right({name: one for name, one in results.items() if not name.startswith("queued")}, wanted)
        assert await asyncio.to_thread(server.process.wait, 20) == 0
    async with EngineHttp(engine.url) as http:
        await http.load_becomes(lambda load: load.running == 0, 1.0)


async def test_a_server_that_restarts(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engine = sim()
    server = await serve(engine)
    wanted = prompts(random)
    async with client_of(server) as client:
        await submit_running(client, wanted, "r", max_new_tokens=TOKENS, logprobs=True)
        server.kill()
        server.start()
        results = await take(client, ROLLOUTS)
        assert [result async for result in client.drain()] == []
        await engines_ready(server.target, 1)
        again = await client.generate(wanted[0], max_new_tokens=4, temperature=0, ignore_eos=True)
    assert_right(results, wanted)
    assert len(again.tokens) == 4
