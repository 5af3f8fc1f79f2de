"""Engines in virtual time: the simulated machine behind the core's own words, without a wire and without a clock.

`VirtualEngine` is what `virtual.Simulation` drives. `SimEngine` is the simulated machine of `rolloutd.engines.sim` itself,
so timing, memory, prefix cache and tokens are those of the engine process; `virtual_faults.FaultyEngine` wraps it.

Invariants
- One submitted attempt gives at most one end (AttemptEnded or AttemptFailed), and progress only before it.
- Time is in seconds and never goes backwards; the same calls give the same events.
- What the machine refuses or gives up on becomes the fault kind that the HTTP door would make of its status.

What this module does not know: the scheduler, latencies, when it is called.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.radix import RadixCache
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.tokens import Sampling, score
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.events import AttemptEnded, AttemptFailed, AttemptProgress, EngineLoad
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import TOKEN_BYTES, EngineFacts
from rolloutd.scheduler.states import FaultKind

Report = AttemptProgress | AttemptEnded | AttemptFailed

BUSY_STATUSES = frozenset({429, 503})  # alive, but full or pausing
FIRST_SERVER_ERROR_STATUS = 500


class VirtualEngine(Protocol):
    """One engine. Every method but the properties takes the time now in seconds."""

    @property
    def facts(self) -> EngineFacts:
        """What the door would register now."""
        ...

    def submit(self, now: float, dispatch: Dispatch) -> None:
        """Start one attempt."""
        ...

    def abort(self, now: float, attempt_id: str) -> None:
        """Ask for the end of one attempt; unknown ids are ignored."""
        ...

    def next_event_seconds(self) -> float:
        """When `advance` has something next; inf when nothing happens without a call."""
        ...

    def advance(self, now: float) -> list[Report]:
        """Run to `now` inclusive; reports since the last call, oldest first."""
        ...

    def load(self, now: float) -> EngineLoad | None:
        """One load report, None from an engine that does not answer."""
        ...

    def held_tokens(self, now: float) -> dict[str, int]:
        """KV tokens that each live attempt really holds, in whole pages; attempts that wait inside the engine hold 0."""
        ...


class SimEngine:
    """A simulated machine. `version_label` is its weight version; text prompts are not taken (no tokeniser here)."""

    def __init__(
        self,
        engine_id: str,
        config: MachineConfig,
        *,
        incarnation: str = "0",
        pool: str = "policy",
        run_id: str = "",
        kv_cache_bytes: int = 0,
        remember_prefixes: bool = False,
    ) -> None:
        self.config = config
        self.facts = EngineFacts(
            engine_id=engine_id,
            incarnation=incarnation,
            pool=pool,
            run_id=run_id,
            model="sim",
            page_tokens=config.page_size_tokens,
            kv_capacity_tokens=config.capacity_tokens,
            slots=config.slots,
            context_tokens=config.context_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            vocabulary_size=config.model.vocabulary_size,
            engine_version=config.weight_version,
            kv_cache_bytes=kv_cache_bytes,
        )
        self._machine = _MeteredMachine(config)
        self._attempts: dict[str, _Attempt] = {}
        self._ever = RadixCache(config.page_size_tokens) if remember_prefixes else None

    def submit(self, now: float, dispatch: Dispatch) -> None:
        if dispatch.text is not None:
            raise ValueError(f"rollout {dispatch.rollout_id}: a virtual engine takes token ids, not text")
        words = dispatch.sampling
        sampling = Sampling(
            max_new_tokens=dispatch.max_new_tokens,
            min_new_tokens=words.get("min_new_tokens", 0),
            sampling_seed=words.get("sampling_seed"),
            temperature=words.get("temperature", 1.0),
            ignore_eos=words.get("ignore_eos", False),
            end_at_tokens=words.get("custom_params", {}).get("end_at_tokens"),
            stop_token_ids=frozenset(words.get("stop_token_ids", ())),
        )
        start = -1 if dispatch.prompt_logprobs_from is None else dispatch.prompt_logprobs_from
        self._attempts[dispatch.attempt_id] = _Attempt(dispatch)
        self._machine.submit(now, SimRequest(dispatch.attempt_id, dispatch.token_bytes, sampling, logprob_start=start))

    def abort(self, now: float, attempt_id: str) -> None:
        self._machine.abort(now, attempt_id)

    def next_event_seconds(self) -> float:
        due = self._machine.next_event_seconds()
        return math.inf if due is None else due

    def advance(self, now: float) -> list[Report]:
        reports: list[Report] = []
        for frame in self._machine.advance(now):
            attempt = self._attempts[frame.rid]
            attempt.add(frame)
            news = len(attempt.tokens) == len(frame.tokens) or frame.finish_reason is not None  # the first and the last
            if self._ever is not None and frame.prompt_version and news:
                self._remember(attempt)
            if frame.finish_reason is None:
                reports.append(
                    AttemptProgress(frame.rid, frame.completion_tokens, frame.prompt_tokens, frame.cached_tokens)
                )
            else:
                del self._attempts[frame.rid]
                reports.append(self._end(attempt, frame))
        return reports

    def load(self, now: float) -> EngineLoad:
        snapshot = self._machine.load(now)
        return EngineLoad(
            engine_id=self.facts.engine_id,
            running_rollouts=snapshot.running,
            waiting_rollouts=snapshot.waiting,
            kv_used_tokens=snapshot.used_tokens,
            kv_capacity_tokens=snapshot.capacity_tokens,
            generated_tokens_per_second=snapshot.generated_tokens_per_second,
            prefilled_tokens_total=snapshot.prefilled_tokens_total,
            prefill_busy_seconds_total=snapshot.prefill_busy_seconds_total,
        )

    def held_tokens(self, now: float) -> dict[str, int]:
        return self._machine.held_tokens(now)

    # beyond the protocol -----------------------------------------------------------------------------------------------

    def set_slowdown(self, now: float, factor: float) -> None:
        """Factor on every pass from now on, beyond what the config says; 1 takes it back."""
        self._machine.set_slowdown(now, self.config.timing.slowdown * factor)

    def cut(self, now: float, keep_partial: bool) -> list[AttemptFailed]:
        """Every connection breaks; what the doors had received so far is kept or not. The engine is of no use after it."""
        reports: list[AttemptFailed] = []
        for attempt_id, attempt in self._attempts.items():
            partial = attempt.piece("abort") if keep_partial and attempt.tokens else None
            reports.append(AttemptFailed(attempt_id, FaultKind.BROKEN, "connection reset", partial))
        self._attempts.clear()
        return reports

    def could_hold_tokens(self, token_bytes: bytes) -> int:
        """Longest prefix that this engine has ever computed, in whole pages: what no prediction may exceed."""
        if self._ever is None:
            raise ValueError("built without remember_prefixes")
        pages = self._ever.peek_pages("", token_bytes, len(token_bytes) // TOKEN_BYTES)
        return pages * self.config.page_size_tokens

    def check(self) -> None:
        """Raises AssertionError where the machine's own accounting is off."""
        self._machine.check()

    def _remember(self, attempt: _Attempt) -> None:
        assert self._ever is not None
        self._ever.insert("", attempt.dispatch.token_bytes + _id_bytes(attempt.tokens[:-1]))  # the newest has no KV yet

    def _end(self, attempt: _Attempt, frame: Frame) -> AttemptEnded | AttemptFailed:
        reason = frame.finish_reason
        assert reason is not None
        status = reason.get("status_code")
        if reason["type"] == "abort" and status is not None:
            if status in BUSY_STATUSES:
                kind = FaultKind.BUSY
            else:
                kind = FaultKind.BROKEN if status >= FIRST_SERVER_ERROR_STATUS else FaultKind.REFUSED
            partial = attempt.piece("abort") if attempt.tokens and kind is FaultKind.BROKEN else None
            return AttemptFailed(frame.rid, kind, reason["message"], partial)
        prompt_logprobs = b""
        start = attempt.dispatch.prompt_logprobs_from
        if start is not None and frame.prompt_version:
            scores = score(self.config.model, attempt.dispatch.token_bytes, frame.prompt_version)[start:].astype("<f4")
            scores[0] = np.nan  # an engine has none for the first position that it reports
            prompt_logprobs = scores.tobytes()
        return AttemptEnded(
            frame.rid,
            attempt.piece(reason["type"], reason.get("matched"), frame.spans, prompt_logprobs),
        )


