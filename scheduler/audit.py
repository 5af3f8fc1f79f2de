"""The integrity check of the core: every counter derived again from the items it counts.

Raises AssertionError naming what is off. Costs a walk over everything; for tests and for a debugging flag.
"""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler import audit_versions
from rolloutd.scheduler.actions import Finished
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.lanes import SHUT_OUT
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.mix_hold import MOST_RESULTS, Queued, place_of
from rolloutd.scheduler.rules.knobs import Knobs
from rolloutd.scheduler.rules.rule import WEIGHT_NAMES
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import SHORT_TASKS, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.world import World


def check(world: World) -> None:
    world.index.check()
    world.mirror.check()
    audit_versions.check(world)
    for engine in world.engines.values():
        _check_engine(engine)
    _check_rooms(world)
    if world._pools_mark == world.fleet_mark:
        for (run_id, pool, labels), found in world._pools.items():
            if run_id in world.runs:
                derived = [
                    one for one in world.engines.values() if world.serves(one, world.runs[run_id], pool, dict(labels))
                ]
                _same(
                    f"engines of {pool} for {run_id}",
                    [one.engine_id for one in found],
                    [one.engine_id for one in derived],
                )
    for pool in {pool for run in world.runs.values() for pool in run.ready}:
        waiting = {run.run_id for run in world.runs.values() if run.ready.get(pool)}
        _same(f"{pool} waiting runs", {run.run_id for run in world.waiting.get(pool, ())}, waiting)
    for run in world.runs.values():
        _check_run(world, run)
    together: Counter[tuple[str, str, str]] = Counter()
    for attempt in world.attempts.values():
        together[attempt.run.run_id, attempt.rollout.prompt_hash, attempt.engine.engine_id] += 1
        _same("attempt of its rollout", attempt.rollout.attempt, attempt)
        _same("attempt on its engine", attempt.engine.attempts.get(attempt.attempt_id), attempt)
        assert not attempt.permit.released, f"live attempt {attempt.attempt_id} with a released permit"
    counted = {
        (run.run_id, prompt_hash, engine_id): count
        for run in world.runs.values()
        for prompt_hash, here in run.together.items()
        for engine_id, count in here.items()
    }
    _same("siblings on engines", counted, dict(together))
    aborting = {one for one, attempt in world.attempts.items() if attempt.rollout.state is RolloutState.ABORTING}
    _same("aborting attempts", set(world.aborting), aborting)
    yielding = {
        one
        for one, attempt in world.attempts.items()
        if attempt.rollout.rollout_class is not RolloutClass.CRITICAL and attempt.permit.task_type not in SHORT_TASKS
    }
    _same("attempts that may yield", set(world.yielding), yielding - aborting)
    stems = sum(1 for attempt in world.attempts.values() if attempt.stems)
    assert stems or not len(world.computing), "prefixes are marked as being computed although nobody computes"


def _check_rooms(world: World) -> None:
    for pool, room in world.rooms.items():
        members = {engine.cache_key: engine for engine in world.engines.values() if engine.facts.pool == pool}
        _same(f"{pool} members", room.members, members)
        free = {engine.engine_id for engine in members.values() if engine.facts.slots > engine.slots_used}
        _same(f"{pool} free", {engine.engine_id for engine in room.free}, free)
        long = {one.engine_id for one in members.values() if one.free_slots(False, room.reserved_short) > 0}
        _same(f"{pool} long", {engine.engine_id for engine in room.long}, long)


