"""Results of rolloutd against what the engines said on the wire, token by token.

Invariants
- A result is exactly what the attempts of its rollout wrote, one behind the other: nothing lost, nothing twice.
- Each token is of the weights that its engine named for it, and the engine held those at that moment: what had come out before
  a load was asked for is older, what was asked for after one was answered is not.

What this module does not know: whether the weights that an engine names are the ones it computes with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from rolloutd.client import RolloutResult
from tests.e2e.engine_tap import EngineTap, Generation

LOAD = "/update_weights_from_disk"
Prompts = Mapping[str, Sequence[int]]  # by rollout id


class Token(NamedTuple):
    """One output token: its id, its log-prob, whose weights, on which engine (URL), in which attempt (from 1)."""

    token: int
    logprob: float
    version: int
    engine: str
    attempt: int


def version_of(label: str) -> int:
    """Policy version by the label that engines have for it."""
    return 0 if label == "default" else int(label)


def generations_by_rollout(taps: Sequence[EngineTap], prompts: Prompts) -> dict[str, list[Generation]]:
    """Attempts per rollout, in order. Prompts must differ."""
    rollout_ids = {tuple(prompt): rollout_id for rollout_id, prompt in prompts.items()}
    assert len(rollout_ids) == len(prompts), "two rollouts have the same prompt"
    lengths = sorted({len(prompt) for prompt in rollout_ids})
    found: dict[str, list[Generation]] = defaultdict(list)
    for generation in sorted((one for tap in taps for one in tap.generations), key=lambda one: one.asked_at):
        for length in lengths:
            rollout_id = rollout_ids.get(tuple(generation.input_ids[:length]))
            if rollout_id is not None:
                found[rollout_id].append(generation)
                break
    return found


def written(prompt: Sequence[int], generations: Sequence[Generation], in_place: Set[int]) -> list[Token]:
    """What the engines wrote for one rollout; AssertionError when an attempt did not go on where the one before ended.

    The last token of an aborted attempt is written again: the engine does not look whether it ends the output. in_place: versions
    that were swapped in under running work; the engine counts the token that was being computed to them, which is wrong.
    """
    tokens: list[Token] = []
    for attempt, generation in enumerate(generations, start=1):
        if attempt > 1 and generations[attempt - 2].finish_reason == "abort":
            del tokens[-1:]
        resumed = generation.input_ids[len(prompt) :]
        assert resumed == [token.token for token in tokens], (
            f"attempt {attempt} was sent {len(resumed)} tokens of those before it: {[str(one) for one in generations]}"
        )
        assert generation.spans or not generation.output, f"{generation}: the engine did not name its weights"
        assert len(generation.logprobs) == len(generation.output), generation
        versions = _versions(generation)
        for index, version in enumerate(versions):
            before = versions[index - 1] if index else version
            tokens.append(
                Token(
                    generation.output[index],
                    float(np.float32(generation.logprobs[index])),
                    before if version in in_place else version,
                    generation.engine,
                    attempt,
                )
            )
    return tokens


def delivered(result: RolloutResult, engine_urls: Mapping[str, str]) -> list[Token]:
    """The tokens of a result as its spans name them; AssertionError unless the spans cover them once each, in order."""
    tokens: list[Token] = []
    assert len(result.logprobs) == len(result.tokens), f"{result.rollout_id}: {len(result.logprobs)} log-probs"
    for span in result.spans:
        assert span.start == len(tokens) < span.end, f"{result.rollout_id}: spans {result.spans}"
        assert version_of(span.engine_version) == span.policy_version, span
        inside = slice(span.start, span.end)
        tokens += [
            Token(int(token), float(logprob), span.policy_version, engine_urls[span.engine_id], span.attempt)
            for token, logprob in zip(result.tokens[inside], result.logprobs[inside], strict=True)
        ]
    assert len(tokens) == len(result.tokens), f"{result.rollout_id}: spans {result.spans}, {len(result.tokens)} tokens"
    return tokens


def check_result(
    result: RolloutResult,
    prompt: Sequence[int],
    generations: Sequence[Generation],
    engine_urls: Mapping[str, str],
    in_place: Set[int],
) -> None:
    """AssertionError unless the result is what the engines wrote, log-probs included."""
    assert delivered(result, engine_urls) == written(prompt, generations, in_place), (
        f"{result.rollout_id}: {result.spans}, engines: {[str(one) for one in generations]}"
    )


def _versions(generation: Generation) -> list[int]:
    """Of each output token, as the engine says."""
    return [version_of(label) for label, start, end in generation.spans for _ in range(start, end)]


def check_times(tap: EngineTap) -> int:
    """AssertionError when a token names weights that the engine did not hold when it wrote it; returns tokens that had a bound."""
    bounded = 0
    loads = [order for order in tap.told(LOAD) if order.status == 200]
    for generation in tap.generations:
        versions = _versions(generation)
        for load in loads:
            version = int(load.body["weight_version"])
            before = max((frame.tokens for frame in generation.frames if frame.at < load.asked_at), default=0)
            assert all(one < version for one in versions[:before]), (
                f"{generation.rid}: {before} tokens had come before version {version} was loaded, spans {generation.spans}"
            )
            bounded += before
            if generation.asked_at > load.answered_at:
                assert all(one >= version for one in versions), (
                    f"{generation.rid}: asked for after version {version} was loaded, spans {generation.spans}"
                )
                bounded += len(versions)
    return bounded
