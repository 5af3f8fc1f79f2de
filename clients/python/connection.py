"""The way to the server: channels, back-off, and unary calls that survive a restart.

Invariants: a call that got no answer is tried again with back-off and jitter, for `reconnect_seconds` at most, then raises
ServerUnavailable; an answer, good or bad, is never retried here. All calls of the contract may be repeated: they set values or
are idempotent by id. One event loop per process uses grpc.aio through this package: its poller is shared by the whole
process, and loops in several threads steal each other's wake-ups.
What this does not know: what is called.
"""

import asyncio
import logging
import random
from collections.abc import Iterator
from typing import TypeVar

import grpc

from rolloutd.client.access import Access
from rolloutd.client.errors import Problem, RolloutdError, ServerUnavailable, error_of_problem, problem_of_status

MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # either way; what a server accepts it says in Limits.max_message_bytes
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
BACKOFF_FACTOR = 1.6  # gRPC's connection back-off protocol uses the same
UNARY_SECONDS = 30.0  # longest wait for the answer to a control call, after which it counts as lost
TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed within 40 s, also while a stream is quiet.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel is a new connection: nothing stale is shared, and our own back-off is the only one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

Request = TypeVar("Request")
Response = TypeVar("Response")

logger = logging.getLogger("rolloutd.client")
_loops: dict[asyncio.AbstractEventLoop, int] = {}  # loops with open clients, and how many


def claim_loop() -> None:
    """Registers a client of the running loop. RolloutdError when another live loop of this process has one."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _loops if other.is_closed()]:
        del _loops[other]
    if any(other is not loop for other in _loops):
        raise RolloutdError(
            "another event loop of this process already runs a rolloutd client, and gRPC for asyncio works with one loop per "
            "process: use one kind of client (all asyncio in one loop, or all rolloutd.client.sync), or a second process"
        )
    _loops[loop] = _loops.get(loop, 0) + 1


def release_loop() -> None:
    """Undoes one claim_loop()."""
    loop = asyncio.get_running_loop()
    _loops[loop] -= 1
    if not _loops[loop]:
        del _loops[loop]


def open_channel(target: str, access: Access) -> grpc.aio.Channel:
    """A fresh channel, with a connection of its own. Calls on it carry `access.metadata`."""
    if access.credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if access.server_name:
        options.append(("grpc.ssl_target_name_override", access.server_name))
    return grpc.aio.secure_channel(target, access.credentials, options=options)


def backoff_seconds() -> Iterator[float]:
    """Waits before the first, second, ... retry: growing, bounded, jittered by half so that clients do not march in step."""
    delay = FIRST_BACKOFF_SECONDS
    while True:
        yield delay * random.uniform(0.5, 1.0)
        delay = min(delay * BACKOFF_FACTOR, MAX_BACKOFF_SECONDS)


def is_transient(status: grpc.StatusCode, problem: Problem) -> bool:
    """Whether a status means "no answer": the server did not give a reason of its own, or is shutting down."""
    return status in TRANSIENT and problem.reason in ("", "SHUTDOWN")


def unavailable(target: str, seconds: float, last: str) -> ServerUnavailable:
    """The error for a server that could not be reached for that long."""
    return ServerUnavailable(
        f"no rolloutd server answered at {target} for {seconds:.0f} s; last error: {last}. Is it running "
        "(`rolloutd serve`), is this its address, and do both sides use TLS or both not? connect(..., reconnect_seconds=...) "
        "sets how long to try"
    )


class Connection:
    """A channel for unary calls."""

    def __init__(self, target: str, reconnect_seconds: float, access: Access) -> None:
        self.target = target
        self.reconnect_seconds = reconnect_seconds
        self.metadata = access.metadata
        self.channel = open_channel(target, access)

    async def close(self) -> None:
        """Ends calls in flight."""
        await self.channel.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        answer_seconds: float | None = UNARY_SECONDS,
    ) -> Response:
        """The response. Refused, Fenced or Unauthorized for the server's "no", ServerUnavailable when it does not answer."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        for delay in backoff_seconds():
            try:
                return await method(request, timeout=answer_seconds, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                problem = problem_of_status(error)
                if not is_transient(error.code(), problem):
                    raise error_of_problem(problem) from error
                if loop.time() - started + delay > self.reconnect_seconds:
                    raise unavailable(self.target, loop.time() - started, str(problem)) from error
                logger.warning(
                    "rolloutd at %s does not answer (%s); trying again in %.1f s", self.target, problem, delay
                )
                await asyncio.sleep(delay)
        raise AssertionError("backoff_seconds() has no end")
