"""What goes in and comes out over the real channel: bad input, replayed log-probs, text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutd.client import RolloutResult
from tests.e2e.conftest import Rig, engines_ready
from tests.e2e.engine_http import EngineHttp
from tests.e2e.processes import Rolloutd
from tests.e2e.rollouts import prompt, take

VOCABULARY_SIZE, CONTEXT_TOKENS = 1024, 4096
# Between prefill and decode the same log-prob is computed in another order of sums, in float32.
LOGPROB_TOLERANCE = 1e-3

pytestmark = pytest.mark.sglang

GOOD: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
BAD: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "id at the vocabulary size": ([5, VOCABULARY_SIZE], {}, str(VOCABULARY_SIZE)),
    "largest id": ([2**32 - 1], {}, str(VOCABULARY_SIZE)),
    "stop id": ([5], {"stop_token_ids": [VOCABULARY_SIZE]}, "stop_token_ids"),
    "biased id": ([5], {"logit_bias": {VOCABULARY_SIZE: 1.0}}, "logit_bias"),
    "empty": ([], {}, "empty"),
    "as long as the context": ([5] * CONTEXT_TOKENS, {}, str(CONTEXT_TOKENS)),
    "with its output over the context": ([5] * (CONTEXT_TOKENS - 8), {"max_new_tokens": 9}, str(CONTEXT_TOKENS)),
    "no output": ([5], {"max_new_tokens": 0}, "max_new_tokens"),
    "temperature": ([5], {"temperature": -1.0}, "temperature"),
}


async def test_bad_input_is_refused_and_the_rest_of_its_batch_served(real: Rig, random: np.random.Generator) -> None:
    async with real.client() as client:
        for name, (tokens, words, _) in BAD.items():
            await client.submit(tokens, rollout_id=name, **{**GOOD, **words})
            await client.submit(prompt(random), rollout_id=f"good beside {name}", **GOOD)
        results = await take(client, 2 * len(BAD))
    for name, (_, _, said) in BAD.items():
        result = results[name]
        assert result.outcome == "refused" and result.problem is not None, (name, result.outcome)
        assert result.problem.code == "INVALID_ARGUMENT", name
        assert said in str(result.problem), name
        assert results[f"good beside {name}"].complete, name
    for engine in real.engines:
        assert len((await engine.uninterrupted(prompt(random), 4)).tokens) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_replay_gives_the_log_probs_of_generation(
    real: Rig, random: np.random.Generator, temperature: float
) -> None:
    tokens = prompt(random, 50)
    async with real.client() as client:
        written = await client.generate(
            tokens, max_new_tokens=64, temperature=temperature, ignore_eos=True, logprobs=True
        )
        replayed = await client.generate(np.concatenate([tokens, written.tokens]), task_type="replay")
    assert len(written.logprobs) == 64 and len(replayed.tokens) == 0
    assert len(replayed.prompt_logprobs) == 50 + 64 and np.isnan(replayed.prompt_logprobs[0])
    difference = float(np.abs(replayed.prompt_logprobs[50:] - written.logprobs).max())
    print(f"\ntemperature {temperature}: largest difference {difference:.1e}")
    assert difference < LOGPROB_TOLERANCE


async def _text(target: Rig, text: str) -> list[RolloutResult]:
    async with target.client() as client:
        return await client.generate_group(text, samples=4, **GOOD)


async def test_text_prompts_with_and_without_a_tokenizer(
    real: Rig, started: list[Rolloutd], tmp_path: Path, sglang_engines: list[EngineHttp]
) -> None:
    model = Path(json.loads((await sglang_engines[0].get("/model_info"))[1])["model_path"])
    config = tmp_path / "rolloutd.yaml"
    config.write_text(f"pools:\n  policy:\n    tokenizer: {model / 'tokenizer.json'}\n")
    server = Rolloutd([engine.url for engine in sglang_engines], "--config", str(config))
    started.append(server)
    server.start()
    await engines_ready(server.target, 2)

    text = "the quick brown fox jumps over the lazy dog " * 8
    by_engine = await _text(real, text)
    for engine in sglang_engines:
        await engine.flush()
    by_server = await _text(Rig(server, sglang_engines), text)
    assert all(result.complete and result.text for result in by_engine + by_server)
    assert len({result.tokens.tobytes() for result in by_engine + by_server}) == 1
    ids = by_server[0].prompt_token_ids
    assert len(ids) == by_server[0].prompt_tokens == by_engine[0].prompt_tokens > 32
    assert await asyncio.gather(sglang_engines[0].uninterrupted(ids, 8))
    # Tokenised here, siblings wait for their leader as those of an id prompt do.
    assert sorted(result.cached_tokens > 0 for result in by_server) == [False, True, True, True]
