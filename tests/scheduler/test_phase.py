"""COLD_START and STABLE: the table of parameters, the ramp, the band, and what stands in for entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rolloutd.scheduler.config import PolicySettings, SchedulerConfig
from rolloutd.scheduler.phase import SURPRISE_SMOOTHING, PhaseState
from rolloutd.scheduler.placement import batch_limit
from rolloutd.scheduler.queueing import weights_of
from rolloutd.scheduler.turns import lower_turn
from rolloutd.scheduler.version_change import prefix_ttl_versions
from rolloutd.scheduler.views import Phase
from tests.scheduler.kit import Bench, engine

SETTINGS = PolicySettings(cold_start_steps=10, phase_ramp_steps=5, cold_start_entropy=1.0, entropy_band=0.2)


def test_stable_needs_the_steps_and_an_entropy_below_its_threshold() -> None:
    phase = PhaseState(SETTINGS)
    assert not phase.advance(9, 0.5) and phase.phase is Phase.COLD_START
    assert not phase.advance(12, 1.1)
    assert phase.advance(13, 1.0) and phase.phase is Phase.STABLE


def test_it_goes_back_only_across_the_other_side_of_the_band() -> None:
    phase = PhaseState(SETTINGS)
    phase.advance(10, 0.9)
    for step, entropy in ((11, 1.05), (12, 1.2), (13, 0.9)):
        assert not phase.advance(step, entropy)
    assert phase.advance(14, 1.21) and phase.phase is Phase.COLD_START
    assert not phase.advance(15, 1.05), "inside the band"


def test_parameters_move_linearly_over_the_ramp_in_both_directions() -> None:
    phase = PhaseState(replace(SETTINGS, cold_start_steps=0))
    blends = []
    for step, entropy in ((0, 0.5), (1, 0.5), (2, 0.5), (5, 0.5), (6, 2.0), (7, 2.0), (20, 2.0)):
        phase.advance(step, entropy)
        blends.append(phase.blend)
    assert blends == pytest.approx([0.0, 0.2, 0.4, 1.0, 0.8, 0.6, 0.0])
    assert PhaseState(SETTINGS).between(8.0, 32.0) == 8.0


def test_without_entropy_reports_minus_the_log_prob_of_recent_rollouts_stands_in() -> None:
    phase = PhaseState(SETTINGS)
    assert phase.wants_log_probs
    phase.note_log_prob(-2.0)
    phase.advance(10, None)
    assert phase.phase is Phase.COLD_START, "2.0 is above the threshold"
    for _ in range(100):
        phase.note_log_prob(-0.5)
    assert phase.surprise == pytest.approx(0.5 + 1.5 * (1 - SURPRISE_SMOOTHING) ** 100)
    phase.advance(11, None)
    assert phase.phase is Phase.STABLE
    assert not phase.advance(12, 1.1), "what is reported counts before the stand-in"


def test_where_nothing_says_how_sure_the_policy_is_steps_alone_decide() -> None:
    phase = PhaseState(SETTINGS)
    assert phase.advance(10, None) and phase.phase is Phase.STABLE
    assert not PhaseState(PolicySettings()).wants_log_probs


def test_every_parameter_of_the_table_follows_the_blend() -> None:
    policy = PolicySettings(
        cold_start_steps=2, phase_ramp_steps=4, cold_start_prefix_ttl_versions=0, stable_prefix_ttl_versions=4
    )
    bench = Bench(engine(), settings=replace(SchedulerConfig(), policy=policy))
    world = bench.core._world
    seen: list[dict[str, Any]] = []
    for step in (1, 3, 5):
        bench.step(step)
        run = bench.its_run()
        weights = weights_of(world, run)
        seen.append(
            {
                "prefix": weights.prefix,
                "diversity": weights.diversity,
                "batch": batch_limit(world, run),
                "ttl": prefix_ttl_versions(world, run),
                "lower turn": lower_turn(world, run),
            }
        )
    cold, between, stable = seen
    assert cold == {"prefix": 0.1, "diversity": 0.2, "batch": 8, "ttl": 0, "lower turn": 0}
    assert stable == {"prefix": 0.4, "diversity": 0.1, "batch": 32, "ttl": 4, "lower turn": 64}
    assert between == {
        "prefix": pytest.approx(0.25),
        "diversity": pytest.approx(0.15),
        "batch": 20,
        "ttl": 2,
        "lower turn": 128,
    }
