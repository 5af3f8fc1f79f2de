"""The project's bars, each beside the figure that the benchmarks last printed.

Invariants
- A verdict is computed from the figure and the bar alone. Where the figure is missing there is none: `command` says what makes it.
- Bars that are relative to others take the best of them, seed by seed the same workloads.

What this module does not know: how figures are measured, how a page looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rolloutd.bench.figures import Figures, gap_closed
from rolloutd.bench.mix_error import BAR_POINTS
from rolloutd.bench.report_inputs import Inputs
from rolloutd.bench.scale_cost import BAR_RATIO, BAR_US_PER_ROLLOUT, ENGINES, FEW_ENGINES, ROLLOUTS_PER_ENGINE
from rolloutd.bench.simulate import PRODUCT

PAIR_SEED = 1  # the seed that other harnesses measured
STICKY = "sticky"
LOOP_RIVALS = ("fifo", "prefix", "least-in-flight")
EPOCHS = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. value: None where it was not measured. at_most: the figure should be so or less, else so or more.

    source: the benchmark it comes from. note: what else belongs to the figure, such as how many seeds.
    """

    area: str
    what: str
    value: float | None
    limit: float
    source: str
    at_most: bool = True
    unit: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def bars(inputs: Inputs) -> list[Bar]:
    """All of them, quality first."""
    return [*_quality(inputs), *_loop(inputs), *_core(inputs), *_data_path(inputs), *_publish(inputs)]


def seeds_of(lines: Iterable[Figures]) -> list[int]:
    return sorted({line.seed for line in lines})


def _quality(inputs: Inputs) -> Iterator[Bar]:
    lines = inputs.of("quality")

    def ours(workload: str, epoch: int) -> list[Figures]:
        return [line for line in lines if (line.arm, line.workload, line.epoch) == (PRODUCT, workload, epoch)]

    def bar(workload: str, epoch: int, what: str, value: float | None, limit: float, **more: Any) -> Bar:
        count = len(seeds_of(ours(workload, epoch)))
        note = f"{count} seed{'s' if count != 1 else ''}" if count else ""
        return Bar("quality", f"{workload} {EPOCHS[epoch]}: {what}", value, limit, "quality", **{"note": note, **more})

    def mean(workload: str, epoch: int, name: str) -> float | None:
        return _mean(asdict(line)[name] for line in ours(workload, epoch))

    for epoch, limit in enumerate((1.16, 1.06)):
        of_seed = [line for line in ours("Q1", epoch) if line.seed == PAIR_SEED]
        value = _mean(line.makespan_over_bound for line in of_seed)
        yield bar("Q1", epoch, f"makespan / bound, seed {PAIR_SEED}", value, limit, note="virtual time")
    for workload in ("Q1", "Q1s"):
        for epoch, limit in enumerate((0.5, 0.9)):
            gap = gap_closed(lines, PRODUCT, workload, epoch)
            what = "share of the gap from FIFO to the oracle that is closed"
            yield bar(workload, epoch, what, gap.mean if gap else None, limit, at_most=False)
    for epoch, limit in enumerate((1.40, 1.15)):
        yield bar("Q2", epoch, "makespan / bound", mean("Q2", epoch, "makespan_over_bound"), limit)
    for epoch in (0, 1):
        yield bar("Q2", epoch, "prefix hit / its ceiling", _hit_share(ours("Q2", epoch)), 0.98, at_most=False)
    for name, what, limits in (
        ("critical_over_bound", "end of the critical work / its bound", (1.12, 1.06)),
        ("reward_p99_seconds", "reward latency p99, simulated s", (2.0, 2.0)),
        ("reusable_over_bound", "last reusable / bound of the whole", (0.8, 0.8)),
        ("background_over_bound", "last background / bound of the whole", (1.4, 1.3)),
    ):
        for epoch, limit in enumerate(limits):
            yield bar("Q3", epoch, what, mean("Q3", epoch, name), limit)
    yield bar("Q4", 0, "prefix hit / its ceiling", _hit_share(ours("Q4", 0)), 0.95, at_most=False)
    yield _sessions(inputs, lines)
    yield bar("Q1", 0, "most output tokens on an engine / mean", mean("Q1", 0, "imbalance"), 1.10)
    mix = inputs.objects.get("mix")
    yield Bar(
        "quality",
        "mixture error, windows of 256 consumed rollouts, strata over-supplied",
        mix["mean_points"]["alike"].get("held") if mix else None,
        BAR_POINTS,
        "mix",
        unit=" points",
        note=f"results kept back (`mix_hold_seconds`); at once: {mix['mean_points']['alike'].get('default', math.nan):.2f}"
        if mix
        else "",
    )


