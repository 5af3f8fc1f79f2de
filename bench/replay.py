"""`rolloutd replay LOG --config NEW`: what would another configuration have made of what happened?

LOG is the event log of a server (`event_log.path`). Its submissions, budgets, steps and publications reach the core again at the times
at which they did, with the settings of NEW; simulated engines of the recorded sizes serve them, and every rollout writes as many
tokens as it did. Beside the recorded figures stand those of the replay, and with `--against OLD` those of a replay with OLD: what
differs between the two replays is the configuration, what differs between the record and a replay with its own configuration is the
simulation.

Invariants
- Deterministic by `--seed`.
- Arrivals are as recorded: a trainer that would have gone on earlier does not.
- Settings that were changed while the server ran are followed only where no settings to try are named.
- A rollout that never ended, or was cancelled, may write until its limit; recorded cancellations come at their times.

What this module does not know: how fast the engines were (`--fitted` says so), and text prompts, which it refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from rolloutd.bench.metrics import percentile
from rolloutd.bench.quality_report import print_wide
from rolloutd.bench.simulated_pool import read_fitted
from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler.actions import Deliver, Finished, Refuse
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    Event,
    JoinEngine,
    PublishPolicy,
    Reconfigure,
    SubmitRollouts,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.reconfiguring import keeping_fixed
from rolloutd.scheduler.spec import Acknowledgement, EngineFacts, RolloutSpec
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.event_log import End, Entry, EventLogError, end_of, read_entries

PATIENCE_SECONDS = 3_600.0  # simulated, after the last recorded event
UNKNOWN_CONTEXT_TOKENS = 32_768  # of an engine that did not say
DIGITS = 4


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """Of one kind of rollout (a class, or reward queries), recorded or replayed. Seconds; waits are all waiting of a rollout.

    last_end_seconds: since the first event of the log.
    """

    run: str
    kind: str
    rollouts: int
    completed: int
    wait_p50_seconds: float | None
    wait_p99_seconds: float | None
    total_p50_seconds: float | None
    total_p99_seconds: float | None
    last_end_seconds: float | None
    prefix_hit: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="rolloutd replay",
        description="Serve what a server's event log recorded once more, in virtual time, with other settings.",
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("--config", type=Path, metavar="NEW", help="settings to try (the defaults)")
    parser.add_argument("--against", type=Path, metavar="OLD", help="a second replay, with these")
    parser.add_argument("--fitted", type=Path, metavar="FILE", help="the engines' speeds, by `rolloutd calibrate`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the lines of JSON only")
    options = parser.parse_args(argv)
    try:
        timing = TimingModel() if options.fitted is None else read_fitted(options.fitted).timing
        with options.log.open(encoding="utf-8") as lines:
            entries = list(read_entries(lines, options.log.name))
        wanted = {"replayed": options.config} | ({"against": options.against} if options.against is not None else {})
        figures = figures_of("recorded", recorded(entries))
        for name, path in wanted.items():
            config = load_config(path, os.environ, {}).scheduler
            replayed = replay(entries, config, timing, options.seed, reconfigured=path is None)
            figures += figures_of(name, replayed)
    except (ConfigError, EventLogError, OSError) as error:
        print(f"rolloutd replay: {error}", file=sys.stderr)
        return 1
    if not options.json:
        print_wide(table_of(figures), sys.stdout)
    for one in figures:
        print(json.dumps(asdict(one), allow_nan=False))
    return 0


Ends = list[tuple[float, End]]  # (seconds since the first event, end)


def recorded(entries: Iterable[Entry]) -> Ends:
    """The ends of a log."""
    entries = list(entries)
    start = entries[0][0] if entries else 0.0
    return [(at - start, what) for at, what in entries if isinstance(what, End)]


def replay(
    entries: Sequence[Entry], config: SchedulerConfig, timing: TimingModel, seed: int, *, reconfigured: bool = False
) -> Ends:
    """Serve a log again. Raises EventLogError for one that cannot be: text prompts, or no engine in it.

    reconfigured: follow the recorded changes of settings too; else `config` holds throughout.
    """
    if not any(isinstance(what, JoinEngine) for _, what in entries):
        raise EventLogError("the log names no engine: was it rotated? It needs its beginning")
    replayed = _Replay(entries, config, timing, seed, reconfigured)
    replayed.run()
    return replayed.ends


class _Replay:
    def __init__(
        self, entries: Sequence[Entry], config: SchedulerConfig, timing: TimingModel, seed: int, reconfigured: bool
    ) -> None:
        self.ends: Ends = []
        self._config = config
        self._reconfigured = reconfigured
        self._simulation = Simulation(Scheduler(config, random.Random(seed), 0.0))
        self._timing = timing
        self._entries = entries
        self._lengths = {
            (what.run_id, what.rollout_id): what.output_tokens
            for _, what in entries
            if isinstance(what, End) and what.outcome == "completed"
        }
        self._open: set[tuple[str, str]] = set()
        self._last_seconds = 0.0

    def run(self) -> None:
        start = self._entries[0][0]
        for at, what in self._entries:
            if not isinstance(what, End):
                self._last_seconds = at - start
                self._simulation.at(at - start, lambda event=what: self._tell(event))  # type: ignore[misc]
        self._simulation.run(self._last_seconds)
        self._simulation.run(self._last_seconds + PATIENCE_SECONDS, stop=lambda: not self._open)

    def _tell(self, event: Event) -> None:
        simulation = self._simulation
        match event:
            case JoinEngine():
                simulation.add_engine(self._engine(event.facts))
                return
            case AttachConsumer():
                simulation.connect(event.run_id, event.consumer_id, self._receive)
            case SubmitRollouts():
                specs = tuple(one for spec in event.specs for one in self._samples(event.run_id, spec))
                self._open.update((event.run_id, spec.rollout_id) for spec in specs)
                event = replace(event, specs=specs)
            case Reconfigure():
                if not self._reconfigured:
                    return
                event = Reconfigure(keeping_fixed(event.config, self._config))
            case PublishPolicy() if not event.update.path:
                event = replace(event, update=replace(event.update, path="pushed"))  # nobody is there to push
        refused = [one for one in simulation.send(event) if isinstance(one, Refuse)]
        if refused and isinstance(event, SubmitRollouts):
            self._open.difference_update((event.run_id, spec.rollout_id) for spec in event.specs)

    def _engine(self, facts: EngineFacts) -> SimEngine:
        machine = MachineConfig(
            slots=facts.slots,
            kv_tokens=max(facts.kv_capacity_tokens, 2 * facts.page_tokens),
            page_size_tokens=facts.page_tokens,
            context_tokens=facts.context_tokens or UNKNOWN_CONTEXT_TOKENS,
            timing=self._timing,
            weight_version=facts.engine_version,
            write_tokens=False,
        )
        return SimEngine(facts.engine_id, machine, incarnation=facts.incarnation, pool=facts.pool, run_id=facts.run_id)

    def _samples(self, run_id: str, spec: RolloutSpec) -> list[RolloutSpec]:
        """One spec per sample, each with its recorded length in the engine's words."""
        if spec.text is not None:
            raise EventLogError(f"rollout {spec.rollout_id!r} has a text prompt; only token ids can be replayed")
        several = spec.samples > 1
        specs = []
        for sample in range(spec.samples):
            rollout_id = f"{spec.rollout_id}/{sample}" if several else spec.rollout_id
            tokens = self._lengths.get((run_id, rollout_id), spec.max_new_tokens)
            sampling = {"custom_params": {"end_at_tokens": spec.prompt_tokens + max(1, tokens)}}
            specs.append(
                replace(
                    spec,
                    rollout_id=rollout_id,
                    samples=1,
                    seeds=spec.seeds[sample : sample + 1],
                    group_id=spec.group_id or (spec.rollout_id if several else ""),
                    group_size=spec.group_size or (spec.samples if several else 0),
                    sampling=sampling,
                )
            )
        return specs

    def _receive(self, delivery: Deliver) -> None:
        if not isinstance(delivery.event, Finished):
            return
        result = delivery.event.result
        self.ends.append((self._simulation.now, end_of(result)))
        self._open.discard((result.run_id, result.rollout_id))
        acknowledge = AcknowledgeResults(
            delivery.run_id, delivery.consumer_id, (Acknowledgement(result.rollout_id, used=True),)
        )
        self._simulation.at(self._simulation.now, lambda: _ignore(self._simulation.send(acknowledge)))


