"""`rolloutd simulate WORKLOAD`: the production core, and control arms beside it, over simulated engines in virtual time.

Prints one aligned table (mean and spread over seeds), then one line of JSON per arm, workload, seed and epoch.

Invariants
- All arms of one call see the same engines, workloads and seeds; the same call prints the same figures (but for CPU times).
- A bad argument is refused before anything runs, with the flag and what it takes.

What this module does not know: how anything is scheduled, and what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from rolloutd.bench import over_launch
from rolloutd.bench.arms import ARMS
from rolloutd.bench.figures import Figures, Limit, figures
from rolloutd.bench.mooncake import TraceError, read_mooncake
from rolloutd.bench.quality_report import json_line, print_table
from rolloutd.bench.scenarios import Q1, SCENARIOS, Scenario
from rolloutd.bench.simulated import RUN_ID, Epochs
from rolloutd.bench.simulated_pool import Pool, add_pool_arguments, pool_of
from rolloutd.bench.training_loop import LOOPS, STEPS, TrainingLoop, loop_figures
from rolloutd.bench.virtual_core import Core
from rolloutd.bench.workload import Limits, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.views import RunView
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError

PRODUCT = "rolloutd"
MOST_SEEDS = 1_000
# An arm looks at the ends of attempts only, so its engines need not tell of every few tokens.
QUIET_STREAM_INTERVAL = 1 << 20

Draw = Callable[[int, int], Workload]  # (seed, epoch)
Note = Callable[[str, int, int], None]  # (what runs, rollouts back, rollouts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call simulates. says_steps: of a training loop, whether the trainer says which step needs its work of the next one."""

    name: str
    draw: Draw
    pool: Pool
    epochs: int
    config: SchedulerConfig
    steps: int = 0  # of a training loop; 0: no loop
    scale: int = 1
    says_steps: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        plan = _plan(options)
        arms = _arms(options.arm)
        seeds = _seeds(options)
        if options.over_launch is not None:
            return _over_launch(plan, arms, seeds, options)
        with progress(not options.json) as note:
            lines = [line for seed in seeds for arm in arms for line in simulate(plan, arm, seed, note)]
    except (ConfigError, TraceError, OSError, ValueError) as error:
        print(f"rolloutd simulate: {error}", file=sys.stderr)
        return 1
    if not options.json:
        print_table(lines, sys.stdout)
    for line in lines:
        print(json_line(line))
    return 0


def simulate(plan: Plan, arm: str, seed: int, note: Note | None = None) -> Iterator[Figures]:
    """One arm on one seed: its epochs, one after the other in the same scheduler, with a policy version between them."""
    machines = plan.pool.machines
    if arm != PRODUCT:
        machines = [replace(machine, stream_interval=QUIET_STREAM_INTERVAL) for machine in machines]
    epochs = Epochs(core_of(arm, seed, _roomy(plan)), machines)
    if plan.steps:
        yield _train(plan, arm, seed, epochs, machines, note)
        return
    for epoch in range(plan.epochs):
        workload = plan.draw(seed, epoch)
        limit = Limit.of(workload, machines)
        if epoch:
            epochs.publish()
        doing = f"{plan.name} {arm} seed {seed}" + (f" epoch {epoch}" if plan.epochs > 1 else "")
        total = workload.rollouts
        record = epochs.run(
            workload,
            epoch,
            None if note is None else lambda back, of=doing, all=total: note(of, back, all),  # type: ignore[misc]
        )
        yield figures(arm, replace(workload, name=plan.name), seed, epoch, record, limit, machines)


