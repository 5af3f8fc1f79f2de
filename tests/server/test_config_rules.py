"""`rules:` of a file: what is read, what is refused and how, and that what is printed is read again."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler.rules.rule import METRIC_NAMES, WEIGHT_NAMES, Effects, Rule, problem_of
from rolloutd.scheduler.states import RolloutClass
from rolloutd.server.cli import main
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.config_rules import read_rules, rules_as_written
from rolloutd.server.preset import PRESETS
from rolloutd.server.show_config import show_config

WRITTEN: dict[str, Any] = {
    "name": "buffer-low",
    "when": {"metric": "buffer_fill", "below": 0.3, "for_periods": 2},
    "then": {
        "scale_share": {"critical": 1.5},
        "scale_weight": {"prefix": 2},
        "set_weight": {"waiting": 0},
        "scale_cap": 0.5,
        "preempt": ["background", "reusable"],
        "scale_engines": 2,
    },
    "until": {"above": 0.7, "for_periods": 3},
    "cool_down_seconds": 60,
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """`WRITTEN` with one value replaced; a value of ... removes it."""
    written = copy.deepcopy(WRITTEN)
    *parents, last = path.split(".")
    table = written
    for parent in parents:
        table = table[parent]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return written


def test_a_rule_says_when_then_until() -> None:
    assert read_rules([WRITTEN], "file") == (
        Rule(
            "buffer-low",
            "buffer_fill",
            False,
            0.3,
            0.7,
            Effects(
                share_factors={RolloutClass.CRITICAL: 1.5},
                weight_factors={"prefix": 2.0},
                weights={"waiting": 0.0},
                cap_factor=0.5,
                preempt=(RolloutClass.BACKGROUND, RolloutClass.REUSABLE),
                engines_factor=2.0,
            ),
            for_periods=2,
            end_periods=3,
            cool_down_seconds=60.0,
        ),
    )
    assert read_rules(None, "file") == read_rules([], "file") == ()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("name", ..., r"rules\[0\]\.name \(file\): is missing"),
        ("until", ..., r"rules\[0\]\.until \(file\): is missing"),
        ("cooldown_seconds", 1, r"rules\[0\]\.cooldown_seconds.*unknown key.*did you mean 'cool_down_seconds'"),
        ("name", 3, r"rules\[0\]\.name.*must be a text"),
        ("name", "a b", r"rules\[0\]\.name.*letters, digits"),
        ("when", "low", r"rules\[0\]\.when.*must be a table with metric"),
        ("when.metric", "buffer_fil", r"rules\[0\]\.when\.metric.*did you mean 'buffer_fill'"),
        ("when.metric", ..., r"rules\[0\]\.when\.metric.*None is none of"),
        ("when.below", ..., r"rules\[0\]\.when.*exactly one of `above` and `below`"),
        ("when.above", 0.5, r"rules\[0\]\.when.*exactly one"),
        ("when.below", "30%", r"rules\[0\]\.when\.below.*must be a number, got '30%'"),
        ("when.below", True, r"rules\[0\]\.when\.below.*must be a number"),
        ("when.below", 0.8, r"rules\[0\]\.until\.above.*a band"),
        ("when.for_periods", 1.5, r"rules\[0\]\.when\.for_periods.*whole number"),
        ("when.for_periods", 0, r"rules\[0\]\.when\.for_periods.*1 to"),
        ("until", {"below": 0.1}, r"rules\[0\]\.until\.below.*give until\.above"),
        ("until.above", 0.3, r"rules\[0\]\.until\.above.*a band"),
        ("then", {}, r"rules\[0\]\.then.*does nothing"),
        ("then", None, r"rules\[0\]\.then.*must be a table"),
        ("then.scale_cap", 1.5, r"rules\[0\]\.then\.scale_cap.*never raised"),
        ("then.scale_shares", {}, r"rules\[0\]\.then\.scale_shares.*did you mean 'scale_share'"),
        ("then.scale_share", 1.5, r"rules\[0\]\.then\.scale_share.*table of names and numbers"),
        ("then.scale_share", {"critcal": 2}, r"rules\[0\]\.then\.scale_share.*did you mean 'critical'"),
        ("then.set_weight", {"speed": 2}, r"rules\[0\]\.then\.set_weight\.speed.*no score term"),
        ("then.preempt", "background", r"rules\[0\]\.then\.preempt.*must be a list"),
        ("then.preempt", ["critical"], r"rules\[0\]\.then\.preempt.*never preempted"),
        ("then.preempt", [["reusable"]], r"rules\[0\]\.then\.preempt.*is none of critical"),
        ("cool_down_seconds", -1, r"rules\[0\]\.cool_down_seconds.*0 to"),
    ],
)
def test_what_is_wrong_with_a_rule_is_told_by_its_place(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_rules([changed(path, value)], "file")


def test_a_list_is_wanted_and_names_are_given_once() -> None:
    with pytest.raises(ConfigError, match=r"rules \(file\): must be a list"):
        read_rules({"buffer-low": WRITTEN}, "file")
    with pytest.raises(ConfigError, match=r"rules\[1\]\.name \(file\): is 'buffer-low', and so is that of rules\[0\]"):
        read_rules([WRITTEN, WRITTEN], "file")


def test_a_file_brings_them_to_the_core(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    file.write_text(yaml.safe_dump({"rules": [WRITTEN], "scheduler": {"rule_period_seconds": 5}}))
    settings = load_config(file).scheduler
    assert [rule.name for rule in settings.rules] == ["buffer-low"] and settings.queue.rule_period_seconds == 5.0


factors = st.floats(0.01, 50.0).filter(lambda one: one != 1.0)
rules = st.builds(
    lambda above, low, more, **fields: Rule(
        above=above, threshold=low + more if above else low, end_threshold=low if above else low + more, **fields
    ),
    above=st.booleans(),
    low=st.floats(-1e6, 1e6),
    more=st.floats(0.001, 1e6),
    name=st.just("a"),
    metric=st.sampled_from(METRIC_NAMES),
    effects=st.builds(
        Effects,
        share_factors=st.dictionaries(st.sampled_from(list(RolloutClass)), factors),
        weight_factors=st.dictionaries(st.sampled_from(WEIGHT_NAMES), factors),
        weights=st.dictionaries(st.sampled_from(WEIGHT_NAMES), st.floats(0.0, 10.0)),
        cap_factor=st.floats(0.01, 1.0),
        preempt=st.sampled_from([(), (RolloutClass.BACKGROUND,), (RolloutClass.REUSABLE, RolloutClass.BACKGROUND)]),
        engines_factor=factors,
    ),
    for_periods=st.integers(1, 100),
    end_periods=st.integers(1, 100),
    cool_down_seconds=st.floats(0.0, 1e5),
)


@given(rules)
def test_what_is_written_is_read_as_the_same_rule(rule: Rule) -> None:
    if problem_of(rule) is None:  # floats may be too large for a band
        assert read_rules(yaml.safe_load(yaml.safe_dump(rules_as_written([rule]))), "file") == (rule,)


# rolloutd config


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("changed_only", [True, False])
def test_what_is_printed_loads_as_the_same_settings(preset: str, changed_only: bool, tmp_path: Path) -> None:
    config = load_config(flags={"preset": preset, "engines": ["http://a:1", "reward=http://b:2"]})
    out = io.StringIO()
    assert show_config(config, out, changed_only=changed_only) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(out.getvalue())
    again = load_config(file)
    assert again.scheduler == config.scheduler and again.engines == config.engines
    assert again.values | {"preset": preset, "rules": None} == config.values | {"rules": None}


def test_the_command_prints_a_preset(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUTD_PRESET", "ROLLOUTD_ENGINES"):
        monkeypatch.delenv(name, raising=False)
    assert main(["config", "--preset", "async-rl", "--changed"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["rules"][0]["name"] == "buffer-low"
    assert "  enabled: false # preset" in printed
    assert main(["config", "--preset", "nothing"]) == 1
    assert "preset (flag): must be one of" in capsys.readouterr().err


def test_settled_weights_are_those_of_the_stable_phase(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    file.write_text("weights: {prefix: 0.7, diversity: 0.3}\n")
    policy = load_config(file).scheduler.policy
    assert (policy.stable_prefix_weight, policy.stable_diversity_weight) == (0.7, 0.3)
    file.write_text("weights: {prefix: 0.7}\npolicy: {stable_prefix_weight: 0.5}\n")
    assert load_config(file).scheduler.policy.stable_prefix_weight == 0.5
    assert load_config(file, {}, {"weights.prefix": 0.9}).scheduler.policy.stable_prefix_weight == 0.9
