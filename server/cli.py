"""The command `rolloutd`: serve, check, engine-sim, submit, demo.

Invariants
- Parsing needs nothing heavy; each command imports what it runs.
- Exit codes: 0 done, 1 it could not be done (the reason is on standard error), 2 wrong usage.

What this module does not know: what the commands do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd.server.config_keys import ConfigError

if TYPE_CHECKING:
    from rolloutd.server.config import ServerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments[:1])
    if arguments[:1] == ["demo"]:  # its flags are its own
        return int(importlib.import_module("rolloutd.bench.demo").main(arguments[1:]))
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except ConfigError as error:
        print(f"rolloutd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(command: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolloutd", description="Schedules the rollouts of LLM reinforcement learning onto SGLang engines."
    )
    commands = parser.add_subparsers(metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the server", description="Run the server until SIGTERM.")
    _add_configuration(serve)
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for any (50051)")
    serve.add_argument("--prometheus-port", type=int, help="serve GET /metrics on this port (off)")
    serve.add_argument("--log-json", action="store_true", default=None, help="log lines as JSON")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least severe line logged")
    serve.add_argument("--seed", type=int, help="seed of the scheduler's tie-breaking (0)")
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        help="show the merged configuration, and what the engines' settings cost",
        description="Print every setting with its origin, and what the engines say about themselves.",
    )
    _add_configuration(check)
    check.set_defaults(run=_check)

    sim = commands.add_parser("engine-sim", help="run a simulated SGLang engine")
    if command == ["engine-sim"]:
        from rolloutd.engines.sim.server import add_arguments, run

        add_arguments(sim)
        sim.set_defaults(run=run)

    submit = commands.add_parser(
        "submit",
        help="run the rollouts of a JSONL file",
        description="Each line of INPUT is an object with `prompt` (text or token ids), `max_new_tokens` and any other "
        "option of the Python client. Each rollout becomes a line of OUTPUT; run it again to do what is missing.",
    )
    submit.add_argument("input", type=Path, metavar="INPUT.jsonl")
    submit.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    submit.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    submit.add_argument("--run", dest="run_id", required=True, metavar="NAME", help="run the rollouts belong to")
    submit.add_argument("--in-flight", type=int, default=1024, help="lines handed over at a time")
    submit.set_defaults(run=_submit)

    commands.add_parser("demo", help="watch a GRPO-shaped loop over simulated engines", add_help=False)
    return parser


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="an engine, as URL or POOL=URL; once per engine (replaces the file's list)",
    )
    parser.add_argument(
        "--vocabulary-size", type=int, help="vocabulary of the engines' model, where it cannot be read from them"
    )


def _configuration(options: argparse.Namespace) -> ServerConfig:
    from rolloutd.server.config import load_config

    flags: dict[str, Any] = {"engines": options.engine, "engine.vocabulary_size": options.vocabulary_size}
    for name, key in (
        ("host", "server.host"),
        ("port", "server.port"),
        ("prometheus_port", "server.prometheus_port"),
        ("seed", "server.seed"),
        ("log_json", "log.json"),
        ("log_level", "log.level"),
    ):
        flags[key] = getattr(options, name, None)
    return load_config(options.config, os.environ, flags)


def _serve(options: argparse.Namespace) -> int:
    config = _configuration(options)
    from rolloutd.server.banner import announce
    from rolloutd.server.process import run

    return run(config, announce)


def _check(options: argparse.Namespace) -> int:
    config = _configuration(options)
    from rolloutd.server.check import check

    return check(config, sys.stdout)


def _submit(options: argparse.Namespace) -> int:
    if options.in_flight < 1:
        raise ConfigError("--in-flight: must be at least 1")
    from rolloutd.server.submit import submit

    return submit(options.server, options.run_id, options.input, options.output, options.in_flight)


if __name__ == "__main__":
    raise SystemExit(main())