def _sessions(inputs: Inputs, lines: Sequence[Figures]) -> Bar:
    """The best of sticky (virtual time) and of both routers' best policies (on the wire): theirs over ours, the least of them."""
    ratios = {}
    if sticky := _mean_ratio(lines, STICKY, "Q4", "session_mean_seconds"):
        ratios["sticky least loaded"] = sticky
    for (workload, epoch, package), ours_over in inputs.sessions.items():
        if (workload, epoch) == ("Q4", 0) and ours_over:
            ratios[package] = 1.0 / ours_over
    best = min(ratios, key=lambda name: ratios[name], default=None)
    what = "Q4 cold: mean session of the best of sticky, smg, sglang-router / ours"
    note = "" if best is None else f"against {best}; of {', '.join(ratios)}"
    source = "quality" if "sticky least loaded" not in ratios else "peers"
    return Bar("quality", what, ratios[best] if best else None, 1.3, source, at_most=False, note=note)


def _loop(inputs: Inputs) -> Iterator[Bar]:
    lines = inputs.of("loop")

    def of(arm: str, workload: str, name: str) -> float | None:
        return _mean(asdict(line)[name] for line in lines if (line.arm, line.workload) == (arm, workload))

    def note(workload: str, more: str = "") -> str:
        count = len(seeds_of(line for line in lines if line.workload == workload))
        return ", ".join(part for part in (f"{count} seed{'s' if count != 1 else ''}" if count else "", more) if part)

    idle = {arm: _idle_seconds(lines, arm, "Q5") for arm in (PRODUCT, *LOOP_RIVALS)}
    rivals = [value for arm in LOOP_RIVALS if (value := idle[arm]) is not None]
    mine = idle[PRODUCT]
    least = of(PRODUCT, "Q5", "idle_ratio_least")
    bound_seconds = of(PRODUCT, "Q5", "bound_seconds")
    floor = None if least is None or bound_seconds is None or not rivals else least * bound_seconds / min(rivals)
    yield Bar(
        "loop",
        "Q5: trainer idle time / that of the best of FIFO, pure prefix, least in flight",
        mine / min(rivals) if mine is not None and rivals else None,
        0.85,
        "loop",
        note=note("Q5", "" if floor is None else f"no schedule is under {floor:.3f}"),
    )
    least = of(PRODUCT, "Q5-off", "idle_ratio_least")
    yield Bar(
        "loop",
        "Q5-off: trainer idle ratio",
        of(PRODUCT, "Q5-off", "idle_ratio"),
        0.05,
        "loop",
        note=note("Q5-off", "" if least is None else f"no schedule is under {least:.3f}"),
    )
    rates = [value for arm in LOOP_RIVALS if (value := of(arm, "Q5-off", "samples_per_second")) is not None]
    own = of(PRODUCT, "Q5-off", "samples_per_second")
    yield Bar(
        "loop",
        "Q5-off: valid samples/s / those of the best of FIFO, pure prefix, least in flight",
        own / max(rates) if own is not None and rates else None,
        1.25,
        "loop",
        at_most=False,
        note=note("Q5-off"),
    )


def _core(inputs: Inputs) -> Iterator[Bar]:
    core, scale, index = (inputs.objects.get(name, {}) for name in ("core", "scale", "index"))
    for free, limit in (("1", 80.0), ("16", 50.0)):
        what = f"per dispatch, 100,000 queued, 64 engines, {free} slot{'s' if free != '1' else ''} freed per event"
        yield Bar("core", what, _number(core, f"us_per_dispatch_{free}"), limit, "core", unit=" us")
    yield Bar("core", "one event, p99", _number(core, "handle_p99_ms"), 5.0, "core", unit=" ms")
    yield Bar("core", "one event, longest", _number(core, "handle_max_ms"), 20.0, "core", unit=" ms")
    yield Bar("core", "prefix hits / an exact scan's", _number(core, "hit_share_of_exact"), 0.98, "core", at_most=False)
    # A smaller pool is a look at the figure, and not the bar's.
    whole = scale if scale.get("rollouts", {}).get(str(ENGINES), 0) >= ENGINES * ROLLOUTS_PER_ENGINE else {}
    what = f"handle() per rollout, {ENGINES * ROLLOUTS_PER_ENGINE:,} rollouts on {ENGINES:,} engines"
    value = _number(whole.get("us_per_rollout", {}), str(ENGINES))
    yield Bar("core", what, value, BAR_US_PER_ROLLOUT, "scale", unit=" us")
    what = f"cost of a decision there / on {FEW_ENGINES} engines"
    value = _number(whole, "decision_ratio") if str(FEW_ENGINES) in whole.get("rollouts", {}) else None
    yield Bar("core", what, value, BAR_RATIO, "scale")
    for shape, limit in (("A", 7.0), ("B", 10.0)):
        value = _number(index.get("match_us_p50", {}), shape)
        yield Bar("core", f"index, match of 4,096 tokens, shape {shape}", value, limit, "index", unit=" us")
    value = _number(index.get("bytes_per_page", {}), "A")
    yield Bar("core", "index, memory per page, shape A", value, 100.0, "index", unit=" bytes")
    slices = index.get("sweep_slice_max_ms", {})
    yield Bar("core", "index, longest slice of a sweep", max(slices.values(), default=None), 1.0, "index", unit=" ms")


