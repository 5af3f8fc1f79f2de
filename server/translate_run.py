"""Runs, budgets and step reports between the contract and the core.

Invariants
- An absent field of a request leaves what was there: the merge happens here, the core gets whole settings.
- A ceiling of 0 stays 0 (nothing may run); absent stays absent.

What this module does not know: who may change a run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from google.protobuf.message import Message

from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.spec import Budget, Quota, RunSettings, StepReport, Weights
from rolloutd.scheduler.states import OnPreempt, OnStale, ReleaseMemory, RolloutClass, TaskType, TrainerState
from rolloutd.scheduler.views import Counts, OverLaunchView, RunView
from rolloutd.server.translate_event import to_decision
from rolloutd.server.translate_request import MAX_SECONDS, Checker
from rolloutd.v1 import Budget as BudgetMessage
from rolloutd.v1 import (
    ClassQuota,
    ClassState,
    OverLaunch,
    ReportStepRequest,
    RolloutDefaults,
    RuleState,
    Run,
    RunConfig,
    RunState,
    ScoreWeights,
    TaskQuota,
    TaskState,
)

WEIGHTS = ("prefix", "critical", "waiting", "diversity", "cost")
_STATUS_ACTIVE, _STATUS_PAUSED, _STATUS_ENDED = 1, 2, 3
_DISCONNECT_KEEP, _DISCONNECT_CANCEL = 1, 2
# "Wait without limit" for the core, which reads 0 as "the server's default".
_NO_LIMIT_SECONDS = MAX_SECONDS
# Sizes are kept as floats, which hold every whole number up to here.
_MAX_MEMORY_MB = 1 << 53


def merge_settings(current: RunSettings, message: RunConfig) -> RunSettings:
    """`current` with what the message gives. Raises FieldErrors."""
    check = Checker()
    changes: dict[str, Any] = {}
    weights = {}
    for name in WEIGHTS:
        if _has(message.weights, name):
            value = getattr(message.weights, name)
            if not math.isfinite(value) or value < 0:
                check.wrong(f"config.weights.{name}", f"must be 0 or more, got {value:g}")
            weights[name] = value
    if weights:
        changes["weights"] = dataclasses.replace(current.weights, **weights)
    if message.HasField("fairness_weight"):
        if not 0 < message.fairness_weight < math.inf:
            check.wrong("config.fairness_weight", f"must be above 0, got {message.fairness_weight:g}")
        changes["fairness_weight"] = message.fairness_weight
    if message.HasField("floor_rollouts"):
        changes["floor_rollouts"] = message.floor_rollouts
    defaults = message.defaults
    if defaults.HasField("queue_ttl_seconds"):
        seconds = check.seconds("config.defaults.queue_ttl_seconds", defaults.queue_ttl_seconds)
        changes["queue_ttl_seconds"] = seconds or _NO_LIMIT_SECONDS
    if defaults.HasField("max_attempts"):
        if defaults.max_attempts == 0:
            check.wrong("config.defaults.max_attempts", "must be at least 1")
        changes["max_attempts"] = defaults.max_attempts
    if (on_preempt := check.enum("config.defaults.on_preempt", defaults.on_preempt, OnPreempt)) is not None:
        changes["on_preempt"] = on_preempt
    rollout_class = check.enum("config.defaults.rollout_class", defaults.rollout_class, RolloutClass)
    if rollout_class is not None:
        changes["default_class"] = rollout_class
    changes.update(_version_changes(current, message, check))
    if message.target_mix:
        for stratum, share in message.target_mix.items():
            if not math.isfinite(share) or share < 0:
                check.wrong(f"config.target_mix[{stratum}]", f"must be 0 or more, got {share:g}")
        if not any(share > 0 for share in message.target_mix.values()):
            check.wrong("config.target_mix", "at least one share must be above 0")
        changes["target_mix"] = dict(message.target_mix)
    if message.HasField("mix_hold_seconds"):
        changes["mix_hold_seconds"] = check.seconds("config.mix_hold_seconds", message.mix_hold_seconds)
        if message.mix_hold_seconds > 0 and not changes.get("target_mix", current.target_mix):
            check.wrong("config.mix_hold_seconds", "keeps to no mix without config.target_mix; set both")
    if message.on_disconnect:
        if message.on_disconnect not in (_DISCONNECT_KEEP, _DISCONNECT_CANCEL):
            check.wrong("config.on_disconnect", f"{message.on_disconnect} is not a value of this enum")
        changes["cancel_on_disconnect"] = message.on_disconnect == _DISCONNECT_CANCEL
    if message.HasField("disconnect_grace_seconds"):
        field = "config.disconnect_grace_seconds"
        changes["disconnect_grace_seconds"] = check.seconds(field, message.disconnect_grace_seconds)
    if message.HasField("max_undelivered_bytes"):
        if message.max_undelivered_bytes == 0:
            check.wrong("config.max_undelivered_bytes", "must be above 0")
        changes["max_undelivered_bytes"] = message.max_undelivered_bytes
    if message.HasField("undelivered_ttl_seconds"):
        seconds = check.seconds("config.undelivered_ttl_seconds", message.undelivered_ttl_seconds)
        if message.undelivered_ttl_seconds == 0:
            check.wrong("config.undelivered_ttl_seconds", "must be above 0")
        changes["undelivered_ttl_seconds"] = seconds
    check.done()
    return dataclasses.replace(current, **changes)


def _version_changes(current: RunSettings, message: RunConfig, check: Checker) -> dict[str, Any]:
    """What the message says about policy versions and the memory of engines."""
    changes: dict[str, Any] = {}
    defaults = message.defaults
    if defaults.HasField("min_version"):
        changes["min_version"] = check.version("config.defaults.min_version", defaults.min_version)
    if defaults.HasField("max_staleness"):
        changes["max_staleness"] = check.age("config.defaults.max_staleness", defaults.max_staleness)
    if defaults.HasField("max_partial_span"):
        changes["max_partial_span"] = check.age("config.defaults.max_partial_span", defaults.max_partial_span)
    if message.HasField("prefix_ttl_versions"):
        changes["prefix_ttl_versions"] = check.age("config.prefix_ttl_versions", message.prefix_ttl_versions)
    if message.HasField("slice_tokens"):
        changes["slice_tokens"] = message.slice_tokens
    if message.HasField("batch_samples"):
        changes["batch_samples"] = message.batch_samples
        if message.batch_samples and changes.get("max_staleness", current.max_staleness) is None:
            check.wrong("config.batch_samples", "bounds nothing without config.defaults.max_staleness; set both")
    if (on_stale := check.enum("config.on_stale", message.on_stale, OnStale)) is not None:
        changes["on_stale"] = on_stale
    if (release := check.enum("config.release_memory", message.release_memory, ReleaseMemory)) is not None:
        changes["release_memory"] = release
    return changes


def to_run(view: RunView, config: SchedulerConfig, connected_consumers: int, now: float) -> Run:
    return Run(
        run_id=view.run_id,
        config=to_run_config(view.settings, config),
        state=to_run_state(view, connected_consumers),
        rule_decisions=[to_decision(one, now, view.policy_version) for one in view.rule_decisions],
    )


def to_run_config(settings: RunSettings, config: SchedulerConfig) -> RunConfig:
    """Every field with the value in force."""
    weights: Weights = settings.weights
    in_force = {
        name: own if (own := getattr(weights, name)) is not None else getattr(config.weights, name) for name in WEIGHTS
    }
    ttl_seconds = settings.queue_ttl_seconds or config.queue.queue_ttl_seconds
    on_preempt: Any = settings.on_preempt + 1
    rollout_class: Any = settings.default_class + 1
    on_disconnect: Any = _DISCONNECT_CANCEL if settings.cancel_on_disconnect else _DISCONNECT_KEEP
    on_stale: Any = settings.on_stale + 1
    release_memory: Any = settings.release_memory + 1
    return RunConfig(
        weights=ScoreWeights(**in_force),
        fairness_weight=settings.fairness_weight,
        floor_rollouts=settings.floor_rollouts,
        defaults=RolloutDefaults(
            queue_ttl_seconds=0.0 if ttl_seconds >= _NO_LIMIT_SECONDS else ttl_seconds,
            max_attempts=settings.max_attempts or config.executor.max_attempts,
            on_preempt=on_preempt,
            rollout_class=rollout_class,
            min_version=settings.min_version,
            max_staleness=_age(settings.max_staleness),
            max_partial_span=_age(settings.max_partial_span),
        ),
        target_mix=dict(settings.target_mix),
        mix_hold_seconds=settings.mix_hold_seconds,
        on_disconnect=on_disconnect,
        disconnect_grace_seconds=settings.disconnect_grace_seconds,
        max_undelivered_bytes=config.delivery.limit_bytes(settings),
        undelivered_ttl_seconds=settings.undelivered_ttl_seconds or config.delivery.undelivered_ttl_seconds,
        on_stale=on_stale,
        batch_samples=settings.batch_samples,
        slice_tokens=settings.slice_tokens,
        prefix_ttl_versions=_age(settings.prefix_ttl_versions),
        release_memory=release_memory,
    )


def to_run_state(view: RunView, connected_consumers: int) -> RunState:
    status: Any = _STATUS_ENDED if view.ended else _STATUS_PAUSED if view.paused else _STATUS_ACTIVE
    phase: Any = view.phase + 1
    trainer_state: Any = int(view.trainer_state)
    message = RunState(
        run_id=view.run_id,
        status=status,
        phase=phase,
        trainer_state=trainer_state,
        trainer_epoch=view.epoch,
        policy_version=view.policy_version,
        classes=[
            ClassState(rollout_class=_number(kind), **_counts(counts))
            for kind, counts in view.classes.items()
            if _any(counts)
        ],
        tasks=[
            TaskState(task_type=_number(task), **_counts(counts)) for task, counts in view.tasks.items() if _any(counts)
        ],
        budget=to_budget(view.budget, view.budget_lease_remaining_seconds),
        kv_tokens_committed=view.kv_claimed_tokens,
        demand_tokens_per_second=view.demand_tokens_per_second,
        supply_tokens_per_second=view.supply_tokens_per_second,
        desired_engines=view.desired_engines,
        undelivered_bytes=view.undelivered_bytes,
        undelivered_results=view.undelivered_results,
        connected_consumers=connected_consumers,
        used_results=view.valid_samples,
        dropped_results=view.dropped_samples,
        mean_reward=view.mean_reward,
        policy_versions=view.policy_versions,
        publishing=view.publishing,
        samples_on_their_way=view.samples_on_their_way,
        samples_allowed=view.samples_allowed,
        stale_results=view.stale_results,
        held_results=view.held_results,
        rules=[
            RuleState(name=one.name, metric=one.metric, value=one.value, active=one.active, firings=one.firings)
            for one in view.rules
        ],
    )
    if view.over_launch is not None:
        message.over_launch.CopyFrom(to_over_launch(view.over_launch))
    if view.trainer_state is not TrainerState.UNKNOWN or view.step:
        message.step = view.step
    if view.finished_samples:
        message.diversity_score = 1.0 - view.diversity_distance
    return message


def to_over_launch(view: OverLaunchView) -> OverLaunch:
    return OverLaunch(
        groups=view.groups,
        launched_rollouts=view.launched,
        kept_rollouts=view.kept,
        surplus_rollouts=view.surplus,
        kept_mean_tokens=view.kept_tokens / view.kept if view.kept else 0.0,
        surplus_mean_tokens=view.surplus_tokens / view.surplus if view.surplus else 0.0,
        longest_cut_groups=view.longest_cut_groups,
        kept_share_by_quintile=view.kept_share_by_quintile,
    )


def from_budget(message: BudgetMessage) -> Budget:
    """Raises FieldErrors for what the message alone shows to be wrong."""
    check = Checker()
    classes: dict[RolloutClass, Quota] = {}
    for position, entry in enumerate(message.classes):
        path = f"budget.classes[{position}]"
        kind = check.enum(f"{path}.rollout_class", entry.rollout_class, RolloutClass)
        if entry.rollout_class == 0:
            check.wrong(f"{path}.rollout_class", "is required")
        elif kind in classes:
            check.wrong(f"{path}.rollout_class", f"{kind.name} is given twice")
        if kind is not None:
            classes[kind] = _quota(entry, path, check)
    tasks: dict[TaskType, Quota] = {}
    for position, item in enumerate(message.tasks):
        path = f"budget.tasks[{position}]"
        task = check.enum(f"{path}.task_type", item.task_type, TaskType)
        if item.task_type == 0:
            check.wrong(f"{path}.task_type", "is required")
        elif task in tasks:
            check.wrong(f"{path}.task_type", f"{task.name} is given twice")
        if task is not None:
            tasks[task] = _quota(item, path, check)
    ceiling = message.max_running_rollouts if message.HasField("max_running_rollouts") else None
    for field, quotas in (("budget.classes", classes.values()), ("budget.tasks", tasks.values())):
        shares = sum(quota.share for quota in quotas)
        if shares > 1.0 + 1e-9:
            check.wrong(field, f"shares must sum to at most 1, they sum to {shares:g}")
        floors = sum(quota.floor_rollouts for quota in quotas)
        if ceiling is not None and floors > ceiling:
            check.wrong(field, f"floors must fit max_running_rollouts ({ceiling}), they sum to {floors}")
    for name, value in (
        ("training_reserved_mb", message.training_reserved_mb),
        ("max_inference_mb", message.max_inference_mb),
    ):
        if value > _MAX_MEMORY_MB:
            check.wrong(
                f"budget.{name}", f"must be at most {_MAX_MEMORY_MB} MiB, got {value}; leave it out for no limit"
            )
    lease = check.seconds("budget.lease_seconds", message.lease_seconds)
    check.done()
    return Budget(
        max_rollouts=ceiling,
        max_kv_tokens=message.max_kv_tokens if message.HasField("max_kv_tokens") else None,
        training_reserved_mb=float(message.training_reserved_mb) if message.HasField("training_reserved_mb") else None,
        max_inference_mb=float(message.max_inference_mb) if message.HasField("max_inference_mb") else None,
        classes=classes,
        tasks=tasks,
        lease_seconds=lease,
    )


def fill_budget(budget: Budget, default: Budget) -> Budget:
    """What is absent falls back to the server's default."""
    filled = {
        name: own if (own := getattr(budget, name)) is not None else getattr(default, name)
        for name in ("max_rollouts", "max_kv_tokens", "training_reserved_mb", "max_inference_mb")
    }
    return dataclasses.replace(budget, **filled)


