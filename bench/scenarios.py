"""The named workloads: what arrives, and the engines it is meant for.

    Q1 to Q4    8 engines of 16 slots, flat decode curve: maths, long prompts, mixed classes, agents
    W1 to W6    further families, on larger engines
    a file      one request per line in Mooncake's format (`bench.mooncake`)

Q5, the training loop, is `bench.training_loop`.

Invariants
- A scenario is a function of (seed, step, epoch) for given limits and scale; the critical traffic of one does not move when other
  traffic beside it changes.
- Everything is there at the start, but for reward queries and later turns of sessions.

What this module does not know: who schedules, and results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.sessions import SessionTraffic, log_normal_of_mean
from rolloutd.bench.traffic import GroupTraffic, RewardTraffic
from rolloutd.bench.w1 import AGENT, ESSAY, MATH, REWARD
from rolloutd.bench.workload import Limits, WorkClass, Workload

# Mean turns of Q4 and the spread of their logarithm (ours; W3's measured 0.628 has tails that few tasks would show).
Q4_TURNS, Q4_TURNS_SIGMA, Q4_MOST_TURNS = 12.0, 0.4, 40

Traffic = GroupTraffic | RewardTraffic | SessionTraffic


@dataclass(frozen=True, slots=True)
class Scenario:
    """Traffic in order of submission, and the pool it is meant for."""

    name: str
    title: str
    traffic: tuple[Traffic, ...]
    engines: int = 8
    slots: int = 16
    kv_tokens: int = 200_000
    context_tokens: int = 32_768

    def draw(
        self,
        seed: int,
        vocabulary_size: int,
        *,
        step: int = 0,
        epoch: int = 0,
        scale: int = 1,
        needed_by_step: int | None = None,
    ) -> Workload:
        """`scale` times as many prompts, tasks and reward queries. needed_by_step: of what somebody waits for; None: `step`."""
        limits = Limits(vocabulary_size, self.context_tokens)
        items = []
        sessions = []
        for traffic in self.traffic:
            critical = not isinstance(traffic, RewardTraffic) and traffic.work_class is WorkClass.CRITICAL
            awaited = step if needed_by_step is None else needed_by_step
            needed = awaited if critical or isinstance(traffic, RewardTraffic) else None
            match traffic:
                case GroupTraffic():
                    larger = replace(traffic, groups=traffic.groups * scale)
                    items += larger.draw(seed, limits, step=step, epoch=epoch, needed_by_step=needed)
                case RewardTraffic():
                    more = replace(traffic, queries=traffic.queries * scale)
                    items += more.draw(seed, limits, step=step, epoch=epoch, needed_by_step=needed)
                case SessionTraffic():
                    wider = replace(traffic, tasks=traffic.tasks * scale)
                    sessions += wider.draw(seed, limits, step=step, epoch=epoch, needed_by_step=needed)
        return Workload.of(self.name, items, sessions)


SHORT_MATH = replace(MATH, output=LogNormal(7.056, 0.988, 1, 4_096))
LONG_INPUT = GroupTraffic(
    "reading", WorkClass.CRITICAL, "reading", 64, 8, LogNormal(8.77, 0.65, 512, 24_576), LogNormal(6.2, 0.6, 1, 2_048)
)
AGENTS = SessionTraffic(
    name="agents",
    work_class=WorkClass.CRITICAL,
    stratum="agents",
    tasks=32,
    samples=4,
    turns=log_normal_of_mean(Q4_TURNS, Q4_TURNS_SIGMA, 2, Q4_MOST_TURNS),
    head_tokens=3_000,
    first_prompt=LogNormal(6.03, 1.07, 16, 8_192),
    new_tokens=LogNormal(6.03, 1.07, 16, 8_192),
    output=LogNormal(5.089, 0.945, 1, 2_048),
)
SHORT_MEDIAN = GroupTraffic(
    "w1b", WorkClass.CRITICAL, "math", 128, 8, LogNormal(4.97, 0.45, 16, 512), LogNormal(6.2, 1.07, 1, 16_384)
)
LONG_THOUGHT = GroupTraffic(
    "thought", WorkClass.CRITICAL, "thought", 192, 8, LogNormal(4.97, 0.45, 16, 512), LogNormal(9.65, 0.85, 1, 65_536)
)
SWE_AGENTS = SessionTraffic(
    name="swe",
    work_class=WorkClass.CRITICAL,
    stratum="swe",
    tasks=64,
    samples=8,
    turns=LogNormal(3.747, 0.628, 2, 200),
    head_tokens=12_900,
    first_prompt=LogNormal(6.2, 0.3, 16, 2_048),
    new_tokens=LogNormal(6.033, 1.074, 16, 16_384),
    output=LogNormal(5.089, 0.945, 1, 2_048),
)
# SCOTUS-like: median 6,450 and p90 16,359 tokens in; median 480 and p90 1,077 out.
LONG_DOCUMENTS = GroupTraffic(
    "document",
    WorkClass.CRITICAL,
    "document",
    256,
    8,
    LogNormal(8.77, 0.72, 256, 24_576),
    LogNormal(6.17, 0.63, 1, 2_048),
)
RLHF = GroupTraffic(
    "rlhf", WorkClass.BACKGROUND, "rlhf", 128, 2, LogNormal(5.5, 0.8, 16, 4_096), LogNormal(5.8, 0.7, 1, 2_048)
)
# Median 47,583 and p95 130,815 tokens out.
RLVR = GroupTraffic(
    "rlvr", WorkClass.REUSABLE, "rlvr", 8, 8, LogNormal(4.97, 0.45, 16, 512), LogNormal(10.77, 0.615, 1, 131_071)
)

Q1 = Scenario("Q1", "maths, 64 prompts x 8", (MATH,))
Q1S = Scenario("Q1s", "maths with outputs capped at 4,096", (SHORT_MATH,))
Q2 = Scenario("Q2", "long prompts, 64 x 8", (LONG_INPUT,))
Q3 = Scenario(
    "Q3", "maths, reward queries, agent turns and long background", (replace(MATH, groups=48), AGENT, ESSAY, REWARD)
)
Q4 = Scenario("Q4", "agents, 32 tasks x 4 sessions, tools between turns", (AGENTS,), kv_tokens=100_000)

# One engine of the W series is one H200 with a model of 8B (W2, W4) or 7B (W3, W6): the KV tokens that fit beside the weights.
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Q1,
        Q1S,
        Q2,
        Q3,
        Q4,
        Scenario("W1", "maths GRPO, as Q1 on 4 engines of 32 slots", (MATH,), engines=4, slots=32),
        Scenario("W1b", "many short outputs and a long tail", (SHORT_MEDIAN,), engines=4, slots=32),
        Scenario("W2", "long chains of thought", (LONG_THOUGHT,), slots=32, kv_tokens=750_000, context_tokens=66_560),
        Scenario("W3", "software agents", (SWE_AGENTS,), slots=64, kv_tokens=1_950_000, context_tokens=131_072),
        Scenario("W4", "long documents, 256 x 8", (LONG_DOCUMENTS,), slots=32, kv_tokens=750_000),
        Scenario("W5", "short background", (RLHF,)),
        Scenario(
            "W6",
            "agents, very long reasoning and background together",
            (replace(SWE_AGENTS, tasks=12), RLVR, replace(RLHF, groups=18)),
            slots=64,
            kv_tokens=1_950_000,
            context_tokens=163_840,
        ),
    )
}
