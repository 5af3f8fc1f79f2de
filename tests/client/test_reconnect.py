"""Broken streams, restarts, repeats, and servers that do not come back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import Iterator

import grpc
import psutil
import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import connection, control, stream
from rolloutd.client.access import Access
from tests.client.fake_server import Abort, FakeServer


def connect(server: FakeServer, **options: object) -> rolloutd.client.Client:
    return rolloutd.client.connect(server.address, run="r", consumer="c", **options)  # type: ignore[arg-type]


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays() -> Iterator[float]:
        return itertools.repeat(0.001)

    for module in (connection, control, stream):
        monkeypatch.setattr(module, "backoff_seconds", delays)


async def test_a_cut_stream_resumes_where_it_was(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        for i in range(6):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        await server.until(lambda: len(server.rollouts) == 6)
        for i in range(3):
            server.finish(f"p{i}")
        seen = [(await anext(client.results())).rollout_id for _ in range(3)]
        server.break_streams()
        server.finish("p3")  # while nobody listens
        await server.until(lambda: len(server.hellos) == 2)
        assert server.hellos[1].resume_cursor == 3
        server.finish("p4")
        server.finish("p5")
        seen += [result.rollout_id async for result in client.drain()]
        assert seen == [f"p{i}" for i in range(6)]
        await server.until(lambda: not server.kept_results)
    assert set(server.runs_started.values()) == {1}


async def test_a_server_that_lost_its_memory_runs_what_is_unfinished_once(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        group = asyncio.create_task(client.generate_group([7], samples=4, rollout_id="g", max_new_tokens=1))
        for i in range(3):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        await server.until(lambda: len(server.rollouts) == 7)
        for rollout_id in ("p0", "g/0", "g/2"):
            server.finish(rollout_id)
        assert (await anext(client.results())).rollout_id == "p0"
        await server.until(lambda: not server.kept_results or server.kept_results == ["g/0", "g/2"])
        await server.stop(forget=True)
        await client.submit([9], max_new_tokens=1, rollout_id="meanwhile")
        server.finish_at_once = True
        await server.start()
        assert [result.sample_index for result in await group] == [0, 1, 2, 3]
        assert sorted([result.rollout_id async for result in client.drain()]) == ["meanwhile", "p1", "p2"]
        await server.until(lambda: not server.kept_results)
    assert server.runs_started["p0"] == 1 and server.runs_started["meanwhile"] == 1 and server.runs_started["p1"] == 2


async def test_verdicts_lost_with_a_stream_are_told_again(server: FakeServer) -> None:
    async with connect(server, auto_acknowledge=False) as client:
        for i in range(3):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        results = {result.rollout_id: result async for result in client.drain()}
        server.accept.clear()  # what is sent now is read and never applied
        client.acknowledge(results["p0"], used=True, reward=1.0)
        client.acknowledge(results["p2"])
        await server.until(lambda: any(message.acknowledgements for message in server.messages))
        server.break_streams()
        await server.until(lambda: server.consumers["c"].outgoing is None)
        server.accept.set()
        await server.until(lambda: len(server.hellos) == 2 and server.kept_results == ["p1"])
        assert {told.rollout_id: told.reward for told in server.acknowledgements}["p0"] == 1.0
        client.acknowledge("p1")
        await server.until(lambda: not server.kept_results)


@pytest.mark.parametrize("new_cursor", [False, True])
async def test_a_repeated_result_is_seen_once(server: FakeServer, new_cursor: bool) -> None:
    async with connect(server) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        assert (await anext(client.results())).rollout_id == "x"
        server.repeat("x", new_cursor=new_cursor)
        await client.submit([2], max_new_tokens=1, rollout_id="y")
        assert (await anext(client.results())).rollout_id == "y"
        await server.until(lambda: not server.kept_results)


async def test_a_repeated_result_is_not_acknowledged_for_the_caller(server: FakeServer) -> None:
    async with connect(server, auto_acknowledge=False) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        result = await anext(client.results())
        server.repeat("x", new_cursor=True)
        await client.submit([2], max_new_tokens=1, rollout_id="y")
        client.acknowledge(await anext(client.results()))
        await server.until(lambda: set(server.kept_results) == {"x"})
        client.acknowledge(result, used=True)
        await server.until(lambda: not server.kept_results)


async def test_results_of_an_earlier_life_come_again(server: FakeServer) -> None:
    async with connect(server, auto_acknowledge=False) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        await anext(client.results())
    async with connect(server) as client:
        assert (await anext(client.results())).rollout_id == "x"
        await server.until(lambda: not server.kept_results)


async def test_nobody_waits_for_ever_for_a_dead_server(server: FakeServer, quick_retries: None) -> None:
    server.finish_at_once = False
    async with connect(server, reconnect_seconds=0.3, max_unaccepted=3) as client:
        handle = await client.submit([1], max_new_tokens=1)
        waiters = [
            asyncio.create_task(anext(client.results())),
            asyncio.create_task(anext(client.drain())),
            asyncio.create_task(client.generate([2], max_new_tokens=1)),
            asyncio.create_task(client.generate_group([3], samples=2, max_new_tokens=1)),
        ]
        await server.until(lambda: len(server.rollouts) == 4)
        await server.stop()
        waiters += [asyncio.create_task(client.submit([i], max_new_tokens=1)) for i in range(8)]
        waiters += [asyncio.create_task(client.get_run()), asyncio.create_task(client.report_step(3))]
        async with asyncio.timeout(15):
            outcomes = await asyncio.gather(*waiters, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, rolloutd.client.ServerUnavailable)]
        taken = [outcome for outcome in outcomes if isinstance(outcome, rolloutd.client.Submission)]
        assert len(failures) + len(taken) == len(waiters) and len(taken) <= 3
        assert f"no rolloutd server answered at {server.address}" in str(failures[0])
        assert "rolloutd serve" in str(failures[0])
        for late in (
            client.submit([1], max_new_tokens=1),
            client.results().__anext__(),
            client.update(handle.rollout_id),
        ):
            with pytest.raises(rolloutd.client.ServerUnavailable):
                await late


async def test_a_server_that_is_not_there(server: FakeServer, quick_retries: None) -> None:
    await server.stop()
    with pytest.raises(rolloutd.client.ServerUnavailable, match=server.address):
        async with connect(server, reconnect_seconds=0.2):
            pytest.fail("nobody answered, yet the client is open")


async def test_no_capacity_is_surfaced(server: FakeServer) -> None:
    noticed: asyncio.Queue[rolloutd.client.Notice] = asyncio.Queue()
    async with connect(server, on_notice=noticed.put_nowait) as client:
        server.notice(v1.NOTICE_KIND_NO_CAPACITY, "all engines are down", 12.0)
        notice = await noticed.get()
        assert notice == rolloutd.client.Notice("no_capacity", "all engines are down", 12.0)
        assert client.notices == (notice,)


async def test_waiting_for_a_dead_server_keeps_memory_flat(server: FakeServer, quick_retries: None) -> None:
    attempts = 0
    opened = asyncio.Event()
    goal = 100
    open_channel = connection.open_channel

    def counting(target: str, access: Access) -> grpc.aio.Channel:
        nonlocal attempts
        attempts += 1
        if attempts >= goal:
            opened.set()
        return open_channel(target, access)

    async with connect(server, reconnect_seconds=600) as client:
        connection.open_channel = counting
        try:
            await server.stop(forget=True)
            waiting = asyncio.create_task(client.generate([1], rollout_id="x", max_new_tokens=1))
            await opened.wait()
            gc.collect()
            tasks, rss = len(asyncio.all_tasks()), psutil.Process().memory_info().rss
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            goal = attempts + 600
            opened.clear()
            await opened.wait()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert after - before < 200_000
            assert psutil.Process().memory_info().rss - rss < 8_000_000
            assert abs(len(asyncio.all_tasks()) - tasks) <= 3
        finally:
            connection.open_channel = open_channel
        await server.start()
        assert (await waiting).ok
    assert server.runs_started == {"x": 1}


async def test_unary_calls_outlive_a_restart(server: FakeServer, quick_retries: None) -> None:
    async with connect(server) as client:
        await client.get_run()
        await server.stop()
        call = asyncio.create_task(client.get_run())
        await server.start()
        assert (await call).run_id == "r"


async def test_a_fenced_client_does_not_come_back(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        waiting = asyncio.create_task(client.generate([1], max_new_tokens=1))
        reading = asyncio.create_task(anext(client.results()))
        await server.until(lambda: server.rollouts)
        server.break_streams(Abort(grpc.StatusCode.ABORTED, "epoch 7 is newer", "FENCED"))
        for waiter in (waiting, reading):
            with pytest.raises(rolloutd.client.Fenced, match="epoch 7 is newer"):
                await waiter
    assert len(server.hellos) == 1


async def test_a_second_stream_of_a_consumer_ends_the_first(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as first:
        waiting = asyncio.create_task(first.generate([1], rollout_id="x", max_new_tokens=1))
        await server.until(lambda: server.rollouts)
        async with connect(server) as second:
            with pytest.raises(rolloutd.client.Fenced):
                await waiting
            server.finish("x")
            assert (await anext(second.results())).rollout_id == "x"
    assert len(server.hellos) == 2


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, rolloutd.client.Unauthorized),
        (grpc.StatusCode.PERMISSION_DENIED, rolloutd.client.Unauthorized),
        (grpc.StatusCode.INVALID_ARGUMENT, rolloutd.client.Refused),
    ],
)
async def test_a_refused_hello_is_not_repeated(
    server: FakeServer, code: grpc.StatusCode, error: type[rolloutd.client.Refused]
) -> None:
    server.attach_error = Abort(code, "no", "INVALID_ARGUMENT")
    with pytest.raises(error) as refusal:
        async with connect(server):
            pytest.fail("refused, yet the client is open")
    assert refusal.value.code == code.name and len(server.hellos) == 1
    assert refusal.value.fields == (("run_id", "must not be empty"),)


async def test_a_hello_refused_for_now_is_repeated_when_the_server_says(server: FakeServer) -> None:
    server.attach_error = Abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "too many consumers", "QUEUE_FULL", retry_seconds=0.05
    )
    entering = asyncio.create_task(connect(server).__aenter__())
    await server.until(lambda: len(server.hellos) == 2)
    server.attach_error = None
    await (await entering).close()


async def test_take_over_is_asked_for_once(server: FakeServer) -> None:
    async with connect(server, take_over=["old"]) as client:
        server.break_streams()
        await server.until(lambda: len(server.hellos) == 2)
        assert (await client.generate([1], max_new_tokens=1)).ok
    assert [list(hello.take_over_consumer_ids) for hello in server.hellos] == [["old"], []]


async def test_an_error_of_a_callback_ends_the_client_with_it(server: FakeServer) -> None:
    def broken(notice: rolloutd.client.Notice) -> None:
        raise KeyError("callback is broken")

    async with connect(server, on_notice=broken) as client:
        server.notice(v1.NOTICE_KIND_DRAINING, "bye", 1.0)
        with pytest.raises(KeyError, match="callback is broken"):
            await anext(client.results())
