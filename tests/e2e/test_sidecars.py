"""Three sidecars, each with two engines of its own, behind one client: what is lost when one of them goes away (nothing)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rolloutd import v1
from rolloutd.client import BalancedClient, RolloutResult, ServerUnavailable, Submission, connect, connect_all
from rolloutd.client.control import Control
from rolloutd.client.words import RolloutState
from rolloutd.engines.sim.tokens import verify
from tests.e2e.conftest import MakeServer, MakeSim
from tests.e2e.engine_http import Tokens
from tests.e2e.processes import Rolloutd, free_port
from tests.e2e.rollouts import prompt, until

GROUPS = 18
SAMPLES = 4


def tokens_of(group: str) -> int:
    """Lengths differ, so that some of it is delivered while some still runs."""
    return 60 + 30 * int(group.removeprefix("g"))


async def three(sim: MakeSim, serve: MakeServer, **environment: str) -> list[Rolloutd]:
    return [await serve(sim(), sim(), environment=environment) for _ in range(3)]


def client_of(servers: list[Rolloutd], **options: Any) -> BalancedClient:
    return connect_all([server.target for server in servers], run="run", consumer="trainer", **options)


def assert_right(results: list[RolloutResult], prompts: dict[str, Tokens]) -> None:
    """Every rollout once, complete, with the tokens of the simulated model."""
    times = Counter(result.rollout_id for result in results)
    assert times == Counter(f"{group}/{index}" for group in prompts for index in range(SAMPLES))
    for result in results:
        assert result.complete, f"{result.rollout_id}: {result.outcome} {result.problem}"
        group = result.rollout_id.partition("/")[0]
        assert len(result.tokens) == tokens_of(group)
        assert verify(prompts[group], result.tokens, None, ignore_eos=True) is None, result.rollout_id


async def submit(client: BalancedClient, prompts: dict[str, Tokens], **options: Any) -> None:
    for group, tokens in prompts.items():
        await client.submit(
            tokens,
            rollout_id=group,
            samples=SAMPLES,
            max_new_tokens=tokens_of(group),
            temperature=0,
            ignore_eos=True,
            **options,
        )


async def runs_something(control: Control) -> bool:
    return any(engine.in_flight_rollouts for engine in await control.list_engines())


async def all_run(client: BalancedClient, servers: list[Rolloutd]) -> None:
    """Wait until every server runs something."""
    for server in servers:
        await until(lambda control=client.servers[server.target]: runs_something(control))  # type: ignore[misc]


async def unfinished_at(client: BalancedClient, server: Rolloutd) -> set[str]:
    """Ids of what this server has accepted and not ended."""
    rollouts = [rollout async for rollout in client.servers[server.target].list_rollouts()]
    return {rollout.rollout_id for rollout in rollouts if rollout.state != v1.ROLLOUT_STATE_FINISHED}


async def test_a_killed_sidecar_loses_no_rollout(sim: MakeSim, serve: MakeServer, random: np.random.Generator) -> None:
    engines = [[sim(), sim()] for _ in range(3)]
    servers = [await serve(*pair) for pair in engines]
    prompts = {f"g{index}": prompt(random, 40) for index in range(GROUPS)}
    async with client_of(servers, failover_seconds=0.5) as client, asyncio.timeout(120):
        await submit(client, prompts)
        await all_run(client, servers)
        results = [await anext(client.results()) for _ in range(5)]  # some are delivered by then
        held = await unfinished_at(client, servers[0])
        servers[0].kill()
        results += [result async for result in client.drain()]
    assert_right(results, prompts)
    own = {engine.url.removeprefix("http://") for engine in engines[0]}
    moved = [result for result in results if result.rollout_id in held and result.engine_id not in own]
    assert len(moved) >= len(held) // 2 > 0, "what the dead one had did not run elsewhere"


async def test_a_sidecar_killed_and_started_again_within_the_patience_runs_its_work_itself(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    servers = await three(sim, serve)
    prompts = {f"g{index}": prompt(random, 40) for index in range(GROUPS)}
    async with client_of(servers, failover_seconds=60.0) as client, asyncio.timeout(120):
        await submit(client, prompts)
        await all_run(client, servers)
        servers[0].kill()
        servers[0].start()
        results = [result async for result in client.drain()]
    assert_right(results, prompts)


async def test_a_sidecar_that_drains_hands_its_queue_to_the_others(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    servers = await three(sim, serve)
    prompts = {f"g{index}": prompt(random, 40) for index in range(GROUPS)}
    async with client_of(servers, failover_seconds=60.0) as client, asyncio.timeout(120):
        await client.set_budget(max_running_rollouts=4, lease_seconds=600)  # so that much of it waits
        await submit(client, prompts)
        await all_run(client, servers)
        code = await asyncio.to_thread(servers[0].terminate)
        results = [result async for result in client.drain()]
    assert code == 0
    assert_right(results, prompts)


class Cable:
    """A TCP relay to a server that can be cut and mended."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = free_port()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # cut
        finally:
            self._writers.discard(writer)
            writer.close()


