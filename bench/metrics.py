"""What happened, in numbers: from records of rollouts and steps to one summary with a fixed set of keys.

Invariants
- Every time is in simulated seconds on one clock; scaling real time is the caller's business.
- A rollout counts as delivered when a complete result came back at least once; each further one is a duplicate; one
  that never came, or ended in an error, is lost. delivered + lost = rollouts.
- A rollout that the trainer itself withdrew is neither: it is not among `rollouts`, but its tokens are still checked.
- A figure without data is None, never 0 and never NaN.

What this module does not know: where records come from, how a summary is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rolloutd.bench.workload import Kind

# Digits after the point in a summary: a tenth of a simulated millisecond.
SUMMARY_DIGITS = 4

Waits = Mapping[str, float | None]


@dataclass(slots=True)
class RolloutRecord:
    """One rollout as the trainer saw it; filled in as events arrive.

    started_seconds: first dispatch to an engine, None while it waits. delivered_seconds: first complete result.
    deliveries: complete results received. wrong_tokens: output tokens that are not the expected ones, missing ones and
        extra ones included.
    prompt_tokens, cached_tokens: as the engine reported them for the delivered result.
    withdrawn: cancelled by the trainer, and its end as cancelled has come.
    """

    kind: Kind
    submitted_seconds: float
    started_seconds: float | None = None
    delivered_seconds: float | None = None
    deliveries: int = 0
    wrong_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    withdrawn: bool = False

    @property
    def wait_seconds(self) -> float | None:
        """From submission to the first dispatch; None when it never started."""
        return None if self.started_seconds is None else self.started_seconds - self.submitted_seconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step. bound_seconds: bound of its critical rollouts, None where the engines have no timing model."""

    started_seconds: float
    critical_done_seconds: float
    training_started_seconds: float
    training_ended_seconds: float
    bound_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """From the submission of its rollouts to the end of its training phase."""
        return self.training_ended_seconds - self.started_seconds

    @property
    def critical_over_bound(self) -> float | None:
        """Time until the last critical rollout was back, in bounds."""
        if self.bound_seconds is None:
            return None
        return (self.critical_done_seconds - self.started_seconds) / self.bound_seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; field names are the keys of its JSON. Waits are keyed by the values of `Kind`.

    samples_per_second: rollouts other than reward queries delivered while the loop ran, per second of it.
    critical_over_bound: mean over steps. prefix_hit: cached over prompt tokens of what was delivered.
    """

    rollouts: int
    delivered: int
    lost: int
    duplicated: int
    wrong_tokens: int
    trainer_idle_ratio: float | None
    step_seconds_p50: float | None
    critical_over_bound: float | None
    samples_per_second: float | None
    prefix_hit: float | None
    prefix_hit_ceiling: float | None
    wait_p50_seconds: Waits
    wait_p99_seconds: Waits


def summarise(
    rollouts: Sequence[RolloutRecord], steps: Sequence[StepRecord], prefix_hit_ceiling: float | None
) -> Summary:
    """Assemble the figures of one run, floats rounded to `SUMMARY_DIGITS`."""
    wanted = [record for record in rollouts if not record.withdrawn]
    delivered = [record for record in wanted if record.deliveries > 0]
    over_bounds = [ratio for step in steps if (ratio := step.critical_over_bound) is not None]
    prompt_tokens = sum(record.prompt_tokens for record in delivered)
    cached_tokens = sum(record.cached_tokens for record in delivered)
    return Summary(
        rollouts=len(wanted),
        delivered=len(delivered),
        lost=len(wanted) - len(delivered),
        duplicated=sum(record.deliveries - 1 for record in delivered),
        wrong_tokens=sum(record.wrong_tokens for record in rollouts),
        trainer_idle_ratio=_rounded(trainer_idle_ratio(steps)),
        step_seconds_p50=_rounded(percentile([step.step_seconds for step in steps], 50)),
        critical_over_bound=_rounded(fmean(over_bounds) if over_bounds else None),
        samples_per_second=_rounded(samples_per_second(delivered, steps)),
        prefix_hit=_rounded(cached_tokens / prompt_tokens if prompt_tokens else None),
        prefix_hit_ceiling=_rounded(prefix_hit_ceiling),
        wait_p50_seconds=waits_seconds(rollouts, 50),
        wait_p99_seconds=waits_seconds(rollouts, 99),
    )


def trainer_idle_ratio(steps: Sequence[StepRecord]) -> float | None:
    """Share of the loop, from its first submission to the end of its last training phase, in which nothing trained."""
    span_seconds = _loop_seconds(steps)
    if span_seconds is None:
        return None
    trained_seconds = sum(step.training_ended_seconds - step.training_started_seconds for step in steps)
    return 1.0 - trained_seconds / span_seconds


def samples_per_second(rollouts: Iterable[RolloutRecord], steps: Sequence[StepRecord]) -> float | None:
    """Rollouts other than reward queries that were delivered by the end of the loop, per second of the loop."""
    span_seconds = _loop_seconds(steps)
    if span_seconds is None:
        return None
    end_seconds = max(step.training_ended_seconds for step in steps)
    samples = sum(
        record.kind is not Kind.REWARD
        and record.delivered_seconds is not None
        and record.delivered_seconds <= end_seconds
        for record in rollouts
    )
    return samples / span_seconds


def waits_seconds(rollouts: Iterable[RolloutRecord], percent: float) -> dict[str, float | None]:
    """That percentile of the wait of each kind, every kind present, None for one of which nothing started."""
    waits: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for record in rollouts:
        if record.wait_seconds is not None:
            waits[record.kind].append(record.wait_seconds)
    return {kind.value: _rounded(percentile(of_kind, percent)) for kind, of_kind in waits.items()}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile with linear interpolation between neighbours; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def total_variation(observed: Mapping[str, float], target: Mapping[str, float]) -> float:
    """Half the sum of |observed share - target share| over all strata, in [0, 1].

    Both are weights (counts, shares) and are divided by their sums; a stratum missing on one side weighs 0 there.
    """
    sums = {"observed": sum(observed.values()), "target": sum(target.values())}
    for name, weights in (("observed", observed), ("target", target)):
        if sums[name] <= 0 or min(weights.values()) < 0:
            raise ValueError(f"{name} weights are {dict(weights)}; they must not be negative and must not sum to 0")
    return 0.5 * sum(
        abs(observed.get(stratum, 0.0) / sums["observed"] - target.get(stratum, 0.0) / sums["target"])
        for stratum in observed.keys() | target.keys()
    )


def _loop_seconds(steps: Sequence[StepRecord]) -> float | None:
    if not steps:
        return None
    return max(step.training_ended_seconds for step in steps) - min(step.started_seconds for step in steps)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, SUMMARY_DIGITS)
