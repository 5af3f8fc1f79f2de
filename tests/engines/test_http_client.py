"""The thin HTTP client against a server that writes exactly the bytes of each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from rolloutd.engines.http_client import ConnectionCut, HttpClient, Unreached

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain; charset=x\r\n\r\nhi"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Reads whole requests, and answers each with the next of `answers` (the last one again and again)."""

    def __init__(self) -> None:
        self.answers: list[list[bytes]] = [[PLAIN]]
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.asked = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                self.asked.set()
                pieces = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                for piece in pieces:
                    if piece == b"CLOSE":
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RawServer]:
    made = RawServer()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def client(server: RawServer) -> AsyncIterator[HttpClient]:
    made = HttpClient(f"http://127.0.0.1:{server.port}/base/", connect_seconds=1.0, keepalive_seconds=30.0)
    yield made
    made.close()


async def get(client: HttpClient, body: bytes = b"") -> tuple[int, bytes]:
    return await asyncio.wait_for(client.call(client.head("POST", "/a", {"X-Key": "1"}), body), 5)


async def test_what_is_sent(server: RawServer, client: HttpClient) -> None:
    assert await get(client, b"body") == (200, b"hi")
    head, body = server.requests[0]
    assert body == b"body"
    assert head.split(b"\r\n")[0] == b"POST /base/a HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}".encode() in head
    assert b"X-Key: 1" in head and b"Content-Length: 4" in head


async def test_one_connection_serves_one_after_the_other_and_as_many_as_at_once(
    server: RawServer, client: HttpClient
) -> None:
    for _ in range(3):
        await get(client)
    assert server.connections == 1
    await asyncio.gather(*(get(client) for _ in range(4)))
    assert server.connections == 4
    assert client.connections == 4


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\ndefgh\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_chunked_answers_in_pieces_that_end_anywhere(server: RawServer, client: HttpClient, size: int) -> None:
    server.answers = [[CHUNKED[start : start + size] for start in range(0, len(CHUNKED), size)]]
    assert await get(client) == (200, b"abcdefgh")
    assert await get(client) == (200, b"abcdefgh")
    assert server.connections == 1


async def test_a_body_that_ends_with_the_connection(server: RawServer, client: HttpClient) -> None:
    server.answers = [[b"HTTP/1.0 500 No\r\n\r\nwhy", b"CLOSE"]]
    assert await get(client) == (500, b"why")
    assert await get(client) == (500, b"why")
    assert server.connections == 2


async def test_an_interim_answer_is_not_the_answer(server: RawServer, client: HttpClient) -> None:
    server.answers = [[b"HTTP/1.1 100 Continue\r\n\r\n", PLAIN]]
    assert await get(client) == (200, b"hi")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"CLOSE"],
        [PLAIN[:-1], b"CLOSE"],
        [CHUNKED[:-5], b"CLOSE"],
        [b"HTTP/1.1 200 OK\r\nTransfer-", b"CLOSE"],
        [b"hello, this is no HTTP\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n"],
    ],
)
async def test_half_an_answer_is_cut(server: RawServer, client: HttpClient, pieces: list[bytes]) -> None:
    server.answers = [pieces, [PLAIN]]
    with pytest.raises(ConnectionCut):
        await get(client)
    assert await get(client) == (200, b"hi"), "on a connection of its own"
    assert server.connections == 2


async def test_an_answer_that_says_close_is_not_kept(server: RawServer, client: HttpClient) -> None:
    server.answers = [[PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]]
    await get(client)
    await get(client)
    assert server.connections == 2


async def test_connections_that_the_server_closed_are_forgotten(server: RawServer, client: HttpClient) -> None:
    await get(client)
    server.hang_up()
    async with asyncio.timeout(5):
        while client.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await get(client) == (200, b"hi")


async def test_idle_connections_are_dropped(server: RawServer) -> None:
    client = HttpClient(f"http://127.0.0.1:{server.port}", connect_seconds=1.0, keepalive_seconds=0.01)
    await get(client)
    assert client.connections == 1
    await asyncio.wait_for(server.gone.wait(), 5)
    async with asyncio.timeout(5):
        while client.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    client.close()


@pytest.mark.parametrize("pieces", [[PLAIN, b"HTTP/1.1 200 OK\r\n"], [PLAIN + b"HTTP/1.1 200 OK\r\n"]])
async def test_words_nobody_asked_for_close_the_connection(
    server: RawServer, client: HttpClient, pieces: list[bytes]
) -> None:
    server.answers = [pieces, [PLAIN]]
    await get(client)
    await asyncio.wait_for(server.gone.wait(), 5)
    assert await get(client) == (200, b"hi")
    assert server.connections == 2


async def test_a_cancelled_call_hangs_up(server: RawServer, client: HttpClient) -> None:
    server.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"]]
    call = asyncio.create_task(get(client))
    await asyncio.wait_for(server.asked.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(server.gone.wait(), 5)
    assert client.free() is None


async def test_closing_ends_what_runs(server: RawServer, client: HttpClient) -> None:
    server.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"]]
    call = asyncio.create_task(get(client))
    await asyncio.wait_for(server.asked.wait(), 5)
    client.close()
    with pytest.raises(ConnectionCut):
        await call


async def test_nothing_listens() -> None:
    client = HttpClient("http://127.0.0.1:1", connect_seconds=1.0, keepalive_seconds=1.0)
    with pytest.raises(Unreached, match="connection failed"):
        await get(client)


async def test_a_connection_that_never_comes_about(server: RawServer) -> None:
    # A handshake that nobody answers: the port speaks no TLS.
    client = HttpClient(f"https://127.0.0.1:{server.port}", connect_seconds=0.05, keepalive_seconds=1.0)
    with pytest.raises(Unreached, match=r"within 0\.05 s"):
        await get(client)
    assert client.connections == 0


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        HttpClient(url, connect_seconds=1.0, keepalive_seconds=1.0)
