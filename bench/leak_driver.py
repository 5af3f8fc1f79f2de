"""The client of `make bench-leaks`, in a process of its own: cancels and streams, as a trainer's client makes them.

- Cancels: rollouts on one stream, each cancelled by a message on that stream at a random moment: in the very message
  that submits it, while it waits, while it runs, or after its end.
- Streams: opened, greeted, given a rollout that is awaited, cancelled or left to run (or none), half-closed and read to
  their end.

It prints `cancelled N` and `streams N` as it goes. What it does not know: what the server keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import time
from typing import Any, cast

import grpc
import uvloop

from rolloutd import v1
from rolloutd.bench.overhead_clients import prompts

IN_FLIGHT = 640  # more than the engines' slots together: some are cancelled while they wait
MEAN_SECONDS = 0.05  # from submission to cancellation
WORKERS = 16  # streams open at a time
PROMPT_TOKENS = 256
TELL_EVERY = 500
_TURN_SECONDS = 0.002

Call = grpc.aio.StreamStreamCall[v1.SubmitRolloutRequest, v1.SubmitRolloutResponse]
_SAMPLING = v1.SamplingParams(max_new_tokens=64)


async def open_stream(channel: grpc.aio.Channel, run_id: str, consumer_id: str, cursor: int = 0) -> Call:
    """A stream that has been greeted. What came up to `cursor` is acknowledged by that."""
    call = v1.RolloutServiceStub(channel).SubmitRollout()
    hello = v1.Hello(run_id=run_id, consumer_id=consumer_id, resume_cursor=cursor)
    await call.write(v1.SubmitRolloutRequest(hello=hello))
    await read(call)
    return call


async def read(call: Call) -> v1.SubmitRolloutResponse | None:
    """The next message; None at the end of the stream."""
    response: Any = await call.read()
    return None if response is grpc.aio.EOF else cast(v1.SubmitRolloutResponse, response)


class Canceller:
    """Keeps `IN_FLIGHT` rollouts going until `total` have been cancelled or have ended; the first `warm_up` are not told."""

    def __init__(self, call: Call, total: int, warm_up: int, seed: int) -> None:
        self._call = call
        self._total = total + warm_up
        self._warm_up = warm_up
        self._random = random.Random(seed)
        self._prompts = prompts(PROMPT_TOKENS, seed)
        self._due: list[tuple[float, str]] = []
        self._submitted = 0
        self._ended = 0
        self._cursor = 0

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        while not reader.done():
            message = v1.SubmitRolloutRequest(acknowledge_through_cursor=self._cursor)
            now = time.monotonic()
            while self._submitted < self._total and self._submitted - self._ended < IN_FLIGHT:
                self._submit(message, now)
            while self._due and self._due[0][0] <= now:
                message.cancel_rollout_ids.append(heapq.heappop(self._due)[1])
            if message.submissions or message.cancel_rollout_ids:
                await self._call.write(message)
            await asyncio.sleep(_TURN_SECONDS)
        await reader
        await self._call.write(v1.SubmitRolloutRequest(acknowledge_through_cursor=self._cursor))
        await self._call.done_writing()
        while await read(self._call) is not None:
            pass

    def _submit(self, message: v1.SubmitRolloutRequest, now: float) -> None:
        name = f"c{self._submitted}"
        self._submitted += 1
        message.submissions.add(
            rollout_id=name,
            token_bytes=self._prompts[self._submitted % len(self._prompts)],
            sampling=_SAMPLING,
            logprobs=True,
        )
        wait = 0.0 if self._random.random() < 0.05 else self._random.expovariate(1 / MEAN_SECONDS)
        heapq.heappush(self._due, (now + wait, name))

    async def _read(self) -> None:
        while self._ended < self._total:
            response = await read(self._call)
            if response is None:
                raise ConnectionError("the server ended the stream")
            for event in response.events:
                if event.HasField("finished"):
                    self._cursor = event.cursor
                    self._ended += 1
                    told = self._ended - self._warm_up
                    if told > 0 and (told % TELL_EVERY == 0 or self._ended == self._total):
                        print(f"cancelled {told}", flush=True)
                elif event.HasField("rejected") and event.rejected.kind == v1.ITEM_KIND_SUBMISSION:
                    raise RuntimeError(f"{event.rejected.rollout_id} was refused: {event.rejected.error}")


class Streams:
    """Opens and closes `total` streams, `WORKERS` at a time."""

    def __init__(self, channel: grpc.aio.Channel, total: int, seed: int) -> None:
        self._channel = channel
        self._total = self._left = total
        self._closed = 0
        self._random = random.Random(seed)
        self._prompt = prompts(PROMPT_TOKENS, seed)[0]
        self._names = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._work(f"w{number}") for number in range(WORKERS)))

    async def _work(self, consumer_id: str) -> None:
        cursor = 0
        while self._left > 0:
            self._left -= 1
            cursor = await self._one(consumer_id, cursor)
            self._closed += 1
            if self._closed % TELL_EVERY == 0 or self._closed == self._total:
                print(f"streams {self._closed}", flush=True)
        await self._end(await open_stream(self._channel, "streams", consumer_id, cursor), cursor)

    async def _one(self, consumer_id: str, cursor: int) -> int:
        """One whole stream; returns the cursor of the last result that came."""
        call = await open_stream(self._channel, "streams", consumer_id, cursor)
        kind = self._random.choice(("empty", "awaited", "cancelled", "left"))
        if kind != "empty":
            name = f"s{self._names}"
            self._names += 1
            submission = v1.RolloutSubmission(rollout_id=name, token_bytes=self._prompt, sampling=_SAMPLING)
            message = v1.SubmitRolloutRequest(submissions=[submission])
            if kind == "cancelled":
                message.cancel_rollout_ids.append(name)
            await call.write(message)
        if kind in ("awaited", "cancelled"):
            before = cursor
            while cursor == before:
                response = await read(call)
                assert response is not None
                cursor = max(cursor, *(event.cursor for event in response.events))
            await call.write(v1.SubmitRolloutRequest(acknowledge_through_cursor=cursor))
        return await self._end(call, cursor)

    @staticmethod
    async def _end(call: Call, cursor: int) -> int:
        await call.done_writing()
        while (response := await read(call)) is not None:
            cursor = max(cursor, *(event.cursor for event in response.events))
        return cursor


async def _main(port: int, cancels: int, warm_up: int, streams: int, seed: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        if cancels:
            await Canceller(await open_stream(channel, "cancels", "c"), cancels, warm_up, seed).run()
        if streams:
            await Streams(channel, streams, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description="cancels rollouts and opens and closes streams")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cancels", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=0, help="cancels before those")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    uvloop.run(_main(options.port, options.cancels, options.warm_up, options.streams, options.seed))


if __name__ == "__main__":
    main()
