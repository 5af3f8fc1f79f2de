"""One running POST /generate: its frames are added up as they arrive, its waits are bounded, its end is told once.

Invariants
- It is settled once: when the engine's last word is in, when the stream ends, at a limit, when it is ended from our side,
  or with an exception of whoever reads the frames. `on_over` is called once after that, and not at all after `hang_up`.
- Frames are read, and the end is told, inside the connection's callback: no task, queue or future stands between the socket
  and the caller. What arrived together with the last word is read before the end is told.
- An attempt has no timer, only a deadline, which frames move: its door looks at all deadlines with one timer.
- The time during which the engine is held (paused by its door) does not count as silence.
- A connection whose answer is not complete is never used again.

What this module does not know: how to ask, and what an end means (`sglang.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from rolloutd.engines.base import AttemptRequest, Progress, Slice
from rolloutd.engines.collector import Collector
from rolloutd.engines.frames import decode_frame
from rolloutd.engines.http_client import Connection, ConnectionCut
from rolloutd.engines.sse import EventReader, whole_events

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
    """Receiver of one answer. `status` 0: no header came. `on_over` is given the attempt and what ended it, None for an
    end that its fields tell."""

    __slots__ = (
        "_connection", "_events", "_is_settled", "_is_told", "_loop", "_on_over", "_on_progress", "_timeouts", "_trouble",
        "abort_timer", "collector", "content_type", "deadline", "ended_by_us", "error_body", "is_stream", "opening", "request",
        "status", "tell",
    )  # fmt: skip

    def __init__(
        self,
        request: AttemptRequest,
        collector: Collector,
        timeouts: Timeouts,
        on_progress: Callable[[Progress], None],
        tell: Callable[[Slice | Exception], None],
        on_over: Callable[[Attempt, Exception | None], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.request = request
        self.collector = collector
        self.tell: Callable[[Slice | Exception], None] | None = tell  # the caller's; None: it gave up
        self.status = 0
        self.is_stream = False
        self.content_type = ""
        self.error_body = b""  # of an answer that is no stream, cut at _ERROR_BODY_BYTES
        self.ended_by_us = ""  # why we ended it, "" if we did not
        self.abort_timer: asyncio.TimerHandle | None = None
        self.opening: asyncio.Task[Connection] | None = None  # of its connection, where none was free
        self.deadline = math.inf  # on the loop's clock
        self._loop = loop
        self._timeouts = timeouts
        self._on_progress = on_progress
        self._on_over = on_over
        self._events: EventReader | None = None  # made when a piece of the answer ends inside an event
        self._connection: Connection | None = None
        self._trouble: Exception | None = None
        self._is_settled = self._is_told = False

    @property
    def is_over(self) -> bool:
        return self._is_settled

    def start(self, connection: Connection, head: bytes, body: bytes) -> None:
        """Send it; the wait for the header begins."""
        self._connection = connection
        self.deadline = self._loop.time() + self._timeouts.first_byte_seconds
        connection.send(head, body, self)

    def end(self, why: str) -> None:
        """End it from our side; what has arrived stays, and the caller is told."""
        if not self._is_settled:
            self.ended_by_us = why
            self.fail(None)

    def fail(self, error: Exception | None) -> None:
        """End it with this error, now."""
        self._settle(error)
        self._tell()

    def hang_up(self) -> None:
        """See `Running.hang_up`."""
        self.tell = None
        self.fail(None)

    def start_waiting_anew(self) -> None:
        """The engine was held and goes on: the wait for its next frame begins now."""
        if self.status:
            self.deadline = max(self.deadline, self._loop.time() + self._timeouts.idle_seconds)

    def look(self, is_held: bool) -> None:
        """End it with Silence if its deadline has passed. `is_held`: the engine's door has it paused."""
        now = self._loop.time()
        if self.status and is_held:
            self.deadline = now + self._timeouts.idle_seconds
        if now >= self.deadline:
            self.fail(Silence(answered=self.status != 0))

    # -- Receiver ----------------------------------------------------------------------------------------------------

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status
        self.content_type = content_type
        self.deadline = self._loop.time() + self._timeouts.idle_seconds
        self.is_stream = status == 200 and content_type == _STREAM_TYPE
        if status == 200 and not self.is_stream:
            self._settle(None)

    def on_body(self, piece: bytes) -> None:
        if self._is_settled:
            return
        if not self.is_stream:
            self.error_body = (self.error_body + piece)[:_ERROR_BODY_BYTES]
            return
        try:
            self._take(piece)
        except Exception as error:  # whatever it is, it belongs to whoever asked for the attempt
            self._settle(error)

    def on_rest(self) -> None:
        if self._is_settled:
            self._tell()

    def on_end(self, error: ConnectionCut | None) -> None:
        self._connection = None
        self._settle(error)
        self._tell()

    # -- frames ------------------------------------------------------------------------------------------------------

    def _take(self, piece: bytes) -> None:
        arrived = whole_events(piece) if self._events is None else None
        if arrived is None:
            if self._events is None:
                self._events = EventReader()
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
        self.deadline = self._loop.time() + self._timeouts.idle_seconds
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

    def _settle(self, error: Exception | None) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._trouble = error

    def _tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        if self.abort_timer is not None:
            self.abort_timer.cancel()
        if self.opening is not None:
            self.opening.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            if self.collector.finish is not None:
                connection.drain(DRAIN_SECONDS)
            else:
                connection.hang_up()
        trouble, self._trouble = self._trouble, None  # its traceback may know us: a ring
        self._on_over(self, trouble)
