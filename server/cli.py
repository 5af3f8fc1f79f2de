"""The command `rolloutd`: serve, config, check, health, engine-sim, submit, publish, lineage, demo, calibrate, replay, simulate.

Invariants
- Parsing needs nothing heavy; each command imports what it runs.
- No secret is an argument (every user of the machine reads those): keys come from files and the environment.
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
from rolloutd.server.preset import PRESETS

if TYPE_CHECKING:
    from rolloutd.server.config import ServerConfig

DEFAULT_TARGET = "127.0.0.1:50051"
# Commands whose flags are their own: module with a `main(argv)`.
APART = {
    "demo": ("rolloutd.bench.demo", "watch a GRPO-shaped loop over simulated engines"),
    "calibrate": ("rolloutd.bench.calibrate", "measure how fast an engine is, for simulations"),
    "replay": ("rolloutd.bench.replay", "serve what was recorded once more, with other settings"),
    "simulate": (
        "rolloutd.bench.simulate",
        "serve a workload in virtual time, and compare with other ways to schedule",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments[:1])
    if arguments and arguments[0] in APART:
        return int(importlib.import_module(APART[arguments[0]][0]).main(arguments[1:]))
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
    parser.add_argument("--version", action=_Version, help="print the release, and which core it runs")
    commands = parser.add_subparsers(metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the server", description="Run the server until SIGTERM.")
    _add_configuration(serve)
    serve.add_argument("--host", help="address to listen on (127.0.0.1); one that others reach needs keys")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for any (50051)")
    serve.add_argument("--prometheus-port", type=int, help="serve GET /metrics on this port (off)")
    serve.add_argument("--log-json", action="store_true", default=None, help="log lines as JSON")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least severe line logged")
    serve.add_argument("--seed", type=int, help="seed of the scheduler's tie-breaking (0)")
    serve.add_argument("--api-keys-file", metavar="FILE", help="let in callers with one of these keys; one per line")
    serve.add_argument(
        "--allow-unauthenticated", action="store_true", default=None, help="let in everybody who reaches --host"
    )
    serve.add_argument("--tls-certificate", metavar="FILE", help="PEM certificate chain: serve TLS only")
    serve.add_argument("--tls-key", metavar="FILE", help="PEM private key of the certificate")
    serve.add_argument("--tls-client-ca", metavar="FILE", help="let in clients with a certificate of these authorities")
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        help="show the merged configuration, and what the engines' settings cost",
        description="Print every setting with its origin, and what the engines say about themselves.",
    )
    _add_configuration(check)
    check.set_defaults(run=_check)

    config = commands.add_parser(
        "config",
        help="print the effective configuration as a file",
        description="Print the effective configuration as YAML that can be used as a file: a place to start from. Comments say "
        "where a value came from that is not the default.",
    )
    _add_configuration(config)
    config.add_argument("--changed", action="store_true", help="only what is not as by default")
    config.set_defaults(run=_config)

    health = commands.add_parser(
        "health",
        help="ask a server whether it serves (exit code 0: yes)",
        description="Ask a server's gRPC health service; needs no API key. Exit code 0: it serves; 1: it does not.",
    )
    health.add_argument("target", nargs="?", default=DEFAULT_TARGET, metavar="HOST:PORT")
    health.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="longest wait (5)")
    _add_tls(health)
    health.set_defaults(run=_health)

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
    submit.add_argument("--server", default=DEFAULT_TARGET, metavar="HOST:PORT")
    _add_key(submit)
    _add_tls(submit)
    submit.add_argument("--run", dest="run_id", required=True, metavar="NAME", help="run the rollouts belong to")
    submit.add_argument("--in-flight", type=int, default=1024, help="lines handed over at a time")
    submit.set_defaults(run=_submit)

    publish = commands.add_parser(
        "publish",
        help="give the engines of a run a policy version",
        description="Publish weights from a folder that the engines' hosts can read, and show how each engine gets on. "
        "The same version again watches it, or tries the engines again that failed.",
    )
    publish.add_argument("run_id", metavar="RUN")
    publish.add_argument("version", type=int, metavar="VERSION", help="above every one published before")
    publish.add_argument("path", metavar="PATH", help="checkpoint folder, as the engines' hosts see it")
    publish.add_argument("--mode", choices=("drain", "abort_and_resume", "retract", "in_place"), help="(retract)")
    publish.add_argument("--cache", choices=("flush", "namespace", "keep"), help="(by the mode)")
    publish.add_argument("--pool", help="pool whose engines get it (policy)")
    publish.add_argument("--engines-at-once", type=int, metavar="N", help="a rolling update (all at once)")
    publish.add_argument("--server", default=DEFAULT_TARGET, metavar="HOST:PORT")
    _add_key(publish)
    _add_tls(publish)
    publish.set_defaults(run=_publish)

    lineage = commands.add_parser(
        "lineage",
        help="sum up a lineage file",
        description="Sum up the files that a server with lineage.path writes: how rollouts ended, how many policy versions "
        "wrote them, how old their tokens were, and which groups are complete.",
    )
    lineage.add_argument("files", nargs="+", type=Path, metavar="FILE")
    lineage.set_defaults(run=_lineage)

    for name, (_, purpose) in APART.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the key to show (default: the environment variable ROLLOUTD_API_KEY)",
    )


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from rolloutd.server.core_build import core_words, release

        print(f"rolloutd {release()} ({core_words()})")
        parser.exit()


def _add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="use TLS; any of the following does as well")
    parser.add_argument("--ca-file", metavar="FILE", help="PEM authorities that the server's certificate is of")
    parser.add_argument("--certificate-file", metavar="FILE", help="PEM certificate to show the server")
    parser.add_argument("--private-key-file", metavar="FILE", help="PEM private key of that certificate")
    parser.add_argument("--server-name", default="", metavar="NAME", help="name in the server's certificate")


def _access(options: argparse.Namespace, key_file: Path | None = None) -> dict[str, Any]:
    """Arguments of rolloutd.client.connect, tried out."""
    from rolloutd.client.access import access_of

    try:
        arguments = {
            "api_key": None if key_file is None else key_file.read_text(encoding="utf-8"),
            "tls": options.tls,
            "ca_file": options.ca_file,
            "certificate_file": options.certificate_file,
            "private_key_file": options.private_key_file,
            "server_name": options.server_name,
        }
        access_of(**arguments)
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {key_file}: {error.strerror or error}") from None
    except ValueError as error:
        where = "" if key_file is None else f"--api-key-file {key_file}: "
        raise ConfigError(f"{where}{error}") from None
    return arguments


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file")
    parser.add_argument("--preset", metavar="NAME", help="start from one of: " + ", ".join(PRESETS))
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
        ("preset", "preset"),
        ("host", "server.host"),
        ("port", "server.port"),
        ("prometheus_port", "server.prometheus_port"),
        ("seed", "server.seed"),
        ("api_keys_file", "server.api_keys_file"),
        ("allow_unauthenticated", "server.allow_unauthenticated"),
        ("tls_certificate", "tls.certificate_file"),
        ("tls_key", "tls.private_key_file"),
        ("tls_client_ca", "tls.client_ca_file"),
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


def _config(options: argparse.Namespace) -> int:
    from rolloutd.server.show_config import show_config

    return show_config(_configuration(options), sys.stdout, changed_only=options.changed)


def _check(options: argparse.Namespace) -> int:
    config = _configuration(options)
    from rolloutd.server.check import check

    return check(config, sys.stdout)


def _submit(options: argparse.Namespace) -> int:
    if options.in_flight < 1:
        raise ConfigError("--in-flight: must be at least 1")
    access = _access(options, options.api_key_file)
    from rolloutd.server.submit import submit

    return submit(options.server, access, options.run_id, options.input, options.output, options.in_flight)


def _publish(options: argparse.Namespace) -> int:
    if options.engines_at_once is not None and options.engines_at_once < 0:
        raise ConfigError("--engines-at-once: must be 0 (all) or more")
    if not 1 <= options.version < 1 << 63:
        raise ConfigError(f"VERSION: is {options.version}; must be from 1 to 2**63 - 1, 0 is what engines came with")
    if not options.path:
        raise ConfigError("PATH: is empty; name a checkpoint folder, as the engines' hosts see it")
    if not options.path.isprintable():
        raise ConfigError(f"PATH: {options.path!r} has characters that cannot be shown, or is not UTF-8")
    access = _access(options, options.api_key_file)
    from rolloutd.server.publish import publish

    words: Any = {
        name: value
        for name in ("mode", "cache", "pool", "engines_at_once")
        if (value := getattr(options, name)) is not None
    }
    return publish(options.server, access, options.run_id, options.version, options.path, words, sys.stdout)


def _lineage(options: argparse.Namespace) -> int:
    from rolloutd.server.lineage_report import report

    return report(options.files, sys.stdout)


def _health(options: argparse.Namespace) -> int:
    if not 0 < options.timeout < 3600:
        raise ConfigError("--timeout: must be a number of seconds above 0")
    from rolloutd.client.access import access_of
    from rolloutd.server.health_probe import probe

    access = _access(options)
    return probe(options.target, access_of(**access), options.timeout)


if __name__ == "__main__":
    raise SystemExit(main())
