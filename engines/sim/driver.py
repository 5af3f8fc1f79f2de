"""Runs a simulated machine in wall time, and plays SGLang's front process: live requests, pause gate, control calls.

Invariants
- Simulated time = wall time x time scale, less what a stall took. The machine is advanced at most once per
  `TICK_SECONDS` of wall time, so requests that arrive within a tick can share a prefill batch.
- A live request's frames reach it in order; the last one ends it and frees its rid.
- Whoever holds `writer` waits until no request is in flight, and new ones wait for it.
- The scheduler takes what it is sent in order, and nothing while it carries out a control call (`inline`).
- A second abort of a rid is ignored, also where the first came too early to act.

What this module does not know: HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.kv_publisher import KvPublisher
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import Frame, LoadSnapshot
from rolloutd.engines.sim.wire import Answers, Generate

# Half a decode step at time scale 5: short for callers, and several frames share one wake-up.
TICK_SECONDS = 0.001
# SGLang: how often the abort-mode pause looks for requests in flight.
PAUSE_POLL_SECONDS = 1.0
# How often a flush that waits for an idle engine looks, wall seconds.
FLUSH_POLL_SECONDS = 0.02
DEATH_STATUS = 131  # 128 + SIGQUIT, the signal with which a real server kills its own process tree
DEATH_SILENCE_SECONDS = 5.0  # simulated; from the scheduler's death to that of the process

logger = logging.getLogger(__name__)


class Live:
    """A request in flight: its answers and a bell for its handler."""

    __slots__ = ("abort_sent", "answers", "arrived", "bell", "news", "request", "submitted")

    def __init__(self, request: Generate, answers: Answers, arrived: float) -> None:
        self.request = request
        self.answers = answers
        self.arrived = arrived
        self.bell = asyncio.Event()
        self.news: list[Frame] = []
        self.abort_sent = False
        self.submitted = False

    def push(self, frame: Frame) -> None:
        """From the driver."""
        self.news.append(frame)
        self.bell.set()

    async def wait(self) -> None:
        """Until there is news; moves it into the answers (frames merge when the caller lags)."""
        await self.bell.wait()
        self.bell.clear()
        taken = 0
        for frame in self.news:
            if frame.queued and taken:
                self.bell.set()  # its odd form must not swallow news that came before it
                break
            self.answers.add(frame)
            taken += 1
        del self.news[:taken]


class Driver:
    """One engine process's state. Construct inside a running event loop."""

    def __init__(self, config: MachineConfig, time_scale: float, incremental: bool) -> None:
        self.config = config
        self.time_scale = time_scale
        self.incremental = incremental
        self.machine = SimMachine(config)
        self.live: dict[str, Live] = {}
        self.official_version = config.weight_version
        self.served_model_name: str | None = None
        self.released_memory: set[str] = set()
        self.dying = False
        self.publisher: KvPublisher | None = None  # of what the prefix cache does
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._stalled_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gate = asyncio.Event()  # closed while paused
        self._gate.set()
        self.gate_lock = asyncio.Lock()  # SGLang's condition around its pause flag
        self._writer = asyncio.Lock()  # new requests pass through it
        self._scheduler = asyncio.Lock()  # held by the control call that it carries out
        self._sent: list[Callable[[], None]] | None = None  # meanwhile, in order
        self._flush_waits = False
        self._loads_wall: float | None = None
        self._control_applied = asyncio.Event()
        self._ended = asyncio.Event()

    # ---- time -----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Simulated seconds since the start."""
        wall = self._loop.time() if self._stalled_at is None else self._stalled_at
        return (wall - self._origin) * self.time_scale

    def stall(self) -> None:
        """Stop time."""
        if self._stalled_at is None:
            self._stalled_at = self._loop.time()

    def unstall(self) -> None:
        """Let time go on from where it stopped."""
        if self._stalled_at is not None:
            self._origin += self._loop.time() - self._stalled_at
            self._stalled_at = None
            self._kick()

    def _kick(self) -> None:
        """Publish what the cache did, and set the timer for the machine's next event."""
        if self.publisher is not None and not self.dying and (events := self.machine.take_cache_events()):
            self.publisher.publish(events)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        event = self.machine.next_event_seconds()
        if event is None or self._stalled_at is not None or self.dying:
            return
        delay = max(TICK_SECONDS, (event - self.now()) / self.time_scale)
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._stalled_at is not None or self.dying:
            return
        for frame in self.machine.advance(self.now()):
            live = self.live.get(frame.rid)
            if live is None:
                continue  # its client has hung up
            live.push(frame)
            if frame.finish_reason is not None:
                self._end(frame.rid)
        if self.machine.paused is None or not self.machine.pause_pending:
            self._control_applied.set()
        self._kick()

    # ---- requests -------------------------------------------------------------------------------------------------

    def register(self, request: Generate) -> Live:
        """Make a request known. The caller has checked that its rid is free."""
        rid = request.sim.rid
        live = Live(request, Answers(request, self.config, self.incremental), self._loop.time())
        self.live[rid] = live
        return live

    async def submit(self, live: Live) -> None:
        """Pass the pause gate and a weight update, then queue the request."""
        while True:
            await self._gate.wait()
            async with self._writer:
                if self._gate.is_set():
                    live.submitted = True
                    self._send(lambda: self._submit(live))
                    break

    def _submit(self, live: Live) -> None:
        if self.released_memory:
            self.die("a request for an engine whose memory is released")
        else:
            self.machine.submit(self.now(), live.request.sim)

    def hang_up(self, live: Live) -> None:
        """The client left: abort, and drop what is still to come."""
        rid = live.request.sim.rid
        if self.live.get(rid) is live:
            self._end(rid)
            self._send(lambda: self.machine.abort(self.now(), rid))

    def abort(self, rid: str) -> None:
        """An abort call: only for a rid that is live here, only once; the machine then matches by prefix."""
        live = self.live.get(rid)
        if live is None or live.abort_sent:
            return
        live.abort_sent = True
        self._send(lambda: self.machine.abort(self.now(), rid))

    def abort_all(self) -> None:
        """Abort everything the machine knows."""
        self._send(lambda: self.machine.abort_all(self.now()))

    def _end(self, rid: str) -> None:
        del self.live[rid]
        self._ended.set()

    async def until_idle(self) -> None:
        """Until no request is in flight."""
        while self._in_flight():
            self._ended.clear()
            await self._ended.wait()

    def _in_flight(self) -> bool:
        """Requests past the gate whose callers still wait; a hung-up one does not count, as in SGLang."""
        return any(live.submitted for live in self.live.values())

    # ---- control --------------------------------------------------------------------------------------------------

    def _send(self, action: Callable[[], None]) -> None:
        """Hand the scheduler something; it takes it now, or after the control call that it carries out."""
        if self._sent is not None:
            self._sent.append(action)
        else:
            action()
            self._kick()

    @asynccontextmanager
    async def inline(self) -> AsyncIterator[None]:
        """One control call in the scheduler's loop: it does nothing else meanwhile, and a pause sent before comes first."""
        async with self._scheduler:
            while self.machine.pause_pending:
                self._control_applied.clear()
                await self._control_applied.wait()
            self._sent = []
            try:
                await self.unless_dying()
                yield
                await self.unless_dying()
            finally:
                sent, self._sent = self._sent, None
                for action in sent:
                    action()
                self._kick()

    @property
    def in_control_call(self) -> bool:
        """Whether the scheduler carries one out."""
        return self._sent is not None

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Alone: no request is in flight, and none starts."""
        async with self._writer:
            await self.until_idle()
            yield

    async def unless_dying(self) -> None:
        """A dead scheduler answers nothing."""
        if self.dying:
            await asyncio.Event().wait()

    def die(self, why: str) -> None:
        """A real scheduler crashes; its streams fall silent, then the process tree is killed."""
        if not self.dying:
            logger.error("%s; the engine dies, as SGLang does", why)
            self.dying = True
            self._loop.call_later(DEATH_SILENCE_SECONDS / self.time_scale, os._exit, DEATH_STATUS)

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Close the gate. "abort" returns when nothing is in flight, so after "in_place" it never does (as in SGLang)."""
        async with self.gate_lock:
            self._gate.clear()
            if mode != "abort":
                self._send(lambda: self._pause(mode))
                return
            while self._in_flight():
                self.abort_all()
                await asyncio.sleep(PAUSE_POLL_SECONDS / self.time_scale)

    def _pause(self, mode: Literal["retract", "in_place"]) -> None:
        self._freeze_loads()
        self.machine.pause(self.now(), mode)

    async def resume(self) -> None:
        """Open the gate."""
        async with self.gate_lock:
            self._send(self._resume)
            self._gate.set()

    def _resume(self) -> None:
        if self.released_memory and not self.machine.is_idle(self.now()):
            self.die("work goes on while memory is released")
        self.machine.resume(self.now())
        self._loads_wall = None

    @property
    def paused(self) -> bool:
        """Whether new requests wait at the gate."""
        return not self._gate.is_set()

    async def flush(self, timeout_seconds: float) -> str | None:
        """Drop the prefix cache; None when done, else why not. With a time (wall) it waits for an idle engine.

        As in SGLang waiting means for an empty queue too, which the flush itself does not need in a pause, and only one
        may wait.
        """
        async with self.inline():
            if self._flush_waits:
                return "Another flush_cache is already in progress."
            if timeout_seconds <= 0 or self.machine.is_idle(self.now()):
                return None if self.machine.flush_cache(self.now()) else "Flush cache failed.\n"
        self._flush_waits = True
        deadline = self._loop.time() + timeout_seconds
        try:
            while self._loop.time() < deadline:
                await asyncio.sleep(min(FLUSH_POLL_SECONDS, max(0.0, deadline - self._loop.time())))
                async with self.inline():
                    if self.machine.is_idle(self.now()):
                        self.machine.flush_cache(self.now())
                        return None
        finally:
            self._flush_waits = False
        return "Timed out waiting for idle state."

    # ---- views ----------------------------------------------------------------------------------------------------

    def load(self) -> tuple[LoadSnapshot, float]:
        """The machine's load, rates and times in real seconds, and the wall time (epoch seconds) of the snapshot: frozen while
        paused."""
        load = self.machine.load(self.now())
        load = replace(
            load,
            generated_tokens_per_second=load.generated_tokens_per_second * self.time_scale,
            prefill_busy_seconds_total=load.prefill_busy_seconds_total / self.time_scale,
        )
        return load, self._loads_wall or time.time()

    def _freeze_loads(self) -> None:
        if self._loads_wall is None:
            self._loads_wall = time.time()
