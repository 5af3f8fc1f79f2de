"""The two clients of `make bench-overhead`: one over plain HTTP (router, or engine itself), one over our stream.

Invariants
- Both build their requests before the clock starts and hand the answer's time over as soon as they have read all of it.
- Closed loop: as many in flight at any moment as asked for, for as many seconds as asked for. Paced: one submission per
  period on a clock that does not wait for answers.
- A refused or failed rollout ends the measurement with an exception; it is never counted.

What this module does not know: what stands behind the address.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import grpc
import httptools
import numpy as np

from rolloutd import v1
from rolloutd.bench.mock_engine import OUTPUT_TOKENS

PROMPTS = 512
# Each prompt comes so often in all: rollouts of a group share their prompt.
VOCABULARY = 150_000
DRAIN_SECONDS = 20.0
# Busy-waiting for the last fraction of a period would take CPU from the process under test.
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


def prompts(tokens: int, seed: int) -> list[bytes]:
    """Distinct random prompts, uint32 LE."""
    rng = np.random.default_rng(seed)
    count = min(PROMPTS, max(64, (64 << 20) // (tokens * 4)))
    return [rng.integers(10, VOCABULARY, tokens, dtype="<u4").tobytes() for _ in range(count)]


@dataclass
class Measured:
    """What one measurement saw."""

    rollouts: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)


class HttpClient:
    """POST /generate, not streamed, on kept connections: the cheapest way through a router."""

    def __init__(self, host: str, port: int, token_prompts: list[bytes]) -> None:
        self._address = host, port
        self._idle: list[_HttpConnection] = []
        bodies = (
            json.dumps(
                {
                    "input_ids": np.frombuffer(prompt, "<u4").tolist(),
                    "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "temperature": 1.0},
                    "stream": False,
                    "return_logprob": True,
                },
                separators=(",", ":"),
            ).encode()
            for prompt in token_prompts
        )
        head = "POST /generate HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
        self._requests = itertools.cycle([head.format(host, port, len(body)).encode() + body for body in bodies])

    async def _connection(self) -> _HttpConnection:
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_HttpConnection, *self._address)
        return connection

    async def closed(self, in_flight: int, seconds: float) -> Measured:
        measured = Measured()
        started = time.perf_counter()

        async def one() -> None:
            connection = await self._connection()
            while time.perf_counter() - started < seconds:
                await connection.ask(next(self._requests))
                measured.rollouts += 1
            self._idle.append(connection)

        await asyncio.gather(*(one() for _ in range(in_flight)))
        measured.seconds = time.perf_counter() - started
        return measured

    async def paced(self, per_second: float, seconds: float) -> Measured:
        measured = Measured()

        async def one(request: bytes) -> None:
            began = time.perf_counter()
            connection = await self._connection()
            await connection.ask(request)
            measured.latencies_ms.append((time.perf_counter() - began) * 1e3)
            self._idle.append(connection)

        tasks: set[asyncio.Task[None]] = set()

        async def submit() -> None:
            task = asyncio.create_task(one(next(self._requests)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        await _pace(submit, per_second, seconds)
        while tasks:
            await asyncio.gather(*tasks)
        measured.rollouts = len(measured.latencies_ms)
        return measured

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _HttpConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are of a class of their own

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        status = self._parser.get_status_code()
        if status == 200:
            answer.set_result(None)
        else:
            answer.set_exception(RuntimeError(f"answered {status}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was lost"))

    async def ask(self, request: bytes) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answer

    def close(self) -> None:
        self._transport.close()


class StreamClient:
    """One SubmitRollout stream. What finished since the last message is replaced, and acknowledged, in one message.

    `samples`: rollouts per submission; above 1 they are a group, whose prompt travels once.
    """

    def __init__(self, host: str, port: int, run_id: str, token_prompts: list[bytes], samples: int = 1) -> None:
        self._channel = grpc.aio.insecure_channel(f"{host}:{port}", options=_CHANNEL_OPTIONS)
        self._call = v1.RolloutServiceStub(self._channel).SubmitRollout()
        self._run_id = run_id
        sampling = v1.SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=1.0)
        self._submissions = itertools.cycle(
            [
                v1.RolloutSubmission(token_bytes=prompt, sampling=sampling, logprobs=True, samples=samples)
                for prompt in token_prompts
            ]
        )
        self._samples = samples
        self._names = itertools.count()
        self._cursor = 0

    async def open(self) -> None:
        hello = v1.Hello(run_id=self._run_id, consumer_id="bench")
        await self._call.write(v1.SubmitRolloutRequest(hello=hello))
        await self._call.read()

    async def close(self) -> None:
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass
        await self._channel.close()

    def _message(self, submissions: int) -> v1.SubmitRolloutRequest:
        message = v1.SubmitRolloutRequest(acknowledge_through_cursor=self._cursor)
        for _ in range(submissions):
            submission = next(self._submissions)
            submission.rollout_id = f"r{next(self._names)}"
            message.submissions.append(submission)
        return message

    async def _finished(self) -> list[str]:
        """Ids of the rollouts that ended, of the next message."""
        response = await self._call.read()
        if response is grpc.aio.EOF:
            raise ConnectionError("the server ended the stream")
        ended: list[str] = []
        for event in cast(v1.SubmitRolloutResponse, response).events:
            kind = event.WhichOneof("event")
            if kind == "finished":
                result = event.finished
                if not result.complete or len(result.logprob_bytes) != 4 * OUTPUT_TOKENS:
                    raise RuntimeError(f"{result.rollout_id} ended with {result.error}")
                self._cursor = event.cursor
                ended.append(result.rollout_id)
            elif kind == "group_finished":
                self._cursor = event.cursor
            elif kind == "rejected":
                raise RuntimeError(f"{event.rejected.rollout_id} was refused: {event.rejected.error}")
        return ended

    async def closed(self, in_flight: int, seconds: float) -> Measured:
        measured = Measured()
        running = replaceable = 0
        started = time.perf_counter()
        ended = in_flight
        while running or not measured.rollouts:
            replaceable += ended
            submissions, replaceable = divmod(replaceable, self._samples)
            if submissions and time.perf_counter() - started < seconds:
                running += submissions * self._samples
                await self._call.write(self._message(submissions))
            ended = len(await self._finished())
            measured.rollouts += ended
            running -= ended
        measured.seconds = time.perf_counter() - started
        return measured

    async def paced(self, per_second: float, seconds: float) -> Measured:
        measured = Measured()
        began: dict[str, float] = {}

        async def submit() -> None:
            message = self._message(1)
            began[message.submissions[0].rollout_id] = time.perf_counter()
            await self._call.write(message)

        pacer = asyncio.create_task(_pace(submit, per_second, seconds))
        total = int(per_second * seconds)
        while measured.rollouts < total:
            for name in await self._finished():
                measured.latencies_ms.append((time.perf_counter() - began.pop(name)) * 1e3)
                measured.rollouts += 1
        await pacer
        return measured


async def _pace(submit: Callable[[], Awaitable[None]], per_second: float, seconds: float) -> None:
    started = time.perf_counter()
    for number in range(int(per_second * seconds)):
        delay = started + number / per_second - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        await submit()