def _over_launch(plan: Plan, arms: Sequence[str], seeds: Sequence[int], options: argparse.Namespace) -> int:
    """Exact groups and larger ones of which as many are kept, seed by seed."""
    factor = options.over_launch
    scenario = SCENARIOS.get(options.workload)
    if not 1.0 < factor <= over_launch.MOST_FACTOR:
        raise ConfigError(f"--over-launch: {factor:g} must be above 1 and at most {over_launch.MOST_FACTOR:g}")
    if scenario is None:
        raise ConfigError(f"--over-launch: needs a workload with groups, one of {', '.join(SCENARIOS)}")
    if list(arms) != [PRODUCT]:
        raise ConfigError(f"--over-launch: the arms keep all that they launch; leave --arm out or give {PRODUCT}")
    lines = [line for seed in seeds for line in _both_ways(plan, scenario, seed, factor)]
    if not options.json:
        over_launch.print_over_launch(lines, sys.stdout)
    for line in lines:
        print(over_launch.json_line(line))
    return 0


def _both_ways(plan: Plan, scenario: Scenario, seed: int, factor: float) -> list[over_launch.OverLaunchFigures]:
    exact, more = (Scheduler(_roomy(plan), random.Random(seed), 0.0) for _ in range(2))
    exact_epochs, more_epochs = Epochs(exact, plan.pool.machines), Epochs(more, plan.pool.machines)

    def draw(epoch: int) -> tuple[Workload, Workload]:
        workload = plan.draw(seed, epoch)
        return workload, over_launch.launch_more(workload, scenario.traffic, seed, epoch, factor)

    def run_view() -> RunView | None:
        return more.run_view(RUN_ID, more_epochs.simulation.now)

    return over_launch.compare(seed, plan.epochs, factor, exact_epochs, more_epochs, draw, run_view)


def _roomy(plan: Plan) -> SchedulerConfig:
    """Settings with queues that take a larger workload at once, as a trainer that submits so much would have them."""
    queue = plan.config.queue
    roomy = replace(
        queue,
        queue_capacity=queue.queue_capacity * plan.scale,
        queue_capacity_bytes=queue.queue_capacity_bytes * plan.scale,
    )
    return replace(plan.config, queue=roomy)


def _train(
    plan: Plan, arm: str, seed: int, epochs: Epochs, machines: Sequence[MachineConfig], note: Note | None
) -> Figures:
    off = plan.name == LOOPS[1]
    vocabulary = machines[0].model.vocabulary_size
    loop = TrainingLoop(
        epochs, seed, vocabulary, steps=plan.steps, off=off, scale=plan.scale, says_steps=plan.says_steps
    )
    loop.run(None if note is None else lambda done: note(f"{plan.name} {arm} seed {seed}", done, plan.steps))
    return loop_figures(arm, plan.name, seed, loop, machines)


def plan_of(argv: Sequence[str]) -> Plan:
    """What a command line asks for, but for arms and seeds. Raises as `main` reports."""
    return _plan(_parser().parse_args(argv))


def core_of(arm: str, seed: int, config: SchedulerConfig) -> Core:
    """The production core, or a control arm by name."""
    return Scheduler(config, random.Random(seed), 0.0) if arm == PRODUCT else ARMS[arm]()


