"""Metrics of rules and of reloads, at the moment of a scrape.

What this module does not know: when rules fire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolloutd.server.reload import Reloader
from rolloutd.server.state import ServerState

MOST_RUNS = 64  # with series of their own: as many as of any other metric of runs


class RuleMetrics(Collector):
    """Runs on the event loop's thread, like every read of the core."""

    def __init__(self, state: ServerState, reloader: Reloader) -> None:
        self._state = state
        self._reloader = reloader

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to read before the first scrape

    def collect(self) -> Iterator[Metric]:
        active = GaugeMetricFamily("rolloutd_rule_active", "1 while the rule is active", labels=["run", "rule"])
        firings = CounterMetricFamily("rolloutd_rule_firings", "How often the rule fired", labels=["run", "rule"])
        values = GaugeMetricFamily(
            "rolloutd_rule_metric", "What the rule looks at, at the last look", labels=["run", "rule", "metric"]
        )
        loop = self._state.loop
        for view in sorted(loop.core.run_views(loop.clock()), key=lambda view: view.run_id)[:MOST_RUNS]:
            for rule in view.rules:
                active.add_metric([view.run_id, rule.name], int(rule.active))
                firings.add_metric([view.run_id, rule.name], rule.firings)
                if rule.value is not None:
                    values.add_metric([view.run_id, rule.name, rule.metric], rule.value)
        yield from (active, firings, values)
        reloads = CounterMetricFamily(
            "rolloutd_config_reloads", "Times the configuration was read again", labels=["result"]
        )
        for result, count in self._reloader.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "rolloutd_config_refused",
            "1 while the last configuration that was read was refused, and an older one is in force",
            value=int(bool(self._reloader.refused_because)),
        )
