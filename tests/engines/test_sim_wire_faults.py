"""The simulated engine's process over real HTTP: faults on order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import aiohttp
import pytest

from rolloutd.engines.sim.tokens import expected_output
from tests.engines.sim_wire_kit import LONG, PROMPT, SHORT, Client, engine, generate, joined


async def served(sim: Client) -> bool:
    return joined(await sim.stream(SHORT))[0] == expected_output(PROMPT, 40, ignore_eos=True).tokens


async def test_busy_and_error_500_count_down(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "busy", "count": 2})
    assert (await sim.post("/generate", generate(**SHORT)))[0] == 503
    frame, _ = await sim.stream(SHORT)
    assert frame["meta_info"]["finish_reason"]["status_code"] == 503
    await sim.post("/sim/fault", {"kind": "error_500", "count": 1})
    assert (await sim.post("/generate", generate(**SHORT)))[0] == 500
    assert await served(sim)


async def test_cut_stream_resets_the_connection_after_some_tokens(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "cut_stream", "tokens": 1, "count": 1})
    seen = []
    with pytest.raises(aiohttp.ClientError):
        async for frame in sim.frames({"sampling_params": LONG}):
            seen += frame["output_ids"]
    assert seen == expected_output(PROMPT, len(seen), ignore_eos=True).tokens and seen
    await sim.until(lambda state: not state["running_rids"])
    assert await served(sim)


async def test_garbage_and_duplicate_frames(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "garbage_frame"})
    with pytest.raises(json.JSONDecodeError):
        await sim.stream(SHORT)
    await sim.post("/sim/fault", {"kind": "duplicate_frame"})
    frames = await sim.stream(SHORT)
    assert frames[0] == frames[1]
    assert await served(sim)


async def test_stall_silences_streams_until_taken_back() -> None:
    async with engine(scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}))
        await sim.until(lambda state: state["generated_tokens"] > 5)
        await sim.post("/sim/fault", {"kind": "stall"})
        before = await sim.state()
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done and (await sim.state())["generated_tokens"] == before["generated_tokens"]
        await sim.call("DELETE", "/sim/fault?kind=stall")
        assert joined(await task)[0] == expected_output(PROMPT, 100, ignore_eos=True).tokens


async def test_hang_never_answers_and_not_ready_only_says_so(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "not_ready"})
    assert (await sim.call("GET", "/ready"))[0] == 503 and await served(sim)
    await sim.post("/sim/fault", {"kind": "hang"})
    with pytest.raises(TimeoutError):
        await sim.call("GET", "/v1/loads", timeout=aiohttp.ClientTimeout(total=0.2))
    assert (await sim.state())["faults"] == ["hang", "not_ready"]
    await sim.call("DELETE", "/sim/fault")
    assert (await sim.call("GET", "/ready"))[0] == 200 and await served(sim)


async def test_slow_stretches_and_ends(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "slow", "factor": 20})
    before = await sim.state()
    await sim.stream(SHORT)
    after = await sim.state()
    assert after["simulated_seconds"] - before["simulated_seconds"] > 40 * 20 * 0.007
    await sim.call("DELETE", "/sim/fault?kind=slow")
    assert await served(sim)


async def test_refused_connections_come_back(sim: Client) -> None:
    task = asyncio.ensure_future(sim.stream({"sampling_params": LONG}))
    await sim.until(lambda state: bool(state["running_rids"]))
    await sim.post("/sim/fault", {"kind": "refuse_connections", "seconds": 0.3})
    with pytest.raises(aiohttp.ClientError):
        await task
    with pytest.raises(aiohttp.ClientConnectorError):
        await sim.call("GET", "/ping")

    async def back() -> Awaitable[None] | None:
        while True:
            try:
                await sim.call("GET", "/ping")
                return None
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)

    await back()
    assert await served(sim)


async def test_crash_ends_the_process_and_bad_orders_are_refused(sim: Client) -> None:
    for bad, words in (
        ({"kind": "nonsense"}, "kinds"),
        ({"kind": "slow", "factor": 0}, "factor"),
        ({"kind": "refuse_connections"}, "seconds"),
        ({"kind": "busy", "secs": 1}, "secs"),
    ):
        status, answer = await sim.post("/sim/fault", bad)
        assert status == 400 and words in answer["error"]
    with pytest.raises(aiohttp.ClientError):
        await sim.post("/sim/fault", {"kind": "crash"})
    assert await sim.process.wait() == 1
