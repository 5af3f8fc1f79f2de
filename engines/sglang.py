"""The door to one SGLang server, over its HTTP API (written against SGLang 0.5.23).

Invariants
- One attempt is one streamed POST /generate on a connection of its own until it ends; connections are never shared by
  two attempts and attempts never wait for a connection. Abort, load and readiness calls are never queued behind
  generations.
- A POST is sent once. When it fails the caller decides, with a new attempt id, because the engine may have begun.
- Every wait has an end: connecting, the first byte, silence between frames, control calls, and an abort that the engine
  ignores.
- Tokens that arrived are never lost with a fault: they ride on it as `partial`.
- A stream's HTTP status says little: refusals arrive as frames inside a 200 and are told apart by their code.

What this module does not know: rollouts, retries, which engine is better; pausing and new weights (`sglang_control.py`).
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import orjson

from rolloutd.engines import model_config
from rolloutd.engines.base import AttemptRequest, EngineFault, EngineInfo, EngineLoad, FaultKind, Progress, Slice
from rolloutd.engines.collector import Collector
from rolloutd.engines.frames import FrameError
from rolloutd.engines.http_client import Connection, ConnectionCut, HttpClient, Unreached
from rolloutd.engines.request_body import encode
from rolloutd.engines.sglang_attempt import Attempt, ErrorFrame, Silence
from rolloutd.engines.sglang_attempt import Timeouts as Timeouts
from rolloutd.engines.sglang_calls import Calls, error_text, kind_of_status
from rolloutd.engines.sglang_control import SGLangControl
from rolloutd.engines.sglang_info import Loads, ModelInfo, ServerInfo, engine_info, engine_load, incarnation
from rolloutd.engines.sse import EventTooLarge

# SGLang closes a connection that is idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); dropping ours sooner avoids sending into
# a reset.
_KEEPALIVE_SECONDS = 4.0
# uvloop rounds timers to milliseconds and may fire one early: waiting less would spin.
_SHORTEST_WAIT_SECONDS = 0.001
# Enough for any pool of slots we know; a larger number in flight means that the caller lost count.
DEFAULT_MAX_CONNECTIONS = 4096


class SGLangEngine(SGLangControl):
    """One SGLang server. Use from one event loop; `register()` first, again after a restart, `close()` last.

    api_key opens the normal routes, admin_api_key the controlling ones; a server that has only one of them needs only
    that one. vocabulary_size 0: learn it from the model's config.json, which must be readable on this host.
    max_connections: attempts at once; one more is BUSY.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        admin_api_key: str = "",
        vocabulary_size: int = 0,
        timeouts: Timeouts | None = None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self.url = url.rstrip("/")
        timeouts = timeouts or Timeouts()
        self._http = HttpClient(
            self.url, connect_seconds=timeouts.connect_seconds, keepalive_seconds=_KEEPALIVE_SECONDS
        )
        super().__init__(Calls(self.url, self._http, api_key, admin_api_key), timeouts)
        self._generate_head = self._calls.normal_head("/generate")
        self._abort_head = self._calls.control_head("/abort_request")
        self._configured_vocabulary = vocabulary_size
        self._max_connections = max_connections
        self._info: EngineInfo | None = None
        self._vocabulary = 0
        self._incremental = False
        self._overlaps = False
        self._attempts: dict[str, Attempt] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._patience_seconds = min(timeouts.first_byte_seconds, timeouts.idle_seconds)

    # ---- state ----

    async def register(self) -> EngineInfo:
        """Description of the server, proven by one 1-token call with every field that later calls use.

        Takes at most twice `control_seconds`, then `idle_seconds` for the probe. BUSY while the server is starting or paused;
        REFUSED, with what to set, when something needed is not stated or the probe is not accepted.
        """
        if not await self._says_ready():  # a paused server that loads weights answers /server_info only afterwards
            raise self._fault(FaultKind.BUSY, "not ready: starting, paused or shutting down")
        seconds = self.timeouts.control_seconds
        server_body, model_body, loads_body = await asyncio.gather(
            self._calls.get("/server_info", seconds),
            self._calls.get("/model_info", seconds),
            self._calls.get("/v1/loads?include=core,memory", seconds),
        )
        server = self._calls.decode(server_body, ServerInfo, "/server_info")
        model = self._calls.decode(model_body, ModelInfo, "/model_info")
        loads = self._calls.decode(loads_body, Loads, "/v1/loads")
        self._note_incarnation(incarnation(server), model.weight_version)
        if self._is_asleep():
            raise self._fault(FaultKind.BUSY, "not ready: its memory is released")
        self._vocabulary = await self._vocabulary_of(server.model_path)
        self._incremental = server.incremental_streaming_output
        self._overlaps = not server.disable_overlap_schedule
        try:
            info = engine_info(server, model, loads, self._vocabulary, urlsplit(self.url).hostname or "")
        except ValueError as error:
            raise self._fault(FaultKind.REFUSED, f"cannot be registered: {error}") from error
        self._info = info
        await self._probe()
        return info

    async def _vocabulary_of(self, model_path: str) -> int:
        configured = self._configured_vocabulary
        try:
            known = await asyncio.to_thread(model_config.vocabulary_size, model_path)
        except model_config.UnreadableConfig as error:
            if not configured:
                raise self._fault(FaultKind.REFUSED, f"{error}; set vocabulary_size for this engine") from error
            known = None
        if configured and known is not None and configured > known:
            raise self._fault(
                FaultKind.REFUSED,
                f"vocabulary_size is set to {configured}, but the model {model_path} has {known}; "
                "ids above that stop the engine",
            )
        if not configured and known is None:
            raise self._fault(
                FaultKind.REFUSED,
                f"the vocabulary size is unknown: no config.json of model {model_path} is readable on this host and "
                "the server does not state it; set vocabulary_size for this engine (--vocabulary-size) to the model's "
                "vocab_size",
            )
        return configured or known or 0

    async def _probe(self) -> None:
        request = AttemptRequest(
            attempt_id=uuid.uuid4().hex,
            max_new_tokens=1,
            token_bytes=bytes(4),
            sampling={"temperature": 0.0, "ignore_eos": True},
            logprobs=True,
            top_logprobs=1,
            cache_salt="probe",
        )
        try:
            answer = await self.generate(request, lambda _: None)
        except EngineFault as fault:
            self._info = None
            raise EngineFault(fault.kind, f"probe with one token failed: {fault.message}") from fault
        if answer.finish_reason == "abort" or len(answer.token_bytes) != 4 or len(answer.logprob_bytes) != 4:
            self._info = None
            raise self._fault(
                FaultKind.BROKEN, f"probe for one token ended with {answer.finish_reason} and {answer.token_bytes!r}"
            )

    async def load(self) -> EngineLoad:
        """One `/v1/loads` report over all ranks. Running counts lag by a scheduling step; see the engine's clock for
        its age."""
        body = await self._calls.get("/v1/loads?include=core", self.timeouts.control_seconds)
        loads = self._calls.decode(body, Loads, "/v1/loads")
        try:
            return engine_load(loads)
        except ValueError as error:
            raise self._fault(FaultKind.BROKEN, str(error)) from error

    async def ready(self) -> bool:
        """200 or 503 of `/ready`; false as well while memory is released, which the server does not count."""
        return await self._says_ready() and not self._is_asleep()

    async def _says_ready(self) -> bool:
        status, body = await self._calls.page("/ready", self.timeouts.control_seconds)
        if status not in (200, 503):
            raise self._fault(FaultKind.BROKEN, f"/ready answered {status}: {error_text(body)}")
        return status == 200

    async def abort(self, attempt_id: str) -> None:
        """Stop one attempt. Returns when the engine has taken the order; `generate` ends at the latest after
        `abort_seconds`.

        An id that is not running through this door is sent as well: it may have outlived an earlier process of ours.
        """
        if not attempt_id:
            raise self._fault(FaultKind.REFUSED, "abort: the attempt id is empty")
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and self._is_paused() and not attempt.collector.generated_tokens:
            attempt.end("abort")  # it waits at the gate, where the engine does not see its abort
            return
        if attempt is not None and attempt.abort_timer is None:
            # An abort that reaches the engine before its request does is forgotten there; hanging up works at any
            # moment.
            loop = asyncio.get_running_loop()
            attempt.abort_timer = loop.call_later(self.timeouts.abort_seconds, attempt.end, "abort")
        try:
            status, body = await self._calls.call(
                "/abort_request",
                self._abort_head,
                orjson.dumps({"rid": attempt_id, "abort_all": False}),
                self.timeouts.abort_seconds,
            )
            if status != 200:
                raise self._calls.refusal("/abort_request", status, body)
        except EngineFault:
            if attempt is None:
                raise
            attempt.end("abort")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await super().resume()
        for attempt in self._attempts.values():
            attempt.start_waiting_anew()

    def _note_swap_in_place(self, version: str) -> None:
        # The overlap scheduler computes the next token of every sequence before it looks at orders. One whose prompt was
        # still being computed is not told apart; our caller lets none be.
        if self._overlaps:
            for attempt in self._attempts.values():
                attempt.collector.note_swap_in_place(version)

    def _attempts_running(self) -> int:
        return len(self._attempts)

    async def close(self) -> None:
        """Hang up everything; running attempts end with BROKEN and what they had."""
        self._calls.closed = True
        for attempt in list(self._attempts.values()):
            attempt.end("closed")
        if self._looking is not None:
            self._looking.cancel()
        self._http.close()

    # ---- generation ----

    def begin(
        self,
        request: AttemptRequest,
        on_progress: Callable[[Progress], None],
        on_end: Callable[[Slice | Exception], None],
    ) -> Attempt:
        """See `Engine.begin`. `on_progress` is called after each piece of the answer with new tokens."""
        if self._info is None:
            raise self._fault(FaultKind.BUSY, "not registered yet")
        body = encode(request, self._vocabulary)
        if request.attempt_id in self._attempts:
            raise self._fault(FaultKind.REFUSED, f"attempt_id: {request.attempt_id} is already running")
        if len(self._attempts) >= self._max_connections:
            raise self._fault(FaultKind.BUSY, f"{self._max_connections} attempts are running already (max_connections)")
        if self._calls.closed:
            raise self._fault(FaultKind.BROKEN, "the door was closed")
        if self._is_asleep():
            raise self._fault(FaultKind.BUSY, "its memory is released")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # once: in Python 3.11 each of these is a system call
        collector = Collector(request, self._incremental)
        attempt = Attempt(request, collector, self.timeouts, on_progress, on_end, self._over, self._loop)
        self._attempts[request.attempt_id] = attempt
        connection = self._http.free()
        if connection is not None:
            self._start(attempt, connection, body)
        else:
            attempt.opening = self._loop.create_task(self._http.connect())
            attempt.opening.add_done_callback(functools.partial(self._opened, attempt, body))
        return attempt

    async def generate(self, request: AttemptRequest, on_progress: Callable[[Progress], None]) -> Slice:
        """See `Engine.generate`."""
        ended: asyncio.Future[Slice | Exception] = asyncio.get_running_loop().create_future()

        def on_end(end: Slice | Exception) -> None:
            if not ended.done():  # cancelled in the same moment
                ended.set_result(end)

        attempt = self.begin(request, on_progress, on_end)
        try:
            end = await ended
        finally:
            attempt.hang_up()
        if isinstance(end, Exception):
            raise end
        return end

    def _opened(self, attempt: Attempt, body: bytes, opening: asyncio.Task[Connection]) -> None:
        attempt.opening = None
        if opening.cancelled():
            attempt.fail(ConnectionCut("connecting was cancelled"))
        elif (error := opening.exception()) is not None:
            attempt.fail(error if isinstance(error, Exception) else RuntimeError(f"connecting ended with {error!r}"))
        elif attempt.is_over:
            opening.result().close()  # it came about in the same moment
        else:
            self._start(attempt, opening.result(), body)

    def _start(self, attempt: Attempt, connection: Connection, body: bytes) -> None:
        try:
            attempt.start(connection, self._generate_head, body)
        except Exception as error:  # its end like any other, told later: `begin` may have called us
            asyncio.get_running_loop().call_soon(attempt.fail, error)
        self._look_by(self._patience_seconds)

    def _over(self, attempt: Attempt, trouble: Exception | None) -> None:
        """The one end of every attempt."""
        del self._attempts[attempt.request.attempt_id]
        if attempt.tell is None:
            return
        end: Slice | Exception
        try:
            end = self._end_of(attempt, trouble)
        except Exception as error:  # a bug here is told like the others
            end = error
        attempt.tell(end)

    def _end_of(self, attempt: Attempt, trouble: Exception | None) -> Slice | Exception:
        collector = attempt.collector
        kind, message = FaultKind.BROKEN, "the stream ended before the attempt did"
        match trouble:
            case None:
                pass
            case Unreached():
                kind, message = FaultKind.UNREACHED, str(trouble)
            case Silence():
                kind, message = FaultKind.SILENT, self._silence(attempt, answered=trouble.answered)
            case ConnectionCut():
                message = str(trouble)
            case ErrorFrame():
                kind = FaultKind.BROKEN if trouble.code is None else kind_of_status(trouble.code)
                return self._fault(kind, error_text(trouble.data), collector)
            case msgspec.MsgspecError() | FrameError() | EventTooLarge() | UnicodeDecodeError():
                return self._fault(FaultKind.BROKEN, f"frame not understood: {trouble}", collector)
            case _:
                return trouble
        if collector.finish is not None:
            return self._outcome(collector)
        if attempt.ended_by_us == "abort":
            return collector.slice("abort")
        if attempt.ended_by_us:
            return self._fault(FaultKind.BROKEN, "the door was closed", collector)
        if attempt.status and attempt.status != 200:
            text = error_text(attempt.error_body)
            return self._fault(kind_of_status(attempt.status), f"/generate answered {attempt.status}: {text}")
        if attempt.status and not attempt.is_stream:
            kind_of_page = attempt.content_type or "no content type"
            return self._fault(
                FaultKind.BROKEN, f"/generate answered {kind_of_page}, not an event stream; is this SGLang?"
            )
        return self._fault(kind, message, collector)

    def _outcome(self, collector: Collector) -> Slice | EngineFault:
        finish = collector.finish
        assert finish is not None
        if finish.type in ("stop", "length"):
            return collector.slice(finish.type)
        if finish.type != "abort":
            return self._fault(FaultKind.BROKEN, f"unknown finish reason {finish.type!r}", collector)
        if finish.status_code is None:
            return collector.slice("abort")
        return self._fault(
            kind_of_status(finish.status_code),
            finish.message or f"aborted with status {finish.status_code}",
            collector,
        )

    def _look_by(self, seconds: float) -> None:
        """Look at the deadlines of all attempts within so many seconds: the shortest wait that one may have begun."""
        assert self._loop is not None
        if self._looking is None:
            self._looking = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._looking = None
        for attempt in list(self._attempts.values()):
            attempt.look(self._is_paused())
        if self._attempts:
            assert self._loop is not None
            soonest = min(attempt.deadline for attempt in self._attempts.values()) - self._loop.time()
            self._look_by(min(max(_SHORTEST_WAIT_SECONDS, soonest), self._patience_seconds))

    def _silence(self, attempt: Attempt, *, answered: bool) -> str:
        if attempt.collector.generated_tokens:
            return f"no frame for {self.timeouts.idle_seconds:g} s after {attempt.collector.generated_tokens} tokens"
        if answered:
            return f"no first token within {self.timeouts.idle_seconds:g} s"
        return f"no first byte within {self.timeouts.first_byte_seconds:g} s"

    def _fault(self, kind: FaultKind, message: str, collector: Collector | None = None) -> EngineFault:
        has_tokens = collector is not None and collector.generated_tokens > 0
        partial = collector.slice("abort") if collector is not None and has_tokens else None
        return self._calls.fault(kind, message, partial)
