"""The rules of one run: which are active, and since when. A pure machine: values of metrics in, changes out.

Invariants
- A rule fires after its metric was past the threshold for `for_periods` looks in a row, and not within `cool_down_seconds` of its
  last end; it ends after the metric was past the other threshold for `end_periods` looks in a row.
- A metric that is not known fires nothing, and counts as being back: without its metric a rule that is active ends.
- `knobs` are those of the active rules, in order of configuration, and of nothing else.

What this module does not know: where values come from, how long a period is, and what knobs are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rolloutd.scheduler.rules.knobs import Knobs
from rolloutd.scheduler.rules.rule import Rule

NO_KNOBS: Final = Knobs()


@dataclass(frozen=True, slots=True)
class RuleChange:
    """A rule fired (`fired`) or ended, at a value of its metric (None: not known, or not looked at), and why it ended."""

    rule: Rule
    fired: bool
    value: float | None
    because: str


@dataclass(frozen=True, slots=True)
class RuleView:
    """One rule of one run. `value`: of its metric at the last look; None while it is not known."""

    name: str
    metric: str
    value: float | None
    active: bool
    since_seconds: float  # of the core's clock, when it fired; 0 while it is not active
    firings: int


class _State:
    __slots__ = ("active", "changed_at", "firings", "rule", "streak", "value")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.active = False
        self.streak = 0  # looks in a row that speak for the next change
        self.changed_at = -math.inf
        self.firings = 0
        self.value: float | None = None

    def look(self, value: float | None, now: float) -> RuleChange | None:
        rule = self.rule
        self.value = value
        if self.active:
            self.streak = self.streak + 1 if value is None or rule.ends_at(value) else 0
            if self.streak < rule.end_periods:
                return None
            return self.end(now, f"{rule.metric} is not known" if value is None else self._words(value, False))
        self.streak = self.streak + 1 if value is not None and rule.fires_at(value) else 0
        if value is None or self.streak < rule.for_periods or now - self.changed_at < rule.cool_down_seconds:
            return None
        self.active = True
        self.streak = 0
        self.changed_at = now
        self.firings += 1
        return RuleChange(rule, True, value, self._words(value, True))

    def end(self, now: float, because: str) -> RuleChange:
        self.active = False
        self.streak = 0
        self.changed_at = now
        return RuleChange(self.rule, False, self.value, because)

    def _words(self, value: float, fired: bool) -> str:
        rule = self.rule
        limit = rule.threshold if fired else rule.end_threshold
        return f"{rule.metric} is {value:g}, {'above' if rule.above == fired else 'below'} {limit:g}"


class RuleBook:
    __slots__ = ("_states", "knobs")

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._states = [_State(rule) for rule in rules]
        self.knobs = NO_KNOBS

    @property
    def rules(self) -> list[Rule]:
        return [state.rule for state in self._states]

    def look(self, value_of: Callable[[str], float | None], now: float) -> list[RuleChange]:
        """One period is over: what changed. `value_of` is asked once for each metric that a rule looks at."""
        values: dict[str, float | None] = {}
        changes = []
        for state in self._states:
            metric = state.rule.metric
            if metric not in values:
                values[metric] = value_of(metric)
            change = state.look(values[metric], now)
            if change is not None:
                changes.append(change)
        if changes:
            self._turn()
        return changes

    def adopt(self, rules: tuple[Rule, ...], now: float) -> list[RuleChange]:
        """Other rules from now on. One that is the same as before goes on as it is; others that are active end."""
        before = {state.rule.name: state for state in self._states}
        states = []
        for rule in rules:
            known = before.get(rule.name)
            if known is not None and known.rule == rule:
                states.append(known)
                del before[rule.name]
            else:
                states.append(_State(rule))
        changes = [state.end(now, "the rule was changed or removed") for state in before.values() if state.active]
        self._states = states
        self._turn()
        return changes

    def end_all(self, now: float, because: str) -> list[RuleChange]:
        """Undo everything."""
        changes = [state.end(now, because) for state in self._states if state.active]
        for state in self._states:
            state.streak = 0
        self._turn()
        return changes

    def views(self) -> tuple[RuleView, ...]:
        return tuple(
            RuleView(
                state.rule.name,
                state.rule.metric,
                state.value,
                state.active,
                state.changed_at if state.active else 0.0,
                state.firings,
            )
            for state in self._states
        )

    def _turn(self) -> None:
        active = [state.rule.effects for state in self._states if state.active]
        self.knobs = Knobs(active) if active else NO_KNOBS
