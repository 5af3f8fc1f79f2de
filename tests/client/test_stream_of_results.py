"""Submitting and receiving, with a server that behaves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import RolloutdError, RolloutResult
from tests.client.fake_server import FakeServer


def connect(server: FakeServer, **options: object) -> rolloutd.client.Client:
    return rolloutd.client.connect(server.address, run="r", consumer="c", **options)  # type: ignore[arg-type]


async def test_every_submission_ends_once_in_results_and_is_then_forgotten(server: FakeServer) -> None:
    async with connect(server) as client:
        for i in range(200):
            await client.submit([1, 2, i], max_new_tokens=4, rollout_id=f"p{i}")
        results = [result async for result in client.drain()]
        assert sorted(result.rollout_id for result in results) == sorted(f"p{i}" for i in range(200))
        first = next(result for result in results if result.rollout_id == "p7")
        assert first.tokens.tolist() == [7, 2, 1, 0]
        assert first.ok and first.complete and first.finish_reason == "stop" and first.tokens.dtype == np.uint32
        await server.until(lambda: not server.kept_results)
    assert server.goodbyes == 1


async def test_what_is_submitted_together_travels_together(server: FakeServer) -> None:
    async with connect(server) as client:
        for i in range(1000):
            await client.submit([i + 1], max_new_tokens=1)
        assert len([result async for result in client.drain()]) == 1000
    carrying = [message for message in server.messages if message.submissions]
    assert len(carrying) <= 4
    assert max(len(message.submissions) for message in carrying) <= 512


async def test_messages_keep_within_the_servers_limits(server: FakeServer) -> None:
    server.limits.max_items_per_message = 7
    server.limits.max_message_bytes = 4000
    async with connect(server) as client:
        for i in range(50):
            await client.submit(np.full(100, i, np.uint32), max_new_tokens=1)
        await client.submit(np.zeros(2000, np.uint32), max_new_tokens=1, rollout_id="big")
        results = {result.rollout_id: result async for result in client.drain()}
        refused = results.pop("big")
        assert refused.outcome == "refused" and refused.problem is not None
        assert "max_message_bytes of 4000" in refused.problem.message
        assert len(results) == 50 and all(result.ok for result in results.values())
    for message in server.messages:
        assert len(message.submissions) + len(message.acknowledgements) <= 7
        assert message.ByteSize() <= 4000


async def test_a_group_comes_back_in_sample_order(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        group = asyncio.create_task(
            client.generate_group([5, 6], samples=4, rollout_id="g", max_new_tokens=2, seeds=[1, 2, 3, 4])
        )
        await server.until(lambda: len(server.rollouts) == 4)
        for index in (2, 0, 3):
            server.finish(f"g/{index}")
        server.finish("g/1", v1.OUTCOME_NO_ENGINE)
        results = await group
        assert [result.sample_index for result in results] == [0, 1, 2, 3]
        assert [result.outcome for result in results] == ["completed", "no_engine", "completed", "completed"]
        await server.until(lambda: not server.kept_results)
    assert server.submissions[0].seeds == [1, 2, 3, 4]


async def test_generate_raises_when_the_rollout_did_not_complete(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        waiting = asyncio.create_task(client.generate([5], rollout_id="x", max_new_tokens=2))
        await server.until(lambda: server.rollouts)
        server.finish("x", v1.OUTCOME_ENGINE_FAILED)
        with pytest.raises(rolloutd.client.RolloutFailed, match="x ended as engine_failed") as failure:
            await waiting
        assert failure.value.outcome == "engine_failed" and failure.value.result.rollout_id == "x"


async def test_one_refused_prompt_of_eight_leaves_the_others_alone(server: FakeServer) -> None:
    async with connect(server) as client:
        handles = [
            await client.submit([] if i == 3 else [i + 1], max_new_tokens=2, rollout_id=f"p{i}") for i in range(8)
        ]
        results = {result.rollout_id: result async for result in client.drain()}
        assert len(results) == 8
        assert [i for i in range(8) if not results[f"p{i}"].ok] == [3]
        problem = results["p3"].problem
        assert results["p3"].outcome == "refused" and problem is not None
        assert (problem.code, problem.reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert problem.fields == (("token_bytes", "at least one token"),)
        with pytest.raises(rolloutd.client.Refused, match="at least one token"):
            await handles[3].accepted()
        assert (await handles[2].accepted()).state == "queued"
        with pytest.raises(rolloutd.client.Refused) as refusal:
            await client.generate([], max_new_tokens=2)
        assert refusal.value.fields == problem.fields


async def test_token_ids_arrive_as_they_were_sent(server: FakeServer) -> None:
    ids = [0, 1, 2**31, 2**32 - 1, 198, 271]
    async with connect(server) as client:
        for prompt in (
            ids,
            tuple(ids),
            np.array(ids, np.uint32),
            np.array(ids, np.int64),
            np.array(ids, "<u4").tobytes(),
        ):
            result = await client.generate(prompt, max_new_tokens=1)
            assert result.tokens.tolist() == [*reversed(ids), 0]
    assert len({submission.token_bytes for submission in server.submissions}) == 1


async def test_verdicts_reach_the_server_and_nothing_is_forgotten_before(server: FakeServer) -> None:
    async with connect(server, auto_acknowledge=False) as client:
        for i in range(4):
            await client.submit([i + 1], max_new_tokens=1, rollout_id=f"p{i}")
        results = {result.rollout_id: result async for result in client.drain()}
        client.acknowledge(results["p2"], used=True, reward=0.5)
        client.acknowledge("p3", used=False, drop_reason="stale")
        await server.until(lambda: len(server.acknowledgements) == 2)
        assert sorted(server.kept_results) == ["p0", "p1"]
        client.acknowledge(results["p0"])
        client.acknowledge(results["p1"], reward=-1.0)
        await server.until(lambda: not server.kept_results)
        with pytest.raises(ValueError, match="drop_reason goes with used=False"):
            client.acknowledge("p0", drop_reason="stale")
        with pytest.raises(ValueError, match="reward must be finite"):
            client.acknowledge("p0", reward=float("nan"))
    told = {acknowledgement.rollout_id: acknowledgement for acknowledgement in server.acknowledgements}
    assert (told["p2"].verdict, told["p2"].reward) == (v1.VERDICT_USED, 0.5)
    assert (told["p3"].verdict, told["p3"].drop_reason) == (v1.VERDICT_DROPPED, "stale")
    assert told["p1"].reward == -1.0


async def test_verdicts_are_refused_where_the_server_has_forgotten(server: FakeServer) -> None:
    async with connect(server) as client:
        result = await client.generate([1], max_new_tokens=1)
        with pytest.raises(ValueError, match="auto_acknowledge=False"):
            client.acknowledge(result, used=True)


async def test_leaving_a_loop_early_loses_nothing(server: FakeServer) -> None:
    async with connect(server) as client:
        for i in range(10):
            await client.submit([i + 1], max_new_tokens=1)
        seen: list[RolloutResult] = []
        async for result in client.results():
            seen.append(result)
            if len(seen) == 3:
                break
        seen += [result async for result in client.drain()]
        assert len({result.rollout_id for result in seen}) == len(seen) == 10


async def test_a_cancelled_wait_for_results_loses_nothing(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        results = client.results()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(results), 0.01)
        await server.until(lambda: server.rollouts)
        server.finish("x")
        assert (await anext(results)).rollout_id == "x"


async def test_progress_reaches_the_one_who_asked(server: FakeServer) -> None:
    server.finish_at_once = False
    seen: list[rolloutd.client.Progress] = []
    async with connect(server) as client:
        waiting = asyncio.create_task(client.generate([1], rollout_id="x", max_new_tokens=9, on_progress=seen.append))
        await server.until(lambda: server.rollouts)
        server.send(v1.Event(progress=v1.Progress(rollout_id="x", generated_tokens=5, engine_id="e")))
        server.finish("x")
        await waiting
    assert server.submissions[0].want_progress
    assert seen == [rolloutd.client.Progress("x", 5, "e")]


async def test_cancelling_generate_cancels_its_rollouts(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        waiting = asyncio.create_task(client.generate_group([1], rollout_id="g", samples=3, max_new_tokens=9))
        await server.until(lambda: len(server.rollouts) == 3)
        server.finish("g/1")
        await server.until(lambda: server.kept_results)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await server.until(lambda: all(rollout.result for rollout in server.rollouts.values()))
        await server.until(lambda: not server.kept_results)
        assert server.rollouts["g/0"].result.outcome == v1.OUTCOME_CANCELLED  # type: ignore[union-attr]
        assert [result async for result in client.drain()] == []


async def test_cancel_waits_until_the_server_knows_the_rollout(server: FakeServer) -> None:
    server.finish_at_once = False
    server.accept.clear()
    async with connect(server) as client:
        handle = await client.submit([1], samples=2, max_new_tokens=9)
        cancelling = asyncio.create_task(client.cancel(handle.rollout_id, "nobody"))
        await server.until(lambda: server.messages)
        assert not server.calls
        server.accept.set()
        answer = await cancelling
        assert (answer.cancelled_rollouts, list(answer.unknown_ids)) == (2, ["nobody"])
        assert [result.outcome async for result in client.drain()] == ["cancelled", "cancelled"]


async def test_update_names_what_changes(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server, epoch=4) as client:
        handle = await client.submit([1], max_new_tokens=9, rollout_class="background")
        answer = await client.update(handle.rollout_id, rollout_class="critical", needed_by_step=0)
        assert answer.updated_rollouts == 1
        with pytest.raises(
            ValueError, match="rollout_class must be one of 'critical', 'reusable', 'background', not 'urgent'"
        ):
            await client.update(handle.rollout_id, rollout_class="urgent")  # type: ignore[arg-type]
    request = server.calls[-1]
    assert request.trainer_epoch == 4 and request.updates[0].rollout_class == v1.ROLLOUT_CLASS_CRITICAL
    assert request.updates[0].HasField("needed_by_step") and not request.updates[0].HasField("deadline_seconds")


async def test_prompts_and_results_above_four_megabytes_pass(server: FakeServer) -> None:
    prompt = np.arange(1_200_000, dtype=np.uint32)
    async with connect(server) as client:
        result = await client.generate(prompt, max_new_tokens=1)
        assert np.array_equal(result.tokens[:-1], prompt[::-1])


async def test_an_id_in_flight_is_not_taken_twice(server: FakeServer) -> None:
    server.finish_at_once = False
    async with connect(server) as client:
        await client.submit([1], max_new_tokens=1, rollout_id="x")
        with pytest.raises(ValueError, match="in flight already"):
            await client.submit([1], max_new_tokens=1, rollout_id="x")


async def test_close_says_goodbye_and_leaves_nothing_behind(server: FakeServer) -> None:
    before = asyncio.all_tasks()
    async with connect(server) as client:
        await client.submit([1], max_new_tokens=1)
        await anext(client.results())
        pending = asyncio.create_task(anext(client.results()))
        await asyncio.sleep(0)
    with pytest.raises(rolloutd.client.ClientClosed):
        await pending
    assert server.goodbyes == 1 and not server.kept_results
    assert not [task for task in asyncio.all_tasks() - before if "rolloutd" in repr(task.get_coro())]
    with pytest.raises(rolloutd.client.ClientClosed):
        await client.submit([1], max_new_tokens=1)


async def test_no_stream_without_consumer(server: FakeServer) -> None:
    async with rolloutd.client.connect(server.address, run="r") as client:
        (result,) = await client.run_rollout([3, 4], max_new_tokens=1)
        assert result.tokens.tolist() == [4, 3, 0]
        with pytest.raises(RolloutdError, match="consumer="):
            await client.submit([1], max_new_tokens=1)
    assert not server.hellos
