"""From an `AttemptRequest` to the body of SGLang's POST /generate, refusing what would hurt the engine.

Invariants
- No token id at or above the vocabulary leaves this process, wherever it stands in the request: one such id stops the
  whole engine with every request in it.
- One body asks for one sequence; its id, its stream form and its token limit are ours, whatever the caller passes
  through.
- Prompt ids go from bytes to JSON without becoming Python objects.

What this module does not know: HTTP, answers, context limits (the engine knows them best and says so in words).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from rolloutd.engines.base import AttemptRequest, EngineFault, FaultKind

# Top-level request fields that this door sets itself, or that would change how the answer comes back.
OWN_FIELDS = frozenset(
    (
        "rid",
        "input_ids",
        "text",
        "input_embeds",
        "sampling_params",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "cache_salt",
        "return_prompt_token_ids",
        "background",
    )
)
# Sampling words that would make one attempt several sequences; they must be 1 where given.
_ONE_SEQUENCE = ("n", "beam_width")
# SGLang treats ids that start so as its own probes and drops them when it is busy.
_RESERVED_ID_PREFIX = "HEALTH_CHECK"

_UINT32_BYTES = 4
_LITTLE_ENDIAN = sys.byteorder == "little"


def _refuse(message: str) -> EngineFault:
    return EngineFault(FaultKind.REFUSED, message)


def _check_ids(ids: Iterable[Any], vocabulary_size: int, field: str) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise _refuse(f"{field}: {token!r} is not a token id")
        if not 0 <= token < vocabulary_size:
            raise _refuse(f"{field}: token id {token} is outside the vocabulary (0 to {vocabulary_size - 1})")


def _check_bias(bias: Any, vocabulary_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise _refuse("logit_bias: must map token ids to numbers")
    for key in bias:
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise _refuse(f"logit_bias: {key!r} is not a token id") from None
        _check_ids((token,), vocabulary_size, "logit_bias")


def _add_prompt(body: dict[str, Any], request: AttemptRequest, vocabulary_size: int) -> None:
    if request.text is not None:
        if request.token_bytes:
            raise _refuse("prompt: give token_bytes or text, not both")
        if not request.text:
            raise _refuse("prompt: the text is empty")
        body["text"] = request.text
        body["return_prompt_token_ids"] = True
        return
    if not request.token_bytes:
        raise _refuse("prompt: no tokens")
    if len(request.token_bytes) % _UINT32_BYTES:
        raise _refuse(f"prompt: {len(request.token_bytes)} bytes are not a whole number of uint32 token ids")
    ids = np.frombuffer(request.token_bytes, dtype="<u4")
    highest = int(np.maximum.reduce(ids))  # what ids.max() does, less its wrapper
    if highest >= vocabulary_size:
        position = int(np.argmax(ids >= vocabulary_size))
        raise _refuse(
            f"prompt: token id {int(ids[position])} at position {position} is outside the vocabulary "
            f"(0 to {vocabulary_size - 1})"
        )
    body["input_ids"] = ids if _LITTLE_ENDIAN else ids.astype(np.uint32)


def _sampling(request: AttemptRequest, vocabulary_size: int) -> dict[str, Any]:
    sampling = dict(request.sampling)
    if "max_new_tokens" in sampling:
        raise _refuse("sampling: max_new_tokens is a field of the attempt, not a sampling word")
    for word in _ONE_SEQUENCE:
        if sampling.get(word, 1) not in (1, None):
            raise _refuse(f"sampling: {word} must be 1, an attempt is one sequence")
    stops = sampling.get("stop_token_ids")
    if stops is not None:
        if isinstance(stops, (str, bytes, Mapping)) or not isinstance(stops, Iterable):
            raise _refuse("stop_token_ids: must be a list of token ids")
        sampling["stop_token_ids"] = stops = list(stops)
        _check_ids(stops, vocabulary_size, "stop_token_ids")
    if sampling.get("logit_bias") is not None:
        _check_bias(sampling["logit_bias"], vocabulary_size)
    sampling["max_new_tokens"] = request.max_new_tokens
    return sampling


def _passed_through(request: AttemptRequest, vocabulary_size: int) -> dict[str, Any]:
    taken = OWN_FIELDS.intersection(request.engine_params)
    if taken:
        raise _refuse(
            f"engine_params: {', '.join(sorted(taken))} cannot be passed through, it is set from the rollout itself"
        )
    params = dict(request.engine_params)
    if params.get("token_ids_logprob") is not None:
        wanted = params["token_ids_logprob"]
        if not isinstance(wanted, (list, tuple)):
            raise _refuse("engine_params: token_ids_logprob must be a list of token ids")
        _check_ids(wanted, vocabulary_size, "engine_params: token_ids_logprob")
    return params


def encode(request: AttemptRequest, vocabulary_size: int) -> bytes:
    """The JSON body. EngineFault REFUSED, naming the field, for what must not be sent."""
    if not request.attempt_id or request.attempt_id.startswith(_RESERVED_ID_PREFIX):
        raise _refuse(f"attempt_id: {request.attempt_id!r} is empty or reserved by the engine")
    if request.max_new_tokens < 0:
        raise _refuse(f"max_new_tokens: {request.max_new_tokens} is negative")
    body: dict[str, Any] = _passed_through(request, vocabulary_size) if request.engine_params else {}
    _add_prompt(body, request, vocabulary_size)
    body["rid"] = request.attempt_id
    body["stream"] = True
    body["sampling_params"] = _sampling(request, vocabulary_size)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    start = request.prompt_logprobs_from
    if start is not None and start < 0:
        raise _refuse(f"prompt_logprobs_from: {start} is negative")
    if request.logprobs or start is not None:
        body["return_logprob"] = True
        # -1: outputs only. The engine leaves the first position it is asked about empty, so ask one earlier.
        body["logprob_start_len"] = -1 if start is None else max(0, start - 1)
        if request.top_logprobs > vocabulary_size:
            raise _refuse(f"top_logprobs: {request.top_logprobs} is more than the vocabulary of {vocabulary_size}")
        if request.top_logprobs:
            body["top_logprobs_num"] = request.top_logprobs
    elif request.top_logprobs:
        raise _refuse("top_logprobs: needs logprobs")
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise _refuse(f"sampling or engine_params: not expressible as JSON ({error})") from error
