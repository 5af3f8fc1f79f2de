"""SGLang's `/generate` words: reading a request, and building answers from the machine's frames.

Invariants
- A request is refused here in the form and with the status of SGLang 0.5.23: contract errors before a stream starts,
  value errors inside it. What the simulated model can not do (stop strings, grammars, batches) is refused, not ignored.
- In incremental mode `output_ids` and output log-probs of a frame are deltas, counters are cumulative; the frame of a
  request that ends outside the running batch repeats its last token and carries all log-probs, as SGLang's does.

What this module does not know: connections, time scale, scheduling.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.tokens import FIRST_ORDINARY_TOKEN, Sampling, as_array, score


class ContractError(Exception):
    """The body is not of the contract's form: 400 `{"error": "<text>"}` whether streaming or not."""


class ValueRefused(Exception):
    """A value is refused: 400 `{"error": {"message"}}`, or one error frame where the request streams."""


class OutsideVocabulary(Exception):
    """A token id that kills a real engine."""


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params`; unknown keys are refused."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: int | None = None
    watermark: dict[str, Any] | None = None
    choice: list[str] | None = None


class GenerateBody(msgspec.Struct):
    """Top level of a `/generate` body; unknown keys are ignored, as in SGLang."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    stream: bool | None = False
    sampling_params: SamplingBody | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    top_logprobs_num: int | None = 0
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool | None = False
    return_routed_experts: bool | None = False
    return_prompt_token_ids: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None
    session_params: dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    input_embeds: list[Any] | None = None


_UNSUPPORTED = (
    "token_ids_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "input_embeds",
)
_UNSUPPORTED_SAMPLING = (
    "stop",
    "stop_regex",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "beam_width",
    "watermark",
    "choice",
)
_decoder = msgspec.json.Decoder(GenerateBody)


class Generate:
    """A decoded request: what the machine needs (`sim`) and what only answers need."""

    __slots__ = ("by_text", "logprob_start", "prompt_ids", "return_logprob", "return_prompt_ids", "sim", "top_logprobs")

    def __init__(self, body: GenerateBody, sim: SimRequest) -> None:
        self.sim = sim
        self.by_text = body.text is not None and body.input_ids is None
        self.return_logprob = bool(body.return_logprob)
        self.logprob_start = sim.logprob_start
        self.top_logprobs = body.top_logprobs_num or 0
        self.return_prompt_ids = body.return_prompt_token_ids


def decode(data: bytes) -> GenerateBody:
    """Raises msgspec.DecodeError for bad JSON and ContractError for a wrong form."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ContractError(str(error)) from error


def read(body: GenerateBody, rid: str, config: MachineConfig) -> Generate:
    """Check values as SGLang's front process does. Raises ValueRefused or OutsideVocabulary."""
    params = body.sampling_params or SamplingBody()
    _refuse_unsupported(body, params)
    prompt = _prompt(body, config.model.vocabulary_size)
    prompt_tokens = len(prompt) // 4
    max_new = params.max_new_tokens
    if prompt_tokens >= config.context_tokens:
        raise ValueRefused(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({config.context_tokens} tokens)."
        )
    if max_new is not None and prompt_tokens + max_new > config.context_tokens:
        raise ValueRefused(
            f"Requested token count exceeds the model's maximum context length of {config.context_tokens} tokens. You "
            f"requested a total of {prompt_tokens + max_new} tokens: {prompt_tokens} tokens from the input messages and "
            f"{max_new} tokens for the completion."
        )
    _check_sampling(params)
    min_new = params.min_new_tokens or 0
    stops = frozenset(params.stop_token_ids or ())
    if min_new > 0 and any(not 0 <= token < config.model.vocabulary_size for token in stops):
        raise OutsideVocabulary("stop_token_ids with min_new_tokens")
    start = body.logprob_start_len if body.return_logprob and body.logprob_start_len is not None else -1
    if start > prompt_tokens:
        raise ValueRefused(
            f"req.logprob_start_len={start} is higher than the number of input tokens {prompt_tokens}. "
            "Please use a smaller logprob_start_len."
        )
    end_at = _end_at_tokens(params.custom_params, params.sampling_seed)
    sampling = Sampling(
        max_new_tokens=config.context_tokens if max_new is None else max_new,
        min_new_tokens=min_new,
        sampling_seed=params.sampling_seed,
        temperature=1.0 if params.temperature is None else params.temperature,
        ignore_eos=bool(params.ignore_eos),
        end_at_tokens=end_at,
        stop_token_ids=stops,
    )
    sim = SimRequest(
        rid,
        prompt,
        sampling,
        bool(body.stream),
        params.stream_interval,
        start,
        (body.cache_salt or "", body.extra_key or ""),
    )
    return Generate(body, sim)


def _refuse_unsupported(body: GenerateBody, params: SamplingBody) -> None:
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise ValueRefused(f"{name}: the simulated engine does not support it")
    for name in _UNSUPPORTED_SAMPLING:
        if getattr(params, name):
            raise ValueRefused(f"sampling_params.{name}: the simulated engine does not support it")
    if params.n is not None and params.n != 1:
        raise ValueRefused("sampling_params.n: the simulated engine takes one sequence per call; send n requests")


def _prompt(body: GenerateBody, vocabulary_size: int) -> bytes:
    if body.input_ids is not None:
        if not body.input_ids:
            raise ValueRefused("input_ids cannot be empty.")
        ids = np.array(body.input_ids, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            raise OutsideVocabulary(f"input_ids holds {int(ids.min())}..{int(ids.max())}, vocabulary {vocabulary_size}")
        return ids.astype("<u4").tobytes()
    if body.text is None:
        raise ValueRefused("Either text, input_ids or input_embeds should be provided.")
    if not body.text:
        raise ValueRefused("text cannot be empty.")
    if vocabulary_size < FIRST_ORDINARY_TOKEN + 256:
        raise ValueRefused(
            "text: the vocabulary is too small for the simulated engine's byte tokeniser; send input_ids"
        )
    return (
        (np.frombuffer(body.text.encode(), dtype=np.uint8).astype("<u4") + FIRST_ORDINARY_TOKEN).astype("<u4").tobytes()
    )


def _check_sampling(params: SamplingBody) -> None:
    def check(name: str, value: float | None, fits: bool, rule: str) -> None:
        if value is not None and not (math.isfinite(value) and fits):
            raise ValueRefused(f"{name} must be {rule}, got {value}.")

    p = params
    check("temperature", p.temperature, (p.temperature or 0) >= 0, "a non-negative finite number")
    check("top_p", p.top_p, 0 < (1 if p.top_p is None else p.top_p) <= 1, "in (0, 1]")
    check("top_k", p.top_k, p.top_k == -1 or (p.top_k or 0) >= 1, "-1 (disable) or at least 1")
    check("min_p", p.min_p, 0 <= (p.min_p or 0) <= 1, "in [0, 1]")
    check("frequency_penalty", p.frequency_penalty, -2 <= (p.frequency_penalty or 0) <= 2, "in [-2, 2]")
    check("presence_penalty", p.presence_penalty, -2 <= (p.presence_penalty or 0) <= 2, "in [-2, 2]")
    repetition = 1 if p.repetition_penalty is None else p.repetition_penalty
    check("repetition_penalty", p.repetition_penalty, 0 < repetition <= 2, "in (0, 2]")
    check("max_new_tokens", p.max_new_tokens, (p.max_new_tokens or 0) >= 0, "at least 0")
    check("stream_interval", p.stream_interval, p.stream_interval is None or p.stream_interval >= 1, "at least 1")
    limit = math.inf if p.max_new_tokens is None else p.max_new_tokens
    check("min_new_tokens", p.min_new_tokens, 0 <= (p.min_new_tokens or 0) <= limit, f"in [0, max_new_tokens({limit})]")


def _end_at_tokens(custom: dict[str, Any] | None, sampling_seed: int | None) -> int | None:
    """`end_at_tokens`, one number, or one per sampling seed where samples of a prompt share their sampling words."""
    end_at = (custom or {}).get("end_at_tokens")
    if isinstance(end_at, dict):
        if str(sampling_seed) not in end_at:
            raise ValueRefused(f"custom_params.end_at_tokens has no entry for sampling_seed {sampling_seed}.")
        end_at = end_at[str(sampling_seed)]
    if end_at is not None and (not isinstance(end_at, int) or isinstance(end_at, bool) or end_at < 1):
        raise ValueRefused(f"custom_params.end_at_tokens must be an integer of at least 1, got {end_at!r}.")
    return end_at


class Answers:
    """Builds the answers of one request from its frames, in the order of the machine."""

    def __init__(self, request: Generate, config: MachineConfig, incremental: bool) -> None:
        self._request = request
        self._config = config
        self._incremental = incremental
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._answered = 0
        self._last: Frame | None = None
        self._input_logprobs: dict[str, Any] | None = None

    def add(self, frame: Frame) -> None:
        """The next frame of the machine; several may be added before `answer`."""
        self._tokens += frame.tokens
        self._logprobs += frame.logprobs
        self._last = frame

    @property
    def finish_reason(self) -> dict[str, Any] | None:
        """Of the newest frame."""
        return None if self._last is None else self._last.finish_reason

    @property
    def tokens_sent(self) -> int:
        """Output tokens in answers so far."""
        return self._answered

    def answer(self, latency_seconds: float) -> dict[str, Any]:
        """The newest state as SGLang's JSON; `latency_seconds` is since the request arrived."""
        frame, request = self._last, self._request
        assert frame is not None
        odd = frame.queued
        start = self._answered if self._incremental and not odd else 0
        ids = self._tokens[start:]
        logprobs = self._logprobs[start:]
        meta: dict[str, Any] = {
            "id": frame.rid,
            "finish_reason": frame.finish_reason,
            "weight_version": frame.weight_version,
        }
        if not odd:
            meta["prompt_tokens"] = frame.prompt_tokens
            meta["num_retractions"] = frame.retractions
        if request.return_logprob:
            meta |= self._logprob_fields(frame, ids, logprobs)
        meta["completion_tokens"] = len(self._tokens)
        if not odd:
            cached = frame.cached_tokens
            meta["reasoning_tokens"] = 0
            meta["cached_tokens"] = cached
            meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
            meta["dp_rank"] = None
        if frame.finish_reason is not None:
            if frame.spans or not odd:
                meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in frame.spans]
            meta["e2e_latency"] = latency_seconds
        self._answered = len(self._tokens)
        if odd and self._incremental:
            ids = ids[-1:]
        text = "".join(f" t{token}" for token in (self._tokens if odd else ids)) if request.by_text else ""
        answer: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
        if request.return_prompt_ids:
            answer["prompt_token_ids"] = as_array(request.sim.prompt).tolist()
        return answer

    def _logprob_fields(self, frame: Frame, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        if self._input_logprobs is None:
            self._input_logprobs = self._score_prompt(frame)
        fields = dict(self._input_logprobs)
        fields["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(logprobs, ids, strict=False)]
        fields["output_token_logprobs_length"] = len(self._logprobs)
        if self._request.top_logprobs:
            fields["output_top_logprobs"] = [self._top(lp, t) for lp, t in zip(logprobs, ids, strict=False)]
        return fields

    def _score_prompt(self, frame: Frame) -> dict[str, Any]:
        start = self._request.logprob_start
        fields: dict[str, Any] = {"input_token_logprobs": []}
        if self._request.top_logprobs:
            fields["input_top_logprobs"] = []
        prompt = as_array(self._request.sim.prompt)
        if start < 0 or start >= len(prompt) or not frame.prompt_version:
            return fields
        scores = score(self._config.model, prompt, frame.prompt_version)[start:].tolist()
        ids = prompt[start:].tolist()
        fields["input_token_logprobs"] = [[None, ids[0], None]] + [
            [lp, token, None] for lp, token in zip(scores[1:], ids[1:], strict=True)
        ]
        if self._request.top_logprobs:
            fields["input_top_logprobs"] = [None] + [
                self._top(lp, t) for lp, t in zip(scores[1:], ids[1:], strict=True)
            ]
        return fields

    def _top(self, logprob: float, token: int) -> list[list[Any]]:
        """The token itself first, then made-up runners-up half a nat apart."""
        size = self._config.model.vocabulary_size
        return [[logprob - 0.5 * rank, (token + rank) % size, None] for rank in range(self._request.top_logprobs)]


def error_frame(message: str) -> dict[str, Any]:
    """The frame that a refused stream carries."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def error_object(message: str, status: int) -> dict[str, Any]:
    """The body of a server-made failure of a call that does not stream."""
    return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
