"""The simulated engine as a process that speaks SGLang 0.5.23's HTTP wire.

Invariants
- One sequence per `/generate` call. A stream's first token is sent at once, then every `stream_interval` tokens.
- A client that hangs up a stream aborts its request at once; one that hangs up a plain call is noticed 4 simulated
  seconds later, as SGLang does.
- A token id outside the vocabulary kills the process after 5 simulated seconds of silence (exit status 131), unless
  `--no-crash-on-bad-token`; so does what kills a real server among the control calls (`weights.py`).
- Real seconds = simulated seconds / time scale on the wire; faults and keep-alive count in real seconds.

What this module does not know: scheduling, memory, tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
import uvloop
from aiohttp import web

from rolloutd.engines.sim.config import QUEUE_FULL, MachineConfig
from rolloutd.engines.sim.control_routes import ControlRoutes
from rolloutd.engines.sim.driver import Driver, Live
from rolloutd.engines.sim.faults import FaultBoard
from rolloutd.engines.sim.kv_publisher import KvPublisher, read_config
from rolloutd.engines.sim.state_routes import StateRoutes, json_response
from rolloutd.engines.sim.timing import CURVES, PREFILL_TOKENS_PER_SECOND, TimingModel
from rolloutd.engines.sim.tokens import MEAN_OUTPUT_TOKENS, VOCABULARY_SIZE, Model
from rolloutd.engines.sim.weights import WEIGHT_LOAD_SECONDS, Weights
from rolloutd.engines.sim.wire import (
    ContractError,
    Generate,
    OutsideVocabulary,
    ValueRefused,
    decode,
    error_frame,
    error_object,
    read,
)

logger = logging.getLogger(__name__)

PLAIN_HANG_UP_SECONDS = 4.0  # SGLANG_REQUEST_STATE_WAIT_TIMEOUT
STREAM_CLEAN_UP_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 5.0  # SGLANG_TIMEOUT_KEEP_ALIVE
_MAX_BODY_BYTES = 64 << 20
_DONE = b"data: [DONE]\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SimServer:
    """Routes, listening socket and life of one simulated engine."""

    def __init__(self, config: MachineConfig, args: argparse.Namespace, started: float) -> None:
        self.driver = Driver(config, args.time_scale, args.incremental_streaming_output)
        loop = asyncio.get_running_loop()
        self.faults = FaultBoard(loop.time)
        self._kv_events = read_config(args.kv_events_config)
        self._crash_on_bad_token: bool = args.crash_on_bad_token
        self._host: str = args.host
        self.port: int = args.port
        seed = random.SystemRandom().getrandbits(30)
        self.state = StateRoutes(
            self.driver, self.faults, args.model_path, args.host, args.port, seed, time.perf_counter() - started
        )
        weights = Weights(self.driver, self.faults, args.weight_load_seconds)
        self.control = ControlRoutes(self.driver, weights, self.faults, self.refuse_connections)
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._hang])
        app.add_routes([web.route("*", "/generate", self.generate), *self.state.routes(), *self.control.routes()])
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_SECONDS, access_log=None, shutdown_timeout=1.0
        )
        self._site: web.TCPSite | None = None

    async def start(self) -> None:
        """Listen. Port 0 takes a free one; see `port`. OSError where a port is taken."""
        if self._kv_events is not None:
            self.driver.publisher = KvPublisher(self._kv_events, self.driver.config.page_size_tokens)
        await self._runner.setup()
        await self._listen()
        self.port = self.state.port = self._runner.addresses[0][1]

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, self._host, self.port, reuse_address=True)
        await self._site.start()

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self.driver.publisher is not None:
            self.driver.publisher.close()
        await self._runner.cleanup()

    async def refuse_connections(self, seconds: float) -> None:
        """Reset every connection and listen again after `seconds` (wall)."""
        await asyncio.sleep(0)  # let the order's own answer go first
        assert self._site is not None
        await self._site.stop()
        server = self._runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(seconds)
        await self._listen()

    @web.middleware
    async def _hang(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.faults.active("hang") is not None and not request.path.startswith("/sim/"):
            self.faults.take("hang")
            await asyncio.Event().wait()  # ends when the client hangs up
        return await handler(request)

    # ---- /generate ------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One sequence, streamed or not."""
        data = await request.read()
        if self.faults.take("error_500") is not None:
            return web.Response(text="Internal Server Error", status=500)
        try:
            body = decode(data)
        except ContractError as error:
            return json_response({"error": str(error)}, 400)
        except msgspec.DecodeError as error:
            return json_response(error_object(f"JSON decode error: {error}", 400), 400)
        rid = body.rid or uuid.uuid4().hex
        stream = bool(body.stream)
        if self.faults.take("busy") is not None:
            return await self._busy(request, rid, stream)
        try:
            parsed = read(body, rid, self.driver.config)
            if rid in self.driver.live:
                raise ValueRefused(f"Duplicate request ID detected: {rid}")
        except ValueRefused as error:
            return await self._refused(request, str(error), stream)
        except OutsideVocabulary as error:
            if not self._crash_on_bad_token:
                return await self._refused(request, f"token id outside the vocabulary: {error}", stream)
            self.driver.die(f"token id outside the vocabulary: {error}")
            await asyncio.Event().wait()  # silence until the process ends
        live = self.driver.register(parsed)
        if stream:
            return await self._stream(request, live)
        return await self._plain(request, live, parsed)

    async def _plain(self, request: web.Request, live: Live, parsed: Generate) -> web.StreamResponse:
        submitting = asyncio.ensure_future(self.driver.submit(live))
        try:
            await asyncio.shield(submitting)
            while live.answers.finish_reason is None:
                await live.wait()
        except asyncio.CancelledError:
            # Nobody looks for the client while the request is at the gate.
            submitting.add_done_callback(lambda _: self._hang_up_later(live))
            raise
        reason = live.answers.finish_reason
        status = reason.get("status_code")
        if status == 400:
            return json_response({"error": {"message": reason["message"]}}, 400)
        if status is not None:
            return json_response(error_object(reason["message"], status), status)
        return json_response(live.answers.answer(self._age(live)))

    def _hang_up_later(self, live: Live) -> None:
        delay = PLAIN_HANG_UP_SECONDS / self.driver.time_scale
        asyncio.get_running_loop().call_later(delay, self.driver.hang_up, live)

    async def _stream(self, request: web.Request, live: Live) -> web.StreamResponse:
        response = await self._open_stream(request)
        cut = self.faults.take("cut_stream")
        try:
            await self.driver.submit(live)
            while True:
                await live.wait()
                if self.faults.take("garbage_frame") is not None:
                    await response.write(b'data: {"text": "\n\n')
                frame = b"data: " + orjson.dumps(live.answers.answer(self._age(live))) + b"\n\n"
                await response.write(frame)
                if self.faults.take("duplicate_frame") is not None:
                    await response.write(frame)
                if cut is not None and live.answers.tokens_sent >= cut.tokens:
                    if request.transport is not None:
                        request.transport.abort()
                    raise ConnectionResetError("cut_stream")
                if live.answers.finish_reason is not None:
                    break
            await response.write(_DONE)
            # SGLang's clean-up task aborts whatever is live under the rid by then: never reuse one.
            delay = STREAM_CLEAN_UP_SECONDS / self.driver.time_scale
            asyncio.get_running_loop().call_later(delay, self.driver.abort, live.request.sim.rid)
            return response
        finally:
            self.driver.hang_up(live)  # does nothing after a normal end

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    def _age(self, live: Live) -> float:
        return asyncio.get_running_loop().time() - live.arrived

    async def _refused(self, request: web.Request, message: str, stream: bool) -> web.StreamResponse:
        if not stream:
            return json_response({"error": {"message": message}}, 400)
        response = await self._open_stream(request)
        await response.write(b"data: " + orjson.dumps(error_frame(message)) + b"\n\n" + _DONE)
        return response

    async def _busy(self, request: web.Request, rid: str, stream: bool) -> web.StreamResponse:
        if not stream:
            return json_response(error_object(QUEUE_FULL["message"], 503), 503)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": QUEUE_FULL,
            "weight_version": self.driver.official_version,
            "completion_tokens": 0,
            "e2e_latency": 0.0,
        }
        response = await self._open_stream(request)
        answer = {"text": "", "output_ids": [], "meta_info": meta}
        await response.write(b"data: " + orjson.dumps(answer) + b"\n\n" + _DONE)
        return response

    # ---- end of life ----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """SIGTERM: not ready any more, still serving; returns when no request is left."""
        self.state.stopping = True
        await self.driver.until_idle()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the simulated engine; words follow SGLang's, which are accepted as aliases where the name differs."""
    add = parser.add_argument
    flag = argparse.BooleanOptionalAction
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, required=True, help="port to listen on; 0 takes a free one, printed at start")
    add("--slots", "--max-running-requests", type=int, default=32, help="sequences that run at once")
    add("--kv-tokens", "--max-total-tokens", type=int, default=200_000, help="KV capacity, tokens")
    add("--page-size", type=int, default=16, help="KV page, tokens")
    add("--context-length", type=int, default=32_768, help="prompt + output of one request, tokens")
    add("--vocab-size", type=int, default=VOCABULARY_SIZE, help="token ids are below it")
    add("--max-prefill-tokens", type=int, default=16_384, help="uncached prompt tokens of one prefill pass")
    add("--time-scale", type=float, default=1.0, help="simulated seconds per real second")
    add("--curve", choices=CURVES, default="flat", help="how a decode step grows with the batch")
    add("--prefill-tokens-per-second", type=float, default=PREFILL_TOKENS_PER_SECOND)
    add("--schedule-policy", choices=("fcfs", "lpm"), default="fcfs", help="order of the waiting queue")
    add("--stream-interval", type=int, default=32, help="tokens per stream frame after the first")
    add("--incremental-streaming-output", action=flag, default=True, help="frames carry only what is new")
    add("--max-queued-requests", type=int, default=None, help="refuse with 503 beyond (default: no limit)")
    add("--weight-version", default="default", help="label of the weights at start")
    add("--weight-load-seconds", type=float, default=WEIGHT_LOAD_SECONDS, help="what loading weights takes")
    add("--model-path", default="simulated", help="name reported as the model's path")
    add("--mean-output-tokens", type=int, default=MEAN_OUTPUT_TOKENS, help="mean of outputs without end_at_tokens")
    add("--seed", type=int, default=0, help="engines with equal seeds are copies of one model")
    add("--kv-events-config", default="", help="publish cache events over ZMQ: SGLang's JSON")
    add("--crash-on-bad-token", action=flag, default=True, help="die of an id outside the vocabulary, as SGLang")


