"""W1, the GRPO maths step, alone and with the traffic of a demonstration beside it.

Invariants
- A workload is a function `(seed, limits, *, step, epoch) -> Workload`; a further family is one more such function.
- The critical items of `demo_step` are those of `w1` for the same seed, step and shape.

What this module does not know: how the engines are timed and how long a training phase is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.traffic import GroupTraffic, RewardTraffic
from rolloutd.bench.workload import Limits, WorkClass, Workload

# GRPO on maths: 64 prompts x 8 per step; the output fits a median of 1,160 and a P90 of 4,115.
MATH = GroupTraffic(
    name="math",
    work_class=WorkClass.CRITICAL,
    stratum="math",
    groups=64,
    samples=8,
    prompt=LogNormal(4.97, 0.45, 16, 512),
    output=LogNormal(7.056, 0.988, 1, 16_384),
)

# Agent turns of W3 as single rollouts: a system-and-tools head that all share, the new tokens and the output of one
# turn. The limits of the prompt are ours: they keep the rare giant inside a context.
AGENT = GroupTraffic(
    name="agent",
    work_class=WorkClass.REUSABLE,
    stratum="agent",
    groups=96,
    samples=2,
    prompt=LogNormal(6.03, 1.07, 16, 16_384),
    output=LogNormal(5.089, 0.945, 1, 2_048),
    head_tokens=3_000,
)

# Long generations nobody waits for. The prompt is that of W5 (RLHF background), with limits of ours.
ESSAY = GroupTraffic(
    name="essay",
    work_class=WorkClass.BACKGROUND,
    stratum="essay",
    groups=40,
    samples=2,
    prompt=LogNormal(5.5, 0.8, 16, 4_096),
    output=LogNormal(8.6, 0.85, 1, 24_576),
)

# Reward queries of 1-10 tokens, 5 a second.
REWARD = RewardTraffic(
    name="reward",
    stratum="reward",
    queries=300,
    seconds=60.0,
    prompt=LogNormal(6.5, 0.5, 16, 8_192),
    max_output_tokens=10,
)


@dataclass(frozen=True, slots=True)
class DemoShape:
    """How much of each traffic one step of the demonstration has."""

    critical: GroupTraffic = MATH
    reusable: GroupTraffic = AGENT
    background: GroupTraffic = ESSAY
    reward: RewardTraffic = REWARD


FULL_DEMO = DemoShape()

# For two real engines of 8 slots on a CPU, with `Limits(context_tokens=4096, max_output_tokens=256)`: four-fold
# over-subscription as in the full one, and a head short enough for a CPU to prefill.
SMALL_DEMO = DemoShape(
    critical=replace(MATH, groups=8),
    reusable=replace(AGENT, groups=4, head_tokens=256, prompt=LogNormal(4.0, 0.6, 16, 512)),
    background=replace(ESSAY, groups=2),
    reward=replace(REWARD, queries=8, seconds=8.0, prompt=LogNormal(5.0, 0.5, 16, 512)),
)


def w1(seed: int, limits: Limits, *, step: int = 0, epoch: int = 0) -> Workload:
    """The critical rollouts of one step: 64 prompts x 8, all there at once."""
    return Workload.of("w1", MATH.draw(seed, limits, step=step, epoch=epoch, needed_by_step=step))


def demo_step(seed: int, limits: Limits, *, step: int = 0, epoch: int = 0, shape: DemoShape = FULL_DEMO) -> Workload:
    """One step of the demonstration: W1 beside reusable, background and reward traffic.

    Arrivals count from the start of the step. Reusable and background rollouts are needed by no step.
    """
    items = shape.critical.draw(seed, limits, step=step, epoch=epoch, needed_by_step=step)
    items += shape.reusable.draw(seed, limits, step=step, epoch=epoch)
    items += shape.background.draw(seed, limits, step=step, epoch=epoch)
    items += shape.reward.draw(seed, limits, step=step, epoch=epoch, needed_by_step=step)
    return Workload.of("demo_step", items)
