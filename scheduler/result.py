"""What an attempt brought back and what a rollout's consumer receives.

Invariants
- `token_bytes` of a result is the concatenation of its pieces, each exactly as an engine reported it.
- Spans cover all tokens of the result, in order, without gaps.
- Nothing here changes once it is made. (`frozen` would say so, but it is made for every rollout: compiled, an `__init__` that
  is written out costs a sixth of a generated one, and cannot be frozen.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import Outcome, RolloutClass, TaskType


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Piece:
    """What one attempt generated (a slice): ids uint32 LE, log-probs float32 LE aligned with them or empty.

    version_spans: (engine's weight version, start, end) over this piece's tokens.
    """

    token_bytes: bytes
    finish_reason: str  # "stop" | "length" | "abort"
    logprob_bytes: bytes = b""
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()
    matched_stop: int | str | None = None
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_token_bytes: bytes = b""
    prompt_logprob_bytes: bytes = b""
    version_spans: tuple[tuple[str, int, int], ...] = ()
    versions: tuple[int, ...] = ()  # policy version of each span, once the core knows it
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        token_bytes: bytes,
        finish_reason: str,
        logprob_bytes: bytes = b"",
        top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = (),
        matched_stop: int | str | None = None,
        text: str = "",
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        prompt_token_bytes: bytes = b"",
        prompt_logprob_bytes: bytes = b"",
        version_spans: tuple[tuple[str, int, int], ...] = (),
        versions: tuple[int, ...] = (),
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        self.token_bytes = token_bytes
        self.finish_reason = finish_reason
        self.logprob_bytes = logprob_bytes
        self.top_logprobs = top_logprobs
        self.matched_stop = matched_stop
        self.text = text
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.prompt_token_bytes = prompt_token_bytes
        self.prompt_logprob_bytes = prompt_logprob_bytes
        self.version_spans = version_spans
        self.versions = versions
        self.extras = {} if extras is None else extras

    def without_last_token(self, of_text: bool) -> Piece:
        """What an interrupted attempt hands to the next one.

        An abort is looked at before end tokens and limits, so the last token of an aborted attempt may be one that would
        have ended it, and nothing says so. It is cheap to write again: it has no KV yet. Text cannot be cut by tokens, so a
        piece with text is given up as a whole where the text is wanted (`of_text`); engines write it for id prompts too.
        """
        kept = max(0, len(self.token_bytes) // TOKEN_BYTES - 1)
        if of_text and self.text:
            kept = 0
        return replace(
            self,
            token_bytes=self.token_bytes[: kept * TOKEN_BYTES],
            logprob_bytes=self.logprob_bytes[: kept * TOKEN_BYTES],
            top_logprobs=self.top_logprobs[:kept],
            text="",
            version_spans=tuple(
                (version, start, min(end, kept)) for version, start, end in self.version_spans if start < kept
            ),
            versions=tuple(
                version
                for version, (_, start, _) in zip(self.versions, self.version_spans, strict=False)
                if start < kept
            ),
        )

    def with_versions(self, spans: tuple[tuple[str, int, int], ...], versions: tuple[int, ...]) -> Piece:
        """The same with what is known of its versions. (For every rollout: `dataclasses.replace` costs ten times as much.)"""
        return Piece(
            self.token_bytes,
            self.finish_reason,
            self.logprob_bytes,
            self.top_logprobs,
            self.matched_stop,
            self.text,
            self.prompt_tokens,
            self.cached_tokens,
            self.prompt_token_bytes,
            self.prompt_logprob_bytes,
            spans,
            versions,
            self.extras,
        )

    def first_tokens(self, tokens: int) -> Piece:
        """Only its first tokens, ended by an abort; for when the rest cannot be relied on. Text is given up."""
        return replace(
            self,
            token_bytes=self.token_bytes[: tokens * TOKEN_BYTES],
            logprob_bytes=self.logprob_bytes[: tokens * TOKEN_BYTES],
            top_logprobs=self.top_logprobs[:tokens],
            text="",
            finish_reason="abort",
            matched_stop=None,
            prompt_logprob_bytes=b"",
            version_spans=tuple(
                (version, start, min(end, tokens)) for version, start, end in self.version_spans if start < tokens
            ),
        )


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Span:
    """Tokens [start, end) of a result and who wrote them."""

    policy_version: int
    engine_version: str
    start: int
    end: int
    engine_id: str
    attempt: int

    def __init__(
        self,
        policy_version: int,
        engine_version: str,
        start: int,
        end: int,
        engine_id: str,
        attempt: int,
    ) -> None:
        self.policy_version = policy_version
        self.engine_version = engine_version
        self.start = start
        self.end = end
        self.engine_id = engine_id
        self.attempt = attempt


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class AttemptRecord:
    """One attempt in the life of a rollout. Times are in seconds since acceptance."""

    number: int
    engine_id: str
    batch_id: int
    policy_version: int  # that its engine held when it was dispatched
    started_seconds: float
    ended_seconds: float
    generated_tokens: int  # that it brought back
    end: str  # the engine's finish reason, why we stopped it, or its fault, in one word

    def __init__(
        self,
        number: int,
        engine_id: str,
        batch_id: int,
        policy_version: int,
        started_seconds: float,
        ended_seconds: float,
        generated_tokens: int,
        end: str,
    ) -> None:
        self.number = number
        self.engine_id = engine_id
        self.batch_id = batch_id
        self.policy_version = policy_version
        self.started_seconds = started_seconds
        self.ended_seconds = ended_seconds
        self.generated_tokens = generated_tokens
        self.end = end


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class RolloutResult:
    """How a rollout ended, with everything it produced. Times are in seconds since acceptance."""

    run_id: str
    rollout_id: str
    group_id: str
    sample_index: int
    session_id: str
    turn: int
    step: int | None
    rollout_class: RolloutClass
    task_type: TaskType
    stratum: str
    outcome: Outcome
    error: Refusal | None
    token_bytes: bytes
    logprob_bytes: bytes
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...]
    text: str
    prompt_token_bytes: bytes
    prompt_logprob_bytes: bytes
    finish_reason: str
    matched_stop: int | str | None
    spans: tuple[Span, ...]
    engine_id: str
    batch_id: int
    attempts: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int  # of the first attempt that got a token: what the engine's cache saved
    predicted_cached_tokens: int  # what the index believed at that dispatch
    generated_tokens: int
    queued_seconds: float  # all waiting, over all attempts
    first_token_seconds: float  # from acceptance; 0 when none came
    running_seconds: float  # slot time, over all attempts
    total_seconds: float
    prompt_hash: str
    complete: bool
    clipped: bool
    extras: Mapping[str, Any]
    policy_version: int = 0  # the newest one of its run and pool when it ended
    stale: bool = False  # its oldest token is further behind that than it allows; delivered because its run says so
    history: tuple[AttemptRecord, ...] = ()  # the last `HISTORY_ATTEMPTS` of its attempts

    def __init__(
        self,
        run_id: str,
        rollout_id: str,
        group_id: str,
        sample_index: int,
        session_id: str,
        turn: int,
        step: int | None,
        rollout_class: RolloutClass,
        task_type: TaskType,
        stratum: str,
        outcome: Outcome,
        error: Refusal | None,
        token_bytes: bytes,
        logprob_bytes: bytes,
        top_logprobs: tuple[tuple[tuple[float, int], ...], ...],
        text: str,
        prompt_token_bytes: bytes,
        prompt_logprob_bytes: bytes,
        finish_reason: str,
        matched_stop: int | str | None,
        spans: tuple[Span, ...],
        engine_id: str,
        batch_id: int,
        attempts: int,
        preemptions: int,
        prompt_tokens: int,
        cached_tokens: int,
        predicted_cached_tokens: int,
        generated_tokens: int,
        queued_seconds: float,
        first_token_seconds: float,
        running_seconds: float,
        total_seconds: float,
        prompt_hash: str,
        complete: bool,
        clipped: bool,
        extras: Mapping[str, Any],
        policy_version: int = 0,
        stale: bool = False,
        history: tuple[AttemptRecord, ...] = (),
    ) -> None:
        self.run_id = run_id
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.sample_index = sample_index
        self.session_id = session_id
        self.turn = turn
        self.step = step
        self.rollout_class = rollout_class
        self.task_type = task_type
        self.stratum = stratum
        self.outcome = outcome
        self.error = error
        self.token_bytes = token_bytes
        self.logprob_bytes = logprob_bytes
        self.top_logprobs = top_logprobs
        self.text = text
        self.prompt_token_bytes = prompt_token_bytes
        self.prompt_logprob_bytes = prompt_logprob_bytes
        self.finish_reason = finish_reason
        self.matched_stop = matched_stop
        self.spans = spans
        self.engine_id = engine_id
        self.batch_id = batch_id
        self.attempts = attempts
        self.preemptions = preemptions
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.predicted_cached_tokens = predicted_cached_tokens
        self.generated_tokens = generated_tokens
        self.queued_seconds = queued_seconds
        self.first_token_seconds = first_token_seconds
        self.running_seconds = running_seconds
        self.total_seconds = total_seconds
        self.prompt_hash = prompt_hash
        self.complete = complete
        self.clipped = clipped
        self.extras = extras
        self.policy_version = policy_version
        self.stale = stale
        self.history = history

    def without_tokens(self) -> RolloutResult:
        """What is left of a result that is withheld: everything but what the policy wrote."""
        return replace(
            self,
            token_bytes=b"",
            logprob_bytes=b"",
            top_logprobs=(),
            text="",
            prompt_logprob_bytes=b"",
            complete=False,
            extras={},
        )

    @property
    def staleness(self) -> int:
        """Versions that the oldest token is behind the newest policy; 0 without tokens."""
        return max((self.policy_version - span.policy_version for span in self.spans), default=0)

    @property
    def size_bytes(self) -> int:
        """What keeping this result costs, for the bound on undelivered results."""
        return (
            512
            + 4 * self.prompt_tokens  # the rollout's record keeps its prompt until the result is acknowledged
            + len(self.token_bytes)
            + len(self.logprob_bytes)
            + len(self.prompt_token_bytes)
            + len(self.prompt_logprob_bytes)
            + 16 * sum(len(row) for row in self.top_logprobs)
            + len(self.text)
        )
