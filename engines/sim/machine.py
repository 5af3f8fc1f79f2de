"""A simulated engine without I/O and without a clock: continuous batching over explicit time.

Invariants
- Time goes forward and comes from the caller; the same calls give the same frames.
- Work is done at events, not at decode steps: a stretch of steps with the same sequences has one length each, and the
  next event (flush, end, admission, memory) is computed. Times inside are integer nanoseconds.
- Requests that arrive at the same instant before `advance` are seen together; what arrives while a pass runs waits for
  its end. Prefill goes before decode, and a prefix computed in a batch is visible to later batches only.
- KV capacity is never exceeded: admission reserves as SGLang estimates, and decode retracts to the tail of the queue.

What this module does not know: HTTP, wall time, who asks. Text and log-probs of prompts are the server's business.
Differences from SGLang 0.5.23: prefill is not chunked, and a request that is alone is always admitted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rolloutd.engines.sim.admission import NewTokenRatio, WaitingQueue, select_prefill
from rolloutd.engines.sim.config import (
    ABORTED,
    ABORTED_WAITING,
    CACHE_EVENTS_INTERVAL_STEPS,
    OUT_OF_MEMORY,
    QUEUE_FULL,
    UNSTREAMED_INTERVAL_TOKENS,
    MachineConfig,
    PauseMode,
    prompt_too_long,
)
from rolloutd.engines.sim.counters import NANO, Counters
from rolloutd.engines.sim.kv_log import CacheEvent, CacheLog
from rolloutd.engines.sim.pool import KvPool
from rolloutd.engines.sim.request import Frame, LoadSnapshot, Sequence, SimRequest
from rolloutd.engines.sim.stretch import Stretch
from rolloutd.engines.sim.tokens import TokenWriter


class SimMachine:
    """One simulated engine. Every public method takes the time now, in seconds, which never goes backwards."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self.weight_version = config.weight_version  # the label that tokens carry
        self.weights = config.weight_version  # what writes them
        self.paused: PauseMode | None = None
        self._timing = config.timing
        self._log = CacheLog(config.page_size_tokens) if config.log_cache else None
        self._log_due = False  # a prefill ended since the log was taken
        self._log_taken_step = 0  # decode steps done by then
        self._pool = KvPool(config.kv_tokens, config.page_size_tokens, self._log)
        self._queue = WaitingQueue(config.schedule_policy, self._pool)
        self._ratio = NewTokenRatio()
        self._running: dict[str, Sequence] = {}  # decoding, in the order of admission
        self._prefilling: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._frames: list[Frame] = []
        self._now = 0  # time of the last handled event, or of the last call
        self._stretch = Stretch()
        self._prefill_end: int | None = None
        self._attend: int | None = None  # look at queue, aborts and pause at the first boundary from then on
        self._batch_full = False
        self._aborting: list[Sequence] = []
        self._frozen: LoadSnapshot | None = None
        self._counters = Counters()
        self.rests = self._counters.rests  # the newest, seconds; not the one that lasts

    # ---- calls ----------------------------------------------------------------------------------------------------

    def submit(self, now: float, request: SimRequest) -> None:
        """Queue one request. Raises ValueError for a rid that is live or ids outside the vocabulary."""
        self._catch_up(now)
        if request.rid in self._live:
            raise ValueError(f"rid: duplicate request ID detected: {request.rid}")
        prompt_tokens = request.prompt_tokens
        if prompt_tokens == 0:
            raise ValueError("prompt: must not be empty")
        if int(np.frombuffer(request.prompt, dtype="<u4").max()) >= self.config.model.vocabulary_size:
            raise ValueError(f"prompt: a token id is not below the vocabulary size {self.config.model.vocabulary_size}")
        limit = max(0, self.config.max_request_tokens - prompt_tokens - 1)
        sequence = Sequence(request, min(request.sampling.max_new_tokens, limit))
        if prompt_tokens >= self.config.max_prompt_tokens:
            self._refuse(sequence)
            return
        if not self.config.write_tokens:
            sequence.start_writing(self.config, self.weights)  # raises where the length can not be known
        self._live[request.rid] = sequence
        self._enqueue(sequence)
        self._look_at_next_boundary()

    def abort(self, now: float, rid_prefix: str) -> None:
        """Abort every request whose rid starts with `rid_prefix` (SGLang matches so); an empty one is ignored.

        Waiting requests end at once, running ones after the step in flight, and while paused in place after resume.
        """
        self._catch_up(now)
        if rid_prefix:
            self._abort([s for rid, s in self._live.items() if rid.startswith(rid_prefix)])

    def abort_all(self, now: float) -> None:
        """Abort every request."""
        self._catch_up(now)
        self._abort(list(self._live.values()))

    def pause(self, now: float, mode: PauseMode) -> None:
        """Stop after the step in flight. "retract" re-queues running requests without their KV; "in_place" keeps them."""
        self._catch_up(now)
        self._frozen = None
        self._frozen = self.load(now)
        self.paused = mode
        self._look_at_next_boundary()

    def resume(self, now: float) -> None:
        """Go on after `pause`; does nothing when not paused."""
        self._catch_up(now)
        self.paused = None
        self._frozen = None
        self._look_at_next_boundary()

    def flush_cache(self, now: float) -> bool:
        """Drop the prefix cache; False when busy. Waiting requests block it too, except in a pause."""
        if not self.is_idle(now, count_waiting=self.paused is None):
            return False
        self._pool.cache.clear()
        return True

    def is_idle(self, now: float, count_waiting: bool = True) -> bool:
        """Whether nothing runs, and with `count_waiting` nothing waits."""
        self._catch_up(now, inclusive=True)
        return not (self._running or self._prefilling or (count_waiting and len(self._queue)))

    def set_weight_version(self, now: float, version: str, weights: str | None = None) -> None:
        """New weights from the next token on; running requests get a new span.

        weights: where they are not what their label says (several owners of one label, or a load that went wrong).
        """
        self._catch_up(now, inclusive=True)
        weights = version if weights is None else weights
        relabelled, changed = version != self.weight_version, weights != self.weights
        self.weight_version, self.weights = version, weights
        for sequence in self._live.values() if relabelled or changed else ():
            if sequence.writer is None:
                continue
            produced = self._produced(sequence)
            if changed:
                sequence.writer.switch_weights(weights, produced, sequence.request.prompt)
            if relabelled and sequence.spans:
                if sequence.spans[-1][1] == produced:
                    sequence.spans.pop()
                sequence.spans.append((version, produced))
            if changed and sequence.request.rid in self._running:
                self._schedule_event(sequence)

    def set_slowdown(self, now: float, factor: float) -> None:
        """Factor on every pass from the next stretch of steps on."""
        self._catch_up(now)
        self._timing = replace(self._timing, slowdown=factor)
        self._look_at_next_boundary()

    def next_event_seconds(self) -> float | None:
        """When `advance` has work or frames next; None when nothing happens without a call."""
        event = self._now if self._frames else self._next_event()
        return None if event is None else event / NANO

    def advance(self, now: float) -> list[Frame]:
        """Run to `now` inclusive and return the frames since the last call, oldest first."""
        self._catch_up(now, inclusive=True)
        frames, self._frames = self._frames, []
        return frames

    def take_cache_events(self) -> list[CacheEvent]:
        """What SGLang would have published by the last call: at rest, after a prefill, now and then while decoding."""
        if self._log is None or self.paused is not None:
            return []
        steps = self._stretch.steps_done(self._now)
        decoding = self._running and not self._log_due
        if decoding and steps - self._log_taken_step < CACHE_EVENTS_INTERVAL_STEPS:
            return []
        self._log_due, self._log_taken_step = False, steps
        return self._log.take()

    @property
    def pause_pending(self) -> bool:
        """A pause was asked for and the pass in flight is not over yet."""
        return self.paused is not None and (self._stretch.tau > 0 or self._prefill_end is not None)

    def live_rids(self) -> tuple[list[str], list[str]]:
        """(admitted, waiting) rids."""
        admitted = [*self._running, *(s.request.rid for s in self._prefilling)]
        return admitted, [s.request.rid for s in self._queue]

    def load(self, now: float) -> LoadSnapshot:
        """The load; while paused the one of the moment of the pause, as SGLang's load page freezes too."""
        self._catch_up(now)
        if self._frozen is not None:
            return self._frozen
        self._update_rate()
        pool, page, stretch = self._pool, self.config.page_size_tokens, self._stretch
        growth = pool.growth_pages(stretch.anchor_step, stretch.steps_launched(self._now)) if stretch.tau else 0
        used = pool.owned_pages + growth + pool.cache.cached_pages - pool.cache.evictable_pages
        waiting = list(self._queue)
        uncached = sum(
            s.request.prompt_tokens
            + s.produced
            - page * pool.cache.peek_pages(s.request.namespace, s.request.prompt, 1 << 62)
            for s in waiting
        )
        return self._counters.snapshot(
            self._now,
            self._generated_at(stretch.steps_done(self._now)),
            len(self._running),
            waiting,
            used * page,
            uncached,
            pool.capacity_pages * page,
        )

    def check(self) -> None:
        """Re-derive memory and queue counters; raises AssertionError where one is off."""
        pool = self._pool
        pool.cache.check()
        assert 0 <= pool.free_pages
        steps = self._stretch.anchor_step
        owned = 0
        for sequence in [*self._running.values(), *self._prefilling]:
            assert sequence.holding is not None
            produced = steps - sequence.start_step if sequence.request.rid in self._running else sequence.produced + 1
            owned += pool.pages(sequence.request.prompt_tokens + produced - 1) - sequence.holding.shared_pages
        assert owned == pool.owned_pages, (owned, pool.owned_pages)
        assert len(self._running) + len(self._prefilling) <= self.config.slots
        assert len(self._running) + len(self._prefilling) + len(self._queue) == len(self._live)

    # ---- events ---------------------------------------------------------------------------------------------------

    def _catch_up(self, now: float, inclusive: bool = False) -> None:
        limit = round(now * NANO)
        if limit < self._now:
            raise ValueError(f"now: {now} is before {self._now / NANO}; time does not go backwards")
        while (event := self._next_event()) is not None and (event < limit or (inclusive and event == limit)):
            self._now = event
            if self._prefill_end is not None:
                self._end_prefill()
                self._decide()
            elif self._stretch.tau:
                self._run_steps(self._stretch.steps_done(event))
            else:
                self._attend = None
                self._decide()
        self._now = limit

    def _next_event(self) -> int | None:
        if self._prefill_end is not None:
            return self._prefill_end
        return self._stretch.next_event(self._attend) if self._stretch.tau else self._attend

    def _produced(self, sequence: Sequence) -> int:
        if sequence.request.rid in self._running:
            return self._stretch.steps_done(self._now) - sequence.start_step
        return sequence.produced

    def _generated_at(self, steps: int) -> int:
        in_stretch = (steps - self._stretch.anchor_step) * len(self._running) if self._stretch.tau else 0
        return self._counters.generated_tokens + in_stretch

    def _look_at_next_boundary(self) -> None:
        if self._attend is None:
            self._attend = self._now

    def _run_steps(self, step: int) -> None:
        """A boundary between decode steps at which something is due."""
        ending = []
        for sequence in self._stretch.take_due(step):
            writer = sequence.writer
            assert writer is not None
            produced = step - sequence.start_step
            if writer.finish is not None and produced >= writer.written_tokens:
                ending.append(sequence)
            else:
                self._emit(sequence, produced)
                self._schedule_event(sequence)
        if not ending and self._attend is None and step < self._stretch.memory_step:
            return
        self._stop_decoding(step)
        for sequence in ending:
            self._end_running(sequence, None)
        self._decide()

    def _stop_decoding(self, step: int) -> None:
        """Book the steps of the stretch that ends here."""
        steps = step - self._stretch.anchor_step
        self._pool.grow(self._stretch.anchor_step, steps)
        self._counters.generated_tokens += steps * len(self._running)
        self._ratio.decay(steps)
        self._stretch.end(self._now, step)
        self._counters.end_pass(self._now)
        for sequence in self._running.values():
            sequence.produced = step - sequence.start_step

    def _decide(self) -> None:
        """Between passes: apply aborts and a pause, then start prefill, else decode, else rest."""
        self._attend = None
        self._update_rate()
        if self.paused == "retract":
            for sequence in list(self._running.values()):
                self._retract(sequence)
        if self.paused is not None:
            return
        for sequence in self._aborting:
            if sequence.abort_reason is not None and self._running.get(sequence.request.rid) is sequence:
                self._end_running(sequence, sequence.abort_reason)
        self._aborting.clear()
        if self._start_prefill() or not self._running:
            return
        if self._pool.growth_pages(self._stretch.anchor_step, 1) > self._pool.available_pages:
            self._make_room()
            if not self._running:
                self._attend = self._now if len(self._queue) else None
                return
        tau = max(1, round(self._timing.decode_step_seconds(len(self._running)) * NANO))
        self._counters.begin_pass(self._now)
        self._stretch.begin(self._now, tau, self._pool.steps_that_fit(self._stretch.anchor_step))
        if len(self._queue) and not self._batch_full:
            self._attend = self._now + 1  # memory was made: try to admit after one step

    def _update_rate(self) -> None:
        generated = self._generated_at(self._stretch.steps_done(self._now))
        self._counters.update_rate(self._now, generated, bool(self._running))

    # ---- prefill --------------------------------------------------------------------------------------------------

    def _start_prefill(self) -> bool:
        free_slots = self.config.slots - len(self._running)
        if self._batch_full or not len(self._queue):
            return False
        admitted, self._batch_full = select_prefill(
            self._queue,
            self._pool,
            list(self._running.values()),
            free_slots,
            self.config.max_prefill_tokens,
            self._ratio,
        )
        if not admitted:
            return False
        hit = computed = 0
        for sequence in admitted:
            assert sequence.holding is not None
            cached = sequence.holding.shared_pages * self.config.page_size_tokens
            if not sequence.spans:
                sequence.cached_tokens = cached
                sequence.prompt_version = self.weights
                sequence.spans.append((self.weight_version, 0))
            if sequence.writer is None:
                sequence.start_writing(self.config, self.weights)
            hit += cached
            computed += sequence.request.prompt_tokens + sequence.produced - cached
        length = round(self._timing.prefill_seconds(computed, len(admitted)) * NANO)
        self._counters.begin_pass(self._now)
        self._prefilling = admitted
        self._prefill_end = self._now + max(1, length)
        self._counters.prefill(hit, computed, length)
        return True

    def _end_prefill(self) -> None:
        batch, self._prefilling, self._prefill_end = self._prefilling, [], None
        self._counters.end_pass(self._now)
        self._log_due = True
        step = self._stretch.anchor_step
        for sequence in batch:
            assert sequence.holding is not None and sequence.writer is not None
            request = sequence.request
            self._pool.cache_prefilled(sequence.holding, request.namespace, sequence.context_bytes())
            sequence.writer.write_until(sequence.produced + 1)
            if sequence.max_new_tokens > 0:
                sequence.produced += 1
                self._counters.generated_tokens += 1
            sequence.start_step = step - sequence.produced
            self._running[request.rid] = sequence
            self._pool.join_decode(sequence.holding, sequence.kv_tokens, step)
            if sequence.abort_reason is not None:
                continue  # ends in _decide
            if sequence.writer.finish is not None and sequence.writer.written_tokens == sequence.produced:
                self._end_running(sequence, None)
            else:
                if sequence.request.stream and sequence.sent == 0:
                    self._emit(sequence, sequence.produced)
                self._schedule_event(sequence)

    # ---- one sequence ---------------------------------------------------------------------------------------------

    def _interval(self, sequence: Sequence) -> int:
        if not sequence.request.stream:
            return UNSTREAMED_INTERVAL_TOKENS
        return sequence.request.stream_interval or self.config.stream_interval

    def _schedule_event(self, sequence: Sequence) -> None:
        """Find the sequence's next flush or end."""
        assert sequence.writer is not None
        target = max(sequence.sent + self._interval(sequence), self._produced(sequence) + 1)
        sequence.writer.write_until(target)
        self._stretch.schedule(sequence, sequence.start_step + min(target, sequence.writer.written_tokens))

    def _emit(
        self, sequence: Sequence, upto: int, finish_reason: dict[str, Any] | None = None, queued: bool = False
    ) -> None:
        self._frames.append(sequence.frame(self._now / NANO, upto, self.weight_version, finish_reason, queued))

    def _end_running(self, sequence: Sequence, reason: dict[str, Any] | None) -> None:
        """A decoding sequence ends: by itself, or for `reason`. Its KV goes into the prefix cache."""
        writer, holding = sequence.writer, sequence.holding
        assert writer is not None and holding is not None
        if reason is None:
            assert writer.finish is not None
            if writer.finish.kind == "stop":
                reason = {"type": "stop", "matched": writer.finish.matched}
            else:
                reason = {"type": "length", "length": sequence.produced}
        else:
            self._counters.aborted += 1
        del self._running[sequence.request.rid]
        sequence.event_step = -1
        self._pool.leave_decode(holding)
        tokens = sequence.context_bytes(sequence.produced - 1)
        self._pool.finish(holding, sequence.request.namespace, tokens, sequence.kv_tokens)
        self._emit(sequence, sequence.produced, reason)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        del self._live[sequence.request.rid]
        self._counters.finished += 1
        self._batch_full = False

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._queue.remove(sequence):
                self._end_queued(sequence, ABORTED_WAITING)
            elif sequence.abort_reason is None:
                sequence.abort_reason = ABORTED
                self._aborting.append(sequence)
                self._look_at_next_boundary()

    def _end_queued(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        self._counters.aborted += 1
        self._emit(sequence, sequence.sent, dict(reason), queued=True)
        self._drop(sequence)

    def _refuse(self, sequence: Sequence) -> None:
        """SGLang cuts a prompt it can not take to one token, runs that, and reports a bogus output token."""
        request = sequence.request
        reason = prompt_too_long(request.prompt_tokens, self.config.max_prompt_tokens)
        cut = SimRequest(request.rid, request.prompt[:4], request.sampling, request.stream)
        refused = Sequence(cut, 1)
        refused.writer = TokenWriter(
            self.config.model, cut.prompt, replace(cut.sampling, max_new_tokens=1), self.weights
        )
        refused.writer.write_until(1)
        refused.writer.logprobs.clear()
        refused.spans.append((self.weight_version, 0))
        self._counters.aborted += 1
        self._counters.finished += 1
        self._emit(refused, 1, reason)

    # ---- queue and memory -----------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        if self.config.max_queued is not None and len(self._queue) >= self.config.max_queued:
            self._end_queued(sequence, QUEUE_FULL)
        else:
            self._queue.append(sequence)

    def _retract(self, sequence: Sequence) -> None:
        """Back to the tail of the queue, without KV. With a queue limit it may be refused there, tokens lost."""
        assert sequence.holding is not None
        del self._running[sequence.request.rid]
        sequence.event_step = -1
        self._pool.leave_decode(sequence.holding)
        self._pool.release(sequence.holding, sequence.kv_tokens)
        sequence.holding = None
        sequence.retractions += 1
        self._counters.retracted += 1
        self._batch_full = False
        if sequence.abort_reason is not None:
            sequence.abort_reason = None
            self._end_queued(sequence, ABORTED_WAITING)
        else:
            self._enqueue(sequence)

    def _make_room(self) -> None:
        """Retract until the next decode step fits: shortest output first, then longest prompt; at least one stays."""
        order = sorted(self._running.values(), key=lambda s: (s.produced, -s.request.prompt_tokens), reverse=True)
        while len(order) > 1:
            self._retract(order.pop())
            if self._pool.growth_pages(self._stretch.anchor_step, 1) <= self._pool.available_pages:
                break
        if self._pool.growth_pages(self._stretch.anchor_step, 1) > self._pool.available_pages:
            self._end_running(order.pop(), OUT_OF_MEMORY)
        self._ratio.after_retraction(list(self._running.values()))
