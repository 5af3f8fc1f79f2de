"""An engine in virtual time that fails on command: everything that a door has seen engines do.

    crash / restart      every attempt breaks, with or without what it had; later a new process with an empty cache
    hang / unhang        the process stops: no report, no answer to aborts, requests pile up; afterwards it goes on
    busy                 new attempts are answered with "busy", running ones go on
    slow                 a factor on every pass
    deaf                 aborts are never answered; attempts run on to their own end
    lossy                progress reports are dropped at random; ends never are
    echo                 every report comes once more, later: also progress after the end
    refuse               new attempts are answered with "bad request"
    misdo                the next control call of one kind goes wrong: see `Misdeed`

Invariants
- Deterministic by the Random it is given.
- An end that is due is reported, sooner or later, unless the process hangs for ever.

What this module does not know: the scheduler.
"""

from __future__ import annotations

import enum
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace

from rolloutd.bench.virtual_engine import Report, SimEngine
from rolloutd.scheduler.actions import Control, Dispatch
from rolloutd.scheduler.events import AttemptFailed, AttemptProgress, ControlEnded, ControlFailed, EngineLoad
from rolloutd.scheduler.spec import EngineFacts
from rolloutd.scheduler.states import FaultKind, Verb

# The scheduler has no time limit of its own for these: the door's is what ends them.
LIMITED_BY_DOOR = frozenset({Verb.RELEASE_MEMORY, Verb.RESUME_MEMORY})
LATE_SECONDS = 5.0  # how long an answer that comes late is under way
SLOW_LOAD_FACTOR = 20.0


