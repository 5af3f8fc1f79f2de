"""PublishPolicy and ConfirmWeights over a real channel: progress, joining, failures, pushed weights, watchers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rolloutd.engines.base import EngineFault
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.engines.control import PauseMode as DoorPause
from rolloutd.engines.control import WeightsLoaded
from rolloutd.scheduler.actions import PublishEnded, PublishProgress
from rolloutd.scheduler.config import ExecutorSettings, SchedulerConfig
from rolloutd.scheduler.events import EngineLoad, EngineReadiness, Tick
from rolloutd.scheduler.states import CacheHandling, UpdateMode, UpdateState
from rolloutd.server.config import EngineSettings
from rolloutd.server.errors import SHUTTING_DOWN
from rolloutd.server.publications import MAX_PENDING, End, Publications, Step
from rolloutd.server.translate_publish import to_publish
from rolloutd.v1 import (
    CACHE_HANDLING_FLUSH,
    ENGINE_STATE_HELD,
    ENGINE_STATE_READY,
    UPDATE_MODE_ABORT_AND_RESUME,
    UPDATE_MODE_DRAIN,
    UPDATE_MODE_IN_PLACE,
    UPDATE_MODE_RETRACT,
    UPDATE_STATE_FAILED,
    UPDATE_STATE_LOADING,
    UPDATE_STATE_PUSHING,
    UPDATE_STATE_UPDATED,
    ConfirmWeightsRequest,
    GetBudgetRequest,
    ListEnginesRequest,
    PublishPolicyRequest,
    PublishPolicyResponse,
    PushedWeights,
    RegisterEngineRequest,
    RemoveEngineRequest,
)
from rolloutd.v1 import CacheHandling as CacheMessage
from rolloutd.v1 import UpdateMode as ModeMessage
from rolloutd.v1 import UpdateState as StateMessage
from tests.server.fake_door import FakeDoor
from tests.server.harness import Rig, refused, running_server, until
from tests.server.test_loop import Bench

TWO = ("http://engine-0:1", "http://engine-1:1")


def disk(version: int, **fields: Any) -> PublishPolicyRequest:
    return PublishPolicyRequest(**{"run_id": "run", "version": version, "disk_path": f"/weights/{version}", **fields})


def pushed(version: int, **fields: Any) -> PublishPolicyRequest:
    return PublishPolicyRequest(run_id="run", version=version, pushed=PushedWeights(), **fields)


class SlowDoor(FakeDoor):
    """Loads weights when the test says so."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.url)
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()

    async def load_weights(self, path: str, version: str, *, flush: bool) -> WeightsLoaded:
        self.loading.set()
        await self.may_load.wait()
        return await super().load_weights(path, version, flush=flush)


class Watch:
    """One PublishPolicy call, read message by message."""

    def __init__(self, rig: Rig, request: PublishPolicyRequest) -> None:
        self.call = rig.trainer.PublishPolicy(request)
        self.messages: list[PublishPolicyResponse] = []

    async def until(self, state: int, engine_id: str = "") -> PublishPolicyResponse:
        """Read up to this state, of this or any engine."""
        while True:
            message = await asyncio.wait_for(self.call.read(), 5)
            assert message is not grpc.aio.EOF, self.messages
            self.messages.append(message)
            if message.engine.state == state and engine_id in ("", message.engine.engine_id):
                return message

    async def end(self) -> PublishPolicyResponse:
        """Read to the summary, which must be the last message."""
        async with asyncio.timeout(5):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.messages.append(message)
        assert [message.WhichOneof("update") for message in self.messages].count("summary") == 1
        return self.messages[-1]

    def states(self, engine_id: str) -> list[str]:
        return [
            StateMessage.Name(message.engine.state).removeprefix("UPDATE_STATE_").lower()
            for message in self.messages
            if message.engine.engine_id == engine_id
        ]


def ids(rig: Rig) -> list[str]:
    return [engine.engine_id for engine in rig.server.engines.engines()]


