"""Follows the KV-cache events that an engine publishes over ZMQ: one stream, in order, without silent holes.

Invariants
- What is handed on begins with a `Reset`, and so does all that does not follow from what was handed on before: a message
  that cannot be had any more is never passed over in silence.
- A hole, and every new connection, is filled from the replay buffer. The last message that was read is asked for again:
  where another stands in its place, another process publishes now.
- Nothing here blocks the event loop and nothing grows: sockets hold `QUEUED_MESSAGES`, the publisher drops the rest (which
  shows as a hole), and no batch has more than `BATCH_BLOCKS` blocks.

What this module does not know: engines, indexes, who wants to know.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from rolloutd.engines.base import KvEventsAddress
from rolloutd.engines.kv_wire import KvEvent, Reset, decode, portions

BATCH_BLOCKS: Final = 256  # under a millisecond for whoever takes a batch in
QUEUED_MESSAGES: Final = 1_000
MESSAGE_BYTES: Final = 64 << 20  # larger ones are no KV events; libzmq then drops the connection
RECONNECT_MILLISECONDS: Final = 100
RECONNECT_MOST_MILLISECONDS: Final = 5_000
# SGLang's publisher looks for replay requests every 0.1 s, between two of its own messages.
REPLAY_SILENCE_SECONDS: Final = 3.0
_NUMBER_BYTES: Final = 8
_END: Final = -1  # sequence number of the replay's last message
_MONITORS: Final = itertools.count()


class KvEventsUnreadable(Exception):
    """The endpoint speaks, but not these events; trying again would not help."""


class _NotReplayed(Exception):
    """The replay buffer does not give what was asked for, in words."""


@dataclass(slots=True)
class KvEventsCount:
    """Since this subscription began."""

    messages: int = 0
    gaps: int = 0  # holes between two messages
    replayed: int = 0  # messages from the replay buffer
    resets: int = 0


class KvEvents:
    """One subscription.

    on_batch(events): called in order, with at most `BATCH_BLOCKS` blocks. on_connection(connected): called when the
    connection comes or goes. Neither may block.
    """

    def __init__(
        self,
        address: KvEventsAddress,
        on_batch: Callable[[tuple[KvEvent, ...]], None],
        on_connection: Callable[[bool], None] = lambda connected: None,
        replay_silence_seconds: float = REPLAY_SILENCE_SECONDS,
    ) -> None:
        self.count = KvEventsCount()
        self._address = address
        self._on_batch = on_batch
        self._on_connection = on_connection
        self._replay_silence_seconds = replay_silence_seconds
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
        self._next: int | None = None  # sequence number of the message to come; None: whichever comes
        self._last_ts = 0.0  # of the message before it

    async def run(self) -> None:
        """Follow the stream until cancelled; connections that break are made again. Raises KvEventsUnreadable."""
        with self._socket(zmq.SUB) as socket, self._socket(zmq.PAIR) as monitor:
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MILLISECONDS)
            socket.setsockopt(zmq.SUBSCRIBE, self._address.topic.encode())
            # libzmq frees the name of a closed monitor some time later, so that no two subscriptions may share one.
            events = f"inproc://kv-events-{next(_MONITORS)}"
            socket.monitor(events, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            monitor.connect(events)
            _connect(socket, self._address.endpoint)
            try:
                await self._follow(socket, monitor)
            finally:
                socket.disable_monitor()

    async def _follow(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        news: asyncio.Future[Any] | None = None
        message: asyncio.Future[Any] | None = None
        try:
            while True:
                news = news or asyncio.ensure_future(_done(recv_monitor_message(monitor)))
                message = message or asyncio.ensure_future(_done(socket.recv_multipart()))
                await asyncio.wait((news, message), return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    connected = news.result()["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    news = None
                    self._on_connection(connected)
                    if connected:
                        await self._catch_up("a new connection")
                if message.done():
                    frames, message = message.result(), None
                    await self._take(frames)
        finally:
            for waiting in (news, message):
                if waiting is not None:
                    waiting.cancel()

    async def _take(self, frames: list[bytes]) -> None:
        """A message of the live stream."""
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            raise KvEventsUnreadable(f"a message of {len(frames)} frames; topic, sequence number and events expected")
        number = int.from_bytes(frames[1], "big")
        timestamp, events = _decoded(frames[2])
        if self._next is not None and number < self._next:
            if timestamp <= self._last_ts:
                return  # known from the replay
            await self._catch_up(f"message {number} came after {self._next - 1}")
        elif self._next is not None and number > self._next:
            self.count.gaps += 1
            await self._catch_up(f"messages {self._next} to {number - 1} are missing")
        if self._next is not None and number > self._next:
            self._reset(f"messages {self._next} to {number - 1} are not kept")
        if self._next is None or number == self._next:
            self.count.messages += 1
            await self._give(number, timestamp, events)

    async def _give(self, number: int, timestamp: float, events: list[KvEvent]) -> None:
        self._next = number + 1
        self._last_ts = timestamp
        for portion in portions(events, BATCH_BLOCKS):
            self._on_batch(portion)
            await asyncio.sleep(0)  # a long history is always ready to be read; others want to run too

    # ---- the past

    async def _catch_up(self, why: str) -> None:
        """Hand on what was missed; where that cannot be had, a Reset and all that is kept."""
        if self._next:
            try:
                return await self._replay(self._next - 1, anchored=True)
            except _NotReplayed as error:
                why = f"{why}; {error}"
        self._reset(why)
        try:
            await self._replay(0, anchored=False)
        except _NotReplayed as error:
            if self._next is not None:  # a part was handed on, and what comes next does not follow from it
                self._reset(str(error))

    def _reset(self, reason: str) -> None:
        self._next = None
        self.count.resets += 1
        self._on_batch((Reset(reason),))

    async def _replay(self, start: int, *, anchored: bool) -> None:
        """Hand on the messages from `start` on, as far back as they are kept.

        anchored: message `start` was read before and must be the same; it is not handed on again. The publisher's pipe
        drops what it cannot hold, so it is asked again from the first hole on.
        """
        if self._address.replay_endpoint is None:
            raise _NotReplayed("the engine has no replay endpoint")
        expected, begun = start, anchored
        while True:
            asked = expected
            with self._socket(zmq.DEALER) as socket:
                _connect(socket, self._address.replay_endpoint)
                await socket.send_multipart([b"", asked.to_bytes(_NUMBER_BYTES, "big")])
                while (answer := await self._answer(socket)) is not None:
                    number, payload = answer
                    if number == _END:
                        if anchored:
                            raise _NotReplayed(f"message {start} is not kept")
                        self._next = self._next or 0  # nothing was published yet
                        return
                    if begun and number != expected:
                        break
                    timestamp, events = _decoded(payload)
                    expected, begun = number + 1, True
                    if not anchored:
                        self.count.replayed += 1
                        await self._give(number, timestamp, events)
                    elif timestamp != self._last_ts:
                        raise _NotReplayed(f"message {start} is another now: the publisher was restarted")
                    anchored = False
            if expected == asked:
                raise _NotReplayed(f"the replay endpoint does not give message {asked}")

    async def _answer(self, socket: zmq.asyncio.Socket) -> tuple[int, bytes] | None:
        """(sequence number, payload) of the next replayed message; None when there was silence for too long."""
        try:
            async with asyncio.timeout(self._replay_silence_seconds):
                frames = await _done(socket.recv_multipart())
        except TimeoutError:
            return None
        if len(frames) != 4 or len(frames[2]) != _NUMBER_BYTES:
            raise KvEventsUnreadable(f"a replayed message of {len(frames)} frames; 4 expected")
        return int.from_bytes(frames[2], "big", signed=True), frames[3]

    @contextmanager
    def _socket(self, kind: int) -> Iterator[zmq.asyncio.Socket]:
        socket = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, 1)
            yield socket
        finally:
            socket.close(linger=0)


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise KvEventsUnreadable(f"{endpoint}: {error}") from error


async def _done(future: Awaitable[Any]) -> Any:
    """A socket's future as a coroutine, which tasks are made of."""
    return await future


def _decoded(payload: bytes) -> tuple[float, list[KvEvent]]:
    try:
        return decode(payload)
    except ValueError as error:
        raise KvEventsUnreadable(str(error)) from error
