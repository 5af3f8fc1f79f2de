"""What one rule says, and what makes it impossible.

    when METRIC is above (or below) THRESHOLD for N periods, then EFFECTS, until it is back at END_THRESHOLD for M periods

Invariants
- `problem_of` is None for every rule in force. Such a rule has a band: while its metric is between the two thresholds nothing
  changes, so a metric that hovers around one of them does not make it flap.

What this module does not know: runs, time, and YAML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rolloutd.scheduler.states import RolloutClass

MOST_RULES: Final = 64  # each is looked at for each run and period, and is a series of a metric
MOST_NAME_CHARACTERS: Final = 64
MOST_PERIODS: Final = 8640  # a day of periods of 10 s
MOST_SECONDS: Final = 604_800.0  # a week
LARGEST_FACTOR: Final = 100.0
WEIGHT_NAMES: Final = ("prefix", "critical", "waiting", "diversity", "cost")
METRIC_NAMES: Final = (
    "buffer_fill",
    "trainer_waiting_seconds",
    "training_queued_seconds",
    "queued_critical",
    "queued_reusable",
    "queued_background",
    "running_rollouts",
    "slots_used",
    "kv_fill",
    "supply_over_demand",
    "prefix_hit",
    "preemptions_per_dispatch",
    "stale_share",
    "undelivered_fill",
    "diversity_distance",
    "policy_entropy",
    "engines_ready",
)


@dataclass(frozen=True, slots=True)
class Effects:
    """What a rule does while it is active. Factors are of what would hold without any rule; 1 changes nothing.

    share_factors: of the share of the run's slots that a class may fill while another class of it waits. weight_factors and
    weights: score terms, multiplied or set. cap_factor: of the rollouts that may run at once; only ever lowers. preempt: classes
    of this run whose running work may be interrupted for its waiting critical work, whatever `preempt.enabled`,
    `preempt.min_run_seconds` and `preempt.max_per_rollout` say. engines_factor: of the `desired_engines` signal.
    """

    share_factors: Mapping[RolloutClass, float] = field(default_factory=dict)
    weight_factors: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    cap_factor: float = 1.0
    preempt: tuple[RolloutClass, ...] = ()
    engines_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `above`: it fires above `threshold` and ends below `end_threshold`; else the other way round.

    for_periods, end_periods: how many periods in a row before it fires, and before it ends. cool_down_seconds: from an end until
    it may fire again.
    """

    name: str
    metric: str
    above: bool
    threshold: float
    end_threshold: float
    effects: Effects
    for_periods: int = 1
    end_periods: int = 1
    cool_down_seconds: float = 0.0

    def fires_at(self, value: float) -> bool:
        return value > self.threshold if self.above else value < self.threshold

    def ends_at(self, value: float) -> bool:
        return value < self.end_threshold if self.above else value > self.end_threshold


def problem_of(rule: Rule) -> tuple[str, str] | None:
    """(field, what is wrong with it and what would be right); None for a rule that can be used."""
    name = rule.name
    if not name or len(name) > MOST_NAME_CHARACTERS or not all(one.isalnum() or one in "-_." for one in name):
        return "name", f"is {name!r}; must be 1 to {MOST_NAME_CHARACTERS} letters, digits, '-', '_' or '.'"
    if rule.metric not in METRIC_NAMES:
        return "when.metric", f"is {rule.metric!r}; must be one of " + ", ".join(METRIC_NAMES)
    return _problem_of_band(rule) or _problem_of_times(rule) or _problem_of_effects(rule.effects)


def problem_of_all(rules: Iterable[Rule]) -> tuple[str, str] | None:
    """The first problem of a list of rules; the field is "rules[0].when.metric" and the like."""
    seen: dict[str, int] = {}
    for position, rule in enumerate(rules):
        path = f"rules[{position}]"
        if position >= MOST_RULES:
            return path, f"is one too many; at most {MOST_RULES} rules"
        problem = problem_of(rule)
        if problem is not None:
            return f"{path}.{problem[0]}", problem[1]
        if rule.name in seen:
            return f"{path}.name", f"is {rule.name!r}, and so is that of rules[{seen[rule.name]}]; name another"
        seen[rule.name] = position
    return None


def _problem_of_band(rule: Rule) -> tuple[str, str] | None:
    word, other = ("above", "below") if rule.above else ("below", "above")
    for where, value in ((f"when.{word}", rule.threshold), (f"until.{other}", rule.end_threshold)):
        if not math.isfinite(value):
            return where, f"is {value}; must be a finite number"
    if rule.above == (rule.end_threshold < rule.threshold) and rule.end_threshold != rule.threshold:
        return None
    return (
        f"until.{other}",
        f"is {rule.end_threshold:g}; a rule that fires {word} {rule.threshold:g} must end {other} a threshold that is "
        f"{'less' if rule.above else 'more'} than that, so that there is a band between the two in which nothing changes",
    )


def _problem_of_times(rule: Rule) -> tuple[str, str] | None:
    for where, periods in (("when.for_periods", rule.for_periods), ("until.for_periods", rule.end_periods)):
        if not 1 <= periods <= MOST_PERIODS:
            return where, f"is {periods}; must be 1 to {MOST_PERIODS} periods"
    if not 0.0 <= rule.cool_down_seconds <= MOST_SECONDS:
        return "cool_down_seconds", f"is {rule.cool_down_seconds:g}; must be 0 to {MOST_SECONDS:g} seconds"
    return None


def _problem_of_effects(effects: Effects) -> tuple[str, str] | None:
    if effects == Effects():
        return "then", "does nothing; give at least one action other than a factor of 1"
    for rollout_class, factor in effects.share_factors.items():
        if not 0.0 < factor <= LARGEST_FACTOR:
            return (
                f"then.scale_share.{rollout_class.name.lower()}",
                f"is {factor:g}; must be above 0, at most {LARGEST_FACTOR:g}",
            )
    for where, table in (("scale_weight", effects.weight_factors), ("set_weight", effects.weights)):
        for name, value in table.items():
            if name not in WEIGHT_NAMES:
                return f"then.{where}.{name}", "is no score term; terms are " + ", ".join(WEIGHT_NAMES)
            if not 0.0 <= value <= LARGEST_FACTOR:
                return f"then.{where}.{name}", f"is {value:g}; must be 0 to {LARGEST_FACTOR:g}"
    if not 0.0 < effects.cap_factor <= 1.0:
        return (
            "then.scale_cap",
            f"is {effects.cap_factor:g}; must be above 0 and at most 1: a cap is shrunk, never raised",
        )
    if RolloutClass.CRITICAL in effects.preempt:
        return "then.preempt", "names critical work, which is never preempted; name reusable, background or both"
    if not 0.0 < effects.engines_factor <= LARGEST_FACTOR:
        return "then.scale_engines", f"is {effects.engines_factor:g}; must be above 0, at most {LARGEST_FACTOR:g}"
    return None
