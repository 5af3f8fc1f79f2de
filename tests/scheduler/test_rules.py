"""One run's rules as a pure machine: when they fire and end, what they come to together, and what is no rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler.rules.book import NO_KNOBS, RuleBook
from rolloutd.scheduler.rules.knobs import Knobs
from rolloutd.scheduler.rules.metrics import METRICS
from rolloutd.scheduler.rules.rule import METRIC_NAMES, WEIGHT_NAMES, Effects, Rule, problem_of, problem_of_all
from tests.scheduler.kit import BACKGROUND, CRITICAL, REUSABLE

PERIOD_SECONDS = 10.0
HALF_MORE = Effects(share_factors={CRITICAL: 1.5})


def low(name: str = "buffer-low", **fields: Any) -> Rule:
    """Fires below 0.3, ends above 0.7."""
    given_fields: dict[str, Any] = {
        "metric": "buffer_fill",
        "above": False,
        "threshold": 0.3,
        "end_threshold": 0.7,
        "effects": HALF_MORE,
    }
    return Rule(name, **{**given_fields, **fields})


class Looks:
    """A book that is shown one value a period."""

    def __init__(self, *rules: Rule) -> None:
        self.book = RuleBook(rules)
        self.now = 0.0

    def look(self, *values: float | None) -> str:
        """One letter per value: F fired, E ended, . nothing; of the first rule that changed."""
        said = ""
        for value in values:
            self.now += PERIOD_SECONDS
            changes = self.book.look(lambda _, value=value: value, self.now)  # type: ignore[misc]
            said += ("F" if changes[0].fired else "E") if changes else "."
        return said


def test_it_holds_between_its_two_thresholds() -> None:
    assert Looks(low()).look(0.5, 0.29, 0.3, 0.5, 0.7, 0.71, 0.5, 0.3, 0.2) == ".F...E..F"


def test_a_rule_may_fire_above_and_end_below() -> None:
    rule = low(metric="training_queued_seconds", above=True, threshold=300.0, end_threshold=60.0)
    assert Looks(rule).look(300.0, 301.0, 100.0, 60.0, 59.0, 200.0) == ".F..E."


def test_it_fires_after_n_periods_in_a_row_and_ends_after_m() -> None:
    looks = Looks(low(for_periods=3, end_periods=2))
    assert looks.look(0.1, 0.1, 0.5, 0.1, 0.1, 0.1) == ".....F"
    assert looks.look(0.8, 0.5, 0.8, 0.8) == "...E"


def test_a_metric_that_hovers_around_one_threshold_makes_it_change_once() -> None:
    looks = Looks(low())
    rng = random.Random(0)
    assert looks.look(*(0.3 + rng.uniform(-0.05, 0.05) for _ in range(100))).count("F") == 1
    assert looks.look(*(0.7 + rng.uniform(-0.05, 0.05) for _ in range(100))).count("E") == 1


def test_after_an_end_it_waits_for_its_cool_down() -> None:
    looks = Looks(low(cool_down_seconds=35.0))
    assert looks.look(0.1, 0.9) == "FE"
    assert looks.look(0.1, 0.1, 0.1, 0.1) == "...F"


def test_what_is_not_known_fires_nothing_and_ends_what_is_active() -> None:
    looks = Looks(low(for_periods=2, end_periods=2))
    assert looks.look(0.1, None, 0.1, 0.1) == "...F"
    assert looks.look(None, 0.1, None, None) == "...E"
    assert looks.book.views()[0].value is None


def test_each_metric_is_asked_for_once_a_period() -> None:
    asked: list[str] = []

    def value_of(metric: str) -> float | None:
        asked.append(metric)
        return 0.5

    RuleBook((low("a"), low("b"), low("c", metric="kv_fill"))).look(value_of, 0.0)
    assert sorted(asked) == ["buffer_fill", "kv_fill"]


def test_every_change_says_why() -> None:
    book = RuleBook((low(),))
    (fired,) = book.look(lambda _: 0.25, 1.0)
    assert fired.because == "buffer_fill is 0.25, below 0.3" and fired.value == 0.25
    (view,) = book.views()
    assert (view.active, view.since_seconds, view.firings, view.value) == (True, 1.0, 1, 0.25)
    (ended,) = book.look(lambda _: 0.75, 2.0)
    assert ended.because == "buffer_fill is 0.75, above 0.7"


# several rules


def test_factors_on_one_knob_multiply_and_the_last_set_weight_holds() -> None:
    knobs = Knobs(
        [
            Effects(share_factors={CRITICAL: 1.5, REUSABLE: 2.0}, weights={"prefix": 0.9}, cap_factor=0.5),
            Effects(share_factors={CRITICAL: 2.0}, weight_factors={"prefix": 3.0, "cost": 2.0}, preempt=(BACKGROUND,)),
            Effects(weights={"prefix": 0.2}, cap_factor=0.5, engines_factor=2.0, preempt=(REUSABLE,)),
        ]
    )
    assert knobs.share_factors == [3.0, 2.0, 1.0] and knobs.cap_factor == 0.25 and knobs.engines_factor == 2.0
    assert knobs.weight("prefix", 0.4) == pytest.approx(0.6) and knobs.weight("cost", 0.1) == pytest.approx(0.2)
    assert knobs.weight("waiting", 0.2) == 0.2
    assert knobs.preempt == {REUSABLE, BACKGROUND}


def test_of_two_rules_on_one_knob_each_undoes_its_own_part() -> None:
    rules = (low("a"), low("b", metric="kv_fill", effects=Effects(share_factors={CRITICAL: 3.0})))
    book = RuleBook(rules)
    values: dict[str, float | None] = {"buffer_fill": 0.1, "kv_fill": 0.1}
    book.look(values.get, 10.0)
    assert book.knobs.share_factors[CRITICAL] == pytest.approx(4.5)
    values["buffer_fill"] = 0.9
    book.look(values.get, 20.0)
    assert book.knobs.share_factors[CRITICAL] == 3.0
    values["kv_fill"] = 0.9
    book.look(values.get, 30.0)
    assert book.knobs is NO_KNOBS


def test_a_rule_that_is_removed_or_changed_while_active_is_undone_and_others_go_on() -> None:
    book = RuleBook((low("a"), low("b"), low("c")))
    book.look(lambda _: 0.1, 10.0)
    kept, changed = low("a"), low("b", threshold=0.2)
    ended = book.adopt((changed, kept), 20.0)
    assert [(change.rule.name, change.fired) for change in ended] == [("b", False), ("c", False)]
    assert all("changed or removed" in change.because for change in ended)
    assert [(view.name, view.active) for view in book.views()] == [("b", False), ("a", True)]
    assert book.knobs.share_factors[CRITICAL] == 1.5


def test_the_streak_of_a_rule_outlives_a_configuration_that_leaves_it_alone() -> None:
    looks = Looks(low(for_periods=3))
    assert looks.look(0.1, 0.1) == ".."
    looks.book.adopt((low(for_periods=3), low("new", for_periods=9)), looks.now)
    assert looks.look(0.1) == "F"


effects = st.builds(
    Effects,
    share_factors=st.dictionaries(st.sampled_from([CRITICAL, REUSABLE, BACKGROUND]), st.floats(0.1, 3.0)),
    weight_factors=st.dictionaries(st.sampled_from(WEIGHT_NAMES), st.floats(0.0, 3.0)),
    weights=st.dictionaries(st.sampled_from(WEIGHT_NAMES), st.floats(0.0, 3.0)),
    cap_factor=st.floats(0.1, 1.0),
    preempt=st.sampled_from([(), (REUSABLE,), (REUSABLE, BACKGROUND)]),
    engines_factor=st.floats(0.1, 3.0),
)
rules = st.builds(
    low,
    metric=st.sampled_from(["buffer_fill", "kv_fill", "prefix_hit"]),
    effects=effects,
    for_periods=st.integers(1, 3),
    end_periods=st.integers(1, 3),
    cool_down_seconds=st.sampled_from([0.0, 25.0]),
)
values = st.fixed_dictionaries(
    {name: st.none() | st.floats(0.0, 1.0) for name in ("buffer_fill", "kv_fill", "prefix_hit")}
)


def read(knobs: Knobs) -> tuple[Any, ...]:
    """Everything that anybody reads of knobs."""
    weights = [knobs.weight(name, 0.1 + 0.7 * position) for position, name in enumerate(WEIGHT_NAMES)]
    return (knobs.share_factors, weights, knobs.cap_factor, knobs.preempt, knobs.engines_factor, knobs.neutral)


@given(st.lists(rules, max_size=5), st.lists(values, max_size=30), st.randoms(use_true_random=False))
def test_what_rules_raised_is_exactly_undone(wanted: list[Rule], shown: list[Any], rng: random.Random) -> None:
    """Whatever they see and in whatever order: knobs are those of the active rules, and after the last end as before."""
    wanted = [replace(rule, name=f"r{number}") for number, rule in enumerate(wanted)]
    book = RuleBook(tuple(wanted))
    active: set[str] = set()
    now = 0.0
    for one in shown:
        now += PERIOD_SECONDS
        if rng.random() < 0.1:
            changes = book.adopt(tuple(rng.sample(wanted, rng.randint(0, len(wanted)))), now)
        else:
            changes = book.look(one.get, now)
        for change in changes:
            assert change.fired != (change.rule.name in active), "fired twice, or ended without having fired"
            active ^= {change.rule.name}
        assert active == {view.name for view in book.views() if view.active}
        assert read(book.knobs) == read(Knobs(rule.effects for rule in book.rules if rule.name in active))
    book.end_all(now, "enough")
    assert read(book.knobs) == read(NO_KNOBS) and not any(view.active for view in book.views())


# what is no rule


def test_every_metric_has_a_function() -> None:
    assert tuple(METRICS) == METRIC_NAMES


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"name": "two words"}, "name", "'two words'"),
        ({"metric": "bufferfill"}, "when.metric", "must be one of buffer_fill"),
        ({"threshold": float("nan")}, "when.below", "finite"),
        ({"end_threshold": float("inf")}, "until.above", "finite"),
        ({"end_threshold": 0.3}, "until.above", "must end above a threshold that is more"),
        ({"end_threshold": 0.1}, "until.above", "a band"),
        ({"above": True, "end_threshold": 0.3}, "until.below", "less than that"),
        ({"above": True}, "until.below", "must end below a threshold that is less"),
        ({"for_periods": 0}, "when.for_periods", "1 to 8640"),
        ({"end_periods": 9_000}, "until.for_periods", "1 to 8640"),
        ({"cool_down_seconds": -1.0}, "cool_down_seconds", "0 to 604800"),
        ({"effects": Effects()}, "then", "does nothing"),
        ({"effects": Effects(share_factors={REUSABLE: 0.0})}, "then.scale_share.reusable", "above 0"),
        ({"effects": Effects(weights={"speed": 1.0})}, "then.set_weight.speed", "prefix, critical"),
        ({"effects": Effects(weight_factors={"prefix": -1.0})}, "then.scale_weight.prefix", "0 to 100"),
        ({"effects": Effects(cap_factor=1.5)}, "then.scale_cap", "never raised"),
        ({"effects": Effects(preempt=(CRITICAL,))}, "then.preempt", "never preempted"),
        ({"effects": Effects(engines_factor=0.0)}, "then.scale_engines", "above 0"),
    ],
)
def test_what_cannot_be_a_rule_is_told_by_its_field(fields: dict[str, Any], field: str, words: str) -> None:
    name = fields.pop("name", "a")
    problem = problem_of(low(name, **fields))
    assert problem is not None and problem[0] == field and words in problem[1], problem


def test_names_are_given_once_and_there_are_not_too_many() -> None:
    assert problem_of_all((low("a"), low("b"))) is None
    problem = problem_of_all((low("a"), low("b"), low("a")))
    assert problem is not None and problem[0] == "rules[2].name" and "rules[0]" in problem[1]
    problem = problem_of_all(low(f"r{number}") for number in range(65))
    assert problem is not None and problem[0] == "rules[64]"
