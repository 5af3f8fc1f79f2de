"""The SGLang door against a server that answers exactly what each test writes down."""

from __future__ import annotations

import asyncio
import gc
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from rolloutd.engines.base import AttemptRequest, EngineFault, FaultKind, Progress, Slice
from rolloutd.engines.sglang import SGLangEngine, Timeouts
from rolloutd.engines.sglang_attempt import Attempt
from tests.engines.scripted_server import DONE, LENGTH, FakeServer, frame

VOCABULARY_SIZE = 1000
TIMEOUTS = Timeouts(connect_seconds=1, first_byte_seconds=0.5, idle_seconds=0.5, abort_seconds=0.2, control_seconds=0.5)


@pytest_asyncio.fixture
async def served(fake: tuple[FakeServer, str]) -> AsyncIterator[tuple[FakeServer, SGLangEngine]]:
    server, url = fake
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE, timeouts=TIMEOUTS)
    await engine.register()
    yield server, engine
    await engine.close()


def ask(**fields: Any) -> AttemptRequest:
    words: dict[str, Any] = {
        "attempt_id": uuid.uuid4().hex,
        "max_new_tokens": 3,
        "token_bytes": np.array([1, 2, 3], "<u4").tobytes(),
    }
    return AttemptRequest(**(words | fields))


async def run(engine: SGLangEngine, **fields: Any) -> Slice:
    return await engine.generate(ask(**fields), lambda _: None)


async def fault(engine: SGLangEngine, **fields: Any) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await run(engine, **fields)
    return caught.value


def tokens(answer: Slice | None) -> list[int]:
    return [] if answer is None else np.frombuffer(answer.token_bytes, "<u4").tolist()


async def forever(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(frame([5], 1))
    await asyncio.Event().wait()


# What is sent


async def test_the_body_says_everything_explicitly(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    request = ask(
        sampling={"temperature": 0.5, "stop_token_ids": (7,)},
        logprobs=True,
        cache_salt="4",
        engine_params={"priority": 3},
    )
    await engine.generate(request, lambda _: None)
    assert server.bodies[-1] == {
        "rid": request.attempt_id,
        "input_ids": [1, 2, 3],
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "cache_salt": "4",
        "priority": 3,
        "sampling_params": {"temperature": 0.5, "stop_token_ids": [7], "max_new_tokens": 3},
    }
    await run(engine, text="hello", token_bytes=b"", prompt_logprobs_from=5)
    body = server.bodies[-1]
    assert body["text"] == "hello" and body["return_prompt_token_ids"] is True and "input_ids" not in body
    assert body["logprob_start_len"] == 4, "the engine leaves the first position empty, so it is asked one earlier"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"token_bytes": b""}, "no tokens"),
        ({"token_bytes": b"\x01\x00\x00"}, "whole number"),
        ({"token_bytes": np.array([1, 1000], "<u4").tobytes()}, "1000 at position 1"),
        ({"text": "both"}, "not both"),
        ({"text": "", "token_bytes": b""}, "empty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"attempt_id": ""}, "attempt_id"),
        ({"attempt_id": "HEALTH_CHECK_1"}, "attempt_id"),
        ({"sampling": {"max_new_tokens": 5}}, "max_new_tokens"),
        ({"sampling": {"n": 2}}, "n must be 1"),
        ({"sampling": {"stop_token_ids": [1000]}}, "stop_token_ids"),
        ({"sampling": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ({"sampling": {"stop_token_ids": 5}}, "stop_token_ids"),
        ({"sampling": {"logit_bias": {"1000": 1.0}}}, "logit_bias"),
        ({"sampling": {"custom_params": object()}}, "JSON"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"top_logprobs": 1001, "logprobs": True}, "vocabulary of 1000"),
        ({"prompt_logprobs_from": -1}, "prompt_logprobs_from"),
        ({"engine_params": {"rid": "x", "stream": False}}, "rid, stream"),
        ({"engine_params": {"token_ids_logprob": [1000]}}, "token_ids_logprob"),
    ],
)
async def test_refused_before_anything_is_sent(
    served: tuple[FakeServer, SGLangEngine], fields: dict[str, Any], word: str
) -> None:
    server, engine = served
    sent = len(server.bodies)
    caught = await fault(engine, **fields)
    assert caught.kind is FaultKind.REFUSED
    assert word in caught.message
    assert len(server.bodies) == sent