class progress:
    """Shows what runs on standard error, where that is a terminal."""

    def __init__(self, wanted: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            *Progress.get_default_columns()[1:3],
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._bar.add_task("")

    def __enter__(self) -> Note:
        self._bar.start()
        return self._note

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _note(self, doing: str, back: int, total: int) -> None:
        self._bar.update(self._task, description=doing, completed=back, total=total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolloutd simulate",
        description="Serve a workload on simulated engines in virtual time and print how near each way to schedule comes to the "
        "bound that nobody can beat.",
    )
    parser.add_argument(
        "workload",
        metavar="WORKLOAD",
        help=", ".join(f"{one.name} ({one.title})" for one in SCENARIOS.values())
        + f", {LOOPS[0]} (a loop of Q1 steps), {LOOPS[1]} (one step off-policy), or a file in Mooncake's JSONL format",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="one seed (0)")
    parser.add_argument("--seeds", metavar="A-B", help="several, such as 0-9")
    parser.add_argument(
        "--arm",
        action="append",
        metavar="NAME",
        help=f"{PRODUCT} (default), {', '.join(ARMS)}, or all; may be repeated",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="then a second epoch of the same prompts after a policy version: only what was learnt of lengths carries over",
    )
    parser.add_argument(
        "--over-launch",
        type=float,
        metavar="FACTOR",
        help="launch so many times as many samples per prompt (such as 1.25) and keep the first to complete: what that gains, and "
        "which lengths it favours",
    )
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="times as many prompts (1)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of a training loop ({STEPS})")
    parser.add_argument("--rate", type=float, default=1.0, help="of a file: times as fast (1)")
    parser.add_argument("--requests", type=int, default=2_000, metavar="N", help="of a file: at most so many (2000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the scheduler, as of `rolloutd serve`")
    parser.add_argument("--json", action="store_true", help="print the lines of JSON only")
    add_pool_arguments(parser)
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    if options.scale < 1:
        raise ConfigError(f"--scale: {options.scale} must be at least 1")
    config = load_config(options.config, os.environ, {}).scheduler
    epochs = 2 if options.warm else 1
    if options.workload in LOOPS:
        if options.steps < 1:
            raise ConfigError(f"--steps: {options.steps} must be at least 1")
        pool = pool_of(options, Q1.engines, Q1.slots, Q1.kv_tokens, Q1.context_tokens)
        return Plan(options.workload, _no_epochs, pool, 1, config, options.steps, options.scale)
    scenario = SCENARIOS.get(options.workload)
    if scenario is not None:
        pool = pool_of(options, scenario.engines, scenario.slots, scenario.kv_tokens, scenario.context_tokens)
        scenario = replace(scenario, context_tokens=pool.context_tokens)
        vocabulary = pool.machines[0].model.vocabulary_size
        return Plan(
            scenario.name,
            lambda seed, epoch: scenario.draw(seed, vocabulary, epoch=epoch, scale=options.scale),
            pool,
            epochs,
            config,
            scale=options.scale,
        )
    path = Path(options.workload)
    if not path.is_file():
        raise ConfigError(
            f"WORKLOAD: {options.workload!r} is neither a file nor one of {', '.join((*SCENARIOS, *LOOPS))}"
        )
    pool = pool_of(options, engines=8, slots=32, kv_tokens=750_000, context_tokens=131_072)
    limits = Limits(pool.machines[0].model.vocabulary_size, pool.context_tokens)
    return Plan(
        path.name,
        lambda seed, epoch: read_mooncake(
            path, seed, limits, most_requests=options.requests, rate=options.rate, epoch=epoch
        ),
        pool,
        epochs,
        config,
    )


def _no_epochs(seed: int, epoch: int) -> Workload:
    raise AssertionError("a training loop draws its own steps")


def _arms(names: Sequence[str] | None) -> list[str]:
    known = [PRODUCT, *ARMS]
    wanted = [part for name in names or [PRODUCT] for part in name.split(",")]
    if "all" in wanted:
        return known
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--arm: {name!r} is not one of {', '.join(known)} or all")
    return list(dict.fromkeys(wanted))


def _seeds(options: argparse.Namespace) -> list[int]:
    if options.seed is not None and options.seeds is not None:
        raise ConfigError("--seed and --seeds: give one of them")
    if options.seeds is None:
        return [options.seed or 0]
    first, dash, last = options.seeds.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ConfigError(f"--seeds: {options.seeds!r} must be A-B with whole numbers, such as 0-9")
    seeds = list(range(int(first), int(last or first) + 1))
    if not 1 <= len(seeds) <= MOST_SEEDS:
        raise ConfigError(f"--seeds: {options.seeds!r} names {len(seeds)} seeds; between 1 and {MOST_SEEDS} are taken")
    return seeds


if __name__ == "__main__":
    raise SystemExit(main())