def _data_path(inputs: Inputs) -> Iterator[Bar]:
    over, leaks = inputs.objects.get("overhead", {}), inputs.objects.get("leaks", {})
    for tokens, limit in (("2048", 0.5), ("16384", 0.25)):
        ours, router = (_number(over.get(name, {}), tokens) for name in ("cpu_s_per_1000", "router_cpu_s_per_1000"))
        value = ours / router if ours is not None and router else None
        yield Bar("data path", f"CPU / sglang-router's, {int(tokens):,} prompt tokens", value, limit, "overhead")
    value = _number(over, "throughput_ratio")
    yield Bar("data path", "rollouts/s / sglang-router's, 2,048 tokens", value, 2.0, "overhead", at_most=False)
    for percentile, limit in ((50, 1.5), (99, 8.0)):
        # At most the router's, and under a limit of its own.
        router = _number(over, f"router_added_p{percentile}_ms")
        what = f"added latency p{percentile}, 500 submissions/s, 4,096 tokens"
        value = _number(over, f"added_p{percentile}_ms")
        note = "" if router is None else f"the router's {router:.3g}"
        yield Bar("data path", what, value, min(limit, router or limit), "overhead", unit=" ms", note=note)
    value = _number(leaks, "bytes_per_cancel")
    yield Bar("data path", "memory kept per cancelled rollout", value, 100.0, "leaks", unit=" bytes")
    left = [_number(leaks, name) for name in ("tasks", "streams", "engine_requests", "counters")] if leaks else []
    value = sum(one for one in left if one is not None) if left else None
    yield Bar("data path", "tasks, streams, engine requests, counters left behind", value, 0.0, "leaks")


def _publish(inputs: Inputs) -> Iterator[Bar]:
    found = inputs.objects.get("publish", {})
    for mode in ("retract", "in_place", "abort_and_resume"):
        value = _number(found.get("gap_ms_p99_by_mode", {}), mode)
        what = f"publication {mode}: time without generation p99, beyond the engine's own"
        yield Bar("publication", what, value, 50.0, "publish", unit=" ms")
    for mode in ("retract", "in_place"):
        value = _number(found.get("aborted_by_mode", {}), mode)
        yield Bar("publication", f"publication {mode}: attempts aborted", value, 0.0, "publish")
    yield Bar(
        "publication", "expiry of a million pages, to declare", _number(found, "expire_ms"), 1.0, "publish", unit=" ms"
    )
    value = _number(found, "sweep_slice_max_ms")
    yield Bar("publication", "expiry, longest slice of a sweep", value, 2.0, "publish", unit=" ms")


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else float(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _hit_share(lines: Iterable[Figures]) -> float | None:
    return _mean(
        line.prefix_hit / line.prefix_hit_ceiling
        for line in lines
        if line.prefix_hit is not None and line.prefix_hit_ceiling
    )


def _mean_ratio(lines: Sequence[Figures], arm: str, workload: str, name: str) -> float | None:
    """Mean over seeds of the arm's figure over ours, first epoch."""
    here = [line for line in lines if (line.workload, line.epoch) == (workload, 0)]
    ours = {line.seed: asdict(line)[name] for line in here if line.arm == PRODUCT}
    theirs = {line.seed: asdict(line)[name] for line in here if line.arm == arm}
    return _mean(theirs[seed] / ours[seed] for seed in theirs if theirs[seed] is not None and ours.get(seed))


def _idle_seconds(lines: Iterable[Figures], arm: str, workload: str) -> float | None:
    return _mean(
        line.idle_ratio * line.makespan_seconds
        for line in lines
        if (line.arm, line.workload) == (arm, workload)
        and line.idle_ratio is not None
        and line.makespan_seconds is not None
    )
