"""The mechanisms of the scheduler that a setting switches off, and where each should show.

To add one, add a row: how it is switched off, and the workloads whose figures it is there for.

What this module does not know: how mechanisms work, and what came of the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolloutd.scheduler.config import SchedulerConfig

# More than any prompt has: nothing is worth waiting for.
NO_PREFIX_TOKENS = 1 << 30
# Lower classes may slow the last rollouts of a step by so many times, and fill every engine.
ANY_SLOWDOWN = 1e6

# After a workload's name: served in the STABLE phase, where a run spends its life; else as the first step of a run, COLD_START.
SETTLED = " settled"

# Figures where more is better; of all others less is.
MORE_IS_BETTER = frozenset({"prefix_hit", "samples_per_second"})


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One switch. off: section of the core's settings -> values that take its effect away. shows_in: workload (maybe `SETTLED`)
    -> figures."""

    name: str
    what: str
    off: Mapping[str, Mapping[str, Any]]
    shows_in: Mapping[str, tuple[str, ...]]

    def without(self, config: SchedulerConfig) -> SchedulerConfig:
        """The settings with this switched off."""
        changed = {section: replace(getattr(config, section), **dict(values)) for section, values in self.off.items()}
        return replace(config, **changed)


def settled(config: SchedulerConfig) -> SchedulerConfig:
    """The settings of a run that is STABLE from its first step."""
    return replace(config, policy=replace(config.policy, cold_start_steps=0, phase_ramp_steps=0))


_STEP = {"Q1": ("makespan_over_bound",), "Q1s": ("makespan_over_bound",)}
_MIXED = ("critical_over_bound", "reward_p99_seconds", "reusable_over_bound", "background_over_bound")

MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        "longest first",
        "critical work that may take longest goes first (`weights.critical`)",
        {"weights": {"critical": 0.0}},
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
        {"Q3": _MIXED, f"Q3{SETTLED}": _MIXED},
    ),
    Mechanism(
        "tail by expected lengths",
        "engines whose last critical work ends early are filled (`policy.tail_doubt`)",
        {"policy": {"tail_doubt": 0.0}},
        {"Q3": _MIXED, f"Q3{SETTLED}": _MIXED},
    ),
    Mechanism(
        "moves at the end of a step",
        "the step's last rollouts move, apart for its end, together where others wait for room (`preempt.consolidate`)",
        {"preempt": {"consolidate": False}},
        {"Q3": _MIXED, f"Q3{SETTLED}": _MIXED},
    ),
    Mechanism(
        "reserved short slots",
        "a slot per engine for short work (`scheduler.reserved_short_slots`)",
        {"queue": {"reserved_short_slots": 0}},
        {"Q3": _MIXED},
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
        "the score's prefix term (`weights.prefix`, `policy.*_prefix_weight`)",
        {
            "weights": {"prefix": 0.0},
            "policy": {"cold_start_prefix_weight": 0.0, "stable_prefix_weight": 0.0},
        },
        {
            "Q2": ("makespan_over_bound", "prefix_hit"),
            "Q4": ("session_mean_seconds", "makespan_over_bound", "prefix_hit"),
        },
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
        {"Q4": ("session_mean_seconds", "makespan_over_bound", "prefix_hit")},
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
        {"Q2": ("makespan_over_bound",), "Q4": ("session_mean_seconds", "makespan_over_bound", "prefix_hit")},
    ),
    Mechanism(
        "next step beside the tail",
        "work of the next step may slow the last of this one a little (`policy.tail_next_slowdown`)",
        {"policy": {"tail_next_slowdown": 0.0}},
        {"Q5-off": ("idle_ratio", "samples_per_second")},
    ),
)

# Part of how the core works; taking them out is another program, so they have no row.
WITHOUT_SWITCH: Mapping[str, str] = {
    "length priors": "what finished siblings and earlier epochs say of lengths; cold against warm in the figures shows what they carry",
    "sticky sessions": "turns follow their cache by the prefix term: its row is theirs",
    "marginal prefix credit": "a prefix that every engine holds attracts nobody",
    "affinity heaps": "entries are looked up by the engines that hold their prefix; `make bench-core` compares with an exact scan",
    "short and long in turn": "quanta of short and long dispatches (`scheduler.short_quantum`, `long_quantum`), at least one of each",
    "diversity": "`make bench-mix` has it with and without its weight",
    "target mix": "`make bench-mix` has it without its order (`scheduler.strict_mix`) and with results kept back (`mix_hold_seconds`)",
}