def to_budget(budget: Budget, lease_remaining_seconds: float) -> BudgetMessage:
    message = BudgetMessage(
        classes=[ClassQuota(rollout_class=_number(kind), **_limits(quota)) for kind, quota in budget.classes.items()],
        tasks=[TaskQuota(task_type=_number(task), **_limits(quota)) for task, quota in budget.tasks.items()],
        lease_seconds=lease_remaining_seconds,
    )
    if budget.max_rollouts is not None:
        message.max_running_rollouts = budget.max_rollouts
    if budget.max_kv_tokens is not None:
        message.max_kv_tokens = budget.max_kv_tokens
    if budget.training_reserved_mb is not None:
        message.training_reserved_mb = math.ceil(budget.training_reserved_mb)
    if budget.max_inference_mb is not None:
        message.max_inference_mb = math.floor(budget.max_inference_mb)
    return message


def merge_report(previous: StepReport | None, message: ReportStepRequest) -> StepReport:
    """The report after this message: absent fields as last reported, but no `step_seconds`. Raises FieldErrors."""
    check = Checker()
    before = previous or StepReport(step=message.step, trainer_state=TrainerState.UNKNOWN)
    names: tuple[Any, ...] = ("consume_samples_per_second", "consume_tokens_per_second", "policy_entropy")
    for name in names:
        if message.HasField(name):
            value = getattr(message, name)
            if not math.isfinite(value) or value < 0:
                check.wrong(name, f"must be 0 or more, got {value:g}")
    if message.HasField("buffer_fill") and not 0.0 <= message.buffer_fill <= 1.0:
        check.wrong("buffer_fill", f"must be in [0, 1], got {message.buffer_fill:g}")
    for field in ("update_period_seconds", "step_seconds"):
        if _has(message, field):
            check.seconds(field, getattr(message, field))
    if message.trainer_state not in (0, *(int(state) for state in TrainerState)):
        check.wrong("trainer_state", f"{message.trainer_state} is not a value of this enum")
    check.done()

    def given(name: Any, otherwise: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else otherwise

    return StepReport(
        step=message.step,
        trainer_state=TrainerState(message.trainer_state) if message.trainer_state else before.trainer_state,
        samples_needed=given("samples_needed", before.samples_needed),
        consume_samples_per_second=given("consume_samples_per_second", before.consume_samples_per_second),
        consume_tokens_per_second=given("consume_tokens_per_second", before.consume_tokens_per_second),
        policy_entropy=given("policy_entropy", before.policy_entropy),
        buffer_fill=given("buffer_fill", before.buffer_fill),
        update_period_seconds=given("update_period_seconds", before.update_period_seconds),
        step_seconds=given("step_seconds", None),
    )


def _age(versions: int | None) -> int:
    """A number of policy versions as the contract says it: -1 is any, or not set."""
    return -1 if versions is None else versions


def _has(message: Message, field: str) -> bool:
    return message.HasField(field)


def _quota(entry: ClassQuota | TaskQuota, path: str, check: Checker) -> Quota:
    ceiling = entry.max_running_rollouts if entry.HasField("max_running_rollouts") else None
    share = entry.share if entry.HasField("share") else 0.0
    if not 0.0 <= share <= 1.0:
        check.wrong(f"{path}.share", f"must be in [0, 1], got {share:g}")
    if ceiling is not None and entry.floor_rollouts > ceiling:
        floor = entry.floor_rollouts
        check.wrong(f"{path}.floor_rollouts", f"must be at most max_running_rollouts ({ceiling}), got {floor}")
    return Quota(max_rollouts=ceiling, share=share, floor_rollouts=entry.floor_rollouts)


def _limits(quota: Quota) -> dict[str, Any]:
    limits: dict[str, Any] = {"floor_rollouts": quota.floor_rollouts}
    if quota.max_rollouts is not None:
        limits["max_running_rollouts"] = quota.max_rollouts
    if quota.share:
        limits["share"] = quota.share
    return limits


def _number(member: RolloutClass | TaskType) -> Any:
    return member + 1


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "queued_rollouts": counts.queued,
        "running_rollouts": counts.running,
        "finished_rollouts": counts.finished,
    }


def _any(counts: Counts) -> bool:
    return bool(counts.queued or counts.running or counts.finished)
