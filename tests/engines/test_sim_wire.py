"""The simulated engine's process over real HTTP, in SGLang's words. Time scale 50: a simulated second is 20 ms."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rolloutd.engines.sim.tokens import Model, expected_output, score, verify

PROMPT = list(range(10, 250))
LONG = {"max_new_tokens": 20_000, "ignore_eos": True}


class Client:
    """Talks to one engine process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self.session = session

    async def call(self, method: str, path: str, **words: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **words) as response:
            text = await response.text()
            if response.content_type == "application/json":
                return response.status, json.loads(text)
            return response.status, text

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.call("POST", path, json=body if body is not None else {})

    async def state(self) -> dict[str, Any]:
        status, body = await self.call("GET", "/sim/state")
        assert status == 200
        return dict(body)

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll `/sim/state` until the condition holds; pytest's time-out is the limit."""
        while True:
            state = await self.state()
            if condition(state):
                return state
            await asyncio.sleep(0.005)

    async def stream(self, body: dict[str, Any]) -> list[Any]:
        return [frame async for frame in self.frames(body)]

    async def frames(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Frames of a stream, decoded; the last one is the string [DONE]."""
        async with self.session.post(self.url + "/generate", json=generate(**body, stream=True)) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            async for line in response.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    data = line[6:].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def generate(**words: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": PROMPT, "return_logprob": True, "rid": uuid.uuid4().hex}
    return body | words


def joined(frames: list[Any]) -> tuple[list[int], list[float], dict[str, Any]]:
    """Tokens, log-probs and the last meta_info of an incremental stream."""
    assert frames[-1] == "[DONE]"
    tokens: list[int] = []
    logprobs: list[float] = []
    for frame in frames[:-1]:
        tokens += frame["output_ids"]
        pairs = frame["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in pairs] == frame["output_ids"]
        logprobs += [logprob for logprob, _, _ in pairs]
    return tokens, logprobs, frames[-2]["meta_info"]


@asynccontextmanager
async def engine(*flags: str, scale: float = 50) -> AsyncIterator[Client]:
    """An engine process, ready; killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutd.engines.sim.server", "--port", "0", "--time-scale", str(scale), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        if b"listening" not in line:
            _, errors = await process.communicate()
            raise AssertionError(line.decode() + errors.decode())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(process, line.split()[-1].decode(), session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def sim() -> AsyncIterator[Client]:
    async with engine() as client:
        yield client


# ---- generate -------------------------------------------------------------------------------------------------------


async def test_stream_frames_carry_deltas_aligned_logprobs_and_counters(sim: Client) -> None:
    frames = await sim.stream({"sampling_params": {"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 7}})
    tokens, logprobs, last = joined(frames)
    expected = expected_output(PROMPT, 100, sampling_seed=7, ignore_eos=True)
    assert (tokens, logprobs) == (expected.tokens, expected.logprobs)
    assert frames[0]["meta_info"]["finish_reason"] is None and len(frames[0]["output_ids"]) == 1
    assert "weight_versions" not in frames[0]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 100}
    assert (last["prompt_tokens"], last["completion_tokens"], last["cached_tokens"]) == (240, 100, 0)
    assert last["weight_version"] == "default"
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 100}]
    assert last["output_token_logprobs_length"] == 100 and last["input_token_logprobs"] == []
    assert last["num_retractions"] == 0 and last["e2e_latency"] > 0


async def test_cumulative_frames_repeat_everything() -> None:
    async with engine("--no-incremental-streaming-output", "--stream-interval", "10") as sim:
        frames = await sim.stream({"sampling_params": {"max_new_tokens": 45, "ignore_eos": True}})
    whole = frames[-2]["output_ids"]
    assert whole == expected_output(PROMPT, 45, ignore_eos=True).tokens
    for frame in frames[:-1]:
        count = frame["meta_info"]["completion_tokens"]
        assert frame["output_ids"] == whole[:count]
        assert len(frame["meta_info"]["output_token_logprobs"]) == count


async def test_plain_call_continuation_and_cache_hit(sim: Client) -> None:
    params = {"max_new_tokens": 60, "custom_params": {"end_at_tokens": 280}}
    status, whole = await sim.post("/generate", generate(sampling_params=params))
    assert status == 200 and len(whole["output_ids"]) == 40
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    partial = whole["output_ids"][:25]
    _, rest = await sim.post("/generate", generate(input_ids=PROMPT + partial, sampling_params=params))
    assert partial + rest["output_ids"] == whole["output_ids"]
    assert rest["meta_info"]["cached_tokens"] == 256
    assert rest["meta_info"]["cached_tokens_details"] == {"device": 256, "host": 0}


async def test_default_length_is_128_and_top_logprobs_start_with_the_token(sim: Client) -> None:
    _, answer = await sim.post("/generate", generate(top_logprobs_num=2, sampling_params={"ignore_eos": True}))
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == 128
    assert [pair[0] for pair in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert {len(pair) for pair in meta["output_top_logprobs"]} == {2}


async def test_replay_scores_the_prompt_and_generates_nothing(sim: Client) -> None:
    body = generate(logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    for _ in range(2):
        status, answer = await sim.post("/generate", body)
        assert status == 200 and answer["output_ids"] == []
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == 0 and meta["finish_reason"] == {"type": "length", "length": 0}
        entries = meta["input_token_logprobs"]
        assert entries[0] == [None, PROMPT[0], None]
        assert [e[1] for e in entries] == PROMPT
        assert [e[0] for e in entries[1:]] == score(Model(), PROMPT)[1:].tolist()


async def test_text_prompts_are_bytes_and_ids_come_back_when_asked_for(sim: Client) -> None:
    body = {"text": "hé", "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    _, answer = await sim.post("/generate", body)
    assert answer["prompt_token_ids"] == [byte + 3 for byte in "hé".encode()]
    assert answer["output_ids"] == expected_output(answer["prompt_token_ids"], 3, ignore_eos=True).tokens
    assert answer["text"] == "".join(f" t{token}" for token in answer["output_ids"])


async def test_contract_errors_are_400_before_any_stream(sim: Client) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"sampling_params": {"max_new_tokens": 8.5}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": "8"}}, "max_new_tokens"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
    ]
    for body, words in bad:
        for stream in (False, True):
            status, answer = await sim.post("/generate", generate(**body, stream=stream))
            assert status == 400 and words in answer["error"]


async def test_value_errors_are_400_or_a_frame_inside_a_200_stream(sim: Client) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"sampling_params": {"max_new_tokens": 32_700}}, "maximum context length"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 2}}, "n requests"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ({"sampling_params": {"custom_params": {"end_at_tokens": "x"}}}, "end_at_tokens"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": None}, "should be provided"),
        ({"logprob_start_len": 241}, "logprob_start_len"),
        ({"lora_path": "a"}, "lora_path"),
    ]
    for body, words in bad:
        status, answer = await sim.post("/generate", generate(**body))
        assert status == 400 and words in answer["error"]["message"]
        frames = await sim.stream(body)
        assert frames[-1] == "[DONE]" and len(frames) == 2
        error = frames[0]["error"]
        assert (error["type"], error["code"], error["retryable"]) == ("invalid_request_error", 400, False)
        assert words in error["message"]
    status, answer = await sim.call("POST", "/generate", data=b"{bad")
    assert status == 400 and answer["object"] == "error"


async def test_a_prompt_that_the_scheduler_refuses_carries_a_bogus_token(sim: Client) -> None:
    body = {"input_ids": [5] * 32_763, "sampling_params": {"max_new_tokens": 2}}
    status, answer = await sim.post("/generate", generate(**body))
    assert status == 400 and "Input length" in answer["error"]["message"]
    frame, done = await sim.stream(body)
    assert done == "[DONE]" and len(frame["output_ids"]) == 1
    assert frame["meta_info"]["finish_reason"]["status_code"] == 400
    assert frame["meta_info"]["prompt_tokens"] == frame["meta_info"]["completion_tokens"] == 1


async def test_a_live_rid_is_refused_a_second_time(sim: Client) -> None:
    task = asyncio.ensure_future(sim.stream({"rid": "same", "sampling_params": LONG}))
    await sim.until(lambda state: state["running_rids"] == ["same"])
    status, answer = await sim.post("/generate", generate(rid="same"))
    assert status == 400 and "Duplicate request ID" in answer["error"]["message"]
    await sim.post("/abort_request", {"rid": "same"})
    assert (await task)[-1] == "[DONE]"


async def test_a_rid_reused_after_a_stream_is_aborted_by_the_first_ones_clean_up() -> None:
    async with engine(scale=5) as sim:
        await sim.stream({"rid": "again", "sampling_params": {"max_new_tokens": 1}})
        _, _, last = joined(await sim.stream({"rid": "again", "sampling_params": LONG}))
    assert last["finish_reason"]["type"] == "abort"


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


# ---- state ----------------------------------------------------------------------------------------------------------


async def test_info_pages_state_what_a_scheduler_needs() -> None:
    async with engine(
        "--kv-tokens", "50000", "--context-length", "4096", "--slots", "7", "--weight-version", "3"
    ) as sim:
        _, info = await sim.call("GET", "/server_info")
        _, model = await sim.call("GET", "/model_info")
        _, again = await sim.call("GET", "/server_info")
    assert info == again
    assert info["page_size"] == 16 and info["max_total_num_tokens"] == 50_000 and info["max_req_input_len"] == 4_090
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 7
    assert info["incremental_streaming_output"] is True and info["version"] == "0.5.23"
    assert info["weight_version"] == model["weight_version"] == "3"


async def test_loads_report_running_waiting_memory_and_simulated_rates() -> None:
    async with engine("--slots", "1", scale=5) as sim:
        tasks = []
        for rid in ("a", "b"):
            tasks.append(asyncio.ensure_future(sim.stream({"rid": rid, "sampling_params": LONG})))
            await sim.until(lambda state, rid=rid: rid in state["running_rids"] + state["queued_rids"])  # type: ignore[misc]
        await sim.until(lambda state: state["generated_tokens"] > 300)
        _, page = await sim.call("GET", "/v1/loads?include=core,memory,queues")
        rank = page["loads"][0]
        assert (rank["num_running_reqs"], rank["num_waiting_reqs"], rank["max_running_requests"]) == (1, 1, 1)
        assert rank["num_used_tokens"] >= 540 and rank["num_total_tokens"] == rank["num_used_tokens"] + 240
        assert rank["num_waiting_uncached_tokens"] == 0  # its prompt is cached by now
        assert rank["gen_throughput"] == pytest.approx(1 / 0.007045, rel=0.2)
        assert rank["total_prefill_uncached_tokens"] == 240 and rank["total_prefill_busy_us"] == 12_000
        assert rank["memory"]["token_capacity"] == 200_000 and rank["queues"]["waiting"] == 1
        assert (await sim.call("GET", "/v1/loads"))[1]["loads"][0].get("memory") is None
        assert (await sim.call("GET", "/v1/loads?include=nonsense"))[0] == 500
        status, text = await sim.call("GET", "/metrics")
        assert status == 200 and "sglang:num_running_reqs 1\n" in text
        await sim.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)


