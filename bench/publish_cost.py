"""`make bench-publish`: how long engines stand still for a new policy version, and what expiring the old one costs.

The last line is one JSON object: `gap_ms_p99_by_mode`, `aborted_by_mode`, `expire_ms`, `sweep_slice_max_ms`, and what they rest on.
`publish_gaps` and `publish_expiry` say how the figures are taken.

What this module does not know: how they are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from rich.console import Console
from rich.table import Table

from rolloutd.bench import publish_expiry, publish_gaps
from rolloutd.bench.publish_gaps import Gaps

PUBLISHES = 10
DRAINS = 2
REPEATS = 3
GAP_BAR_MS = 50.0
BARRED = ("retract", "in_place", "abort_and_resume")
BARS = {
    "gap_ms_p99_by_mode": f"{', '.join(BARRED)}: < {GAP_BAR_MS:g}",
    "aborted_by_mode": "retract, in_place: 0",
    "expire_ms": "< 1",
    "sweep_slice_max_ms": "< 2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of publishing a policy version")
    parser.add_argument("--publishes", type=int, default=PUBLISHES, help="in each mode but drain")
    parser.add_argument("--drains", type=int, default=DRAINS)
    parser.add_argument("--scale", type=float, default=1.0, help="of the index that expires; 1: a million pages")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of the expiry; the best counts")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        expiry = pool.submit(publish_expiry.best, arguments.scale, arguments.repeats).result()
    gaps = asyncio.run(publish_gaps.measure(arguments.publishes, arguments.drains))
    figures = {
        "gap_ms_p99_by_mode": _by_mode(gaps, 99),
        "aborted_by_mode": gaps.aborted,
        "expire_ms": round(expiry.declare_ms, 3),
        "sweep_slice_max_ms": round(max(expiry.slices_ms), 3),
        "gap_ms_p50_by_mode": _by_mode(gaps, 50),
        "rest_ms_p50_by_mode": {
            mode: round(float(np.median(rests)) * 1e3, 1) for mode, rests in gaps.rests_seconds.items()
        },
        "publications_by_mode": {mode: len(taken) // publish_gaps.ENGINES for mode, taken in gaps.gaps_seconds.items()},
        "rollouts_finished": gaps.finished,
        "cpu_share_by_process": {name: round(share, 2) for name, share in gaps.cpu_shares.items()},
        "expired_pages": expiry.pages,
        "publish_event_max_ms": round(expiry.event_max_ms, 3),
        "sweeps": len(expiry.slices_ms),
    }
    table = Table("figure", "value", "bar")
    for name, value in figures.items():
        table.add_row(name, json.dumps(value).replace('"', "").strip("{}"), BARS.get(name, ""))
    Console(width=140).print(table)
    print(json.dumps(figures))


def _by_mode(gaps: Gaps, percentile: int) -> dict[str, float]:
    return {mode: round(float(np.percentile(taken, percentile)) * 1e3, 1) for mode, taken in gaps.gaps_seconds.items()}


if __name__ == "__main__":
    main()
