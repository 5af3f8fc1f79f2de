"""The run loop alone, around a scripted core: what is performed, when it ticks, and that every attempt ends."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolloutd.engines.base import AttemptRequest, Engine
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Abort, Action, Control, Dispatch, Refuse
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import AbortReason, Code, FaultKind, PauseMode, Verb
from rolloutd.server.attempt import PROGRESS_SECONDS, PROGRESS_TOKENS, Attempt
from rolloutd.server.loop import QUIET_SECONDS, RunLoop
from tests.server.fake_door import FakeAttempt, FakeDoor, tokens
from tests.server.harness import until


class ScriptedCore:
    """Answers events from a script and remembers them."""

    def __init__(self) -> None:
        self.seen: list[events.Event] = []
        self.script: dict[type, Callable[[Any], list[Action]]] = {}
        self.wants_tick = False
        self.due = math.inf

    def handle(self, event: events.Event, now: float) -> list[Action]:
        self.seen.append(event)
        if isinstance(event, events.Tick):
            self.wants_tick = False
            if now >= self.due:
                self.due = math.inf
        answer = self.script.get(type(event))
        return answer(event) if answer is not None else []

    def next_due(self) -> float:
        return self.due

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


class Bench:
    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.now = 100.0
        self.loop = RunLoop(cast(Scheduler, self.core), 0.01)
        self.door = FakeDoor("http://e", auto=False)
        self.loop.add_door("e", self.door)

    def dispatch(self, attempt_id: str = "a" * 32, engine_id: str = "e") -> None:
        action = Dispatch(attempt_id, engine_id, 1, "run", "r", tokens(4), None, 8, {}, False, 0, None, {})
        self.core.script[events.ResumeRun] = lambda _: [action]
        self.loop.post(events.ResumeRun("run"))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.loop.close()


async def test_a_burst_of_events_is_scheduled_once(bench: Bench) -> None:
    bench.core.wants_tick = True
    for _ in range(50):
        bench.loop.post(events.PauseRun("run"))
    assert bench.core.of(events.Tick) == []
    await bench.loop.after_tick(1.0)
    await asyncio.sleep(0)
    assert len(bench.core.of(events.Tick)) == 1


async def test_a_timer_ticks_when_it_is_due_and_not_before(bench: Bench) -> None:
    bench.core.due = bench.loop.clock() + 0.05
    bench.loop.post(events.PauseRun("run"))
    await bench.loop.after_tick(0.01)
    assert bench.core.of(events.Tick) == []
    await bench.loop.after_tick(1.0)
    assert len(bench.core.of(events.Tick)) >= 1
    assert bench.core.due == math.inf


async def test_an_earlier_timer_replaces_the_armed_one(bench: Bench) -> None:
    bench.core.due = bench.loop.clock() + 60.0
    bench.loop.post(events.PauseRun("run"))
    bench.core.due = bench.loop.clock() + 0.01
    bench.loop.post(events.PauseRun("run"))
    await asyncio.wait_for(bench.loop.after_tick(5.0), 1.0)
    assert bench.core.due == math.inf


async def test_a_scheduling_pass_that_raises_is_logged_and_tried_again(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr("rolloutd.server.loop.FAILED_TICK_SECONDS", 0.01)

    def boom(_: events.Event) -> list[Action]:
        bench.core.script.pop(events.Tick)
        raise AssertionError("a bug in the core")

    bench.core.script[events.Tick] = boom
    bench.core.wants_tick = True
    bench.loop.post(events.PauseRun("run"))
    await until(lambda: len(bench.core.of(events.Tick)) == 2)


async def test_posting_from_inside_the_core_is_refused(bench: Bench) -> None:
    refused = []

    def from_inside(event: events.Event, result: list[Action]) -> None:
        with pytest.raises(RuntimeError, match="Tick posted while") as refusal:
            bench.loop.post(events.Tick())
        refused.append(refusal)

    bench.loop.observers.append(from_inside)
    bench.loop.post(events.PauseRun("run"))
    bench.loop.post(events.PauseRun("run"))  # and it is not left locked
    assert len(refused) == 2


async def test_an_observer_that_fails_costs_nobody_else_the_event(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = []

    def boom(event: events.Event, result: list[Action]) -> None:
        raise ValueError("a bug in an observer")

    bench.loop.observers[:] = [boom, lambda event, result: heard.append(event)]
    bench.core.wants_tick = True
    bench.loop.post(events.PauseRun("run"))
    assert heard == [events.PauseRun("run")]
    assert "a bug in an observer" in capsys.readouterr().out
    bench.loop.observers.clear()
    await until(lambda: bench.core.of(events.Tick))  # and the loop goes on


async def test_a_refused_event_returns_its_refusal(bench: Bench) -> None:
    refusal = Refusal(Code.NOT_FOUND, "NOT_FOUND", "no")
    bench.core.script[events.PauseRun] = lambda _: [Refuse(refusal)]
    assert bench.loop.refusal(events.PauseRun("run")) is refusal
    assert bench.loop.refusal(events.ResumeRun("run")) is None


async def test_an_attempt_reports_its_slice_once(bench: Bench) -> None:
    bench.dispatch()
    (request,) = await bench.door.wait_running(1)
    bench.door.finish(request)
    await bench.loop.wait_idle()
    (ended,) = bench.core.of(events.AttemptEnded)
    assert ended.piece.token_bytes == tokens(8, first=7)
    assert bench.core.of(events.AttemptFailed) == []


@pytest.mark.parametrize(
    ("door", "core"),
    [
        (DoorFault.REFUSED, FaultKind.REFUSED),
        (DoorFault.BUSY, FaultKind.BUSY),
        (DoorFault.BROKEN, FaultKind.BROKEN),
        (DoorFault.SILENT, FaultKind.SILENT),
    ],
)
async def test_a_fault_keeps_its_kind(bench: Bench, door: DoorFault, core: FaultKind) -> None:
    bench.dispatch()
    (request,) = await bench.door.wait_running(1)
    bench.door.fail(request, door)
    await bench.loop.wait_idle()
    assert [failed.fault for failed in bench.core.of(events.AttemptFailed)] == [core]


async def test_an_attempt_on_an_engine_without_a_door_fails(bench: Bench) -> None:
    bench.dispatch(engine_id="gone")
    await bench.loop.wait_idle()
    (failed,) = bench.core.of(events.AttemptFailed)
    assert failed.fault is FaultKind.BROKEN
    assert "gone" in failed.message


async def test_an_attempt_whose_task_is_cancelled_still_reports(bench: Bench) -> None:
    bench.dispatch()
    await bench.door.wait_running(1)
    await bench.loop.close()
    assert len(bench.core.of(events.AttemptFailed)) == 1


async def test_an_abort_reaches_the_door(bench: Bench) -> None:
    bench.dispatch()
    await bench.door.wait_running(1)
    bench.core.script[events.PauseRun] = lambda _: [Abort("a" * 32, "e", AbortReason.CANCEL)]
    bench.loop.post(events.PauseRun("run"))
    await bench.loop.wait_idle()
    assert bench.door.aborted == ["a" * 32]
    assert bench.core.of(events.AttemptEnded)[0].piece.finish_reason == "abort"


async def test_an_abort_in_the_same_turn_as_its_dispatch_is_not_lost(bench: Bench) -> None:
    bench.core.script[events.PauseRun] = lambda _: [Abort("a" * 32, "e", AbortReason.CANCEL)]
    bench.dispatch()
    bench.loop.post(events.PauseRun("run"))
    await asyncio.wait_for(bench.loop.wait_idle(), 5)
    assert len(bench.core.of(events.AttemptEnded)) == 1


async def test_a_removed_door_is_closed_after_its_last_attempt(bench: Bench) -> None:
    bench.dispatch()
    (request,) = await bench.door.wait_running(1)
    bench.loop.remove_door("e")
    await asyncio.sleep(0)
    assert not bench.door.closed
    bench.door.finish(request)
    await until(lambda: bench.door.closed)


async def test_a_removed_engine_is_resumed_when_the_loop_closes_before_its_work_has_ended(bench: Bench) -> None:
    bench.dispatch()
    await bench.door.wait_running(1)
    bench.core.script[events.PauseRun] = lambda _: [Control(1, "e", Verb.PAUSE, PauseMode.IN_PLACE)]
    bench.loop.post(events.PauseRun("run"))
    await until(lambda: bench.door.paused is not None)
    bench.loop.remove_door("e")
    await bench.loop.close()
    assert bench.door.paused is None and bench.door.closed


async def test_progress_is_thinned_out_but_the_first_token_is_not() -> None:
    bench = Bench()
    bench.loop.clock = lambda: bench.now
    bench.dispatch()
    (request,) = await bench.door.wait_running(1)
    for count in range(1, 2 * PROGRESS_TOKENS + 2):
        bench.door.report(request, count)
        await turns()
    seen = [progress.generated_tokens for progress in bench.core.of(events.AttemptProgress)]
    assert seen == [1, 1 + PROGRESS_TOKENS, 1 + 2 * PROGRESS_TOKENS]
    bench.now += 2 * PROGRESS_SECONDS
    bench.door.report(request, 2 * PROGRESS_TOKENS + 2)
    await turns()
    assert len(bench.core.of(events.AttemptProgress)) == 4
    bench.door.report(request, 4 * PROGRESS_TOKENS)
    bench.door.finish(request)
    await bench.loop.wait_idle()
    assert len(bench.core.of(events.AttemptProgress)) == 4, "what comes with the end is told by the end"
    await bench.loop.close()


async def test_it_is_not_quiet_right_after_work(bench: Bench) -> None:
    bench.core.statistics = lambda: SimpleNamespace(queued={})
    bench.loop.clock = lambda: bench.now
    assert bench.loop.is_quiet()
    bench.dispatch()
    (request,) = await bench.door.wait_running(1)
    assert not bench.loop.is_quiet()
    bench.door.finish(request)
    await bench.loop.wait_idle()
    assert not bench.loop.is_quiet(), "under a light load most moments look like this one"
    bench.now += QUIET_SECONDS
    assert bench.loop.is_quiet()


async def test_an_end_that_is_not_posted_yet_is_told_once_when_the_loop_closes(bench: Bench) -> None:
    ends: list[Callable[[Any], None]] = []
    bench.door.begin = lambda request, on_progress, on_end: ends.append(on_end) or FakeAttempt(asyncio.Future())
    bench.dispatch()
    bench.dispatch("b" * 32)
    await asyncio.sleep(0)
    ends[0](bench.door.slice_of(AttemptRequest("a" * 32, 1)))
    await bench.loop.close()
    await bench.loop.wait_idle()
    assert [end.attempt_id[0] for end in bench.core.of(events.AttemptEnded)] == ["a"]
    assert [end.attempt_id[0] for end in bench.core.of(events.AttemptFailed)] == ["b"]


async def test_a_bug_at_one_end_keeps_no_other_end_back(bench: Bench) -> None:
    def boom(event: events.AttemptEnded) -> list[Action]:
        if event.attempt_id[0] == "a":
            raise AssertionError("a bug in the core")
        return []

    bench.core.script[events.AttemptEnded] = boom
    bench.dispatch()
    bench.dispatch("b" * 32)
    first, second = await bench.door.wait_running(2)
    bench.door.finish(first)
    bench.door.finish(second)
    await asyncio.wait_for(bench.loop.wait_idle(), 5)
    assert [end.attempt_id[0] for end in bench.core.of(events.AttemptEnded)] == ["a", "b"]


class RememberingDoor:
    """What it returns knows who asked, as a real door's attempt does."""

    url = "http://r"

    def __init__(self) -> None:
        self.ends: list[Callable[[Any], None]] = []

    def begin(self, request: Any, on_progress: Any, on_end: Callable[[Any], None]) -> SimpleNamespace:
        self.ends.append(on_end)
        return SimpleNamespace(on_end=on_end, on_progress=on_progress, hang_up=lambda: None)


async def test_an_attempt_that_ended_leaves_nothing_to_the_garbage_collector(bench: Bench) -> None:
    door = RememberingDoor()
    bench.loop.add_door("r", cast(Engine, door))
    gc.collect()
    gc.disable()
    try:
        bench.dispatch(engine_id="r")
        bench.core.script.clear()
        await until(lambda: bool(door.ends))
        assert any(isinstance(thing, Attempt) for thing in gc.get_objects())
        door.ends.pop()(bench.door.slice_of(AttemptRequest("a" * 32, 1)))
        await bench.loop.wait_idle()
        await asyncio.sleep(0)
        assert not any(isinstance(thing, Attempt) for thing in gc.get_objects())
    finally:
        gc.enable()


async def turns() -> None:
    """The turns of the event loop that progress waits for the attempt's end."""
    for _ in range(3):
        await asyncio.sleep(0)
