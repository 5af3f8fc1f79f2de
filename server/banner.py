"""The first words of a server to the person who started it, on standard error.

What this module does not know: logging; the banner is for eyes, the log for everything after it.
"""

from __future__ import annotations

import asyncio
import sys

from rolloutd.server.config import ServerConfig
from rolloutd.server.core_build import core_words
from rolloutd.server.process import Server

# An engine that is up answers well within this; others are looked for while the server runs.
_ENGINE_WAIT_SECONDS = 3.0


async def announce(server: Server) -> None:
    """Say where it listens at once, and which engines answer as soon as that is known."""
    config = server.config
    _say(f"rolloutd {server.state.version} ({core_words()}): gRPC on {config.host}:{server.port}{_guards(config)}")
    if server.metrics_port is not None:
        _say(f"  metrics  http://{config.host}:{server.metrics_port}/metrics")
    engines = server.engines.engines()
    if not engines:
        _say("  engines  none yet: start with --engine URL, or add one with RegisterEngine")
        return
    waits = [asyncio.create_task(engine.registered.wait()) for engine in engines]
    try:
        await asyncio.wait(waits, timeout=_ENGINE_WAIT_SECONDS)
    finally:
        for wait in waits:
            wait.cancel()
    for engine in engines:
        settings, info = engine.settings, engine.info
        if info is None:
            _say(f"  engine   {settings.url} ({settings.pool}) is not in use yet: {engine.last_error or 'waiting'}")
            continue
        _say(
            f"  engine   {settings.url} ({settings.pool}) {info.model}: {info.max_running_rollouts} slots, "
            f"{info.kv_capacity_tokens} KV tokens, page {info.page_size_tokens}"
        )
        for warning in info.warnings:
            _say(f"           {warning}")


def _guards(config: ServerConfig) -> str:
    guards = [
        *(["mTLS" if config.tls.client_ca_file is not None else "TLS"] if config.tls.on else []),
        *(["API keys"] if config.api_keys_file is not None else []),
    ]
    return f" ({', '.join(guards)})" if guards else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