def config_from(args: argparse.Namespace) -> MachineConfig:
    """Raises ValueError, naming the field, for a value that makes no sense."""
    if not args.time_scale > 0:
        raise ValueError(f"time_scale: {args.time_scale} must be above 0")
    if not args.weight_load_seconds >= 0:
        raise ValueError(f"weight_load_seconds: {args.weight_load_seconds} must not be negative")
    read_config(args.kv_events_config)
    return MachineConfig(
        slots=args.slots,
        kv_tokens=args.kv_tokens,
        page_size_tokens=args.page_size,
        context_tokens=args.context_length,
        max_prefill_tokens=args.max_prefill_tokens,
        schedule_policy=args.schedule_policy,
        stream_interval=args.stream_interval,
        max_queued=args.max_queued_requests,
        timing=TimingModel(args.curve, args.prefill_tokens_per_second),
        model=Model(args.seed, args.vocab_size, args.mean_output_tokens),
        weight_version=args.weight_version,
        log_cache=read_config(args.kv_events_config) is not None,
    )


async def serve(args: argparse.Namespace, started: float) -> None:
    """Serve until SIGTERM has drained it, or SIGINT."""
    server = SimServer(config_from(args), args, started)
    await server.start()
    loop = asyncio.get_running_loop()
    term, interrupt = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, term.set)
    loop.add_signal_handler(signal.SIGINT, interrupt.set)
    gc.freeze()
    print(f"simulated engine listening on http://{args.host}:{server.port}", flush=True)

    async def until_drained() -> None:
        await term.wait()
        await server.drain()

    waits = [asyncio.ensure_future(until_drained()), asyncio.ensure_future(interrupt.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await server.close()


def run(args: argparse.Namespace) -> int:
    """Run the engine process; returns its exit status."""
    started = time.perf_counter()
    logging.basicConfig(level=logging.WARNING)
    try:
        config_from(args)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    try:
        uvloop.run(serve(args, started))
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{args.port}: {error}")
        return 1
    return 0


def main() -> int:
    """`python -m rolloutd.engines.sim.server`."""
    parser = argparse.ArgumentParser(description="A simulated SGLang engine")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
