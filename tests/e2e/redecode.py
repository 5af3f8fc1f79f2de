"""Greedy results decoded again, each span with the weights that it names.

Two ways that share nothing: an engine that holds those weights, asked to go on from prompt + tokens before the span; and plain
transformers, which can also go on from KV of other weights, as an engine does after a swap in place.

What this module does not know: how the results came about, beyond their spans and the mode of each publication.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rolloutd.client import RolloutResult
from rolloutd.client.results import Span
from tests.dying import dying
from tests.e2e.engine_http import NEAR_TIE, EngineHttp
from tests.sglang_servers import environment

WORKER = Path(__file__).with_name("reference_decoding.py")
REQUESTS_AT_ONCE = 32
# Float32 on both sides, sums in another order.
LOGPROB_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """One span of a result. `fresh`: all KV before it was computed with its own weights."""

    rollout_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # of the whole result
    span: Span
    fresh: bool

    @property
    def before(self) -> list[int]:
        return [*self.prompt, *self.tokens[: self.span.start]]

    @property
    def own(self) -> list[int]:
        return list(self.tokens[self.span.start : self.span.end])


def parts_of(result: RolloutResult, prompt: Sequence[int], keeps_kv: Mapping[int, bool]) -> list[Part]:
    """The spans of a result. `keeps_kv`: by version, whether work that went on across its publication kept its KV."""
    tokens = tuple(int(token) for token in result.tokens)
    parts: list[Part] = []
    attempt = 0
    for span in result.spans:
        fresh = span.attempt != attempt or not keeps_kv[span.policy_version]
        attempt = span.attempt
        parts.append(Part(result.rollout_id, tuple(prompt), tokens, span, fresh))
    return parts


@dataclass(frozen=True, slots=True)
class Reference:
    """Per token of a result: how far it leads the best other token (negative: it is not the greedy one), and its log-prob."""

    leads: npt.NDArray[np.float64]
    logprobs: npt.NDArray[np.float64]


class Transformers:
    """The process of `reference_decoding.py`. Use as `with`."""

    def __enter__(self) -> Transformers:
        self._process = subprocess.Popen(
            dying([str(environment() / "venv" / "bin" / "python"), str(WORKER)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    async def decode(
        self, results: Sequence[Sequence[Part]], checkpoints: Mapping[int, Path], *, all_fresh: bool = False
    ) -> list[Reference]:
        """One reference per result. `checkpoints` by version. all_fresh: as if every span had followed a prefill."""
        job = [
            {
                "prompt": parts[0].prompt,
                "output": parts[0].tokens,
                "parts": [
                    (
                        str(checkpoints[part.span.policy_version]),
                        part.span.start,
                        part.span.end,
                        part.fresh or all_fresh,
                    )
                    for part in parts
                ],
            }
            for parts in results
        ]
        answer = await asyncio.to_thread(self._ask, json.dumps(job).encode())
        return [Reference(np.array(one["leads"]), np.array(one["logprobs"])) for one in json.loads(answer)]

    def _ask(self, job: bytes) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(job + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the reference ended with {self._process.wait()}"
        return answer


def check_greedy(results: Sequence[RolloutResult], references: Sequence[Reference]) -> int:
    """AssertionError unless each token is the greedy one and has its log-prob; returns near ties."""
    ties = 0
    for result, reference in zip(results, references, strict=True):
        wrong = np.flatnonzero(reference.leads <= -NEAR_TIE)
        assert not len(wrong), (
            f"{result.rollout_id}: tokens {wrong} are not the greedy ones, by {reference.leads[wrong]}; {result.spans}"
        )
        apart = np.abs(result.logprobs - reference.logprobs)
        assert np.max(apart) < LOGPROB_ERROR, f"{result.rollout_id}: log-probs are {apart} apart; {result.spans}"
        ties += int(np.sum(reference.leads <= 0))
    return ties


async def by_engine(engine: EngineHttp, parts: Sequence[Part]) -> int:
    """Decode fresh spans again on an engine that holds their weights. AssertionError when one differs other than from a near tie
    on; returns near ties."""
    assert all(part.fresh for part in parts)
    await engine.flush()
    room = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def differs(part: Part) -> bool:
        async with room:
            answer = await engine.uninterrupted(part.before, len(part.own))
        try:
            return answer.near_tie(np.array(part.own, np.uint32))
        except AssertionError as error:
            raise AssertionError(f"{part.rollout_id}, {part.span}: {error}") from error

    return sum(await asyncio.gather(*(differs(part) for part in parts)))
