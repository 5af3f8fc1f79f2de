"""Greedy results decoded again, each span with the weights that it names.

Two ways that share nothing: an engine that holds those weights, asked to go on from prompt + tokens before the span; and plain
transformers, which can also go on from KV of other weights, as an engine does after a swap in place.

What this module does not know: how the results came about, beyond their spans and the mode of each publication.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rolloutd.client import RolloutResult
from rolloutd.client.results import Span
from tests.e2e.engine_http import EngineHttp
from tests.sglang_servers import environment

WORKER = Path(__file__).with_name("reference_decoding.py")
REQUESTS_AT_ONCE = 32


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


async def by_transformers(
    results: Sequence[Sequence[Part]], checkpoints: Mapping[int, Path], *, all_fresh: bool = False
) -> list[Reference]:
    """One reference per result. `checkpoints` by version. all_fresh: as if every span had followed a prefill."""
    job = {
        "checkpoints": {path.name: str(path) for path in checkpoints.values()},
        "sequences": [
            {
                "prompt": parts[0].prompt,
                "output": parts[0].tokens,
                "parts": [
                    (
                        checkpoints[part.span.policy_version].name,
                        part.span.start,
                        part.span.end,
                        part.fresh or all_fresh,
                    )
                    for part in parts
                ],
            }
            for parts in results
        ],
    }
    process = await asyncio.create_subprocess_exec(
        str(environment() / "venv" / "bin" / "python"), str(WORKER),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        answer, complaint = await process.communicate(json.dumps(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complaint.decode()
    return [Reference(np.array(one["leads"]), np.array(one["logprobs"])) for one in json.loads(answer)]


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
