"""Bounds: unanswered submissions, unread results, full queues."""

from __future__ import annotations

import asyncio

import pytest

import rolloutd.client
from rolloutd import v1
from tests.client.fake_server import FakeServer

FULL = v1.Error(code=8, reason="QUEUE_FULL", message="the queue is full", retry_after_seconds=0.02)


def connect(server: FakeServer, **options: object) -> rolloutd.client.Client:
    return rolloutd.client.connect(server.address, run="r", consumer="c", **options)  # type: ignore[arg-type]


async def turns(count: int = 20) -> None:
    """Lets every task run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_submit_waits_while_too_many_are_unanswered(server: FakeServer) -> None:
    server.accept.clear()
    async with connect(server, max_unaccepted=2) as client:
        await client.submit([1], max_new_tokens=1)
        await client.submit([2], max_new_tokens=1)
        third = asyncio.create_task(client.submit([3], max_new_tokens=1))
        await server.until(lambda: len(server.submissions) == 2)
        assert not third.done()
        server.accept.set()
        await third
        assert len([result async for result in client.drain()]) == 3


async def test_a_cancelled_submit_was_never_made(server: FakeServer) -> None:
    server.accept.clear()
    async with connect(server, max_unaccepted=1) as client:
        await client.submit([1], max_new_tokens=1)
        second = asyncio.create_task(client.submit([2], max_new_tokens=1))
        await server.until(lambda: server.messages)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        server.accept.set()
        assert len([result async for result in client.drain()]) == 1
    assert len(server.submissions) == 1


async def test_unread_results_stop_the_stream_until_somebody_reads(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server, max_buffered_results=4) as client:
        for i in range(60):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        await server.until(lambda: len(server.rollouts) == 60)
        for i in range(60):
            server.finish(f"p{i}", padding_tokens=200_000)  # 800 kB each: more than the HTTP/2 windows hold
        outgoing = server.consumers["c"].outgoing
        assert outgoing is not None
        await turns(2000)
        assert outgoing.qsize() > 20  # still at the server
        assert len([result async for result in client.drain()]) == 60


async def test_generate_is_answered_although_nobody_reads_results(server: FakeServer) -> None:
    async with connect(server, max_buffered_results=2) as client:
        for i in range(20):
            await client.submit([i + 1], max_new_tokens=1)
        async with asyncio.timeout(10):
            assert (await client.generate([99], max_new_tokens=1)).ok
            assert (await (await client.submit([98], max_new_tokens=1)).accepted()).rollout_id
        assert len([result async for result in client.drain()]) == 21


async def test_submitting_everything_before_reading_anything_does_not_lock_up(server: FakeServer) -> None:
    async with connect(server, max_buffered_results=2, max_unaccepted=3) as client:
        async with asyncio.timeout(10):
            for i in range(100):
                await client.submit([i + 1], max_new_tokens=1)
        assert len([result async for result in client.drain()]) == 100


async def test_a_server_that_does_not_read_holds_the_writer_not_the_reader(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        first = asyncio.create_task(client.generate([1], rollout_id="first", max_new_tokens=1))
        await server.until(lambda: server.rollouts)
        server.read.clear()
        for _ in range(40):
            await client.submit(bytes(4 * 100_000), max_new_tokens=1)
        server.finish("first")
        assert (await first).ok
        server.read.set()
        await server.until(lambda: len(server.rollouts) == 41)
        server.finish_at_once = True
        for rollout_id in list(server.rollouts):
            server.finish(rollout_id)
        assert len([result async for result in client.drain()]) == 40


async def test_a_full_queue_is_tried_again(server: FakeServer) -> None:
    server.refusals = [FULL, None, FULL, FULL]
    async with connect(server) as client:
        for i in range(3):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        results = [result async for result in client.drain()]
    assert sorted(result.rollout_id for result in results) == ["p0", "p1", "p2"] and all(
        result.ok for result in results
    )
    assert set(server.runs_started.values()) == {1}
    assert len(server.submissions) == 6


async def test_a_full_queue_is_back_pressure(server: FakeServer) -> None:
    later = v1.Error(code=8, reason="QUEUE_FULL", message="the queue is full", retry_after_seconds=3600)
    server.refusals = [later]
    async with connect(server, max_unaccepted=1) as client:
        handle = await client.submit([1], max_new_tokens=1)
        second = asyncio.create_task(client.submit([2], max_new_tokens=1))
        await server.until(lambda: server.messages)
        await turns()
        assert not second.done()
        answer = await client.cancel(handle.rollout_id)  # it waits for an hour otherwise
        assert answer.cancelled_rollouts == 1 and not server.calls
        await second
        assert {result.outcome async for result in client.drain()} == {"cancelled", "completed"}


@pytest.mark.parametrize("limit", [{"fail_fast": True}, {"queue_ttl_seconds": 0.01}, {"deadline_seconds": 0.01}])
async def test_a_full_queue_is_not_tried_beyond_the_rollouts_own_limit(
    server: FakeServer, limit: dict[str, float]
) -> None:
    server.refusals = [FULL] * 1000
    async with connect(server) as client:
        with pytest.raises(rolloutd.client.Refused, match="the queue is full") as refusal:
            await client.generate([1], max_new_tokens=1, **limit)  # type: ignore[arg-type]
    assert (refusal.value.code, refusal.value.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert refusal.value.retry_after_seconds == 0.02


async def test_a_group_of_which_one_sample_found_the_queue_full_is_tried_again_as_a_whole(server: FakeServer) -> None:
    server.accept.clear()
    async with connect(server) as client:
        group = asyncio.create_task(client.generate_group([1], samples=3, rollout_id="g", max_new_tokens=1))
        await server.until(lambda: server.messages)
        full = v1.Error(code=8, reason="QUEUE_FULL", message="the queue is full", retry_after_seconds=0.05)
        server.send(
            v1.Event(accepted=v1.Accepted(rollout_id="g/0")),
            v1.Event(rejected=v1.Rejected(rollout_id="g/1", kind=v1.ITEM_KIND_SUBMISSION, error=full)),
            v1.Event(rejected=v1.Rejected(rollout_id="g/2", kind=v1.ITEM_KIND_SUBMISSION, error=full)),
            v1.Event(accepted=v1.Accepted(rollout_id="g/0")),
        )
        server.finish_at_once = False
        server.accept.set()
        await server.until(lambda: len(server.submissions) == 2)
        for index in range(3):
            server.finish(f"g/{index}")
        assert len(await group) == 3
    assert len(server.submissions) == 2
