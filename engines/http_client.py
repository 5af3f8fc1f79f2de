"""A thin HTTP/1.1 client to one server: pooled connections, answers handed over as they arrive.

Why not a whole HTTP library: `make bench-http` measures one POST /generate with 2,048
(16,384) prompt tokens and its streamed answer at 22 (40) us of CPU here and 143 (154) us with aiohttp, on two shared
cores; that is as much as all the rest of a rollout's way through the server may cost.

Invariants
- A connection serves one request at a time; a request never waits for a connection of another. The pool keeps as many
  as were in use at once, and drops those idle for `keepalive_seconds`.
- `on_end` is called exactly once per request, after everything else of that request; after `hang_up` nothing is called.
- Hanging up closes the socket: the server sees it at once.
- Nothing is sent twice. `Unreached` means that the server saw nothing of a request; after anything else it may have.

What this module does not know: what is asked, how long an answer may take, redirects, cookies, compression, proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Protocol
from urllib.parse import urlsplit

import httptools

_SWEEP_SECONDS = 1.0


class Unreached(Exception):
    """No connection came about, or it was closed before anything was sent."""


class ConnectionCut(Exception):
    """The connection ended before the answer did, or what arrived is not HTTP."""


class Receiver(Protocol):
    """Takes one answer. Called inside the transport's callback: nothing here may raise or block."""

    def on_head(self, status: int, content_type: str) -> None:
        """The header has arrived; `content_type` in lower case, without its parameters."""
        ...

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, in order."""
        ...

    def on_rest(self) -> None:
        """All that has arrived so far was handed over, and it is not the end."""
        ...

    def on_end(self, error: ConnectionCut | None) -> None:
        """The answer is complete (None), or will never be."""
        ...


class HttpClient:
    """Connections to one server. `url` may carry a path, which every request's path is added to.

    ValueError for a URL that is not http(s)://host[:port][/path].
    """

    def __init__(self, url: str, *, connect_seconds: float, keepalive_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/")
        self._host_header = parts.netloc.rpartition("@")[2]
        self._connect_seconds = connect_seconds
        self._keepalive_seconds = keepalive_seconds
        self._idle: deque[Connection] = deque()  # longest idle first
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """The fixed part of a request's header, to be made once and passed to `Connection.send`."""
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n"

    def free(self) -> Connection | None:
        """A connection that is open and not in use, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing:  # between the engine's farewell and our noticing it
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises Unreached."""
        connection = Connection(self)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise Unreached(f"no connection within {self._connect_seconds:g} s") from error
        except OSError as error:
            raise Unreached(f"connection failed: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            connection.close()  # it may have come about in the same moment
            raise
        return connection

    async def call(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Status and body of one answer. Raises Unreached or ConnectionCut; a cancelled call hangs up."""
        connection = self.free() or await self.connect()
        whole = _Whole()
        try:
            connection.send(head, body, whole)
            await whole.done
        finally:
            if not whole.done.done() or whole.done.cancelled():
                connection.hang_up()
        return whole.status, bytes(whole.body)

    def close(self) -> None:
        """Close every connection; requests that run end with ConnectionCut."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    @property
    def connections(self) -> int:
        """Open ones, idle or in use."""
        return len(self._open)

    # -- for Connection ----------------------------------------------------------------------------------------------

    def _opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._closing(connection)

    def _closing(self, connection: Connection) -> None:
        if connection.idle_since and connection in self._idle:
            self._idle.remove(connection)

    def _freed(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keepalive_seconds
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        if self._idle:
            self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep)


class Connection(asyncio.Protocol):
    """One connection of a client's pool. Returns to the pool by itself when an answer is complete."""

    def __init__(self, client: HttpClient) -> None:
        self.idle_since = 0.0  # 0: in use
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._drain: asyncio.TimerHandle | None = None
        self._content_type = b""
        self._has_end = False  # the header says where the body ends; else it ends with the connection
        self._in_body = False

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, head: bytes, body: bytes, receiver: Receiver) -> None:
        """Begin a request: `head` from `HttpClient.head`. Only on a connection that the client gave out.

        Raises Unreached when that was closed meanwhile. The receiver hears nothing of what is raised here.
        """
        transport = self._transport
        if transport is None or transport.is_closing():  # `connection_lost` has no receiver to tell, or had none
            raise Unreached("connection closed by the other side before anything was sent")
        self.idle_since = 0.0
        self._content_type = b""
        self._has_end = self._in_body = False
        transport.writelines((b"%bContent-Length: %d\r\n\r\n" % (head, len(body)), body))
        self._receiver = receiver

    def hang_up(self) -> None:
        """Close the socket now, and report nothing more."""
        self._receiver = None
        self.close()

    def drain(self, seconds: float) -> None:
        """The rest of the answer is of no interest: wait for its end at most so long, then close."""
        if self._receiver is not None and self._drain is None:
            self._drain = self._loop.call_later(seconds, self.hang_up)

    def close(self) -> None:
        """Close the socket now; a request that runs ends with ConnectionCut."""
        self._client._closing(self)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are of a class of their own
        self._client._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ConnectionCut(f"the answer is not HTTP: {error}"))
            self.close()
            return
        if self._receiver is not None:
            self._receiver.on_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client._lost(self)
        if exc is None and self._in_body and not self._has_end:
            self._finish(None)
        else:
            self._finish(ConnectionCut(f"connection cut: {exc or 'closed by the other side'}"))

    # -- httptools callbacks -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._receiver is None:
            self.close()  # more than was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        if size == 12 and name.lower() == b"content-type":
            self._content_type = value
        elif (size == 14 and name.lower() == b"content-length") or (
            size == 17 and name.lower() == b"transfer-encoding"
        ):
            self._has_end = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._receiver is not None and status >= 200:  # below: 100 Continue and the like, the answer comes after it
            self._in_body = True
            kind = self._content_type.partition(b";")[0].strip().lower()
            self._receiver.on_head(status, kind.decode("latin-1"))

    def on_body(self, piece: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_body(piece)

    def on_message_complete(self) -> None:
        if not self._in_body or self._receiver is None:
            return
        keep = self._parser.should_keep_alive()
        self._finish(None)
        if keep and self._transport is not None and not self._transport.is_closing():
            self.idle_since = self._loop.time()
            self._client._freed(self)
        else:
            self.close()

    def _finish(self, error: ConnectionCut | None) -> None:
        receiver, self._receiver = self._receiver, None
        self._in_body = False
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None
        if receiver is not None:
            receiver.on_end(error)


class _Whole:
    """Gathers one answer."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_rest(self) -> None:
        pass  # the whole is wanted

    def on_end(self, error: ConnectionCut | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
