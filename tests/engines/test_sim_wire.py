"""The simulated engine's process over real HTTP: generating, pages of state, start and end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from rolloutd.engines.sim.tokens import Model, expected_output, score
from tests.engines.sim_wire_kit import LONG, PROMPT, SHORT, Client, engine, generate, joined

# ---- generate -------------------------------------------------------------------------------------------------------


async def test_stream_frames_carry_deltas_aligned_logprobs_and_counters(sim: Client) -> None:
    frames = await sim.stream({"sampling_params": {"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 7}})
    tokens, logprobs, last = joined(frames)
    expected = expected_output(PROMPT, 100, sampling_seed=7, ignore_eos=True)
    assert (tokens, logprobs) == (expected.tokens, expected.logprobs)
    # At most the first token, each 32 after it, and the rest: a process that was held up sends what came meanwhile in one,
    # which may be all.
    deltas, ends = frames[:-2], frames[-2:]
    assert len(deltas) <= 4 and ends[1] == "[DONE]" and all(frame["output_ids"] for frame in frames[:-1])
    assert all(frame["meta_info"]["finish_reason"] is None for frame in deltas)
    assert not any("weight_versions" in frame["meta_info"] for frame in deltas)
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


async def test_loads_report_running_waiting_memory_and_rates_in_real_time() -> None:
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
        assert rank["gen_throughput"] == pytest.approx(5 / 0.007045, rel=0.2)
        assert rank["total_prefill_uncached_tokens"] == 240 and rank["total_prefill_busy_us"] == 12_000 / 5
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