class _Attempt:
    """What the door has received of one attempt."""

    __slots__ = ("cached_tokens", "dispatch", "logprobs", "prompt_tokens", "tokens")

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def add(self, frame: Frame) -> None:
        self.tokens += frame.tokens
        self.logprobs += frame.logprobs
        self.prompt_tokens = frame.prompt_tokens
        self.cached_tokens = frame.cached_tokens

    def piece(
        self,
        finish_reason: str,
        matched_stop: int | None = None,
        spans: tuple[tuple[str, int, int], ...] = (),
        prompt_logprob_bytes: bytes = b"",
    ) -> Piece:
        logprob_bytes = np.array(self.logprobs, dtype="<f4").tobytes() if self.dispatch.logprobs else b""
        return Piece(
            token_bytes=_id_bytes(self.tokens),
            finish_reason=finish_reason,
            logprob_bytes=logprob_bytes,
            matched_stop=matched_stop,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_logprob_bytes=prompt_logprob_bytes,
            version_spans=spans,
        )


class _MeteredMachine(SimMachine):
    """The machine, which also says who holds how much."""

    def held_tokens(self, now: float) -> dict[str, int]:
        """See `VirtualEngine.held_tokens`. A prefix that siblings share counts for each: never less than is used."""
        self._catch_up(now)
        page = self.config.page_size_tokens
        held: dict[str, int] = {sequence.request.rid: 0 for sequence in self._queue}
        for rid, sequence in self._running.items():
            held[rid] = sequence.request.prompt_tokens + self._produced(sequence)  # the step in flight has its place
        for sequence in self._prefilling:
            held[sequence.request.rid] = sequence.request.prompt_tokens + sequence.produced
        return {rid: -(-tokens // page) * page for rid, tokens in held.items()}


def _id_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()
