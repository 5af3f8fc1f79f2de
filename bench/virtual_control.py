"""Control calls to a simulated machine in virtual time: what SGLang's front process and its scheduler's control loop do.

Invariants
- Calls are carried out one after the other, each after a pass that is in flight when a pause came before it.
- While paused, new requests wait at the gate, unknown to the machine; they go in, in their order, when it opens.
- Weights change at one moment, the end of a load, or when the trainer pushes them; without a pause a load waits until no
  request is in flight, and new ones wait for it.
- While a load or a memory call is carried out the machine hears of no abort: those come after it.
- What makes a real scheduler raise kills the process: `death` says why.

What this module does not know: attempts, answers that are lost, when it is called. The same rules in wall time, over a wire:
`rolloutd.engines.sim.driver`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import SimRequest
from rolloutd.scheduler.actions import Control
from rolloutd.scheduler.events import ControlEnded, ControlFailed
from rolloutd.scheduler.states import FaultKind, PauseMode, Verb

Answer = ControlEnded | ControlFailed

# The scheduler does nothing else while it carries these out.
INLINE = frozenset({Verb.LOAD, Verb.RELEASE_MEMORY, Verb.RESUME_MEMORY})


RELEASED_AT_WORK = "its memory was to be released while it worked"
NANO = 1e-9  # times are whole nanoseconds but for what adding them does


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """Seconds that control calls take inside the engine."""

    call_seconds: float = 0.001
    load_seconds: float = 0.2  # LOAD; the default of the simulated engine process
    memory_seconds: float = 0.05
    pause_poll_seconds: float = 1.0  # SGLang: how often the abort-mode pause looks for requests in flight


class Controls:
    """The front of one machine. Every method but the properties takes the time now in seconds."""

    def __init__(self, machine: SimMachine, timing: ControlTiming, engine_id: str) -> None:
        self.label = machine.config.weight_version  # what /model_info says
        self.death = ""  # why the process is dead
        self.load_factor = 1.0  # of the next load's time
        self.breaks_load = False  # the next load fails half-way
        self.refuses_load = ""  # the next load fails and changes nothing, with these words
        self.refused_flushes = 0  # so many flushes from now on find the engine busy
        self.heard_at = -math.inf  # when the machine could hear aborts again, after it could not
        self._machine = machine
        self._timing = timing
        self._engine_id = engine_id
        self._closed = False
        self._waiting: dict[str, SimRequest] = {}  # at the gate
        self._in_flight: set[str] = set()
        self._calls: deque[Control] = deque()
        self._due = math.inf  # when the first call ends, or looks again; inf: it waits for the machine
        self._started = False
        self._unheard: list[str] = []  # aborts that came while the machine could not hear them
        self._session = False
        self._released: set[str] = set()
        self._spoilt = 0

    # requests ----------------------------------------------------------------------------------------------------------

    def submit(self, now: float, request: SimRequest) -> None:
        """Into the machine, or to the gate."""
        if self._closed or self._writing:
            self._waiting[request.rid] = request
        elif self._released:
            self.death = "a request for an engine whose memory is released"
        else:
            self._in_flight.add(request.rid)
            self._machine.submit(now, request)

    def abort(self, now: float, rid: str) -> None:
        """The machine does not know what waits at the gate; only hanging up ends that."""
        if self._inline:
            self._unheard.append(rid)
        else:
            self._machine.abort(now, rid)

    def at_gate(self, rid: str) -> bool:
        return rid in self._waiting

    def hang_up(self, now: float, rid: str) -> None:
        """Its caller is gone."""
        self._in_flight.discard(rid)
        if self._waiting.pop(rid, None) is None:
            self.abort(now, rid)

    def ended(self, rid: str) -> None:
        """The machine gave its last frame."""
        self._in_flight.discard(rid)

    # calls -------------------------------------------------------------------------------------------------------------

    def control(self, now: float, control: Control) -> None:
        """A call arrives; `advance` has its answer later."""
        self._calls.append(control)
        self._begin(now)

    def push(self, now: float, label: str | None, weights: str) -> bool:
        """The trainer sends all its tensors; False (nothing changed) outside a session. Without a label the old one stays."""
        if not self._session:
            return False
        self._machine.set_weight_version(now, self._machine.weight_version if label is None else label, weights)
        self.label = self._machine.weight_version
        return True

    def push_in_part(self, now: float) -> None:
        """The trainer sends some of its tensors, then breaks off."""
        if self._session:
            self._spoil(now)

    def next_event_seconds(self) -> float:
        return self._due

    def advance(self, now: float) -> list[Answer]:
        """Answers up to now; to be called after the machine's own `advance`."""
        answers: list[Answer] = []
        self._begin(now)
        while self._calls and self._started and self._due <= now + NANO:
            answer = self._finish(now, self._calls[0])
            if answer is None:
                continue
            answers.append(answer)
            if self._inline:
                self.heard_at = now
            self._calls.popleft()
            self._started, self._due = False, math.inf
            unheard, self._unheard = self._unheard, []
            for rid in unheard:
                self._machine.abort(now, rid)
            self._open(now)
            self._begin(now)
        return answers

    def cut(self) -> list[Answer]:
        """The process is gone: what every call that is out hears."""
        answers: list[Answer] = [
            ControlFailed(self._engine_id, one.control_id, FaultKind.BROKEN, "connection reset") for one in self._calls
        ]
        self._calls.clear()
        self._started, self._due = False, math.inf
        return answers

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """Whether some of its memory is given up."""
        return bool(self._released)

    @property
    def hears(self) -> bool:
        """Whether an abort that comes now is done at the machine's own speed."""
        return not self._inline and self._machine.paused != "in_place"

    @property
    def spoilt(self) -> bool:
        """Whether weights are in place that nobody published."""
        return self._machine.weights == f"spoilt {self._spoilt}"

    @property
    def _inline(self) -> bool:
        return self._started and self._calls[0].verb in INLINE

    @property
    def _writing(self) -> bool:
        """A load that was not preceded by a pause: it has the engine for itself."""
        return bool(self._calls) and self._calls[0].verb is Verb.LOAD and not self._closed

    def _begin(self, now: float) -> None:
        """Start the first call, once the machine is ready for it."""
        if self._started or not self._calls or self._machine.pause_pending:
            return
        call = self._calls[0]
        if self._writing and self._in_flight:
            return
        self._started = True
        match call.verb:
            case Verb.PAUSE:
                self._closed = True
                if call.mode is PauseMode.ABORT:
                    self._due = now + self._timing.call_seconds
                    return
                self._machine.pause(now, "retract" if call.mode is PauseMode.RETRACT else "in_place")
            case Verb.LOAD:
                self._due = now + self._timing.load_seconds * self.load_factor
                self.load_factor = 1.0
                return
            case Verb.RELEASE_MEMORY | Verb.RESUME_MEMORY:
                self._due = now + self._timing.memory_seconds
                return
        self._due = now + self._timing.call_seconds

    def _finish(self, now: float, call: Control) -> Answer | None:
        """Carry it out; None when it looks again later."""
        machine = self._machine
        ended = ControlEnded(self._engine_id, call.control_id)
        match call.verb:
            case Verb.PAUSE:
                if call.mode is PauseMode.ABORT and self._in_flight:
                    machine.abort_all(now)
                    self._due = now + self._timing.pause_poll_seconds
                    return None
            case Verb.RESUME:
                if self._released and machine.live_rids() != ([], []):
                    self.death = "work goes on while memory is released"
                if machine.paused is not None:
                    self.heard_at = now
                machine.resume(now)
                self._closed = False
            case Verb.FLUSH:
                return ControlEnded(self._engine_id, call.control_id, flushed=self._flush(now))
            case Verb.LOAD:
                return self._load(now, call)
            case Verb.BEGIN | Verb.END:
                if self._session is (call.verb is Verb.BEGIN):
                    said = "a session is open already" if self._session else "no session is open"
                    return self._failed(call, FaultKind.REFUSED, said)
                self._session = call.verb is Verb.BEGIN
            case Verb.NAME:
                machine.set_weight_version(now, call.label, machine.weights)
                self.label = call.label
            case Verb.VERIFY:
                return ControlEnded(self._engine_id, call.control_id, label=self.label)
            case Verb.RELEASE_MEMORY:
                if machine.live_rids() != ([], []):
                    self.death = RELEASED_AT_WORK
                elif "kv_cache" in call.tags:
                    machine.flush_cache(now)
                self._released |= set(call.tags)
            case Verb.RESUME_MEMORY:
                if not self._released >= set(call.tags):
                    self.death = "memory was to be resumed that was not released"
                self._released -= set(call.tags)
                if "weights" in call.tags:
                    self._spoil(now)  # their place is back, and nothing is in it
        return ended

    def _open(self, now: float) -> None:
        """Those at the gate go in, where it is open."""
        if self._closed or self._writing:
            return
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self.submit(now, request)

    def _flush(self, now: float) -> bool:
        if self.refused_flushes:
            self.refused_flushes -= 1
            return False
        return self._machine.flush_cache(now)

    def _load(self, now: float, call: Control) -> Answer:
        said, self.refuses_load = self.refuses_load, ""
        breaks, self.breaks_load = self.breaks_load, False
        if said:
            return self._failed(call, FaultKind.REFUSED, said)
        if breaks:
            self._spoil(now)
            return self._failed(call, FaultKind.BROKEN, "the load broke off; weights are new in part")
        self._machine.set_weight_version(now, call.label, call.path)
        self.label = call.label
        return ControlEnded(self._engine_id, call.control_id, flushed=False)

    def _spoil(self, now: float) -> None:
        """Weights that nobody published, under the label that the engine had."""
        self._spoilt += 1
        self._machine.set_weight_version(now, self._machine.weight_version, f"spoilt {self._spoilt}")

    def _failed(self, call: Control, fault: FaultKind, message: str) -> ControlFailed:
        return ControlFailed(self._engine_id, call.control_id, fault, message)
