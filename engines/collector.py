"""How the frames of a SGLang `/generate` stream add up to one slice.

Invariants
- `Collector` counts tokens by the engine's own `completion_tokens`: a token that a frame repeats is not taken twice, a
  token that a frame skips is an error (`FrameError`), never a silent gap.
- Tokens, log-probs and top log-probs stay aligned after every frame.
- The token of an answer that ends with a status of 400 is the engine's filler, not output; it is never taken.

Two stream forms exist and a server uses one of them for all requests (`incremental_streaming_output`). Cumulative: each
frame holds everything so far, frames may be missing. Incremental: each frame holds what is new, late frames come
merged. In the incremental form an abort outside the running batch ends with an odd frame: the last token once more, the
whole text, the whole log-prob lists; it may be merged behind frames that do hold news.

What this module does not know: HTTP, time, retries.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

from rolloutd.engines.base import AttemptRequest, Slice
from rolloutd.engines.frames import FinishReason, Frame, FrameError, LogprobEntry, MetaInfo, TopEntry, VersionSpan

# Fields of `meta_info` that every answer may carry (accounting, times, what `Slice` has fields for). What remains was
# asked for through engine_params and goes into `Slice.extras`. Source: SGLang 0.5.23, answers seen with metrics on.
_COMMON_META = frozenset(
    (
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "cached_tokens",
        "cached_tokens_details",
        "weight_version",
        "weight_versions",
        "num_retractions",
        "dp_rank",
        "e2e_latency",
        "storage_prefetch_wait",
        "storage_staging_wait",
        "forward_entry_time",
        "prefill_finished_time",
        "queue_time",
        "first_token_latency",
        "decode_throughput",
        "request_received_ts",
        "request_finished_ts",
        "response_sent_to_client_ts",
        "api_server_dispatch_finish_ts",
        "output_token_logprobs",
        "output_token_logprobs_length",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
    )
)
# Extras with one entry per output token, which the incremental form sends in pieces.
_PER_TOKEN_META = ("output_token_ids_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")

_NAN = float("nan")


def _little_endian(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def ids_to_bytes(ids: list[int]) -> bytes:
    """uint32 LE bytes; FrameError for an id that does not fit."""
    try:
        return _little_endian(array("I", ids))
    except (OverflowError, TypeError) as error:
        raise FrameError(f"the engine returned a token id outside uint32: {error}") from error


def _logprob_array(entries: list[LogprobEntry]) -> array[float]:
    try:
        return array("f", [entry[0] for entry in entries])  # type: ignore[misc]
    except TypeError:  # the rare one that is not finite
        return array("f", [_NAN if entry[0] is None else entry[0] for entry in entries])


def _top(rows: list[TopEntry]) -> list[tuple[tuple[float, int], ...]]:
    return [
        tuple((_NAN if lp is None else lp, -1 if token is None else token) for lp, token, _ in row or ())
        for row in rows
    ]


class Collector:
    """Adds up the frames of one attempt. `slice()` may be called at any time."""

    def __init__(self, request: AttemptRequest, incremental: bool) -> None:
        self.finish: FinishReason | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._request = request
        self._incremental = incremental
        self._ids = array("I")
        self._logprobs = array("f")
        self._top: list[tuple[tuple[float, int], ...]] = []
        self._text = ""
        self._prompt_ids = b""
        self._prompt_logprobs: list[LogprobEntry] = []
        self._prompt_top: list[TopEntry] = []
        self._final_spans: list[VersionSpan] | None = None
        self._seen_spans: list[VersionSpan] = []  # from each frame's own label, until the final answer says it exactly
        self._swapped_in_place: set[str] = set()
        self._version = ""
        self._extras: dict[str, Any] = {}

    def has_finished(self) -> bool:
        """Whether the engine's final word has come. A call, because it changes between two looks at it."""
        return self.finish is not None

    @property
    def generated_tokens(self) -> int:
        return len(self._ids)

    def add(self, frame: Frame) -> int:
        """Take a frame without an error; returns how many tokens were new. FrameError leaves the collector as it
        was."""
        meta = frame.meta_info
        if meta is None:
            raise FrameError("a frame without meta_info")
        finish = meta.finish_reason
        if finish is not None and finish.status_code is not None and 400 <= finish.status_code < 500:
            self.finish = finish
            return 0
        seen = len(self._ids)
        ids = frame.output_ids or []
        total = meta.completion_tokens
        if total is None:
            total = seen + len(ids) if self._incremental else len(ids)
        new = total - seen
        fresh = self._fresh(ids, new, total, ended=finish is not None)
        logprobs, top = self._fresh_logprobs(meta, new)
        try:
            self._ids.extend(fresh)
        except (OverflowError, TypeError) as error:
            del self._ids[seen:]
            raise FrameError(f"the engine returned a token id outside uint32: {error}") from error
        if logprobs:
            self._logprobs.extend(logprobs)
        if top:
            self._top.extend(top)
        self._add_text(frame.text, repeats=self._incremental and len(ids) > new, ended=finish is not None)
        self._add_meta(frame, meta, seen, total)
        return new

    def _fresh(self, ids: list[int], new: int, total: int, *, ended: bool) -> list[int]:
        seen = total - new
        if new < 0:
            raise FrameError(f"the stream went back from {seen} tokens to {total}")
        if self._incremental:
            if len(ids) != new and not self._repeats(ids, new, ended):
                raise FrameError(f"{len(ids)} token ids where {new} are new (tokens {seen} to {total})")
            return ids[:new]
        if len(ids) != total:
            raise FrameError(f"a cumulative frame holds {len(ids)} token ids and says {total}")
        if seen and ids[seen - 1] != self._last():
            raise FrameError(f"a cumulative frame contradicts an earlier one at token {seen - 1}")
        return ids[seen:]

    def _repeats(self, ids: list[int], new: int, ended: bool) -> bool:
        """Whether an incremental frame holds known tokens only, or the odd abort frame behind some news."""
        if not new:
            return ids == self._ids[-len(ids) :].tolist()
        return ended and len(ids) == new + 1 and ids[-1] == ids[-2]

    def _last(self) -> int | None:
        return self._ids[-1] if self._ids else None

    def _fresh_logprobs(self, meta: MetaInfo, new: int) -> tuple[array[float], list[tuple[tuple[float, int], ...]]]:
        if not self._request.logprobs or not new:
            return array("f"), []
        begin = 0 if self._incremental else len(self._ids)
        entries = (meta.output_token_logprobs or [])[begin : begin + new]
        if len(entries) != new:
            raise FrameError(f"{len(entries)} log-probs for {new} new tokens")
        if not self._request.top_logprobs:
            return _logprob_array(entries), []
        rows = (meta.output_top_logprobs or [])[begin : begin + new]
        if len(rows) != new:
            raise FrameError(f"{len(rows)} rows of top log-probs for {new} new tokens")
        return _logprob_array(entries), _top(rows)

    def _add_text(self, text: str | None, *, repeats: bool, ended: bool) -> None:
        if text is None:
            return
        if not self._incremental:
            self._text = text
        elif not repeats:
            self._text += text
        elif ended:
            # The odd frame: what is new (perhaps nothing), then the whole text with it. len = 2 * new + old.
            self._text = text[max(0, len(text) - len(self._text)) // 2 :]

    def _add_meta(self, frame: Frame, meta: MetaInfo, seen: int, total: int) -> None:
        self.finish = meta.finish_reason
        if meta.prompt_tokens is not None:
            self.prompt_tokens = meta.prompt_tokens
        if meta.cached_tokens is not None:
            self.cached_tokens = meta.cached_tokens
        if frame.prompt_token_ids and not self._prompt_ids:
            self._prompt_ids = ids_to_bytes(frame.prompt_token_ids)
        if meta.input_token_logprobs:
            self._prompt_logprobs = meta.input_token_logprobs
            self._prompt_top = meta.input_top_logprobs or []
        if meta.weight_versions is not None:
            self._final_spans = meta.weight_versions
        version = meta.weight_version
        self._version = version or self._version
        if version is not None and total > seen:
            last = self._seen_spans[-1] if self._seen_spans else None
            if last is not None and last.version == version:
                last.end = total
            else:
                self._seen_spans.append(VersionSpan(version, seen, total))

    def note_swap_in_place(self, version: str) -> None:
        """The weights became `version` under this attempt while its next token was being computed by the old ones.

        The engine counts that token to the new weights. It is moved to those that wrote it.
        """
        self._swapped_in_place.add(version)

    def add_extras(self, meta: Mapping[str, Any], new: int) -> None:
        """Keep what engine_params asked for; call after `add` with the same frame's whole `meta_info`."""
        for key, value in meta.items():
            if key in _COMMON_META or value is None:
                continue
            if self._incremental and key in _PER_TOKEN_META:
                self._extras.setdefault(key, []).extend(value[:new])
            else:
                self._extras[key] = value

    def slice(self, finish_reason: str) -> Slice:
        """All that has arrived, as one slice that ended for this reason.

        Without the engine's last word, a frame in which the weights changed may hold tokens of both: it and what follows it is
        given up, and the slice counts as cut short ("abort").
        """
        count = len(self._ids)
        if self._final_spans is None and len(self._seen_spans) > 1:
            count = self._seen_spans[0].end
            finish_reason = "abort"
        matched = self.finish.matched if self.finish is not None else None
        if isinstance(matched, list):
            matched = matched[-1] if matched else None
        return Slice(
            attempt_id=self._request.attempt_id,
            token_bytes=_little_endian(self._ids if count == len(self._ids) else self._ids[:count]),
            finish_reason=finish_reason,
            logprob_bytes=_little_endian(self._logprobs if count == len(self._ids) else self._logprobs[:count]),
            top_logprobs=tuple(self._top[:count]) if self._top else (),
            matched_stop=matched,
            text=self._text,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_token_bytes=self._prompt_ids,
            prompt_logprob_bytes=self._prompt_logprob_bytes(),
            prompt_top_logprobs=tuple(_top(self._prompt_top[self._prompt_skip() :])) if self._prompt_top else (),
            version_spans=self._spans(count),
            extras=self._extras,
        )

    def _spans(self, count: int) -> tuple[tuple[str, int, int], ...]:
        spans = self._final_spans if self._final_spans is not None else self._seen_spans
        if not count and self._request.prompt_logprobs_from is not None and self._version:
            # A scored prompt has no output; its log-probs still belong to a version.
            return ((self._version, 0, 0),)
        late = self._swapped_in_place if spans is self._final_spans else ()
        if len(spans) == 1 and not late:  # nearly always
            (span,) = spans
            end = min(span.end, count)
            return ((span.version, span.start, end),) if span.start < end else ()
        starts = [span.start + (span.start > 0 and span.version in late) for span in spans]
        ends = [min(end, count) for end in (*starts[1:], *(span.end for span in spans[-1:]))]
        return tuple(
            (span.version, start, end) for span, start, end in zip(spans, starts, ends, strict=True) if start < end
        )

    def _prompt_skip(self) -> int:
        # The engine has no log-prob for the first position it is asked about, so it was asked for one position earlier.
        return 1 if (self._request.prompt_logprobs_from or 0) > 0 else 0

    def _prompt_logprob_bytes(self) -> bytes:
        if self._request.prompt_logprobs_from is None:
            return b""
        return _little_endian(_logprob_array(self._prompt_logprobs[self._prompt_skip() :]))
