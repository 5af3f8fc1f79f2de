"""Tokens, log-probs and ends of one attempt: the same for every engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rolloutd.engines.base import EngineFault, EngineInfo, FaultKind, Progress
from rolloutd.engines.sglang import SGLangEngine
from tests.conformance.support import LOGPROB_TOLERANCE, ask, gather, greedy, ids, run, same_tokens


async def test_register_states_the_engine(door: SGLangEngine, info: EngineInfo, engine_url: str) -> None:
    assert info.page_size_tokens == 16
    assert info.kv_capacity_tokens == 16384
    assert info.max_running_rollouts == 32
    assert info.context_tokens == 4096
    assert info.max_prompt_tokens == 4089
    assert info.vocabulary_size == 1024
    assert info.weight_version == "default"
    assert info.incremental_streaming
    assert info.model and info.server_version
    assert info.warnings == ()
    # Another registration of the same process is the same incarnation.
    other = SGLangEngine(engine_url, vocabulary_size=1024)
    assert (await other.register()).incarnation == info.incarnation
    await other.close()


async def test_greedy_is_repeatable_and_pieces_make_the_whole(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 48)
    reports: list[Progress] = []
    first = await run(door, greedy(prompt, 100, logprobs=True), reports.append)
    second = await run(door, greedy(prompt, 100, logprobs=True))
    same_tokens(first, second)
    assert len(first.token_bytes) == 400
    counts = [report.generated_tokens for report in reports]
    assert counts[0] >= 1 and counts[-1] == 100
    assert counts == sorted(set(counts)) and len(counts) > 3
    assert {report.prompt_tokens for report in reports} == {48}
    assert first.prompt_tokens == 48
    assert first.version_spans == (("default", 0, 100),)


async def test_logprobs_align_with_tokens(door: SGLangEngine, prompts: np.random.Generator) -> None:
    answer = await run(door, greedy(ids(prompts, 20), 50, logprobs=True, top_logprobs=3))
    tokens = np.frombuffer(answer.token_bytes, "<u4")
    logprobs = np.frombuffer(answer.logprob_bytes, "<f4")
    assert len(tokens) == len(logprobs) == len(answer.top_logprobs) == 50
    assert np.isfinite(logprobs).all() and (logprobs <= 0).all()
    for token, logprob, row in zip(tokens, logprobs, answer.top_logprobs, strict=True):
        assert len(row) == 3
        assert row[0][1] == token, "the greedy token is the most likely one"
        assert row[0][0] == pytest.approx(float(logprob), abs=1e-6)
        assert [entry[0] for entry in row] == sorted((entry[0] for entry in row), reverse=True)


async def test_no_logprobs_unless_asked(door: SGLangEngine, prompts: np.random.Generator) -> None:
    answer = await run(door, greedy(ids(prompts, 20), 10))
    assert answer.logprob_bytes == b"" and answer.top_logprobs == () and answer.prompt_logprob_bytes == b""
    assert len(answer.token_bytes) == 40


@pytest.mark.parametrize("count", [1, 2, 9, 33])
async def test_length_is_exact(door: SGLangEngine, prompts: np.random.Generator, count: int) -> None:
    answer = await run(door, greedy(ids(prompts, 17), count, logprobs=True))
    assert answer.finish_reason == "length"
    assert len(answer.token_bytes) == len(answer.logprob_bytes) == 4 * count


async def test_stop_token_ends_and_is_included(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 20)
    whole = np.frombuffer((await run(door, greedy(prompt, 40))).token_bytes, "<u4")
    stop = int(whole[20])
    end = int(np.flatnonzero(whole == stop)[0]) + 1
    # ignore_eos makes SGLang ignore stop_token_ids as well.
    answer = await run(
        door, greedy(prompt, 40, sampling={"stop_token_ids": [stop], "ignore_eos": False}, logprobs=True)
    )
    assert answer.finish_reason == "stop"
    assert answer.matched_stop == stop
    assert np.frombuffer(answer.token_bytes, "<u4").tolist() == whole[:end].tolist()
    assert len(answer.logprob_bytes) == 4 * end


async def test_continuation_equals_the_uninterrupted_run(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 50)
    whole = await run(door, greedy(prompt, 64, logprobs=True, top_logprobs=2))
    part = await run(door, greedy(prompt, 25))
    rest = await run(door, greedy(prompt + part.token_bytes, 39))
    assert rest.prompt_tokens == 75
    same_tokens(whole, part, rest)


async def test_replay_scores_what_was_generated(door: SGLangEngine, prompts: np.random.Generator) -> None:
    prompt = ids(prompts, 30)
    answer = await run(door, greedy(prompt, 40, logprobs=True))
    sequence = prompt + answer.token_bytes
    outputs = await run(door, ask(sequence, 0, prompt_logprobs_from=30))
    assert outputs.token_bytes == b"" and outputs.finish_reason == "length"
    assert outputs.version_spans == (("default", 0, 0),)
    scored = np.frombuffer(outputs.prompt_logprob_bytes, "<f4")
    assert len(scored) == 40
    np.testing.assert_allclose(scored, np.frombuffer(answer.logprob_bytes, "<f4"), atol=LOGPROB_TOLERANCE)
    everything = await run(door, ask(sequence, 0, prompt_logprobs_from=0))
    scored_all = np.frombuffer(everything.prompt_logprob_bytes, "<f4")
    assert len(scored_all) == 70
    assert np.isnan(scored_all[0]) and np.isfinite(scored_all[1:]).all()
    np.testing.assert_allclose(scored_all[30:], scored, atol=LOGPROB_TOLERANCE)


async def test_text_prompt_returns_its_ids(door: SGLangEngine, is_real: bool) -> None:
    answer = await run(door, ask(b"", 8, text="def total(numbers): return", sampling={"temperature": 0.0}))
    assert len(answer.prompt_token_bytes) == 4 * answer.prompt_tokens > 0
    again = await run(door, greedy(answer.prompt_token_bytes, 8, sampling={"ignore_eos": False}))
    assert again.token_bytes == answer.token_bytes
    if is_real:  # the simulated engine has no tokenizer
        assert answer.text


@pytest.mark.parametrize(
    ("sampling", "max_new_tokens", "word"),
    [
        ({"max_tokens": 5}, 4, "max_tokens"),
        ({"temperature": -1.0}, 4, "temperature"),
        ({}, 5000, "context"),
    ],
)
async def test_bad_requests_are_refused(
    door: SGLangEngine, prompts: np.random.Generator, sampling: dict[str, object], max_new_tokens: int, word: str
) -> None:
    with pytest.raises(EngineFault) as caught:
        await run(door, ask(ids(prompts, 20), max_new_tokens, sampling=sampling))
    assert caught.value.kind is FaultKind.REFUSED
    assert word in caught.value.message
    assert caught.value.partial is None
    assert len((await run(door, greedy(ids(prompts, 20), 4))).token_bytes) == 16


async def test_prompt_as_long_as_the_context_is_refused(
    door: SGLangEngine, info: EngineInfo, prompts: np.random.Generator
) -> None:
    longest = await run(door, greedy(ids(prompts, info.max_prompt_tokens), 2))
    assert longest.prompt_tokens == info.max_prompt_tokens
    with pytest.raises(EngineFault) as caught:
        await run(door, greedy(ids(prompts, info.max_prompt_tokens + 1), 2))
    assert caught.value.kind is FaultKind.REFUSED
    assert caught.value.partial is None, "the filler token of a refused prompt is not output"


async def test_ids_outside_the_vocabulary_never_reach_the_engine(
    door: SGLangEngine, info: EngineInfo, prompts: np.random.Generator
) -> None:
    good = ids(prompts, 8)
    bad = good + np.array([info.vocabulary_size], "<u4").tobytes()
    requests = [
        ask(bad, 4),
        ask(good, 4, sampling={"stop_token_ids": [info.vocabulary_size]}),
        ask(good, 4, sampling={"stop_token_ids": [-1]}),
        ask(good, 4, sampling={"logit_bias": {str(info.vocabulary_size): 1.0}}),
        ask(good, 4, logprobs=True, engine_params={"token_ids_logprob": [info.vocabulary_size]}),
    ]
    for request in requests:
        with pytest.raises(EngineFault, match="outside the vocabulary") as caught:
            await run(door, request)
        assert caught.value.kind is FaultKind.REFUSED
    assert await door.ready()
    edge = np.array([info.vocabulary_size - 1], "<u4").tobytes()
    assert len((await run(door, greedy(good + edge, 4))).token_bytes) == 16


async def test_many_at_once_equal_each_alone(door: SGLangEngine, prompts: np.random.Generator) -> None:
    requests = [greedy(ids(prompts, 20 + 3 * number), 30, logprobs=True, top_logprobs=2) for number in range(12)]
    together = await gather(door, requests)
    near_ties = 0
    for request, answer in zip(requests, together, strict=True):
        alone = await run(door, greedy(request.token_bytes, 30, logprobs=True, top_logprobs=2))
        near_ties += same_tokens(alone, answer)
    assert near_ties <= 2


async def test_an_attempt_needs_no_free_connection_to_be_aborted(
    engine_url: str, is_real: bool, prompts: np.random.Generator
) -> None:
    narrow = SGLangEngine(engine_url, vocabulary_size=1024, max_connections=1)
    await narrow.register()
    started = asyncio.Event()
    request = greedy(ids(prompts, 20), 3000)
    attempt = asyncio.create_task(narrow.generate(request, lambda _: started.set()))
    await started.wait()
    with pytest.raises(EngineFault) as caught:
        await run(narrow, greedy(ids(prompts, 20), 4))
    assert caught.value.kind is FaultKind.BUSY
    await narrow.abort(request.attempt_id)
    assert (await attempt).finish_reason == "abort"
    await narrow.close()
