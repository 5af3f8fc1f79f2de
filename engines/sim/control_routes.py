"""Routes that change the simulated engine: abort, flush, pause, weights, and the faults of `/sim/fault`.

Invariants
- Statuses and bodies are SGLang 0.5.23's. A tensor bucket's payload is not looked at.
- A control call whose caller hangs up is carried out all the same.

What this module does not know: how the driver carries a call out.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from rolloutd.engines.sim.driver import Driver
from rolloutd.engines.sim.faults import FAULT_KINDS, FaultBoard, FaultOrder
from rolloutd.engines.sim.state_routes import json_response
from rolloutd.engines.sim.weights import UpdateResult, Weights

CRASH_STATUS = 1
CALLS_REMEMBERED = 1_024
T = TypeVar("T")


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class EmptyBody(msgspec.Struct):
    pass


class DiskBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class BeginBody(msgspec.Struct):
    selector: Literal["target", "draft", "all"] = "all"


class MemoryBody(msgspec.Struct):
    tags: list[str] | None = None


class ControlRoutes:
    """Handlers. `refuse` closes the listening socket for some wall seconds."""

    def __init__(
        self, driver: Driver, weights: Weights, faults: FaultBoard, refuse: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        self._driver = driver
        self._weights = weights
        self._faults = faults
        self._refuse = refuse
        self._calls: deque[tuple[str, float, float]] = deque(maxlen=CALLS_REMEMBERED)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unslow: asyncio.TimerHandle | None = None

    def routes(self) -> list[web.RouteDef]:
        """All routes of this class."""
        return [
            web.post("/abort_request", self.abort),
            web.route("*", "/flush_cache", self.flush),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/update_weights_from_disk", self.update_from_disk),
            web.post("/update_weights_from_tensor", self.update_from_tensor),
            web.post("/update_weight_version", self.update_version),
            web.post("/begin_weight_update", self.begin_update),
            web.post("/end_weight_update", self.end_update),
            web.route("*", "/release_memory_occupation", self.release_memory),
            web.route("*", "/resume_memory_occupation", self.resume_memory),
            web.get("/sim/activity", self.activity),
            web.post("/sim/fault", self.set_fault),
            web.delete("/sim/fault", self.clear_fault),
        ]

    async def abort(self, request: web.Request) -> web.Response:
        """200 with an empty body, whatever happens."""
        body = await _body(request, AbortBody)
        if body.abort_all:
            self._driver.abort_all()
        else:
            self._driver.abort(body.rid)
        return web.Response(status=200)

    async def flush(self, request: web.Request) -> web.Response:
        """200, or 400 while requests run or wait."""
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError:
            return json_response({"error": {"message": "timeout: must be a number of seconds"}}, 400)
        refusal = await self._carry_out(self._weights.flush(timeout))
        if refusal is None:
            return web.Response(text="Cache flushed.\n")
        return web.Response(text=refusal, status=400)

    async def pause(self, request: web.Request) -> web.Response:
        """Modes abort, retract, in_place."""
        body = await _body(request, PauseBody)
        await self._carry_out(self._driver.pause(body.mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Take back a pause."""
        await _body(request, EmptyBody)
        await self._carry_out(self._driver.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Any path is accepted; it renames the model, as in SGLang."""
        body = await _body(request, DiskBody)
        load = self._weights.load_from_disk(
            body.model_path, body.weight_version, flush=body.flush_cache, abort_all=body.abort_all_requests
        )
        return _update_response(await self._carry_out(load), {"num_paused_requests": 0})

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """One bucket; only between begin and end."""
        body = await _body(request, TensorBody)
        load = self._weights.load_bucket(body.weight_version, flush=body.flush_cache, abort_all=body.abort_all_requests)
        return _update_response(await self._carry_out(load), {})

    async def update_version(self, request: web.Request) -> web.Response:
        """Rename the weights; aborts everything unless told not to."""
        body = await _body(request, VersionBody)
        await self._carry_out(self._weights.set_version(body.new_version, body.abort_all_requests))
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    async def begin_update(self, request: web.Request) -> web.Response:
        """Open a weight-update session."""
        await _body(request, BeginBody)
        return _update_response(await self._carry_out(self._weights.begin_session()), {})

    async def end_update(self, request: web.Request) -> web.Response:
        """Close it."""
        await _body(request, EmptyBody)
        return _update_response(await self._carry_out(self._weights.end_session()), {})

    async def release_memory(self, request: web.Request) -> web.Response:
        """Let go of memory by tags, or of all."""
        body = await _body(request, MemoryBody)
        await self._carry_out(self._weights.release_memory(body.tags))
        return json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        """Take it back."""
        body = await _body(request, MemoryBody)
        await self._carry_out(self._weights.resume_memory(body.tags))
        return json_response(None)

    async def activity(self, request: web.Request) -> web.Response:
        """When it worked, in simulated seconds: `now`, `rests` without a pass, `calls` (what, start, end) that changed it."""
        driver = self._driver
        body = {"now": driver.now(), "rests": list(driver.machine.rests), "calls": list(self._calls)}
        return json_response(body)

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        started = self._driver.now()
        result = await asyncio.shield(self._start(call))
        self._calls.append((getattr(call, "__name__", ""), started, self._driver.now()))
        return result

    def _start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- faults ---------------------------------------------------------------------------------------------------

    async def set_fault(self, request: web.Request) -> web.Response:
        """Order a fault; see `FaultOrder`."""
        try:
            order = msgspec.json.decode(await request.read(), type=FaultOrder)
        except msgspec.DecodeError as error:
            return json_response({"error": f"{error}; kinds: {', '.join(FAULT_KINDS)}"}, 400)
        if (problem := order.problem()) is not None:
            return json_response({"error": problem}, 400)
        if order.kind == "crash":
            os._exit(CRASH_STATUS)
        if order.kind == "refuse_connections":
            self._start(self._refuse(order.seconds))
            return json_response({"ok": True})
        if order.kind == "drop_kv_events":
            if self._driver.publisher is None:
                return json_response({"error": "drop_kv_events: the engine publishes none (--kv-events-config)"}, 400)
            self._driver.publisher.to_drop = order.count
            return json_response({"ok": True})
        self._faults.set(order)
        loop = asyncio.get_running_loop()
        if order.kind == "slow":
            self._driver.machine.set_slowdown(self._driver.now(), order.factor)
        elif order.kind == "stall":
            self._driver.stall()
        if order.kind in ("slow", "stall") and order.seconds:
            loop.call_later(order.seconds, self._take_back, order.kind)
        return json_response({"ok": True})

    async def clear_fault(self, request: web.Request) -> web.Response:
        """Take back one kind (`?kind=`), or all."""
        kind = request.query.get("kind")
        if kind is not None and kind not in FAULT_KINDS:
            return json_response({"error": f"kind: {kind!r} is not one of {', '.join(FAULT_KINDS)}"}, 400)
        self._faults.clear(kind)
        for affected in ("slow", "stall"):
            if kind in (None, affected):
                self._take_back(affected)
        return json_response({"ok": True})

    def _take_back(self, kind: str) -> None:
        if kind == "slow" and self._faults.active("slow") is None:
            self._driver.machine.set_slowdown(self._driver.now(), 1.0)
        if kind == "stall" and self._faults.active("stall") is None:
            self._driver.unstall()


def _update_response(result: UpdateResult, extra: dict[str, Any]) -> web.Response:
    body = {"success": result.success, "message": result.message, **extra}
    return json_response(body, 200 if result.success else 400)


async def _body(request: web.Request, kind: type[T]) -> T:
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        message = {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": 400}
        raise web.HTTPBadRequest(body=msgspec.json.encode(message), content_type="application/json") from error
