"""What the Prometheus endpoint shows: counters fed by the run loop, gauges read from the core's views at scrape.

Invariants
- Labels are bounded: classes, task types, outcomes and gates are closed lists; engines are registered ones; at most
  `MAX_RUN_LABELS` runs are named, the others are summed under "_other" (ratios: left out).
- A rollout that is delivered again after a reconnect is counted once: only its end counts, not its delivery.

What this module does not know: HTTP (`metrics_endpoint.py`) and how the core counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.states import OUTCOMES, AbortReason, Outcome, RolloutClass, TaskType, TrainerState
from rolloutd.scheduler.views import RunView
from rolloutd.server.kv_metrics import KvEventsMetrics
from rolloutd.server.loop import RunLoop
from rolloutd.server.over_launch_metrics import run_over_launch
from rolloutd.server.reload import Reloader
from rolloutd.server.rule_metrics import RuleMetrics
from rolloutd.server.state import ServerState
from rolloutd.server.tallies import Count, CountTally, Spread, SpreadTally
from rolloutd.server.version_metrics import VersionMetrics, engine_versions, run_versions

MAX_RUN_LABELS = 64
OTHER_RUNS = "_other"

# From a reward query on an idle engine to a rollout that waited for hours.
_WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900, 3600)
_TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_STEP_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a start time beside every series would double them

_CLASS_TASK = ("rollout_class", "task_type")


class Metrics:
    """One registry per server; `observe` hangs on the run loop."""

    def __init__(self, state: ServerState, reloader: Reloader) -> None:
        self._loop: RunLoop = state.loop
        self.registry = CollectorRegistry()
        for process_collector in (ProcessCollector, PlatformCollector, GCCollector):
            process_collector(registry=self.registry)
        self._finished = self._count("rollouts_finished", "Rollouts that ended", *_CLASS_TASK, "outcome")
        self._faults = self._count("rollouts_failed_by_engines", "Rollouts whose end was an engine's fault")
        self._wait = self._spread("rollout_wait_seconds", "Waiting, over all attempts", _WAIT_BUCKETS)
        self._first_token = self._spread(
            "rollout_first_token_seconds", "From acceptance to the first token", _WAIT_BUCKETS
        )
        self._total = self._spread("rollout_total_seconds", "From acceptance to the end", _WAIT_BUCKETS)
        self._length = self._spread(
            "rollout_generated_tokens", "Generated tokens per completed rollout", _TOKEN_BUCKETS
        )
        self._batch = self._spread(
            "attempt_execution_seconds", "Time on an engine, per completed rollout", _WAIT_BUCKETS, "engine"
        )
        self._generated = self._count("generated_tokens", "Tokens generated", *_CLASS_TASK)
        self._prompt = self._count("prompt_tokens", "Prompt tokens of dispatched rollouts")
        self._predicted = self._count("prefix_hit_predicted_tokens", "Prompt tokens expected in a prefix cache")
        self._hit = self._count("prefix_hit_actual_tokens", "Prompt tokens engines served from their prefix cache")
        self._rows: dict[tuple[RolloutClass, TaskType], _Row] = {}
        self._outcomes: dict[tuple[RolloutClass, TaskType, Outcome], Count] = {}
        self._aborts = Counter("rolloutd_aborts", "Attempts asked to stop", ["reason"], registry=self.registry)
        self._refused = Counter(
            "rolloutd_submissions_refused", "Submissions refused", ["reason"], registry=self.registry
        )
        self._step = Histogram(
            "rolloutd_training_step_seconds", "Training step time, as reported", buckets=_STEP_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self._versions = VersionMetrics(self.registry, state.loop.clock)
        self._trainers: dict[str, _TrainerClock] = {}
        self.registry.register(_Views(state, self._trainers))
        self.registry.register(RuleMetrics(state, reloader))
        self.registry.register(KvEventsMetrics(state.engines, state.loop))
        state.loop.observers.append(self.observe)

    def _count(self, name: str, text: str, *labels: str) -> CountTally:
        return CountTally(f"rolloutd_{name}", text, labels, registry=self.registry)

    def _spread(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> SpreadTally:
        return SpreadTally(f"rolloutd_{name}", text, labels or _CLASS_TASK, buckets=buckets, registry=self.registry)

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """One event and what the core made of it."""
        if isinstance(event, events.ReportStep) and not (result and isinstance(result[0], actions.Refuse)):
            if event.report.step_seconds is not None:
                self._step.observe(event.report.step_seconds)
            clock = self._trainers.get(event.run_id)
            if clock is None:
                if len(self._trainers) >= MAX_RUN_LABELS:
                    self._trainers.pop(next(iter(self._trainers)))
                clock = self._trainers[event.run_id] = _TrainerClock(self._loop.clock())
            clock.enter(event.report.trainer_state, self._loop.clock())
        self._versions.observe(event, result)
        if isinstance(event, events.AttachConsumer):
            return  # what is delivered again was counted when it ended
        for action in result:
            if isinstance(action, actions.Deliver):
                delivered = action.event
                if isinstance(delivered, actions.Finished):
                    if (ended := actions.ended(action)) is not None:
                        self._ended(ended)
                elif isinstance(delivered, actions.Rejected):
                    self._refused.labels(delivered.error.reason).inc()
            elif isinstance(action, actions.Undelivered):
                if (ended := actions.ended(action)) is not None:
                    self._ended(ended)
            elif isinstance(action, actions.Abort):
                self._aborts.labels(AbortReason(action.reason).name.lower()).inc()

    def _ended(self, result: RolloutResult) -> None:
        kind = result.rollout_class, result.task_type
        row = self._rows.get(kind) or self._row(*kind)
        outcome = self._outcomes.get((*kind, result.outcome)) or self._outcome(*kind, result.outcome)
        outcome.add()
        if OUTCOMES[result.outcome].engines_fault:
            self._faults.add()
        self._versions.ended(result)
        row.wait.add(result.queued_seconds)
        row.total.add(result.total_seconds)
        if result.first_token_seconds:
            row.first_token.add(result.first_token_seconds)
        if result.complete:
            row.length.add(result.generated_tokens)
            self._batch.add((result.engine_id,), result.running_seconds)
        row.generated.add(result.generated_tokens)
        if result.attempts:
            self._prompt.add(amount=result.prompt_tokens)
            self._predicted.add(amount=result.predicted_cached_tokens)
            self._hit.add(amount=result.cached_tokens)

    def _row(self, rollout_class: RolloutClass, task_type: TaskType) -> _Row:
        labels = (label(rollout_class), label(task_type))
        row = self._rows[rollout_class, task_type] = _Row(
            self._wait.series(labels),
            self._first_token.series(labels),
            self._total.series(labels),
            self._length.series(labels),
            self._generated.series(labels),
        )
        return row

    def _outcome(self, rollout_class: RolloutClass, task_type: TaskType, outcome: Outcome) -> Count:
        labels = (label(rollout_class), label(task_type), OUTCOMES[outcome].label)
        series = self._outcomes[rollout_class, task_type, outcome] = self._finished.series(labels)
        return series


@dataclass(slots=True)
class _Row:
    """The series that the end of a rollout of one class and task is added to."""

    wait: Spread
    first_token: Spread
    total: Spread
    length: Spread
    generated: Count


class _TrainerClock:
    """Time a trainer spent in each state, by its own reports."""

    def __init__(self, now: float) -> None:
        self._state = TrainerState.UNKNOWN
        self._since = now
        self._seconds = dict.fromkeys(TrainerState, 0.0)

    def enter(self, state: TrainerState, now: float) -> None:
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def seconds(self, now: float) -> dict[TrainerState, float]:
        current = dict(self._seconds)
        current[self._state] += now - self._since
        return current


class _Views(Collector):
    """Gauges and counters that the core keeps itself. Runs on the event loop's thread, like every read of the core."""

    def __init__(self, state: ServerState, trainers: dict[str, _TrainerClock]) -> None:
        self._state = state
        self._trainers = trainers

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to read before the first scrape

    def collect(self) -> Iterator[Metric]:
        yield from self._statistics()
        yield from self._engines()
        yield from self._runs()

    def _statistics(self) -> Iterator[Metric]:
        statistics = self._state.loop.core.statistics()
        queued = GaugeMetricFamily("rolloutd_queued_rollouts", "Rollouts waiting", labels=_CLASS_TASK)
        for (kind, task), count in statistics.queued.items():
            queued.add_metric([label(kind), label(task)], count)
        yield queued
        gates = CounterMetricFamily("rolloutd_gate_closed", "How often a gate kept work back", labels=["gate"])
        for gate, count in statistics.gates.items():
            gates.add_metric([gate.name.lower()], count)
        yield gates
        for name, text, value in (
            ("held_rollouts", "Rollouts held for a leader or a prefix", statistics.held),
            ("running_rollouts", "Rollouts on engines", statistics.running),
            ("index_bytes", "Memory of the prefix index", statistics.index_bytes),
            ("index_nodes", "Nodes of the prefix index", statistics.index_nodes),
            ("index_pages", "Pages in the prefix index", statistics.index_pages),
            ("undelivered_bytes", "Results not acknowledged yet", statistics.undelivered_bytes),
            ("undelivered_results", "Results not acknowledged yet", statistics.undelivered_results),
            ("draining", "1 while the server shuts down", int(self._state.draining)),
        ):
            yield GaugeMetricFamily(f"rolloutd_{name}", text, value=value)
        for name, text, value in (
            ("dispatched", "Attempts sent to engines", statistics.dispatched_total),
            ("preempted", "Rollouts preempted", statistics.preempted_total),
            ("retried", "Attempts after a fault", statistics.retried_total),
            ("batches", "Batches dispatched", statistics.batches_total),
        ):
            yield CounterMetricFamily(f"rolloutd_{name}", text, value=value)

    def _engines(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"rolloutd_engine_{name}", text, labels=["engine", "pool", *labels])

        up = gauge("up", "1 while it takes work")
        slots = gauge("slots", "Rollouts it runs at a time")
        in_flight = gauge("in_flight_rollouts", "Rollouts we have there")
        ghosts = gauge("ghost_rollouts", "Running there beyond what we sent")
        breaker = gauge("breaker_open", "1 while its breaker is open")
        kv = gauge("kv_tokens", "KV tokens", "kind")
        decode = gauge("decode_seconds_per_token", "Decode time of one sequence in its batch")
        prefill = gauge("prefill_tokens_per_second", "Prefill speed, measured")
        families = (up, slots, in_flight, ghosts, breaker, kv, decode, prefill)
        views = self._state.loop.core.engine_views()
        for view in views:
            labels = [view.engine_id, view.pool]
            up.add_metric(labels, int(view.state == "ready"))
            slots.add_metric(labels, view.slots)
            in_flight.add_metric(labels, view.in_flight)
            ghosts.add_metric(labels, view.ghosts)
            breaker.add_metric(labels, int(view.breaker_open))
            decode.add_metric(labels, view.decode_seconds_per_token)
            prefill.add_metric(labels, view.prefill_tokens_per_second)
            for kind, value in (
                ("capacity", view.kv_capacity_tokens),
                ("claimed", view.kv_claimed_tokens),
                ("used", view.kv_used_tokens),
                ("used_peak", view.kv_used_peak_tokens),
            ):
                kv.add_metric([*labels, kind], value)
        yield from families
        yield from engine_versions(views)

    def _runs(self) -> Iterator[Metric]:
        now = self._state.loop.clock()
        views = sorted(self._state.loop.core.run_views(now), key=lambda view: view.run_id)
        named, others = views[:MAX_RUN_LABELS], views[MAX_RUN_LABELS:]
        sums: dict[str, tuple[str, Callable[[RunView], float]]] = {
            "running_rollouts": ("Rollouts on engines", lambda view: view.running_rollouts),
            "kv_claimed_tokens": ("KV tokens committed", lambda view: view.kv_claimed_tokens),
            "finished_samples": ("Rollouts that completed", lambda view: view.finished_samples),
            "valid_samples": ("Results acknowledged as used", lambda view: view.valid_samples),
            "demand_tokens_per_second": ("Tokens the trainer eats", lambda view: view.demand_tokens_per_second),
            "supply_tokens_per_second": ("Tokens the engines make", lambda view: view.supply_tokens_per_second),
            "desired_engines": ("Engines that would meet demand", lambda view: view.desired_engines),
            "undelivered_bytes": ("Results not acknowledged yet", lambda view: view.undelivered_bytes),
            "held_results": ("Results kept back for the target mix", lambda view: view.held_results),
            "stale_results": ("Results older than they may be, withheld or flagged", lambda view: view.stale_results),
        }
        for name, (text, value) in sums.items():
            family = GaugeMetricFamily(f"rolloutd_run_{name}", text, labels=["run"])
            for view in named:
                family.add_metric([view.run_id], value(view))
            if others:
                family.add_metric([OTHER_RUNS], sum(value(view) for view in others))
            yield family
        ratios: dict[str, tuple[str, Callable[[RunView], float]]] = {
            "phase_blend": ("0 is COLD_START, 1 is STABLE", lambda view: view.phase_blend),
            "step": ("Training step last reported", lambda view: view.step),
            "diversity_distance": ("Total variation to the target mix", lambda view: view.diversity_distance),
            "strata_coverage": ("Share of strata seen lately", lambda view: view.strata_coverage),
            "distinct_outputs": ("Share of distinct outputs lately", lambda view: view.distinct_outputs),
        }
        for name, (text, value) in ratios.items():
            family = GaugeMetricFamily(f"rolloutd_run_{name}", text, labels=["run"])
            for view in named:
                family.add_metric([view.run_id], value(view))
            yield family
        yield from run_versions(named)
        yield from run_over_launch(named)
        yield from self._trainer_time(named, now)

    def _trainer_time(self, named: list[RunView], now: float) -> Iterator[Metric]:
        time_in_state = CounterMetricFamily(
            "rolloutd_trainer_state_seconds", "Time the trainer spent in each state", labels=["run", "state"]
        )
        idle = GaugeMetricFamily(
            "rolloutd_trainer_idle_ratio", "Share of its time the trainer waited for rollouts", labels=["run"]
        )
        for view in named:
            clock = self._trainers.get(view.run_id)
            if clock is None:
                continue
            seconds = clock.seconds(now)
            for state, value in seconds.items():
                time_in_state.add_metric([view.run_id, state.name.lower()], value)
            known = sum(value for state, value in seconds.items() if state is not TrainerState.UNKNOWN)
            if known > 0:
                idle.add_metric([view.run_id], seconds[TrainerState.WAITING] / known)
        yield time_in_state
        yield idle


def label(member: RolloutClass | TaskType) -> str:
    """The metric label of a class or task type."""
    return member.name.lower()
