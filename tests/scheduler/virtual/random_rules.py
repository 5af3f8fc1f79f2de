"""Rules of a random world, and other settings while it lives.

Drawn by a generator of its own, so that what else happens in a world does not depend on them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from rolloutd.scheduler.actions import Action, Decided
from rolloutd.scheduler.config import SchedulerConfig, WeightDefaults
from rolloutd.scheduler.events import Event
from rolloutd.scheduler.rules.rule import METRIC_NAMES, WEIGHT_NAMES, Effects, Rule
from rolloutd.scheduler.states import RolloutClass
from rolloutd.scheduler.views import DecisionKind

# Around values that small worlds have, so that rules fire and end in them; others have one around 0.5.
LEVELS = {
    "trainer_waiting_seconds": 1.0,
    "training_queued_seconds": 0.5,
    "queued_critical": 2.0,
    "queued_reusable": 2.0,
    "queued_background": 2.0,
    "running_rollouts": 3.0,
    "engines_ready": 1.5,
}


class RandomRules:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"rules-{seed}")
        self.wanted = self.rng.random() < 0.7

    def added(self, config: SchedulerConfig) -> SchedulerConfig:
        """The world's settings with rules in most worlds."""
        if not self.wanted:
            return config
        rng = self.rng
        queue = replace(config.queue, rule_period_seconds=rng.choice([0.1, 0.5, 2.0]))
        return replace(config, queue=queue, rules=self._rules())

    def changed(self, config: SchedulerConfig) -> SchedulerConfig:
        """Other settings: any of those that the auditor does not count on."""
        rng = self.rng
        preempt = replace(config.preempt, enabled=rng.random() < 0.5, min_run_seconds=rng.choice([0.0, 0.5]))
        queue = replace(
            config.queue,
            rule_period_seconds=rng.choice([0.1, 0.5, 2.0]),
            max_batch_size=rng.choice([2, 32]),
            aging_seconds=rng.choice([2.0, 60.0]),
            reserved_short_slots=rng.choice([0, 1]),
            decision_ring=rng.choice([1, 64]),
        )
        policy = replace(
            config.policy, cold_start_steps=rng.choice([0, 200]), stable_prefix_ttl_versions=rng.choice([0, 2])
        )
        weights = WeightDefaults(waiting=rng.choice([0.0, 0.2]), critical=rng.choice([0.0, 1.0]))
        rules = rng.choice([(), self._rules(), config.rules])
        return replace(config, preempt=preempt, queue=queue, policy=policy, weights=weights, rules=rules)

    def moments(self, horizon_seconds: float) -> list[float]:
        """When settings change."""
        return [self.rng.uniform(0.0, horizon_seconds) for _ in range(self.rng.randint(0, 3) if self.wanted else 0)]

    def _rules(self) -> tuple[Rule, ...]:
        return tuple(self._rule(f"r{number}") for number in range(self.rng.randint(1, 5)))

    def _rule(self, name: str) -> Rule:
        rng = self.rng
        metric = rng.choice(METRIC_NAMES)
        level = LEVELS.get(metric, 0.5) * rng.uniform(0.2, 1.5)
        above = rng.random() < 0.5
        return Rule(
            name,
            metric,
            above,
            level,
            level * (0.6 if above else 1.5),
            self._effects(),
            for_periods=rng.choice([1, 1, 2]),
            end_periods=rng.choice([1, 1, 2]),
            cool_down_seconds=rng.choice([0.0, 0.0, 1.0]),
        )

    def _effects(self) -> Effects:
        rng = self.rng
        lower = [RolloutClass.REUSABLE, RolloutClass.BACKGROUND]
        possible: dict[str, Any] = {
            "share_factors": {rng.choice(list(RolloutClass)): rng.choice([0.2, 1.5, 4.0])},
            "weight_factors": {rng.choice(WEIGHT_NAMES): rng.choice([0.0, 0.5, 3.0])},
            "weights": {rng.choice(WEIGHT_NAMES): rng.choice([0.0, 2.0])},
            "cap_factor": rng.choice([0.01, 0.5, 0.9]),
            "preempt": tuple(rng.sample(lower, rng.randint(1, 2))),
            "engines_factor": rng.choice([0.5, 2.0]),
        }
        return Effects(**{name: possible[name] for name in rng.sample(list(possible), rng.randint(1, 3))})


def count_changes(counts: Counter[str], _: Event, actions: list[Action]) -> None:
    """Firings and ends, for those who want to know that they happened."""
    for action in actions:
        if isinstance(action, Decided):
            counts["rules fired" if action.decision.kind is DecisionKind.RULE_FIRED else "rules ended"] += 1
