"""`make bench-scale`: what the core costs per rollout on 1,000 engines with 100,000 rollouts, beside the same load on 64.

Q1's maths, as many rollouts per engine on either pool, all there at once, in virtual time. Counted is the CPU of everything in
`Scheduler.handle` from submission to delivery and acknowledgement; a decision is a dispatch. The last line is JSON.

Invariants
- The pools differ in the number of engines and, with it, of rollouts; engines, settings and lengths' distribution are the same.
- Garbage is collected as the server does it, and what reading the clock costs is taken off.

What this module does not know: how the core decides.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from rolloutd.bench.arguments import positive_int
from rolloutd.bench.figures import Limit
from rolloutd.bench.scenarios import Q1, Scenario
from rolloutd.bench.simulate import progress
from rolloutd.bench.simulated import Epochs, clock_seconds
from rolloutd.bench.w1 import MATH
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.actions import Action, Dispatch
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import Event
from rolloutd.scheduler.machine import Scheduler
from rolloutd.server.core_build import core_words
from rolloutd.server.garbage import Garbage

ENGINES, FEW_ENGINES = 1_000, 64
ROLLOUTS_PER_ENGINE = 100
STREAM_INTERVAL_TOKENS = 32  # between two reports of an engine about a rollout, as `rolloutd simulate` has it
BAR_US_PER_ROLLOUT = 100.0
BAR_RATIO = 2.0  # cost of a decision over that on `FEW_ENGINES`

Handle = Callable[[Event, float], list[Action]]
Note = Callable[[str, int, int], None]


class HandleMeter:
    """CPU seconds inside `handle` by kind of event, and what was decided."""

    def __init__(self, handle: Handle) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: defaultdict[str, int] = defaultdict(int)
        self.dispatches = 0
        self._handle = handle
        self._clock_seconds = clock_seconds()

    def __call__(self, event: Event, now: float) -> list[Action]:
        started = time.thread_time()
        actions = self._handle(event, now)
        name = type(event).__name__
        self.seconds[name] += time.thread_time() - started - self._clock_seconds
        self.events[name] += 1
        self.dispatches += sum(isinstance(action, Dispatch) for action in actions)
        return actions


@dataclass(frozen=True, slots=True)
class PoolCost:
    """One pool. us: microseconds of CPU. by_event: per rollout. makespan_over_bound: that it was scheduled well, too."""

    engines: int
    rollouts: int
    us_per_rollout: float
    us_per_decision: float
    schedule_us_per_decision: float
    by_event: dict[str, float]
    makespan_over_bound: float
    wall_seconds: float


def measure(engines: int, rollouts: int, *, stream_interval: int, seed: int = 0, note: Note | None = None) -> PoolCost:
    """Serve so many rollouts (whole groups) on so many engines."""
    scenario = scenario_of(engines, rollouts)
    machine = MachineConfig(
        slots=scenario.slots,
        kv_tokens=scenario.kv_tokens,
        context_tokens=scenario.context_tokens,
        stream_interval=stream_interval,
        write_tokens=False,
    )
    workload = scenario.draw(seed, machine.model.vocabulary_size)
    machines = [machine] * engines
    default = SchedulerConfig()
    queue = replace(default.queue, queue_capacity=max(default.queue.queue_capacity, workload.rollouts))
    scheduler = Scheduler(replace(default, queue=queue), random.Random(seed), 0.0)
    epochs = Epochs(scheduler, machines)
    meter = HandleMeter(scheduler.handle)
    epochs.simulation.handle = meter
    total = workload.rollouts
    doing = f"{engines:,} engines"
    garbage = Garbage(is_quiet=lambda: False)
    garbage.start()
    started = time.perf_counter()
    try:
        record = epochs.run(workload, 0, None if note is None else lambda back: note(doing, back, total))
    finally:
        garbage.stop()
    if record.failed:
        raise AssertionError(f"{len(record.failed)} of {total} rollouts did not end well")
    seconds = sum(meter.seconds.values())
    return PoolCost(
        engines=engines,
        rollouts=total,
        us_per_rollout=round(seconds * 1e6 / total, 1),
        us_per_decision=round(seconds * 1e6 / meter.dispatches, 1),
        schedule_us_per_decision=round(meter.seconds["Tick"] * 1e6 / meter.dispatches, 1),
        by_event={
            name: round(of * 1e6 / total, 1) for name, of in sorted(meter.seconds.items(), key=lambda one: -one[1])
        },
        makespan_over_bound=round(record.seconds / Limit.of(workload, machines).whole_seconds, 4),
        wall_seconds=round(time.perf_counter() - started, 1),
    )


def scenario_of(engines: int, rollouts: int) -> Scenario:
    """Q1 with so many rollouts, in whole groups."""
    return Scenario("scale", Q1.title, (replace(MATH, groups=max(1, rollouts // MATH.samples)),), engines=engines)


def summary(pools: Sequence[PoolCost]) -> dict[str, object]:
    """The last line; objects are keyed by the number of engines. The first pool is what the last is compared with."""
    few, many = pools[0], pools[-1]
    return {
        "core": core_words(),
        "rollouts": {str(one.engines): one.rollouts for one in pools},
        "us_per_rollout": {str(one.engines): one.us_per_rollout for one in pools},
        "us_per_decision": {str(one.engines): one.us_per_decision for one in pools},
        "decision_ratio": round(many.us_per_decision / few.us_per_decision, 3),
        "schedule_us_per_decision": {str(one.engines): one.schedule_us_per_decision for one in pools},
        "us_per_rollout_by_event": {str(one.engines): one.by_event for one in pools},
        "makespan_over_bound": {str(one.engines): one.makespan_over_bound for one in pools},
        "wall_seconds": {str(one.engines): one.wall_seconds for one in pools},
    }


def table(pools: Sequence[PoolCost]) -> Table:
    """One row per pool."""
    grid = Table(title=f"CPU inside handle(), microseconds; {core_words()}", title_justify="left")
    for heading in (
        "engines",
        "rollouts",
        "per rollout",
        "per decision",
        "of it scheduling",
        "makespan / bound",
        "wall s",
    ):
        grid.add_column(heading, justify="right")
    for one in pools:
        cells = (one.us_per_rollout, one.us_per_decision, one.schedule_us_per_decision)
        grid.add_row(
            f"{one.engines:,}",
            f"{one.rollouts:,}",
            *(f"{cell:.1f}" for cell in cells),
            f"{one.makespan_over_bound:.3f}",
            f"{one.wall_seconds:.0f}",
        )
    by_event = "; ".join(f"{name} {of:.1f}" for name, of in pools[-1].by_event.items() if of >= 0.05)
    grid.caption = f"per rollout on {pools[-1].engines:,} engines by event: {by_event}"
    grid.caption_justify = "left"
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="bench-scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=positive_int, default=ENGINES, help=f"of the large pool (default {ENGINES})")
    parser.add_argument("--few", type=positive_int, default=FEW_ENGINES, help=f"of the other (default {FEW_ENGINES})")
    parser.add_argument(
        "--rollouts", type=positive_int, help=f"on the large pool (default {ROLLOUTS_PER_ENGINE} per engine)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stream-interval", type=positive_int, default=STREAM_INTERVAL_TOKENS, metavar="TOKENS")
    options = parser.parse_args(argv)
    most = options.rollouts or ROLLOUTS_PER_ENGINE * options.engines
    with progress(True) as note:
        pools = [
            measure(
                engines,
                most * engines // options.engines,
                stream_interval=options.stream_interval,
                seed=options.seed,
                note=note,
            )
            for engines in (options.few, options.engines)
        ]
    Console(file=sys.stdout, width=120).print(table(pools))
    print(json.dumps(summary(pools)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
