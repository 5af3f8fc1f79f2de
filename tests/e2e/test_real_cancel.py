"""Whoever stops wanting a rollout stops the engine too: its running count drops within a second."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Rig
from tests.e2e.rollouts import LONG, prompt, submit_running, take, until

WITHIN_SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.sglang


async def drops_to(rig: Rig, running: int) -> float:
    """Seconds until both engines together run this many; AssertionError after a second."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while (now := await rig.running()) != running:
        passed = loop.time() - began
        assert passed < WITHIN_SECONDS, f"after {passed:.2f} s the engines still run {now}, not {running}"
        await asyncio.sleep(0.02)
    return loop.time() - began


async def reaches(rig: Rig, running: int) -> None:
    """Engines publish their counts every 15 decode steps; wait for the count to show what runs."""

    async def shown() -> bool:
        return await rig.running() == running

    await until(shown)


async def test_cancel(real: Rig, random: np.random.Generator) -> None:
    async with real.client() as client:
        ids = await submit_running(client, [prompt(random) for _ in range(8)], "long")
        await reaches(real, 8)
        answer = await client.cancel(*ids[:6])
        assert answer.cancelled_rollouts == 6
        some = await drops_to(real, 2)
        await client.cancel(*ids[6:])
        rest = await drops_to(real, 0)
        print(f"\nrunning count dropped {some:.2f} and {rest:.2f} s after the cancel")
        results = await take(client, 8)
    assert {result.outcome for result in results.values()} == {"cancelled"}
    assert all(0 < len(result.tokens) < LONG and not result.complete for result in results.values())


async def test_cancel_of_a_group(real: Rig, random: np.random.Generator) -> None:
    async with real.client() as client:
        await submit_running(client, [prompt(random)], "other")
        begun = asyncio.Event()
        await client.submit(
            prompt(random, 64),
            rollout_id="group",
            samples=8,
            max_new_tokens=1000,
            temperature=0,
            ignore_eos=True,
            on_progress=lambda _: begun.set(),
        )
        await begun.wait()
        await reaches(real, 9)
        await client.cancel(group_ids=["group"])
        print(f"\nrunning count dropped {await drops_to(real, 1):.2f} s after the cancel")
        results = await take(client, 8)
        assert {result.group_id for result in results.values()} == {"group"}
        assert {result.outcome for result in results.values()} == {"cancelled"}
        await client.cancel("other-0")


async def test_cancel_of_queued_work_is_not_sent(real: Rig, random: np.random.Generator) -> None:
    async with real.client() as client:
        await client.set_budget(max_running_rollouts=2)
        await submit_running(client, [prompt(random) for _ in range(2)], "running")
        for index in range(4):
            await client.submit(prompt(random), rollout_id=f"queued-{index}", max_new_tokens=LONG)
        await client.cancel(*(f"queued-{index}" for index in range(4)))
        results = await take(client, 4)
        assert all(result.attempts == 0 and not len(result.tokens) for result in results.values())
        await client.cancel("running-0", "running-1")
        await drops_to(real, 0)


async def test_killed_client(real: Rig) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.vanishing_client", real.server.target, "4",
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"running\n"
        await reaches(real, 4)
        process.kill()
        print(f"\nrunning count dropped {await drops_to(real, 0):.2f} s after the kill")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_cancelled_unary_call(real: Rig, random: np.random.Generator) -> None:
    async with real.client(consumer="") as client:
        call = asyncio.create_task(
            client.run_rollout(prompt(random), samples=2, max_new_tokens=LONG, temperature=0, ignore_eos=True)
        )
        await reaches(real, 2)
        call.cancel()
        print(f"\nrunning count dropped {await drops_to(real, 0):.2f} s after the cancel")
        with pytest.raises(asyncio.CancelledError):
            await call
