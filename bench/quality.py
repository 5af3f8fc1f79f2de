"""`make bench-quality`: the production core and every control arm on Q1 to Q4, cold and warm, over ten seeds.

`make bench-loop` runs the training loops, Q5 and Q5-off, over fewer seeds.

Prints a table per workload as soon as it is done (mean and one standard deviation over the seeds), then one line of JSON per arm,
workload, seed and epoch.

Invariants
- What `rolloutd simulate WORKLOAD --warm --arm all --seeds 0-9` prints of each, from the same code.

What this module does not know: what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rolloutd.bench.arms import ARMS
from rolloutd.bench.figures import Figures
from rolloutd.bench.quality_report import json_line, print_table
from rolloutd.bench.scenarios import SCENARIOS
from rolloutd.bench.simulate import PRODUCT, plan_of, progress, simulate
from rolloutd.bench.training_loop import LOOPS, STEPS

WORKLOADS = ("Q1", "Q1s", "Q2", "Q3", "Q4")
SEEDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="bench-quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many, from 0 (default {SEEDS})")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=(*SCENARIOS, *LOOPS), metavar="NAME")
    parser.add_argument("--arms", nargs="+", default=(PRODUCT, *ARMS), choices=(PRODUCT, *ARMS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a training loop (default {STEPS})")
    options = parser.parse_args(argv)
    lines: list[Figures] = []
    with progress(True) as note:
        for name in options.workloads:
            plan = plan_of([name, "--steps", str(options.steps), *([] if name in LOOPS else ["--warm"])])
            of_workload = [
                line
                for seed in range(options.seeds)
                for arm in options.arms
                for line in simulate(plan, arm, seed, note)
            ]
            print_table(of_workload, sys.stdout)
            sys.stdout.flush()
            lines += of_workload
    for line in lines:
        print(json_line(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
