"""The SGLang door's control calls against a simulated server: what each does, and what the door refuses to send."""

from __future__ import annotations

import asyncio

import pytest

from rolloutd.engines.base import FaultKind
from rolloutd.engines.control import PauseMode, WeightsLoaded
from rolloutd.engines.sglang import Timeouts
from tests.engines.door_kit import ABORT, IN_PLACE, LONG, RETRACT, Attempt, are_its_own, begun, both, fault_of, versions

# ---- pause and resume -----------------------------------------------------------------------------------------------


async def test_abort_ends_work_with_what_it_has_and_a_flush_works() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, LONG)
        await door.pause(ABORT)
        answer = await attempt.task
        assert answer.finish_reason == "abort" and answer.token_bytes and are_its_own(answer)
        assert await door.ready() is False and (await sim.state())["paused"]
        assert await door.flush(0) is True
        await door.resume()
        assert await door.ready() is True


@pytest.mark.parametrize("mode", [RETRACT, IN_PLACE])
async def test_held_work_goes_on_after_the_pause(mode: PauseMode) -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(mode)
        assert await door.ready() is False
        gated = Attempt(door, 5)
        await sim.until(lambda state: gated.id in state["gated_rids"])
        assert await door.flush(0) is (mode is RETRACT)  # at once: the engine handles it after the pause
        assert (await door.load()).running_rollouts == 1  # frozen, and no fault
        await door.resume()
        answer = await attempt.task
        assert len(answer.token_bytes) == 4 * 400 and are_its_own(answer)
        assert len((await gated.task).token_bytes) == 4 * 5


async def test_resume_without_a_pause_does_nothing() -> None:
    async with both() as (_, door):
        await door.resume()
        assert await door.ready() is True


async def test_abort_after_in_place_is_refused_because_the_engine_would_never_answer() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, LONG)
        await door.pause(IN_PLACE)
        fault = await fault_of(door.pause(ABORT))
        assert fault.kind is FaultKind.REFUSED and "resume first" in fault.message
        assert (await sim.state())["running_rids"] == [attempt.id]
        await door.resume()
        await door.pause(ABORT)
        assert (await attempt.task).finish_reason == "abort"


async def test_a_pause_without_an_answer_counts_as_a_pause() -> None:
    async with both(control_seconds=0.3, pause_seconds=0.3) as (sim, door):
        await sim.post("/sim/fault", {"kind": "hang", "count": 1})
        assert (await fault_of(door.pause(IN_PLACE))).kind is FaultKind.SILENT
        assert (await fault_of(door.pause(ABORT))).kind is FaultKind.REFUSED
        await door.resume()
        await door.pause(ABORT)


async def test_a_pause_that_was_not_taken_is_none() -> None:
    async with both() as (sim, door):
        sim.process.kill()
        await sim.process.wait()
        for _ in range(2):  # the first may meet the connection that was open
            fault = await fault_of(door.pause(IN_PLACE))
        assert fault.kind is FaultKind.UNREACHED
        assert (await fault_of(door.resume())).kind is FaultKind.UNREACHED


@pytest.mark.parametrize("mode", [RETRACT, IN_PLACE])
async def test_time_in_a_pause_is_no_silence(mode: PauseMode) -> None:
    async with both(idle_seconds=0.4) as (_, door):
        attempt = await begun(door, 400)
        await door.pause(mode)
        gated = Attempt(door, 5)
        done, _ = await asyncio.wait([attempt.task, gated.task], timeout=1.0)
        assert not done
        await door.resume()
        assert (await attempt.task).finish_reason == "length"
        assert (await gated.task).finish_reason == "length"


async def test_silence_after_a_pause_is_silence() -> None:
    async with both(idle_seconds=0.3) as (sim, door):
        attempt = await begun(door, LONG)
        await door.pause(IN_PLACE)
        await sim.post("/sim/fault", {"kind": "stall"})
        await door.resume()
        assert (await fault_of(attempt.task)).kind is FaultKind.SILENT


async def test_an_abort_in_a_pause_in_place_ends_by_hanging_up() -> None:
    async with both(abort_seconds=0.2) as (sim, door):
        attempt = await begun(door, LONG)
        await door.pause(IN_PLACE)
        await door.abort(attempt.id)
        assert (await attempt.task).finish_reason == "abort"
        await door.resume()
        await sim.until(lambda state: not state["running_rids"])


