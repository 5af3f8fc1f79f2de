"""A server on SGLang's routes that answers exactly what a test writes down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"
Answer = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def frame(ids: list[int], total: int, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
    body = {
        "text": "x" * len(ids),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "prompt_tokens": 3,
            "completion_tokens": total,
            "cached_tokens": 0,
            "weight_version": "default",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_top_logprobs": [[[-0.5, token, None]] for token in ids],
            **meta,
        },
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


ORDERS = (
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
LENGTH = {"type": "length", "length": 3}


class FakeServer:
    """Answers with what `say` was given: bytes to send, or a coroutine function for anything else."""

    def __init__(self) -> None:
        self.server_info: dict[str, Any] = {
            "version": "0.5.23",
            "page_size": 16,
            "max_req_input_len": 4090,
            "model_path": "no/such-model",
            "incremental_streaming_output": True,
            "stream_interval": 8,
            "startup_time": {"scheduler_e2e": 4.5},
            "internal_states": [{"effective_max_running_requests_per_dp": 8}],
        }
        self.rank: dict[str, Any] = {
            "timestamp": 100.0,
            "num_running_reqs": 1,
            "num_waiting_reqs": 2,
            "num_used_tokens": 30,
            "max_total_num_tokens": 16384,
            "gen_throughput": 5.0,
            "total_prefill_uncached_tokens": 70,
            "total_prefill_busy_us": 250_000,
            "memory": {"kv_cache_gb": 0.5},
        }
        self.ranks = [self.rank]
        self.ready_status = 200
        self.weight_version = "default"
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}  # Authorization by path
        self.aborted: list[str] = []
        self.orders: dict[str, Any] = {}  # last body by path of a controlling call
        self.orders_answered = asyncio.Event()  # they hang while it is not set
        self.orders_answered.set()
        self.gone = asyncio.Event()  # a client hung up on a running stream
        self._answer: Answer | None = None
        self._order_answer: tuple[int, dict[str, Any]] = (200, {"success": True, "message": "Success"})
        self._head: tuple[int, str, bytes] | None = None

    def say(self, *pieces: bytes) -> None:
        async def answer(request: web.Request, response: web.StreamResponse) -> None:
            for piece in pieces:
                await response.write(piece)

        self._answer = answer

    def do(self, answer: Answer) -> None:
        self._answer = answer

    def refuse(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self._head = (status, content_type, body)

    def answer_orders(self, status: int, body: dict[str, Any]) -> None:
        self._order_answer = status, body

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_get("/server_info", self._json(lambda: self.server_info))
        app.router.add_get(
            "/model_info",
            self._json(
                lambda: {"served_model_name": "tiny", "weight_version": self.weight_version, "model_path": "tiny"}
            ),
        )
        app.router.add_get("/v1/loads", self._json(lambda: {"timestamp": "now", "loads": self.ranks}))
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ORDERS:
            app.router.add_post(path, self._order)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}"

    def _json(self, value: Callable[[], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            self.headers[request.path] = request.headers.get("Authorization", "")
            return web.json_response(value())

        return handler

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=self.ready_status)

    async def _abort(self, request: web.Request) -> web.Response:
        self.headers[request.path] = request.headers.get("Authorization", "")
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _order(self, request: web.Request) -> web.Response:
        self.headers[request.path] = request.headers.get("Authorization", "")
        self.orders[request.path] = await request.json() if request.can_read_body else None
        await self.orders_answered.wait()
        status, body = self._order_answer
        return web.json_response(body, status=status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.headers[request.path] = request.headers.get("Authorization", "")
        self.bodies.append(await request.json())
        if self._head is not None:
            status, content_type, body = self._head
            return web.Response(status=status, content_type=content_type, body=body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            if self._answer is None:
                await response.write(frame([5], 1, LENGTH) + DONE)
            else:
                await self._answer(request, response)
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone.set()
            raise
        return response
