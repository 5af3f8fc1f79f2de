"""The server process: everything wired, started and stopped in the right order.

Invariants
- The port answers and health is SERVING whether or not an engine is there (a sidecar's engine starts after it).
- One event loop per process uses gRPC: its completion-queue poller is global (grpc#42357). A second one is refused.
- Shutting down: NOT_SERVING; nothing new is accepted; what runs finishes until the grace ends, what waits ends with
  SHUTDOWN; results leave; streams end; the gRPC server stops; engines are hung up last.

What this module does not know: flags and files (`cli.py`, `config.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from rolloutd.engines.base import Engine
from rolloutd.engines.sglang import SGLangEngine, Timeouts
from rolloutd.scheduler import events
from rolloutd.scheduler.machine import Scheduler
from rolloutd.server.access import KeyCheck, read_api_keys
from rolloutd.server.config import EngineSettings, ServerConfig
from rolloutd.server.core_build import core_is_compiled
from rolloutd.server.decision_log import DecisionLog
from rolloutd.server.engine_manager import EngineManager
from rolloutd.server.engine_service import EngineService
from rolloutd.server.errors import SHUTTING_DOWN
from rolloutd.server.event_log import Entry, EventLog
from rolloutd.server.event_log import line_of as line_of_entry
from rolloutd.server.garbage import Garbage
from rolloutd.server.json_lines import JsonLines
from rolloutd.server.lineage_log import LineageLog, line_of
from rolloutd.server.logging import configure_logging, get_logger
from rolloutd.server.loop import RunLoop
from rolloutd.server.metrics import Metrics
from rolloutd.server.metrics_endpoint import MetricsEndpoint
from rolloutd.server.publications import Publications
from rolloutd.server.reload import Reloader
from rolloutd.server.rollout_service import RolloutService
from rolloutd.server.run_service import RunService
from rolloutd.server.state import ServerState
from rolloutd.server.tls import server_credentials
from rolloutd.server.tokenizing import Tokenizers
from rolloutd.server.trainer_service import TrainerService
from rolloutd.v1 import (
    add_EngineServiceServicer_to_server,
    add_RolloutServiceServicer_to_server,
    add_RunServiceServicer_to_server,
    add_TrainerServiceServicer_to_server,
)

SERVICE_NAMES = (
    "rolloutd.v1.RolloutService",
    "rolloutd.v1.RunService",
    "rolloutd.v1.TrainerService",
    "rolloutd.v1.EngineService",
)
# After the last rollout ended: how long streams may take to hand their last events over.
FLUSH_SECONDS = 5.0
# The core watches progress, per rollout; the door's own limit is only a backstop.
_DOOR_IDLE_SECONDS = 86_400.0

MakeDoor = Callable[[EngineSettings], Engine]

_serving_loop: asyncio.AbstractEventLoop | None = None


class Server:
    """A whole server inside the running event loop. `port` and `metrics_port` are known after `start()`."""

    def __init__(self, config: ServerConfig, make_door: MakeDoor | None = None) -> None:
        self.config = config
        self.port = 0
        self.metrics_port: int | None = None
        self._log = get_logger("server")
        self._core = Scheduler(config.scheduler, random.Random(config.seed), time.monotonic())
        self.loop = RunLoop(self._core, config.scheduler.queue.scheduling_interval_ms / 1000)
        self.engines = EngineManager(
            self.loop,
            config.engine_manager,
            make_door or sglang_door,
            random.Random(),
            register_timeout_seconds=config.scheduler.executor.timeout_seconds,
        )
        self.state = ServerState(
            config,
            self.loop,
            self.engines,
            Tokenizers(config.pools),
            Publications(self.loop),
            self.loop.clock(),
        )
        self.reloader = Reloader(self.state)
        self.metrics = Metrics(self.state, self.reloader)
        self._endpoint: MetricsEndpoint | None = None
        self._files: list[JsonLines[Any]] = []
        self._health = health.aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind, serve, and begin to look for the engines. Raises OSError when a port is taken."""
        global _serving_loop
        running = asyncio.get_running_loop()
        if _serving_loop is not None and _serving_loop is not running and not _serving_loop.is_closed():
            raise RuntimeError(
                "another event loop of this process runs a rolloutd server already; gRPC supports one loop per process"
            )
        _serving_loop = running
        config = self.config
        checks = []
        if config.api_keys_file is not None:
            checks.append(KeyCheck(read_api_keys(config.api_keys_file, "server.api_keys_file")))
        server = grpc.aio.server(options=grpc_options(config), interceptors=checks)
        add_RolloutServiceServicer_to_server(RolloutService(self.state), server)
        add_RunServiceServicer_to_server(RunService(self.state), server)
        add_TrainerServiceServicer_to_server(TrainerService(self.state), server)
        add_EngineServiceServicer_to_server(EngineService(self.state), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host = config.host.strip("[]")
        address = f"[{host}]:{config.port}" if ":" in host else f"{host}:{config.port}"
        try:
            if config.tls.on:
                self.port = server.add_secure_port(address, server_credentials(config.tls))
            else:
                self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if config.prometheus_port is not None:
            self._endpoint = MetricsEndpoint(self.metrics.registry, host, config.prometheus_port)
            await self._endpoint.start()
            self.metrics_port = self._endpoint.port
        if config.decision_log.path is not None:
            decisions: JsonLines[str] = JsonLines(config.decision_log, str, "decision_log")
            DecisionLog(self.loop, decisions)
            self._files.append(decisions)
        if config.lineage.path is not None:
            lineages = JsonLines(config.lineage, line_of, "lineage")
            LineageLog(self.state, lineages)
            self._files.append(lineages)
        if config.event_log.path is not None:
            entries: JsonLines[Entry] = JsonLines(config.event_log, line_of_entry, "event_log")
            self.loop.observers.append(EventLog(self.loop.clock, entries.put).observe)
            self._files.append(entries)
        for file in self._files:
            file.start()
        await server.start()
        self._grpc = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        for engine in config.engines:
            self.engines.add(engine)
        self._log.info(
            "serving",
            host=config.host,
            port=self.port,
            metrics_port=self.metrics_port,
            core_compiled=core_is_compiled(),
        )

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Drain and stop, in order. `grace_seconds` None: the configured grace."""
        global _serving_loop
        if self._grpc is None:
            return
        grace = self.config.shutdown_grace_seconds if grace_seconds is None else grace_seconds
        self._log.info("draining", grace_seconds=grace)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.state.drain()
        self.loop.post(events.BeginShutdown(grace))
        try:
            # Aborts at the end of the grace take up to abort_seconds to be answered.
            async with asyncio.timeout(grace + self.config.scheduler.executor.abort_seconds):
                await self.loop.wait_idle()
        except TimeoutError:
            self._log.warning("shutdown_grace_over")
        for outbox in self.loop.outboxes():
            outbox.finish(SHUTTING_DOWN)
        self.state.publications.close(SHUTTING_DOWN)
        await self._grpc.stop(FLUSH_SECONDS)
        self._grpc = None
        await self.loop.close()
        await self.engines.close()
        for file in self._files:
            await file.close()
        if self._endpoint is not None:
            await self._endpoint.stop()
        _serving_loop = None
        self._log.info("stopped")

    async def _set_health(self, status: int) -> None:
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)


def sglang_door(settings: EngineSettings) -> SGLangEngine:
    """The door to one configured engine; its keys are read from the environment here."""

    def key(variable: str) -> str:
        return os.environ.get(variable, "") if variable else ""

    return SGLangEngine(
        settings.url,
        api_key=key(settings.api_key_env),
        admin_api_key=key(settings.admin_api_key_env),
        vocabulary_size=settings.vocabulary_size,
        timeouts=Timeouts(idle_seconds=_DOOR_IDLE_SECONDS),
    )


def grpc_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Every channel option the server depends on, explicitly."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # The default is one ping in 300 s; clients that ping quiet streams more often would be sent away.
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.keepalive_min_ping_seconds * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(config.keepalive_min_ping_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that vanished without a goodbye is noticed within half a minute.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Two servers on one port would each see half of a run.
        ("grpc.so_reuseport", 0),
    ]


Announce = Callable[[Server], Coroutine[Any, Any, None]]


async def serve(config: ServerConfig, announce: Announce) -> None:
    """Run a server until SIGTERM or SIGINT, then drain; a second signal exits at once. SIGHUP reads the configuration again.
    `announce` once it listens."""
    server = Server(config)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, on_signal)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        running.add_signal_handler(signal.SIGHUP, lambda: server.loop.spawn(server.reloader.on_signal(), "reload"))
    await server.start()
    server.loop.spawn(server.reloader.watch(), "watch configuration")
    garbage = Garbage(server.loop.is_quiet)
    garbage.start()
    server.loop.spawn(garbage.run(), "garbage")
    server.loop.spawn(announce(server), "announce")
    await stop.wait()
    await server.stop()


def run(config: ServerConfig, announce: Announce) -> int:
    """`serve` on its own event loop (uvloop where it is installed). Returns the exit code."""
    configure_logging(json=config.log_json, level=config.log_level)
    try:
        import uvloop

        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:  # not on Windows
        loop_factory = None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            runner.run(serve(config, announce))
        except OSError as error:
            print(f"rolloutd: {error}", file=sys.stderr)
            return 1
    return 0