def _check_engine(engine: Engine) -> None:
    name = engine.engine_id
    permits = [attempt.permit for attempt in engine.attempts.values()]
    _same(f"{name} slots", engine.slots_used, len(permits))
    _same(f"{name} kv", engine.kv_claimed_tokens, sum(permit.kv_tokens for permit in permits))
    _same(f"{name} short", engine.short_used, sum(permit.task_type in SHORT_TASKS for permit in permits))
    critical = sum(
        permit.rollout_class is RolloutClass.CRITICAL and permit.task_type not in SHORT_TASKS for permit in permits
    )
    _same(f"{name} critical", engine.critical_used, critical)
    assert engine.slots_used <= engine.most_slots, f"{name} holds {engine.slots_used} of {engine.most_slots} slots"
    by_run: dict[str, int] = {}
    for permit in permits:
        by_run[permit.run_id] = by_run.get(permit.run_id, 0) + permit.kv_tokens
    _same(f"{name} kv by run", engine.kv_by_run, by_run)
    promises = [attempt.promise for attempt in engine.attempts.values()]
    made = engine.promises
    _same(f"{name} promises", made.count, len(promises))
    _same(f"{name} promises in part", made.part_count, sum(not one.in_full for one in promises))
    _same(f"{name} held", made.held_tokens, sum(one.prompt_tokens + one.generated_tokens for one in promises))
    _same(f"{name} promised in full", made.full_tokens, sum(one.rest_tokens for one in promises if one.in_full))
    _same(f"{name} promised in part", made.part_tokens, sum(one.rest_tokens for one in promises if not one.in_full))


def _check_rules(world: World, run: Run) -> None:
    name = run.run_id
    _same(f"{name} rules", run.rules.rules, list(world.config.rules))
    active = {view.name for view in run.rules.views() if view.active}
    assert not run.ended or not active, f"{name} has ended and has rules that are active"
    knobs, derived = run.rules.knobs, Knobs(rule.effects for rule in run.rules.rules if rule.name in active)
    _same(f"{name} share factors", knobs.share_factors, derived.share_factors)
    _same(f"{name} classes opened by rules", knobs.preempt, derived.preempt)
    for one in WEIGHT_NAMES:
        _same(f"{name} weight of {one}", knobs.weight(one, 1.0), derived.weight(one, 1.0))
    _same(
        f"{name} cap and engines",
        (knobs.cap_factor, knobs.engines_factor),
        (derived.cap_factor, derived.engines_factor),
    )
    _same(f"{name} knobs of its ledger", run.ledger.turned(), (knobs.cap_factor, knobs.share_factors))


def _check_run(world: World, run: Run) -> None:
    name = run.run_id
    ledger = run.ledger
    _check_rules(world, run)
    permits = [attempt.permit for attempt in world.attempts.values() if attempt.rollout.run is run]
    _same(f"{name} running", ledger.running, len(permits))
    _same(f"{name} kv", ledger.kv_tokens, sum(permit.kv_tokens for permit in permits))
    queued = [rollout for rollout in run.rollouts.values() if rollout.state is RolloutState.QUEUED]
    for one in RolloutClass:
        _same(f"{name} {one.name} running", ledger.class_running[one], sum(p.rollout_class is one for p in permits))
        _same(f"{name} {one.name} queued", ledger.class_queued[one], sum(r.rollout_class is one for r in queued))
        size = sum(r.entry.size_bytes for r in queued if r.rollout_class is one and r.entry is not None)
        _same(f"{name} {one.name} queued bytes", run.queued_bytes[one], size)
    for task in TaskType:
        _same(f"{name} {task.name} running", ledger.task_running[task], sum(p.task_type is task for p in permits))
        _same(f"{name} {task.name} queued", ledger.task_queued[task], sum(r.task_type is task for r in queued))
    _same(
        f"{name} unfinished", run.unfinished, sum(r.state is not RolloutState.FINISHED for r in run.rollouts.values())
    )
    _check_entries(run)
    _check_rollouts(run)
    _check_delivery(run)


