"""What the active rules of a run come to together. Each set of active rules gives one value of each knob.

Two rules on one knob: factors multiply; of several weights that are set, the last rule's in order of configuration holds, and
factors apply to it; classes that may be preempted add up.

Invariants
- Made anew from the rules that are active, never changed: what a rule did is undone to the last digit when it ends, in whatever
  order rules fire and end.

What this module does not know: why a rule is active, and what reads a knob.
"""

from __future__ import annotations

from collections.abc import Iterable

from rolloutd.scheduler.rules.rule import Effects
from rolloutd.scheduler.states import RolloutClass


class Knobs:
    """`neutral`: no rule turns anything."""

    __slots__ = (
        "_weight_factors",
        "_weights",
        "cap_factor",
        "engines_factor",
        "neutral",
        "preempt",
        "share_factors",
        "shares_turned",
    )

    def __init__(self, effects: Iterable[Effects] = ()) -> None:
        self.neutral = True
        self.share_factors = [1.0] * len(RolloutClass)
        self.cap_factor = 1.0
        self.engines_factor = 1.0
        self._weights: dict[str, float] = {}
        self._weight_factors: dict[str, float] = {}
        preempt: set[RolloutClass] = set()
        for one in effects:
            self.neutral = False
            for rollout_class, factor in one.share_factors.items():
                self.share_factors[rollout_class] *= factor
            self._weights.update(one.weights)
            for name, factor in one.weight_factors.items():
                self._weight_factors[name] = self._weight_factors.get(name, 1.0) * factor
            self.cap_factor *= one.cap_factor
            self.engines_factor *= one.engines_factor
            preempt.update(one.preempt)
        self.preempt = frozenset(preempt)
        # Only how the factors stand to each other matters where no class has a share of its own.
        self.shares_turned = any(factor != 1.0 for factor in self.share_factors)

    def weight(self, name: str, base: float) -> float:
        """The weight of a score term that has `base` without rules."""
        return self._weights.get(name, base) * self._weight_factors.get(name, 1.0)

    def orders_as(self, other: Knobs) -> bool:
        """Whether the order inside lanes is the same under both: only the terms that keys are made of count."""
        return all(
            self._weights.get(name) == other._weights.get(name)
            and self._weight_factors.get(name, 1.0) == other._weight_factors.get(name, 1.0)
            for name in ("prefix", "critical", "waiting")
        )
