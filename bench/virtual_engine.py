"""Engines in virtual time: the simulated machine behind the core's own words, without a wire and without a clock.

`VirtualEngine` is what `virtual.Simulation` drives. `SimEngine` is the simulated machine of `rolloutd.engines.sim` itself,
so timing, memory, prefix cache and tokens are those of the engine process; `virtual_control.Controls` is its front, and
`virtual_faults.FaultyEngine` wraps it.

Invariants
- One submitted attempt gives at most one end (AttemptEnded or AttemptFailed), and progress only before it. One control call
  gives one answer.
- As the HTTP door does, it hangs up on an attempt that the engine does not end within `hang_up_seconds` after an abort, and at
  once on one that waits at the gate of a paused engine.
- A token that comes back names the label that the engine had when it wrote it. Where a connection breaks before the engine
  said it exactly, tokens that may be of either of two labels are left out.
- Time is in seconds and never goes backwards; the same calls give the same events.
- What the machine refuses or gives up on becomes the fault kind that the HTTP door would make of its status.

What this module does not know: the scheduler, latencies, when it is called.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import numpy as np

from rolloutd.bench.virtual_control import NANO, Answer, Controls, ControlTiming
from rolloutd.bench.virtual_machine import MeteredMachine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.radix import RadixCache
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.tokens import Sampling, score
from rolloutd.scheduler.actions import Control, Dispatch
from rolloutd.scheduler.events import AttemptEnded, AttemptFailed, AttemptProgress, EngineLoad
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import TOKEN_BYTES, EngineFacts
from rolloutd.scheduler.states import FaultKind

Report = AttemptProgress | AttemptEnded | AttemptFailed | Answer

BUSY_STATUSES = frozenset({429, 503})  # alive, but full or pausing
FIRST_SERVER_ERROR_STATUS = 500
CONTROL_TIMING = ControlTiming()
HANG_UP_SECONDS = 2.0  # of the HTTP door


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

    def control(self, now: float, control: Control) -> None:
        """Start one control call."""
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
        control: ControlTiming = CONTROL_TIMING,
        hang_up_seconds: float = HANG_UP_SECONDS,
    ) -> None:
        """remember_prefixes: of everything it ever computed, for `could_hold_tokens` and `crossings`."""
        self.config = config
        self._facts = EngineFacts(
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
        self._machine = MeteredMachine(config, remember_prefixes)
        self.controls = Controls(self._machine, control, engine_id)
        self._hang_up_seconds = hang_up_seconds
        self._attempts: dict[str, _Attempt] = {}
        self._hang_ups: dict[str, float] = {}  # aborted attempt -> when its door has waited enough
        self._ever = RadixCache(config.page_size_tokens) if remember_prefixes else None

    @property
    def facts(self) -> EngineFacts:
        """With the label that its weights have now."""
        if self._facts.engine_version != self.controls.label:
            self._facts = replace(self._facts, engine_version=self.controls.label)
        return self._facts

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
        request = SimRequest(
            dispatch.attempt_id,
            dispatch.token_bytes,
            sampling,
            logprob_start=start,
            namespace=(dispatch.cache_salt, ""),
        )
        self.controls.submit(now, request)

    def abort(self, now: float, attempt_id: str) -> None:
        self.controls.abort(now, attempt_id)
        if attempt_id in self._attempts:
            patience = 0.0 if self.controls.at_gate(attempt_id) else self._hang_up_seconds
            self._hang_ups.setdefault(attempt_id, now + patience)

    def control(self, now: float, control: Control) -> None:
        self.controls.control(now, control)

    def next_event_seconds(self) -> float:
        due = self._machine.next_event_seconds()
        return min(
            math.inf if due is None else due,
            self.controls.next_event_seconds(),
            min(self._hang_ups.values(), default=math.inf),
        )

    def advance(self, now: float) -> list[Report]:
        reports: list[Report] = []
        for frame in self._machine.advance(now):
            if frame.finish_reason is not None:
                self.controls.ended(frame.rid)
            attempt = self._attempts.get(frame.rid)
            if attempt is None:
                continue  # its door has hung up
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
                self._hang_ups.pop(frame.rid, None)
                reports.append(self._end(attempt, frame))
        for attempt_id in [one for one, due in self._hang_ups.items() if due <= now + NANO]:
            del self._hang_ups[attempt_id]
            self.controls.hang_up(now, attempt_id)
            reports.append(AttemptEnded(attempt_id, self._attempts.pop(attempt_id).cut()))
        reports += self.controls.advance(now)
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

    def cut(self, now: float, keep_partial: bool) -> list[Report]:
        """Every connection breaks; what the doors had received so far is kept or not. The engine is of no use after it."""
        reports: list[Report] = []
        for attempt_id, attempt in self._attempts.items():
            partial = attempt.cut() if keep_partial and attempt.tokens else None
            reports.append(AttemptFailed(attempt_id, FaultKind.BROKEN, "connection reset", partial))
        self._attempts.clear()
        self._hang_ups.clear()
        return reports + self.controls.cut()

    @property
    def weights(self) -> str:
        """What writes its tokens now, whatever their label is."""
        return self._machine.weights

    def could_hold_tokens(self, weights: str, token_bytes: bytes) -> int:
        """Longest prefix that these weights have ever computed here, in whole pages: what no prediction may exceed."""
        if self._ever is None:
            raise ValueError("built without remember_prefixes")
        pages = self._ever.peek_pages(weights, token_bytes, len(token_bytes) // TOKEN_BYTES)
        return pages * self.config.page_size_tokens

    def take_crossings(self) -> list[tuple[str, str, str]]:
        """Prefix hits on KV of other weights since the last call: (weights of the KV, weights that used it, cache salt)."""
        crossings, self._machine.crossings = self._machine.crossings, []
        return crossings

    def check(self) -> None:
        """Raises AssertionError where the machine's own accounting is off."""
        self._machine.check()

    def _remember(self, attempt: _Attempt) -> None:
        """It has KV of all tokens but the newest. Of several weights where they changed meanwhile: of each, to be generous."""
        assert self._ever is not None
        tokens = attempt.dispatch.token_bytes + _id_bytes(attempt.tokens[:-1])
        attempt.weights[self._machine.weights] = None
        for weights in attempt.weights:
            self._ever.insert(weights, tokens)

    def _end(self, attempt: _Attempt, frame: Frame) -> AttemptEnded | AttemptFailed:
        reason = frame.finish_reason
        assert reason is not None
        status = reason.get("status_code")
        if reason["type"] == "abort" and status is not None:
            if status in BUSY_STATUSES:
                kind = FaultKind.BUSY
            else:
                kind = FaultKind.BROKEN if status >= FIRST_SERVER_ERROR_STATUS else FaultKind.REFUSED
            partial = attempt.cut() if attempt.tokens and kind is FaultKind.BROKEN else None
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

    __slots__ = ("_label", "_spans", "cached_tokens", "dispatch", "logprobs", "prompt_tokens", "tokens", "weights")

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.weights: dict[str, None] = {}  # under which frames came
        self._label: str | None = None
        self._spans: list[tuple[str, int, int]] = []  # of which the frames leave no doubt

    def add(self, frame: Frame) -> None:
        seen = len(self.tokens)
        self.tokens += frame.tokens
        self.logprobs += frame.logprobs
        self.prompt_tokens = frame.prompt_tokens
        self.cached_tokens = frame.cached_tokens
        total = len(self.tokens)
        label, before = frame.weight_version, self._label
        if total == seen:
            return
        self._label = label
        # A frame names the label of its newest token: others in it may be of the label before.
        known = self._spans[-1][2] if self._spans else 0
        if known == seen and (before == label or total == seen + 1):
            if self._spans and self._spans[-1][0] == label:
                self._spans[-1] = (label, self._spans[-1][1], total)
            else:
                self._spans.append((label, seen, total))

    def cut(self) -> Piece:
        """What is left of it when the engine does not end it: tokens whose label is known."""
        known = self._spans[-1][2] if self._spans else 0
        return self.piece("abort", spans=tuple(self._spans)).first_tokens(known)

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


def _id_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()
