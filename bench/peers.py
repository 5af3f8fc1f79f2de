"""`make bench-peers`: rolloutd, sglang-router and smg as real processes in front of the same simulated engines, Q1 to Q4.

Prints a table of figures, the ratios pair by pair, rolloutd and the simple routers against their own virtual time, and in the end
one line of JSON per arm, workload, seed and epoch.

Invariants
- All arms of a workload and seed get the same prompts, lengths and seeds, the same engines and the same time scale, which is
  printed. Every run has processes of its own.
- Every rollout is accounted for exactly once. Exit code 1 where one did not end well, or a run could not be done.
- Where a process came near to the limit of a core, the output says so beside the run and again at its end.

What this module does not know: how anything is scheduled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import uvloop
from rich.console import Console

from rolloutd.bench.arguments import positive
from rolloutd.bench.demo_cpu import CpuMeter
from rolloutd.bench.demo_processes import ChildFailed
from rolloutd.bench.figures import Figures, Limit, figures
from rolloutd.bench.peers_arms import ARMS, PRODUCT, Arm, arms_for
from rolloutd.bench.peers_cpu import BOUND_SHARE, CpuReport
from rolloutd.bench.peers_report import json_line, pair_table, twin_table, verdicts
from rolloutd.bench.peers_stack import STREAM_INTERVAL_TOKENS, fleet_of, running
from rolloutd.bench.peers_trainer import Epoch, Wrong
from rolloutd.bench.quality_report import print_table, print_wide
from rolloutd.bench.scenarios import SCENARIOS
from rolloutd.bench.simulate import Note, Plan, plan_of, progress, simulate
from rolloutd.client import RolloutdError
from rolloutd.server.core_build import core_words

WORKLOADS = ("Q1", "Q2", "Q3", "Q4")
SEEDS = (1,)
# Simulated seconds per real one: as many as leave every process under half a core in its busiest five seconds, on two.
SCALES = {"Q1": 3.0, "Q2": 1.0, "Q3": 3.0, "Q4": 6.0}
DEFAULT_SCALE = 2.0
START_SECONDS = 8.0  # of all processes of a run, two cores
# A router's makespan over rolloutd's, for the estimate of how long everything takes.
ROUTER_LONGER = 1.15


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call compares. scale: simulated seconds per real one, None for each workload's own."""

    workloads: tuple[str, ...] = WORKLOADS
    seeds: tuple[int, ...] = SEEDS
    arms: tuple[str, ...] = ()
    scale: float | None = None
    warm: bool = False

    def scale_of(self, workload: str) -> float:
        return SCALES.get(workload, DEFAULT_SCALE) if self.scale is None else self.scale

    def cells(self) -> list[Cell]:
        """All runs, pair next to pair: the arms of one seed follow each other."""
        return [
            Cell(workload, seed, arm, self.scale_of(workload))
            for workload in self.workloads
            for seed in self.seeds
            for arm in arms_for(workload, self.arms)
        ]

    def plan_for(self, workload: str) -> Plan:
        """What the simulation makes of it: the same epochs, engines and frames."""
        return plan_of([workload, "--stream-interval", str(STREAM_INTERVAL_TOKENS), *(["--warm"] if self.warm else [])])


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    workload: str
    seed: int
    arm: Arm
    scale: float

    @property
    def label(self) -> str:
        return f"{self.workload} seed {self.seed} {self.arm.name}"


