"""How long engines stand still for a new policy version, measured at the engines: real time, real server, eight processes.

How the figures are taken
- 1,000 rollouts are in flight all the time, 125 on each of eight simulated engine processes behind one server process; one
  client submits the next when one ends. Versions come from disk, to all engines at once.
- An engine says when it made no pass (`rests`) and when it carried out a control call (`/sim/activity`). Its gap is what it
  rested from the pause on until it worked again, less what it needs itself: the load, and with ABORT_AND_RESUME its pause
  call, which in SGLang takes a second whenever work was there. With RETRACT the prompts computed again are work, no rest.
- Decoding is slow enough (125 sequences: 12.6 ms a step, 79 tokens a second each) and frames rare enough that no process is
  short of CPU on two cores; `cpu_shares` say how busy they were.

What this module does not know: what the figures should be.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from rolloutd import v1
from rolloutd.bench.demo_processes import Children, free_ports
from rolloutd.bench.overhead_stack import HOST, READY_SECONDS, answers, cpu_seconds, get
from rolloutd.client import Client, connect
from rolloutd.client.words import UpdateMode

ENGINES = 8
IN_FLIGHT = 1_000
SLOTS = 160
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (800, 1_600)  # each rollout's, at random: about 15 s
LOAD_SECONDS = 0.5
SETTLE_SECONDS = 1.0
FULL_SHARE = 0.9  # of the rollouts in flight that have to run before the next version comes
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.1
TICK_SECONDS = 0.002  # an engine's passes begin and end at its own ticks, its calls between them
MODES: tuple[UpdateMode, ...] = ("retract", "in_place", "abort_and_resume", "drain")
ENGINE_FLAGS = (
    *("--slots", str(SLOTS), "--kv-tokens", "600000", "--page-size", "16", "--stream-interval", "256"),
    *("--prefill-tokens-per-second", "200000", "--max-prefill-tokens", "65536"),
    *("--weight-load-seconds", str(LOAD_SECONDS), "--seed", "7"),
)
assert set(MODES) == set(get_args(UpdateMode))


@dataclass
class Gaps:
    """By mode: seconds without generation beyond the engine's own needs, and how many attempts were interrupted."""

    gaps_seconds: dict[str, list[float]] = field(default_factory=dict)
    rests_seconds: dict[str, list[float]] = field(default_factory=dict)
    aborted: dict[str, int] = field(default_factory=dict)
    cpu_shares: dict[str, float] = field(default_factory=dict)
    finished: int = 0


class _Load:
    """Keeps so many rollouts in flight until it is closed."""

    def __init__(self, client: Client, count: int) -> None:
        self.finished = 0
        self._client = client
        self._rng = np.random.default_rng(11)
        self._workers = [asyncio.create_task(self._work()) for _ in range(count)]

    async def _work(self) -> None:
        while True:
            prompt = self._rng.integers(10, 30_000, PROMPT_TOKENS, dtype=np.uint32)
            tokens = int(self._rng.integers(*OUTPUT_TOKENS))
            await self._client.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
            self.finished += 1

    def check(self) -> None:
        """Raises what a worker failed with."""
        for worker in self._workers:
            if worker.done():
                worker.result()

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)


async def measure(publishes: int, drains: int) -> Gaps:
    """So many publications in each mode, and in DRAIN, which waits for running work, so many."""
    gaps = Gaps()
    with TemporaryDirectory(prefix="rolloutd-bench-") as folder:
        async with Children(Path(folder)) as children:
            ports = free_ports(ENGINES + 1)
            server_port, engine_ports = ports[0], ports[1:]
            pids = {}
            for port in engine_ports:
                command = [sys.executable, "-m", "rolloutd.engines.sim.server", "--port", str(port), *ENGINE_FLAGS]
                engine = await children.start(f"engine {port}", command)
                pids[f"engine {port}"] = engine.pid
                await children.until_ready(engine, lambda port=port: answers(port), READY_SECONDS)  # type: ignore[misc]
            engines = [word for port in engine_ports for word in ("--engine", f"http://{HOST}:{port}")]
            flags = ("--port", str(server_port), "--vocabulary-size", "32000", "--log-level", "warning")
            command = [sys.executable, "-m", "rolloutd.server.cli", "serve", *engines, *flags]
            pids["server"] = (await children.start("server", command)).pid
            async with connect(f"{HOST}:{server_port}", run="bench", consumer="trainer") as client:
                await _until_ready(client)
                load = _Load(client, IN_FLIGHT)
                try:
                    await _measure_modes(gaps, client, load, engine_ports, publishes, drains, pids)
                finally:
                    await load.close()
                gaps.finished = load.finished
    return gaps


