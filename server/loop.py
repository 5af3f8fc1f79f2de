"""The run loop: the only writer of the core. Events go in through `post`; actions become awaits, their ends events.

Invariants
- The core is entered by one caller at a time, on one thread, and never from inside itself: performing an action posts
  nothing synchronously.
- Every dispatch reports exactly one end to the core, whatever happens to it: a slice, a fault, an exception (BROKEN, with
  an error in the log) or the loop's own end. So does every control call, except at the very end: what the loop's own end
  cuts off is not told.
- An attempt has no task: the dispatches of one pass are sent after it, and the door's callbacks tell the rest. Ends that come
  in one turn of the event loop are posted one after the other in the next.
- Scheduling happens on `Tick` only. A tick follows the burst that wanted it, no later than `scheduling_interval_ms`
  after it and, while ticks are dear, not before the loop had as much time for everything else as the last tick took.
- A door that was removed is closed when its last attempt and its last control call have ended; if those left its engine
  paused, it is resumed before.

What this module does not know: gRPC, protobuf, and what the core decides.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rolloutd.engines.base import Engine, EngineFault
from rolloutd.scheduler import actions, events
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import Verb
from rolloutd.server.attempt import Attempt, Door
from rolloutd.server.controlling import carry_out
from rolloutd.server.logging import get_logger
from rolloutd.server.outbox import Outbox

# uvloop rounds timers to milliseconds and may fire one early: waiting less would spin.
MIN_TIMER_SECONDS = 0.001
# Longer than a look at whether it is quiet comes after the last (`garbage.py`: a second), so that work between two looks counts.
QUIET_SECONDS = 1.5
# How long the loop's own end waits for removed doors to be resumed and closed.
PART_SECONDS = 5.0
# Pause after a scheduling pass that raised.
FAILED_TICK_SECONDS = 1.0

Observer = Callable[[events.Event, list[actions.Action]], None]


class RunLoop:
    """Owns the core, the doors it may use, and the outboxes of connected consumers."""

    def __init__(self, core: Scheduler, interval_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.clock = clock
        self.observers: list[Observer] = []
        self._interval_seconds = interval_seconds
        self.log = get_logger("loop")
        self._doors: dict[str, Door] = {}
        self._outboxes: dict[tuple[str, str], Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._partings: set[asyncio.Task[None]] = set()  # of these, the ones that close removed doors
        # What has no entry is read by the caller of post() and by observers.
        self._performers: dict[type[actions.Action], Callable[[Any], None]] = {
            actions.Deliver: self._deliver,
            actions.Dispatch: self._dispatch,
            actions.Abort: self._stop_attempt,
            actions.Control: self._begin_control,
            actions.EndStream: self._end_stream,
            actions.Record: self._record,
        }
        self._to_send: list[Attempt] = []
        self._attempts: dict[str, Attempt] = {}  # at their doors
        self._progressed: list[Attempt] = []
        self._ended: list[tuple[Attempt, events.Event]] = []
        self._calls = 0  # attempts and control calls
        self._worked_at = -math.inf  # when the last of them ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._tick_waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._tick_handle: asyncio.Handle | None = None
        self._tick_cost_seconds = 0.0
        self._tick_ended = -math.inf
        self._inside = False
        self._is_ticking = False
        self._closed = False
        # Asked for once: in Python 3.11 each get_running_loop() is a system call (getpid).
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop everything here runs on."""
        if self._event_loop is None:
            self._event_loop = asyncio.get_running_loop()
        return self._event_loop

    # -- events in ---------------------------------------------------------------------------------------------------

    def post(self, event: events.Event) -> list[actions.Action]:
        """Handle one event and perform what the core asks for. Returns the actions, for the caller's answer."""
        result = self._handle(event)
        self._arm()
        return result

    def _handle(self, event: events.Event) -> list[actions.Action]:
        """`post`, less looking at when the next tick is wanted."""
        if self._inside:
            raise RuntimeError(f"{type(event).__name__} posted while another event is being handled")
        self._inside = True
        try:
            result = self.core.handle(event, self.clock())
            for action in result:
                if (perform := self._performers.get(type(action))) is not None:
                    perform(action)
            if self._to_send and not self._is_ticking:
                self.event_loop.call_soon(self._send)
            for observe in self.observers:
                try:
                    observe(event, result)
                except Exception:  # a bug in who looks on must not cost the event what it is
                    self.log.error("observer_failed", event_type=type(event).__name__, exc_info=True)
        finally:
            self._inside = False
        return result

    def refusal(self, event: events.Event) -> Refusal | None:
        """Post an event of which only acceptance matters."""
        return refusal_of(self.post(event))

    async def after_tick(self, timeout_seconds: float) -> None:
        """Return after the next scheduling pass, or after the timeout."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tick_waiters.append(waiter)
        await asyncio.wait({waiter}, timeout=timeout_seconds)
        if not waiter.done():
            self._tick_waiters.remove(waiter)

    def set_interval(self, interval_seconds: float) -> None:
        """The longest time between what wants a tick and the tick, from the next one on."""
        self._interval_seconds = interval_seconds

    # -- doors and outboxes ------------------------------------------------------------------------------------------

    def add_door(self, engine_id: str, door: Engine) -> None:
        """Make a door known before its engine joins. One door per engine id."""
        if engine_id in self._doors:
            raise ValueError(f"engine {engine_id} has a door already")
        self._doors[engine_id] = Door(door)

    def remove_door(self, engine_id: str) -> None:
        """Forget a door; it is closed when its last call has ended."""
        held = self._doors.pop(engine_id, None)
        if held is not None:
            held.removed = True
            self._close_if_unused(held)

    def attempts_on(self, engine_id: str) -> int:
        held = self._doors.get(engine_id)
        return held.attempts if held is not None else 0

    def open_outbox(self, outbox: Outbox) -> Outbox | None:
        """Deliver this consumer's events here from now on. Returns the outbox that did so before."""
        key = (outbox.run_id, outbox.consumer_id)
        previous = self._outboxes.get(key)
        self._outboxes[key] = outbox
        return previous

    def close_outbox(self, outbox: Outbox) -> bool:
        """Stop delivering here. False when a newer outbox of the same consumer has taken its place."""
        key = (outbox.run_id, outbox.consumer_id)
        if self._outboxes.get(key) is not outbox:
            return False
        del self._outboxes[key]
        return True

    def outboxes(self) -> list[Outbox]:
        return list(self._outboxes.values())

    def connected_consumers(self, run_id: str) -> int:
        return sum(1 for key in self._outboxes if key[0] == run_id)

    # -- life --------------------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether nothing is on an engine, nothing waits to be, and nothing was for `QUIET_SECONDS`. (Under a light load no
        more is on an engine at most moments.)"""
        if self._calls or self.core.wants_tick or self.clock() - self._worked_at < QUIET_SECONDS:
            return False
        return not any(self.core.statistics().queued.values())

    async def wait_idle(self) -> None:
        """Return when no attempt and no control call is on an engine."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop scheduling, hang up what still runs, wait for every task to end, for `PART_SECONDS` at most for those that close
        removed doors. The other doors stay the manager's to close."""
        self._closed = True
        for handle in (self._timer, self._tick_handle):
            if handle is not None:
                handle.cancel()
        self._to_send, unsent = [], self._to_send
        for attempt in [*unsent, *self._attempts.values()]:
            attempt.hang_up()
        self._post_ends()
        await _cancel([task for task in self._tasks if task not in self._partings])
        if self._partings:  # an engine that was removed may stand still until it is resumed
            await asyncio.wait(self._partings, timeout=PART_SECONDS)
        await _cancel(list(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task that the loop keeps track of; an exception that escapes it is logged as an error."""
        task = self.event_loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("task_failed", task=task.get_name(), exc_info=error)

    # -- actions out -------------------------------------------------------------------------------------------------

    def _deliver(self, action: actions.Deliver) -> None:
        outbox = self._outboxes.get((action.run_id, action.consumer_id))
        if outbox is not None:
            outbox.put(action, self.clock())

    def _dispatch(self, action: actions.Dispatch) -> None:
        self._begin_call()
        held = self._doors.get(action.engine_id)
        if held is not None:
            held.attempts += 1
        self._to_send.append(Attempt(self, action, held))

    def _stop_attempt(self, action: actions.Abort) -> None:
        held = self._doors.get(action.engine_id)
        if held is not None:
            self.spawn(self._abort(action, held.door), f"abort {action.attempt_id}")

    def _begin_control(self, action: actions.Control) -> None:
        if self._closed:  # asked for by the end of something that was hung up
            return
        self._begin_call()
        held = self._doors.get(action.engine_id)
        if held is not None:
            held.controls += 1
        self.spawn(self._control(action, held), f"{action.verb.name.lower()} {action.engine_id}")

    def _end_stream(self, action: actions.EndStream) -> None:
        outbox = self._outboxes.get((action.run_id, action.consumer_id))
        if outbox is not None:
            outbox.finish(action.error)

    def _record(self, action: actions.Record) -> None:
        write = self.log.warning if action.level == "warning" else self.log.info
        write(action.event, **action.fields)

    def _send(self) -> None:
        """Begin what was dispatched."""
        attempts, self._to_send = self._to_send, []
        for attempt in attempts:
            self._attempts[attempt.dispatch.attempt_id] = attempt
            attempt.begin()

    def attempt_over(self, attempt: Attempt, end: events.Event) -> None:
        """For attempts: the end of one. Ends that come in one turn of the event loop are posted together in the next: what
        they have in common, in the core's code and in ours, is then at hand for all but the first."""
        self._attempts.pop(attempt.dispatch.attempt_id, None)
        if not self._ended:
            self.event_loop.call_soon(self._post_ends)
        self._ended.append((attempt, end))

    def _post_ends(self) -> None:
        ended, self._ended = self._ended, []
        for attempt, end in ended:
            held = attempt.held
            if held is not None:
                held.attempts -= 1
            try:
                self._end_call(end, held)
            except Exception:  # a bug in the core; the others have ended too
                self.log.error("end_failed", attempt_id=attempt.dispatch.attempt_id, exc_info=True)
        self._arm()

    def progressed(self, attempt: Attempt) -> None:
        """For attempts: one has progress to post, which it does after two turns of the event loop."""
        if not self._progressed:
            loop = self.event_loop
            loop.call_soon(loop.call_soon, self._post_progress)
        self._progressed.append(attempt)

    def _post_progress(self) -> None:
        attempts, self._progressed = self._progressed, []
        for attempt in attempts:
            try:
                attempt.post_progress()
            except Exception:  # a bug in the core; the others have progress too
                self.log.error("progress_failed", attempt_id=attempt.dispatch.attempt_id, exc_info=True)

    async def _control(self, control: actions.Control, held: Door | None) -> None:
        end: events.Event | None = None
        if held is not None and control.verb is Verb.PAUSE:
            held.paused = True
        try:
            end = await carry_out(control, held.door if held is not None else None)
        finally:
            if held is not None:
                held.controls -= 1
                if control.verb is Verb.RESUME and isinstance(end, events.ControlEnded):
                    held.paused = False
            try:
                self._end_call(end, held)
            finally:
                self._arm()

    def _begin_call(self) -> None:
        self._calls += 1
        self._idle.clear()

    def _end_call(self, end: events.Event | None, held: Door | None) -> None:
        self._calls -= 1
        try:
            if end is not None:
                self._handle(end)  # may ask for another call to the same engine
        finally:
            if held is not None:
                self._close_if_unused(held)
            if self._calls == 0:
                self._worked_at = self.clock()
                self._idle.set()

    async def _abort(self, abort: actions.Abort, door: Engine) -> None:
        try:
            await door.abort(abort.attempt_id)
        except EngineFault as fault:  # the core's abort_seconds deal with an abort that has no effect
            self.log.warning(
                "abort_failed", attempt_id=abort.attempt_id, engine_id=abort.engine_id, message=fault.message
            )

    def _close_if_unused(self, held: Door) -> None:
        if held.removed and held.attempts == 0 and held.controls == 0:
            task = self.spawn(self._part(held), f"close {held.door.url}")
            self._partings.add(task)
            task.add_done_callback(self._partings.discard)

    async def _part(self, held: Door) -> None:
        """Close a removed door. An engine that was removed in the middle of an update would stand still for ever."""
        try:
            if held.paused:
                await held.door.resume()
        except EngineFault as fault:
            self.log.warning("engine_left_paused", url=held.door.url, message=fault.message)
        finally:
            await held.door.close()

    # -- ticks -------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._closed:
            return
        loop = self.event_loop
        if self.core.wants_tick and self._tick_handle is None:
            rest = self._tick_ended + self._tick_cost_seconds - self.clock()
            if rest <= MIN_TIMER_SECONDS:
                self._tick_handle = loop.call_soon(self._tick)
            else:
                self._tick_handle = loop.call_later(min(rest, self._interval_seconds), self._tick)
        due = self.core.next_due()
        if due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = loop.call_later(max(MIN_TIMER_SECONDS, due - self.clock()), self._timer_fired)

    def _timer_fired(self) -> None:
        """Something was due when the timer was set. It may have gone since: then look again at what is due now."""
        self._timer = None
        self._timer_due = math.inf
        if self.core.next_due() <= self.clock():
            self._tick()
        else:
            self._arm()

    def _tick(self) -> None:
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        started = self.clock()
        self._is_ticking = True
        try:
            self.post(events.Tick())
        except Exception:  # a bug in the core: say so, and keep everything else going
            self.log.error("scheduling_failed", exc_info=True)
            self._tick_handle = asyncio.get_running_loop().call_later(FAILED_TICK_SECONDS, self._tick)
            return
        finally:
            self._is_ticking = False
        self._tick_ended = self.clock()
        self._tick_cost_seconds = self._tick_ended - started
        self._send()
        waiters, self._tick_waiters = self._tick_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def refusal_of(result: list[actions.Action]) -> Refusal | None:
    """The refusal that `post` returned, if the event was not accepted."""
    return result[0].error if result and isinstance(result[0], actions.Refuse) else None
