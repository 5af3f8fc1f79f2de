"""A client over several servers: who gets what, what moves, what is told, and that everything ends once."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import BalancedClient, addresses, balanced, connect_all, connection, control, stream
from tests.client.fake_server import Abort, FakeServer


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeServer]]:
    fakes = [FakeServer() for _ in range(3)]
    for fake in fakes:
        await fake.start()
        fake.finish_at_once = False
    yield fakes
    for fake in fakes:
        await fake.stop()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays() -> Iterator[float]:
        return itertools.repeat(0.005)

    for module in (connection, control, stream):
        monkeypatch.setattr(module, "backoff_seconds", delays)


def over(servers: list[FakeServer], **options: Any) -> BalancedClient:
    options = {"failover_seconds": 0.05, **options}
    return connect_all([server.address for server in servers], run="r", consumer="c", **options)


async def held(servers: list[FakeServer], count: int) -> None:
    """Wait until the servers have so many rollouts between them."""
    async with asyncio.timeout(20):
        while sum(len(server.rollouts) for server in servers) < count:  # noqa: ASYNC110 - several servers, no one event
            await asyncio.sleep(0.005)


def finish_all(servers: list[FakeServer]) -> None:
    for server in servers:
        for rollout_id in list(server.rollouts):
            server.finish(rollout_id)


async def drain(client: BalancedClient, servers: list[FakeServer]) -> list[rolloutd.client.RolloutResult]:
    """All results, with servers that finish whatever they are given."""
    for server in servers:
        server.finish_at_once = True
    finish_all(servers)
    async with asyncio.timeout(20):
        return [result async for result in client.drain()]


async def test_work_is_spread_and_a_submission_stays_whole(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        for index in range(9):
            await client.submit([1], samples=4, max_new_tokens=1, rollout_id=f"g{index}")
        await held(servers, 36)
        assert [len(server.rollouts) for server in servers] == [12, 12, 12]
        assert sorted((await drain(client, servers)), key=lambda result: result.rollout_id)[0].rollout_id == "g0/0"


async def test_groups_sessions_and_children_follow_what_they_belong_to(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        for index in range(6):
            await client.submit([1], max_new_tokens=1, rollout_id=f"a{index}", group_id=f"g{index}")
            await client.submit([1], max_new_tokens=1, rollout_id=f"b{index}", group_id=f"g{index}")
            await client.submit([1], max_new_tokens=1, rollout_id=f"c{index}", parent_rollout_id=f"b{index}")
            await client.submit([1], max_new_tokens=1, rollout_id=f"s{index}", session_id=f"s{index}", turn=0)
            await client.submit([1], max_new_tokens=1, rollout_id=f"t{index}", session_id=f"s{index}", turn=1)
        await held(servers, 30)
        for server in servers:
            for first, second in (("a", "b"), ("b", "c"), ("s", "t")):
                ids = server.rollouts.keys()
                assert {i[1:] for i in ids if i[0] == first} == {i[1:] for i in ids if i[0] == second}
        await drain(client, servers)


async def test_a_dead_server_s_work_moves_under_the_same_ids_and_ends_once(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        for index in range(6):
            await client.submit([index + 1], samples=2, max_new_tokens=1, rollout_id=f"g{index}")
        await held(servers, 12)
        lost = set(servers[0].rollouts)
        delivered = sorted(lost)[0]
        servers[0].finish(delivered)
        results = [await anext(client.results())]
        await servers[0].stop(forget=True)
        others = servers[1:]
        await held(others, 12)
        results += await drain(client, others)
        assert Counter(result.rollout_id for result in results) == Counter(
            f"g{group}/{index}" for group in range(6) for index in range(2)
        )
        assert all(result.ok for result in results)
        assert lost <= {rollout_id for server in others for rollout_id in server.rollouts}
        # What had been delivered is not generated for nothing.
        await asyncio.wait([asyncio.ensure_future(server.until(lambda s=server: cancelled(s, delivered))) for server in others],
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert any(cancelled(server, delivered) for server in others)


def cancelled(server: FakeServer, rollout_id: str) -> bool:
    return any(isinstance(call, v1.CancelRolloutsRequest) and rollout_id in call.rollout_ids for call in server.calls)


async def test_the_first_of_two_copies_counts(servers: list[FakeServer]) -> None:
    pair = servers[:2]
    async with over(pair) as client:
        await client.submit([1, 2], max_new_tokens=1, rollout_id="x")
        await held(pair, 1)
        first, second = pair if pair[0].rollouts else pair[::-1]
        await first.stop()  # without losing its memory
        await held([second], 1)
        first.finish("x")  # while it cannot tell
        await first.start()
        (result,) = [result async for result in client.drain()]
        assert result.ok
        await second.until(lambda: cancelled(second, "x"))
        await first.until(lambda: not first.kept_results)  # acknowledged where it came from
        await second.until(lambda: second.rollouts["x"].result is not None and not second.kept_results)
        assert [len(server.runs_started) for server in pair] == [1, 1]


async def test_a_late_copy_of_something_delivered_is_dropped(servers: list[FakeServer]) -> None:
    pair = servers[:2]
    async with over(pair) as client:
        await client.submit([1, 2], max_new_tokens=1, rollout_id="x")
        await held(pair, 1)
        first, second = pair if pair[0].rollouts else pair[::-1]
        await first.stop()
        await held([second], 1)
        second.finish("x")
        assert [result.rollout_id async for result in client.drain()] == ["x"]
        first.finish("x")
        await first.start()
        await first.until(lambda: len(first.hellos) == 2 and not first.kept_results)
        await client.submit([3], max_new_tokens=1, rollout_id="y")
        assert [result.rollout_id for result in await drain(client, pair)] == ["y"]


async def test_results_of_an_earlier_life_come_once(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        await held(servers, 1)
    finish_all(servers)
    async with over(servers) as client:
        assert (await anext(client.results())).rollout_id == "x"
        await asyncio.gather(*(server.until(lambda s=server: not s.kept_results) for server in servers))


async def test_a_verdict_goes_to_the_server_the_result_came_from(servers: list[FakeServer]) -> None:
    async with over(servers, auto_acknowledge=False) as client:
        for index in range(3):
            await client.submit([1], max_new_tokens=1, rollout_id=f"r{index}")
        await held(servers, 3)
        for result in await drain(client, servers):
            client.acknowledge(result, used=True, reward=1.0)
        for server in servers:
            await server.until(lambda s=server: s.acknowledgements)
            assert [ack.rollout_id for ack in server.acknowledgements] == list(server.rollouts)
            assert server.acknowledgements[0].verdict == v1.VERDICT_USED


@pytest.mark.parametrize("how", ["refused", "ended"])
async def test_a_server_that_shuts_down_hands_over(servers: list[FakeServer], how: str) -> None:
    pair = servers[:2]
    async with over(pair) as client:
        for server in pair:
            server.refusals = (
                [v1.Error(code=14, reason="SHUTDOWN", message="shutting down")] if how == "refused" else []
            )
        pair[1].refusals = []
        pair[1].finish_at_once = True
        submissions = [await client.submit([index + 1], max_new_tokens=1) for index in range(2)]
        await held(pair, 1 if how == "refused" else 2)
        if how == "ended":
            for rollout_id in list(pair[0].rollouts):
                pair[0].finish(rollout_id, v1.OUTCOME_SHUTDOWN)
        async with asyncio.timeout(20):
            results = [result async for result in client.drain()]
        assert {result.rollout_id for result in results} == {submission.rollout_id for submission in submissions}
        assert all(result.ok for result in results) and len(pair[1].runs_started) == 2
        await client.submit([9], max_new_tokens=1, rollout_id="new")  # goes where nothing shuts down
        assert [result.rollout_id async for result in client.drain()] == ["new"]
        assert "new" in pair[1].rollouts


async def test_a_refusal_is_final_and_reaches_the_caller(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        with pytest.raises(rolloutd.client.Refused, match="empty prompt"):
            await client.generate([], max_new_tokens=1)
        submission = await client.submit([], max_new_tokens=1)
        with pytest.raises(rolloutd.client.Refused, match="empty prompt"):
            await submission.accepted()
        assert [result.outcome async for result in client.drain()] == ["refused"]


async def test_nobody_there_work_waits_and_deadlines_hold(servers: list[FakeServer]) -> None:
    async with over(servers[:2]) as client:
        for server in servers[:2]:
            await server.stop(forget=True)
        async with asyncio.timeout(20):
            while client.attached_targets:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(rolloutd.client.Refused, match="before its own time"):
            await client.generate([1], max_new_tokens=1, deadline_seconds=0.05)
        waiting = asyncio.create_task(client.generate([1], max_new_tokens=1))
        cancelled_later = await client.submit([2], max_new_tokens=1)
        await asyncio.sleep(0)
        servers[1].finish_at_once = True
        client._stream.withdraw(client._stream.entry(cancelled_later.rollout_id))  # type: ignore[arg-type]
        assert [result.outcome async for result in client.drain()] == ["cancelled"]
        await servers[1].start()
        assert (await waiting).ok


async def test_cancel_reaches_every_copy(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        for index in range(3):
            await client.submit([1], samples=2, max_new_tokens=1, rollout_id=f"g{index}")
        await held(servers, 6)
        answer = await client.cancel("g0", "g1", "nobody")
        assert answer.cancelled_rollouts == 4 and list(answer.unknown_ids) == ["nobody"]
        servers_of_g2 = [server for server in servers if "g2/0" in server.rollouts]
        outcomes = Counter(result.outcome for result in await drain(client, servers_of_g2))
        assert outcomes == {"cancelled": 4, "completed": 2}


async def test_abandoning_a_call_cancels_it(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        call = asyncio.create_task(client.generate_group([1], samples=2, max_new_tokens=1, rollout_id="g"))
        await held(servers, 2)
        call.cancel()
        (home,) = [server for server in servers if server.rollouts]
        await home.until(lambda: all(rollout.result is not None for rollout in home.rollouts.values()))
        await home.until(lambda: not home.kept_results)


async def test_what_a_run_is_told_it_is_told_everywhere_and_later_again(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        answers = await client.set_budget(max_running_rollouts=4)
        assert set(answers) == {server.address for server in servers}
        await client.report_step(1, trainer_state="waiting")
        await client.report_step(2, trainer_state="waiting")
        await servers[0].stop(forget=True)
        servers[0].calls.clear()
        assert set(await client.report_step(3)) == {server.address for server in servers[1:]}
        await servers[0].start()
        await servers[0].until(lambda: len(servers[0].calls) == 2)
        budget, step = servers[0].calls
        assert budget.budget.max_running_rollouts == 4 and step.step == 3
        assert (await client.servers[servers[1].address].get_run()).run_id == "r"


async def test_fenced_at_one_server_is_fenced(servers: list[FakeServer]) -> None:
    async with over(servers) as client:
        await client.submit([1], max_new_tokens=1)
        servers[2].break_streams(Abort(grpc.StatusCode.ABORTED, "a newer trainer epoch", "FENCED"))
        with pytest.raises(rolloutd.client.Fenced):
            await anext(client.results())


async def test_back_pressure_holds_for_all_together(servers: list[FakeServer]) -> None:
    for server in servers:
        server.accept.clear()
    async with over(servers, max_unaccepted=6) as client:
        for _ in range(6):
            await client.submit([1], max_new_tokens=1)
        seventh = asyncio.create_task(client.submit([1], max_new_tokens=1))
        await asyncio.gather(*(server.until(lambda s=server: len(s.submissions) == 2) for server in servers))
        assert not seventh.done()
        for server in servers:
            server.accept.set()
        await seventh
        assert len(await drain(client, servers)) == 7


async def test_one_of_several_missing_at_the_start_is_no_obstacle(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanced, "OTHERS_SECONDS", 0.05)
    await servers[0].stop()
    async with over(servers) as client:
        await client.submit([1], max_new_tokens=1)
        assert all(result.ok for result in await drain(client, servers[1:]))
        await servers[0].start()
        await servers[0].until(lambda: servers[0].hellos)


async def test_the_addresses_of_a_name_are_followed(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [servers[0].address]
    asked: list[tuple[str, int]] = []

    async def look_up(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return list(listed)

    monkeypatch.setattr(balanced, "look_up", look_up)
    monkeypatch.setattr(balanced, "LOOK_UP_SECONDS", 0.005)
    options: dict[str, Any] = {"run": "r", "consumer": "c", "failover_seconds": 0.05}
    async with connect_all("dns:///sidecars.rl.svc:50051", **options) as client:
        assert asked[0] == ("sidecars.rl.svc", 50051)
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        listed[:] = [servers[1].address]
        await servers[1].until(lambda: servers[1].hellos)
        servers[0].finish("x") if "x" in servers[0].rollouts else await held([servers[0]], 1)
        assert servers[0].address in client.servers  # its work may come to an end
        await servers[0].stop()
        async with asyncio.timeout(20):
            while servers[0].address in client.servers:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        servers[1].finish_at_once = True
        finish_all(servers[1:2])
        assert [result.rollout_id async for result in client.drain()] == ["x"]


async def test_a_name_s_addresses_are_of_one_family() -> None:
    found = await addresses.look_up("localhost", 5)
    assert found == ["127.0.0.1:5"] or found == ["[::1]:5"]
    assert await addresses.look_up("no-such-host.invalid", 5) is None


def test_arguments_are_looked_at() -> None:
    options: dict[str, Any] = {"run": "r", "consumer": "c"}
    for targets, message in (
        ([], "is empty"),
        (["a:1", "a:1"], "twice"),
        ("nowhere", "HOST:PORT"),
        ("http://a:1/b", "HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            connect_all(targets, **options)
    with pytest.raises(ValueError, match="run and consumer"):
        connect_all(["a:1"], run="r", consumer="")
    assert addresses.split_target("dns:///[::1]:5") == ("::1", 5)


async def test_a_version_is_published_at_every_server_and_at_one_that_comes_later(servers: list[FakeServer]) -> None:
    for number, server in enumerate(servers):
        summary = v1.PublishSummary(updated_engine_ids=[f"e{number}"])
        server.publications = [[v1.PublishPolicyResponse(policy_version=5, summary=summary)] for _ in range(2)]
    async with over(servers) as client:
        await servers[0].stop(forget=True)
        answers = await client.publish_and_wait(5, path="/weights/5")
        assert {target: done.updated for target, done in answers.items()} == {
            servers[1].address: ("e1",),
            servers[2].address: ("e2",),
        }
        await servers[0].start()
        await servers[0].until(lambda: any(isinstance(call, v1.PublishPolicyRequest) for call in servers[0].calls))
