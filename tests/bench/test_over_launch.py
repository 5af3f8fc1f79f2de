"""`rolloutd simulate --over-launch`: the larger workload, figures worked out by hand, the command and its refusals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rolloutd.bench.metrics import RolloutRecord
from rolloutd.bench.over_launch import figures_of, kept_by_quintile, launch_more, longest_cut
from rolloutd.bench.scenarios import SCENARIOS
from rolloutd.bench.simulate import main
from rolloutd.bench.simulated import EpochRecord
from rolloutd.bench.w1 import MATH
from rolloutd.bench.workload import Item, Kind, TaskType, WorkClass, Workload
from rolloutd.scheduler.views import OverLaunchView

VOCABULARY = 32_000


def item(name: str, tokens: int, group: str = "g", keep: int = 0) -> Item:
    return Item(
        name, WorkClass.CRITICAL, TaskType.GENERATION, b"\x05\0\0\0", tokens, 4_096, 1, "math", group, group_keep=keep
    )


@pytest.mark.parametrize("name", ["Q1", "Q3"])
def test_the_larger_workload_has_all_of_the_smaller_one_and_more_of_each_group(name: str) -> None:
    scenario = SCENARIOS[name]
    plain = scenario.draw(3, VOCABULARY)
    larger = launch_more(plain, scenario.traffic, 3, 0, 1.25)
    lengths = {one.rollout_id: one.output_tokens for one in larger.items}
    assert all(lengths[one.rollout_id] == one.output_tokens for one in plain.items)
    before = Counter(one.group_id for one in plain.items if one.group_id)
    after = Counter(one.group_id for one in larger.items if one.group_id)
    for group_id, count in before.items():
        assert after[group_id] == {8: 10, 2: 3}[count], "a quarter more, rounded up"
    assert all(one.group_keep == before[one.group_id] for one in larger.items if one.group_id)
    assert all(one.group_keep == 0 for one in larger.items if not one.group_id)
    by_group: dict[str, set[bytes]] = {}
    for one in larger.items:
        if one.group_id:
            by_group.setdefault(one.group_id, set()).add(one.prompt_bytes)
    assert all(len(prompts) == 1 for prompts in by_group.values())


def test_extra_samples_are_as_long_as_their_prompt_makes_them() -> None:
    """Of one distribution: the mean of logs of a group's extra samples goes with that of its first ones."""
    scenario = SCENARIOS["Q1"]
    plain = scenario.draw(0, VOCABULARY, scale=4)
    larger = launch_more(plain, scenario.traffic, 0, 0, 2.0)
    logs: dict[str, list[float]] = {}
    for one in larger.items:
        logs.setdefault(one.group_id, []).append(float(np.log(one.output_tokens)))
    first = [np.mean(values[:8]) for values in logs.values()]
    extra = [np.mean(values[8:]) for values in logs.values()]
    assert np.corrcoef(first, extra)[0, 1] > 0.9
    assert abs(np.mean(first) - np.mean(extra)) < 0.05


def test_a_workload_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="has no groups"):
        launch_more(Workload.of("w", [item("a", 5, group="")]), (), 0, 0, 1.25)


def test_figures_worked_out_by_hand() -> None:
    lengths = {"a": 10, "b": 40, "d": 12, "e": 14, "c": 20}  # `c` is the one that is launched on top
    plain = Workload.of("w", [item(name, lengths[name]) for name in "abde"])
    larger = Workload.of("w", [item(name, tokens, keep=4) for name, tokens in lengths.items()])
    ends = {"a": 1.0, "b": 4.0, "d": 1.2, "e": 1.4, "c": 3.0}

    def records(names: str) -> dict[str, RolloutRecord]:
        return {name: RolloutRecord(Kind.CRITICAL, 0.0, 0.0, ends[name], 1) for name in names}

    exact = EpochRecord(records("abde"), engine_tokens={"e": 76}, seconds=5.0)
    more = EpochRecord(
        records("adec") | {"b": RolloutRecord(Kind.CRITICAL, 0.0, 0.0)},
        engine_tokens={"e": 40, "f": 41},
        surplus={"b": 25},
        seconds=4.5,
    )
    told = OverLaunchView(4, 12, 8, 4, 80, 100, 3, (1.0, 1.0, 1.0, 0.5, 0.0))
    line = figures_of(7, 1, 1.25, (plain, exact), (larger, more), told)
    assert (line.exact_makespan_seconds, line.makespan_seconds, line.gain) == (4.0, 3.0, 0.25)
    assert (line.exact_tokens, line.tokens, line.extra_tokens) == (76, 81, 0.0658)
    assert (line.launched, line.kept, line.surplus) == (5, 4, 1)
    assert (line.launched_mean_tokens, line.kept_mean_tokens) == (19.2, 14.0)
    assert (line.surplus_mean_tokens, line.surplus_mean_tokens_when_ended) == (40.0, 25.0)
    assert (line.longest_cut, line.longest_cut_seen) == (1.0, 0.75)
    assert (line.kept_q1, line.kept_q4, line.kept_q5) == (1.0, 1.0, 0.0)
    assert (line.estimated_q1, line.estimated_q4, line.estimated_q5) == (1.0, 0.5, 0.0)


def test_shares_are_of_fifths_by_true_length() -> None:
    members = [item(f"m{tokens}", tokens) for tokens in range(1, 11)]
    assert kept_by_quintile(members, {"m1", "m2", "m3", "m5", "m6", "m9"}) == [1.0, 0.5, 1.0, 0.0, 0.5]


def test_a_group_whose_longest_was_kept_was_not_cut() -> None:
    members = [item("a", 5), item("b", 9), item("c", 7, "h"), item("d", 8, "h")]
    assert longest_cut(members, {"b", "c"}) == 0.5
    assert longest_cut(members, {"a", "b", "d"}) == 0.0


def test_the_command_shows_gain_and_bias_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCENARIOS, "Q1", replace(SCENARIOS["Q1"], traffic=(replace(MATH, groups=8),)))
    assert main(["Q1", "--seed", "1", "--over-launch", "1.25", "--engines", "2"]) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert (line["launched"], line["kept"], line["surplus"]) == (80, 64, 16)
    shares = [line[f"kept_q{number}"] for number in range(1, 6)]
    assert sum(shares) / 5 == pytest.approx(0.8, abs=1e-3) and shares[0] > shares[4]
    assert line["kept_mean_tokens"] < line["launched_mean_tokens"] < line["surplus_mean_tokens"]
    assert line["surplus_mean_tokens_when_ended"] <= line["surplus_mean_tokens"]
    assert line["longest_cut_seen"] <= line["longest_cut"]
    heading = "".join(out.splitlines()[:12])
    assert "gained" in heading and "extra tokens" in heading and "kept q5" in heading


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["Q1", "--over-launch", "1"], "--over-launch: 1 must be above 1"),
        (["Q1", "--over-launch", "9"], "at most 4"),
        (["Q5", "--over-launch", "1.25"], "needs a workload with groups"),
        (["Q1", "--over-launch", "1.25", "--arm", "fifo"], "the arms keep all that they launch"),
        (["Q4", "--over-launch", "1.25"], "has no groups"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    assert problem in capsys.readouterr().err
