"""`make bench-mix`: how near the data that a trainer consumes comes to its target mix, strata over-supplied.

One run with a target mix over eight strata. Every stratum always has `AHEAD` rollouts submitted, so more than enough waits of each
and only the order decides; what is back is consumed at once. The error is the total variation between the strata of 256
consumed rollouts in a row and the target, in percentage points; windows stand side by side, the first are left out while
the pool fills. The last line is JSON.

Invariants
- Supply is equal over strata, so an order that knows no mix ends far from the target: the row without the diversity term shows it.
- The trainer does not say that it waits for a step, so results may be kept back.
- `alike`: all strata have Q1s's lengths. `unlike`: their medians lie up to a factor of four apart, so that what is
  consumed comes in another order than what was dispatched.
- `rounding` is the least error that whole rollouts allow in one window. `in_order_of_mix` is what is left where every dispatch
  keeps to the mix: rollouts that are consumed as they come back do not come back in the order in which they went.

What this module does not know: how the core orders.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console
from rich.table import Table

from rolloutd.bench.arguments import positive_int
from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.metrics import total_variation
from rolloutd.bench.scenarios import Q1
from rolloutd.bench.simulate import progress
from rolloutd.bench.simulated import CONSUMER_ID, RUN_ID, spec_of
from rolloutd.bench.traffic import GroupTraffic
from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.workload import Item, Limits, WorkClass
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.actions import Deliver, Dispatch, Finished, Rejected
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    ConfigureRun,
    Event,
    ReportStep,
    SubmitRollouts,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.spec import Acknowledgement, RunSettings, StepReport
from rolloutd.scheduler.states import Outcome, TrainerState
from rolloutd.server.core_build import core_words

WINDOW = 256
WINDOWS, FILLING = 10, 2  # counted, and left out before them
SEEDS = 3
AHEAD = 96  # rollouts of each stratum that wait or run: more than the largest share of the slots
BAR_POINTS = 1.0
TARGET = {
    "algebra": 0.28,
    "code": 0.2,
    "geometry": 0.15,
    "logic": 0.12,
    "proofs": 0.1,
    "tools": 0.07,
    "chat": 0.05,
    "safety": 0.03,
}
PROMPT = LogNormal(4.97, 0.45, 16, 512)
OUTPUT = LogNormal(7.056, 0.988, 1, 4_096)
SPREAD = 1.386  # of the medians' logarithms over the strata, `unlike`: a factor of four
DRAWN_AT_ONCE = 64

Note = Callable[[str, int, int], None]
HOLD_SECONDS = 60.0  # results ahead of the mix are kept back for so long at most, `held`


@dataclass(frozen=True, slots=True)
class Setting:
    """strict: the mix orders dispatches. hold_seconds: of the run. diversity: weight; None: the default."""

    strict: bool
    hold_seconds: float = 0.0
    diversity: float | None = None

    def config(self) -> SchedulerConfig:
        config = SchedulerConfig()
        config = replace(config, queue=replace(config.queue, strict_mix=self.strict))
        return config if self.diversity is None else _diversity(config, self.diversity)


# Name -> settings that are compared.
SETTINGS = {
    "held": Setting(strict=True, hold_seconds=HOLD_SECONDS),
    "default": Setting(strict=True),
    "held, not strict": Setting(strict=False, hold_seconds=HOLD_SECONDS),
    "not strict": Setting(strict=False),
    "not strict, diversity 1": Setting(strict=False, diversity=1.0),
    "not strict, no diversity": Setting(strict=False, diversity=0.0),
}


def _diversity(config: SchedulerConfig, weight: float) -> SchedulerConfig:
    policy = replace(config.policy, cold_start_diversity_weight=weight, stable_diversity_weight=weight)
    return replace(config, policy=policy, weights=replace(config.weights, diversity=weight))


@dataclass(frozen=True, slots=True)
class MixError:
    """Percentage points, mean and worst over the windows; dispatched: the same of what was sent to engines, mean.

    makespan_seconds, samples_per_second: until all windows were consumed. held_seconds: from end to delivery, mean.
    """

    settings: str
    lengths: str
    seed: int
    mean_points: float
    worst_points: float
    dispatched_points: float
    makespan_seconds: float
    samples_per_second: float
    held_seconds: float


def points(strata: Sequence[str], target: Mapping[str, float]) -> float:
    """Total variation between these strata and the target, in percentage points."""
    return 100.0 * total_variation(Counter(strata), target)


def rounding_points(target: Mapping[str, float], window: int = WINDOW) -> float:
    """The least of `points` that so many whole rollouts can have: largest remainders."""
    total = sum(target.values())
    exact = {name: window * share / total for name, share in target.items()}
    counts = {name: int(one) for name, one in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: window - sum(counts.values())]:
        counts[name] += 1
    return 100.0 * total_variation(counts, target)


def windows(strata: Sequence[str]) -> list[Sequence[str]]:
    """Side by side, without those while the pool fills and without what is left over."""
    starts = range(FILLING * WINDOW, len(strata) - WINDOW + 1, WINDOW)
    return [strata[start : start + WINDOW] for start in starts]


class Consumption:
    """A trainer that consumes everything as it comes, and keeps `AHEAD` of each stratum submitted."""

    def __init__(self, setting: Setting, seed: int, lengths: str) -> None:
        machine = MachineConfig(slots=Q1.slots, kv_tokens=Q1.kv_tokens, stream_interval=32, write_tokens=False)
        limits = Limits(machine.model.vocabulary_size, machine.context_tokens)
        self.consumed: list[str] = []
        self.dispatched: list[str] = []
        self.held_seconds: list[float] = []
        self._simulation = Simulation(Scheduler(setting.config(), random.Random(seed), 0.0))
        self._submitted: dict[str, float] = {}
        self._simulation.observers.append(self._watch)
        self._stratum: dict[str, str] = {}  # of each rollout that is out
        self._supply = {
            name: _items(name, seed, limits, output) for name, output in zip(TARGET, outputs(lengths), strict=True)
        }
        for number in range(Q1.engines):
            self._simulation.add_engine(SimEngine(f"engine-{number}", machine))
        self._simulation.connect(RUN_ID, CONSUMER_ID, self._receive)
        self._simulation.send(
            ConfigureRun(RUN_ID, RunSettings(target_mix=TARGET, mix_hold_seconds=setting.hold_seconds))
        )
        self._simulation.send(AttachConsumer(RUN_ID, CONSUMER_ID))
        self._simulation.send(ReportStep(RUN_ID, StepReport(step=0, trainer_state=TrainerState.WAITING)))
        for name in [name for _ in range(AHEAD) for name in TARGET]:
            self._submit(name)

    @property
    def seconds(self) -> float:
        """Simulated, until now."""
        return self._simulation.now

    def run(self, count: int, note: Callable[[int], None] | None) -> None:
        """Until so many are consumed."""

        def done() -> bool:
            if note is not None:
                note(len(self.consumed))
            return len(self.consumed) >= count

        self._simulation.run(stop=done)
        if len(self.consumed) < count:
            raise AssertionError(f"only {len(self.consumed)} of {count} rollouts came back")

    def _submit(self, stratum: str) -> None:
        item = next(self._supply[stratum])
        self._stratum[item.rollout_id] = stratum
        self._submitted[item.rollout_id] = self._simulation.now
        self._simulation.send(SubmitRollouts(RUN_ID, CONSUMER_ID, (spec_of(item, 0),)))

    def _watch(self, event: Event, actions: Sequence[object]) -> None:
        self.dispatched += [
            self._stratum[one.rollout_id]
            for one in actions
            if isinstance(one, Dispatch) and one.rollout_id in self._stratum
        ]

    def _receive(self, delivery: Deliver) -> None:
        match delivery.event:
            case Finished(result):
                if result.outcome is not Outcome.COMPLETED:
                    raise AssertionError(f"rollout {result.rollout_id} ended as {result.outcome.name}")
                stratum = self._stratum.pop(result.rollout_id)
                self.consumed.append(stratum)
                ended = self._submitted.pop(result.rollout_id) + result.total_seconds
                self.held_seconds.append(self._simulation.now - ended)
                self._simulation.at(self._simulation.now, lambda: self._consume(result.rollout_id, stratum))
            case Rejected(rollout_id, error):
                raise AssertionError(f"rollout {rollout_id} was rejected: {error.message}")

    def _consume(self, rollout_id: str, stratum: str) -> None:
        used = AcknowledgeResults(RUN_ID, CONSUMER_ID, (Acknowledgement(rollout_id, used=True),))
        self._simulation.send(used)
        self._submit(stratum)


def outputs(lengths: str) -> list[LogNormal]:
    """One per stratum. Raises KeyError for lengths that are not known."""
    middle = (len(TARGET) - 1) / 2
    step = {"alike": 0.0, "unlike": SPREAD / (len(TARGET) - 1)}[lengths]
    # In turn above and below, so that length does not go with share.
    order = [int(middle) + (number + 1) // 2 * (1 if number % 2 else -1) for number in range(len(TARGET))]
    return [replace(OUTPUT, mu=OUTPUT.mu + step * (place - middle)) for place in order]


def _items(stratum: str, seed: int, limits: Limits, output: LogNormal) -> Iterator[Item]:
    traffic = GroupTraffic(stratum, WorkClass.CRITICAL, stratum, DRAWN_AT_ONCE, 1, PROMPT, output)
    step = 0
    while True:
        for item in traffic.draw(seed, limits, step=step):
            yield replace(item, group_id="")
        step += 1


def in_order_of_mix(lengths: str, seed: int, count: int) -> list[str]:
    """Strata as they come back where each dispatch goes to the stratum that is furthest below its share of all dispatches.

    Slots that are always full, and rollouts that take as long as they write: what no order of dispatch does away with, since what
    runs longer comes back later. Limits of a real engine are left out.
    """
    machine = MachineConfig(slots=Q1.slots, kv_tokens=Q1.kv_tokens)
    limits = Limits(machine.model.vocabulary_size, machine.context_tokens)
    supply = {name: _items(name, seed, limits, output) for name, output in zip(TARGET, outputs(lengths), strict=True)}
    sent: Counter[str] = Counter()
    running: list[tuple[int, int, str]] = []  # (when it is back, in tokens; turn; stratum)
    back: list[str] = []
    now = 0
    while len(back) < count:
        if len(running) == Q1.engines * Q1.slots:
            now, _, stratum = heapq.heappop(running)
            back.append(stratum)
        turn = sent.total()
        name = max(TARGET, key=lambda one: TARGET[one] * (turn + 1) - sent[one])
        sent[name] += 1
        heapq.heappush(running, (now + next(supply[name]).output_tokens, turn, name))
    return back


def measure(settings: str, lengths: str, seed: int, note: Note | None = None) -> MixError:
    """One run. Raises KeyError for settings or lengths that are not known."""
    consumption = Consumption(SETTINGS[settings], seed, lengths)
    count = (WINDOWS + FILLING) * WINDOW
    doing = f"{lengths}, {settings}, seed {seed}"
    consumption.run(count, None if note is None else lambda done: note(doing, done, count))
    errors = [points(window, TARGET) for window in windows(consumption.consumed[:count])]
    sent = [points(window, TARGET) for window in windows(consumption.dispatched)]
    return MixError(
        settings,
        lengths,
        seed,
        round(fmean(errors), 3),
        round(max(errors), 3),
        round(fmean(sent), 3),
        round(consumption.seconds, 3),
        round(count / consumption.seconds, 4),
        round(fmean(consumption.held_seconds), 3),
    )


def summary(errors: Sequence[MixError]) -> dict[str, object]:
    """The last line: means over seeds (worst: over all), keyed by lengths and settings."""

    def over(name: str, worst: bool = False) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for one in errors:
            same = [getattr(e, name) for e in errors if (e.settings, e.lengths) == (one.settings, one.lengths)]
            found.setdefault(one.lengths, {})[one.settings] = round(max(same) if worst else fmean(same), 3)
        return found

    seeds = sorted({one.seed for one in errors})
    count = (FILLING + WINDOWS) * WINDOW
    ideal = {
        lengths: round(
            fmean(points(one, TARGET) for seed in seeds for one in windows(in_order_of_mix(lengths, seed, count))), 3
        )
        for lengths in dict.fromkeys(one.lengths for one in errors)
    }
    return {
        "core": core_words(),
        "window": WINDOW,
        "windows": WINDOWS,
        "seeds": len(seeds),
        "rounding_points": round(rounding_points(TARGET), 3),
        "in_order_of_mix_points": ideal,
        "mean_points": over("mean_points"),
        "worst_points": over("worst_points", worst=True),
        "dispatched_points": over("dispatched_points"),
        "makespan_seconds": over("makespan_seconds"),
        "samples_per_second": over("samples_per_second"),
        "held_seconds": over("held_seconds"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="bench-mix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=positive_int, default=SEEDS, help=f"how many, from 0 (default {SEEDS})")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    options = parser.parse_args(argv)
    with progress(True) as note:
        errors = [
            measure(settings, lengths, seed, note)
            for lengths in ("alike", "unlike")
            for settings in options.settings
            for seed in range(options.seeds)
        ]
    figures = summary(errors)
    grid = Table(
        title=f"total variation to the target mix, percentage points, windows of {WINDOW}", title_justify="left"
    )
    for heading in (
        "lengths",
        "settings",
        "consumed, mean",
        "worst window",
        "dispatched, mean",
        "makespan, s",
        "samples/s",
        "held, mean s",
    ):
        grid.add_column(heading, justify="right")
    for lengths, settings in dict.fromkeys((one.lengths, one.settings) for one in errors):
        names = (
            "mean_points",
            "worst_points",
            "dispatched_points",
            "makespan_seconds",
            "samples_per_second",
            "held_seconds",
        )
        cells = [f"{figures[name][lengths][settings]:.2f}" for name in names]  # type: ignore[index]
        grid.add_row(lengths, settings, *cells)
    ideal = ", ".join(f"{lengths} {of:.2f}" for lengths, of in figures["in_order_of_mix_points"].items())  # type: ignore[attr-defined]
    grid.caption = (
        f"whole rollouts alone make {figures['rounding_points']:.2f}; dispatched exactly in the order of the mix, what is consumed "
        f"as it comes back has {ideal}"
    )
    Console(file=sys.stdout, width=120).print(grid)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
