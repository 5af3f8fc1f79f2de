"""The subscription to an engine's KV events as the server keeps it: with its engine, with warnings instead of failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog

from rolloutd.engines.base import EngineInfo, KvEventsAddress
from rolloutd.engines.sim.kv_log import BlockStored
from rolloutd.engines.sim.kv_publisher import KvEventsConfig, KvPublisher
from rolloutd.server import kv_following
from rolloutd.server.kv_following import KvFollower
from tests.server.fake_door import FakeDoor
from tests.server.harness import Rig, running_server, until

ANYWHERE = "tcp://127.0.0.1:*"


class PublishingDoor(FakeDoor):
    """An engine that says where it publishes."""

    address: KvEventsAddress | None = None

    async def register(self) -> EngineInfo:
        return dataclasses.replace(await super().register(), kv_events=self.address)


@contextmanager
def publishing() -> Iterator[KvPublisher]:
    publisher = KvPublisher(KvEventsConfig("zmq", ANYWHERE, ANYWHERE), 16)
    try:
        yield publisher
    finally:
        publisher.close()


def door_for(address: KvEventsAddress | None) -> Any:
    def make(settings: Any) -> FakeDoor:
        door = PublishingDoor(settings.url)
        door.address = address
        return door

    return make


def address_of(publisher: KvPublisher) -> KvEventsAddress:
    return KvEventsAddress(publisher.endpoint, publisher.replay_endpoint)


def following(rig: Rig) -> KvFollower | None:
    (engine,) = rig.server.engines.engines()
    return engine.kv_events


def reported(rig: Rig) -> int:
    (view,) = rig.server.loop.core.engine_views()
    return view.kv_blocks_reported


def say(publisher: KvPublisher, number: int) -> None:
    publisher.publish([BlockStored([number], None, list(range(16)), 16, None, "GPU")])


async def test_what_the_engine_publishes_reaches_the_core_until_it_is_removed() -> None:
    with publishing() as publisher:
        async with running_server(make_door=door_for(address_of(publisher))) as rig:
            say(publisher, 1)
            await until(lambda: reported(rig) == 1)
            found = following(rig)
            assert found is not None and found.connected and found.blocks == 2  # a reset, and the block
            (engine,) = rig.server.engines.engines()
            rig.server.engines.remove(engine.engine_id)
            await until(found._task.done)


async def test_a_new_process_is_subscribed_to_anew_and_the_same_one_is_not() -> None:
    with publishing() as publisher:
        async with running_server(make_door=door_for(address_of(publisher))) as rig:
            first = following(rig)
            door = rig.door
            say(publisher, 1)
            await until(lambda: reported(rig) == 1)
            registrations = door.registrations
            door.reachable = False
            await until(lambda: rig.server.engines.engines()[0].lost)
            door.reachable = True
            await until(lambda: door.registrations > registrations and not rig.server.engines.engines()[0].lost)
            assert following(rig) is first and reported(rig) == 1

            door.reachable = False
            await until(lambda: rig.server.engines.engines()[0].lost)
            door.incarnation = "2"
            door.reachable = True
            await until(lambda: following(rig) is not first)
            await until(lambda: reported(rig) == 1)  # its history, asked for again


async def test_an_engine_that_publishes_nothing_is_not_followed() -> None:
    async with running_server(make_door=door_for(None)) as rig:
        assert following(rig) is None


async def test_an_endpoint_out_of_reach_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_following, "UNREACHED_SECONDS", 0.02)
    with publishing() as publisher:
        gone = address_of(publisher)
    with structlog.testing.capture_logs() as logs:
        async with running_server(make_door=door_for(gone)) as rig:
            await until(lambda: any(line["event"] == "kv_events_unreachable" for line in logs))
            (view,) = rig.server.loop.core.engine_views()
            assert view.state == "ready"
    (line,) = [line for line in logs if line["event"] == "kv_events_unreachable"]
    assert line["log_level"] == "warning" and line["endpoint"] == gone.endpoint


async def test_events_that_cannot_be_read_are_a_warning_and_nothing_is_believed_of_them() -> None:
    with publishing() as publisher, structlog.testing.capture_logs() as logs:
        async with running_server(make_door=door_for(address_of(publisher))) as rig:
            say(publisher, 1)
            await until(lambda: reported(rig) == 1)
            publisher.publish([{"type": "BlockMoved"}])  # type: ignore[list-item]
            await until(lambda: reported(rig) == 0)
            assert any(line["event"] == "kv_events_unreadable" and "BlockMoved" in line["message"] for line in logs)