async def test_a_version_from_disk_reaches_every_engine() -> None:
    async with running_server(engines=TWO) as rig:
        watch = Watch(rig, disk(5))
        end = await watch.end()
        assert list(end.summary.updated_engine_ids) == ids(rig)
        assert not end.summary.failed
        assert end.policy_version == 5 and end.engine_count == 2
        for engine_id, url in zip(ids(rig), TWO, strict=True):
            states = watch.states(engine_id)
            assert states[-1] == "updated" and "loading" in states and "verifying" in states
            assert all(message.engine.url == url for message in watch.messages if message.engine.engine_id == engine_id)
        elapsed = [message.elapsed_seconds for message in watch.messages]
        assert elapsed == sorted(elapsed)
        for engine in (await rig.engines.ListEngines(ListEnginesRequest())).engines:
            assert (engine.policy_version, engine.engine_policy_version) == (5, "5")
            assert engine.state == ENGINE_STATE_READY and engine.held_because == ""
        assert (await rig.trainer.GetBudget(GetBudgetRequest(run_id="run"))).policy_version == 5
        for door in rig.doors.values():
            assert ("load_weights", "/weights/5", "5", False) in door.controls
            assert door.paused is None


@pytest.mark.parametrize(
    ("mode", "pause"),
    [
        (UPDATE_MODE_DRAIN, DoorPause.RETRACT),
        (UPDATE_MODE_ABORT_AND_RESUME, DoorPause.ABORT),
        (UPDATE_MODE_RETRACT, DoorPause.RETRACT),
        (UPDATE_MODE_IN_PLACE, DoorPause.IN_PLACE),
    ],
)
async def test_each_mode_pauses_its_own_way(mode: Any, pause: DoorPause) -> None:
    async with running_server() as rig:
        assert (await Watch(rig, disk(1, mode=mode)).end()).summary.updated_engine_ids
        assert ("pause", pause) in rig.door.controls
        flushes = [call for call in rig.door.controls if call[0] == "flush"]
        assert bool(flushes) == (mode != UPDATE_MODE_IN_PLACE)  # the default of `cache`


async def test_an_engine_that_is_being_updated_says_why_it_is_held() -> None:
    async with running_server(make_door=SlowDoor) as rig:
        watch = Watch(rig, disk(5))
        await watch.until(UPDATE_STATE_LOADING)
        (engine,) = (await rig.engines.ListEngines(ListEnginesRequest())).engines
        assert engine.state == ENGINE_STATE_HELD and engine.held_because
        assert engine.policy_version == 0
        rig.door.may_load.set()  # type: ignore[attr-defined]
        await watch.end()


async def test_nobody_has_to_watch_and_anybody_may_join() -> None:
    async with running_server(make_door=SlowDoor) as rig:
        first = Watch(rig, disk(5))
        await first.until(UPDATE_STATE_LOADING)
        first.call.cancel()
        second = Watch(rig, disk(5))
        joined = await second.until(UPDATE_STATE_LOADING)
        assert len(second.messages) == 1  # it begins with where the engine is, not with where it was
        assert joined.elapsed_seconds >= first.messages[-1].elapsed_seconds
        third = Watch(rig, disk(5))
        await third.until(UPDATE_STATE_LOADING)
        rig.door.may_load.set()  # type: ignore[attr-defined]
        assert (await second.end()).summary == (await third.end()).summary
        assert [call[0] for call in rig.door.controls].count("load_weights") == 1
        assert rig.server.state.publications.watched == 0

        again = Watch(rig, disk(5))
        end = await again.end()
        assert len(again.messages) == 1 and not end.summary.failed
        assert [call[0] for call in rig.door.controls].count("load_weights") == 1


async def test_two_versions_follow_each_other() -> None:
    async with running_server(make_door=SlowDoor) as rig:
        first = Watch(rig, disk(5))
        await first.until(UPDATE_STATE_LOADING)
        second = Watch(rig, disk(6))
        await until(lambda: rig.server.state.publications.watched == 2)
        rig.door.may_load.set()  # type: ignore[attr-defined]
        assert (await first.end()).policy_version == 5
        assert (await second.end()).policy_version == 6
        loads = [call[2] for call in rig.door.controls if call[0] == "load_weights"]
        assert loads == ["5", "6"]


