"""W1 on the production core in virtual time: `python -m rolloutd.bench.virtual_w1` prints one row per seed.

Four engines of 32 slots with 200,000 KV tokens, flat decode curve, 20,000 prefill tokens per second; the trainer waits. First
the critical rollouts alone, then the step of the demonstration (reusable, background and reward traffic beside them). Targets of
the demonstration: `critical_over_bound` at most 1.30 in every run, reward wait p99 under 2 s.

What this module does not know: training phases and further steps (the demonstration has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from rolloutd.bench.bounds import EngineShape, bound
from rolloutd.bench.metrics import waits_seconds
from rolloutd.bench.virtual import WorkloadRun, run_workload
from rolloutd.bench.w1 import demo_step, w1
from rolloutd.bench.workload import Kind, Limits, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.config import SchedulerConfig

ENGINES = 4
SEEDS = 5
WORKLOADS: dict[str, Callable[[int, Limits], Workload]] = {"w1": w1, "demo_step": demo_step}


def critical_over_bound(workload: Workload, run: WorkloadRun, machine: MachineConfig, engines: int) -> float:
    """When the last critical rollout was back, in lower bounds of the critical rollouts alone."""
    shape = EngineShape(machine.timing, machine.slots, machine.kv_tokens, machine.page_size_tokens)
    least = bound(workload.of_kind(Kind.CRITICAL), [shape] * engines).seconds
    ends = [one.delivered_seconds for one in run.records if one.kind is Kind.CRITICAL]
    return max(end for end in ends if end is not None) / least


def main() -> None:
    parser = argparse.ArgumentParser(description="W1 on the production core in virtual time")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many seeds, from 0 (default {SEEDS})")
    arguments = parser.parse_args()
    machine = MachineConfig()
    table = Table(
        "workload", "seed", "over bound", "reward p99 s", "prefix hit", "wrong tokens", "us/rollout", "us/event"
    )
    for name, make in WORKLOADS.items():
        for seed in range(arguments.seeds):
            workload = make(seed, Limits(machine.model.vocabulary_size, machine.context_tokens))
            run = run_workload(workload, [machine] * ENGINES, SchedulerConfig(), seed)
            reward = waits_seconds(run.records, 99)[Kind.REWARD.value]
            table.add_row(
                name,
                str(seed),
                f"{critical_over_bound(workload, run, machine, ENGINES):.3f}",
                "-" if reward is None else f"{reward:.3f}",
                f"{sum(one.cached_tokens for one in run.records) / sum(one.prompt_tokens for one in run.records):.3f}",
                str(sum(one.wrong_tokens for one in run.records)),
                f"{run.handle_microseconds_per_rollout:.0f}",
                f"{run.handle_seconds * 1e6 / run.events:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
