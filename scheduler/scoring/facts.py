"""What the score terms may look at: plain numbers about one entry and one engine."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.states import RolloutClass


@mypyc_attr(acyclic=True)
class Facts:
    """Filled by the placement for one entry, then for each engine considered.

    Engine side: hit_tokens (cached there), common_tokens (cached on every open engine),
    longest_tokens (on the one that has most, 0 where that does not matter), siblings (rollouts of its prompt
    that run there, 0 where that does not matter), slots_fill and kv_fill (after
    placing, in [0,1]), dearness (cost of computing this prompt against decoding its output, in [0,1]).
    Entry side: the rest. token_seconds: of one sequence in this pool, 0 before it was measured. slack_seconds is
    deadline - now - expected running time; None without a deadline.
    """

    __slots__ = (
        "aging_seconds",
        "common_tokens",
        "dearness",
        "expected_seconds",
        "expected_tokens",
        "hit_tokens",
        "kv_fill",
        "longest_tokens",
        "prompt_tokens",
        "rollout_class",
        "siblings",
        "slack_seconds",
        "slots_fill",
        "steps_away",
        "stratum_share",
        "target_share",
        "token_seconds",
        "waited_seconds",
        "worst_tokens",
    )

    def __init__(self) -> None:
        self.rollout_class = RolloutClass.CRITICAL
        self.prompt_tokens = 0
        self.expected_tokens = 1.0
        self.expected_seconds = 0.0
        self.worst_tokens = 1.0
        self.waited_seconds = 0.0
        self.aging_seconds = 1.0
        self.token_seconds = 0.0
        self.slack_seconds: float | None = None
        self.steps_away: int | None = None
        self.stratum_share = 0.0
        self.target_share = 0.0
        self.hit_tokens = 0
        self.common_tokens = 0
        self.longest_tokens = 0
        self.siblings = 0
        self.dearness = 1.0
        self.slots_fill = 0.0
        self.kv_fill = 0.0
