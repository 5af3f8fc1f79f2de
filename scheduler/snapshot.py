"""Frozen views of the world for answers and metrics. Reads only."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Gate, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import (
    Counts,
    Decision,
    EngineView,
    GroupView,
    RolloutView,
    RunView,
    Statistics,
    StoryEntry,
)
from rolloutd.scheduler.world import World

POLICY_POOL: Final = "policy"


def run_view(world: World, run: Run, now: float) -> RunView:
    ledger = run.ledger
    demand = run.demand_tokens_per_second()
    supply = run.supply.per_second(now)
    lease = run.lease_timer
    return RunView(
        run_id=run.run_id,
        paused=run.paused,
        ended=run.ended,
        epoch=run.epoch,
        step=run.step,
        trainer_state=run.report.trainer_state,
        phase=run.phase.phase,
        phase_blend=run.phase.blend,
        settings=run.settings,
        classes={
            one: Counts(ledger.class_queued[one], ledger.class_running[one], run.finished_by_class[one])
            for one in RolloutClass
        },
        tasks={
            one: Counts(ledger.task_queued[one], ledger.task_running[one], run.finished_by_task[one])
            for one in TaskType
        },
        budget=ledger.budget,
        budget_is_default=ledger.budget is world.config.budget.default,
        budget_lease_remaining_seconds=max(0.0, lease.due - now) if lease is not None else 0.0,
        running_rollouts=ledger.running,
        kv_claimed_tokens=ledger.kv_tokens,
        demand_tokens_per_second=demand,
        supply_tokens_per_second=supply,
        desired_engines=desired_engines(world, run, demand, supply),
        undelivered_bytes=run.undelivered_bytes,
        undelivered_results=run.undelivered_results,
        valid_samples=run.valid_samples,
        dropped_samples=run.dropped_samples,
        mean_reward=run.mean_reward,
        finished_samples=run.finished_samples,
        diversity_distance=run.mix.distance(),
        strata_coverage=run.mix.coverage(),
        distinct_outputs=run.mix.distinct_outputs(),
        policy_version=run.newest_version(POLICY_POOL),
        policy_versions={pool: one.version for pool, one in run.lineages.items() if one.version},
        publishing={pool: one.active.update.version for pool, one in run.lineages.items() if one.active is not None},
        samples_on_their_way=run.window.outstanding if run.window is not None else 0,
        samples_allowed=run.window.capacity if run.window is not None else None,
        held_results=len(run.mix_hold.held) if run.mix_hold is not None else 0,
        stale_results=run.stale_results,
        over_launch=run.over_launch.view(),
        rules=run.rules.views(),
        rule_decisions=tuple(run.rule_decisions),
    )


def desired_engines(world: World, run: Run, demand: float, supply: float) -> int:
    """Engines it would take to meet the demand at the supply measured per engine; those there are when neither is known. Rules
    scale it."""
    engines = [
        engine
        for engine in world.engines.values()
        if not engine.lost and (not engine.owner or engine.owner == run.run_id)
    ]
    wanted = float(len(engines))
    if demand > 0.0 and supply > 0.0:
        wanted *= demand / supply
    if not engines:
        return 0
    return max(1, math.ceil(wanted * run.rules.knobs.engines_factor))


def rollout_view(rollout: Rollout, now: float) -> RolloutView:
    attempt = rollout.attempt
    queued = rollout.state is RolloutState.QUEUED
    entry = rollout.entry
    written = attempt.generated_tokens if attempt is not None else 0
    return RolloutView(
        run_id=rollout.run.run_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group.group_id if rollout.group is not None else "",
        state=rollout.state,
        rollout_class=rollout.rollout_class,
        task_type=rollout.task_type,
        pool=rollout.spec.pool,
        sample_index=rollout.sample_index,
        session_id=rollout.spec.session_id,
        turn=rollout.spec.turn,
        parent_rollout_id=rollout.spec.parent_rollout_id,
        stratum=rollout.spec.stratum,
        origin=rollout.spec.origin,
        needed_by_step=rollout.needed_by_step,
        max_new_tokens=rollout.max_new_tokens,
        batch_id=rollout.last_batch_id,
        consumer_id=rollout.consumer_id,
        engine_id=attempt.engine.engine_id if attempt is not None else "",
        attempts=rollout.attempts,
        preemptions=rollout.preemptions,
        prompt_tokens=rollout.spec.prompt_tokens,
        generated_tokens=rollout.kept_tokens + written,
        waited_seconds=rollout.queued_seconds + (now - rollout.queued_at if queued else 0.0),
        gate=entry.held_gate if entry is not None else Gate.OPEN,
        result=rollout.result,
        seed=rollout.spec.seeds[rollout.sample_index] if rollout.spec.seeds else None,
        accepted_at_seconds=rollout.submitted_at,
    )


def group_view(group: Group) -> GroupView:
    return GroupView(
        group_id=group.group_id,
        size=group.size,
        members=tuple(group.members),
        finished=group.finished,
        failed=tuple(group.failed),
        done=group.notified,
        keep=group.keep,
        completed=group.completed,
        surplus=tuple(group.surplus),
    )


def explain(world: World, run_id: str, rollout_id: str) -> tuple[list[Decision], list[StoryEntry]] | None:
    decisions = [one for one in world.decisions if one.rollout_id == rollout_id and one.run_id == run_id]
    run = world.runs.get(run_id)
    rollout = run.rollouts.get(rollout_id) if run is not None else None
    if rollout is None and not decisions:
        return None
    story = [] if rollout is None else [StoryEntry(at, text) for at, text in rollout.story]
    return decisions, story


def engine_view(world: World, engine: Engine) -> EngineView:
    facts = engine.facts
    return EngineView(
        engine_id=facts.engine_id,
        incarnation=facts.incarnation,
        pool=facts.pool,
        run_id=engine.owner,
        labels=facts.labels,
        state=engine.state(world.now),
        slots=facts.slots,
        in_flight=engine.slots_used,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        kv_claimed_tokens=engine.kv_claimed_tokens,
        kv_used_tokens=engine.kv_used_tokens,
        kv_used_peak_tokens=engine.kv_used_peak_tokens,
        page_tokens=facts.page_tokens,
        context_tokens=facts.context_tokens,
        vocabulary_size=facts.vocabulary_size,
        engine_version=engine.label,
        breaker_open=engine.breaker_until > world.now,
        faults=engine.faults,
        last_error=engine.last_error,
        predicted_cached_tokens=engine.predicted_cached_tokens,
        cached_tokens=engine.cached_tokens,
        prompt_tokens=engine.prompt_tokens,
        generated_tokens=engine.generated_tokens,
        prefill_tokens_per_second=engine.prefill_tokens_per_second,
        decode_seconds_per_token=engine.decode_seconds_per_token,
        reported_rollouts=engine.reported_rollouts,
        tokens_per_second=engine.tokens_per_second,
        ghosts=engine.ghosts,
        policy_version=engine.version,
        held_because=engine.held_because,
        held_kind=engine.held_kind,
        kv_blocks_reported=world.mirror.blocks(engine.cache_key),
        kv_blocks_unplaced=world.mirror.unplaced(engine.cache_key),
    )


def statistics(world: World) -> Statistics:
    queued: Counter[tuple[RolloutClass, TaskType]] = Counter()
    held = running = undelivered_bytes = undelivered_results = 0
    for run in world.runs.values():
        for entry in run.entries.values():
            queued[entry.rollout_class, entry.task_type] += len(entry.members)
            held += len(entry.members) if entry.held else 0
        running += run.ledger.running
        undelivered_bytes += run.undelivered_bytes
        undelivered_results += run.undelivered_results
    index = world.index.statistics()
    return Statistics(
        queued=dict(queued),
        held=held,
        running=running,
        attempts=len(world.attempts),
        index_bytes=index.bytes + world.mirror.bytes,
        index_nodes=index.nodes,
        index_pages=index.pages,
        undelivered_bytes=undelivered_bytes,
        undelivered_results=undelivered_results,
        dispatched_total=world.dispatched_total,
        preempted_total=world.preempted_total,
        retried_total=world.retried_total,
        batches_total=world.batches,
        gates=dict(world.gates),
    )
