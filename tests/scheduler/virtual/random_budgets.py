"""Budgets of a random world: any while it lives, a sufficient one for its end."""

from __future__ import annotations

import random

from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import RolloutClass, TaskType
from tests.scheduler.virtual.random_fleet import LARGEST_PAGE, LONGEST_OUTPUT, LONGEST_PROMPT


def random_budget(rng: random.Random) -> Budget:
    """Of any kind: open, narrow, shut, with quotas, with a lease."""
    if rng.random() < 0.15:
        return Budget(max_rollouts=0)
    return Budget(
        max_rollouts=rng.choice([None, 1, 2, 4, 8]),
        max_kv_tokens=rng.choice([None, None, 0, 192, 300, 800]),
        training_reserved_mb=rng.choice([None] * 6 + [0.2, 0.5]),
        max_inference_mb=rng.choice([None] * 6 + [0.5, 1.0]),
        classes={one: _quota(rng) for one in RolloutClass if rng.random() < 0.4},
        tasks={one: _quota(rng) for one in TaskType if rng.random() < 0.15},
        lease_seconds=rng.choice([0.0, 0.0, 0.5, 3.0]),
    )


def _quota(rng: random.Random) -> Quota:
    floor = rng.choice([0, 0, 1, 2, 3])
    return Quota(
        max_rollouts=rng.choice([None, None, max(floor, 1), max(floor, 3)]),
        share=rng.choice([0.0, 0.0, 0.3, 1.0]),
        floor_rollouts=floor,
    )


def sufficient_budget(rng: random.Random) -> Budget:
    """Small, yet everything that was accepted fits it one at a time."""
    enough = -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // LARGEST_PAGE) * LARGEST_PAGE
    floors = {rng.choice(list(RolloutClass)): Quota(floor_rollouts=rng.choice([1, 2]))}
    return rng.choice(
        [
            Budget(),
            Budget(max_rollouts=2, classes=floors),
            Budget(max_rollouts=1),
            Budget(max_rollouts=2, max_kv_tokens=enough),
            Budget(max_kv_tokens=enough),
        ]
    )
