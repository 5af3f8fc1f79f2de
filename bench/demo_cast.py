"""The cast of a demonstration: the engines and the service, started and found ready.

Invariants
- The service gets every duration it decides by divided by the time scale, so that it is as patient towards simulated
  engines as it would be towards real ones. Limits on real things (silence of a connection, an abort) stay.

What this module does not know: the workload.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rolloutd import v1
from rolloutd.bench.demo_fleet import Fleet
from rolloutd.bench.demo_processes import Child, ChildFailed, Children, free_ports
from rolloutd.bench.demo_screen import Screen
from rolloutd.scheduler.config import BudgetSettings, PreemptSettings, QueueSettings

SERVER_READY_SECONDS = 30.0
JOIN_SECONDS = 60.0
PROBE_SECONDS = 2.0
_HOST = "127.0.0.1"
# Sections of the service's configuration whose durations are about rollouts.
_SIMULATED_SECTIONS: dict[str, Any] = {
    "scheduler": QueueSettings(),
    "preempt": PreemptSettings(),
    "budget": BudgetSettings(),
}
_REAL_KEYS = frozenset({"scheduler.queue_ttl_seconds"})


class EngineLister(Protocol):
    """What finding the engines needs of `rolloutd.client.Client`."""

    async def list_engines(self) -> list[v1.Engine]: ...


@dataclass(frozen=True, slots=True)
class Cast:
    """target: gRPC address of the service."""

    target: str
    engine_urls: tuple[str, ...]

    @classmethod
    async def start(cls, fleet: Fleet, children: Children, screen: Screen) -> Cast:
        """Start everything and wait until it answers. Raises ChildFailed."""
        await fleet.prepare(children, screen.say)
        *engine_ports, server_port = free_ports(fleet.engines + 1)
        urls = tuple(f"http://{_HOST}:{port}" for port in engine_ports)
        screen.say(f"starting {fleet.engines} engines and the service")
        engines = [
            await children.start(f"engine {number}", fleet.command(port))
            for number, port in enumerate(engine_ports, start=1)
        ]
        configuration = children.folder / "rolloutd.yaml"
        configuration.write_text(yaml.safe_dump(settings(fleet), sort_keys=True))
        target = f"{_HOST}:{server_port}"
        server = await children.start("rolloutd", serve_command(configuration, server_port, urls))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as session:

            async def engine_ready(child: Child, url: str) -> None:
                await children.until_ready(child, _ready_route(session, url), fleet.ready_seconds)
                screen.ready(child.name, url)

            async def server_ready() -> None:
                await children.until_ready(server, _serving(target), SERVER_READY_SECONDS)
                screen.ready(server.name, target)

            waits = [asyncio.create_task(wait) for wait in (*map(engine_ready, engines, urls), server_ready())]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
        return cls(target, urls)

    async def until_engines_joined(self, client: EngineLister) -> None:
        """Return once the service takes work for every engine. Raises ChildFailed with the reason of the first it lacks."""
        engines: list[v1.Engine] = []
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                while len(engines) < len(self.engine_urls) or any(
                    engine.state != v1.ENGINE_STATE_READY for engine in engines
                ):
                    await asyncio.sleep(0.1)
                    engines = await client.list_engines()
        except TimeoutError:
            missing = [engine for engine in engines if engine.state != v1.ENGINE_STATE_READY]
            why = f"{missing[0].engine_id}: {missing[0].last_error or 'no reason given'}" if missing else "none listed"
            raise ChildFailed(f"the service did not take all engines within {JOIN_SECONDS:g} s ({why})") from None


def settings(fleet: Fleet) -> dict[str, Any]:
    """The service's configuration file: defaults, but in simulated time."""
    values: dict[str, Any] = {"engine.vocabulary_size": fleet.limits.vocabulary_size, "log.level": "info"}
    for section, defaults in _SIMULATED_SECTIONS.items():
        for setting in dataclasses.fields(defaults):
            key = f"{section}.{setting.name}"
            if key.endswith("_seconds") and key not in _REAL_KEYS:
                values[key] = getattr(defaults, setting.name) / fleet.time_scale
    return values


def serve_command(configuration: Path, port: int, engine_urls: tuple[str, ...]) -> list[str]:
    """How to start the service."""
    engines = [word for url in engine_urls for word in ("--engine", url)]
    serve = [sys.executable, "-m", "rolloutd.server.cli", "serve"]
    return [*serve, "--config", str(configuration), "--host", _HOST, "--port", str(port), *engines]


def _ready_route(session: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        try:
            async with session.get(f"{url}/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return probe


def _serving(target: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe
