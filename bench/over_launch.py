"""What launching more members of a group than it keeps gains, and what that does to lengths: one beside the other.

The same prompts are served twice by the production core: with as many samples as are needed, and with `factor` times as many of
which the first to complete are kept. The samples of the first run are among those of the second, with the same lengths.

Invariants
- Nobody sees the gain without the bias: every line and every row has both.
- Lengths of what was cut are the true ones, which only a simulation knows; the server's own estimate stands beside them.

What this module does not know: command lines, and how anything is scheduled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import TextIO

from rich.table import Table

from rolloutd.bench.quality_report import print_wide
from rolloutd.bench.scenarios import Traffic
from rolloutd.bench.simulated import RUN_ID, EpochRecord, Epochs
from rolloutd.bench.traffic import SAMPLING_SEEDS, GroupTraffic
from rolloutd.bench.workload import Item, Workload, stream
from rolloutd.scheduler.views import OverLaunchView, RunView

QUINTILES = 5
DIGITS = 4
MOST_FACTOR = 4.0
Served = tuple[Workload, EpochRecord]


@dataclass(frozen=True, slots=True)
class OverLaunchFigures:
    """One seed and epoch; field names are the keys of its JSON.

    gain: share of the makespan saved; a makespan ends with the last result that the trainer takes. extra_tokens: share of output
    tokens generated on top, by kept and surplus rollouts. launched_mean_tokens: of the true lengths of all launched.
    surplus_mean_tokens: the true lengths of those not kept; surplus_mean_tokens_when_ended: what they had written. kept_q1 to
    kept_q5: of each fifth of the launched by true length, shortest first, the share kept; estimated_q1 to estimated_q5: what the
    server says of it, since the run began. longest_cut: share of groups whose longest member was not kept; longest_cut_seen: the
    part of them that the server knows of, since the run began.
    """

    workload: str
    seed: int
    epoch: int
    factor: float
    exact_makespan_seconds: float
    makespan_seconds: float
    gain: float
    exact_tokens: int
    tokens: int
    extra_tokens: float
    launched: int
    kept: int
    surplus: int
    launched_mean_tokens: float
    kept_mean_tokens: float
    surplus_mean_tokens: float
    surplus_mean_tokens_when_ended: float
    longest_cut: float
    longest_cut_seen: float
    kept_q1: float
    kept_q2: float
    kept_q3: float
    kept_q4: float
    kept_q5: float
    estimated_q1: float
    estimated_q2: float
    estimated_q3: float
    estimated_q4: float
    estimated_q5: float


def launch_more(workload: Workload, traffic: Iterable[Traffic], seed: int, epoch: int, factor: float) -> Workload:
    """The workload with each group `factor` times as large (rounded up), of which it keeps as many as it had.

    Raises ValueError where nothing of it is a group.
    """
    groups: dict[str, list[Item]] = {}
    for item in workload.items:
        if item.group_id:
            groups.setdefault(item.group_id, []).append(item)
    if not groups:
        raise ValueError(f"workload {workload.name!r} has no groups of which more could be launched")
    items = [item for item in workload.items if not item.group_id]
    for one in traffic:
        if not isinstance(one, GroupTraffic):
            continue
        mine = {name: members for name, members in groups.items() if name.startswith(f"{one.name}-")}
        more = math.ceil(one.samples * factor - 1e-9) - one.samples
        step = next((item.needed_by_step for members in mine.values() for item in members), None) or 0
        extra_rng = stream(seed, one.name, "extra samples", step, epoch)
        cap = next(iter(mine.values()))[0].max_new_tokens
        lengths = one.output.capped(cap).draw_groups(
            stream(seed, one.name, "difficulty", step), extra_rng, len(mine), max(1, more)
        )
        seeds = extra_rng.integers(0, SAMPLING_SEEDS, size=lengths.shape)
        for row, (group_id, members) in enumerate(mine.items()):
            items += [replace(item, group_keep=one.samples if more else 0) for item in members]
            for column in range(more):
                sample = one.samples + column
                extra = replace(
                    members[0],
                    rollout_id=f"{group_id}-{sample}",
                    sample=sample,
                    output_tokens=int(lengths[row, column]),
                    sampling_seed=int(seeds[row, column]),
                    group_keep=one.samples,
                )
                items.append(extra)
    return Workload.of(workload.name, items, workload.sessions)


def compare(
    seed: int,
    epochs: int,
    factor: float,
    exact: Epochs,
    more: Epochs,
    draw: Callable[[int], tuple[Workload, Workload]],
    run_view: Callable[[], RunView | None],
) -> list[OverLaunchFigures]:
    """Both ways on one seed, epoch by epoch, each in a scheduler of its own. run_view: of the one that launches more."""
    lines = []
    for epoch in range(epochs):
        if epoch:
            exact.publish()
            more.publish()
        plain, larger = draw(epoch)
        served = (plain, exact.run(plain, epoch)), (larger, more.run(larger, epoch))
        view = run_view()
        if view is None or view.over_launch is None:
            raise AssertionError(f"run {RUN_ID!r} tells of no group that kept fewer than it launched")
        lines.append(figures_of(seed, epoch, factor, *served, view.over_launch))
    return lines


def figures_of(
    seed: int, epoch: int, factor: float, exact: Served, more: Served, told: OverLaunchView
) -> OverLaunchFigures:
    """One epoch of both."""
    plain, plain_record = exact
    larger, record = more
    kept = {name for name, one in record.records.items() if one.deliveries}
    members = [item for item in larger.items if item.group_keep]
    cut = [item for item in members if item.rollout_id not in kept]
    tokens, plain_tokens = sum(record.engine_tokens.values()), sum(plain_record.engine_tokens.values())
    before, after = makespan_seconds(plain_record), makespan_seconds(record)
    shares = kept_by_quintile(members, kept)
    return OverLaunchFigures(
        plain.name,
        seed,
        epoch,
        factor,
        exact_makespan_seconds=_rounded(before),
        makespan_seconds=_rounded(after),
        gain=_rounded(1.0 - after / before),
        exact_tokens=plain_tokens,
        tokens=tokens,
        extra_tokens=_rounded(tokens / plain_tokens - 1.0),
        launched=len(members),
        kept=len(members) - len(cut),
        surplus=len(record.surplus),
        launched_mean_tokens=_rounded(fmean(item.output_tokens for item in members)),
        kept_mean_tokens=_rounded(fmean(item.output_tokens for item in members if item.rollout_id in kept)),
        surplus_mean_tokens=_rounded(fmean(item.output_tokens for item in cut)),
        surplus_mean_tokens_when_ended=_rounded(fmean(record.surplus.values())),
        longest_cut=_rounded(longest_cut(members, kept)),
        longest_cut_seen=_rounded(told.longest_cut_groups / told.groups),
        **{f"kept_q{number}": _rounded(share) for number, share in enumerate(shares, start=1)},
        **{
            f"estimated_q{number}": _rounded(share) for number, share in enumerate(told.kept_share_by_quintile, start=1)
        },
    )


def makespan_seconds(record: EpochRecord) -> float:
    """Until the last result came that the trainer takes."""
    return max(one.delivered_seconds for one in record.records.values() if one.delivered_seconds is not None)


def kept_by_quintile(members: Sequence[Item], kept: set[str]) -> list[float]:
    """Of each fifth of the launched by true length, shortest first: the share that was kept."""
    ordered = sorted(members, key=lambda item: item.output_tokens)
    borders = [round(len(ordered) * part / QUINTILES) for part in range(QUINTILES + 1)]
    parts = [ordered[borders[part] : borders[part + 1]] for part in range(QUINTILES)]
    return [fmean(item.rollout_id in kept for item in part) for part in parts]


def longest_cut(members: Iterable[Item], kept: set[str]) -> float:
    """Share of groups of which a longest member was not kept."""
    longest: dict[str, Item] = {}
    for item in members:
        best = longest.get(item.group_id)
        if best is None or (item.output_tokens, item.rollout_id not in kept) > (
            best.output_tokens,
            best.rollout_id not in kept,
        ):
            longest[item.group_id] = item
    return fmean(item.rollout_id not in kept for item in longest.values())


HEADINGS = {
    "exact_makespan_seconds": "exact s",
    "makespan_seconds": "over-launched s",
    "gain": "gained",
    "extra_tokens": "extra tokens",
    "launched_mean_tokens": "launched mean",
    "kept_mean_tokens": "kept mean",
    "surplus_mean_tokens": "surplus mean",
    "surplus_mean_tokens_when_ended": "when ended",
    "longest_cut": "longest cut",
    "longest_cut_seen": "(seen)",
    **{f"kept_q{number}": f"kept q{number}" for number in range(1, QUINTILES + 1)},
    **{f"estimated_q{number}": f"(est. q{number})" for number in range(1, QUINTILES + 1)},
}
SHARES = frozenset(
    name
    for name in HEADINGS
    if name.startswith(("kept_q", "estimated_q", "longest_cut")) or name in ("gain", "extra_tokens")
)


def print_over_launch(lines: Sequence[OverLaunchFigures], out: TextIO) -> None:
    """One row per workload and epoch: means over seeds, "±" one standard deviation, of gain and bias."""
    keys = list(dict.fromkeys((line.workload, line.epoch, line.factor) for line in lines))
    seeds = len({line.seed for line in lines})
    for workload, epoch, factor in keys:
        of_key = [line for line in lines if (line.workload, line.epoch, line.factor) == (workload, epoch, factor)]
        which = "" if len(keys) == 1 else f", {('cold', 'warm')[epoch] if epoch < 2 else epoch}"
        title = (
            f"{workload}{which}: {factor:g} times as many launched as are kept, {seeds} seed{'s' if seeds > 1 else ''}"
        )
        for part in (GAIN_AND_TOKENS, BIAS):
            table = Table(title=title if part is GAIN_AND_TOKENS else None, title_justify="left")
            for name in part:
                table.add_column(HEADINGS[name], justify="right", no_wrap=True)
            table.add_row(*(_cell(name, [getattr(line, name) for line in of_key]) for name in part))
            print_wide(table, out)


GAIN_AND_TOKENS = tuple(HEADINGS)[:8]
BIAS = ("gain", *tuple(HEADINGS)[8:])  # never without the gain beside it, nor the gain without it


def json_line(line: OverLaunchFigures) -> str:
    return json.dumps(asdict(line), allow_nan=False)


def _cell(name: str, values: Sequence[float]) -> str:
    if name in SHARES:
        spread = f" ± {stdev(values):.1%}" if len(values) > 1 and name in ("gain", "extra_tokens") else ""
        return f"{fmean(values):.1%}{spread}"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 and name.endswith("_seconds") else ""
    return f"{fmean(values):.1f}{spread}"


def _rounded(value: float) -> float:
    return round(value, DIGITS)
