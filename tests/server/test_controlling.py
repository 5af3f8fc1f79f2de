"""Control calls through the run loop: each verb at the door, each end as one event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rolloutd.engines.base import EngineFault
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.engines.control import PauseMode as DoorPause
from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Action, Control, Dispatch
from rolloutd.scheduler.states import FaultKind, PauseMode, Verb
from rolloutd.server.controlling import FLUSH_SECONDS
from tests.server.fake_door import FakeDoor
from tests.server.harness import until
from tests.server.test_loop import Bench


class HeldDoor(FakeDoor):
    """Its flush waits for the test."""

    def __init__(self) -> None:
        super().__init__("http://held", auto=False)
        self.flushing = asyncio.Event()
        self.flush_may_end = asyncio.Event()

    async def flush(self, timeout_seconds: float) -> bool:
        self.flushing.set()
        await self.flush_may_end.wait()
        return True


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.loop.close()


def ask(bench: Bench, *controls: Action) -> None:
    bench.core.script[events.ResumeRun] = lambda _: list(controls)
    bench.loop.post(events.ResumeRun("run"))


async def done(bench: Bench) -> list[Any]:
    await asyncio.wait_for(bench.loop.wait_idle(), 5)
    return [one for one in bench.core.seen if isinstance(one, events.ControlEnded | events.ControlFailed)]


@pytest.mark.parametrize(
    ("control", "call"),
    [
        (Control(7, "e", Verb.PAUSE, mode=PauseMode.ABORT), ("pause", DoorPause.ABORT)),
        (Control(7, "e", Verb.PAUSE, mode=PauseMode.RETRACT), ("pause", DoorPause.RETRACT)),
        (Control(7, "e", Verb.PAUSE, mode=PauseMode.IN_PLACE), ("pause", DoorPause.IN_PLACE)),
        (Control(7, "e", Verb.RESUME), ("resume",)),
        (Control(7, "e", Verb.FLUSH), ("flush", FLUSH_SECONDS)),
        (Control(7, "e", Verb.LOAD, path="/w", label="5"), ("load_weights", "/w", "5", False)),
        (Control(7, "e", Verb.BEGIN), ("begin_update",)),
        (Control(7, "e", Verb.END), ("end_update",)),
        (Control(7, "e", Verb.NAME, label="5"), ("name_version", "5")),
        (Control(7, "e", Verb.VERIFY), ("weight_version",)),
        (Control(7, "e", Verb.RELEASE_MEMORY, tags=("kv_cache", "weights")), ("release_memory", "kv_cache", "weights")),
        (Control(7, "e", Verb.RESUME_MEMORY, tags=("weights",)), ("resume_memory", "weights")),
    ],
    ids=lambda value: value.verb.name.lower() if isinstance(value, Control) else "",
)
async def test_each_verb_is_one_call_at_the_door(bench: Bench, control: Control, call: tuple[object, ...]) -> None:
    ask(bench, control)
    (end,) = await done(bench)
    assert bench.door.controls == [call]
    assert isinstance(end, events.ControlEnded)
    assert (end.engine_id, end.control_id) == ("e", 7)


async def test_every_verb_is_covered() -> None:
    marks = test_each_verb_is_one_call_at_the_door.pytestmark  # type: ignore[attr-defined]
    assert {control.verb for control, _ in marks[0].args[1]} == set(Verb)


async def test_a_refused_flush_and_the_label_are_told(bench: Bench) -> None:
    bench.door.flushes = False
    bench.door.version = "4"
    ask(bench, Control(1, "e", Verb.FLUSH), Control(2, "e", Verb.VERIFY))
    ends = {end.control_id: end for end in await done(bench)}
    assert not ends[1].flushed
    assert ends[2].label == "4"


@pytest.mark.parametrize("kind", list(DoorFault))
async def test_a_fault_keeps_its_kind_and_its_message(bench: Bench, kind: DoorFault) -> None:
    bench.door.control_faults["load_weights"] = EngineFault(kind, "the engine's own words")
    ask(bench, Control(7, "e", Verb.LOAD, path="/w", label="5"))
    assert await done(bench) == [events.ControlFailed("e", 7, FaultKind[kind.name], "the engine's own words")]


async def test_a_bug_in_the_door_is_told_as_broken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resume() -> None:
        raise KeyError("oops")

    monkeypatch.setattr(bench.door, "resume", resume)
    ask(bench, Control(7, "e", Verb.RESUME))
    (end,) = await done(bench)
    assert isinstance(end, events.ControlFailed) and end.fault is FaultKind.BROKEN
    assert "KeyError" in end.message


async def test_a_call_to_an_engine_without_a_door_fails(bench: Bench) -> None:
    ask(bench, Control(7, "gone", Verb.RESUME))
    (end,) = await done(bench)
    assert isinstance(end, events.ControlFailed) and "gone" in end.message


async def test_the_next_call_may_follow_from_the_end_of_the_one_before(bench: Bench) -> None:
    steps = [Control(2, "e", Verb.FLUSH), Control(3, "e", Verb.RESUME)]
    bench.core.script[events.ControlEnded] = lambda _: [steps.pop(0)] if steps else []
    ask(bench, Control(1, "e", Verb.PAUSE))
    assert [end.control_id for end in await done(bench)] == [1, 2, 3]
    assert [call[0] for call in bench.door.controls] == ["pause", "flush", "resume"]


async def test_a_removed_door_is_closed_after_its_last_control_call(bench: Bench) -> None:
    door = HeldDoor()
    bench.loop.add_door("held", door)
    ask(bench, Control(7, "held", Verb.FLUSH))
    await asyncio.wait_for(door.flushing.wait(), 5)
    assert bench.loop.attempts_on("held") == 0
    bench.loop.remove_door("held")
    assert not bench.loop.is_quiet()
    door.flush_may_end.set()
    assert len(await done(bench)) == 1
    await until(lambda: door.closed)


async def test_a_call_that_the_end_of_the_loop_cuts_off_is_not_told_and_starts_nothing(bench: Bench) -> None:
    door = HeldDoor()
    bench.loop.add_door("held", door)
    bench.core.script[events.AttemptFailed] = lambda _: [Control(8, "held", Verb.RESUME)]
    ask(bench, Control(7, "held", Verb.FLUSH))
    bench.dispatch(engine_id="held")
    await asyncio.wait_for(door.flushing.wait(), 5)
    await door.wait_running(1)
    await bench.loop.close()
    assert bench.core.of(events.AttemptFailed)
    assert await done(bench) == []
    assert door.controls == []


async def test_the_namespace_of_an_attempt_reaches_the_door(bench: Bench) -> None:
    ask(
        bench,
        Dispatch("a" * 32, "e", 1, "run", "r", b"\1\0\0\0", None, 8, {}, False, 0, None, {}, cache_salt="5"),
    )
    (request,) = await bench.door.wait_running(1)
    assert request.cache_salt == "5"
