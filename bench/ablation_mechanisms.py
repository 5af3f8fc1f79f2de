"""The mechanisms of the scheduler that something switches off, and where each should show.

To add one, add a row: how it is switched off, and the workloads whose figures it is there for.

What this module does not know: how mechanisms work, and what came of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolloutd.bench.simulate import Plan
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import RolloutClass
from rolloutd.server.config import load_config

# Lower classes may slow the last rollouts of a step by so many times, and fill every engine.
ANY_SLOWDOWN = 1e6
NEVER_ENDS = 1 << 30  # dispatches in a row: more than any run has

# Figures where more is better; of all others less is.
MORE_IS_BETTER = frozenset({"prefix_hit", "samples_per_second"})


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs from the workload by itself. flags: of `rolloutd simulate`. settings: what becomes of the core's settings."""

    what: str
    flags: tuple[str, ...] = ()
    settings: Callable[[SchedulerConfig], SchedulerConfig] = lambda config: config


def settled(config: SchedulerConfig) -> SchedulerConfig:
    """The settings of a run that is STABLE from its first step."""
    return replace(config, policy=replace(config.policy, cold_start_steps=0, phase_ramp_steps=0))


def _with_floors(config: SchedulerConfig) -> SchedulerConfig:
    floors = {RolloutClass.REUSABLE: Quota(floor_rollouts=16), RolloutClass.BACKGROUND: Quota(floor_rollouts=8)}
    return replace(config, budget=replace(config.budget, default=Budget(classes=floors)))


def _agentic(config: SchedulerConfig) -> SchedulerConfig:
    """The preset alone: its settings are whole, so those that were there have no say."""
    return load_config(flags={"preset": "agentic"}).scheduler


