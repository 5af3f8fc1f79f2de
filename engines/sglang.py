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

What this module does not know: rollouts, retries, pausing, weight updates, which engine is better.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from rolloutd.engines import model_config
from rolloutd.engines.base import AttemptRequest, EngineFault, EngineInfo, EngineLoad, FaultKind, Progress, Slice
from rolloutd.engines.frames import Collector, FrameError, decode_frame
from rolloutd.engines.request_body import encode
from rolloutd.engines.sglang_info import Loads, ModelInfo, ServerInfo, engine_info, engine_load
from rolloutd.engines.sse import EventReader, EventTooLarge

# SGLang closes a connection that is idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); dropping ours sooner avoids sending into
# a reset.
_KEEPALIVE_SECONDS = 4.0
# After the last frame only the stream's own end is missing; worth this long, because then the connection can be used
# again.
_DRAIN_SECONDS = 1.0
_READ_BUFFER_BYTES = 256 << 10
_ERROR_TEXT_BYTES = 2000
# Enough for any pool of slots we know; a larger number in flight means that the caller lost count.
DEFAULT_MAX_CONNECTIONS = 4096

_DONE = b"[DONE]"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of each kind of wait, in seconds."""

    connect_seconds: float = 5.0
    first_byte_seconds: float = 10.0  # from connected to the response's header; SGLang sends it before any work
    idle_seconds: float = 120.0  # without a frame: queueing, prefill and decode together
    abort_seconds: float = 2.0  # from abort() to hanging up
    control_seconds: float = 10.0  # any other call


class _Attempt:
    """One running generate(): what has arrived, and the handle that ends it."""

    __slots__ = ("collector", "hang_up_timer", "hung_up", "limit")

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.limit: asyncio.Timeout | None = None  # set while there is something to hang up
        self.hung_up = ""  # why we hung up, "" if we did not
        self.hang_up_timer: asyncio.TimerHandle | None = None

    def hang_up(self, why: str) -> None:
        if self.limit is not None and not self.hung_up and not self.limit.expired():
            self.hung_up = why
            self.limit.reschedule(asyncio.get_running_loop().time())

    def ended(self) -> None:
        self.limit = None
        if self.hang_up_timer is not None:
            self.hang_up_timer.cancel()


def _kind_of_status(status: int) -> FaultKind:
    """What an HTTP status, or the code in an error frame, says about the request and the engine."""
    if status in (429, 503):
        return FaultKind.BUSY
    # Wrong key, wrong URL, too slow to read us: this engine's trouble, another one may well accept the request.
    if status in (401, 403, 404, 405, 408) or not 400 <= status < 500:
        return FaultKind.BROKEN
    return FaultKind.REFUSED


def _error_text(body: bytes) -> str:
    """The sentence inside SGLang's several error shapes, or the start of the body."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_ERROR_TEXT_BYTES].decode("utf-8", "replace").strip()
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error", value.get("message", value))
    return value if isinstance(value, str) else orjson.dumps(value)[:_ERROR_TEXT_BYTES].decode("utf-8", "replace")


