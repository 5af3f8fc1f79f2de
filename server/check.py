"""`rolloutd check`: the merged configuration with its origins, and what the engines' settings cost.

What this module does not know: how a server runs.
"""

from __future__ import annotations

import asyncio
from typing import Any, TextIO

from rolloutd.engines.base import EngineFault, EngineInfo, FaultKind
from rolloutd.engines.sglang import SGLangEngine
from rolloutd.server.access import read_api_keys
from rolloutd.server.config import ServerConfig
from rolloutd.server.process import sglang_door
from rolloutd.server.tls import check_tls

_REGISTER_SECONDS = 30.0
# What a fault of `register` says of the engine; its message says the rest.
_VERDICTS = {
    FaultKind.REFUSED: "answers, but cannot be used",
    FaultKind.BUSY: "answers, but cannot be used yet",
    FaultKind.BROKEN: "no usable answer",
    FaultKind.SILENT: "does not answer",
    FaultKind.UNREACHED: "does not answer",
}


def check(config: ServerConfig, out: TextIO) -> int:
    """Print everything; 0 when every configured engine can be used, else 1."""
    rows = [(key, _text(value), config.origins[key]) for key, value in sorted(config.values.items())]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(60, max(len(value) for _, value, _ in rows))
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {origin}", file=out)
    for line in _access(config):
        print(line, file=out)
    if not config.engines:
        print("\nno engine configured", file=out)
        return 0
    return 0 if asyncio.run(_engines(config, out)) else 1


def _access(config: ServerConfig) -> list[str]:
    lines = []
    if config.api_keys_file is not None:
        keys = len(read_api_keys(config.api_keys_file, "server.api_keys_file"))
        lines.append(f"  API keys     {keys} in {config.api_keys_file}")
    if (facts := check_tls(config.tls)) is not None:
        lines.append(f"  certificate  for {', '.join(facts.names) or 'no name'}, until {facts.expires}")
        clients = "only with a certificate" if config.tls.client_ca_file is not None else "without a certificate"
        lines.append(f"  clients      {clients}")
    return ["\naccess", *lines] if lines else []


async def _engines(config: ServerConfig, out: TextIO) -> bool:
    answers = await asyncio.gather(*(_ask(sglang_door(settings)) for settings in config.engines))
    for settings, answer in zip(config.engines, answers, strict=True):
        print(f"\n{settings.url} (pool {settings.pool})", file=out)
        if isinstance(answer, str):
            print(f"  {answer}", file=out)
            continue
        for name, value in (
            ("model", answer.model),
            ("version", answer.server_version),
            ("slots", answer.max_running_rollouts),
            ("KV tokens", answer.kv_capacity_tokens),
            ("page", f"{answer.page_size_tokens} tokens"),
            ("context", f"{answer.context_tokens} tokens"),
            ("vocabulary", answer.vocabulary_size),
        ):
            print(f"  {name:<11} {value}", file=out)
        for warning in answer.warnings:
            print(f"  costs       {warning}", file=out)
        if not answer.warnings:
            print("  costs       nothing: its settings suit rollouts", file=out)
    return all(isinstance(answer, EngineInfo) for answer in answers)


async def _ask(door: SGLangEngine) -> EngineInfo | str:
    """What the engine says of itself, or why it is of no use."""
    try:
        async with asyncio.timeout(_REGISTER_SECONDS):
            return await door.register()
    except EngineFault as fault:
        return f"{_VERDICTS[fault.kind]}: {fault.message}"
    except TimeoutError:
        return f"does not answer: nothing within {_REGISTER_SECONDS:g} s"
    finally:
        await door.close()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
