"""What the core shows of itself: frozen snapshots for RPC answers, metrics and people.

What this module does not know: how the core keeps these things. Times are seconds on the core's clock unless named otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.considered import Candidate, Considered
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rules.book import RuleView
from rolloutd.scheduler.spec import Budget, RunSettings
from rolloutd.scheduler.states import Gate, Origin, RolloutClass, RolloutState, TaskType, TrainerState


class Phase(enum.IntEnum):
    COLD_START = 0
    STABLE = 1


class DecisionKind(enum.IntEnum):
    DISPATCHED = 0
    HELD = 1
    PREEMPTED = 2
    INTERRUPTED = 3  # by a budget that shrank
    RETRIED = 4
    PROMOTED = 5
    REFUSED = 6
    RULE_FIRED = 7  # about a run, not a rollout
    RULE_ENDED = 8


@mypyc_attr(acyclic=True)
@dataclass(init=False, slots=True)
class Decision:
    """Why a rollout went to an engine, or was held or interrupted; or why a rule of its run fired or ended (`rollout_id` "")."""

    at_seconds: float
    kind: DecisionKind
    run_id: str
    rollout_id: str
    batch_id: int
    engine_id: str
    gate: Gate
    considered: Considered
    message: str

    def __init__(
        self,
        at_seconds: float,
        kind: DecisionKind,
        run_id: str,
        rollout_id: str,
        batch_id: int,
        engine_id: str,
        gate: Gate,
        considered: Considered,
        message: str,
    ) -> None:
        self.at_seconds = at_seconds
        self.kind = kind
        self.run_id = run_id
        self.rollout_id = rollout_id
        self.batch_id = batch_id
        self.engine_id = engine_id
        self.gate = gate
        self.considered = considered
        self.message = message

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The engines that were considered for a dispatch, the best few; empty for other kinds."""
        return self.considered.candidates()


@dataclass(frozen=True, slots=True)
class StoryEntry:
    at_seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Counts:
    queued: int
    running: int
    finished: int


@dataclass(frozen=True, slots=True)
class OverLaunchView:
    """Groups of a run that were launched with more members than they keep, over those that have ended."""

    groups: int
    launched: int  # members
    kept: int  # of these, that completed
    surplus: int  # that were ended because the group had enough; the rest failed
    kept_tokens: int  # sum
    surplus_tokens: int  # sum, as they were when they were ended: less than they would have written
    longest_cut_groups: int  # in which a surplus member had written as much as the longest kept one: at least so many
    # Of each fifth of the launched by length, shortest first: the share that was kept. Lengths of surplus members are expected ones.
    kept_share_by_quintile: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    run_id: str
    paused: bool
    ended: bool
    epoch: int
    step: int
    trainer_state: TrainerState
    phase: Phase
    phase_blend: float  # 0 is COLD_START, 1 is STABLE, between is the ramp
    settings: RunSettings
    classes: Mapping[RolloutClass, Counts]
    tasks: Mapping[TaskType, Counts]
    budget: Budget
    budget_is_default: bool
    budget_lease_remaining_seconds: float  # 0: no lease
    running_rollouts: int
    kv_claimed_tokens: int
    demand_tokens_per_second: float
    supply_tokens_per_second: float
    desired_engines: int
    undelivered_bytes: int
    undelivered_results: int
    valid_samples: int  # acknowledged as used
    dropped_samples: int  # acknowledged as dropped
    mean_reward: float | None  # of acknowledged results, recent ones weighing more
    finished_samples: int
    diversity_distance: float  # total variation between consumed strata and the target mix
    strata_coverage: float
    distinct_outputs: float  # share of distinct outputs among recent results
    policy_version: int  # of pool "policy"; 0: as registered
    policy_versions: Mapping[str, int] = field(default_factory=dict)  # pool -> newest published, where any was
    publishing: Mapping[str, int] = field(default_factory=dict)  # pool -> version being published now
    samples_on_their_way: int = 0  # reserved or generated and not consumed, where staleness bounds them
    samples_allowed: int | None = None  # None: not bounded
    held_results: int = 0  # kept back until strata behind the target mix catch up
    stale_results: int = 0  # withheld or flagged
    over_launch: OverLaunchView | None = None  # None: no such group has ended
    rules: tuple[RuleView, ...] = ()
    rule_decisions: tuple[Decision, ...] = ()  # the newest, oldest first


@dataclass(frozen=True, slots=True)
class RolloutView:
    run_id: str
    rollout_id: str
    group_id: str
    state: RolloutState
    rollout_class: RolloutClass
    task_type: TaskType
    pool: str
    sample_index: int
    session_id: str
    turn: int
    parent_rollout_id: str
    stratum: str
    origin: Origin
    needed_by_step: int | None
    max_new_tokens: int
    batch_id: int
    consumer_id: str
    engine_id: str
    attempts: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    waited_seconds: float
    gate: Gate  # why it is not running, where that is known
    result: RolloutResult | None
    seed: int | None  # None: the engine's choice
    accepted_at_seconds: float


@dataclass(frozen=True, slots=True)
class GroupView:
    """How far a group is: complete when all `size` members (or `keep` of them) completed, partial once that cannot be any more."""

    group_id: str
    size: int
    members: tuple[str, ...]
    finished: int
    failed: tuple[str, ...]  # ended otherwise than COMPLETED or SURPLUS
    done: bool  # every member ended; nothing more will come
    keep: int = 0  # complete members that are enough; 0: all
    completed: int = 0
    surplus: tuple[str, ...] = ()  # ended because enough of them were complete


@dataclass(frozen=True, slots=True)
class EngineView:
    engine_id: str
    incarnation: str
    pool: str
    run_id: str
    labels: Mapping[str, str]
    state: str  # "ready" | "not_ready" | "held" | "lost" | "draining" | "broken"
    slots: int
    in_flight: int
    kv_capacity_tokens: int
    kv_claimed_tokens: int
    kv_used_tokens: int  # as the engine reported
    kv_used_peak_tokens: int
    page_tokens: int
    context_tokens: int
    vocabulary_size: int
    engine_version: str
    breaker_open: bool
    faults: int
    last_error: str
    predicted_cached_tokens: int  # sums over finished attempts
    cached_tokens: int
    prompt_tokens: int
    generated_tokens: int
    prefill_tokens_per_second: float
    decode_seconds_per_token: float  # of one sequence at the batch it ran in
    reported_rollouts: int  # running and waiting there, in the last report
    tokens_per_second: float  # generation, in the last report
    ghosts: int  # running there beyond what we dispatched, in the last report
    policy_version: int = 0  # acknowledged; 0: as registered
    held_because: str = ""  # why it gets no work although it is there
    held_kind: str = ""  # the same in a word: "updating" | "memory" | "quarantined"
    kv_blocks_reported: int = 0  # in its cache by its own KV events; 0 also where it publishes none
    kv_blocks_unplaced: int = 0  # reported so far, and not followed: what they continue is not known, or no room


@dataclass(frozen=True, slots=True)
class Statistics:
    """Process-wide counters and gauges for the metrics endpoint."""

    queued: Mapping[tuple[RolloutClass, TaskType], int]
    held: int
    running: int
    attempts: int
    index_bytes: int
    index_nodes: int
    index_pages: int
    undelivered_bytes: int
    undelivered_results: int
    dispatched_total: int
    preempted_total: int
    retried_total: int
    batches_total: int
    gates: Mapping[Gate, int] = field(default_factory=dict)  # how often each gate closed
