import json

import pytest

from rolloutd.bench.metrics import (
    RolloutRecord,
    StepRecord,
    percentile,
    samples_per_second,
    summarise,
    total_variation,
    trainer_idle_ratio,
    waits_seconds,
)
from rolloutd.bench.report import json_line
from rolloutd.bench.workload import Kind

STEPS = [
    StepRecord(0.0, 60.0, 60.0, 80.0, bound_seconds=50.0),
    StepRecord(80.0, 110.0, 112.0, 132.0, bound_seconds=25.0),
    StepRecord(132.0, 150.0, 150.0, 170.0),
]

KEYS = (
    "rollouts delivered lost duplicated wrong_tokens trainer_idle_ratio step_seconds_p50 critical_over_bound "
    "samples_per_second prefix_hit prefix_hit_ceiling wait_p50_seconds wait_p99_seconds"
).split()


def record(
    kind: Kind = Kind.CRITICAL,
    wait: float | None = 1.0,
    deliveries: int = 1,
    delivered_seconds: float = 20.0,
    wrong_tokens: int = 0,
    prompt_tokens: int = 100,
    cached_tokens: int = 80,
) -> RolloutRecord:
    return RolloutRecord(
        kind,
        submitted_seconds=5.0,
        started_seconds=None if wait is None else 5.0 + wait,
        delivered_seconds=delivered_seconds if deliveries else None,
        deliveries=deliveries,
        wrong_tokens=wrong_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def test_summary_of_a_known_run() -> None:
    rollouts = [
        record(wait=1.0),
        record(wait=3.0, deliveries=3, wrong_tokens=2),
        record(Kind.REUSABLE, wait=7.0, cached_tokens=20, delivered_seconds=200.0),
        record(Kind.REWARD, wait=0.25, prompt_tokens=50, cached_tokens=0),
        record(Kind.BACKGROUND, wait=None, deliveries=0),
        record(Kind.BACKGROUND, wait=9.0, deliveries=0, wrong_tokens=5),
    ]
    summary = summarise(rollouts, STEPS, 0.9)
    assert (summary.rollouts, summary.delivered, summary.lost) == (6, 4, 2)
    assert (summary.duplicated, summary.wrong_tokens) == (2, 7)
    assert summary.trainer_idle_ratio == pytest.approx(1 - 60 / 170, abs=1e-4)
    assert summary.step_seconds_p50 == 52.0  # of 80, 52 and 38
    assert summary.critical_over_bound == 1.2  # of 60/50 and 30/25; the step without a bound is left out
    assert summary.samples_per_second == pytest.approx(2 / 170, abs=1e-4)  # no reward query, nothing after the loop
    assert summary.prefix_hit == pytest.approx(180 / 350, abs=1e-4)
    assert summary.prefix_hit_ceiling == 0.9
    assert summary.wait_p50_seconds == {"critical": 2.0, "reusable": 7.0, "background": 9.0, "reward": 0.25}
    assert summary.wait_p99_seconds == {"critical": 2.98, "reusable": 7.0, "background": 9.0, "reward": 0.25}


def test_json_has_exactly_the_agreed_keys_in_their_order() -> None:
    fields = json.loads(json_line(summarise([record()], STEPS, 0.9)))
    assert list(fields) == KEYS
    for waits in ("wait_p50_seconds", "wait_p99_seconds"):
        assert list(fields[waits]) == ["critical", "reusable", "background", "reward"]


def test_figures_without_data_are_null_not_zero() -> None:
    fields = json.loads(json_line(summarise([], [], None)))
    assert [fields[name] for name in KEYS[:5]] == [0] * 5
    assert [fields[name] for name in KEYS[5:11]] == [None] * 6
    assert set(fields["wait_p99_seconds"].values()) == {None}


def test_steps_without_a_bound_give_no_ratio() -> None:
    assert summarise([record()], [StepRecord(0.0, 1.0, 1.0, 2.0)], 0.9).critical_over_bound is None


def test_training_that_overlaps_the_next_step_counts_once() -> None:
    """One step off-policy: step 1 generates from 10 on while step 0 trains 10..30; step 1 trains 30..50."""
    steps = [StepRecord(0.0, 10.0, 10.0, 30.0), StepRecord(10.0, 28.0, 30.0, 50.0)]
    assert trainer_idle_ratio(steps) == pytest.approx(10 / 50)
    assert samples_per_second([record(), record(Kind.BACKGROUND)], steps) == pytest.approx(2 / 50)


def test_percentiles_interpolate() -> None:
    assert percentile([float(n) for n in range(101)], 99) == 99.0
    assert percentile([0.0, 10.0], 50) == 5.0
    assert percentile([], 50) is None
    assert waits_seconds([record(wait=float(n)) for n in range(101)], 99)["critical"] == 99.0


@pytest.mark.parametrize(
    ("observed", "target", "distance"),
    [
        ({"a": 5, "b": 5}, {"a": 0.5, "b": 0.5}, 0.0),
        ({"a": 1}, {"b": 1}, 1.0),
        ({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5}, 0.1),
        ({"a": 50, "b": 30, "c": 20}, {"a": 1, "b": 1}, 0.2),
    ],
)
def test_total_variation(observed: dict[str, float], target: dict[str, float], distance: float) -> None:
    assert total_variation(observed, target) == pytest.approx(distance)
    assert total_variation(target, observed) == pytest.approx(distance)


@pytest.mark.parametrize(
    ("observed", "target", "named"),
    [({}, {"a": 1}, "observed"), ({"a": 1}, {"a": 0}, "target"), ({"a": 2, "b": -1}, {"a": 1}, "observed")],
)
def test_mixes_that_are_none_are_refused(observed: dict[str, float], target: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} weights"):
        total_variation(observed, target)
