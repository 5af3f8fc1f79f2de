"""`make bench-ablation`: each mechanism switched off, on the workloads where it should matter, seed by seed.

Prints how much worse each figure is without the mechanism (mean of the differences off - on, ± their standard deviation over the
seeds), and whether that is more than the seeds explain. The last line is JSON.

Invariants
- On and off see the same engines, prompts, lengths, seeds and ties' random numbers; only the mechanism's settings, or what the
  trainer says for it, differ.
- "Worse" is positive: of figures where more is better the sign is turned.

What this module does not know: how mechanisms work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.table import Table

from rolloutd.bench.ablation_mechanisms import MEASURED_ELSEWHERE, MECHANISMS, MORE_IS_BETTER, VARIANTS, Mechanism
from rolloutd.bench.arguments import positive_int
from rolloutd.bench.figures import Figures
from rolloutd.bench.paired import Paired, differences
from rolloutd.bench.quality_report import HEADINGS, print_wide
from rolloutd.bench.simulate import PRODUCT, Note, Plan, plan_of, progress, simulate
from rolloutd.bench.training_loop import LOOPS
from rolloutd.server.core_build import core_words

SEEDS = 5
STEPS = 10  # of a training loop
EPOCHS = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Row:
    """One mechanism on one figure. worse: off - on per seed, turned where more is better. on: mean with the mechanism."""

    mechanism: str
    workload: str
    epoch: int
    figure: str
    on: float
    worse: Paired

    @property
    def verdict(self) -> str:
        return verdict(self.worse)


def verdict(worse: Paired) -> str:
    """Whether a mechanism earns its place, by how much worse it is without."""
    if not any(worse.values):
        return "no effect"
    if not worse.sure():
        return "not sure"
    return "helps" if worse.mean > 0.0 else "HARMS"


class Ablation:
    """Runs each (workload, seed) with all on once, and once per mechanism that should show there."""

    def __init__(self, mechanisms: Sequence[Mechanism], *, warm: bool = False, steps: int = STEPS) -> None:
        self._mechanisms = mechanisms
        self._plans = {
            name: _plan(name, warm, steps)
            for name in dict.fromkeys(name for one in mechanisms for name in one.shows_in)
        }

    @property
    def workloads(self) -> list[str]:
        return list(self._plans)

    def run(self, workload: str, seeds: Iterable[int], note: Note | None = None) -> list[Row]:
        """Every mechanism of one workload."""
        plan = self._plans[workload]
        here = [one for one in self._mechanisms if workload in one.shows_in]
        on: list[Figures] = []
        off: dict[str, list[Figures]] = {one.name: [] for one in here}
        for seed in seeds:
            on += simulate(plan, PRODUCT, seed, note)
            for one in here:
                off[one.name] += simulate(one.without(plan), PRODUCT, seed, _named(note, one.name))
        return [row for one in here for row in rows(one, workload, on, off[one.name])]


def _plan(name: str, warm: bool, steps: int) -> Plan:
    """Of a workload's name with words of `VARIANTS` behind it."""
    workload, *words = name.split(" ")
    variants = [VARIANTS[word] for word in words]
    flags = [flag for variant in variants for flag in variant.flags]
    if warm and workload not in LOOPS:
        flags.append("--warm")
    plan = plan_of([workload, "--steps", str(steps), *flags])
    for variant in variants:
        plan = replace(plan, config=variant.settings(plan.config))
    return replace(plan, name=name) if words else plan


def _named(note: Note | None, without: str) -> Note | None:
    return None if note is None else lambda doing, back, total: note(f"{doing}, without {without}", back, total)


def rows(mechanism: Mechanism, workload: str, on: Sequence[Figures], off: Sequence[Figures]) -> list[Row]:
    """Of one mechanism on one workload, per epoch and figure; figures without data are left out."""
    found = []
    for epoch in sorted({line.epoch for line in on}):
        for figure in mechanism.shows_in[workload]:
            with_it, without = _by_seed(on, epoch, figure), _by_seed(off, epoch, figure)
            more = figure in MORE_IS_BETTER
            worse = differences(with_it, without) if more else differences(without, with_it)
            if worse is not None:
                mean = sum(with_it.values()) / len(with_it)
                found.append(Row(mechanism.name, workload, epoch, figure, mean, worse))
    return found


