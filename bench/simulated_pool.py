"""The engines of a simulation, from the command line.

Invariants
- Engines differ in speed only; slots, memory and context are the same for all.
- Tokens are fillers (see `MachineConfig.write_tokens`): nobody looks at them, and a thousand engines would spend most of the time
  on writing them.

What this module does not know: what they are asked to do.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import CURVES, TimingModel
from rolloutd.server.config_keys import ConfigError

MOST_ENGINES = 4_096


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """A real engine, as `rolloutd calibrate` found it: its speed, and its sizes by its own word."""

    timing: TimingModel
    slots: int
    kv_tokens: int
    page_size_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One machine per engine."""

    machines: list[MachineConfig]

    @property
    def context_tokens(self) -> int:
        return self.machines[0].context_tokens


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that replace what a workload is meant for."""
    group = parser.add_argument_group("engines (the fitted engine's own where not given, or the workload's)")
    group.add_argument("--engines", type=int, metavar="N")
    group.add_argument("--slots", type=int, metavar="N", help="sequences that run at a time, per engine")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="KV cache, per engine")
    group.add_argument("--context-tokens", type=int, metavar="N")
    group.add_argument("--curve", choices=CURVES, help="decode step over batch size (flat)")
    group.add_argument("--prefill-tokens-per-second", type=float, metavar="N", help="(20000)")
    group.add_argument(
        "--slowdowns", metavar="F,F,...", help="factors on the time of each engine in turn, such as 1,1,1,2 (1)"
    )
    group.add_argument("--fitted", type=Path, metavar="FILE", help="an engine measured by `rolloutd calibrate`")
    group.add_argument(
        "--stream-interval", type=int, default=32, metavar="N", help="tokens between two reports of an engine (32)"
    )


def pool_of(options: argparse.Namespace, engines: int, slots: int, kv_tokens: int, context_tokens: int) -> Pool:
    """The engines that the flags ask for, over those of `--fitted`, over these defaults. Raises ConfigError.

    The context is part of the workload: a fitted engine makes it shorter where it can hold no more, and never longer.
    """
    count = engines if options.engines is None else options.engines
    if not 1 <= count <= MOST_ENGINES:
        raise ConfigError(f"--engines: {count} must be between 1 and {MOST_ENGINES}")
    default = MachineConfig(slots=slots, kv_tokens=kv_tokens, context_tokens=context_tokens)
    if options.fitted is not None:
        fitted = read_fitted(options.fitted)
        default = _machine_of(fitted, min(context_tokens, fitted.context_tokens))
    try:
        machine = replace(
            default,
            slots=default.slots if options.slots is None else options.slots,
            kv_tokens=default.kv_tokens if options.kv_tokens is None else options.kv_tokens,
            context_tokens=default.context_tokens if options.context_tokens is None else options.context_tokens,
            stream_interval=options.stream_interval,
            timing=_timing(options, default.timing),
            write_tokens=False,
        )
        factors = [1.0] if options.slowdowns is None else [float(one) for one in options.slowdowns.split(",")]
        machines = [
            replace(machine, timing=replace(machine.timing, slowdown=factors[number % len(factors)]))
            for number in range(count)
        ]
    except ValueError as error:
        raise ConfigError(f"engines: {error}") from None
    return Pool(machines)


def _machine_of(fitted: FittedEngine, context_tokens: int) -> MachineConfig:
    try:
        return MachineConfig(
            slots=fitted.slots,
            kv_tokens=fitted.kv_tokens,
            page_size_tokens=fitted.page_size_tokens,
            context_tokens=context_tokens,
            timing=fitted.timing,
        )
    except ValueError as error:
        raise ConfigError(f"--fitted: {error}") from None


def _timing(options: argparse.Namespace, timing: TimingModel) -> TimingModel:
    if options.curve is not None:
        timing = replace(timing, curve=options.curve, base_seconds=None, growth=None)
    if options.prefill_tokens_per_second is not None:
        timing = replace(timing, prefill_tokens_per_second=options.prefill_tokens_per_second)
    return timing


def read_fitted(path: Path) -> FittedEngine:
    """What `rolloutd calibrate` wrote. Raises ConfigError for a file that is not that, OSError for one that cannot be read."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        timing = TimingModel(
            curve=fields["curve"],
            prefill_tokens_per_second=fields["prefill_tokens_per_second"],
            base_seconds=fields["base_seconds"],
            growth=fields["growth"],
        )
        sizes = {name: fields[name] for name in ("slots", "kv_tokens", "page_size_tokens", "context_tokens")}
        for name, size in sizes.items():
            if not isinstance(size, int):
                raise ValueError(f"{name} is {size!r}; it must be a whole number")
        return FittedEngine(timing, **sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--fitted: {path} is not what `rolloutd calibrate` writes: {error}") from None
