"""Cost at scale and the mixture error: sums worked out by hand, and both commands on something small."""

from __future__ import annotations

import json
import math

import pytest

from rolloutd.bench import mix_error, scale_cost
from rolloutd.bench.mix_error import TARGET, WINDOW, in_order_of_mix, outputs, points, rounding_points, windows
from rolloutd.bench.scale_cost import HandleMeter, PoolCost, scenario_of, summary
from rolloutd.scheduler.actions import Action
from rolloutd.scheduler.events import Event, Tick


def test_the_error_is_half_the_distance_of_shares() -> None:
    target = {"a": 0.5, "b": 0.5}
    assert points(["a"] * 3 + ["b"], target) == pytest.approx(25.0)
    assert points(["a", "b"], target) == 0.0
    assert points(["c", "c"], target) == pytest.approx(100.0)


def test_whole_rollouts_cannot_do_better_than_rounding() -> None:
    assert rounding_points({"a": 1.0, "b": 1.0}, window=4) == 0.0
    # 5 in 1 : 1 is 2.5 each; the best is 3 and 2, which is a tenth off.
    assert rounding_points({"a": 1.0, "b": 1.0}, window=5) == pytest.approx(10.0)
    assert 0.0 < rounding_points(TARGET) < mix_error.BAR_POINTS


def test_windows_stand_side_by_side_after_the_filling() -> None:
    strata = [str(number) for number in range((mix_error.FILLING + 2) * WINDOW + 7)]
    first, second = windows(strata)
    assert first[0] == str(mix_error.FILLING * WINDOW) and len(first) == len(second) == WINDOW
    assert second[0] == str((mix_error.FILLING + 1) * WINDOW)


def test_unlike_lengths_lie_a_factor_of_four_apart_around_the_same_middle() -> None:
    assert len({one.mu for one in outputs("alike")}) == 1
    unlike = sorted(one.mu for one in outputs("unlike"))
    assert len(unlike) == len(TARGET) and math.exp(unlike[-1] - unlike[0]) == pytest.approx(4.0, rel=1e-3)
    assert sum(unlike) / len(unlike) == pytest.approx(mix_error.OUTPUT.mu)


def test_an_ideal_order_of_dispatch_is_off_by_less_than_equal_supply_and_more_than_rounding() -> None:
    back = in_order_of_mix("alike", 0, 4 * WINDOW)
    errors = [points(window, TARGET) for window in windows(back)]
    equal = points(list(TARGET) * 32, TARGET)
    assert len(errors) == 2 and all(rounding_points(TARGET) < error < equal / 2 for error in errors)
    assert back == in_order_of_mix("alike", 0, 4 * WINDOW) != in_order_of_mix("alike", 1, 4 * WINDOW)


def test_bench_mix_ends_in_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix_error, "WINDOW", 32)
    monkeypatch.setattr(mix_error, "WINDOWS", 2)
    monkeypatch.setattr(mix_error, "FILLING", 1)
    monkeypatch.setattr(mix_error, "AHEAD", 16)
    assert mix_error.main(["--seeds", "1", "--settings", "held", "not strict, no diversity"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["mean_points"]) == {"alike", "unlike"} and found["seeds"] == 1
    # Equal supply in an order that knows no mix: about the distance of equal shares to the target, 22.5 points.
    alike = found["mean_points"]["alike"]
    assert 10.0 < alike["not strict, no diversity"] < 40.0
    # In the order of the mix: no window of 32 is off by more than its rounding and a rollout of a few strata.
    assert alike["held"] <= rounding_points(TARGET, 32) + 4.0 and found["held_seconds"]["alike"]["held"] > 0.0
    assert found["worst_points"]["alike"]["not strict, no diversity"] >= alike["not strict, no diversity"]


def test_the_meter_counts_by_kind_of_event() -> None:
    def handle(event: Event, now: float) -> list[Action]:
        return []

    meter = HandleMeter(handle)
    assert meter(Tick(), 1.0) == [] and meter(Tick(), 2.0) == []
    assert meter.events == {"Tick": 2} and meter.dispatches == 0 and set(meter.seconds) == {"Tick"}


def test_rollouts_per_engine_are_the_same_on_both_pools() -> None:
    assert scenario_of(64, 6_400).traffic[0].groups == 800  # type: ignore[union-attr]
    assert scenario_of(1_000, 100_000).traffic[0].groups == 12_500  # type: ignore[union-attr]


def test_the_ratio_is_of_decisions_on_many_engines_to_few() -> None:
    few = PoolCost(64, 6_400, 90.0, 80.0, 40.0, {"Tick": 50.0}, 1.2, 3.0)
    many = PoolCost(1_000, 100_000, 120.0, 100.0, 60.0, {"Tick": 70.0}, 1.3, 60.0)
    found = summary([few, many])
    assert found["decision_ratio"] == 1.25 and found["us_per_rollout"] == {"64": 90.0, "1000": 120.0}


def test_bench_scale_ends_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale_cost.main(["--engines", "4", "--few", "2", "--rollouts", "64"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rollouts"] == {"2": 32, "4": 64}
    assert found["us_per_rollout"]["4"] >= sum(found["us_per_rollout_by_event"]["4"].values()) * 0.99
    assert found["us_per_rollout"]["4"] > found["schedule_us_per_decision"]["4"] > 0.0