# ---- flush ----------------------------------------------------------------------------------------------------------


async def test_an_abort_of_what_waits_at_the_gate_takes_no_time() -> None:
    async with both() as (sim, door):
        await door.pause(RETRACT)
        gated = Attempt(door, LONG)
        await sim.until(lambda state: gated.id in state["gated_rids"])
        await door.abort(gated.id)
        answer = await gated.task
        assert answer.finish_reason == "abort" and not answer.token_bytes
        await sim.until(lambda state: not state["gated_rids"])
        await door.resume()
        assert (await sim.state())["running_rids"] == []


async def test_flush_says_when_work_is_in_flight_and_waits_for_its_end() -> None:
    async with both() as (_, door):
        attempt = await begun(door, 200)
        assert await door.flush(0) is False
        assert await door.flush(30) is True
        assert (await attempt.task).finish_reason == "length"


async def test_a_refused_flush_is_tried_again() -> None:
    async with both() as (sim, door):
        await sim.post("/sim/fault", {"kind": "flush_refused", "count": 2})
        assert await door.flush(0) is False
        assert await door.flush(30) is True


async def test_a_flush_waits_in_a_retract_pause_where_the_engine_s_own_wait_never_ends() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(RETRACT)
        await sim.post("/sim/fault", {"kind": "flush_refused", "count": 2})
        assert await door.flush(30) is True
        await door.resume()
        assert are_its_own(await attempt.task)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "flush", "flushed"), [(ABORT, True, True), (RETRACT, True, True), (IN_PLACE, False, False)]
)
async def test_new_weights_in_each_mode(mode: PauseMode, flush: bool, flushed: bool) -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(mode)
        assert await door.load_weights("next", "7", flush=flush) == WeightsLoaded(flushed)
        assert await door.weight_version() == "7"
        await door.resume()
        answer = await attempt.task
        assert are_its_own(answer)
        assert versions(answer) == (["default"] if mode is ABORT else ["default", "7"])
        assert (await sim.state())["aborted"] == (1 if mode is ABORT else 0)
        later = await (await begun(door, 3)).task
        assert versions(later) == ["7"] and are_its_own(later)
        # After a retract it is the held attempt's KV, computed anew. In place it is old: what a namespace per version
        # is for.
        assert (later.cached_tokens > 0) is (mode is not ABORT)


async def test_new_weights_without_a_pause_wait_for_work_in_flight() -> None:
    async with both() as (_, door):
        attempt = await begun(door, 200)
        assert await door.load_weights("next", "7", flush=True) == WeightsLoaded(flushed=True)
        assert attempt.task.done() and versions(await attempt.task) == ["default"]


async def test_weights_without_their_flush_are_loaded_and_need_a_flush_and_a_name() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(RETRACT)
        await sim.post("/sim/fault", {"kind": "flush_refused", "count": 2})
        assert await door.load_weights("next", "7", flush=True) == WeightsLoaded(flushed=False)
        assert await door.weight_version() == "default" and (await sim.state())["weight_version"] == "7"
        assert await door.flush(30) is True
        await door.name_version("7")
        assert await door.weight_version() == "7"
        await door.resume()
        answer = await attempt.task
        assert answer.finish_reason == "length" and versions(answer) == ["default", "7"]


async def test_weights_that_can_not_be_loaded_are_refused_with_the_engine_s_words() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await sim.post("/sim/fault", {"kind": "load_fails"})
        await door.pause(IN_PLACE)
        fault = await fault_of(door.load_weights("next", "7", flush=False))
        assert fault.kind is FaultKind.REFUSED and "Cannot find any model weights with `next`" in fault.message
        assert await door.weight_version() == "default"
        await door.resume()
        assert versions(await attempt.task) == ["default"]


async def test_an_engine_that_dies_of_new_weights_is_broken() -> None:
    async with both() as (sim, door):
        await sim.post("/sim/fault", {"kind": "load_kills"})
        await door.pause(RETRACT)
        assert (await fault_of(door.load_weights("next", "7", flush=True))).kind is FaultKind.BROKEN
        assert await sim.process.wait() == 131