async def test_a_failed_engine_is_named_and_a_retry_touches_only_it() -> None:
    async with running_server(engines=TWO) as rig:
        bad = rig.doors[TWO[1]]
        bad.control_faults["load_weights"] = EngineFault(DoorFault.REFUSED, "no such file")
        watch = Watch(rig, disk(5))
        end = await watch.end()
        assert list(end.summary.updated_engine_ids) == ids(rig)[:1]
        (failed,) = end.summary.failed
        assert (failed.engine_id, failed.state, failed.url) == (ids(rig)[1], UPDATE_STATE_FAILED, TWO[1])
        assert "no such file" in failed.message
        held = {engine.url: engine for engine in (await rig.engines.ListEngines(ListEnginesRequest())).engines}[TWO[1]]
        assert held.state == ENGINE_STATE_HELD and "no such file" in held.held_because

        del bad.control_faults["load_weights"]
        calls = len(rig.doors[TWO[0]].controls)
        end = await Watch(rig, disk(5)).end()
        assert not end.summary.failed
        assert len(rig.doors[TWO[0]].controls) == calls


@pytest.mark.parametrize(
    ("request_", "code", "reason", "fields"),
    [
        (disk(5, run_id=""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["run_id"]),
        (disk(0), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["version"]),
        (disk(-1), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["version"]),
        (disk(5, disk_path=""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["disk_path"]),
        (PublishPolicyRequest(run_id="run", version=5), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["weights"]),
        (disk(5, mode=99, cache=98), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ["mode", "cache"]),
        (
            disk(5, mode=UPDATE_MODE_IN_PLACE, cache=CACHE_HANDLING_FLUSH),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            ["cache"],
        ),
        (disk(3), grpc.StatusCode.FAILED_PRECONDITION, "VERSION_BACKWARDS", ["version"]),
        (disk(5, trainer_epoch=1), grpc.StatusCode.ABORTED, "FENCED", []),
    ],
)  # fmt: skip
async def test_what_cannot_be_published_is_refused(
    request_: PublishPolicyRequest, code: grpc.StatusCode, reason: str, fields: list[str]
) -> None:
    async with running_server() as rig:
        await Watch(rig, disk(4, trainer_epoch=2)).end()
        if not request_.trainer_epoch:
            request_.trainer_epoch = 2
        calls = len(rig.door.controls)
        details = await refused(rig.trainer.PublishPolicy(request_).read())
        assert (details.code, details.reason) == (code, reason)
        assert details.fields == fields
        assert len(rig.door.controls) == calls
        assert rig.server.state.publications.watched == 0


async def test_pushed_weights_are_waited_for_and_confirmed() -> None:
    async with running_server(engines=TWO) as rig:
        watch = Watch(rig, pushed(5))
        first, second = ids(rig)
        await watch.until(UPDATE_STATE_PUSHING, first)
        await watch.until(UPDATE_STATE_PUSHING, second)
        assert all(("begin_update",) in door.controls for door in rig.doors.values())
        await rig.trainer.ConfirmWeights(ConfirmWeightsRequest(run_id="run", version=5, engine_id=first))
        await watch.until(UPDATE_STATE_UPDATED, first)
        await rig.trainer.ConfirmWeights(ConfirmWeightsRequest(run_id="run", version=5))
        end = await watch.end()
        assert list(end.summary.updated_engine_ids) == [first, second]
        for door in rig.doors.values():
            names = [call[0] for call in door.controls]
            assert names.index("begin_update") < names.index("end_update") < names.index("name_version")
            assert "load_weights" not in names


async def test_an_engine_waits_for_pushed_weights_only_when_it_is_open_for_them() -> None:
    class SlowToOpen(FakeDoor):
        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(settings.url)
            self.opening, self.may_open = asyncio.Event(), asyncio.Event()

        async def begin_update(self) -> None:
            self.opening.set()
            await self.may_open.wait()
            await super().begin_update()

    async with running_server(make_door=SlowToOpen) as rig:
        watch = Watch(rig, pushed(5))
        await watch.until(UPDATE_STATE_PUSHING - 2)  # FLUSHING
        door: Any = rig.door
        await asyncio.wait_for(door.opening.wait(), 5)
        confirm = ConfirmWeightsRequest(run_id="run", version=5, engine_id=ids(rig)[0])
        early = await refused(rig.trainer.ConfirmWeights(confirm))
        assert (early.code, early.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_PUSHING")
        door.may_open.set()
        await watch.until(UPDATE_STATE_PUSHING)
        await rig.trainer.ConfirmWeights(confirm)
        await rig.trainer.ConfirmWeights(confirm)  # as after a lost answer
        assert (await watch.end()).summary.updated_engine_ids
        await rig.trainer.ConfirmWeights(confirm)
        assert watch.states(ids(rig)[0]).count("pushing") == 1


async def test_a_push_that_failed_fails_its_engine() -> None:
    async with running_server() as rig:
        watch = Watch(rig, pushed(5))
        await watch.until(UPDATE_STATE_PUSHING)
        await rig.trainer.ConfirmWeights(ConfirmWeightsRequest(run_id="run", version=5, error="bucket 3: NCCL timeout"))
        end = await watch.end()
        assert not end.summary.updated_engine_ids
        assert "bucket 3: NCCL timeout" in end.summary.failed[0].message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"run_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"run_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"version": 4}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"pool": "reward"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"engine_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"error": "x" * 5000}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_confirmation_that_fits_nothing_is_refused(fields: dict[str, Any], code: grpc.StatusCode) -> None:
    async with running_server() as rig:
        watch = Watch(rig, pushed(5))
        await watch.until(UPDATE_STATE_PUSHING)
        request = ConfirmWeightsRequest(**{"run_id": "run", "version": 5, **fields})
        assert (await refused(rig.trainer.ConfirmWeights(request))).code == code
        await rig.trainer.ConfirmWeights(ConfirmWeightsRequest(run_id="run", version=5))
        await watch.end()


@pytest.mark.parametrize("again", [False, True])
async def test_an_engine_that_is_removed_while_it_is_updated_is_not_left_paused(again: bool) -> None:
    async with running_server(make_door=SlowDoor) as rig:
        watch = Watch(rig, disk(5))
        await watch.until(UPDATE_STATE_LOADING)
        door: Any = rig.door
        (engine_id,) = ids(rig)
        await rig.engines.RemoveEngine(RemoveEngineRequest(engine_id=engine_id))
        if again:
            await rig.engines.RegisterEngine(RegisterEngineRequest(url=door.url))
        (failure,) = (await watch.end()).summary.failed
        assert (failure.engine_id, failure.message) == (engine_id, "the engine was removed")
        assert door.paused is not None and not door.closed
        door.may_load.set()
        await until(lambda: door.closed)
        assert door.paused is None and [call[0] for call in door.controls][-1] == "resume"


async def test_a_server_that_stops_tells_its_watchers() -> None:
    hasty = SchedulerConfig(executor=ExecutorSettings(abort_seconds=0.2))
    async with running_server(make_door=SlowDoor, scheduler=hasty) as rig:
        watch = Watch(rig, disk(5))
        await watch.until(UPDATE_STATE_LOADING)
        stop = asyncio.create_task(rig.server.stop(grace_seconds=0.0))
        await until(lambda: rig.server.state.draining)
        late = await refused(rig.trainer.PublishPolicy(disk(6)).read())
        assert (late.code, late.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTDOWN")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await watch.end()
        await stop
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_stops_lets_a_publication_end_within_its_grace() -> None:
    async with running_server(make_door=SlowDoor) as rig:
        watch = Watch(rig, disk(5))
        await watch.until(UPDATE_STATE_LOADING)
        stop = asyncio.create_task(rig.server.stop(grace_seconds=30.0))
        await until(lambda: rig.server.state.draining)
        rig.door.may_load.set()  # type: ignore[attr-defined]
        assert (await watch.end()).summary.updated_engine_ids
        await stop
        assert rig.door.paused is None


async def test_a_pause_of_ours_is_no_trouble_with_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_server(make_door=SlowDoor) as rig:
        door: Any = rig.door
        registrations = door.registrations
        watch = Watch(rig, disk(5))
        await watch.until(UPDATE_STATE_LOADING)
        door.is_ready = False  # as SGLang says of itself while it is paused
        polls = door.polls
        await until(lambda: door.polls > polls + 3)
        (view,) = rig.server.loop.core.engine_views()
        assert view.state != "lost" and not view.breaker_open and view.faults == 0
        door.is_ready = True
        door.may_load.set()
        await watch.end()
        polls = door.polls
        await until(lambda: door.polls > polls + 1)
        assert door.registrations == registrations
    assert "engine_readiness" not in "".join(capsys.readouterr())


async def test_what_a_paused_engine_reports_is_not_taken_for_news() -> None:
    async with running_server() as rig:
        heard: list[Any] = []
        rig.server.loop.observers.append(lambda event, result: heard.append(event))
        await until(lambda: any(isinstance(event, EngineLoad) for event in heard))
        rig.door.is_ready = False
        await until(lambda: any(isinstance(event, EngineReadiness) for event in heard))
        del heard[:]
        polls = rig.door.polls
        await until(lambda: rig.door.polls > polls + 3)
        assert not [event for event in heard if isinstance(event, EngineLoad | EngineReadiness)]
        rig.door.is_ready = True
        await until(lambda: any(isinstance(event, EngineLoad) for event in heard))
        (ready,) = [event for event in heard if isinstance(event, EngineReadiness)]
        assert ready.ready and 0.0 <= ready.age_seconds < 5.0


async def test_readiness_says_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server() as rig:
        answer = asyncio.Event()
        asked = asyncio.Event()

        async def ready() -> bool:
            asked.set()
            await answer.wait()
            return False

        heard: list[EngineReadiness] = []
        rig.server.loop.observers.append(
            lambda event, result: heard.append(event) if isinstance(event, EngineReadiness) else None
        )
        monkeypatch.setattr(rig.door, "ready", ready)
        await asyncio.wait_for(asked.wait(), 5)
        asked_at = rig.server.loop.clock()
        await until(lambda: rig.server.loop.clock() - asked_at > 0.02)
        answer.set()
        await until(lambda: bool(heard))
        assert heard[0].age_seconds > 0.02


# -- the board and its words ---------------------------------------------------------------------------------------------


def test_words_agree_by_name() -> None:
    for ours, theirs in ((UpdateMode, ModeMessage), (CacheHandling, CacheMessage), (UpdateState, StateMessage)):
        names = {number: name for name, number in theirs.items()}  # type: ignore[attr-defined]
        assert len(names) == len(ours) + 1
        for member in ours:
            assert names[member + 1].endswith(f"_{member.name}")


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        (0, CacheHandling.FLUSH),
        (UPDATE_MODE_DRAIN, CacheHandling.FLUSH),
        (UPDATE_MODE_ABORT_AND_RESUME, CacheHandling.FLUSH),
        (UPDATE_MODE_RETRACT, CacheHandling.FLUSH),
        (UPDATE_MODE_IN_PLACE, CacheHandling.NAMESPACE),
    ],
)
def test_the_default_cache_handling_follows_the_mode(mode: Any, cache: CacheHandling) -> None:
    update = to_publish(disk(5, mode=mode)).update
    assert update.cache is cache
    assert update.mode is (UpdateMode(mode - 1) if mode else UpdateMode.RETRACT)


async def test_a_slow_watcher_holds_bounded_memory_and_gets_the_newest() -> None:
    bench = Bench()
    board = Publications(bench.loop)
    last = 40 * MAX_PENDING
    with board.watch("run", "policy", 5) as watcher:
        for number in range(last):
            state = UpdateState.LOADING if number < last - 3 else UpdateState.UPDATED
            engine_id = f"e{number % 3}"
            progress = PublishProgress("run", "policy", 5, engine_id, state, str(number))
            board.observe(Tick(), [progress])
            assert len(watcher) <= MAX_PENDING
        board.observe(Tick(), [PublishEnded("run", "policy", 5, ("e0", "e1", "e2"), ())])
        newest: dict[str, UpdateState] = {}
        while isinstance(news := await asyncio.wait_for(watcher.next(), 1), Step):
            newest[news.progress.engine_id] = news.progress.state
            assert news.engine_count <= 3
        assert isinstance(news, End)
        assert newest == dict.fromkeys(("e0", "e1", "e2"), UpdateState.UPDATED)
    await bench.loop.close()


async def test_publications_do_not_hear_of_each_other() -> None:
    bench = Bench()
    board = Publications(bench.loop)
    with board.watch("run", "policy", 5) as mine, board.watch("run", "reward", 5) as other:
        board.observe(Tick(), [PublishProgress("run", "policy", 5, "e0", UpdateState.LOADING)])
        board.observe(Tick(), [PublishEnded("run", "policy", 6, (), ())])
        assert isinstance(await asyncio.wait_for(mine.next(), 1), Step)
        board.close(SHUTTING_DOWN)
        assert await asyncio.wait_for(mine.next(), 1) is SHUTTING_DOWN
        assert await asyncio.wait_for(other.next(), 1) is SHUTTING_DOWN
    await bench.loop.close()