# After a workload's name, each with a space before it: "Q4 tight agentic" is both. Not after a training loop's, which goes by its name.
VARIANTS: Mapping[str, Variant] = {
    "settled": Variant(
        "in the STABLE phase, where a run spends its life; else it is a run's first step, COLD_START", (), settled
    ),
    "tight": Variant("engines of 60,000 KV tokens: sessions need more than there is", ("--kv-tokens", "60000")),
    "scant": Variant(
        "engines of 30,000 KV tokens: they put back what they let in, and then let work wait", ("--kv-tokens", "30000")
    ),
    "unequal": Variant("every fourth engine at half speed", ("--slowdowns", "1,1,1,2")),
    "steep": Variant("each sequence in a batch is felt", ("--curve", "steep")),
    "crowded": Variant("2 engines for all of it", ("--engines", "2")),
    "floors": Variant("a budget with floors: 16 reusable and 8 background rollouts, of 128 slots", (), _with_floors),
    "agentic": Variant("under the preset `agentic`", (), _agentic),
}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One switch. off: section of the core's settings -> values that take its effect away. off_rules: names of rules that are left
    out. unsaid: the trainer does not say which step needs its work of the next one. shows_in: workload, maybe with words of
    `VARIANTS` behind it -> figures."""

    name: str
    what: str
    off: Mapping[str, Mapping[str, Any]]
    shows_in: Mapping[str, tuple[str, ...]]
    off_rules: tuple[str, ...] = ()
    unsaid: bool = False

    def without(self, plan: Plan) -> Plan:
        """The same with this switched off."""
        config = plan.config
        changed = {section: replace(getattr(config, section), **dict(values)) for section, values in self.off.items()}
        rules = tuple(rule for rule in config.rules if rule.name not in self.off_rules)
        config = replace(config, rules=rules, **changed)
        return replace(plan, config=config, says_steps=plan.says_steps and not self.unsaid)


_STEP = {"Q1": ("makespan_over_bound",), "Q1s": ("makespan_over_bound",)}
_MIXED = ("critical_over_bound", "reward_p99_seconds", "reusable_over_bound", "background_over_bound")
_SESSIONS = ("session_mean_seconds", "makespan_over_bound", "prefix_hit")
_NO_PREFIX_TERM: Mapping[str, Mapping[str, Any]] = {
    "weights": {"prefix": 0.0},
    "policy": {"cold_start_prefix_weight": 0.0, "stable_prefix_weight": 0.0},
}

MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        "longest first",
        "critical work that may take longest goes first (`weights.critical`)",
        {"weights": {"critical": 0.0}},
        {**_STEP, "Q3": ("critical_over_bound",)},
    ),
    Mechanism(
        "length priors",
        "lengths are learnt from siblings and, where there were any, earlier epochs (`scheduler.learn_lengths`)",
        {"queue": {"learn_lengths": False}},
        {**_STEP, "Q3": ("critical_over_bound",)},
    ),
    Mechanism(
        "time slices",
        "running critical work gives way to what may take longer (`preempt.time_slice_tokens`)",
        {"preempt": {"time_slice_tokens": 0}},
        {**_STEP, "Q3": ("critical_over_bound",)},
    ),
    Mechanism(
        "preemption",
        "critical work takes the slots of lower classes, and time slices (`preempt.enabled`)",
        {"preempt": {"enabled": False}},
        {"Q3": _MIXED},
    ),
    Mechanism(
        "quiet tail",
        "the last rollouts of a step are not slowed by others (`policy.*_tail_slowdown`, `*_tail_fill`)",
        {
            "policy": {
                "cold_start_tail_slowdown": ANY_SLOWDOWN,
                "stable_tail_slowdown": ANY_SLOWDOWN,
                "cold_start_tail_fill": 1.0,
                "stable_tail_fill": 1.0,
            }
        },
        {"Q3": _MIXED, "Q3 settled": _MIXED},
    ),
    Mechanism(
        "tail by expected lengths",
        "engines whose last critical work ends early are filled (`policy.tail_doubt`)",
        {"policy": {"tail_doubt": 0.0}},
        {"Q3": _MIXED, "Q3 settled": _MIXED},
    ),
    Mechanism(
        "moves at the end of a step",
        "the step's last rollouts move to where it ends sooner (`preempt.consolidate`)",
        {"preempt": {"consolidate": False}},
        {
            "Q1 unequal": ("makespan_over_bound",),
            "Q1 steep": ("makespan_over_bound",),
            "Q3 steep": ("critical_over_bound", "background_over_bound"),
        },
    ),
    Mechanism(
        "reserved short slots",
        "a slot per engine for short work (`scheduler.reserved_short_slots`)",
        {"queue": {"reserved_short_slots": 0}},
        {"Q3": _MIXED},
    ),
    Mechanism(
        "short and long in turn",
        "short work interrupts a row of long dispatches (`scheduler.long_quantum`)",
        {"queue": {"long_quantum": NEVER_ENDS}},
        {"Q3": ("reward_p99_seconds", "critical_over_bound")},
    ),
    Mechanism(
        "class floors",
        "each class has slots of its own while it wants them (`budget` with `floor_rollouts`, as a trainer sets it)",
        {"budget": {"default": Budget()}},
        {"Q3 floors": _MIXED},
    ),
    Mechanism(
        "hold for prefix",
        "reusable work waits for a prefix that somebody computes (`scheduler.max_defer_seconds`)",
        {"queue": {"max_defer_seconds": 0.0}},
        {"Q3": ("reusable_over_bound", "critical_over_bound", "prefix_hit")},
    ),
    Mechanism(
        "leader first",
        "siblings wait for their leader's first token (`scheduler.leader_timeout_seconds`)",
        {"queue": {"leader_timeout_seconds": 0.0}},
        {"Q2": ("makespan_over_bound", "prefix_hit"), "Q1": ("makespan_over_bound",)},
    ),
    Mechanism(
        "prefix reuse",
        "placement by cached prefixes: the term (`weights.prefix`, `policy.*_prefix_weight`), siblings and turns that wait for theirs",
        {**_NO_PREFIX_TERM, "queue": {"place_groups": False, "session_patience_seconds": 0.0}},
        {"Q2": ("makespan_over_bound", "prefix_hit"), "Q4": _SESSIONS},
    ),
    Mechanism(
        "sticky sessions",
        "no switch of its own: turns go where their context is by the score's prefix term and by waiting, both off here",
        {**_NO_PREFIX_TERM, "queue": {"session_patience_seconds": 0.0}},
        {"Q4 tight": _SESSIONS},
    ),
    Mechanism(
        "marginal prefix credit",
        "a prefix that every engine has attracts nobody (`scheduler.marginal_credit`)",
        {"queue": {"marginal_credit": False}},
        {"Q3": ("reusable_over_bound", "critical_over_bound", "prefix_hit"), "Q4 tight crowded": _SESSIONS},
    ),
    Mechanism(
        "nothing computed twice",
        "what no engine has cached goes before what another one has (`scheduler.spare_duplicates`)",
        {"queue": {"spare_duplicates": False}},
        {"Q2": ("makespan_over_bound", "prefix_hit")},
    ),
    Mechanism(
        "siblings together or apart",
        "siblings go apart where prefill is cheap, wait for the engine with their prompt where it is dear (`scheduler.place_groups`)",
        {"queue": {"place_groups": False}},
        {"Q1": ("makespan_over_bound", "imbalance"), "Q2": ("makespan_over_bound", "prefix_hit")},
    ),
    Mechanism(
        "turns wait for their context",
        "a later turn waits for the engine that has its context (`scheduler.session_patience_seconds`)",
        {"queue": {"session_patience_seconds": 0.0}},
        {"Q4 tight": _SESSIONS},
    ),
    Mechanism(
        "waiting",
        "the score's waiting term (`weights.waiting`)",
        {"weights": {"waiting": 0.0}},
        {"Q3": ("background_over_bound", "reusable_over_bound"), "Q4": ("session_mean_seconds",)},
    ),
    Mechanism(
        "cost of full engines",
        "the score's cost term, which spreads work (`weights.cost`)",
        {"weights": {"cost": 0.0}},
        {"Q1": ("makespan_over_bound", "imbalance"), "Q2": ("makespan_over_bound",), "Q4": ("session_mean_seconds",)},
    ),
    Mechanism(
        "admission by KV claims",
        "new sessions wait while claims fill an engine's cache (`budget.kv_watermark`)",
        {"budget": {"kv_watermark": 1.0}},
        {"Q2": ("makespan_over_bound",), "Q4": _SESSIONS, "Q1s scant": ("makespan_over_bound",)},
    ),
    Mechanism(
        "learnt in-flight limits",
        "an engine that lets work wait gets less, and by and by more again (`budget.learn_limits`)",
        {"budget": {"learn_limits": False}},
        {"Q1s scant": ("makespan_over_bound",), "Q3 scant": _MIXED},
    ),
    Mechanism(
        "rule memory-full",
        "fewer sessions run while memory is full (of the preset `agentic`)",
        {},
        {"Q4 tight crowded agentic": _SESSIONS},
        off_rules=("memory-full",),
    ),
    Mechanism(
        "next step beside the tail",
        "work of the next step may slow the last of this one a little (`policy.tail_next_slowdown`)",
        {"policy": {"tail_next_slowdown": 0.0}},
        {"Q5-off": ("idle_ratio", "samples_per_second")},
    ),
    Mechanism(
        "speculation promoted by step",
        "work of the next step becomes critical with that step; without: the trainer does not say `needed_by_step`",
        {},
        {"Q5-off": ("idle_ratio", "samples_per_second")},
        unsaid=True,
    ),
)

# Switched off by another command, beside the figures that they are there for.
MEASURED_ELSEWHERE: Mapping[str, str] = {
    "diversity": "`make bench-mix`, `not strict` beside `not strict, no diversity`: each class of Q1 to Q5 has one stratum",
    "order of a target mix": "`make bench-mix`, `default` beside `not strict` (`scheduler.strict_mix`)",
    "results kept back for a mix": "`make bench-mix`, `held` beside `default` (`mix_hold_seconds` of the run)",
    "over-launch": "`rolloutd simulate Q1 --seeds 0-5 --warm --over-launch 1.25`: exact groups beside larger ones, gain beside bias",
    "affinity heaps": "`make bench-core`: prefix hits beside those of an exact scan (`hit_share_of_exact`)",
    "class shares": "`pytest tests/server/test_presets.py`: what a rule that raises a share does for a low buffer, with and without it",
}
