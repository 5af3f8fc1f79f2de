"""The prefix index follows an engine's real cache by its KV events: a real SGLang server and a simulated one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rolloutd.client import Client, connect
from rolloutd.server.config import load_config
from rolloutd.server.kv_following import KvFollower
from rolloutd.server.process import Server
from tests.e2e.conftest import MakeSim
from tests.e2e.engine_http import EngineHttp, Tokens
from tests.e2e.processes import SimEngine, free_port
from tests.e2e.rollouts import prompt, submit_running, take, until

VOCABULARY_SIZE = 1024
CAPACITY_TOKENS = 16_384  # of both engines
PAGE_TOKENS = 16
REAL = (pytest.mark.sglang, pytest.mark.timeout(1800))


@dataclass(frozen=True, slots=True)
class Followed:
    """A server in this process, and the one engine behind it."""

    server: Server
    engine: EngineHttp
    sim: SimEngine | None

    def client(self) -> Client:
        return connect(f"127.0.0.1:{self.server.port}", run="run", consumer="trainer")

    @property
    def following(self) -> KvFollower:
        (supervised,) = self.server.engines.engines()
        assert supervised.kv_events is not None
        return supervised.kv_events

    def credited(self, tokens: Tokens) -> int:
        """Tokens of a prompt that the index credits to the engine under the newest policy version."""
        world = self.server.loop.core._world
        lineage = world.runs["run"].lineage("policy")
        return max(world.index.match(lineage.namespace(lineage.version), tokens.tobytes()).values(), default=0)

    async def credits(self, tokens: Tokens, expected: int) -> None:
        """Until the index credits so much."""

        async def credited() -> bool:
            return self.credited(tokens) == expected

        try:
            await until(credited, 20)
        except TimeoutError:
            raise AssertionError(f"{self.credited(tokens)} tokens credited, not {expected}") from None

    async def rollout(self, client: Client, tokens: Tokens) -> int:
        """Run it through the server; returns the tokens that the engine had cached."""
        result = await client.generate(tokens, max_new_tokens=2, temperature=0, ignore_eos=True)
        assert result.complete, result.problem
        return result.cached_tokens

    async def settled(self) -> None:
        """Until the engine has reported all that it did: a prompt of our own is the last thing in its stream."""
        last = np.random.default_rng(self.following.blocks).integers(3, 1000, PAGE_TOKENS + 1).astype(np.uint32)
        await self.engine.uninterrupted(last, 1)
        await self.credits(last, PAGE_TOKENS)


def sim_flags() -> tuple[str, ...]:
    config = f'{{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:{free_port()}", "replay_endpoint": '
    return (
        *("--vocab-size", str(VOCABULARY_SIZE), "--context-length", "4096", "--kv-tokens", str(CAPACITY_TOKENS)),
        *("--kv-events-config", config + f'"tcp://127.0.0.1:{free_port()}"}}'),
    )


@pytest_asyncio.fixture(params=["sim", pytest.param("sglang", marks=REAL)])
async def followed(request: pytest.FixtureRequest, sim: MakeSim) -> AsyncIterator[Followed]:
    simulated = sim(*sim_flags()) if request.param == "sim" else None
    url = simulated.url if simulated is not None else request.getfixturevalue("sglang_servers")[0].url
    flags: dict[str, Any] = {"server.port": 0, "engines": [url], "engine.poll_seconds": 0.1}
    if simulated is not None:
        flags["engine.vocabulary_size"] = VOCABULARY_SIZE
    server = Server(load_config(flags=flags))
    await server.start()
    try:
        async with EngineHttp(url) as engine:
            (supervised,) = server.engines.engines()
            await asyncio.wait_for(supervised.registered.wait(), 60)
            await engine.flush()
            yield Followed(server, engine, simulated)
            server.loop.core.check()
    finally:
        await server.stop()


async def test_what_others_sent_earns_credit_and_what_was_evicted_or_flushed_none(
    followed: Followed, random: np.random.Generator
) -> None:
    ours, theirs = prompt(random, 100), prompt(random, 100)
    async with followed.client() as client:
        assert await followed.rollout(client, ours) == 0
        await followed.credits(ours, 96)

        assert (await followed.engine.uninterrupted(theirs, 4)).cached_tokens == 0
        await followed.credits(theirs, 96)
        assert await followed.rollout(client, theirs) == 96

        assert (await followed.engine.uninterrupted(ours, 4)).cached_tokens == 96
        fillers = [prompt(random, 1500) for _ in range(CAPACITY_TOKENS // 1500 + 1)]
        for filler in fillers:
            await followed.engine.uninterrupted(filler, 1)
        await followed.credits(ours, 0)
        await followed.credits(theirs, 0)
        await followed.settled()
        credited = [followed.credited(filler) for filler in fillers]
        assert 0 in credited and 1488 in credited  # some went, some stayed: and it is known which
        # What the engine really has is asked newest first: a miss evicts the oldest.
        for filler, believed in reversed(list(zip(fillers, credited, strict=True))):
            if believed:
                assert (await followed.engine.uninterrupted(filler, 1)).cached_tokens == believed
        assert await followed.rollout(client, ours) == 0

        await followed.credits(ours, 96)
        await followed.engine.flush()
        for tokens in (ours, *fillers):
            await followed.credits(tokens, 0)
        assert await followed.rollout(client, ours) == 0


async def test_many_prompts_with_common_beginnings_are_credited_as_the_engine_has_them(
    followed: Followed, random: np.random.Generator
) -> None:
    """Twice the engine's memory: branches, evictions, our rollouts and strangers' requests mixed."""
    stems = [prompt(random, int(length)) for length in random.integers(16, 600, 8)]
    seen: list[Tokens] = []
    async with followed.client() as client:
        await followed.rollout(client, stems[0])

        async def one(number: int) -> None:
            tokens = np.concatenate([stems[int(random.integers(8))], prompt(random, int(random.integers(16, 700)))])
            seen.append(tokens)
            await (followed.rollout(client, tokens) if number % 2 else followed.engine.uninterrupted(tokens, 4))

        for start in range(0, 80, 4):
            await asyncio.gather(*(one(number) for number in range(start, start + 4)))
    await followed.settled()
    wrong = []
    for tokens in seen[-1:-12:-1]:  # recent ones: asking evicts the oldest
        believed = min(
            followed.credited(tokens), (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS
        )  # one is always computed
        actual = (await followed.engine.uninterrupted(tokens, 1)).cached_tokens
        wrong += [(believed, actual)] if believed != actual else []
    assert not wrong, f"(credited, really cached): {wrong}"
    assert followed.following.count.resets == 1


# ---- only where messages can be lost at will


@pytest.mark.parametrize("followed", ["sim"], indirect=True)
async def test_lost_messages_are_asked_for_again(followed: Followed, random: np.random.Generator) -> None:
    first, lost, last = (prompt(random, 100) for _ in range(3))
    async with followed.client() as client:
        await followed.rollout(client, first)
        await followed.credits(first, 96)
        await followed.engine.fault(kind="drop_kv_events", count=1)
        await followed.engine.uninterrupted(lost, 1)
        await followed.engine.uninterrupted(last, 1)
        await followed.credits(lost, 96)
        await followed.credits(last, 96)
        assert followed.following.count.gaps == 1 and followed.following.count.resets == 1


@pytest.mark.parametrize("followed", ["sim"], indirect=True)
async def test_a_published_version_inherits_no_credit_from_the_one_before(
    followed: Followed, random: np.random.Generator
) -> None:
    """Also not by what is reported late, of work that runs on over the publication."""
    async with followed.client() as client:
        for version, mode in enumerate(("drain", "abort_and_resume", "retract", "in_place"), start=1):
            old, running = prompt(random, 100), prompt(random, 100)
            await followed.rollout(client, old)
            await followed.credits(old, 96)
            (rollout_id,) = await submit_running(client, [running], mode, max_new_tokens=600)
            await client.publish_and_wait(version, path="/weights", mode=mode)
            assert followed.credited(old) == 0
            result = (await take(client, 1))[rollout_id]
            new = prompt(random, 100)
            assert await followed.rollout(client, new) == 0
            await followed.credits(new, 96)  # what was reported before it is known by now, too
            assert followed.credited(old) == 0
            # What ran over the change was computed again; or was drained before; or its KV is of both versions, for nobody.
            whole = np.concatenate([running, result.tokens])
            again = mode in ("abort_and_resume", "retract")
            assert followed.credited(whole) == (len(whole) // PAGE_TOKENS * PAGE_TOKENS if again else 0)
            assert await followed.rollout(client, old) == 0


@pytest.mark.parametrize("followed", ["sim"], indirect=True)
async def test_an_engine_that_was_restarted_holds_nothing_until_it_says_so(
    followed: Followed, random: np.random.Generator
) -> None:
    tokens = prompt(random, 100)
    async with followed.client() as client:
        await followed.rollout(client, tokens)
        await followed.credits(tokens, 96)
        before = followed.following
        assert followed.sim is not None
        await asyncio.to_thread(followed.sim.kill)
        await asyncio.to_thread(followed.sim.start)

        async def again() -> bool:
            return followed.following is not before and followed.following.connected

        await until(again)
        assert followed.credited(tokens) == 0
        assert (await followed.engine.uninterrupted(tokens, 1)).cached_tokens == 0
        await followed.credits(tokens, 96)
        assert await followed.rollout(client, tokens) == 96


@pytest.mark.parametrize("followed", ["sim"], indirect=True)
async def test_metrics_tell_of_messages_gaps_and_resets(followed: Followed, random: np.random.Generator) -> None:
    async with followed.client() as client:
        await followed.rollout(client, prompt(random, 100))
        await followed.settled()
        await followed.engine.fault(kind="drop_kv_events", count=1)
        await followed.engine.uninterrupted(prompt(random, 100), 1)
        await followed.settled()
    registry = followed.server.metrics.registry
    (supervised,) = followed.server.engines.engines()
    labels = {"engine": supervised.engine_id}
    values = {
        name: registry.get_sample_value(f"rolloutd_engine_kv_{name}", labels)
        for name in ("events_connected", "events_gaps_total", "events_resets_total", "blocks", "blocks_unplaced_total")
    }
    assert values == {
        "events_connected": 1,
        "events_gaps_total": 1,
        "events_resets_total": 1,
        "blocks": followed.server.loop.core.engine_views()[0].kv_blocks_reported,
        "blocks_unplaced_total": 0,
    }
    assert values["blocks"] is not None and values["blocks"] >= 12