async def test_each_route_gets_its_own_key(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    engine = SGLangEngine(url, api_key="user", admin_api_key="boss", vocabulary_size=VOCABULARY_SIZE)
    await engine.register()
    await engine.abort(uuid.uuid4().hex)
    await engine.close()
    assert server.headers == {
        "/server_info": "Bearer user",
        "/model_info": "Bearer user",
        "/v1/loads": "Bearer user",
        "/generate": "Bearer user",
        "/abort_request": "Bearer boss",
    }


# What comes back


async def test_pieces_may_end_anywhere(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    whole = (frame([5], 1, note="é🙂") + frame([6, 7], 3, LENGTH) + DONE).replace(b"\n", b"\r\n")

    async def drip(request: web.Request, response: web.StreamResponse) -> None:
        for start in range(0, len(whole), 7):
            await response.write(whole[start : start + 7])
            await asyncio.sleep(0)

    server.do(drip)
    reports: list[Progress] = []
    answer = await engine.generate(ask(logprobs=True), reports.append)
    assert tokens(answer) == [5, 6, 7] and answer.finish_reason == "length" and answer.text == "xxx"
    assert [report.generated_tokens for report in reports] == [1, 3]


async def test_cumulative_streams(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.server_info["incremental_streaming_output"] = False
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE, timeouts=TIMEOUTS)
    info = await engine.register()
    assert not info.incremental_streaming
    assert any("--incremental-streaming-output" in warning for warning in info.warnings)
    server.say(frame([5], 1), frame([5, 6, 7], 3), frame([5, 6, 7, 8], 4, LENGTH), DONE)
    answer = await run(engine, logprobs=True)
    assert tokens(answer) == [5, 6, 7, 8] and answer.text == "xxxx"
    assert len(answer.logprob_bytes) == 16
    await engine.close()


async def test_the_odd_abort_frame(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    odd = frame([7], 3, {"type": "abort", "message": "Abort in waiting queue"}).replace(b'"x"', b'"xxx"')
    server.say(frame([5], 1), frame([6, 7], 3), odd, DONE)
    answer = await run(engine)
    assert tokens(answer) == [5, 6, 7] and answer.finish_reason == "abort" and answer.text == "xxx"


async def test_the_end_of_the_stream_is_not_waited_for_long(served: tuple[FakeServer, SGLangEngine]) -> None:
    """A finished attempt is finished, also when the stream's own end never comes or is a reset."""
    server, engine = served

    async def cut_after_the_last(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(frame([5], 1, LENGTH))
        assert request.transport is not None
        request.transport.abort()

    server.do(cut_after_the_last)
    assert tokens(await run(engine)) == [5]


async def test_an_end_is_told_before_the_stream_ends(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served

    async def never_ends(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(frame([5], 1, LENGTH))
        await asyncio.Event().wait()

    server.do(never_ends)
    assert tokens(await asyncio.wait_for(run(engine), TIMEOUTS.idle_seconds / 2)) == [5]
    await asyncio.wait_for(server.gone.wait(), 5)  # hung up on, once the time for its end was over


ERROR_FRAME = b'data: {"error":{"message":"no room","code":%d}}\n\n' + DONE


@pytest.mark.parametrize(
    ("pieces", "kind", "kept"),
    [
        ([ERROR_FRAME % 400], FaultKind.REFUSED, []),
        ([frame([5], 1), ERROR_FRAME % 400], FaultKind.REFUSED, [5]),
        ([frame([5], 1), ERROR_FRAME % 503], FaultKind.BUSY, [5]),
        ([frame([5], 1), ERROR_FRAME % 500], FaultKind.BROKEN, [5]),
        ([b'data: {"error":"something"}\n\n', DONE], FaultKind.BROKEN, []),
        ([frame([9], 1, {"type": "abort", "message": "m", "status_code": 400}), DONE], FaultKind.REFUSED, []),
        ([frame([5], 1), frame([5], 1, {"type": "abort", "message": "m", "status_code": 503})], FaultKind.BUSY, [5]),
        (
            [frame([5], 1), frame([6], 2, {"type": "abort", "message": "m", "status_code": 500})],
            FaultKind.BROKEN,
            [5, 6],
        ),
        ([frame([5], 1), frame([6], 2, {"type": "surprise"})], FaultKind.BROKEN, [5, 6]),
        ([frame([5], 1), b"data: {not json}\n\n"], FaultKind.BROKEN, [5]),
        ([frame([5], 1), b'data: {"output_ids":"seven"}\n\n'], FaultKind.BROKEN, [5]),
        ([frame([5], 1), b'data: {"output_ids":[6]}\n\n'], FaultKind.BROKEN, [5]),
        ([frame([5], 1), b'data: {"text":"\xff"}\n\n'], FaultKind.BROKEN, [5]),
        ([frame([5], 1), frame([9], 4)], FaultKind.BROKEN, [5]),
        ([frame([5], 1), DONE], FaultKind.BROKEN, [5]),
        ([frame([5], 1), b"data: {"], FaultKind.BROKEN, [5]),
        ([], FaultKind.BROKEN, []),
    ],
)
async def test_faults_inside_a_stream(
    served: tuple[FakeServer, SGLangEngine], pieces: list[bytes], kind: FaultKind, kept: list[int]
) -> None:
    server, engine = served
    server.say(*pieces)
    caught = await fault(engine)
    assert caught.kind is kind
    assert tokens(caught.partial) == kept
    assert (caught.partial is None) == (not kept)
    assert engine.url in caught.message
    server.say(frame([5], 1, LENGTH), DONE)
    assert tokens(await run(engine)) == [5], "the door works on"


async def test_an_attempt_that_a_frame_ended_leaves_nothing_to_the_garbage_collector(
    served: tuple[FakeServer, SGLangEngine],
) -> None:
    server, engine = served
    gc.collect()
    gc.disable()
    try:
        server.say(frame([5], 1), ERROR_FRAME % 400)
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engine.begin(ask(), lambda _: None, ended.set_result)
        assert isinstance(await ended, EngineFault)
        del ended
        await asyncio.sleep(0)
        assert not any(isinstance(thing, Attempt) for thing in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FaultKind.REFUSED),
        (422, FaultKind.REFUSED),
        (401, FaultKind.BROKEN),
        (404, FaultKind.BROKEN),
        (429, FaultKind.BUSY),
        (503, FaultKind.BUSY),
        (500, FaultKind.BROKEN),
        (502, FaultKind.BROKEN),
    ],
)
async def test_statuses(served: tuple[FakeServer, SGLangEngine], status: int, kind: FaultKind) -> None:
    server, engine = served
    server.refuse(status, b'{"error":{"message":"the reason"}}')
    caught = await fault(engine)
    assert caught.kind is kind
    assert "the reason" in caught.message


async def test_a_page_is_not_a_stream(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.refuse(200, b"<html>hello</html>", "text/html")
    caught = await fault(engine)
    assert caught.kind is FaultKind.BROKEN and "text/html" in caught.message


async def test_a_reset_keeps_the_tokens(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served

    async def reset(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(frame([5], 1))
        assert request.transport is not None
        request.transport.abort()

    server.do(reset)
    caught = await fault(engine, logprobs=True)
    assert caught.kind is FaultKind.BROKEN
    assert tokens(caught.partial) == [5]
    assert caught.partial is not None and caught.partial.version_spans == (("default", 0, 1),)
    assert len(caught.partial.logprob_bytes) == 4


async def test_silence(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)
    caught = await fault(engine)
    assert caught.kind is FaultKind.SILENT
    assert tokens(caught.partial) == [5]
    await asyncio.wait_for(server.gone.wait(), 5)


async def test_nothing_listens(fake: tuple[FakeServer, str]) -> None:
    engine = SGLangEngine("http://127.0.0.1:1", vocabulary_size=VOCABULARY_SIZE, timeouts=TIMEOUTS)
    with pytest.raises(EngineFault) as caught:
        await engine.ready()
    assert caught.value.kind is FaultKind.BROKEN
    await engine.close()


# Stopping


async def test_cancelling_hangs_up(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)
    first = asyncio.Event()
    task = asyncio.create_task(engine.generate(ask(), lambda _: first.set()))
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.gone.wait(), 5)


async def test_an_ignored_abort_hangs_up_and_keeps_the_tokens(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)
    first = asyncio.Event()
    request = ask(logprobs=True)
    task = asyncio.create_task(engine.generate(request, lambda _: first.set()))
    await first.wait()
    await engine.abort(request.attempt_id)
    answer = await task
    assert server.aborted == [request.attempt_id]
    assert answer.finish_reason == "abort" and tokens(answer) == [5] and len(answer.logprob_bytes) == 4
    await asyncio.wait_for(server.gone.wait(), 5)


async def test_who_hangs_up_hears_nothing_more(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)
    first = asyncio.Event()
    ends: list[Slice | Exception] = []
    request = ask()
    running = engine.begin(request, lambda _: first.set(), ends.append)
    await first.wait()
    running.hang_up()
    await asyncio.wait_for(server.gone.wait(), 5)
    running.hang_up()
    server.say(frame([5], 1, LENGTH), DONE)
    assert tokens(await engine.generate(request, lambda _: None)) == [5], "its id is free again"
    assert ends == []


async def test_hanging_up_before_there_is_a_connection_sends_nothing(
    served: tuple[FakeServer, SGLangEngine],
) -> None:
    server, engine = served
    sent = len(server.bodies)
    ends: list[Slice | Exception] = []
    free = engine._http.connections
    attempts = [engine.begin(ask(), lambda _: None, ends.append) for _ in range(free + 5)]
    for attempt in attempts:
        attempt.hang_up()
    assert tokens(await run(engine)) == [5]
    assert len(server.bodies) <= sent + free + 1
    assert ends == []


async def test_closing_ends_running_attempts(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)
    first = asyncio.Event()
    task = asyncio.create_task(engine.generate(ask(), lambda _: first.set()))
    await first.wait()
    await engine.close()
    with pytest.raises(EngineFault, match="closed") as caught:
        await task
    assert tokens(caught.value.partial) == [5]
    assert (await fault(engine)).kind is FaultKind.BROKEN


async def test_an_error_in_the_callers_callback_is_the_callers(served: tuple[FakeServer, SGLangEngine]) -> None:
    server, engine = served
    server.do(forever)

    def fail(progress: Progress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await engine.generate(ask(), fail)
    await asyncio.wait_for(server.gone.wait(), 5)


# Registration and load


async def test_figures_and_warnings(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.server_info |= {"page_size": 1, "stream_interval": 1, "max_queued_requests": 4, "context_length": 4000}
    server.ranks = [server.rank, server.rank | {"timestamp": 99.0}]
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE)
    info = await engine.register()
    load = await engine.load()
    await engine.close()
    assert (info.context_tokens, info.max_prompt_tokens, info.page_size_tokens) == (4000, 4089, 1)
    assert (info.kv_capacity_tokens, info.kv_cache_bytes, info.max_running_rollouts) == (32768, 1 << 30, 8)
    for words in ("page size 1", "frame per token", "--max-queued-requests"):
        assert any(words in warning for warning in info.warnings)
    assert load.engine_time_seconds == 99.0
    assert (load.running_rollouts, load.waiting_rollouts, load.kv_used_tokens) == (2, 4, 60)
    assert (load.generated_tokens_per_second, load.prefilled_tokens_total) == (10.0, 140)
    assert load.prefill_busy_seconds_total == 0.5


async def test_the_incarnation_changes_with_the_start_only(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE)
    first = (await engine.register()).incarnation
    server.server_info["weight_version"] = "9"
    server.server_info["last_gen_throughput"] = 3.0
    assert (await engine.register()).incarnation == first
    server.server_info["startup_time"] = {"scheduler_e2e": 4.6}
    assert (await engine.register()).incarnation != first
    await engine.close()


async def test_the_vocabulary_comes_from_the_checkpoint(fake: tuple[FakeServer, str], tmp_path: Path) -> None:
    server, url = fake
    server.server_info["model_path"] = str(tmp_path)
    unknown = SGLangEngine(url)
    with pytest.raises(EngineFault, match="set vocabulary_size") as caught:
        await unknown.register()
    assert caught.value.kind is FaultKind.REFUSED
    assert (await fault(unknown)).kind is FaultKind.BUSY, "nothing is sent by a door that is not registered"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 777}}))
    assert (await unknown.register()).vocabulary_size == 777
    await unknown.close()
    too_large = SGLangEngine(url, vocabulary_size=778)
    with pytest.raises(EngineFault, match="777"):
        await too_large.register()
    await too_large.close()
    smaller = SGLangEngine(url, vocabulary_size=700)
    assert (await smaller.register()).vocabulary_size == 700
    await smaller.close()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"page_size": None}, FaultKind.BROKEN, "page_size"),
        ({"version": None}, FaultKind.BROKEN, "is this SGLang"),
        ({"internal_states": []}, FaultKind.REFUSED, "max_running_requests"),
    ],
)
async def test_what_is_not_stated_is_an_error(
    fake: tuple[FakeServer, str], change: dict[str, Any], kind: FaultKind, words: str
) -> None:
    server, url = fake
    server.server_info |= change
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(EngineFault) as caught:
        await engine.register()
    assert caught.value.kind is kind and words in caught.value.message
    await engine.close()


async def test_a_paused_engine_is_not_registered_yet(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.ready_status = 503
    engine = SGLangEngine(url, vocabulary_size=VOCABULARY_SIZE)
    assert await engine.ready() is False
    with pytest.raises(EngineFault) as caught:
        await engine.register()
    assert caught.value.kind is FaultKind.BUSY
    assert server.bodies == []
    await engine.close()