async def test_a_load_that_never_ends_is_given_up_on_and_no_second_one_is_sent() -> None:
    async with both(weights_seconds=0.3, control_seconds=0.3) as (sim, door):
        await sim.post("/sim/fault", {"kind": "load_hangs"})
        await door.pause(RETRACT)
        assert (await fault_of(door.load_weights("next", "7", flush=True))).kind is FaultKind.SILENT
        for _ in range(2):  # it would kill the engine
            fault = await fault_of(door.load_weights("next", "7", flush=True))
            assert fault.kind is FaultKind.BUSY and "earlier load" in fault.message
        assert (await fault_of(door.flush(0))).kind is FaultKind.SILENT
        assert await door.weight_version() == "default"
        assert sim.process.returncode is None


async def test_a_load_that_was_given_up_on_is_waited_for_by_the_next() -> None:
    async with both("--weight-load-seconds", "6", weights_seconds=0.1) as (sim, door):
        await door.pause(RETRACT)
        assert (await fault_of(door.load_weights("next", "7", flush=True))).kind is FaultKind.SILENT
        door.timeouts = Timeouts()
        assert await door.load_weights("next", "8", flush=True) == WeightsLoaded(flushed=True)
        assert await door.weight_version() == "8"


async def test_a_load_whose_caller_was_cancelled_counts_as_one_that_may_run() -> None:
    async with both("--weight-load-seconds", "6") as (sim, door):
        await door.pause(RETRACT)
        load = asyncio.create_task(door.load_weights("next", "7", flush=True))
        await sim.until(lambda state: state["in_control_call"])
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert await door.load_weights("next", "8", flush=True) == WeightsLoaded(flushed=True)


async def test_two_loads_at_once_are_refused() -> None:
    async with both("--weight-load-seconds", "6") as (sim, door):
        await door.pause(RETRACT)
        first = asyncio.create_task(door.load_weights("next", "7", flush=True))
        await sim.until(lambda state: state["in_control_call"])
        fault = await fault_of(door.load_weights("next", "8", flush=True))
        assert fault.kind is FaultKind.REFUSED and "another load runs" in fault.message
        assert await first == WeightsLoaded(flushed=True)


async def test_weights_that_others_push_are_bracketed() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(IN_PLACE)
        fault = await fault_of(door.end_update())
        assert fault.kind is FaultKind.REFUSED and "begin_weight_update() first" in fault.message
        await door.begin_update()
        fault = await fault_of(door.begin_update())
        assert fault.kind is FaultKind.REFUSED and "end_weight_update() first" in fault.message
        bucket = {"serialized_named_tensors": ["AA=="], "flush_cache": False}
        assert (await sim.post("/update_weights_from_tensor", bucket))[0] == 200
        assert (await sim.post("/update_weights_from_tensor", bucket | {"weight_version": "7"}))[0] == 200
        await door.end_update()
        assert await door.weight_version() == "7"
        await door.resume()
        assert versions(await attempt.task) == ["default", "7"]


async def test_naming_a_version_aborts_nothing() -> None:
    async with both() as (_, door):
        attempt = await begun(door, 400)
        await door.name_version("7")
        assert await door.weight_version() == "7"
        answer = await attempt.task
        assert answer.finish_reason == "length" and versions(answer) == ["default", "7"]


async def test_empty_words_are_refused_here() -> None:
    async with both() as (_, door):
        for call, field in (
            (door.load_weights("", "7", flush=True), "path"),
            (door.load_weights("next", "", flush=True), "version"),
            (door.name_version(""), "version"),
        ):
            fault = await fault_of(call)
            assert fault.kind is FaultKind.REFUSED and f"{field} is empty" in fault.message


async def test_registration_keeps_the_model_s_name_over_a_load() -> None:
    async with both() as (sim, door):
        before = await door.register()
        await door.load_weights("next", "7", flush=True)
        assert (await sim.call("GET", "/model_info"))[1]["served_model_name"] == "next"
        after = await door.register()
        assert (after.model, after.incarnation, after.weight_version) == (before.model, before.incarnation, "7")


async def test_a_paused_engine_that_loads_is_busy_to_a_registration_and_never_lost() -> None:
    async with both("--weight-load-seconds", "20", control_seconds=0.3) as (sim, door):
        await door.pause(RETRACT)
        load = asyncio.create_task(door.load_weights("next", "7", flush=True))
        await sim.until(lambda state: state["in_control_call"])
        async with asyncio.timeout(5):
            assert (await fault_of(door.register())).kind is FaultKind.BUSY
            assert await door.ready() is False
            await door.load()
        assert await load == WeightsLoaded(flushed=True)