async def nothing_unfinished(control: Control) -> bool:
    states: list[RolloutState] = ["queued", "held", "dispatched", "running", "stopping"]
    return not [rollout async for rollout in control.list_rollouts(states=states)]


async def is_attached(client: BalancedClient, target: str) -> bool:
    return target in client.attached_targets


async def test_a_sidecar_that_was_only_cut_off_delivers_nothing_twice(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    """It goes on with what it has while that runs a second time elsewhere; the first result of each counts."""
    servers = await three(sim, serve)
    prompts = {f"g{index}": prompt(random, 40) for index in range(GROUPS)}
    cable = Cable(servers[0].port)
    await cable.mend()
    target = f"127.0.0.1:{cable.port}"
    targets = [target, servers[1].target, servers[2].target]
    async with (
        connect_all(targets, run="run", consumer="trainer", failover_seconds=0.2) as client,
        asyncio.timeout(120),
    ):
        await submit(client, prompts)
        async with connect(servers[0].target, run="run") as direct:
            await until(lambda: runs_something(direct))
            await cable.cut()
            # Until what was cut off has ended there, so that both copies come to results.
            await until(lambda: nothing_unfinished(direct))
        await cable.mend()
        results = [result async for result in client.drain()]
        await until(lambda: is_attached(client, target))
        await client.submit(prompt(random, 20), rollout_id="last", max_new_tokens=5, ignore_eos=True)
        results += [result async for result in client.drain()]
        assert results.pop().rollout_id == "last"
    assert_right(results, prompts)
    await cable.cut()


async def test_groups_and_sessions_stay_together_and_load_is_even(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    servers = await three(sim, serve)
    async with client_of(servers) as client, asyncio.timeout(120):
        submitted: list[Submission] = []
        for index in range(GROUPS):
            for part in range(2):
                name = f"r{index}-{part}"
                submitted += [
                    await client.submit(prompt(random, 20), rollout_id=name, group_id=f"g{index}", max_new_tokens=20)
                ]
        for submission in submitted:
            await submission.accepted()
        homes: dict[str, set[str]] = {}
        for target, control in client.servers.items():
            async for rollout in control.list_rollouts():
                homes.setdefault(rollout.group_id, set()).add(target)
        results = [result async for result in client.drain()]
    assert len(results) == 2 * GROUPS and all(result.ok for result in results)
    assert {len(targets) for targets in homes.values()} == {1}
    counts = Counter(target for targets in homes.values() for target in targets)
    assert set(counts) == {server.target for server in servers} and max(counts.values()) <= 2 * min(counts.values())


async def test_with_all_of_them_gone_everybody_is_told(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    servers = [await serve(sim()), await serve(sim())]
    async with client_of(servers, failover_seconds=0.2, reconnect_seconds=0.5) as client, asyncio.timeout(60):
        waiting = asyncio.create_task(client.generate(prompt(random, 20), max_new_tokens=3000, ignore_eos=True))
        await all_run(client, [servers[0]])
        for server in servers:
            server.kill()
        with pytest.raises(ServerUnavailable, match="none of them can be reached"):
            await waiting
