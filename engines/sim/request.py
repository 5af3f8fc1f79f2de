"""What goes into a simulated engine, what comes out, and the record of a live sequence.

Invariants
- Frames of one request carry its tokens in order, each once, and the last one has a `finish_reason` in SGLang's words.
- `queued` marks an end outside the running batch: tokens not sent before are lost, as in SGLang.

What this module does not know: HTTP, scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.filler import filler_tokens
from rolloutd.engines.sim.pool import Holding
from rolloutd.engines.sim.radix import TOKEN_BYTES
from rolloutd.engines.sim.tokens import LengthWriter, Sampling, TokenWriter


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One sequence to generate.

    prompt: token ids, uint32 LE; all below the vocabulary size. namespace: cache_salt and extra_key.
    stream: flush at `stream_interval` (None: the engine's); else every 50 tokens, as SGLang does for its own use.
    logprob_start: first prompt position whose log-prob is wanted; caps prefix reuse. -1 for none.
    """

    rid: str
    prompt: bytes
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = True
    stream_interval: int | None = None
    logprob_start: int = -1
    namespace: tuple[str, str] = ("", "")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES


@dataclass(slots=True)
class Frame:
    """News of one request: tokens since the last frame, with their log-probs.

    completion_tokens: all tokens sent so far. cached_tokens: prefix hit at first admission.
    spans: (weight version, start, end) over the output; on the last frame only.
    prompt_version: weights under which the prompt was first computed.
    """

    rid: str
    time_seconds: float
    tokens: list[int]
    logprobs: list[float]
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    weight_version: str
    prompt_version: str
    finish_reason: dict[str, Any] | None = None
    spans: tuple[tuple[str, int, int], ...] = ()
    queued: bool = False


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The engine's load at `time_seconds`. Counters are since its start; seconds and rates are simulated.

    used_tokens: held by admitted sequences, without evictable cache. queued_tokens: uncached prompt tokens that wait.
    """

    time_seconds: float
    running: int
    waiting: int
    used_tokens: int
    queued_tokens: int
    queued_total_tokens: int
    retracted_waiting: int
    capacity_tokens: int
    generated_tokens_per_second: float
    cache_hit_rate: float
    prefilled_tokens_total: int
    prefill_busy_seconds_total: float
    generated_tokens_total: int
    cached_tokens_total: int
    finished_total: int
    aborted_total: int
    retracted_total: int


class Sequence:
    """A live request. `produced` tokens exist while it waits or prefills; while it decodes, step - start_step do."""

    __slots__ = (
        "abort_reason",
        "cached_tokens",
        "event_step",
        "holding",
        "max_new_tokens",
        "produced",
        "prompt_version",
        "request",
        "retractions",
        "sent",
        "spans",
        "start_step",
        "writer",
    )

    def __init__(self, request: SimRequest, max_new_tokens: int) -> None:
        self.request = request
        self.max_new_tokens = max_new_tokens
        self.writer: TokenWriter | LengthWriter | None = None
        self.holding: Holding | None = None
        self.produced = 0
        self.sent = 0
        self.start_step = 0
        self.event_step = -1
        self.cached_tokens = 0
        self.retractions = 0
        self.prompt_version = ""
        self.spans: list[tuple[str, int]] = []  # (version, first output index)
        self.abort_reason: dict[str, Any] | None = None

    def start_writing(self, config: MachineConfig, weight_version: str) -> None:
        """Begin the output. Raises ValueError where only lengths are kept and this one can not be known."""
        sampling = replace(self.request.sampling, max_new_tokens=self.max_new_tokens)
        if config.write_tokens:
            self.writer = TokenWriter(config.model, self.request.prompt, sampling, weight_version)
        else:
            self.writer = LengthWriter(self.request.prompt_tokens, sampling)
            self.writer.tokens = filler_tokens(
                self.request.prompt, sampling.sampling_seed, self.writer.end_tokens, config.model.vocabulary_size
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV once admitted: all but the newest output token."""
        return self.request.prompt_tokens + max(self.produced, 1) - 1

    @property
    def remaining_tokens(self) -> int:
        """Output tokens still allowed."""
        return self.max_new_tokens - self.produced

    def context_bytes(self, output_tokens: int | None = None) -> bytes:
        """Prompt and the first `output_tokens` (default: all produced) output tokens, where they are written."""
        count = self.produced if output_tokens is None else output_tokens
        if count <= 0 or self.writer is None or not self.writer.tokens:
            return self.request.prompt
        return self.request.prompt + np.array(self.writer.tokens[:count], dtype="<u4").tobytes()

    def frame(
        self,
        time_seconds: float,
        upto: int,
        weight_version: str,
        finish_reason: dict[str, Any] | None,
        queued: bool,
    ) -> Frame:
        """Report the tokens up to output index `upto` that were not reported yet."""
        writer, sent, self.sent = self.writer, self.sent, upto
        return Frame(
            rid=self.request.rid,
            time_seconds=time_seconds,
            tokens=writer.tokens[sent:upto] if writer is not None else [],
            logprobs=writer.logprobs[sent:upto] if writer is not None else [],
            completion_tokens=upto,
            prompt_tokens=self.request.prompt_tokens,
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            weight_version=self.spans[-1][0] if self.spans else weight_version,
            prompt_version=self.prompt_version,
            finish_reason=finish_reason,
            spans=tuple(_closed_spans(self.spans, upto)) if finish_reason is not None else (),
            queued=queued,
        )


def _closed_spans(spans: list[tuple[str, int]], end: int) -> Iterator[tuple[str, int, int]]:
    for index, (version, start) in enumerate(spans):
        stop = spans[index + 1][1] if index + 1 < len(spans) else end
        stop = min(stop, end)
        if start < stop or (index == 0 and end == 0):
            yield version, start, stop
