"""What the benchmarks last printed here, for the report.

Invariants
- Nothing is invented: a file that is not there, did not come to its end, or is of another version is missing, with the reason and
  the command that makes it. So is what `quality` has not run of its arms and workloads.
- Lines of figures are what `quality_report.json_line` and `peers_report.json_line` wrote; the others are one JSON object, last.

What this module does not know: what the figures mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rolloutd.bench.arms import ARMS
from rolloutd.bench.cost_table import FOLDER, last_line
from rolloutd.bench.figures import Figures
from rolloutd.bench.quality import WORKLOADS
from rolloutd.bench.simulate import PRODUCT

LINES = ("quality", "loop", "peers")  # files with one line of figures per arm, workload, seed and epoch
# Files with one object, and the keys that the report reads beyond what it can do without.
OBJECTS: Mapping[str, tuple[str, ...]] = {
    "core": (),
    "index": (),
    "overhead": (),
    "leaks": (),
    "publish": (),
    "scale": ("rollouts", "us_per_rollout", "us_per_decision", "makespan_over_bound", "us_per_rollout_by_event"),
    "mix": (
        "window",
        "seeds",
        "rounding_points",
        "in_order_of_mix_points",
        "mean_points",
        "worst_points",
        "dispatched_points",
        "makespan_seconds",
        "samples_per_second",
        "held_seconds",
    ),
    "ablation": ("seeds", "rows", "variants", "measured_elsewhere"),
}
_KNOWN = {one.name for one in fields(Figures)}
_VERDICT = re.compile(r"(\w+), (cold|warm), against ([\w-]+)'s best \([^)]*\):")
_SESSION_MEAN = re.compile(r"session mean \w+ \(([\d.]+) x")
_NEEDED = ("arm", "workload", "seed", "epoch")


@dataclass(slots=True)
class Inputs:
    """lines: per benchmark. objects: the last line of the others. made: when each was printed (UTC). missing: name -> why."""

    lines: dict[str, list[Figures]] = field(default_factory=dict)
    objects: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sessions: dict[tuple[str, int, str], float] = field(default_factory=dict)  # see `session_ratios`
    made: dict[str, datetime] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[Figures]:
        """Lines of a benchmark; none where it is missing."""
        return self.lines.get(name, [])


def command(name: str) -> str:
    """What makes it."""
    return f"make bench-{name}"


def read_inputs(folder: Path = FOLDER) -> Inputs:
    """Everything that is there."""
    found = Inputs()
    for name in (*LINES, *OBJECTS):
        path = folder / f"{name}.txt"
        if not path.is_file():
            found.missing[name] = "has not run here"
            continue
        text = path.read_text(encoding="utf-8")
        try:
            if name in LINES:
                found.lines[name] = figure_lines(text)
                if name == "peers":
                    found.sessions = session_ratios(text)
                if name == "quality" and (lacking := lacking_arms(found.lines[name])):
                    found.missing[name] = f"has not run {lacking}"
            else:
                found.objects[name] = _object(text, OBJECTS[name])
        except ValueError as error:
            found.missing[name] = str(error)
            continue
        found.made[name] = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return found


def figure_lines(text: str) -> list[Figures]:
    """The figures at the end of an output. Raises ValueError where there are none, or they are of another version."""
    found = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            values = json.loads(line)
        except ValueError:
            raise ValueError("its last run broke off in the middle of a line") from None
        if not all(key in values for key in _NEEDED):
            continue
        if unknown := sorted(values.keys() - _KNOWN):
            raise ValueError(f"its output is of another version ({', '.join(unknown)})")
        found.append(Figures(**values))
    if not found:
        raise ValueError("its last run did not come to its end")
    return found


def lacking_arms(lines: Sequence[Figures]) -> str:
    """Of all arms and workloads of `make bench-quality`, those without a line, in words; empty where none is missing."""
    there = {(line.arm, line.workload) for line in lines}
    parts = []
    for arm in (PRODUCT, *ARMS):
        lacking = [workload for workload in WORKLOADS if (arm, workload) not in there]
        if lacking:
            parts.append(arm if len(lacking) == len(WORKLOADS) else f"{arm} on {', '.join(lacking)}")
    return "; ".join(parts)


def session_ratios(text: str) -> dict[tuple[str, int, str], float]:
    """(workload, epoch, package) -> our mean session over that of the package's best policy, from `peers_report.verdicts`.

    The lines of JSON do not have it: their keys are fixed. Sentences may be broken into lines.
    """
    parts = _VERDICT.split(" ".join(text.split()))
    found = {}
    for workload, epoch, package, body in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
        if ratio := _SESSION_MEAN.search(body):
            found[workload, int(epoch == "warm"), package] = float(ratio[1])
    return found


def _object(text: str, needed: Sequence[str]) -> Mapping[str, Any]:
    found = last_line(text)
    if found is None:
        raise ValueError("its last run did not come to its end")
    if absent := [key for key in needed if key not in found]:
        raise ValueError(f"its output is of another version (without {', '.join(absent)})")
    return found