def _check_entries(run: Run) -> None:
    by_prompt = {(entry.prompt_hash, entry) for entry in run.entries.values()}
    known = {(prompt_hash, entry) for prompt_hash, alike in run.entries_by_prompt.items() for entry in alike}
    if by_prompt != known or not all(run.entries_by_prompt.values()):
        raise AssertionError(f"{run.run_id}: entries by prompt are not those that wait")
    for key, entry in run.entries.items():
        assert entry.members, f"entry {key} is empty"
        _same("entry key", entry.key, key)
        assert entry.backlog is not None, f"entry {key} is in no backlog"
        for rollout in entry.members:
            _same(f"{rollout.rollout_id} entry", rollout.entry, entry)
            _same(f"{rollout.rollout_id} class", rollout.rollout_class, entry.rollout_class)
    for pool, ready in run.ready.items():
        derived = {(cls, short): one for (its, cls, short), one in run.backlogs.items() if its == pool and one.ready}
        _same(f"{run.run_id} ready in {pool}", ready, derived)
    for (pool, rollout_class, short), backlog in run.backlogs.items():
        mine = [
            entry
            for entry in run.entries.values()
            if entry.pool == pool and entry.rollout_class is rollout_class and entry.short is short
        ]
        _same(f"backlog {pool}/{rollout_class.name} count", backlog.count, len(mine))
        for task in TaskType:
            shut_out = sum(entry.task_type is task and entry.held_gate in SHUT_OUT for entry in mine)
            _same(f"backlog {pool}/{rollout_class.name} shut out", backlog.shut_out[task], shut_out)
        _same(f"backlog {pool}/{rollout_class.name} held", backlog.held, sum(entry.held for entry in mine))
        _same(f"backlog {pool}/{rollout_class.name} ready", backlog.ready, sum(not entry.held for entry in mine))


def _check_rollouts(run: Run) -> None:
    for rollout in run.rollouts.values():
        what = f"{rollout.rollout_id} ({rollout.state.name}; story: {rollout.tell()})"
        live = rollout.state in (RolloutState.DISPATCHED, RolloutState.RUNNING, RolloutState.ABORTING)
        assert live == (rollout.attempt is not None), f"{what}: attempt does not fit its state"
        assert (rollout.state is RolloutState.QUEUED) == (rollout.entry is not None), (
            f"{what}: entry does not fit its state"
        )
        assert (rollout.state is RolloutState.FINISHED) == (rollout.result is not None), (
            f"{what}: result does not fit its state"
        )
        assert rollout.state is RolloutState.FINISHED or rollout.timer is not None, (
            f"{what}: nothing would ever wake it"
        )
        assert len(rollout.pieces) == len(rollout.pieces_by), f"{what}: pieces without an engine"
    waiting = {
        rollout.rollout_id
        for rollout in run.rollouts.values()
        if rollout.needed_by_step is not None
        and rollout.rollout_class is not RolloutClass.CRITICAL
        and rollout.state is not RolloutState.FINISHED
    }
    _same(f"{run.run_id} by step", set().union(*run.by_step.values()) if run.by_step else set(), waiting)


def _check_delivery(run: Run) -> None:
    results, size = _check_held(run)
    for consumer in run.consumers.values():
        own = [r for r in run.rollouts.values() if r.consumer_id == consumer.consumer_id]
        held = () if run.mix_hold is None else run.mix_hold.held
        unfinished = sum(r.state is not RolloutState.FINISHED or r in held for r in own)
        _same(f"{consumer.consumer_id} unfinished", consumer.unfinished, unfinished)
        _same(
            f"{consumer.consumer_id} bytes",
            consumer.size_bytes,
            sum(kept.size_bytes for kept in consumer.kept.values()),
        )
        finished = [k.event.result.rollout_id for k in consumer.kept.values() if isinstance(k.event, Finished)]
        assert len(finished) == len(set(finished)), f"{consumer.consumer_id} keeps a result twice"
        for rollout_id in finished:
            assert rollout_id in run.rollouts, f"kept result {rollout_id} without its rollout"
        results += len(finished)
        size += consumer.size_bytes
    _same(f"{run.run_id} undelivered bytes", run.undelivered_bytes, size)
    _same(f"{run.run_id} undelivered results", run.undelivered_results, results)


