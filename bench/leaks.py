"""`make bench-leaks`: what 100,000 cancelled rollouts and 20,000 whole streams leave behind in the server.

The server runs in this process, so that its tasks, outboxes and counters can be looked at; engines and client are
processes of their own. Memory is resident bytes over cancels (streams), as a line through all samples after a warm-up,
during which bounded things (ids of delivered rollouts, decisions, the index, allocator arenas) reach their size.

Rollouts are cancelled by a message on their stream. Cancelling the RPC instead leaks native memory inside grpc.aio
(grpc#43360), in the client as well; our client cancels its RPC only when a session has ended.

The last line is JSON: `bytes_per_cancel`, `bytes_per_stream`, and counts of what leaked: `tasks`, `streams` (outboxes and
consumers' RPCs), `engine_requests`, `counters` (what the core's own check finds, and records that nothing owns).

What this module does not know: why something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop

from rolloutd.bench.demo_processes import Children, free_ports
from rolloutd.bench.mock_engine import VOCABULARY_SIZE
from rolloutd.bench.overhead_stack import ENGINES, HOST, READY_SECONDS, Stack, answers, resident_bytes
from rolloutd.scheduler.run import REMEMBERED_IDS
from rolloutd.server.config import load_config
from rolloutd.server.core_build import core_words
from rolloutd.server.process import Server

CANCELS, STREAMS = 100_000, 20_000
# The core remembers so many delivered ids per run, so that a late repetition is known.
WARM_UP_CANCELS = REMEMBERED_IDS + 5_000
WARM_UP_SHARE = 0.2  # of the samples, left out on top of that
HOLD_SECONDS = 0.1  # mean length of a generation: about a third of the cancels come while it runs
SETTLE_SECONDS = 15.0
LIMIT_BYTES_PER_CANCEL = 100.0


@dataclass(frozen=True, slots=True)
class Leaks:
    """What was left. Bytes are None where too few samples were taken to say."""

    cancelled: int
    streams_closed: int
    bytes_per_cancel: float | None
    bytes_per_stream: float | None
    tasks: int
    streams: int
    engine_requests: int
    counters: int

    @property
    def left(self) -> int:
        """Everything but memory."""
        return self.tasks + self.streams + self.engine_requests + self.counters


class _Memory:
    """Resident bytes over a count of things done."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[int, int]]] = {"cancelled": [], "streams": []}

    def take(self, line: str) -> None:
        kind, count = line.split()
        self.samples[kind].append((int(count), resident_bytes(os.getpid())))

    def count(self, kind: str) -> int:
        return self.samples[kind][-1][0] if self.samples[kind] else 0

    def bytes_each(self, kind: str) -> float | None:
        samples = self.samples[kind]
        samples = samples[int(len(samples) * WARM_UP_SHARE) :]
        if len(samples) < 10:
            return None
        counts, sizes = np.array(samples, dtype=float).T
        return round(float(np.polyfit(counts, sizes, 1)[0]), 1)


async def measure(
    cancels: int, streams: int, warm_up: int = 0, say: Callable[[str], None] = lambda line: None
) -> Leaks:
    """Run it all. Needs an event loop without another server."""
    async with AsyncExitStack() as exit_stack:
        folder = exit_stack.enter_context(TemporaryDirectory(prefix="rolloutd-leaks-"))
        children = await exit_stack.enter_async_context(Children(Path(folder)))
        ports = free_ports(ENGINES)
        for port in ports:
            command = [sys.executable, "-m", "rolloutd.bench.mock_engine", "--port", str(port)]
            engine = await children.start(f"engine {port}", [*command, "--hold-seconds", str(HOLD_SECONDS)])
            await children.until_ready(engine, lambda port=port: answers(port), READY_SECONDS)  # type: ignore[misc]
        flags = {
            "server.port": 0,
            "server.prometheus_port": 0,
            "engines": [f"http://{HOST}:{port}" for port in ports],
            "engine.vocabulary_size": VOCABULARY_SIZE,
            "scheduler.queue_capacity": 100_000,
            "server.shutdown_grace_seconds": 0,
        }
        server = Server(load_config(flags=flags))
        await server.start()
        exit_stack.push_async_callback(server.stop)
        async with asyncio.timeout(READY_SECONDS):
            await asyncio.gather(*(engine.registered.wait() for engine in server.engines.engines()))
        tasks_before = _count_tasks()
        memory = _Memory()
        arguments = {"port": server.port, "cancels": cancels, "warm-up": warm_up, "streams": streams}
        await _drive(arguments, memory, say)
        stack = Stack(tuple(ports), server.port, server.metrics_port or 0, os.getpid())
        return await _left(server, stack, memory, tasks_before)


async def _drive(arguments: dict[str, int], memory: _Memory, say: Callable[[str], None]) -> None:
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "rolloutd.bench.leak_driver", *words]
    # Not by the event loop: uvloop forks, which is not safe beside gRPC's threads; this one does not (vfork).
    driver = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        while line := await asyncio.to_thread(driver.stdout.readline):
            memory.take(line)
            say(f"{line.strip()}, {resident_bytes(os.getpid()) / (1 << 20):.1f} MiB")
    except BaseException:
        driver.kill()
        raise
    finally:
        status = await asyncio.to_thread(driver.wait)
        driver.stdout.close()
    if status:
        raise RuntimeError(f"the driver ended with status {status}")


async def _left(server: Server, stack: Stack, memory: _Memory, tasks_before: int) -> Leaks:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS

    async def count() -> tuple[int, int, int, int]:
        tasks = max(0, _count_tasks() - tasks_before)
        requests = sum(int(load["num_running_reqs"]) for load in await stack.loads())
        statistics = server.loop.core.statistics()
        waiting = sum(statistics.queued.values()) + statistics.held
        counters = waiting + statistics.running + statistics.undelivered_results
        return tasks, len(server.loop.outboxes()), requests, counters

    left = await count()
    while any(left) and loop.time() < deadline:
        await asyncio.sleep(0.1)
        gc.collect()
        left = await count()
    tasks, streams, requests, counters = left
    try:
        server.loop.core.check()
    except AssertionError as error:
        print(f"the core's check: {error}", file=sys.stderr)
        counters += 1
    return Leaks(
        memory.count("cancelled"),
        memory.count("streams"),
        memory.bytes_each("cancelled"),
        memory.bytes_each("streams"),
        tasks,
        streams,
        requests,
        counters,
    )


def _count_tasks() -> int:
    """Their number, because which task waits for the next RPC changes with every RPC."""
    return sum(not task.done() for task in asyncio.all_tasks())


def main() -> int:
    parser = argparse.ArgumentParser(description="what cancelled rollouts and closed streams leave behind")
    parser.add_argument("--cancels", type=int, default=CANCELS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_CANCELS, help="cancels before the measured ones")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    gc.collect()
    gc.freeze()
    leaks = uvloop.run(measure(options.cancels, options.streams, options.warm_up, say))
    print(json.dumps({"core": core_words(), **asdict(leaks)}))
    bad = leaks.bytes_per_cancel is not None and leaks.bytes_per_cancel >= LIMIT_BYTES_PER_CANCEL
    return 1 if leaks.left or bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
