"""The processes of one comparison: eight simulated engines, and whoever is compared in front of them.

Invariants
- Every run has processes of its own, so nothing is carried over from the one before it.
- Whoever decides by durations gets them divided by the time scale: rolloutd's settings, the load polls of rolloutd and smg.
- Engines are ready before a router starts: smg looks again only half a minute later.

What this module does not know: what is served.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from rolloutd.bench.demo_cast import Cast, serve_command, settings
from rolloutd.bench.demo_fleet import SimFleet
from rolloutd.bench.demo_processes import Child, Children, free_ports
from rolloutd.bench.overhead_stack import HOST, READY_SECONDS, get, router_command
from rolloutd.bench.peers_arms import PRODUCT, Arm
from rolloutd.bench.peers_doors import ClientDoor, Door, HttpDoor
from rolloutd.bench.workload import Limits
from rolloutd.client import connect
from rolloutd.engines.sim.config import MachineConfig

# Each frame costs its engine and rolloutd CPU; a router's calls are not streamed. The simulation beside it uses the same.
STREAM_INTERVAL_TOKENS = 64
POLL_SECONDS = 1.0  # rolloutd's default
# smg's default for how often it asks engines for their loads; it takes whole seconds, at least one.
LOAD_MONITOR_SECONDS = 10.0
# Real seconds that a router may hold a call: more than any of these workloads takes.
ROUTER_PATIENCE_SECONDS = 7_200
RUN_ID, CONSUMER_ID = "peers", "trainer"


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What the engines did so far, by their own account: output tokens by engine, and seconds spent on prompts over all."""

    tokens: Mapping[str, int]
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class Running:
    """Everything is up. names: process group -> what it is called."""

    engine_urls: tuple[str, ...]
    door: Door
    names: Mapping[int, str]
    children: Children

    async def counts(self) -> EngineCounts:
        tokens, prefill_seconds = {}, 0.0
        for url in self.engine_urls:
            port = int(url.rpartition(":")[2])
            tokens[url] = json.loads(await get(port, "/sim/state"))["generated_tokens"]
            prefill_seconds += json.loads(await get(port, "/v1/loads"))["loads"][0]["total_prefill_busy_us"] / 1e6
        return EngineCounts(tokens, prefill_seconds)


def fleet_of(machines: Sequence[MachineConfig], time_scale: float) -> SimFleet:
    """The engines of a simulation as processes, at that pace. All of one size and of the default speed."""
    first = machines[0]
    return SimFleet(
        engines=len(machines),
        slots=first.slots,
        kv_tokens=first.kv_tokens,
        time_scale=time_scale,
        page_size_tokens=first.page_size_tokens,
        limits=Limits(first.model.vocabulary_size, first.context_tokens),
    )


@asynccontextmanager
async def running(arm: Arm, fleet: SimFleet, seed: int) -> AsyncIterator[Running]:
    """Started, ready, and stopped in the end. seed: of rolloutd's ties, as in the simulation.

    Raises ChildFailed; RuntimeError where a router cannot be installed.
    """
    program = "" if arm.package == PRODUCT else await router_command(arm.package)
    with TemporaryDirectory(prefix="rolloutd-peers-") as folder:
        async with Children(Path(folder)) as children:
            *ports, port, metrics_port = free_ports(fleet.engines + 2)
            # How long an output is reaches engines behind a router as its least length: see `peers_doors`.
            more = ("--stream-interval", str(STREAM_INTERVAL_TOKENS), "--mean-output-tokens", "1")
            engines = [
                await children.start(f"engine {number}", [*fleet.command(one), *more])
                for number, one in enumerate(ports, start=1)
            ]
            for engine, one in zip(engines, ports, strict=True):
                await children.until_ready(engine, lambda one=one: _answers(one, "/ready"), READY_SECONDS)  # type: ignore[misc]
            urls = tuple(f"http://{HOST}:{one}" for one in ports)
            if arm.package == PRODUCT:
                front = await _start_rolloutd(children, fleet, seed, urls, port)
                await children.until_ready(front, lambda: _listens(port), READY_SECONDS)
                names = {child.pid: child.name for child in (*engines, front)}
                target = f"{HOST}:{port}"
                async with connect(target, run=RUN_ID, consumer=CONSUMER_ID, auto_acknowledge=False) as client:
                    await Cast(target, urls).until_engines_joined(client)
                    async with ClientDoor(client) as door:
                        yield Running(urls, door, names, children)
                return
            front = await children.start(arm.package, router_words(program, arm, fleet, urls, port, metrics_port))
            names = {child.pid: child.name for child in (*engines, front)}
            await children.until_ready(front, lambda: _has_workers(port, len(urls)), READY_SECONDS)
            async with HttpDoor(f"http://{HOST}:{port}") as http:
                yield Running(urls, http, names, children)


async def _start_rolloutd(children: Children, fleet: SimFleet, seed: int, urls: tuple[str, ...], port: int) -> Child:
    configuration = children.folder / "rolloutd.yaml"
    values = settings(fleet) | {
        "engine.poll_seconds": POLL_SECONDS / fleet.time_scale,
        "server.seed": seed,
        "log.level": "warning",
    }
    configuration.write_text(yaml.safe_dump(values, sort_keys=True))
    return await children.start(PRODUCT, serve_command(configuration, port, urls))


def router_words(
    program: str, arm: Arm, fleet: SimFleet, urls: tuple[str, ...], port: int, metrics_port: int
) -> list[str]:
    """How to start a router: its defaults, but for the policy and what has to fit the time scale."""
    words = [program, "launch", "--host", HOST, "--port", str(port)]
    words += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    words += ["--request-timeout-secs", str(ROUTER_PATIENCE_SECONDS), "--policy", arm.policy, *arm.flags]
    if arm.package == "smg":
        words += ["--load-monitor-interval", str(max(1, round(LOAD_MONITOR_SECONDS / fleet.time_scale)))]
    return [*words, "--worker-urls", *urls]


async def _listens(port: int) -> bool:
    """Without gRPC, whose client would wait for its next attempt."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(port: int, path: str) -> bool:
    try:
        await get(port, path)
    except (urllib.error.URLError, OSError):
        return False
    return True


async def _has_workers(port: int, count: int) -> bool:
    try:
        page = json.loads(await get(port, "/workers"))
    except (urllib.error.URLError, OSError):
        return False
    return sum(bool(worker["is_healthy"]) for worker in page["workers"]) == count