async def _measure_modes(
    gaps: Gaps,
    client: Client,
    load: _Load,
    engine_ports: list[int],
    publishes: int,
    drains: int,
    pids: dict[str, int],
) -> None:
    version = 0
    await _until_full(load, engine_ports)
    started, used = time.perf_counter(), {name: cpu_seconds(pid) for name, pid in pids.items()}
    own = time.process_time()
    for mode in MODES:
        gaps.gaps_seconds[mode], gaps.rests_seconds[mode], gaps.aborted[mode] = [], [], 0
        for _ in range(drains if mode == "drain" else publishes):
            await _until_full(load, engine_ports)
            await asyncio.sleep(SETTLE_SECONDS)
            version += 1
            before = [(await _activity(port))["now"] for port in engine_ports]
            aborted: dict[str, int] = {}
            async for update in client.publish_policy(version, path=f"/weights/{version}", mode=mode):
                aborted[update.engine_id] = update.aborted_attempts
            gaps.aborted[mode] += sum(aborted.values())
            for port, since in zip(engine_ports, before, strict=True):
                rest, gap = await _gap(port, since, mode)
                gaps.rests_seconds[mode].append(rest)
                gaps.gaps_seconds[mode].append(gap)
    seconds = time.perf_counter() - started
    gaps.cpu_shares = {name: (cpu_seconds(pid) - used[name]) / seconds for name, pid in pids.items()}
    gaps.cpu_shares["client"] = (time.process_time() - own) / seconds


def gap_of(activity: dict[str, Any], since: float, mode: str) -> tuple[float, float] | None:
    """(all that an engine rested for a publication that began after `since`, the part beyond its own needs), seconds.

    activity: what `/sim/activity` says. None while it has not gone on.
    """
    calls = {name: (start, end) for name, start, end in activity["calls"] if start >= since}
    if "resume" not in calls:
        return None
    paused, resumed = calls["pause"][0], calls["resume"][0]
    again = min((end for _, end in activity["rests"] if end > resumed - TICK_SECONDS), default=None)
    if again is None:
        return None
    rests = [(max(start, paused), end) for start, end in activity["rests"] if start < again and end > paused]
    needed = [calls["load_from_disk"], *([calls["pause"]] if mode == "abort_and_resume" else [])]
    rested = sum(end - start for start, end in rests)
    own = sum(max(0.0, min(end, ended) - max(start, began)) for start, end in rests for began, ended in needed)
    return rested, rested - own


async def _gap(port: int, since: float, mode: str) -> tuple[float, float]:
    deadline = time.perf_counter() + WAIT_SECONDS
    while (found := gap_of(await _activity(port), since, mode)) is None:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"engine {port} did not go on after {mode}: {await _activity(port)}")
        await asyncio.sleep(POLL_SECONDS)
    return found


async def _activity(port: int) -> dict[str, Any]:
    activity: dict[str, Any] = json.loads(await get(port, "/sim/activity"))
    return activity


async def _until_full(load: _Load, engine_ports: list[int]) -> None:
    """Until nearly all that is in flight runs."""
    running = 0
    deadline = time.perf_counter() + WAIT_SECONDS
    while running < FULL_SHARE * IN_FLIGHT:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{running} rollouts run, {IN_FLIGHT} are in flight")
        await asyncio.sleep(POLL_SECONDS)
        load.check()
        states = [json.loads(await get(port, "/sim/state")) for port in engine_ports]
        running = sum(len(state["running_rids"]) for state in states)


async def _until_ready(client: Client) -> None:
    ready = 0
    deadline = time.perf_counter() + READY_SECONDS
    while ready < ENGINES:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{ready} of {ENGINES} engines are ready")
        await asyncio.sleep(POLL_SECONDS)
        ready = sum(engine.state == v1.ENGINE_STATE_READY for engine in await client.list_engines())
