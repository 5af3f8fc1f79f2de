"""Publishing a policy version: what is asked, what is told, and what breaks on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import EngineUpdate, PublishFailed
from tests.client.fake_server import Abort, FakeServer

CUT = Abort(grpc.StatusCode.UNAVAILABLE, "connection reset by test")


def connect(server: FakeServer, **options: Any) -> rolloutd.client.Client:
    return rolloutd.client.connect(server.address, run="r", **options)


def step(engine_id: str, state: str, message: str = "", aborted: int = 0, count: int = 2) -> v1.PublishPolicyResponse:
    engine = v1.EngineUpdate(
        engine_id=engine_id,
        url=f"http://{engine_id}:1",
        state=v1.UpdateState.Value(f"UPDATE_STATE_{state.upper()}"),
        message=message,
        aborted_attempts=aborted,
    )
    return v1.PublishPolicyResponse(policy_version=5, elapsed_seconds=0.5, engine_count=count, engine=engine)


def summary(*updated: str, failed: dict[str, str] | None = None) -> v1.PublishPolicyResponse:
    failures = [
        v1.EngineUpdate(engine_id=engine_id, state=v1.UPDATE_STATE_FAILED, message=message)
        for engine_id, message in (failed or {}).items()
    ]
    return v1.PublishPolicyResponse(
        policy_version=5,
        elapsed_seconds=1.5,
        engine_count=2,
        summary=v1.PublishSummary(updated_engine_ids=updated, failed=failures),
    )


async def test_every_argument_reaches_its_field(server: FakeServer) -> None:
    server.publications = [[summary("e0", "e1")], [summary("e0", "e1")]]
    async with connect(server, epoch=3) as client:
        done = await client.publish_and_wait(
            5, path="/weights/5", mode="in_place", cache="keep", engines_at_once=2, pool="reward"
        )
        assert done == rolloutd.client.Publication(5, ("e0", "e1"), 1.5)
        await client.publish_and_wait(5)
        await client.confirm_weights(5, engine_id="e0", error="disk full", pool="reward")
        with pytest.raises(ValueError, match="mode must be one of 'drain', 'abort_and_resume', 'retract', 'in_place'"):
            await client.publish_and_wait(5, mode="fast")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="path is empty"):
            await client.publish_and_wait(6, path="")
        with pytest.raises(ValueError, match="version is 9223372036854775808; must be from 1"):
            await client.publish_and_wait(2**63, path="/weights")
    disk, pushed, confirmed = server.calls
    assert disk == v1.PublishPolicyRequest(
        run_id="r",
        trainer_epoch=3,
        version=5,
        pool="reward",
        disk_path="/weights/5",
        mode=v1.UPDATE_MODE_IN_PLACE,
        cache=v1.CACHE_HANDLING_KEEP,
        engines_at_once=2,
    )
    assert pushed.WhichOneof("weights") == "pushed"
    assert (pushed.mode, pushed.cache, pushed.engines_at_once, pushed.pool) == (0, 0, 0, "")
    assert confirmed == v1.ConfirmWeightsRequest(
        run_id="r", trainer_epoch=3, version=5, engine_id="e0", error="disk full", pool="reward"
    )


async def test_progress_is_told_as_it_comes(server: FakeServer) -> None:
    later = asyncio.Event()
    server.publications = [[step("e0", "clearing", "3 rollouts", 3), later, step("e0", "updated"), summary("e0")]]
    async with connect(server) as client:
        updates = client.publish_policy(5, path="/weights/5")
        assert await anext(updates) == EngineUpdate("e0", "http://e0:1", "clearing", "3 rollouts", 3, 0.5, 2)
        later.set()
        assert [update.state async for update in updates] == ["updated"]


async def test_failed_engines_are_named_with_their_reasons(server: FakeServer) -> None:
    server.publications = [[step("e1", "failed", "no such file"), summary("e0", failed={"e1": "no such file"})]]
    async with connect(server) as client:
        with pytest.raises(
            PublishFailed, match="version 5 is on 1 engines and failed on 1: e1: no such file"
        ) as raised:
            await client.publish_and_wait(5, path="/nowhere")
    assert raised.value.updated == ("e0",)
    assert [(engine.engine_id, engine.message) for engine in raised.value.failed] == [("e1", "no such file")]


async def test_a_broken_watch_joins_the_publication_again_and_tells_nothing_twice(server: FakeServer) -> None:
    server.publications = [
        [step("e0", "loading"), CUT],
        [CUT],
        [step("e0", "loading"), step("e1", "loading"), step("e0", "updated"), summary("e0", "e1")],
    ]
    async with connect(server) as client:
        told = [(update.engine_id, update.state) async for update in client.publish_policy(5, path="/weights/5")]
    assert told == [("e0", "loading"), ("e1", "loading"), ("e0", "updated")]
    assert server.calls[0] == server.calls[1] == server.calls[2]


async def test_a_refusal_is_not_tried_again(server: FakeServer) -> None:
    server.publications = [[Abort(grpc.StatusCode.FAILED_PRECONDITION, "5 is below 6", "VERSION_BACKWARDS")]]
    async with connect(server) as client:
        with pytest.raises(rolloutd.client.Refused, match="5 is below 6") as raised:
            await client.publish_and_wait(5, path="/weights/5")
    assert raised.value.reason == "VERSION_BACKWARDS"
    assert len(server.calls) == 1


async def test_a_server_that_stays_away_is_given_up_on(server: FakeServer) -> None:
    server.publications = [[CUT]] * 1000
    async with connect(server, reconnect_seconds=0.2) as client:
        with pytest.raises(rolloutd.client.ServerUnavailable, match="connection reset"):
            await client.publish_and_wait(5, path="/weights/5")


async def test_weights_are_pushed_to_each_engine_as_it_waits(server: FakeServer) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    server.publications = [
        [
            step("e0", "pushing"),
            step("e0", "pushing", "for 3 s"),
            first,
            step("e1", "pushing"),
            second,
            summary("e0", "e1"),
        ]
    ]
    sent = []
    async with connect(server) as client:
        async with client.pushing_weights(5, mode="retract", engines_at_once=1, pool="p") as push:
            async for engine in push.engines():
                sent.append(engine.url)
                await push.confirm(engine)
                (first if engine.engine_id == "e0" else second).set()
    assert sent == ["http://e0:1", "http://e1:1"]
    publish, *confirmed = server.calls
    assert publish.WhichOneof("weights") == "pushed" and publish.engines_at_once == 1
    assert [(call.engine_id, call.pool, call.error) for call in confirmed] == [("e0", "p", ""), ("e1", "p", "")]


async def test_weights_are_pushed_to_all_engines_at_once(server: FakeServer) -> None:
    confirmed = asyncio.Event()
    server.publications = [
        [
            step("e0", "pausing", count=1),
            step("e0", "pushing", count=3),  # before anything was heard of the others
            step("e1", "failed", count=3),
            step("e2", "pausing", count=3),
            step("e2", "pushing", count=3),
            confirmed,
            summary("e0", "e2", failed={"e1": "gone"}),
        ]
    ]
    async with connect(server) as client:
        with pytest.raises(PublishFailed, match="e1: gone"):
            async with client.pushing_weights(5) as push:
                assert [engine.engine_id for engine in await push.ready()] == ["e0", "e2"]
                await push.confirm()
                confirmed.set()
    assert server.calls[1].engine_id == ""


async def test_a_trainer_that_fails_while_it_pushes_fails_the_engines_that_wait(server: FakeServer) -> None:
    third = asyncio.Event()
    server.publications = [
        [
            step("e0", "pushing", count=1),
            step("e1", "pushing"),
            third,
            step("e2", "pushing", count=3),
            summary(failed={"e0": "x", "e1": "x", "e2": "x"}),
        ]
    ]
    async with connect(server) as client:
        with pytest.raises(RuntimeError, match="out of memory"):
            async with client.pushing_weights(5) as push:
                assert len(await push.ready()) == 1
                third.set()
                raise RuntimeError("out of memory")
    errors = {call.engine_id: call.error for call in server.calls[1:]}
    assert set(errors) == {"e0", "e1", "e2"}
    assert all("RuntimeError: out of memory" in error for error in errors.values())
