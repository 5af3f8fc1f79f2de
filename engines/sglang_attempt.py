"""One running POST /generate: its frames are added up as they arrive, its waits are bounded, its end is one future.

Invariants
- `done` is settled once: when the engine's last word is in, when the stream ends, at a limit, at a hang-up, or with an
  exception of whoever reads the frames.
- Frames are read inside the connection's callback: no task and no queue stands between the socket and the collector.
- One timer per attempt. Frames move the deadline, not the timer: it looks at the deadline when it fires.
- The time during which the engine is held (paused by its door) does not count as silence.
- A connection whose answer is not complete is never used again.

What this module does not know: how to ask, and what an end means (`sglang.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from rolloutd.engines.base import AttemptRequest, Progress
from rolloutd.engines.frames import Collector, decode_frame
from rolloutd.engines.http_client import Connection, ConnectionCut
from rolloutd.engines.sse import EventReader

# After the last frame only the stream's own end is missing; worth this long, because then the connection can be used
# again.
DRAIN_SECONDS = 1.0
_ERROR_BODY_BYTES = 64 << 10
_STREAM_TYPE = "text/event-stream"
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of each kind of wait, in seconds."""

    connect_seconds: float = 5.0
    first_byte_seconds: float = 10.0  # from connected to the response's header; SGLang sends it before any work
    idle_seconds: float = 120.0  # without a frame: queueing, prefill and decode together
    abort_seconds: float = 2.0  # from abort() to hanging up
    control_seconds: float = 10.0  # any other call
    pause_seconds: float = 30.0  # a pause by abort asks once a second until every request has ended
    weights_seconds: float = 600.0  # loading weights from a disk, moving them in or out of the engine's memory


class ErrorFrame(Exception):
    """The engine refused inside its stream. `code` None where the frame has none."""

    def __init__(self, code: int | None, data: bytes) -> None:
        super().__init__(data)
        self.code = code
        self.data = data


class Silence(Exception):
    """A limit passed. `answered`: after the header."""

    def __init__(self, *, answered: bool) -> None:
        super().__init__()
        self.answered = answered


class Attempt:
    """Receiver of one answer. `status` 0: no header came."""

    __slots__ = (
        "_connection", "_deadline", "_events", "_is_held", "_loop", "_on_progress", "_timer", "_timeouts",
        "abort_timer", "collector", "content_type", "done", "error_body", "hung_up", "request", "status",
    )  # fmt: skip

    def __init__(
        self,
        request: AttemptRequest,
        collector: Collector,
        timeouts: Timeouts,
        on_progress: Callable[[Progress], None],
        loop: asyncio.AbstractEventLoop,
        is_held: Callable[[], bool],
    ) -> None:
        self.request = request
        self.collector = collector
        self.status = 0
        self.content_type = ""
        self.error_body = b""  # of an answer that is no stream, cut at _ERROR_BODY_BYTES
        self.hung_up = ""  # why we hung up, "" if we did not
        self.abort_timer: asyncio.TimerHandle | None = None
        self._loop = loop
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._timeouts = timeouts
        self._on_progress = on_progress
        self._is_held = is_held
        self._events = EventReader()
        self._connection: Connection | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == _STREAM_TYPE

    def start(self, connection: Connection, head: bytes, body: bytes) -> None:
        """Send it; the wait for the header begins."""
        if self.done.done():  # hung up on while there was no connection yet
            connection.hang_up()
            return
        self._connection = connection
        self._deadline = self._loop.time() + self._timeouts.first_byte_seconds
        self._timer = self._loop.call_at(self._deadline, self._look)
        connection.send(head, body, self)

    def hang_up(self, why: str) -> None:
        """End it from our side; what has arrived stays."""
        if not self.done.done():
            self.hung_up = why
            self._settle(None)

    def start_waiting_anew(self) -> None:
        """The engine was held and goes on: the wait for its next frame begins now."""
        if self.status:
            self._deadline = max(self._deadline, self._loop.time() + self._timeouts.idle_seconds)

    def release(self) -> None:
        """Its caller is done with it, for whatever reason."""
        for timer in (self._timer, self.abort_timer):
            if timer is not None:
                timer.cancel()
        if self._connection is None:
            return
        if self.collector.finish is not None:
            self._connection.drain(DRAIN_SECONDS)
        else:
            self._connection.hang_up()

    # -- Receiver ----------------------------------------------------------------------------------------------------

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status
        self.content_type = content_type
        self._deadline = self._loop.time() + self._timeouts.idle_seconds
        if status == 200 and content_type != _STREAM_TYPE:
            self._settle(None)

    def on_body(self, piece: bytes) -> None:
        if self.done.done():
            return
        if not self.is_stream:
            self.error_body = (self.error_body + piece)[:_ERROR_BODY_BYTES]
            return
        try:
            self._take(piece)
        except Exception as error:  # whatever it is, it belongs to whoever awaits the attempt
            self._settle(error)

    def on_end(self, error: ConnectionCut | None) -> None:
        self._connection = None
        self._settle(error)

    # -- frames ------------------------------------------------------------------------------------------------------

    def _take(self, piece: bytes) -> None:
        arrived = self._events.feed(piece)
        if not arrived:
            return
        collector = self.collector
        before = collector.generated_tokens
        for data in arrived:
            if data == _DONE:
                break
            self._take_frame(data)
            if collector.has_finished():
                break
        self._deadline = self._loop.time() + self._timeouts.idle_seconds
        if collector.generated_tokens > before:
            self._on_progress(
                Progress(
                    self.request.attempt_id,
                    collector.generated_tokens,
                    collector.prompt_tokens,
                    collector.cached_tokens,
                )
            )
        if collector.has_finished():
            self._settle(None)

    def _take_frame(self, data: bytes) -> None:
        frame = decode_frame(data)
        if frame.error is not None:
            code = frame.error.get("code") if isinstance(frame.error, dict) else None
            raise ErrorFrame(code if isinstance(code, int) else None, data)
        new = self.collector.add(frame)
        if self.request.engine_params:
            self.collector.add_extras(orjson.loads(data)["meta_info"], new)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._timer = None
        if self.done.done():
            return
        if self.status and self._is_held():
            self._deadline = self._loop.time() + self._timeouts.idle_seconds
        if self._loop.time() >= self._deadline:
            self._settle(Silence(answered=self.status != 0))
        else:
            self._timer = self._loop.call_at(self._deadline, self._look)

    def _settle(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