async def test_flush_is_400_while_busy_and_waits_when_told() -> None:
    async with engine(scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}))
        await sim.until(lambda state: bool(state["running_rids"]))
        assert await sim.post("/flush_cache") == (400, "Flush cache failed.\n")
        assert (await sim.call("POST", "/flush_cache?timeout=30"))[0] == 200
        await task
        _, _, last = joined(await sim.stream({"sampling_params": {"max_new_tokens": 1}}))
        assert last["cached_tokens"] == 0


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
        resume = asyncio.ensure_future(sim.post("/continue_generation"))
        done, _ = await asyncio.wait([pause, resume, task], timeout=0.3)
        assert not done
        task.cancel()
        assert (await pause)[0] == 200 and (await resume)[0] == 200


# ---- faults ---------------------------------------------------------------------------------------------------------

SHORT = {"sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}


async def served(sim: Client) -> bool:
    return joined(await sim.stream(SHORT))[0] == expected_output(PROMPT, 40, ignore_eos=True).tokens


async def test_busy_and_error_500_count_down(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "busy", "count": 2})
    assert (await sim.post("/generate", generate(**SHORT)))[0] == 503
    frame, _ = await sim.stream(SHORT)
    assert frame["meta_info"]["finish_reason"]["status_code"] == 503
    await sim.post("/sim/fault", {"kind": "error_500", "count": 1})
    assert (await sim.post("/generate", generate(**SHORT)))[0] == 500
    assert await served(sim)


