"""Servers that die, forget, shut down, get cut off and come back at random moments: every rollout still ends once."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from rolloutd import v1
from rolloutd.client import connect_all, connection, control, stream
from tests.client.fake_server import FakeServer

STEPS = 150


class World:
    """Three servers and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.servers = [FakeServer() for _ in range(3)]
        self.running = [True] * 3

    async def step(self) -> None:
        index = self.random.randrange(3)
        server = self.servers[index]
        unfinished = [rollout_id for rollout_id, rollout in server.rollouts.items() if rollout.result is None]
        match self.random.choices(["finish", "die", "cut", "start", "break", "shut", "wait"], [10, 1, 2, 6, 2, 2, 10]):
            case ["finish"]:
                for rollout_id in unfinished[: self.random.randrange(1, 6)]:
                    server.finish(rollout_id)
            case ["die" | "cut" as how] if self.running[index]:
                self.running[index] = False
                await server.stop(forget=how == "die")
            case ["start"] if not self.running[index]:
                self.running[index] = True
                await server.start()
            case ["break"]:
                server.break_streams()
            case ["shut"] if unfinished and self.running[index]:
                for rollout_id in self.random.sample(unfinished, min(3, len(unfinished))):
                    server.finish(rollout_id, v1.OUTCOME_SHUTDOWN)
                await asyncio.sleep(self.random.choice([0, 0.002, 0.02]))
                self.running[index] = False
                await server.stop(forget=True)
            case _:
                await asyncio.sleep(self.random.choice([0, 0.002, 0.02]))


@pytest.mark.parametrize("seed", range(12))
async def test_everything_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def delays() -> Iterator[float]:
        return itertools.repeat(0.002)

    for module in (connection, control, stream):
        monkeypatch.setattr(module, "backoff_seconds", delays)
    world = World(seed)
    for server in world.servers:
        await server.start()
        server.finish_at_once = False
    targets = [server.address for server in world.servers]
    expected: list[str] = []
    async with (
        asyncio.timeout(20),
        connect_all(targets, run="r", consumer="c", failover_seconds=0.01) as client,
    ):
        taken: list[str] = []

        async def take() -> None:
            async for result in client.results():
                assert result.ok, f"{result.rollout_id}: {result.outcome}"
                taken.append(result.rollout_id)

        taking = asyncio.create_task(take())
        for step in range(STEPS):
            if world.random.random() < 0.3:
                samples = world.random.choice([1, 1, 3])
                group = world.random.choice(["", "g1", "g2"])
                submission = await client.submit(
                    [step + 1], samples=samples, max_new_tokens=1, rollout_id=f"r{step}", group_id=group
                )
                expected += submission.rollout_ids
            await world.step()
        for index, server in enumerate(world.servers):
            server.finish_at_once = True
            if not world.running[index]:
                await server.start()
            for rollout_id in list(server.rollouts):
                server.finish(rollout_id)
        while len(taken) < len(expected):
            assert not taking.done(), taking.exception()
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # a second copy of something would come now
        taking.cancel()
        assert Counter(taken) == Counter(expected)
        # Nothing is left over at the client, and everything was acknowledged.
        balancer = client._stream
        assert not balancer._copies and not balancer._homeless and not balancer._keepers
        assert not balancer._ledger.entries() and balancer._ledger.unaccepted == 0
        while any(server.kept_results for server in world.servers):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for server in world.servers:
        await server.stop()
