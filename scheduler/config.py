"""Settings of the core: one frozen tree, defaults and limits in one place. The server fills it from file, environment, flags.

Sources: DESIGN defaults of the service's configuration table; the rest are starting values whose reason stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rolloutd.scheduler.rules.rule import Rule
from rolloutd.scheduler.spec import Budget


@dataclass(frozen=True, slots=True)
class WeightDefaults:
    prefix: float = 0.4
    critical: float = 0.4
    waiting: float = 0.2
    diversity: float = 0.1
    cost: float = 0.1


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`scheduler.*`"""

    max_batch_size: int = 32
    scheduling_interval_ms: float = 10.0
    queue_capacity: int = 4096  # rollouts per run and class
    queue_capacity_bytes: int = 256 << 20  # prompt bytes per run and class
    queue_ttl_seconds: float = 3600.0
    aging_seconds: float = 60.0  # waiting term reaches 1 here
    overdue_seconds: float = 300.0  # after this, every `overdue_turn`-th dispatch goes to overdue work of any class
    overdue_turn: int = 8
    reserved_short_slots: int = 1  # per engine with at least 8 slots, while short work has been seen lately
    reserve_memory_seconds: float = 60.0
    short_quantum: int = 8  # short dispatches in a row while long work waits
    long_quantum: int = 2  # long dispatches in a row while short work waits
    max_defer_seconds: float = 5.0  # REUSABLE held for a prefix somebody computes
    leader_timeout_seconds: float = 20.0  # siblings stop waiting for their leader's first token
    min_shared_tokens: int = 32  # prefixes shorter than this are not worth waiting for
    spare_duplicates: bool = True  # what no engine has goes before what another one has: `scoring/duplicate.py`
    place_groups: bool = True  # siblings apart where prefill is cheap, together where it is dear: `grouping.py`
    session_patience_seconds: float = 20.0  # a later turn waits so long for the engine with its context; 0: not at all
    large_reserve_seconds: float = 10.0  # a rollout too large for any gap gets an engine kept free for it after this
    decision_ring: int = 4096
    max_strata: int = 64
    strict_mix: bool = (
        True  # a stated target mix orders dispatches inside a class; else it is a term of the score alone
    )
    rule_period_seconds: float = 10.0  # between two looks at the metrics of rules


@dataclass(frozen=True, slots=True)
class PreemptSettings:
    """`preempt.*`: the guards that keep yielding from becoming thrashing."""

    enabled: bool = True
    min_run_seconds: float = 2.0
    max_per_rollout: int = 4  # a background rollout that outlives a few training steps yields once in each
    cool_down_seconds: float = 1.0
    time_slice_tokens: int = 1024  # critical work gives way to what may take longer after so many; 0: never
    consolidate: bool = True  # the last rollouts of a step move to where it ends sooner: `consolidation.py`


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`policy.*`: the two phases, the band between them and the ramp."""

    cold_start_steps: int = 200
    cold_start_entropy: float = 0.0  # STABLE also needs entropy at or below this; 0: not used
    entropy_band: float = 0.1  # back to COLD_START only above cold_start_entropy * (1 + band)
    phase_ramp_steps: int = 20
    cold_start_prefix_weight: float = 0.1
    stable_prefix_weight: float = 0.4
    cold_start_diversity_weight: float = 0.2
    stable_diversity_weight: float = 0.1
    cold_start_batch_size: int = 8
    # How much later the last critical rollouts of a step may get their tokens for lower classes beside them, see `tail.py`.
    cold_start_tail_slowdown: float = 0.0
    stable_tail_slowdown: float = 0.02
    tail_doubt: float = 2.0  # what is left of rollouts may be so many times what is expected; 0: expect nothing
    tail_next_slowdown: float = 0.1  # the same for rollouts that the next step needs
    cold_start_tail_fill: float = 0.0  # share of slots in use then, before an engine's decode curve is known
    stable_tail_fill: float = 0.25
    cold_start_prefix_ttl_versions: int = 0  # of use only where publications keep engines' caches
    stable_prefix_ttl_versions: int = 0
    stable_lower_turn: int = 32  # every n-th dispatch may go to a lower class although critical work waits; cold: never


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """`budget.*`: the default a lease falls back to, and how fast a shrink is done."""

    default: Budget = field(default_factory=Budget)
    shrink_seconds: float = 5.0
    kv_watermark: float = 0.9  # claims above this share of an engine's KV hold new sessions, continuations pass
    growth_tokens: int = 256  # a claim that is outgrown grows by this much at a time
    headroom_tokens: int = 64  # tokens an engine may write between two reports and an abort


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """`executor.*`"""

    timeout_seconds: float = 120.0  # without progress
    lost_seconds: float = 5.0  # without progress on an engine that is lost: a stream that still flows is left alone
    max_attempts: int = 3
    breaker_faults: int = 3
    breaker_seconds: float = 5.0
    busy_seconds: float = 0.25
    abort_seconds: float = 10.0  # an abort that is not answered by then counts as a broken engine


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """`publish.*`: how long one engine may take over each step of an update."""

    clear_seconds: float = 600.0  # for running work to end (DRAIN); then it is interrupted
    call_seconds: float = 900.0  # for one control call: reading weights from a slow disk takes minutes
    push_seconds: float = 900.0  # for the trainer to push its weights
    retry_seconds: float = 0.2  # between two tries of a flush, or of letting it generate again
    flush_tries: int = 100


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """`delivery.*`: the bound on results that nobody acknowledged yet."""

    max_undelivered_bytes: int = 256 << 20
    undelivered_ttl_seconds: float = 3600.0
    max_runs: int = 1024
    max_consumers_per_run: int = 1024


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """`index.*`"""

    max_bytes: int = 1 << 30
    page_tokens: int = 16
    eviction: str = "lru"
    max_cached_tokens: int = 0  # cap on credited cache per engine; 0: its own KV capacity


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    queue: QueueSettings = QueueSettings()
    weights: WeightDefaults = WeightDefaults()
    preempt: PreemptSettings = PreemptSettings()
    policy: PolicySettings = PolicySettings()
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    executor: ExecutorSettings = ExecutorSettings()
    publish: PublishSettings = PublishSettings()
    delivery: DeliverySettings = DeliverySettings()
    index: IndexSettings = IndexSettings()
    rules: tuple[Rule, ...] = ()
