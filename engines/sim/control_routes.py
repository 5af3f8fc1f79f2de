"""Routes that change the simulated engine: abort, flush, pause, weights, and the faults of `/sim/fault`.

Invariants
- Statuses and bodies are SGLang 0.5.23's. Weights are their version string: a tensor bucket's payload is not looked at.

What this module does not know: how the driver carries a call out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from rolloutd.engines.sim.driver import Driver, UpdateResult
from rolloutd.engines.sim.faults import FAULT_KINDS, FaultBoard, FaultOrder
from rolloutd.engines.sim.state_routes import json_response

CRASH_STATUS = 1
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


class ControlRoutes:
    """Handlers. `refuse` closes the listening socket for some wall seconds."""

    def __init__(self, driver: Driver, faults: FaultBoard, refuse: Callable[[float], Awaitable[None]]) -> None:
        self._driver = driver
        self._faults = faults
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()
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
        if await self._driver.flush(timeout):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def pause(self, request: web.Request) -> web.Response:
        """Modes abort, retract, in_place."""
        body = await _body(request, PauseBody)
        await self._driver.pause(body.mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Take back a pause."""
        await _body(request, EmptyBody)
        await self._driver.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Any path is accepted; it renames the model, as in SGLang."""
        body = await _body(request, DiskBody)
        if not body.model_path:
            return json_response({"success": False, "message": "model_path: empty", "num_paused_requests": 0}, 400)
        result = await self._driver.update_weights(
            body.weight_version, body.flush_cache, body.abort_all_requests, body.model_path
        )
        return _update_response(result, {"num_paused_requests": 0})

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """One bucket; only between begin and end."""
        body = await _body(request, TensorBody)
        if not self._driver.update_session:
            message = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            return json_response({"success": False, "message": message}, 400)
        result = await self._driver.update_weights(body.weight_version, body.flush_cache, body.abort_all_requests, None)
        return _update_response(result, {})

    async def update_version(self, request: web.Request) -> web.Response:
        """Rename the weights; aborts everything unless told not to."""
        body = await _body(request, VersionBody)
        self._driver.set_version(body.new_version, body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    async def begin_update(self, request: web.Request) -> web.Response:
        """Open a weight-update session."""
        if self._driver.update_session:
            message = "a weight-update session is already open; call end_weight_update() first"
            return json_response({"success": False, "message": message}, 400)
        self._driver.update_session = True
        return json_response({"success": True, "message": "Success"})

    async def end_update(self, request: web.Request) -> web.Response:
        """Close it."""
        if not self._driver.update_session:
            message = "no weight-update session is open; call begin_weight_update() first"
            return json_response({"success": False, "message": message}, 400)
        self._driver.update_session = False
        return json_response({"success": True, "message": "Success"})

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
            task = asyncio.ensure_future(self._refuse(order.seconds))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
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
