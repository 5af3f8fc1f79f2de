"""What the Prometheus endpoint shows of policy versions: publications, how far engines are, how old results are.

Invariants
- Labels are bounded: modes, outcomes, actions and staleness values are closed lists; engines are registered ones, runs
  those that `metrics.py` names.
- An engine's update is timed from its turn to its end, by the core's own words.

What this module does not know: how a version gets to an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.states import Outcome, UpdateState
from rolloutd.scheduler.views import EngineView, RunView
from rolloutd.server.loop import refusal_of
from rolloutd.server.tallies import CountTally, SpreadTally

# From a label alone on a small model to a large checkpoint on a slow disk.
_UPDATE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200)
_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
# What gives engines that come later their version; nobody asked for it.
CATCH_UP = "catch_up"
HELD_KINDS = ("updating", "memory", "quarantined")

_Publication = tuple[str, str, int]  # run, pool, version


class VersionMetrics:
    """Fed by `Metrics.observe`. `clock`: the run loop's."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._modes: dict[_Publication, str] = {}  # of publications that are not over
        self._turns: dict[tuple[_Publication, str], float] = {}  # when an engine's turn came
        self._publications = CountTally(
            "rolloutd_publications", "Publications that ended", ("mode", "outcome"), registry=registry
        )
        self._updates = SpreadTally(
            "rolloutd_engine_update_seconds",
            "From an engine's turn to its end in a publication",
            ("mode", "outcome"),
            buckets=_UPDATE_BUCKETS,
            registry=registry,
        )
        self._staleness = SpreadTally(
            "rolloutd_result_staleness_versions",
            "Versions that the oldest token of a result was behind the newest policy when it ended",
            ("outcome",),
            buckets=_STALENESS_BUCKETS,
            registry=registry,
        )
        self._stale = CountTally(
            "rolloutd_stale_results", "Results older than they may be when they ended", ("action",), registry=registry
        )

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """One event and what the core made of it."""
        if isinstance(event, events.PublishPolicy) and refusal_of(result) is None:
            update = event.update
            self._modes.setdefault((event.run_id, update.pool, update.version), update.mode.name.lower())
        for action in result:
            if isinstance(action, actions.PublishProgress):
                self._progressed(action)
            elif isinstance(action, actions.PublishEnded):
                self._published(action)

    def ended(self, result: RolloutResult) -> None:
        """One rollout ended."""
        if result.outcome is Outcome.STALE:
            self._stale.add(("withheld",))
        elif result.stale:
            self._stale.add(("flagged",))
        if result.spans:
            self._staleness.add(("complete" if result.complete else "incomplete",), result.staleness)

    def _progressed(self, progress: actions.PublishProgress) -> None:
        publication = (progress.run_id, progress.pool, progress.version)
        key = (publication, progress.engine_id)
        if progress.state in (UpdateState.UPDATED, UpdateState.FAILED):
            began = self._turns.pop(key, None)
            if began is not None:  # else it failed before its turn
                labels = (self._modes.get(publication, CATCH_UP), progress.state.name.lower())
                self._updates.add(labels, self._clock() - began)
        elif progress.state is not UpdateState.WAITING:
            self._turns.setdefault(key, self._clock())

    def _published(self, ended: actions.PublishEnded) -> None:
        mode = self._modes.pop((ended.run_id, ended.pool, ended.version), CATCH_UP)
        if not ended.failed:
            outcome = "complete"
        else:
            outcome = "partial" if ended.updated else "failed"
        self._publications.add((mode, outcome))


def engine_versions(views: Iterable[EngineView]) -> Iterator[Metric]:
    """Per engine: the version it acknowledged; how many are held, and why."""
    version = GaugeMetricFamily(
        "rolloutd_engine_policy_version", "Policy version it has acknowledged", labels=["engine", "pool"]
    )
    held = dict.fromkeys(HELD_KINDS, 0)
    for view in views:
        version.add_metric([view.engine_id, view.pool], view.policy_version)
        if view.held_kind:
            held[view.held_kind] += 1
    yield version
    engines = GaugeMetricFamily("rolloutd_engines_held", "Engines that are there and get no work", labels=["reason"])
    for kind, count in held.items():
        engines.add_metric([kind], count)
    yield engines


def run_versions(views: Iterable[RunView]) -> Iterator[Metric]:
    """Per run: its newest versions, and how many samples are on their way where staleness bounds them."""
    newest = GaugeMetricFamily(
        "rolloutd_run_policy_version", "Newest version published, 0 is as registered", labels=["run", "pool"]
    )
    under_way = GaugeMetricFamily(
        "rolloutd_run_samples_on_their_way", "Samples that the staleness bound counts", labels=["run"]
    )
    allowed = GaugeMetricFamily("rolloutd_run_samples_allowed", "Samples that it allows", labels=["run"])
    for view in views:
        for pool, version in (view.policy_versions or {"policy": 0}).items():
            newest.add_metric([view.run_id, pool], version)
        if view.samples_allowed is not None:
            under_way.add_metric([view.run_id], view.samples_on_their_way)
            allowed.add_metric([view.run_id], view.samples_allowed)
    yield from (newest, under_way, allowed)