@dataclass(slots=True)
class Compared:
    """What came of it all. problems: for the end of the output; any but CPU's make the exit code 1."""

    lines: list[Figures] = field(default_factory=list)
    virtual: list[Figures] = field(default_factory=list)
    cpu_problems: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def measure(cell: Cell, plan: Plan, note: Note | None = None) -> tuple[list[Figures], CpuReport, dict[str, str]]:
    """One run: figures per epoch, how busy everybody was, and what became of rollouts that did not end well.

    Raises ChildFailed, Wrong, RolloutdError, OSError; RuntimeError where a router cannot be installed.
    """
    machines = plan.pool.machines
    lines: list[Figures] = []
    problems: dict[str, str] = {}
    async with running(cell.arm, fleet_of(machines, cell.scale), cell.seed) as up:
        meter = CpuMeter(dict(up.names) | {os.getpid(): "this trainer"})
        watches = [asyncio.create_task(meter.watch()), asyncio.create_task(up.children.until_one_ends())]
        try:
            for number in range(plan.epochs):
                workload = plan.draw(cell.seed, number)
                if number:
                    await up.door.publish(number, up.engine_urls)
                before = await up.counts()
                label = cell.label
                epoch = Epoch(up.door, workload, number, cell.scale, _on_progress(note, label, workload.rollouts))
                serving = asyncio.create_task(epoch.run())
                try:
                    await asyncio.wait((serving, watches[1]), return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done():
                        watches[1].result()
                    record = serving.result()
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
                after = await up.counts()
                record.engine_tokens = {url: after.tokens[url] - before.tokens[url] for url in after.tokens}
                record.prefill_seconds = after.prefill_seconds - before.prefill_seconds
                limit = Limit.of(workload, machines)
                named = replace(workload, name=plan.name)
                line = figures(cell.arm.name, named, cell.seed, number, record, limit, machines)
                lines.append(replace(line, handle_us_per_rollout=None))
                problems |= epoch.problems
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
    return lines, CpuReport.of(meter), problems


def _on_progress(note: Note | None, label: str, total: int) -> Callable[[int], None] | None:
    return None if note is None else lambda back: note(label, back, total)


async def compare(asked: Asked, console: Console, note: Note | None = None) -> Compared:
    """All runs, one after the other; a run that cannot be done is a problem, and the others go on."""
    compared = Compared()
    for workload in asked.workloads:
        plan = asked.plan_for(workload)
        twins = {arm.twin for arm in arms_for(workload, asked.arms)} - {None}
        for seed in asked.seeds:
            for twin in sorted(str(one) for one in twins):
                console.print(f"{workload} seed {seed}: {twin} in virtual time", highlight=False)
                compared.virtual += simulate(plan, twin, seed, note)
    for number, cell in enumerate(cells := asked.cells(), start=1):
        label = cell.label
        try:
            lines, cpu, problems = await measure(cell, asked.plan_for(cell.workload), note)
        except (ChildFailed, Wrong, RolloutdError, OSError, RuntimeError) as error:
            compared.problems.append(f"{label}: {error}")
            console.print(f"[{number}/{len(cells)}] {label}: {error}", style="bold red", markup=False)
            continue
        compared.lines += lines
        for line in lines:
            console.print(
                f"[{number}/{len(cells)}] {label}: {_brief(line)}; {cpu.words()}", markup=False, highlight=False
            )
        for problem in cpu.problems:
            compared.cpu_problems.append(f"{label}: {problem}")
            console.print(f"    CPU CHECK FAILED: {problem}", style="bold red")
        if problems:
            rollout_id, why = next(iter(problems.items()))
            compared.problems.append(f"{label}: {len(problems)} rollouts did not end well, such as {rollout_id}: {why}")
            console.print(f"    {compared.problems[-1]}", style="bold red", markup=False)
    return compared


def _brief(line: Figures) -> str:
    parts = [f"makespan {line.makespan_over_bound} bounds ({line.makespan_seconds:.0f} simulated s)"]
    if line.reward_p99_seconds is not None:
        parts.append(f"critical {line.critical_over_bound}, reward p99 {line.reward_p99_seconds:.2f} s")
    if line.session_mean_seconds is not None:
        parts.append(f"session mean {line.session_mean_seconds:.1f} s")
    return ", ".join([*parts, f"hit {line.prefix_hit} of {line.prefix_hit_ceiling}"])


def estimate_seconds(asked: Asked, bounds: dict[tuple[str, int], float]) -> float:
    """Real seconds that it will take, from the bounds of the workloads (simulated seconds)."""
    epochs = 2 if asked.warm else 1
    return sum(
        START_SECONDS + epochs * ROUTER_LONGER**2 * bounds[cell.workload, cell.seed] / cell.scale
        for cell in asked.cells()
    )


def _say_first(asked: Asked, console: Console) -> None:
    bounds = {}
    for workload in asked.workloads:
        plan = asked.plan_for(workload)
        for seed in asked.seeds:
            bounds[workload, seed] = Limit.of(plan.draw(seed, 0), plan.pool.machines).whole_seconds
    minutes = estimate_seconds(asked, bounds) / 60
    console.print(f"bench-peers: {len(asked.cells())} runs, about {minutes:.0f} minutes", style="bold")
    scales = ", ".join(f"{workload} {asked.scale_of(workload):g}" for workload in asked.workloads)
    console.print(f"time scale (simulated seconds per real one): {scales}; {core_words()}", highlight=False)
    for workload in asked.workloads:
        names = ", ".join(arm.name for arm in arms_for(workload, asked.arms))
        console.print(f"{workload}, seeds {', '.join(map(str, asked.seeds))}: {names}", highlight=False)


def show(compared: Compared) -> None:
    """Tables, what to know about them, and last the lines of JSON; to standard output."""
    out = Console(width=120, highlight=False)
    if compared.lines:
        print_table(compared.lines, sys.stdout)
        print_wide(pair_table(compared.lines), sys.stdout)
        for sentence in verdicts(compared.lines):
            out.print(sentence, markup=False)
        twins = twin_table(compared.lines, compared.virtual)
        if twins is not None:
            print_wide(twins, sys.stdout)
    if compared.cpu_problems:
        out.print(
            f"THE CPU CHECK FAILED for {len(compared.cpu_problems)} cases: the figures of those runs are about this machine as "
            "much as about scheduling. Run on a quiet machine, or with a smaller --scale.",
            style="bold red",
        )
        for problem in compared.cpu_problems:
            out.print(f"  {problem}", markup=False)
    elif compared.lines:
        out.print(f"CPU check passed: no process used more than {BOUND_SHARE:.0%} of a core")
    for problem in compared.problems:
        out.print(f"FAILED: {problem}", style="bold red", markup=False)
    for line in compared.lines:
        print(json_line(line))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 something did not end well, 2 wrong usage."""
    asked = _asked(argv)
    console = Console(stderr=True)
    _say_first(asked, console)
    with progress(True) as note:
        compared = uvloop.run(compare(asked, console, note))
    show(compared)
    return 1 if compared.problems else 0


def _asked(argv: Sequence[str] | None) -> Asked:
    parser = argparse.ArgumentParser(prog="bench-peers", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--workloads", nargs="+", default=WORKLOADS, choices=tuple(SCENARIOS), metavar="NAME", help="(Q1 Q2 Q3 Q4)")
    add("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help=f"({' '.join(map(str, SEEDS))})")
    add("--arms", nargs="+", default=(), choices=tuple(ARMS), metavar="NAME", help=f"of {', '.join(ARMS)}")
    add("--scale", type=positive, help="simulated seconds per real one, for all workloads (each has its own)")
    add("--warm", action="store_true", help="then a second epoch of the same prompts, after a policy version")
    add("--quick", action="store_true", help="Q1 and Q2 with one seed and two routers: a look, not a result")
    options = parser.parse_args(argv)
    if options.quick:
        quick = (PRODUCT, "sglang-router:cache_aware", "smg:cache_aware")
        return Asked(("Q1", "Q2"), (1,), quick, options.scale, options.warm)
    asked = Asked(tuple(options.workloads), tuple(options.seeds), tuple(options.arms), options.scale, options.warm)
    for workload in asked.workloads:
        if not arms_for(workload, asked.arms):
            parser.error(f"--arms: none of {', '.join(asked.arms)} is for {workload}")
    return asked


if __name__ == "__main__":
    raise SystemExit(main())