class SGLangEngine:
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
        self.timeouts = timeouts or Timeouts()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # With both keys set the server refuses the normal one on controlling routes.
        control_key = admin_api_key or api_key
        self._control_headers = {"Authorization": f"Bearer {control_key}"} if control_key else {}
        self._json = {"Content-Type": "application/json"}
        self._configured_vocabulary = vocabulary_size
        self._max_connections = max_connections
        self._info: EngineInfo | None = None
        self._vocabulary = 0
        self._incremental = False
        self._attempts: dict[str, _Attempt] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    # ---- control calls ----

    async def register(self) -> EngineInfo:
        """Description of the server, proven by one 1-token call with every field that later calls use.

        Takes at most `control_seconds`, then `idle_seconds` for the probe. BUSY while the server is starting or paused;
        REFUSED, with what to set, when something needed is not stated or the probe is not accepted.
        """
        server_body, model_body, loads_body, ready = await asyncio.gather(
            self._get("/server_info"),
            self._get("/model_info"),
            self._get("/v1/loads?include=core,memory"),
            self.ready(),
        )
        server = self._decode(server_body, ServerInfo, "/server_info")
        model = self._decode(model_body, ModelInfo, "/model_info")
        loads = self._decode(loads_body, Loads, "/v1/loads")
        if not ready:
            raise self._fault(FaultKind.BUSY, "not ready: starting, paused or shutting down")
        self._vocabulary = await self._vocabulary_of(server.model_path)
        self._incremental = server.incremental_streaming_output
        try:
            info = engine_info(server, model, loads, self._vocabulary)
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
                "the server does not state it; set vocabulary_size for this engine (the model's vocab_size)",
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
        loads = self._decode(await self._get("/v1/loads?include=core"), Loads, "/v1/loads")
        try:
            return engine_load(loads)
        except ValueError as error:
            raise self._fault(FaultKind.BROKEN, str(error)) from error

    async def ready(self) -> bool:
        """200 or 503 of `/ready`."""
        status, body = await self._call("GET", "/ready", self._headers, None, self.timeouts.control_seconds)
        if status not in (200, 503):
            raise self._fault(FaultKind.BROKEN, f"/ready answered {status}: {_error_text(body)}")
        return status == 200

    async def abort(self, attempt_id: str) -> None:
        """Stop one attempt. Returns when the engine has taken the order; `generate` ends at the latest after
        `abort_seconds`.

        An id that is not running through this door is sent as well: it may have outlived an earlier process of ours.
        """
        if not attempt_id:
            raise self._fault(FaultKind.REFUSED, "abort: the attempt id is empty")
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.hang_up_timer is None:
            # An abort that reaches the engine before its request does is forgotten there; hanging up works at any
            # moment.
            loop = asyncio.get_running_loop()
            attempt.hang_up_timer = loop.call_later(self.timeouts.abort_seconds, attempt.hang_up, "abort")
        try:
            status, body = await self._call(
                "POST",
                "/abort_request",
                self._control_headers,
                orjson.dumps({"rid": attempt_id, "abort_all": False}),
                self.timeouts.abort_seconds,
            )
            if status != 200:
                raise self._fault(_kind_of_status(status), f"/abort_request answered {status}: {_error_text(body)}")
        except EngineFault:
            if attempt is None:
                raise
            attempt.hang_up("abort")

    async def close(self) -> None:
        """Hang up everything; running attempts end with BROKEN and what they had."""
        self._closed = True
        for attempt in list(self._attempts.values()):
            attempt.hang_up("closed")
        if self._session is not None:
            await self._session.close()

    # ---- generation ----

    async def generate(self, request: AttemptRequest, on_progress: Callable[[Progress], None]) -> Slice:
        """Run one attempt. `on_progress` is called on the event loop after each frame with new tokens."""
        if self._info is None:
            raise self._fault(FaultKind.BUSY, "not registered yet")
        body = encode(request, self._vocabulary)
        if request.attempt_id in self._attempts:
            raise self._fault(FaultKind.REFUSED, f"attempt_id: {request.attempt_id} is already running")
        if len(self._attempts) >= self._max_connections:
            raise self._fault(FaultKind.BUSY, f"{self._max_connections} attempts are running already (max_connections)")
        attempt = _Attempt(Collector(request, self._incremental))
        self._attempts[request.attempt_id] = attempt
        try:
            return await self._run(request, body, attempt, on_progress)
        finally:
            del self._attempts[request.attempt_id]
            attempt.ended()

    async def _run(
        self, request: AttemptRequest, body: bytes, attempt: _Attempt, on_progress: Callable[[Progress], None]
    ) -> Slice:
        collector = attempt.collector
        trouble: tuple[FaultKind, str]
        try:
            async with asyncio.timeout(self.timeouts.connect_seconds + self.timeouts.first_byte_seconds) as limit:
                attempt.limit = limit
                response = await self._open().post(
                    self.url + "/generate", data=body, headers=self._headers | self._json
                )
                try:
                    await self._check_head(response)
                    await self._read(request, response, attempt, limit, on_progress)
                finally:
                    # Hangs up unless the stream has ended; then the connection is back in the pool already.
                    response.close()
            trouble = FaultKind.BROKEN, "the stream ended before the attempt did"
        except TimeoutError as error:
            trouble = FaultKind.SILENT, self._silence(attempt, error)
        except aiohttp.ClientConnectorError as error:
            trouble = FaultKind.UNREACHED, f"connection failed: {_name(error)}"
        except (aiohttp.ClientError, OSError) as error:
            trouble = FaultKind.BROKEN, f"connection failed: {_name(error)}"
        except (msgspec.MsgspecError, FrameError, EventTooLarge, UnicodeDecodeError) as error:
            raise self._fault(FaultKind.BROKEN, f"frame not understood: {error}", collector) from error
        finally:
            attempt.limit = None
        if collector.finish is not None:
            return self._outcome(collector)
        if attempt.hung_up == "abort":
            return collector.slice("abort")
        if attempt.hung_up:
            raise self._fault(FaultKind.BROKEN, "the door was closed", collector)
        raise self._fault(*trouble, collector)

    async def _check_head(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            text = _error_text(await response.content.read(64 << 10))
            raise self._fault(_kind_of_status(response.status), f"/generate answered {response.status}: {text}")
        if response.content_type != "text/event-stream":
            raise self._fault(
                FaultKind.BROKEN, f"/generate answered {response.content_type}, not an event stream; is this SGLang?"
            )

    async def _read(
        self,
        request: AttemptRequest,
        response: aiohttp.ClientResponse,
        attempt: _Attempt,
        limit: asyncio.Timeout,
        on_progress: Callable[[Progress], None],
    ) -> None:
        clock = asyncio.get_running_loop().time
        idle_seconds = self.timeouts.idle_seconds
        collector = attempt.collector
        events = EventReader()
        content = response.content
        limit.reschedule(clock() + idle_seconds)
        while piece := await content.readany():
            arrived = events.feed(piece)
            if not arrived or collector.has_finished():
                continue
            before = collector.generated_tokens
            for data in arrived:
                if data == _DONE or collector.has_finished():
                    break
                self._take(request, collector, data)
            if not collector.has_finished():
                limit.reschedule(clock() + idle_seconds)
            elif not attempt.hung_up:
                limit.reschedule(clock() + _DRAIN_SECONDS)
            if collector.generated_tokens > before:
                on_progress(
                    Progress(
                        request.attempt_id, collector.generated_tokens, collector.prompt_tokens, collector.cached_tokens
                    )
                )

    def _take(self, request: AttemptRequest, collector: Collector, data: bytes) -> None:
        frame = decode_frame(data)
        if frame.error is not None:
            code = frame.error.get("code") if isinstance(frame.error, dict) else None
            kind = _kind_of_status(code) if isinstance(code, int) else FaultKind.BROKEN
            raise self._fault(kind, _error_text(data), collector)
        new = collector.add(frame)
        if request.engine_params:
            collector.add_extras(orjson.loads(data)["meta_info"], new)

    def _outcome(self, collector: Collector) -> Slice:
        finish = collector.finish
        assert finish is not None
        if finish.type in ("stop", "length"):
            return collector.slice(finish.type)
        if finish.type != "abort":
            raise self._fault(FaultKind.BROKEN, f"unknown finish reason {finish.type!r}", collector)
        if finish.status_code is None:
            return collector.slice("abort")
        raise self._fault(
            _kind_of_status(finish.status_code),
            finish.message or f"aborted with status {finish.status_code}",
            collector,
        )

    def _silence(self, attempt: _Attempt, error: TimeoutError) -> str:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return f"no connection within {self.timeouts.connect_seconds:g} s"
        if attempt.collector.generated_tokens:
            return f"no frame for {self.timeouts.idle_seconds:g} s after {attempt.collector.generated_tokens} tokens"
        first_byte, idle = self.timeouts.first_byte_seconds, self.timeouts.idle_seconds
        return f"no first token within the limit (first byte {first_byte:g} s, then {idle:g} s without a frame)"

    # ---- HTTP ----

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise self._fault(FaultKind.BROKEN, "the door was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No limit in the pool: attempts are counted by us, and an abort must never wait for a free connection.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_seconds),
                auto_decompress=False,
                read_bufsize=_READ_BUFFER_BYTES,
            )
        return self._session

    async def _call(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        if body is not None:
            headers = headers | self._json
        try:
            async with (
                asyncio.timeout(seconds),
                self._open().request(method, self.url + path, data=body, headers=headers) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise self._fault(FaultKind.SILENT, f"{path}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._fault(FaultKind.BROKEN, f"{path}: connection failed: {_name(error)}") from error

    async def _get(self, path: str) -> bytes:
        status, body = await self._call("GET", path, self._headers, None, self.timeouts.control_seconds)
        if status in (401, 403):
            raise self._fault(FaultKind.REFUSED, f"{path} answered {status}: set api_key for this engine")
        if status != 200:
            raise self._fault(_kind_of_status(status), f"{path} answered {status}: {_error_text(body)}")
        return body

    def _decode(self, body: bytes, kind: type[_Answer], path: str) -> _Answer:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._fault(FaultKind.BROKEN, f"{path}: answer not understood ({error}); is this SGLang?") from error

    def _fault(self, kind: FaultKind, message: str, collector: Collector | None = None) -> EngineFault:
        has_tokens = collector is not None and collector.generated_tokens > 0
        partial = collector.slice("abort") if collector is not None and has_tokens else None
        return EngineFault(kind, f"engine {self.url}: {message}", partial)


def _name(error: Exception) -> Any:
    return str(error) or type(error).__name__