def _by_seed(lines: Iterable[Figures], epoch: int, figure: str) -> dict[int, float]:
    return {
        line.seed: float(value) for line in lines if line.epoch == epoch and (value := asdict(line)[figure]) is not None
    }


def as_json(found: Sequence[Row], seeds: int) -> Mapping[str, object]:
    """The last line: one object per row; `values` are the differences, in order of seeds."""
    return {
        "core": core_words(),
        "seeds": seeds,
        "rows": [
            {
                "mechanism": row.mechanism,
                "workload": row.workload,
                "epoch": row.epoch,
                "figure": row.figure,
                "on": round(row.on, 4),
                "worse": round(row.worse.mean, 4),
                "deviation": None if row.worse.deviation is None else round(row.worse.deviation, 4),
                "values": [round(value, 4) for value in row.worse.values],
                "verdict": row.verdict,
            }
            for row in found
        ],
        "variants": {word: variant.what for word, variant in VARIANTS.items()},
        "measured_elsewhere": dict(MEASURED_ELSEWHERE),
    }


def table(found: Sequence[Row]) -> Table:
    """One row per mechanism, workload, epoch and figure."""
    epochs = len({row.epoch for row in found}) > 1
    grid = Table(title="without the mechanism: how much worse (off - on), per seed", title_justify="left")
    for heading in ("mechanism", "workload", *(["epoch"] if epochs else []), "figure"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("with it", "worse without", "seeds"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    previous = None
    for row in sorted(found, key=lambda one: [mechanism.name for mechanism in MECHANISMS].index(one.mechanism)):
        if previous is not None and previous != row.mechanism:
            grid.add_section()
        previous = row.mechanism
        worse = f"{row.worse.mean:+.3f}" + ("" if row.worse.deviation is None else f" ± {row.worse.deviation:.3f}")
        grid.add_row(
            row.mechanism,
            row.workload,
            *([EPOCHS[row.epoch]] if epochs else []),
            HEADINGS[row.figure],
            f"{row.on:.3f}",
            worse,
            str(len(row.worse.values)),
            row.verdict,
        )
    return grid


def elsewhere() -> Table:
    """Mechanisms without a row, and what measures them."""
    grid = Table(title="measured elsewhere", title_justify="left")
    for heading in ("mechanism", "with what"):
        grid.add_column(heading, no_wrap=True)
    for name, how in MEASURED_ELSEWHERE.items():
        grid.add_row(name, how)
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong usage."""
    names = [one.name for one in MECHANISMS]
    parser = argparse.ArgumentParser(prog="bench-ablation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=positive_int, default=SEEDS, help=f"how many, from --first (default {SEEDS})")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--mechanisms", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="only these (all where a mechanism should show)")
    parser.add_argument("--warm", action="store_true", help="a second epoch after each, as of `rolloutd simulate`")
    parser.add_argument("--steps", type=positive_int, default=STEPS, help=f"of a training loop (default {STEPS})")
    options = parser.parse_args(argv)
    chosen = [one for one in MECHANISMS if one.name in options.mechanisms]
    ablation = Ablation(chosen, warm=options.warm, steps=options.steps)
    wanted = ablation.workloads if options.workloads is None else options.workloads
    if strange := [name for name in wanted if name not in ablation.workloads]:
        parser.error(f"--workloads: {', '.join(strange)}: these mechanisms show in {', '.join(ablation.workloads)}")
    found: list[Row] = []
    seeds = range(options.first, options.first + options.seeds)
    with progress(True) as note:
        for name in wanted:
            found += ablation.run(name, seeds, note)
    print_wide(table(found), sys.stdout)
    for word, variant in VARIANTS.items():
        print(f"{word}: {variant.what}")
    print_wide(elsewhere(), sys.stdout)
    print(json.dumps(as_json(found, options.seeds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