def _check_held(run: Run) -> tuple[int, int]:
    """Results that are kept back for the target mix: how many, and their bytes."""
    hold = run.mix_hold
    groups: dict[str, int] = {}
    if hold is None:
        assert not any(group.held for group in run.groups.values()), (
            f"{run.run_id} holds members and keeps nothing back"
        )
        return 0, 0
    name = run.run_id
    queued: dict[Queued, int] = {}
    running: dict[tuple[str, RolloutClass], int] = {}
    for rollout in run.rollouts.values():
        if not hold.counts(rollout) or rollout.state is RolloutState.FINISHED:
            continue
        lane = (rollout.spec.stratum, rollout.rollout_class)
        if rollout.attempt is not None:
            running[lane] = running.get(lane, 0) + 1
        else:
            waits = (*lane, place_of(rollout.spec))
            queued[waits] = queued.get(waits, 0) + 1
    _same(f"{name} queued and running for its mix", hold.coming(), (queued, running))
    size = 0
    for rollout in hold.held:
        result = rollout.result
        what = f"{rollout.rollout_id}, kept back; story: {rollout.tell()}"
        assert run.rollouts.get(rollout.rollout_id) is rollout and result is not None and result.complete, what
        assert rollout.rollout_id not in run.consumers[rollout.consumer_id].by_rollout, f"{what}: and delivered"
        size += result.size_bytes
        if rollout.group is not None:
            groups[rollout.group.group_id] = groups.get(rollout.group.group_id, 0) + 1
    _same(f"{name} bytes kept back", hold.size_bytes, size)
    _same(f"{name} members kept back", {key: one.held for key, one in run.groups.items() if one.held}, groups)
    timer = hold.timer
    oldest = hold.oldest()
    if oldest is not None:
        assert len(hold.held) <= MOST_RESULTS and not run.ended, f"{name} keeps back {len(hold.held)} results"
        assert timer is not None and timer.subject is not None, f"{name}: nothing would ever let {oldest.rollout_id} go"
        assert timer.due <= hold.held[oldest] + hold.seconds, f"{name} keeps {oldest.rollout_id} back for too long"
    else:
        assert timer is None or timer.subject is None, f"{name} keeps nothing back and would be woken for it"
    return len(hold.held), size


def check_ceilings(world: World) -> None:
    """No run's live work (what is not on its way out) exceeds a ceiling of its budget; KV allows for one growth step."""
    for run in world.runs.values():
        budget = run.ledger.budget
        live = [
            attempt.permit
            for attempt in world.attempts.values()
            if attempt.rollout.run is run and attempt.rollout.state is not RolloutState.ABORTING
        ]
        if budget.max_rollouts is not None:
            assert len(live) <= budget.max_rollouts, f"{run.run_id}: {len(live)} run, {budget.max_rollouts} may"
        if budget.max_kv_tokens is not None:
            kv_tokens = sum(permit.kv_tokens for permit in live)
            assert kv_tokens <= budget.max_kv_tokens, f"{run.run_id}: {kv_tokens} KV tokens, {budget.max_kv_tokens} may"
        for one in RolloutClass:
            limit = budget.classes.get(one, NO_QUOTA).max_rollouts
            if limit is not None:
                assert sum(permit.rollout_class is one for permit in live) <= limit, (
                    f"{run.run_id}: {one.name} over its ceiling"
                )
        for task in TaskType:
            limit = budget.tasks.get(task, NO_QUOTA).max_rollouts
            if limit is not None:
                assert sum(permit.task_type is task for permit in live) <= limit, (
                    f"{run.run_id}: {task.name} over its ceiling"
                )


def _same(what: str, counted: object, derived: object) -> None:
    assert counted == derived, f"{what}: counted {counted!r}, derived {derived!r}"