async def test_cut_stream_resets_the_connection_after_some_tokens(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "cut_stream", "tokens": 1, "count": 1})
    seen = []
    with pytest.raises(aiohttp.ClientError):
        async for frame in sim.frames({"sampling_params": LONG}):
            seen += frame["output_ids"]
    assert seen == expected_output(PROMPT, len(seen), ignore_eos=True).tokens and seen
    await sim.until(lambda state: not state["running_rids"])
    assert await served(sim)


async def test_garbage_and_duplicate_frames(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "garbage_frame"})
    with pytest.raises(json.JSONDecodeError):
        await sim.stream(SHORT)
    await sim.post("/sim/fault", {"kind": "duplicate_frame"})
    frames = await sim.stream(SHORT)
    assert frames[0] == frames[1]
    assert await served(sim)


async def test_stall_silences_streams_until_taken_back() -> None:
    async with engine(scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}))
        await sim.until(lambda state: state["generated_tokens"] > 5)
        await sim.post("/sim/fault", {"kind": "stall"})
        before = await sim.state()
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done and (await sim.state())["generated_tokens"] == before["generated_tokens"]
        await sim.call("DELETE", "/sim/fault?kind=stall")
        assert joined(await task)[0] == expected_output(PROMPT, 100, ignore_eos=True).tokens


