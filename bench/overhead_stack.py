"""The processes of `make bench-overhead`: two engines that cost nothing, our server and a router in front of them.

Invariants
- Both front the same two engines; each is the only one that works while it is measured.
- The CPU of a process is what the kernel has charged to it and its threads, user and system (/proc/PID/stat).

What this module does not know: what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from rolloutd import v1
from rolloutd.bench.demo_processes import Children, free_ports
from rolloutd.bench.mock_engine import VOCABULARY_SIZE

HOST = "127.0.0.1"
READY_SECONDS = 60.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
ENGINES = 2
_CALL_SECONDS = 5.0
_ROUTER_SETUP = Path(__file__).resolve().parent.parent / "deploy" / "routers" / "setup.sh"


@dataclass(frozen=True, slots=True)
class Stack:
    """Ports and process ids. `router_port` 0: no router was started."""

    engine_ports: tuple[int, ...]
    server_port: int
    metrics_port: int
    server_pid: int
    router_port: int = 0
    router_pid: int = 0

    async def say_prompt_tokens(self, count: int) -> None:
        """What the engines' answers claim from now on."""
        for port in self.engine_ports:
            await get(port, f"/prompt_tokens/{count}")

    async def metrics(self) -> dict[str, float]:
        """Our server's metrics: series with its labels -> value."""
        lines = (await get(self.metrics_port, "/metrics")).decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def loads(self) -> list[dict[str, Any]]:
        """Each engine's own counts."""
        pages = [await get(port, "/v1/loads") for port in self.engine_ports]
        return [json.loads(page)["loads"][0] for page in pages]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND  # utime, stime: proc(5)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def get(port: int, path: str) -> bytes:
    """The page. OSError when it is not there."""

    def call() -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=_CALL_SECONDS) as answer:
            return bytes(answer.read())

    return await asyncio.to_thread(call)


async def router_command(package: str = "sglang-router") -> str:
    """Path of a router's program; its environment is built when it is not there. RuntimeError where that fails."""
    process = await asyncio.create_subprocess_exec(
        str(_ROUTER_SETUP), package, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHON": sys.executable}
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{_ROUTER_SETUP.name} {package} ended with status {process.returncode}")
    return output.decode().strip()


@asynccontextmanager
async def stack(
    *, router: str = "", hold_seconds: float = 0.0, settings: dict[str, Any] | None = None
) -> AsyncIterator[Stack]:
    """Everything started and ready. `router`: its program, "" for none. `settings`: for our server, dotted keys."""
    with TemporaryDirectory(prefix="rolloutd-bench-") as folder:
        async with Children(Path(folder)) as children:
            *engine_ports, server_port, metrics_port, router_port, router_metrics_port = free_ports(ENGINES + 4)
            for port in engine_ports:
                module = "rolloutd.bench.mock_engine"
                flags = ("--port", str(port), "--hold-seconds", str(hold_seconds))
                engine = await children.start(f"engine {port}", [sys.executable, "-m", module, *flags])
                await children.until_ready(engine, lambda port=port: answers(port), READY_SECONDS)  # type: ignore[misc]
            urls = [f"http://{HOST}:{port}" for port in engine_ports]
            server = await children.start(
                "server",
                _server_command(urls, server_port, metrics_port),
                {"ROLLOUTD_" + key.upper().replace(".", "__"): str(value) for key, value in (settings or {}).items()},
            )
            fronting = None
            if router:
                # Before gRPC is used here: its threads and a fork do not go together.
                ports = ("--port", str(router_port), "--prometheus-port", str(router_metrics_port))
                policy = ("--policy", "cache_aware", "--log-level", "warn")
                command = [router, "launch", "--host", HOST, *ports, "--worker-urls", *urls, *policy]
                fronting = await children.start("router", command)
                await children.until_ready(fronting, lambda: answers(router_port), READY_SECONDS)
            await children.until_ready(server, lambda: _has_engines(server_port, len(urls)), READY_SECONDS)
            yield Stack(
                tuple(engine_ports),
                server_port,
                metrics_port,
                server.pid,
                router_port if fronting else 0,
                fronting.pid if fronting else 0,
            )


def _server_command(urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    engines = [word for url in urls for word in ("--engine", url)]
    ports = ("--port", str(port), "--prometheus-port", str(metrics_port))
    vocabulary = ("--vocabulary-size", str(VOCABULARY_SIZE), "--log-level", "warning")
    return [sys.executable, "-m", "rolloutd.server.cli", "serve", *engines, *ports, *vocabulary]


async def answers(port: int) -> bool:
    try:
        await get(port, "/health")
    except (urllib.error.URLError, OSError):
        return False
    return True


async def _has_engines(port: int, count: int) -> bool:
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            response = await v1.EngineServiceStub(channel).ListEngines(v1.ListEnginesRequest())
        except grpc.aio.AioRpcError:
            return False
    return sum(engine.state == v1.ENGINE_STATE_READY for engine in response.engines) == count
