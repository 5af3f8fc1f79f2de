"""`rules:` of a configuration file, as the core's rules, and back.

    - name: buffer-low
      when: {metric: buffer_fill, below: 0.3, for_periods: 2}
      then: {scale_share: {critical: 1.5}}
      until: {above: 0.7}
      cool_down_seconds: 60

Invariants
- Every error names the rule's place in the list, the key, what it is and what it may be. Nothing is ignored.
- What is written is read as the same rules.

What this module does not know: what makes a rule impossible (`rules.rule`), and what rules do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rolloutd.scheduler.rules.rule import METRIC_NAMES, Effects, Rule, problem_of_all
from rolloutd.scheduler.states import RolloutClass
from rolloutd.server.config_keys import ConfigError

_RULE = ("name", "when", "then", "until", "cool_down_seconds")
_WHEN = ("metric", "above", "below", "for_periods")
_UNTIL = ("above", "below", "for_periods")
_THEN = ("scale_share", "scale_weight", "set_weight", "scale_cap", "preempt", "scale_engines")
_CLASSES = {one.name.lower(): one for one in RolloutClass}


def read_rules(entries: Any, origin: str) -> tuple[Rule, ...]:
    """The rules of a list as YAML gives it; None is no rules. Raises ConfigError."""
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"rules ({origin}): must be a list of rules, got {entries!r}")
    rules = tuple(_Reader(f"rules[{position}]", origin).rule(entry) for position, entry in enumerate(entries))
    problem = problem_of_all(rules)
    if problem is not None:
        raise ConfigError(f"{problem[0]} ({origin}): {problem[1]}")
    return rules


def rules_as_written(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """What `read_rules` reads as these rules, without what is as by default."""
    return [_as_written(rule) for rule in rules]


class _Reader:
    def __init__(self, path: str, origin: str) -> None:
        self._path = path
        self._origin = origin

    def rule(self, entry: Any) -> Rule:
        table = self._table("", entry, _RULE)
        for key in ("name", "when", "then", "until"):
            if key not in table:
                raise self._error(key, "is missing; a rule has a name, `when`, `then` and `until`")
        if not isinstance(table["name"], str):
            raise self._error("name", f"must be a text, got {table['name']!r}")
        when = self._table("when", table["when"], _WHEN)
        until = self._table("until", table["until"], _UNTIL)
        metric = when.get("metric")
        if not isinstance(metric, str) or metric not in METRIC_NAMES:
            raise self._error("when.metric", f"{_not_among(metric, METRIC_NAMES)}")
        above, threshold = self._threshold("when", when)
        until_above, end_threshold = self._threshold("until", until)
        if above == until_above:
            word, other = ("above", "below") if above else ("below", "above")
            raise self._error(
                f"until.{word}", f"a rule that fires {word} a threshold ends {other} another one; give until.{other}"
            )
        return Rule(
            table["name"],
            metric,
            above,
            threshold,
            end_threshold,
            self._effects(table["then"]),
            for_periods=self._whole("when.for_periods", when.get("for_periods", 1)),
            end_periods=self._whole("until.for_periods", until.get("for_periods", 1)),
            cool_down_seconds=self._number("cool_down_seconds", table.get("cool_down_seconds", 0)),
        )

    def _threshold(self, key: str, table: Mapping[str, Any]) -> tuple[bool, float]:
        given = [word for word in ("above", "below") if word in table]
        if len(given) != 1:
            raise self._error(key, "needs a threshold: give exactly one of `above` and `below`")
        return given[0] == "above", self._number(f"{key}.{given[0]}", table[given[0]])

    def _effects(self, value: Any) -> Effects:
        table = self._table("then", value, _THEN)
        shares = self._numbers("then.scale_share", table.get("scale_share", {}))
        for name in shares:
            self._class("then.scale_share", name)
        preempt = table.get("preempt", [])
        if isinstance(preempt, str) or not isinstance(preempt, list | tuple):
            raise self._error("then.preempt", f"must be a list of classes, got {preempt!r}")
        return Effects(
            share_factors={_CLASSES[name]: factor for name, factor in shares.items()},
            weight_factors=self._numbers("then.scale_weight", table.get("scale_weight", {})),
            weights=self._numbers("then.set_weight", table.get("set_weight", {})),
            cap_factor=self._number("then.scale_cap", table.get("scale_cap", 1)),
            preempt=tuple(dict.fromkeys(self._class("then.preempt", name) for name in preempt)),
            engines_factor=self._number("then.scale_engines", table.get("scale_engines", 1)),
        )

    def _class(self, key: str, name: Any) -> RolloutClass:
        if not isinstance(name, str) or name not in _CLASSES:
            raise self._error(key, f"{_not_among(name, _CLASSES)}")
        return _CLASSES[name]

    def _table(self, key: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(key, f"must be a table with {', '.join(known)}; got {value!r}")
        for name in value:
            if name not in known:
                raise self._error(f"{key}.{name}".lstrip("."), f"unknown key; {_not_among(name, known)}")
        return value

    def _numbers(self, key: str, value: Any) -> dict[str, float]:
        if not isinstance(value, dict):
            raise self._error(key, f"must be a table of names and numbers, got {value!r}")
        return {str(name): self._number(f"{key}.{name}", one) for name, one in value.items()}

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"must be a number, got {value!r}")
        return float(value)

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(key, f"must be a whole number of periods, got {value!r}")
        return value

    def _error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}{'.' if key else ''}{key} ({self._origin}): {problem}")


def _not_among(name: Any, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name!r} is none of {', '.join(names)}{hint}"


def _as_written(rule: Rule) -> dict[str, Any]:
    word, other = ("above", "below") if rule.above else ("below", "above")
    when: dict[str, Any] = {"metric": rule.metric, word: rule.threshold}
    until: dict[str, Any] = {other: rule.end_threshold}
    if rule.for_periods != 1:
        when["for_periods"] = rule.for_periods
    if rule.end_periods != 1:
        until["for_periods"] = rule.end_periods
    effects = rule.effects
    then: dict[str, Any] = {
        "scale_share": {one.name.lower(): factor for one, factor in effects.share_factors.items()},
        "scale_weight": dict(effects.weight_factors),
        "set_weight": dict(effects.weights),
        "scale_cap": effects.cap_factor,
        "preempt": [one.name.lower() for one in effects.preempt],
        "scale_engines": effects.engines_factor,
    }
    written: dict[str, Any] = {
        "name": rule.name,
        "when": when,
        "then": {key: value for key, value in then.items() if value and value != 1.0},
        "until": until,
    }
    if rule.cool_down_seconds:
        written["cool_down_seconds"] = rule.cool_down_seconds
    return written
