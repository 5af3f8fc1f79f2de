"""What the Prometheus endpoint shows of groups that keep fewer members than they are made of.

Invariants
- Labels are bounded: fates are a closed list, quintiles are five, runs are those that `metrics.py` names.
- A gain is never shown without its bias: how many were kept stands beside how long they were and from which fifth they came.

What this module does not know: when a member is surplus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rolloutd.scheduler.views import RunView


def run_over_launch(views: Iterable[RunView]) -> Iterator[Metric]:
    """Per run that has had such groups."""
    groups = CounterMetricFamily(
        "rolloutd_over_launch_groups", "Groups that keep fewer than they launched, ended", labels=["run"]
    )
    cut = CounterMetricFamily(
        "rolloutd_over_launch_longest_cut_groups",
        "Of these, in which a surplus member had written as much as the longest kept one: at least so many",
        labels=["run"],
    )
    rollouts = CounterMetricFamily(
        "rolloutd_over_launch_rollouts", "Members of these groups by their fate", labels=["run", "fate"]
    )
    tokens = CounterMetricFamily(
        "rolloutd_over_launch_tokens",
        "Tokens they had when they ended; of surplus ones less than they would have written",
        labels=["run", "fate"],
    )
    shares = GaugeMetricFamily(
        "rolloutd_over_launch_kept_share",
        "Share kept of each fifth of the launched by length, 1 the shortest; lengths of surplus ones are estimates",
        labels=["run", "quintile"],
    )
    for view in views:
        told = view.over_launch
        if told is None:
            continue
        groups.add_metric([view.run_id], told.groups)
        cut.add_metric([view.run_id], told.longest_cut_groups)
        failed = told.launched - told.kept - told.surplus
        for fate, count in (("kept", told.kept), ("surplus", told.surplus), ("failed", failed)):
            rollouts.add_metric([view.run_id, fate], count)
        for fate, count in (("kept", told.kept_tokens), ("surplus", told.surplus_tokens)):
            tokens.add_metric([view.run_id, fate], count)
        for quintile, share in enumerate(told.kept_share_by_quintile, start=1):
            shares.add_metric([view.run_id, str(quintile)], share)
    yield from (groups, cut, rollouts, tokens, shares)
