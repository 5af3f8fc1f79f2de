"""What a simulated engine has done since its start, and the load report made of it.

Invariants
- Counters only grow. Seconds are simulated.

What this module does not know: how work is scheduled.
"""

from __future__ import annotations

from collections import deque

from rolloutd.engines.sim.request import LoadSnapshot, Sequence

NANO = 1_000_000_000
_RATE_WINDOW_NANO = NANO
_RESTS = 1_024  # of the newest ones that are remembered


class Counters:
    """Totals, and the output rate over windows of about a second of work."""

    def __init__(self) -> None:
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.prefill_nano = 0
        self.cached_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.retracted = 0
        self.rests: deque[tuple[float, float]] = deque(maxlen=_RESTS)  # (start, end) of times without any pass, seconds
        self._rest_since = 0
        self._last_batch = (0, 0)  # cached and computed tokens of the last prefill
        self._rate = 0.0
        self._rate_since = (0, 0)  # (time in nanoseconds, generated tokens) at the start of the window

    def prefill(self, cached_tokens: int, computed_tokens: int, nano: int) -> None:
        """A prefill pass begins."""
        self.prefilled_tokens += computed_tokens
        self.prefill_nano += nano
        self.cached_tokens += cached_tokens
        self._last_batch = (cached_tokens, computed_tokens)

    def end_pass(self, now: int) -> None:
        """A pass or a stretch of them is over."""
        self._rest_since = now

    def begin_pass(self, now: int) -> None:
        """The next one begins."""
        if now > self._rest_since:
            self.rests.append((self._rest_since / NANO, now / NANO))

    def update_rate(self, now: int, generated_tokens: int, working: bool) -> None:
        """`generated_tokens` so far. At rest the last rate stays, as in SGLang."""
        since, before = self._rate_since
        if now - since >= _RATE_WINDOW_NANO or not working:
            if generated_tokens > before and now > since:
                self._rate = (generated_tokens - before) * NANO / (now - since)
            self._rate_since = (now, generated_tokens)

    def snapshot(
        self,
        now: int,
        generated_tokens: int,
        running: int,
        waiting: list[Sequence],
        used_tokens: int,
        uncached_waiting_tokens: int,
        capacity_tokens: int,
    ) -> LoadSnapshot:
        """One load report."""
        hit, computed = self._last_batch
        return LoadSnapshot(
            time_seconds=now / NANO,
            running=running,
            waiting=len(waiting),
            used_tokens=used_tokens,
            queued_tokens=uncached_waiting_tokens,
            queued_total_tokens=sum(s.request.prompt_tokens + s.produced for s in waiting),
            retracted_waiting=sum(s.retractions > 0 for s in waiting),
            capacity_tokens=capacity_tokens,
            generated_tokens_per_second=self._rate,
            cache_hit_rate=hit / (hit + computed) if hit + computed else 0.0,
            prefilled_tokens_total=self.prefilled_tokens,
            prefill_busy_seconds_total=self.prefill_nano / NANO,
            generated_tokens_total=generated_tokens,
            cached_tokens_total=self.cached_tokens,
            finished_total=self.finished,
            aborted_total=self.aborted,
            retracted_total=self.retracted,
        )
