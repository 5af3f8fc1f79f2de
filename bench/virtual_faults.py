"""An engine in virtual time that fails on command: everything that a door has seen engines do.

    crash / restart      every attempt breaks, with or without what it had; later a new process with an empty cache
    hang / unhang        the process stops: no report, no answer to aborts, requests pile up; afterwards it goes on
    busy                 new attempts are answered with "busy", running ones go on
    slow                 a factor on every pass
    deaf                 aborts are never answered; attempts run on to their own end
    lossy                progress reports are dropped at random; ends never are
    echo                 every report comes once more, later: also progress after the end
    refuse               new attempts are answered with "bad request"

Invariants
- Deterministic by the Random it is given.
- An end that is due is reported, sooner or later, unless the process hangs for ever.

What this module does not know: the scheduler.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from rolloutd.bench.virtual_engine import Report, SimEngine
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.events import AttemptFailed, AttemptProgress, EngineLoad
from rolloutd.scheduler.spec import EngineFacts
from rolloutd.scheduler.states import FaultKind


class FaultyEngine:
    """`make(incarnation)` builds the engine anew each time it starts. Flags are set from outside, at any time."""

    def __init__(self, make: Callable[[str], SimEngine], rng: random.Random) -> None:
        self._make = make
        self._rng = rng
        self._starts = 0
        self._late: list[tuple[float, int, Report]] = []
        self._sequence = 0
        self._lag_seconds = 0.0  # how far the process's time is behind, after hangs
        self._hung_at: float | None = None
        self._pending: list[Callable[[float], None]] = []  # calls that a hung process has not seen yet
        self.down = False
        self.busy = False
        self.deaf = False
        self.refusing = False
        self.slowed = False
        self.loss = 0.0  # probability that a progress report is lost
        self.echo_seconds = 0.0  # every report comes once more after this; 0: it does not
        self.unanswering_at = -math.inf  # last time at which an abort could have gone unheard
        self.inner = make("0")

    @property
    def facts(self) -> EngineFacts:
        return self.inner.facts

    @property
    def hung(self) -> bool:
        return self._hung_at is not None

    # the protocol ------------------------------------------------------------------------------------------------------

    def submit(self, now: float, dispatch: Dispatch) -> None:
        if self.down:
            self._report(now, AttemptFailed(dispatch.attempt_id, FaultKind.BROKEN, "connection refused"))
        elif self.hung:
            self._pending.append(lambda inner_now: self.inner.submit(inner_now, dispatch))
        elif self.refusing:
            self._report(now, AttemptFailed(dispatch.attempt_id, FaultKind.REFUSED, "bad request"))
        elif self.busy:
            self._report(now, AttemptFailed(dispatch.attempt_id, FaultKind.BUSY, "the request queue is full"))
        else:
            self.inner.submit(self._inner_now(now), dispatch)

    def abort(self, now: float, attempt_id: str) -> None:
        if self.down or self.deaf:
            self.note_unanswering(now)
        elif self.hung:
            self.note_unanswering(now)
            self._pending.append(lambda inner_now: self.inner.abort(inner_now, attempt_id))
        else:
            self.inner.abort(self._inner_now(now), attempt_id)

    def next_event_seconds(self) -> float:
        late = self._late[0][0] if self._late else math.inf
        if self.down or self.hung:
            return late
        return min(late, self.inner.next_event_seconds() + self._lag_seconds)

    def advance(self, now: float) -> list[Report]:
        reports: list[Report] = []
        while self._late and self._late[0][0] <= now:
            reports.append(heapq.heappop(self._late)[2])
        if self.down or self.hung:
            return reports
        for report in self.inner.advance(self._inner_now(now)):
            if isinstance(report, AttemptProgress) and self.loss and self._rng.random() < self.loss:
                continue
            reports.append(report)
            if self.echo_seconds:
                self._report(now + self.echo_seconds, report)
        return reports

    def load(self, now: float) -> EngineLoad | None:
        return None if self.down or self.hung else self.inner.load(self._inner_now(now))

    def held_tokens(self, now: float) -> dict[str, int]:
        return {} if self.down else self.inner.held_tokens(self._inner_now(now))

    # faults ------------------------------------------------------------------------------------------------------------

    def crash(self, now: float, keep_partial: bool) -> None:
        """The process dies; its doors notice at once."""
        self.unhang(now)
        self.down = True
        self.note_unanswering(now)
        for report in self.inner.cut(now, keep_partial):
            self._report(now, report)

    def restart(self, now: float) -> None:
        """A new process under a new incarnation, without faults; the caller tells the scheduler (JoinEngine)."""
        if not self.down:
            self.crash(now, keep_partial=False)
        self._starts += 1
        self.inner = self._make(str(self._starts))
        self._lag_seconds = 0.0
        self.down = self.busy = self.deaf = self.refusing = self.slowed = False
        self.loss = self.echo_seconds = 0.0

    def hang(self, now: float) -> None:
        """The process stops."""
        if not self.down and not self.hung:
            self._hung_at = now
            self.note_unanswering(now)

    def unhang(self, now: float) -> None:
        """It goes on where it stopped, and sees what was sent meanwhile."""
        if self._hung_at is None:
            return
        self._lag_seconds += now - self._hung_at
        self._hung_at = None
        self.note_unanswering(now)
        pending, self._pending = self._pending, []
        for call in pending:
            call(self._inner_now(now))

    def slow(self, now: float, factor: float) -> None:
        if not self.down and not self.hung:
            self.inner.set_slowdown(self._inner_now(now), factor)
            self.slowed = factor != 1.0
            self.note_unanswering(now)

    def heal(self, now: float) -> None:
        """Every fault but a crash ends."""
        self.unhang(now)
        self.slow(now, 1.0)
        if self.deaf:
            self.note_unanswering(now)
        self.busy = self.deaf = self.refusing = False
        self.loss = self.echo_seconds = 0.0

    def note_unanswering(self, now: float) -> None:
        self.unanswering_at = now

    def answers(self, now: float, within_seconds: float) -> bool:
        """Whether every abort of the last `within_seconds` was heard, and acted on at the engine's own speed."""
        return not (self.hung or self.deaf or self.down or self.slowed) and now - self.unanswering_at > within_seconds

    def _inner_now(self, now: float) -> float:
        return (now if self._hung_at is None else self._hung_at) - self._lag_seconds

    def _report(self, at_seconds: float, report: Report) -> None:
        self._sequence += 1
        heapq.heappush(self._late, (at_seconds, self._sequence, report))