async def test_hang_never_answers_and_not_ready_only_says_so(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "not_ready"})
    assert (await sim.call("GET", "/ready"))[0] == 503 and await served(sim)
    await sim.post("/sim/fault", {"kind": "hang"})
    with pytest.raises(TimeoutError):
        await sim.call("GET", "/v1/loads", timeout=aiohttp.ClientTimeout(total=0.2))
    assert (await sim.state())["faults"] == ["hang", "not_ready"]
    await sim.call("DELETE", "/sim/fault")
    assert (await sim.call("GET", "/ready"))[0] == 200 and await served(sim)


async def test_slow_stretches_and_ends(sim: Client) -> None:
    await sim.post("/sim/fault", {"kind": "slow", "factor": 20})
    before = await sim.state()
    await sim.stream(SHORT)
    after = await sim.state()
    assert after["simulated_seconds"] - before["simulated_seconds"] > 40 * 20 * 0.007
    await sim.call("DELETE", "/sim/fault?kind=slow")
    assert await served(sim)


async def test_refused_connections_come_back(sim: Client) -> None:
    task = asyncio.ensure_future(sim.stream({"sampling_params": LONG}))
    await sim.until(lambda state: bool(state["running_rids"]))
    await sim.post("/sim/fault", {"kind": "refuse_connections", "seconds": 0.3})
    with pytest.raises(aiohttp.ClientError):
        await task
    with pytest.raises(aiohttp.ClientConnectorError):
        await sim.call("GET", "/ping")

    async def back() -> Awaitable[None] | None:
        while True:
            try:
                await sim.call("GET", "/ping")
                return None
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)

    await back()
    assert await served(sim)


async def test_crash_ends_the_process_and_bad_orders_are_refused(sim: Client) -> None:
    for bad, words in (
        ({"kind": "nonsense"}, "kinds"),
        ({"kind": "slow", "factor": 0}, "factor"),
        ({"kind": "refuse_connections"}, "seconds"),
        ({"kind": "busy", "secs": 1}, "secs"),
    ):
        status, answer = await sim.post("/sim/fault", bad)
        assert status == 400 and words in answer["error"]
    with pytest.raises(aiohttp.ClientError):
        await sim.post("/sim/fault", {"kind": "crash"})
    assert await sim.process.wait() == 1


# ---- process --------------------------------------------------------------------------------------------------------


async def test_sigterm_drains_what_runs_and_exits_0() -> None:
    async with engine(scale=5) as sim:
        task = asyncio.ensure_future(sim.stream({"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}))
        await sim.until(lambda state: bool(state["running_rids"]))
        sim.process.send_signal(signal.SIGTERM)
        while True:
            if (await sim.call("GET", "/ready"))[0] == 503:
                break
            await asyncio.sleep(0.005)
        assert joined(await task)[0] == expected_output(PROMPT, 200, ignore_eos=True).tokens
        assert await sim.process.wait() == 0


async def test_equal_seeds_are_copies_of_one_model_and_others_are_not() -> None:
    answers = []
    for seed in ("0", "0", "1"):
        async with engine("--seed", seed) as sim:
            answers.append(joined(await sim.stream(SHORT))[0])
    assert answers[0] == answers[1] != answers[2]
    assert answers[2] == expected_output(PROMPT, 40, ignore_eos=True, model=Model(seed=1)).tokens


async def test_a_senseless_flag_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match="kv_tokens"):
        async with engine("--kv-tokens", "5"):
            pass
