"""What a SGLang `/generate` stream says, frame by frame, as typed structs.

What this module does not know: how frames add up (`collector.py`), HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

# (log-prob or null where it is not finite, token id, text or null)
LogprobEntry = tuple[float | None, int | None, Any]
TopEntry = list[LogprobEntry] | None


class FrameError(ValueError):
    """A frame that makes no sense: it skips tokens, contradicts an earlier one, or is not what the contract says."""


class FinishReason(msgspec.Struct):
    """Why generation ended. `status_code` is set on aborts that the server itself made."""

    type: str
    message: str | None = None
    status_code: int | None = None
    matched: int | str | list[int] | None = None


class VersionSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled under `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    """The part of `meta_info` that the door reads."""

    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[LogprobEntry] | None = None
    output_top_logprobs: list[TopEntry] | None = None
    input_token_logprobs: list[LogprobEntry] | None = None
    input_top_logprobs: list[TopEntry] | None = None


class Frame(msgspec.Struct):
    """One `data:` line of the stream. `error` alone means the engine refused after it had sent its 200."""

    meta_info: MetaInfo | None = None
    output_ids: list[int] | None = None
    text: str | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


decode_frame = msgspec.json.Decoder(Frame).decode