def _ignore(_: object) -> None:
    return None


def figures_of(run: str, ends: Ends) -> list[ReplayFigures]:
    """One per kind that occurs, critical first."""
    order = ("critical", "reward", "reusable", "background")
    figures = []
    for kind in sorted({end.kind for _, end in ends}, key=order.index):
        of_kind = [(at, end) for at, end in ends if end.kind == kind]
        done = [end for _, end in of_kind if end.outcome == "completed"]
        prompts = sum(end.prompt_tokens for end in done)
        waits, totals = [end.queued_seconds for end in done], [end.total_seconds for end in done]
        figures.append(
            ReplayFigures(
                run=run,
                kind=kind,
                rollouts=len(of_kind),
                completed=len(done),
                wait_p50_seconds=_rounded(percentile(waits, 50)),
                wait_p99_seconds=_rounded(percentile(waits, 99)),
                total_p50_seconds=_rounded(percentile(totals, 50)),
                total_p99_seconds=_rounded(percentile(totals, 99)),
                last_end_seconds=_rounded(max((at for at, _ in of_kind), default=None)),
                prefix_hit=_rounded(sum(end.cached_tokens for end in done) / prompts if prompts else None),
            )
        )
    return figures


def table_of(figures: Sequence[ReplayFigures]) -> Table:
    """One row per kind and run."""
    table = Table(title="replay", title_justify="left")
    names = list(asdict(figures[0])) if figures else []
    for name in names:
        table.add_column(
            name.replace("_seconds", " s").replace("_", " "), justify="left" if name in ("run", "kind") else "right"
        )
    for one in sorted(figures, key=lambda one: [of.kind for of in figures].index(one.kind)):
        table.add_row(*("-" if value is None else str(value) for value in asdict(one).values()))
    return table


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


if __name__ == "__main__":
    raise SystemExit(main())
