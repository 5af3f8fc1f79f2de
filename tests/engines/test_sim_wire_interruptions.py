"""The simulated engine's process over real HTTP: aborts, hang-ups, refusals, pauses, new weights."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from rolloutd.engines.sim.tokens import verify
from tests.engines.sim_wire_kit import LONG, PROMPT, Client, engine, generate, joined

# ---- abort and hang-up ----------------------------------------------------------------------------------------------


async def test_abort_answers_200_always_and_ends_running_and_waiting_requests() -> None:
    async with engine("--slots", "1", scale=5) as sim:
        assert await sim.post("/abort_request", {"rid": "unknown"}) == (200, "")
        running = asyncio.ensure_future(sim.stream({"rid": "a" * 8, "sampling_params": LONG}))
        await sim.until(lambda state: state["running_rids"] == ["a" * 8] and state["generated_tokens"] > 40)
        waiting = asyncio.ensure_future(sim.stream({"rid": "b" * 8, "sampling_params": LONG}))
        await sim.until(lambda state: state["queued_rids"] == ["b" * 8])
        await sim.post("/abort_request", {"rid": "b" * 8})
        frame, _ = await waiting
        assert frame["output_ids"] == [] and "prompt_tokens" not in frame["meta_info"]
        assert frame["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        await sim.post("/abort_request", {"rid": "a" * 8})
        tokens, logprobs, last = joined(await running)
    assert last["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(tokens) == last["completion_tokens"] > 40
    assert verify(PROMPT, tokens, logprobs, ignore_eos=True) is None


async def test_the_abort_frame_of_a_retracted_request_repeats_its_last_token() -> None:
    async with engine(scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"rid": "odd", "sampling_params": LONG}))
        await sim.until(lambda state: state["generated_tokens"] >= 34)
        await sim.post("/pause_generation", {"mode": "retract"})
        await sim.until(lambda state: state["queued_rids"] == ["odd"])
        await sim.post("/abort_request", {"rid": "odd"})
        frames = await task
    odd, before = frames[-2], frames[:-2]
    tokens = [token for frame in before for token in frame["output_ids"]]
    assert odd["output_ids"] == tokens[-1:] and odd["meta_info"]["completion_tokens"] == len(tokens) >= 33
    pairs = [pair for frame in before for pair in frame["meta_info"]["output_token_logprobs"]]
    assert odd["meta_info"]["output_token_logprobs"] == pairs


async def test_it_tells_when_it_rested_and_what_was_asked_of_it() -> None:
    async with engine("--weight-load-seconds", "1", scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"rid": "a", "sampling_params": LONG}))
        await sim.until(lambda state: state["generated_tokens"] > 10)
        await sim.post("/pause_generation", {"mode": "in_place"})
        await sim.post("/update_weights_from_disk", {"model_path": "next", "flush_cache": False})
        await sim.post("/continue_generation", {})
        await sim.until(lambda state: state["generated_tokens"] > 100)
        _, activity = await sim.call("GET", "/sim/activity")
        await sim.post("/abort_request", {"abort_all": True})
        await task
    assert [name for name, _, _ in activity["calls"]] == ["pause", "load_from_disk", "resume"]
    (_, paused, _), (_, load_started, load_ended), (_, _, resumed) = activity["calls"]
    rest_started, rest_ended = activity["rests"][-1]
    assert load_ended - load_started >= 1.0 - 1e-6
    late_seconds = 0.5  # a tenth of a real second: the machine may be busy
    pass_seconds = 0.01  # the one under way at the pause may end a little after the call
    assert paused - late_seconds <= rest_started <= load_started + pass_seconds
    assert load_started < load_ended <= rest_ended
    assert resumed <= activity["now"]


async def test_hanging_up_a_stream_aborts_it() -> None:
    async with engine(scale=5) as sim:
        async for frame in sim.frames({"sampling_params": LONG}):
            assert frame["output_ids"]
            break
        state = await sim.until(lambda state: not state["running_rids"])
        assert state["aborted"] == 1


async def test_hanging_up_a_plain_call_aborts_it_later() -> None:
    async with engine(scale=20) as sim:
        task = asyncio.ensure_future(sim.post("/generate", generate(sampling_params=LONG)))
        await sim.until(lambda state: bool(state["running_rids"]))
        task.cancel()
        state = await sim.until(lambda state: not state["running_rids"])
        assert state["aborted"] == 1 and state["generated_tokens"] < 20_000


async def test_a_token_id_outside_the_vocabulary_kills_the_process_after_silence() -> None:
    async with engine(scale=20) as sim:
        other = asyncio.ensure_future(sim.stream({"sampling_params": LONG}))
        await sim.until(lambda state: bool(state["running_rids"]))
        with pytest.raises(aiohttp.ClientError):
            await sim.post("/generate", generate(input_ids=[5, 32_000]))
        with pytest.raises(aiohttp.ClientError):
            await other
        assert await sim.process.wait() == 131


async def test_a_token_id_outside_the_vocabulary_can_be_made_harmless() -> None:
    async with engine("--no-crash-on-bad-token") as sim:
        status, answer = await sim.post("/generate", generate(input_ids=[5, 32_000]))
        assert status == 400 and "vocabulary" in answer["error"]["message"]
        stops = {"min_new_tokens": 2, "stop_token_ids": [32_000]}
        assert (await sim.post("/generate", generate(sampling_params=stops)))[0] == 400


async def test_a_full_queue_is_503_or_an_abort_frame() -> None:
    async with engine("--slots", "1", "--max-queued-requests", "0", scale=5) as sim:
        status, answer = await sim.post("/generate", generate())
        assert status == 503 and answer["code"] == 503
        frame, _ = await sim.stream({})
        assert frame["meta_info"]["finish_reason"]["status_code"] == 503 and frame["output_ids"] == []


# ---- pause and weights ----------------------------------------------------------------------------------------------


async def test_retract_pause_holds_streams_open_and_gates_new_ones() -> None:
    async with engine(scale=20) as sim:
        words = {"sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
        first = asyncio.ensure_future(sim.stream({"rid": "first", **words}))
        await sim.until(lambda state: state["generated_tokens"] > 100)
        status, answer = await sim.post("/pause_generation", {"mode": "retract"})
        assert status == 200 and answer["status"] == "ok"
        assert (await sim.call("GET", "/ready"))[0] == 503 and (await sim.call("GET", "/ping"))[0] == 200
        second = asyncio.ensure_future(sim.stream({"rid": "second", **words}))
        await sim.until(lambda state: state["gated_rids"] == ["second"] and state["queued_rids"] == ["first"])
        assert (await sim.post("/flush_cache"))[0] == 200
        update = {"model_path": "next", "weight_version": "2"}
        assert (await sim.post("/update_weights_from_disk", update))[0] == 200
        assert (await sim.call("GET", "/model_info"))[1]["weight_version"] == "2"
        await sim.post("/continue_generation")
        tokens, logprobs, last = joined(await first)
        spans = [(span["version"], span["start"], span["end"]) for span in last["weight_versions"]]
        assert [span[0] for span in spans] == ["default", "2"] and len(tokens) == 600
        assert last["num_retractions"] == 1
        assert verify(PROMPT, tokens, logprobs, ignore_eos=True, spans=spans) is None
        tokens, _, last = joined(await second)
        assert last["weight_versions"] == [{"version": "2", "start": 0, "end": 600}]


async def test_abort_pause_returns_partials_and_takes_a_second() -> None:
    async with engine(scale=20) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": LONG}))
        before = await sim.until(lambda state: state["generated_tokens"] > 100)
        await sim.post("/pause_generation")
        after = await sim.state()
        assert after["simulated_seconds"] - before["simulated_seconds"] >= 1.0
        tokens, _, last = joined(await task)
        assert last["finish_reason"]["type"] == "abort" and verify(PROMPT, tokens, ignore_eos=True) is None
        assert (await sim.post("/continue_generation"))[0] == 200


async def test_a_refused_flush_leaves_new_weights_with_the_old_official_version() -> None:
    async with engine(scale=20) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}))
        await sim.until(lambda state: state["generated_tokens"] > 100)
        await sim.post("/pause_generation", {"mode": "in_place"})
        status, answer = await sim.post("/update_weights_from_disk", {"model_path": "next", "weight_version": "2"})
        assert status == 400 and "not flushed" in answer["message"]
        assert (await sim.call("GET", "/model_info"))[1]["weight_version"] == "default"
        await sim.post("/continue_generation")
        _, _, last = joined(await task)
        assert [span["version"] for span in last["weight_versions"]] == ["default", "2"]
        status, answer = await sim.post("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert (status, answer["new_version"]) == (200, "2")
        assert (await sim.call("GET", "/model_info"))[1]["weight_version"] == "2"


async def test_an_unpaused_update_waits_for_requests_in_flight() -> None:
    async with engine(scale=20) as sim:
        words = {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        first = asyncio.ensure_future(sim.stream(words))
        await sim.until(lambda state: bool(state["running_rids"]))
        update = asyncio.ensure_future(
            sim.post("/update_weights_from_disk", {"model_path": "x", "weight_version": "2"})
        )
        _, _, last = joined(await first)
        assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 400}]
        assert (await update)[0] == 200
        _, _, last = joined(await sim.stream({"sampling_params": {"max_new_tokens": 1}}))
        assert last["weight_version"] == "2" and last["cached_tokens"] == 0


async def test_tensor_updates_need_a_session(sim: Client) -> None:
    bucket = {"serialized_named_tensors": ["AA=="], "weight_version": "2"}
    assert (await sim.post("/update_weights_from_tensor", bucket))[0] == 400
    assert (await sim.post("/end_weight_update"))[0] == 400
    assert (await sim.post("/begin_weight_update"))[0] == 200
    assert (await sim.post("/begin_weight_update"))[0] == 400
    assert (await sim.post("/update_weights_from_tensor", bucket))[0] == 200
    assert (await sim.post("/end_weight_update"))[0] == 200
    assert (await sim.call("GET", "/model_info"))[1]["weight_version"] == "2"


async def test_abort_pause_after_in_place_deadlocks_until_streams_hang_up() -> None:
    async with engine(scale=20) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": LONG}))
        await sim.until(lambda state: bool(state["running_rids"]))
        await sim.post("/pause_generation", {"mode": "in_place"})
        pause = asyncio.ensure_future(sim.post("/pause_generation"))
        # The pause must be there before what should wait for it, which comes on another connection.
        done, _ = await asyncio.wait([pause, task], timeout=0.1)
        assert not done
        resume = asyncio.ensure_future(sim.post("/continue_generation"))
        done, _ = await asyncio.wait([pause, resume, task], timeout=0.3)
        assert not done
        task.cancel()
        assert (await pause)[0] == 200 and (await resume)[0] == 200
