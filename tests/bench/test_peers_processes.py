"""`make bench-peers` with its processes: a small workload through rolloutd and through a router, on real simulated engines."""

from __future__ import annotations

import pytest

from rolloutd.bench.overhead_stack import router_command
from rolloutd.bench.peers import Cell, measure
from rolloutd.bench.peers_arms import ARMS, PRODUCT
from rolloutd.bench.simulate import Plan
from rolloutd.bench.simulated_pool import Pool
from rolloutd.scheduler.config import SchedulerConfig
from tests.bench.test_arms import MACHINE, SMALL

SCALE = 20.0


@pytest.mark.parametrize("arm", [PRODUCT, "sglang-router:cache_aware"])
async def test_two_epochs_of_everything_come_back_once(arm: str) -> None:
    if arm != PRODUCT:
        try:
            await router_command(ARMS[arm].package)
        except RuntimeError as error:
            pytest.skip(f"{ARMS[arm].package} cannot be installed here: {error}")
    vocabulary = MACHINE.model.vocabulary_size
    plan = Plan(
        SMALL.name,
        lambda seed, epoch: SMALL.draw(seed, vocabulary, epoch=epoch),
        Pool([MACHINE] * 3),
        2,
        SchedulerConfig(),
    )
    lines, _, problems = await measure(Cell(SMALL.name, 5, ARMS[arm], SCALE), plan)
    assert problems == {}
    assert [(line.arm, line.epoch, line.failed) for line in lines] == [(arm, 0, 0), (arm, 1, 0)]
    for line in lines:
        assert line.makespan_over_bound is not None and line.makespan_over_bound >= 1.0
        assert line.prefix_hit is not None and line.prefix_hit_ceiling is not None
        assert 0.0 < line.prefix_hit <= line.prefix_hit_ceiling
        assert line.imbalance is not None and 1.0 <= line.imbalance < 3.0
        assert line.session_mean_seconds is not None and line.reward_p99_seconds is None
