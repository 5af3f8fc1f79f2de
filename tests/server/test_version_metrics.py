"""Metrics of policy versions: publications, updates of engines, who is held, how old results are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from rolloutd.engines.base import EngineFault
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.scheduler import actions, events
from rolloutd.scheduler.result import RolloutResult, Span
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import Outcome, UpdateMode, UpdateState
from rolloutd.server.version_metrics import VersionMetrics
from rolloutd.v1 import UPDATE_MODE_DRAIN, UPDATE_STATE_PUSHING, ConfirmWeightsRequest
from tests.server.harness import running_server, submission
from tests.server.test_publish import TWO, Watch, disk, pushed


def scrape(registry: CollectorRegistry) -> Mapping[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_publications_are_counted_and_engines_show_what_they_hold() -> None:
    async with running_server(engines=TWO) as rig:
        await Watch(rig, disk(3)).end()
        bad = rig.doors[TWO[1]]
        bad.control_faults["load_weights"] = EngineFault(DoorFault.REFUSED, "no such file")
        await Watch(rig, disk(4, mode=UPDATE_MODE_DRAIN)).end()
        values = scrape(rig.server.metrics.registry)
        assert values['rolloutd_publications_total{mode="retract",outcome="complete"}'] == 1
        assert values['rolloutd_publications_total{mode="drain",outcome="partial"}'] == 1
        assert values['rolloutd_engine_update_seconds_count{mode="retract",outcome="updated"}'] == 2
        assert values['rolloutd_engine_update_seconds_count{mode="drain",outcome="updated"}'] == 1
        assert values['rolloutd_engine_update_seconds_count{mode="drain",outcome="failed"}'] == 1
        assert values['rolloutd_engine_update_seconds_sum{mode="retract",outcome="updated"}'] > 0
        assert values['rolloutd_run_policy_version{pool="policy",run="run"}'] == 4
        assert values['rolloutd_engine_policy_version{engine="engine-0:1",pool="policy"}'] == 4
        assert values['rolloutd_engine_policy_version{engine="engine-1:1",pool="policy"}'] == 3
        assert values['rolloutd_engine_up{engine="engine-1:1",pool="policy"}'] == 0
        held = {reason: values[f'rolloutd_engines_held{{reason="{reason}"}}'] for reason in ("updating", "quarantined")}
        assert held == {"updating": 0, "quarantined": 1}


async def test_an_engine_that_waits_for_weights_is_held_for_its_update() -> None:
    async with running_server() as rig:
        watch = Watch(rig, pushed(5))
        await watch.until(UPDATE_STATE_PUSHING)
        assert scrape(rig.server.metrics.registry)['rolloutd_engines_held{reason="updating"}'] == 1
        await rig.trainer.ConfirmWeights(ConfirmWeightsRequest(run_id="run", version=5))
        await watch.end()
        assert scrape(rig.server.metrics.registry)['rolloutd_engines_held{reason="updating"}'] == 0


async def test_results_are_counted_by_how_old_they_are() -> None:
    async with running_server() as rig, rig.stream() as stream:
        seen: list[RolloutResult] = []

        def note(event: Any, result: list[actions.Action]) -> None:
            delivered = [one.event for one in result if isinstance(one, actions.Deliver)]
            seen.extend(one.result for one in delivered if isinstance(one, actions.Finished))

        rig.server.loop.observers.append(note)
        await stream.submit(submission("r"))
        await stream.next("finished")
        (fresh,) = seen
        assert scrape(rig.server.metrics.registry)['rolloutd_result_staleness_versions_count{outcome="complete"}'] == 1
    registry = CollectorRegistry()
    metrics = VersionMetrics(registry, lambda: 0.0)
    old = (Span(3, "3", 0, 1, "e", 1), Span(5, "5", 1, 2, "e", 1))
    metrics.ended(fresh)
    metrics.ended(dataclasses.replace(fresh, policy_version=5, spans=old))
    metrics.ended(dataclasses.replace(fresh, policy_version=5, spans=old, stale=True))
    metrics.ended(
        dataclasses.replace(fresh, policy_version=99, spans=old, stale=True, outcome=Outcome.STALE, complete=False)
    )
    values = scrape(registry)
    assert values['rolloutd_result_staleness_versions_bucket{le="0.0",outcome="complete"}'] == 1
    assert values['rolloutd_result_staleness_versions_bucket{le="1.0",outcome="complete"}'] == 1
    assert values['rolloutd_result_staleness_versions_bucket{le="2.0",outcome="complete"}'] == 3
    assert values['rolloutd_result_staleness_versions_bucket{le="8.0",outcome="incomplete"}'] == 0
    assert values['rolloutd_result_staleness_versions_sum{outcome="incomplete"}'] == 96
    assert values['rolloutd_stale_results_total{action="flagged"}'] == 1
    assert values['rolloutd_stale_results_total{action="withheld"}'] == 1


def test_what_was_published_without_a_request_has_a_label_of_its_own_and_nothing_is_kept() -> None:
    registry = CollectorRegistry()
    now = 10.0
    metrics = VersionMetrics(registry, lambda: now)

    def progress(engine_id: str, state: UpdateState) -> actions.PublishProgress:
        return actions.PublishProgress("run", "policy", 7, engine_id, state)

    metrics.observe(events.Tick(), [progress("e0", UpdateState.WAITING), progress("e1", UpdateState.CLEARING)])
    now = 12.0
    metrics.observe(events.Tick(), [progress("e0", UpdateState.FAILED), progress("e1", UpdateState.UPDATED)])
    metrics.observe(events.Tick(), [actions.PublishEnded("run", "policy", 7, ("e1",), ("e0",))])
    at_once = events.PublishPolicy("run", PolicyUpdate(1, "/w", UpdateMode.DRAIN))
    values = scrape(registry)
    assert values['rolloutd_publications_total{mode="catch_up",outcome="partial"}'] == 1
    assert values['rolloutd_engine_update_seconds_sum{mode="catch_up",outcome="updated"}'] == 2.0
    assert 'rolloutd_engine_update_seconds_sum{mode="catch_up",outcome="failed"}' not in values
    metrics.observe(at_once, [actions.PublishEnded("run", "policy", 1, (), ("e0",))])
    assert scrape(registry)['rolloutd_publications_total{mode="drain",outcome="failed"}'] == 1
    assert not metrics._modes and not metrics._turns