class Misdeed(enum.Enum):
    """What becomes of one control call instead of being done and answered."""

    REFUSED = "refused"  # not done, and says so
    ERROR = "error"  # not done: a 500
    UNREACHED = "unreached"  # not done: no connection
    UNHEARD = "unheard"  # not done, and never answered
    NOT_DONE = "not done"  # not done, and answered as if it were
    UNANSWERED = "unanswered"  # done, and never answered
    LATE = "late"  # done, and answered `LATE_SECONDS` later
    TWICE = "twice"  # answered twice
    CRASH = "crash"  # the process dies before it is done
    DONE_THEN_CRASH = "done, then crash"  # it dies before it answers
    BROKEN_OFF = "broken off"  # LOAD, END: weights are new in part
    SLOW = "slow"  # LOAD: takes `SLOW_LOAD_FACTOR` times as long
    BUSY = "busy"  # FLUSH: refused three times
    STRANGE = "strange"  # VERIFY: names another label


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
        self.misdeeds: dict[Verb, list[Misdeed]] = {}  # of the next calls of each kind, in order
        self._limited: dict[int, bool] = {}
        self._answering: dict[int, Misdeed] = {}  # what becomes of the answers of calls that are being done
        self.unanswering_at = -math.inf  # last time at which an abort could have gone unheard
        self.deaths: list[str] = []  # what killed its processes: calls that a real engine does not survive
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
            self.inner.submit(self.inner_now(now), dispatch)

    def abort(self, now: float, attempt_id: str) -> None:
        if self.down or self.deaf:
            self.note_unanswering(now)
        elif self.hung:
            self.note_unanswering(now)
            self._pending.append(lambda inner_now: self.inner.abort(inner_now, attempt_id))
        else:
            self.inner.abort(self.inner_now(now), attempt_id)

    def control(self, now: float, control: Control) -> None:
        if self.down:
            self._answer(now, control, FaultKind.UNREACHED, "connection refused")
        elif self.hung:
            self._pending.append(lambda inner_now: self.inner.control(inner_now, control))
        else:
            planned = self.misdeeds.get(control.verb)
            if planned:
                self._misdo(now, control, planned.pop(0))
            else:
                self.inner.control(self.inner_now(now), control)

    def _misdo(self, now: float, control: Control, misdeed: Misdeed) -> None:
        """See `Misdeed`."""
        inner = self.inner
        match misdeed:
            case Misdeed.REFUSED:
                self._answer(now, control, FaultKind.REFUSED, "it does not want to")
                return
            case Misdeed.ERROR:
                self._answer(now, control, FaultKind.BROKEN, "internal server error")
                return
            case Misdeed.UNREACHED:
                self._answer(now, control, FaultKind.UNREACHED, "no route")
                return
            case Misdeed.NOT_DONE:
                self._report(now, ControlEnded(self.facts.engine_id, control.control_id, label=inner.controls.label))
                return
            case Misdeed.UNHEARD:
                if control.verb in LIMITED_BY_DOOR:
                    self._answer(now + LATE_SECONDS, control, FaultKind.SILENT, "no answer")
                return
            case Misdeed.CRASH:
                self.crash(now, keep_partial=self._rng.random() < 0.5)
                self._answer(now, control, FaultKind.BROKEN, "connection reset")
                return
            case Misdeed.BROKEN_OFF if control.verb is Verb.LOAD:
                inner.controls.breaks_load = True
            case Misdeed.BROKEN_OFF:
                inner.controls.push_in_part(self.inner_now(now))
                self._answer(now, control, FaultKind.BROKEN, "the weights could not be finalised")
                return
            case Misdeed.SLOW:
                inner.controls.load_factor = SLOW_LOAD_FACTOR
            case Misdeed.BUSY:
                inner.controls.refused_flushes = 3
            case _:
                self._answering[control.control_id] = misdeed
                self._limited[control.control_id] = control.verb in LIMITED_BY_DOOR
        inner.control(self.inner_now(now), control)

    def _answer(self, now: float, control: Control, fault: FaultKind, message: str) -> None:
        self._report(now, ControlFailed(self.facts.engine_id, control.control_id, fault, message))

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
        for report in self.inner.advance(self.inner_now(now)):
            if isinstance(report, AttemptProgress) and self.loss and self._rng.random() < self.loss:
                continue
            if isinstance(report, ControlEnded | ControlFailed) and report.control_id in self._answering:
                reports += self._answered(now, report, self._answering.pop(report.control_id))
                continue
            reports.append(report)
            if self.echo_seconds:
                self._report(now + self.echo_seconds, report)
        if self.inner.controls.death and not self.down:
            self.deaths.append(self.inner.controls.death)
            self.crash(now, keep_partial=False)
        return reports

    def _answered(self, now: float, report: ControlEnded | ControlFailed, misdeed: Misdeed) -> list[Report]:
        """A call was done, and something is wrong with its answer."""
        match misdeed:
            case Misdeed.UNANSWERED if isinstance(report, ControlEnded) and self._limited.pop(report.control_id, False):
                silent = ControlFailed(report.engine_id, report.control_id, FaultKind.SILENT, "no answer")
                self._report(now + LATE_SECONDS, silent)
                return []
            case Misdeed.LATE:
                self._report(now + LATE_SECONDS, report)
                return []
            case Misdeed.TWICE:
                return [report, report]
            case Misdeed.STRANGE if isinstance(report, ControlEnded):
                return [replace(report, label="who knows")]
            case Misdeed.DONE_THEN_CRASH:
                self.crash(now, keep_partial=self._rng.random() < 0.5)
                return [ControlFailed(report.engine_id, report.control_id, FaultKind.BROKEN, "connection reset")]
            case _:
                return []

    def load(self, now: float) -> EngineLoad | None:
        return None if self.down or self.hung else self.inner.load(self.inner_now(now))

    def held_tokens(self, now: float) -> dict[str, int]:
        return {} if self.down else self.inner.held_tokens(self.inner_now(now))

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
        self.misdeeds.clear()
        self._answering.clear()

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
            call(self.inner_now(now))

    def slow(self, now: float, factor: float) -> None:
        if not self.down and not self.hung:
            self.inner.set_slowdown(self.inner_now(now), factor)
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
        self.misdeeds.clear()
        self._answering.clear()

    def note_unanswering(self, now: float) -> None:
        self.unanswering_at = now

    def answers(self, now: float, within_seconds: float) -> bool:
        """Whether every abort of the last `within_seconds` was heard, and acted on at the engine's own speed."""
        unanswering_at = max(self.unanswering_at, self.inner.controls.heard_at + self._lag_seconds)
        deaf = self.deaf or not self.inner.controls.hears
        return not (self.hung or deaf or self.down or self.slowed) and now - unanswering_at > within_seconds

    def inner_now(self, now: float) -> float:
        """The time inside the process, which stands still while it hangs."""
        return (now if self._hung_at is None else self._hung_at) - self._lag_seconds

    def _report(self, at_seconds: float, report: Report) -> None:
        self._sequence += 1
        heapq.heappush(self._late, (at_seconds, self._sequence, report))
