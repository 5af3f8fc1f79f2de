"""What misleads, blocks or kills in SGLang's control calls, shown by the simulated engine over real HTTP.

trap                                                        test (here, or in the file named)
new calls wait at the gate and are in no load number        test_gated_work_is_in_no_load_number
a gated stream that hangs up is gone                        test_a_gated_stream_that_hangs_up_is_gone
a gated plain call runs although its client left            test_a_gated_plain_call_runs_although_its_client_left
an abort at the gate is forgotten, later ones swallowed     test_an_abort_at_the_gate_is_forgotten
/ready 503 and /ping 200 in a pause                         test_sim_wire_interruptions: test_retract_pause_...
/health hangs, then 503 in a pause                          test_health_hangs_in_a_pause
a pause by abort takes a second whenever work was there     test_sim_wire_interruptions: test_abort_pause_...
... and none otherwise, with fresh loads                    test_an_abort_pause_of_an_idle_engine_returns_at_once
retract puts work back through the queue's limit            test_retract_loses_work_where_the_queue_is_limited
retract, then abort: the last token once more               test_sim_wire_interruptions: test_the_abort_frame_...
in place refuses a flush, retract allows it                 test_sim_interruptions: test_pause_stops_...
in place: an abort waits for the end of the pause           test_sim_interruptions: test_an_abort_in_an_in_place_...
abort after in place blocks, resume too                     test_sim_wire_interruptions: test_abort_pause_after_...
loads are frozen in retract and in place                    test_loads_are_frozen_in_a_pause
an update without a pause waits for all work ...            test_sim_wire_interruptions: test_an_unpaused_update_...
... and all work for it; so does begin                      test_begin_waits_for_work_and_work_for_an_update
begin and end around buckets                                test_sim_wire_interruptions: test_tensor_updates_...
a bucket flushes unless told not to; resume waits for it    test_a_bucket_flushes_by_default
refused flush: weights new, label and name old              test_a_refused_flush_keeps_the_old_names
?timeout= waits for an empty queue, one at a time           test_a_flush_that_waits_wants_an_empty_queue
a load that fails changes nothing                           test_a_load_that_fails_changes_nothing
a load renames the model, but not in /server_info           test_a_load_renames_the_model
a load whose caller left goes on, and blocks the scheduler  test_a_load_whose_caller_left_goes_on
two loads at once in a pause kill                           test_what_kills[two loads]
a load may kill, or never end                               test_what_kills[load], test_a_load_may_never_end
/update_weight_version aborts everything by default         test_naming_a_version_aborts_by_default
weight_versions name the span of each version               test_sim_interruptions: test_a_weight_update_in_place_...
releasing memory while it works kills                       test_what_kills[release]
resuming what is not released kills                         test_what_kills[resume]
using released memory kills                                 test_what_kills[use]
waiting work is no hindrance to a release in a pause        test_memory_can_be_released_under_retracted_work
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from rolloutd.engines.sim.tokens import verify
from tests.engines.sim_wire_kit import LONG, PROMPT, Client, engine, generate, joined

WORDS = {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
UPDATE = {"model_path": "next", "weight_version": "2"}


async def running(sim: Client, rid: str, words: dict[str, Any]) -> asyncio.Task[list[Any]]:
    """A stream that has begun to generate."""
    task = asyncio.create_task(sim.stream({"rid": rid, **words}))
    await sim.until(lambda state: rid in state["running_rids"] and state["generated_tokens"] > 3)
    return task


async def loads(sim: Client) -> dict[str, Any]:
    return dict((await sim.call("GET", "/v1/loads"))[1]["loads"][0])


async def version(sim: Client) -> str:
    return str((await sim.call("GET", "/model_info"))[1]["weight_version"])


# ---- the gate -------------------------------------------------------------------------------------------------------


async def test_gated_work_is_in_no_load_number(sim: Client) -> None:
    await sim.post("/pause_generation", {"mode": "retract"})
    gated = asyncio.create_task(sim.stream({"rid": "gated", **WORDS}))
    await sim.until(lambda state: state["gated_rids"] == ["gated"])
    report = await loads(sim)
    assert (report["num_running_reqs"], report["num_waiting_reqs"]) == (0, 0)
    assert (await sim.post("/flush_cache"))[0] == 200
    await sim.post("/continue_generation")
    assert len(joined(await gated)[0]) == 400


async def test_a_gated_stream_that_hangs_up_is_gone(sim: Client) -> None:
    await sim.post("/pause_generation", {"mode": "in_place"})
    gated = asyncio.create_task(sim.stream({"rid": "gated", **WORDS}))
    await sim.until(lambda state: state["gated_rids"] == ["gated"])
    gated.cancel()
    await sim.until(lambda state: not state["gated_rids"])
    await sim.post("/continue_generation")
    assert len(joined(await sim.stream(WORDS))[0]) == 400
    assert (await sim.state())["generated_tokens"] == 400


async def test_a_gated_plain_call_runs_although_its_client_left() -> None:
    async with engine(scale=5) as sim:
        await sim.post("/pause_generation", {"mode": "retract"})
        call = asyncio.create_task(sim.post("/generate", generate(rid="left", sampling_params=LONG)))
        await sim.until(lambda state: state["gated_rids"] == ["left"])
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await sim.post("/continue_generation")
        await sim.until(lambda state: state["running_rids"] == ["left"])
        state = await sim.until(lambda state: not state["running_rids"])
        assert state["aborted"] == 1 and 0 < state["generated_tokens"] < 20_000


async def test_an_abort_at_the_gate_is_forgotten(sim: Client) -> None:
    await sim.post("/pause_generation", {"mode": "retract"})
    gated = asyncio.create_task(sim.stream({"rid": "gated", **WORDS}))
    await sim.until(lambda state: state["gated_rids"] == ["gated"])
    await sim.post("/abort_request", {"rid": "gated"})
    await sim.post("/continue_generation")
    await sim.until(lambda state: not state["gated_rids"])
    await sim.post("/abort_request", {"rid": "gated"})
    assert joined(await gated)[2]["finish_reason"] == {"type": "length", "length": 400}


async def test_health_hangs_in_a_pause() -> None:
    async with engine(scale=100) as sim:
        assert (await sim.call("GET", "/health"))[0] == 200
        await sim.post("/pause_generation", {"mode": "in_place"})
        before = (await sim.state())["simulated_seconds"]
        assert (await sim.call("GET", "/health"))[0] == 503
        assert (await sim.state())["simulated_seconds"] - before >= 20


# ---- pause ----------------------------------------------------------------------------------------------------------


async def test_an_abort_pause_of_an_idle_engine_returns_at_once() -> None:
    async with engine(scale=0.002) as sim:  # its second would be 500 of ours, more than a test may take
        await sim.post("/pause_generation")
        first = (await loads(sim))["timestamp"]
        assert (await loads(sim))["timestamp"] > first
        assert (await sim.call("GET", "/ready"))[0] == 503


async def test_retract_loses_work_where_the_queue_is_limited() -> None:
    async with engine("--max-queued-requests", "1", "--slots", "2", scale=5) as sim:
        tasks = {rid: await running(sim, rid, {"sampling_params": LONG}) for rid in ("one", "two")}
        await sim.post("/pause_generation", {"mode": "retract"})
        kept = (await sim.until(lambda state: len(state["queued_rids"]) == 1))["queued_rids"][0]
        tasks.pop(kept).cancel()
        (lost,) = tasks.values()
        assert joined(await lost)[2]["finish_reason"]["status_code"] == 503


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_loads_are_frozen_in_a_pause(mode: str) -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", {"sampling_params": LONG})
        await sim.post("/pause_generation", {"mode": mode})
        await sim.until(lambda state: mode == "in_place" or state["queued_rids"] == ["one"])
        report = await loads(sim)
        assert (report["num_running_reqs"], report["num_waiting_reqs"]) == (1, 0)
        assert await loads(sim) == report
        await sim.post("/continue_generation")
        assert (await loads(sim))["timestamp"] > report["timestamp"]
        task.cancel()


# ---- weights --------------------------------------------------------------------------------------------------------


async def test_begin_waits_for_work_and_work_for_an_update() -> None:
    async with engine("--weight-load-seconds", "20", scale=20) as sim:
        task = await running(sim, "one", WORDS)
        begin = asyncio.create_task(sim.post("/begin_weight_update"))
        joined(await task)
        assert (await begin)[0] == 200
        update = asyncio.create_task(sim.post("/update_weights_from_disk", UPDATE))
        await sim.until(lambda state: state["in_control_call"])
        info = asyncio.create_task(sim.call("GET", "/server_info"))  # asks the scheduler
        done, _ = await asyncio.wait([info], timeout=0.1)
        later = asyncio.create_task(sim.stream({"rid": "later", **WORDS}))
        await sim.until(lambda state: state["gated_rids"] == ["later"])
        assert not done and await version(sim) == "default"
        assert (await update)[0] == 200
        assert joined(await later)[2]["weight_versions"] == [{"version": "2", "start": 0, "end": 400}]
        assert (await info)[1]["weight_version"] == "default"  # for ever


async def test_a_bucket_flushes_by_default() -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", {"sampling_params": LONG})
        await sim.post("/pause_generation", {"mode": "in_place"})
        assert (await sim.post("/begin_weight_update"))[0] == 200
        bucket = {"serialized_named_tensors": ["AA=="], "weight_version": "2"}
        status, answer = await sim.post("/update_weights_from_tensor", bucket)
        assert status == 400 and answer["message"].startswith("Weights were updated, but the cache was not flushed")
        assert (await sim.post("/update_weights_from_tensor", bucket | {"flush_cache": False}))[0] == 200
        await sim.post("/sim/fault", {"kind": "load_hangs"})
        sending = asyncio.create_task(sim.post("/update_weights_from_tensor", bucket))
        await sim.until(lambda state: state["in_control_call"])
        resume = asyncio.create_task(sim.post("/continue_generation"))
        done, _ = await asyncio.wait([sending, resume], timeout=0.3)
        assert not done
        for call in (task, sending, resume):
            call.cancel()


async def test_a_refused_flush_keeps_the_old_names(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "flush_refused", "count": 3})
    await sim.post("/pause_generation", {"mode": "retract"})
    status, answer = await sim.post("/update_weights_from_disk", UPDATE)
    assert status == 400 and answer["message"].startswith("Weights were updated, but the cache was not flushed")
    model = (await sim.call("GET", "/model_info"))[1]
    assert (model["weight_version"], model["served_model_name"]) == ("default", "simulated")
    assert [(await sim.post("/flush_cache"))[0] for _ in range(3)] == [400, 400, 200]
    await sim.post("/continue_generation")
    _, _, last = joined(await sim.stream(WORDS))
    assert last["weight_versions"] == [{"version": "2", "start": 0, "end": 400}]


async def test_a_flush_that_waits_wants_an_empty_queue() -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", {"sampling_params": LONG})
        await sim.post("/pause_generation", {"mode": "retract"})
        waiting = asyncio.create_task(sim.post("/flush_cache?timeout=0.3"))
        while (answer := await sim.post("/flush_cache")) == (200, "Cache flushed.\n"):
            assert not waiting.done()
        assert answer == (400, "Another flush_cache is already in progress.")
        assert await waiting == (400, "Timed out waiting for idle state.")
        assert (await sim.post("/flush_cache"))[0] == 200
        task.cancel()
        await sim.until(lambda state: not state["queued_rids"])
        assert (await sim.post("/flush_cache?timeout=5"))[0] == 200


async def test_a_load_that_fails_changes_nothing() -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", WORDS)
        await sim.post("/sim/fault", {"kind": "load_fails"})
        await sim.post("/pause_generation", {"mode": "in_place"})
        status, answer = await sim.post("/update_weights_from_disk", UPDATE)
        assert status == 400 and not answer["success"] and "Cannot find any model weights" in answer["message"]
        assert await version(sim) == "default"
        await sim.post("/continue_generation")
        tokens, _, last = joined(await task)
        assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 400}]
        assert verify(PROMPT, tokens, ignore_eos=True) is None


async def test_a_load_renames_the_model(sim: Client) -> None:
    assert (await sim.post("/update_weights_from_disk", UPDATE))[0] == 200
    model, server = (await sim.call("GET", "/model_info"))[1], (await sim.call("GET", "/server_info"))[1]
    assert (model["served_model_name"], model["weight_version"]) == ("next", "2")
    assert (server["served_model_name"], server["weight_version"]) == ("simulated", "default")


async def test_a_load_whose_caller_left_goes_on() -> None:
    async with engine("--weight-load-seconds", "4", scale=20) as sim:
        await sim.post("/pause_generation")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await sim.post("/update_weights_from_disk", UPDATE)
        assert await version(sim) == "default"
        assert (await sim.post("/flush_cache"))[0] == 200  # the scheduler comes to it after the load
        assert await version(sim) == "2"


async def test_a_load_may_never_end(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "load_hangs"})
    await sim.post("/pause_generation")
    calls = [
        asyncio.create_task(sim.post("/update_weights_from_disk", UPDATE)),
        asyncio.create_task(sim.post("/flush_cache")),
        asyncio.create_task(sim.call("GET", "/server_info")),
    ]
    done, _ = await asyncio.wait(calls, timeout=0.3)
    assert not done and await version(sim) == "default"
    assert (await sim.post("/continue_generation"))[0] == 200  # sent, not carried out
    for call in calls:
        call.cancel()


async def test_naming_a_version_aborts_by_default() -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", {"sampling_params": LONG})
        await sim.post("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert not task.done() and await version(sim) == "2"
        await sim.post("/update_weight_version", {"new_version": "3"})
        assert joined(await task)[2]["finish_reason"]["type"] == "abort"


# ---- memory, and what kills -----------------------------------------------------------------------------------------


async def test_memory_can_be_released_under_retracted_work() -> None:
    async with engine(scale=20) as sim:
        task = await running(sim, "one", WORDS)
        await sim.post("/pause_generation", {"mode": "retract"})
        assert await sim.post("/release_memory_occupation", {}) == (200, None)
        assert (await sim.state())["released_memory"] == ["cuda_graph", "kv_cache", "weights"]
        assert await sim.post("/resume_memory_occupation", {"tags": ["weights"]}) == (200, None)
        assert (await sim.post("/update_weights_from_disk", UPDATE))[0] == 200
        assert await sim.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}) == (200, None)
        await sim.post("/continue_generation")
        assert [span["version"] for span in joined(await task)[2]["weight_versions"]] == ["default", "2"]
        await sim.stream({"input_ids": PROMPT, **WORDS})
        before = (await sim.state())["cached_tokens"]
        await sim.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        await sim.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await sim.stream({"input_ids": PROMPT, **WORDS})
        assert (await sim.state())["cached_tokens"] == before


async def _release_while_working(sim: Client) -> None:
    await running(sim, "one", {"sampling_params": LONG})
    await sim.post("/release_memory_occupation", {"tags": ["kv_cache"]})


async def _resume_unreleased(sim: Client) -> None:
    await sim.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    await sim.post("/resume_memory_occupation", {"tags": ["kv_cache", "kv_cache"]})


async def _use_released(sim: Client) -> None:
    await sim.post("/release_memory_occupation", {})
    await sim.stream(WORDS)


async def _two_loads(sim: Client) -> None:
    await sim.post("/pause_generation", {"mode": "retract"})
    await asyncio.gather(*(sim.post("/update_weights_from_disk", UPDATE) for _ in range(2)))


async def _load_told_to(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "load_kills"})
    await sim.post("/update_weights_from_disk", UPDATE)


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(_release_while_working, id="release"),
        pytest.param(_resume_unreleased, id="resume"),
        pytest.param(_use_released, id="use"),
        pytest.param(_two_loads, id="two loads"),
        pytest.param(_load_told_to, id="load"),
    ],
)
async def test_what_kills(deed: Callable[[Client], Awaitable[None]]) -> None:
    async with engine(scale=20) as sim:
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await deed(sim)
        assert await sim.process.wait() == 131
