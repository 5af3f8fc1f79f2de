"""What callers hand to the core: rollout submissions, run settings, budgets, engine facts. All frozen.

Token ids are little-endian uint32 bytes everywhere (4 bytes a token). Zero and None keep the meaning the field comments give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.states import (
    CacheHandling,
    OnPreempt,
    OnStale,
    Origin,
    ReleaseMemory,
    RolloutClass,
    TaskType,
    TrainerState,
    UpdateMode,
)

TOKEN_BYTES: Final = 4


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One submission: a prompt and what to do with it, for `samples` rollouts that share it.

    With samples > 1 the members are named "<rollout_id>/<i>", i from 0, and share a group.
    """

    rollout_id: str
    token_bytes: bytes = b""
    text: str | None = None  # engine tokenises; no prefix credit until it returns the ids
    samples: int = 1
    seeds: tuple[int, ...] = ()  # empty, or one per sample
    rollout_class: RolloutClass | None = None  # None: the run's default
    task_type: TaskType = TaskType.GENERATION
    pool: str = "policy"
    group_id: str = ""
    group_size: int = 0  # 0: `samples`
    group_keep: int = 0  # complete members that are enough: the others end then; 0: all are wanted
    session_id: str = ""
    turn: int = 0
    parent_rollout_id: str = ""
    stratum: str = ""
    origin: Origin = Origin.CURRENT_POLICY
    needed_by_step: int | None = None
    deadline_seconds: float = 0.0  # from now; 0: none
    queue_ttl_seconds: float = 0.0  # 0: the run's default
    progress_timeout_seconds: float = 0.0  # 0: executor.timeout_seconds
    max_attempts: int = 0  # 0: the run's default
    on_preempt: OnPreempt | None = None  # None: the run's default
    fail_fast: bool = False
    clip_max_new_tokens: bool = False
    want_progress: bool = False
    max_new_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the engine's words, without max_new_tokens and seed
    logprobs: bool = False
    top_logprobs: int = 0
    engine_params: Mapping[str, Any] = field(default_factory=dict)
    engine_labels: Mapping[str, str] = field(default_factory=dict)
    return_prompt_tokens: bool = False  # the caller gave text that was tokenised before it came here
    min_version: int | None = None  # oldest policy version that may write any of its tokens; None: the run's
    exact_version: int | None = None  # the only one that may
    max_staleness: int | None = None  # versions its oldest token may be behind the run's newest; None: the run's
    max_partial_span: int | None = None  # versions between its oldest and its newest token; None: the run's

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def of_text(self) -> bool:
        """Whether the caller gave text, and so wants text back."""
        return self.text is not None or self.return_prompt_tokens


def label_key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The labels that a rollout wants of an engine, as part of a key."""
    return tuple(sorted(labels.items())) if labels else ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the score terms; None keeps the configured default (prefix and diversity: the phase's value)."""

    prefix: float | None = None
    critical: float | None = None
    waiting: float | None = None
    diversity: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run owns. `cancel_on_disconnect`: a consumer that is gone for longer than the grace loses its unfinished work."""

    weights: Weights = Weights()
    fairness_weight: float = 1.0
    floor_rollouts: int = 0
    default_class: RolloutClass = RolloutClass.CRITICAL
    queue_ttl_seconds: float = 0.0  # 0: scheduler.queue_ttl_seconds
    max_attempts: int = 0  # 0: executor.max_attempts
    on_preempt: OnPreempt = OnPreempt.KEEP_PARTIAL
    target_mix: Mapping[str, float] = field(
        default_factory=dict
    )  # stratum -> share: what is furthest below goes first inside its class; empty: equal shares, for the score
    mix_hold_seconds: float = (
        0.0  # results of strata ahead of the target mix are kept back so long at most; 0: they are not
    )
    cancel_on_disconnect: bool = False
    disconnect_grace_seconds: float = 0.0
    max_undelivered_bytes: int = 0  # 0: delivery.max_undelivered_bytes
    undelivered_ttl_seconds: float = 0.0  # 0: delivery.undelivered_ttl_seconds
    min_version: int = 0
    max_staleness: int | None = None  # None: any age will do
    max_partial_span: int | None = None  # None: any; 0: all tokens of a rollout by one version
    on_stale: OnStale = OnStale.WITHHOLD
    batch_samples: int = 0  # samples that one training step takes; with max_staleness: bounds the samples on their way
    slice_tokens: int = 0  # a rollout may move to another engine after so many tokens; 0: it stays
    prefix_ttl_versions: int | None = None  # None: policy.*_prefix_ttl_versions; needs CacheHandling.KEEP
    release_memory: ReleaseMemory = ReleaseMemory.NOTHING  # while the trainer trains


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """New weights for one pool of a run.

    version: above every one published before, or the newest again (a retry). path: where the engines read them; empty: the
    trainer pushes them itself and says so per engine. engines_at_once: 0 for all; else a rolling update.
    """

    version: int
    path: str = ""
    mode: UpdateMode = UpdateMode.RETRACT
    cache: CacheHandling = CacheHandling.FLUSH
    pool: str = "policy"
    engines_at_once: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one class or task type inside a budget.

    max_rollouts: never more than this many running; None: no limit of its own.
    share: of the running ceiling, binding only while somebody else wants the room; 0: none.
    floor_rollouts: this many may run before anybody else gets more room; lent while unused, returned first.
    """

    max_rollouts: int | None = None
    share: float = 0.0
    floor_rollouts: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """What the trainer allows its run's inference to use now. None: no limit of this kind; 0 means nothing may run.

    max_kv_tokens is over all engines; training_reserved_mb and max_inference_mb are per engine and become KV tokens through
    the engine's own figures.
    """

    max_rollouts: int | None = None
    max_kv_tokens: int | None = None
    training_reserved_mb: float | None = None
    max_inference_mb: float | None = None
    classes: Mapping[RolloutClass, Quota] = field(default_factory=dict)
    tasks: Mapping[TaskType, Quota] = field(default_factory=dict)
    lease_seconds: float = 0.0  # 0: until replaced


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer reports about itself. 0 and None: not reported."""

    step: int
    trainer_state: TrainerState
    samples_needed: int = 0
    consume_samples_per_second: float = 0.0
    consume_tokens_per_second: float = 0.0
    policy_entropy: float | None = None
    buffer_fill: float | None = None
    update_period_seconds: float = 0.0
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One registered engine, as its door read it. `run_id` "": serves any run (static assignment otherwise)."""

    engine_id: str
    incarnation: str
    pool: str = "policy"
    run_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    page_tokens: int = 1
    kv_capacity_tokens: int = 0
    slots: int = 1
    context_tokens: int = 0
    max_prompt_tokens: int = 0
    vocabulary_size: int = 0
    engine_version: str = "default"  # the engine's own weight label
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RolloutUpdate:
    """New class, deadline or step of one rollout; None leaves it."""

    rollout_id: str
    rollout_class: RolloutClass | None = None
    deadline_seconds: float | None = None  # from now; 0 removes it
    needed_by_step: int | None = None


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The trainer has a result, and perhaps says what became of it."""

    rollout_id: str
    used: bool | None = None
    drop_reason: str = ""
    reward: float | None = None
