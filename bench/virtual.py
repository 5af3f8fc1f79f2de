"""Virtual time: the production core against simulated engines, as fast as the machine allows.

`Simulation` plays the server: it hands events to `Scheduler.handle`, turns actions into calls on engines and engines' reports
into events, each `latency_seconds` later, and jumps to whatever is due next. Who plays a trainer on top of it: `simulated`.

Invariants
- Deterministic: the same scheduler seed, engines and calls give the same actions at the same times.
- Everything due at one instant is handled in the order in which it was put there; then, if the core wants it or a timer is
  due, one Tick, as the server does.
- Between two of its instants nothing changes. Times are whole nanoseconds.

What this module does not know: wall time, gRPC, HTTP.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from rolloutd.bench.virtual_core import Core
from rolloutd.bench.virtual_engine import Report, VirtualEngine
from rolloutd.scheduler.actions import Abort, Action, Control, Deliver, Dispatch
from rolloutd.scheduler.events import AttemptFailed, ControlFailed, Event, JoinEngine, Tick
from rolloutd.scheduler.states import FaultKind

LATENCY_SECONDS = 0.001  # one way between server and engine: a local network and an event loop's turn
LOAD_PERIOD_SECONDS = 1.0
TIME_DIGITS = 9
# Ticks at one instant before we say that the core spins: far above what the batch limit makes of a full queue.
MAX_TICKS_AT_ONCE = 10_000

Observer = Callable[[Event, list[Action]], None]


class Simulation:
    """See the module. `scheduler` is driven by nobody else."""

    def __init__(
        self,
        scheduler: Core,
        *,
        latency_seconds: float = LATENCY_SECONDS,
        load_period_seconds: float = LOAD_PERIOD_SECONDS,
    ) -> None:
        """load_period_seconds: between two load reports of an engine; 0 for none."""
        self.scheduler = scheduler
        self.now = 0.0
        self.engines: dict[str, VirtualEngine] = {}
        self.observers: list[Observer] = []
        self.events_handled = 0
        self.handle = scheduler.handle  # replaced by whoever wants to measure it
        self._latency_seconds = latency_seconds
        self._load_period_seconds = load_period_seconds
        self._consumers: dict[tuple[str, str], Callable[[Deliver], None]] = {}
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._engine_calendar: list[tuple[float, int, VirtualEngine]] = []
        self._engine_due: dict[VirtualEngine, float] = {}  # its earliest entry in the calendar; later ones are stale
        self._sequence = 0
        self._ticks_at = (0.0, 0)

    # for the workload --------------------------------------------------------------------------------------------------

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Do something at that time (now, if it has passed)."""
        self._sequence += 1
        heapq.heappush(self._calendar, (max(self.now, round(seconds, TIME_DIGITS)), self._sequence, call))

    def send(self, event: Event) -> list[Action]:
        """Hand one event to the core now, and do what it asks for; returns the actions. Not to be called by observers."""
        actions = self.handle(event, self.now)
        self.events_handled += 1
        for action in actions:
            match action:
                case Dispatch():
                    self._later(self._submit, action)
                case Abort():
                    self._later(self._abort, action)
                case Control():
                    self._later(self._control, action)
                case Deliver():
                    deliver = self._consumers.get((action.run_id, action.consumer_id))
                    if deliver is not None:
                        deliver(action)
        for observe in self.observers:
            observe(event, actions)
        return actions

    def add_engine(self, engine: VirtualEngine) -> None:
        """Know the engine's door, and register the engine; reports its load from then on."""
        engine_id = engine.facts.engine_id
        known = engine_id in self.engines
        self.engines[engine_id] = engine
        self.send(JoinEngine(engine.facts))
        self.touch(engine)
        if self._load_period_seconds and not known:
            self.at(self.now + self._load_period_seconds, lambda: self._report_load(engine_id))

    def drop_engine(self, engine_id: str) -> None:
        """Forget the door: calls to it fail from now on. What runs there still reports."""
        del self.engines[engine_id]

    def touch(self, engine: VirtualEngine) -> None:
        """An engine was changed from outside: look at when it is due again."""
        due = max(engine.next_event_seconds(), self.now)
        if due < self._engine_due.get(engine, math.inf):
            self._engine_due[engine] = due
            self._sequence += 1
            heapq.heappush(self._engine_calendar, (due, self._sequence, engine))

    def connect(self, run_id: str, consumer_id: str, deliver: Callable[[Deliver], None] | None) -> None:
        """Where this consumer's events go; None: nowhere. Deliveries must not call `send`: use `at`."""
        if deliver is None:
            self._consumers.pop((run_id, consumer_id), None)
        else:
            self._consumers[run_id, consumer_id] = deliver

    # running -----------------------------------------------------------------------------------------------------------

    def run(self, until_seconds: float = math.inf, stop: Callable[[], bool] | None = None) -> None:
        """Go on until that time, or until `stop` says so after some instant, or until nothing is due any more."""
        while True:
            due = self._next_due()
            if due > until_seconds or due == math.inf:
                if until_seconds < math.inf:
                    self.now = max(self.now, round(until_seconds, TIME_DIGITS))
                return
            self.now = max(self.now, due)
            self._instant()
            if stop is not None and stop():
                return

    def _next_due(self) -> float:
        due = self.now if self.scheduler.wants_tick else self.scheduler.next_due()
        if self._calendar:
            due = min(due, self._calendar[0][0])
        if self._engine_calendar:
            due = min(due, self._engine_calendar[0][0])
        return due

    def _instant(self) -> None:
        """All that is due now, then one Tick if it is wanted."""
        while True:
            if self._calendar and self._calendar[0][0] <= self.now:
                heapq.heappop(self._calendar)[2]()
            elif self._engine_calendar and self._engine_calendar[0][0] <= self.now:
                due, _, engine = heapq.heappop(self._engine_calendar)
                if self._engine_due.get(engine) == due:
                    del self._engine_due[engine]
                    self._advance(engine)
            else:
                break
        if self.scheduler.wants_tick or self.scheduler.next_due() <= self.now:
            self._tick()

    def _tick(self) -> None:
        at, count = self._ticks_at
        count = count + 1 if at == self.now else 1
        self._ticks_at = (self.now, count)
        if count > MAX_TICKS_AT_ONCE:
            raise AssertionError(f"the core asked for {count} ticks at {self.now} s: it never comes to rest")
        self.send(Tick())

    def _advance(self, engine: VirtualEngine) -> None:
        if engine.next_event_seconds() <= self.now:
            for report in engine.advance(self.now):
                self._later(self.send, report)
        self.touch(engine)

    # actions and reports -----------------------------------------------------------------------------------------------

    def _later(self, call: Callable[..., object], argument: Action | Report) -> None:
        self.at(self.now + self._latency_seconds, lambda: _ignore(call(argument)))

    def _submit(self, dispatch: Dispatch) -> None:
        engine = self.engines.get(dispatch.engine_id)
        if engine is None:
            self.send(AttemptFailed(dispatch.attempt_id, FaultKind.BROKEN, f"no door to {dispatch.engine_id}"))
            return
        engine.submit(self.now, dispatch)
        self.touch(engine)

    def _abort(self, abort: Abort) -> None:
        engine = self.engines.get(abort.engine_id)
        if engine is not None:
            engine.abort(self.now, abort.attempt_id)
            self.touch(engine)

    def _control(self, control: Control) -> None:
        engine = self.engines.get(control.engine_id)
        if engine is None:
            message = f"no door to {control.engine_id}"
            self.send(ControlFailed(control.engine_id, control.control_id, FaultKind.UNREACHED, message))
            return
        engine.control(self.now, control)
        self.touch(engine)

    def _report_load(self, engine_id: str) -> None:
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        load = engine.load(self.now)
        if load is not None:
            self.send(load)
        self.at(self.now + self._load_period_seconds, lambda: self._report_load(engine_id))


def _ignore(_: object) -> None:
    return None
