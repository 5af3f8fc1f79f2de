"""Runs a simulated machine in wall time, and plays SGLang's front process: live requests, pause gate, weight updates.

Invariants
- Simulated time = wall time x time scale, less what a stall took. The machine is advanced at most once per
  `TICK_SECONDS` of wall time, so requests that arrive within a tick can share a prefill batch.
- A live request's frames reach it in order; the last one ends it and frees its rid.
- A weight update without a pause waits until no request is in flight, and new ones wait for it; in a pause it runs at once.
- A second abort of a rid is ignored, also where the first came too early to act.

What this module does not know: HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import Frame, LoadSnapshot
from rolloutd.engines.sim.wire import Answers, Generate

# Half a decode step at time scale 5: short for callers, and several frames share one wake-up.
TICK_SECONDS = 0.001
# How long the simulated engine takes to load weights, simulated seconds.
WEIGHT_LOAD_SECONDS = 0.2
# SGLang: how often the abort-mode pause looks for requests in flight.
PAUSE_POLL_SECONDS = 1.0


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


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Of a weight update: whether the weights are loaded, whether the version is official, and words for the caller."""

    success: bool
    message: str


class Driver:
    """One engine process's state. Construct inside a running event loop."""

    def __init__(self, config: MachineConfig, time_scale: float, incremental: bool) -> None:
        self.config = config
        self.time_scale = time_scale
        self.incremental = incremental
        self.machine = SimMachine(config)
        self.live: dict[str, Live] = {}
        self.official_version = config.weight_version
        self.update_session = False
        self.served_model_name: str | None = None
        self.dying = False
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._stalled_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gate = asyncio.Event()  # closed while paused
        self._gate.set()
        self._gate_lock = asyncio.Lock()
        self._writer = asyncio.Lock()  # held by a weight update; new requests pass through it
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
        """Set the timer for the machine's next event."""
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
                    self.machine.submit(self.now(), live.request.sim)
                    live.submitted = True
                    break
        self._kick()

    def hang_up(self, live: Live) -> None:
        """The client left: abort, and drop what is still to come."""
        rid = live.request.sim.rid
        if self.live.get(rid) is live:
            self._end(rid)
            self.machine.abort(self.now(), rid)
            self._kick()

    def abort(self, rid: str) -> None:
        """An abort call: only for a rid that is live here, only once; the machine then matches by prefix."""
        live = self.live.get(rid)
        if live is None or live.abort_sent:
            return
        live.abort_sent = True
        self.machine.abort(self.now(), rid)
        self._kick()

    def abort_all(self) -> None:
        """Abort everything the machine knows."""
        self.machine.abort_all(self.now())
        self._kick()

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

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Close the gate. "abort" returns when nothing is in flight, so after "in_place" it never does (as in SGLang)."""
        async with self._gate_lock:
            self._gate.clear()
            if mode != "abort":
                self._freeze_loads()
                self.machine.pause(self.now(), mode)
                self._kick()
                return
            while self._in_flight():
                self.abort_all()
                await asyncio.sleep(PAUSE_POLL_SECONDS / self.time_scale)

    async def resume(self) -> None:
        """Open the gate."""
        async with self._gate_lock:
            self.machine.resume(self.now())
            self._loads_wall = None
            self._gate.set()
            self._kick()

    @property
    def paused(self) -> bool:
        """Whether new requests wait at the gate."""
        return not self._gate.is_set()

    async def _pause_applied(self) -> None:
        """Control calls are handled after a pause that came before them."""
        while self.machine.pause_pending:
            self._control_applied.clear()
            await self._control_applied.wait()

    async def flush(self, timeout_seconds: float) -> bool:
        """Drop the prefix cache; waits up to `timeout_seconds` (wall) for the engine to be idle."""
        await self._pause_applied()
        deadline = self._loop.time() + timeout_seconds
        while not self.machine.flush_cache(self.now()):
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(min(0.02, max(0.0, deadline - self._loop.time())))
        return True

    async def update_weights(
        self, weight_version: str | None, flush: bool, abort_all: bool, model_path: str | None
    ) -> UpdateResult:
        """Load "weights": from now on tokens are those of `weight_version`."""
        if abort_all:
            self.abort_all()
        if self.paused:
            await self._pause_applied()
            return await self._load_weights(weight_version, flush, model_path)
        async with self._writer:
            await self.until_idle()
            return await self._load_weights(weight_version, flush, model_path)

    async def _load_weights(self, weight_version: str | None, flush: bool, model_path: str | None) -> UpdateResult:
        await asyncio.sleep(WEIGHT_LOAD_SECONDS / self.time_scale)
        if weight_version is not None:
            self.machine.set_weight_version(self.now(), weight_version)
        if model_path is not None:
            self.served_model_name = model_path
        if flush and not self.machine.flush_cache(self.now()):
            return UpdateResult(False, "Weights were updated, but the cache was not flushed: the engine is busy.")
        if weight_version is not None:
            self.official_version = weight_version
        return UpdateResult(True, "Succeeded to update model weights.")

    def set_version(self, version: str, abort_all: bool) -> None:
        """Rename the weights."""
        if abort_all:
            self.abort_all()
        self.machine.set_weight_version(self.now(), version)
        self.official_version = version

    # ---- views ----------------------------------------------------------------------------------------------------

    def load(self) -> tuple[LoadSnapshot, float]:
        """The machine's load and the wall time (epoch seconds) of the snapshot: frozen while paused."""
        return self.machine.load(self.now()), self._loads_wall or time.time()

    def _freeze_loads(self) -> None:
        if self._loads_wall is None:
            self._loads_wall = time.time()
