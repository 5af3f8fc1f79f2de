"""From a submission to queued rollouts: what is checked, what is refused, what a known id means.

Invariants
- Everything that can be known to be wrong is refused here, before any engine call, naming the field and the limit.
- One bad submission never harms the others of its message.
- A rollout id is idempotent within its run: same payload attaches, different payload is ALREADY_EXISTS.

What this module does not know: order and place.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from rolloutd.scheduler import budgeting, consumers, delivering, lifecycle, versions
from rolloutd.scheduler.actions import Accepted, Finished, Rejected
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import SubmitRollouts
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.outbox import Consumer
from rolloutd.scheduler.prompt import hash_of
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutSpec
from rolloutd.scheduler.states import AbortReason, Code, Outcome, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.world import PoolLimits, World, largest

MAX_SAMPLES: Final = 4096
MAX_ID_CHARS: Final = 256
RETRY_AFTER_SECONDS: Final = 1.0  # a full queue drains within seconds or not at all


def submit(world: World, run: Run, consumer: Consumer, event: SubmitRollouts) -> None:
    """Accept or refuse each spec on its own."""
    for spec in event.specs:
        refusal = _submit_one(world, run, consumer, spec)
        if refusal is not None:
            world.deliver(run, consumer.consumer_id, 0, Rejected(spec.rollout_id, refusal))


def member_ids(spec: RolloutSpec) -> list[str]:
    if spec.samples <= 1:
        return [spec.rollout_id]
    return [f"{spec.rollout_id}/{index}" for index in range(spec.samples)]


def prompt_hash(spec: RolloutSpec) -> str:
    content = spec.token_bytes if spec.text is None else spec.text.encode()
    return hash_of(content)


def _submit_one(world: World, run: Run, consumer: Consumer, spec: RolloutSpec) -> Refusal | None:
    refusal = _check_fields(spec)
    if refusal is not None:
        return refusal
    ids = member_ids(spec)
    known = _known(run, spec, ids)
    if known:
        return _attach(world, run, consumer, spec, known)
    if any(rollout_id in run.delivered for rollout_id in ids):
        return Refusal(
            Code.ALREADY_EXISTS,
            "ALREADY_DELIVERED",
            f"rollout_id: {spec.rollout_id!r} was delivered and acknowledged before",
        )
    if run.ended or world.shutting_down:
        if run.ended:
            message = f"run {run.run_id!r} has ended; configure it again or use another run"
            return Refusal(Code.FAILED_PRECONDITION, "RUN_ENDED", message)
        return Refusal(Code.UNAVAILABLE, "SHUTDOWN", "the server is shutting down; nothing new is accepted")
    parent = spec.parent_rollout_id
    if parent and parent not in run.rollouts and parent not in run.delivered:
        return invalid("parent_rollout_id", f"{parent!r} is not known in run {run.run_id!r}; submit the parent first")
    checked = _check_pool(world, run, spec)
    if isinstance(checked, Refusal):
        return checked
    refusal = _check_room(world, run, spec, len(ids))
    if refusal is not None:
        return refusal
    refusal = _check_group(run, spec) or versions.check_admission(world, run, spec)
    if refusal is not None:
        return refusal
    _accept(world, run, consumer, spec, ids, checked)
    return None


def _check_fields(spec: RolloutSpec) -> Refusal | None:
    """What is wrong whatever the engines are."""
    if not spec.rollout_id:
        return invalid("rollout_id", "is empty; choose an id that is unique within the run")
    if len(spec.rollout_id) > MAX_ID_CHARS:
        return invalid("rollout_id", f"has {len(spec.rollout_id)} characters; the limit is {MAX_ID_CHARS}")
    if spec.text is None:
        if not spec.token_bytes:
            return invalid("prompt", "is empty; give at least one token")
        if len(spec.token_bytes) % TOKEN_BYTES:
            return invalid(
                "prompt.token_bytes", f"has {len(spec.token_bytes)} bytes, not a multiple of 4 (uint32 each)"
            )
    elif not spec.text:
        return invalid("prompt.text", "is empty; give at least one character")
    if not 1 <= spec.samples <= MAX_SAMPLES:
        return invalid("samples", f"is {spec.samples}; must be 1 to {MAX_SAMPLES}")
    if spec.seeds and len(spec.seeds) != spec.samples:
        return invalid("seeds", f"has {len(spec.seeds)} entries for {spec.samples} samples; give one each or none")
    if spec.task_type is TaskType.REPLAY:
        if spec.max_new_tokens:
            return invalid(
                "sampling.max_new_tokens", f"is {spec.max_new_tokens}; a REPLAY generates nothing, leave it 0"
            )
    elif spec.max_new_tokens < 1:
        return invalid("sampling.max_new_tokens", f"is {spec.max_new_tokens}; must be at least 1")
    for name, value in (
        ("deadline_seconds", spec.deadline_seconds),
        ("queue_ttl_seconds", spec.queue_ttl_seconds),
        ("progress_timeout_seconds", spec.progress_timeout_seconds),
    ):
        if not 0.0 <= value < math.inf:
            return invalid(name, f"is {value}; must be a finite number of seconds, 0 for none")
    if spec.group_size and spec.group_size < spec.samples:
        return invalid("group_size", f"is {spec.group_size}, smaller than samples ({spec.samples})")
    if spec.group_keep and not spec.group_id and spec.samples <= 1:
        return invalid("group_keep", f"is {spec.group_keep}, but there is no group: give group_id, or samples above 1")
    if spec.parent_rollout_id == spec.rollout_id:
        return invalid("parent_rollout_id", "names the rollout itself")
    return versions.check_fields(spec)


def _known(run: Run, spec: RolloutSpec, ids: list[str]) -> list[Rollout]:
    """Records that a submission names: its own, and those of another submission that used its id or one of its members'."""
    named = dict.fromkeys([spec.rollout_id, *ids, *run.sampled.get(spec.rollout_id, ())])
    return [run.rollouts[rollout_id] for rollout_id in named if rollout_id in run.rollouts]


def _attach(world: World, run: Run, consumer: Consumer, spec: RolloutSpec, known: list[Rollout]) -> Refusal | None:
    """The id is known: the same payload attaches to it, another one is a conflict."""
    if any(_payload(rollout.spec) != _payload(spec) for rollout in known):
        return Refusal(
            Code.ALREADY_EXISTS,
            "ALREADY_EXISTS",
            f"rollout_id: {spec.rollout_id!r} exists in run {run.run_id!r} with a different payload; use a new id",
            (("rollout_id", "exists with a different payload"),),
        )
    for rollout in known:
        world.deliver(run, consumer.consumer_id, 0, _accepted(world, rollout, attached=True))
        if rollout.result is not None:  # whoever asks again gets it again, outside the durable order
            if delivering.let_go(world, run, rollout) and rollout.consumer_id == consumer.consumer_id:
                continue
            consumers.refresh(run, rollout)
            world.deliver(run, consumer.consumer_id, 0, Finished(rollout.result))
    return None


def _payload(spec: RolloutSpec) -> RolloutSpec:
    """The part of a spec that identity is about: remaining times differ between a submission and its repetition."""
    return replace(spec, deadline_seconds=0.0, queue_ttl_seconds=0.0)


def _check_pool(world: World, run: Run, spec: RolloutSpec) -> int | Refusal:
    """Checks against the engines that could serve this; returns max_new_tokens, clipped where that was asked for."""
    refusal = run.refuse_pool(spec.pool)
    if refusal is not None:
        return refusal
    run.lineage(spec.pool)
    engines = world.pool_engines(run, spec.pool, spec.engine_labels)
    if not engines:
        if spec.fail_fast:
            return Refusal(
                Code.UNAVAILABLE,
                "NO_ENGINE",
                f"pool: {world.why_none(run, spec.pool)}; retry later",
                retry_after_seconds=5.0,
            )
        return spec.max_new_tokens
    if spec.fail_fast and not any(engine.state(world.now) == "ready" for engine in engines):
        return Refusal(
            Code.UNAVAILABLE,
            "NO_ENGINE",
            f"pool: no engine of {spec.pool!r} is ready; retry later",
            retry_after_seconds=5.0,
        )
    limits = world.pool_limits(run, spec.pool, spec.engine_labels)
    refusal = _check_vocabulary(run, spec, limits.vocabulary)
    if refusal is not None:
        return refusal
    max_new_tokens = spec.max_new_tokens
    if spec.text is None:
        context = limits.context
        longest_prompt = limits.prompt
        prompt = spec.prompt_tokens
        if (longest_prompt and prompt > longest_prompt) or (context and prompt >= context):
            limit = min(longest_prompt or context, context or longest_prompt)
            return invalid("prompt", f"has {prompt} tokens; the engines of pool {spec.pool!r} take at most {limit}")
        if context and prompt + max_new_tokens > context:
            if not spec.clip_max_new_tokens:
                return invalid(
                    "sampling.max_new_tokens",
                    f"prompt ({prompt}) + max_new_tokens ({max_new_tokens}) = {prompt + max_new_tokens} exceeds the context of "
                    f"{context} tokens; lower it or set clip_max_new_tokens",
                )
            max_new_tokens = context - prompt
    return _check_budget_level(run, spec, max_new_tokens, limits, engines) or max_new_tokens


def _check_vocabulary(run: Run, spec: RolloutSpec, vocabulary: int) -> Refusal | None:
    """One id outside the vocabulary (0: not known) kills a real engine, so it never gets that far."""
    if not vocabulary:
        return None
    if spec.token_bytes:
        largest_id = run.last_prompt.largest_id(spec.token_bytes)
        if largest_id >= vocabulary:
            ids = np.frombuffer(spec.token_bytes, dtype="<u4")
            where = int(np.argmax(ids >= vocabulary))
            return invalid(
                "prompt", f"token id {int(ids[where])} at position {where} is outside the vocabulary of {vocabulary}"
            )
    if spec.top_logprobs > vocabulary:
        return invalid("top_logprobs", f"is {spec.top_logprobs}, more than the vocabulary of {vocabulary}")
    for name in ("stop_token_ids", "logit_bias"):
        for token in spec.sampling.get(name, ()):
            if not 0 <= int(token) < vocabulary:
                return invalid(f"sampling.{name}", f"token id {token} is outside the vocabulary of {vocabulary}")
    return None


def _check_budget_level(
    run: Run, spec: RolloutSpec, max_new_tokens: int, limits: PoolLimits, engines: list[Engine]
) -> Refusal | None:
    """FAILED_PRECONDITION where it can never fit; a passing shortage (a zero, or a level that a lease will lift) waits."""
    page = limits.page
    needed = -(-(spec.prompt_tokens + max_new_tokens) // page) * page
    capacity = limits.capacity
    if capacity and needed > capacity:
        return _too_small(needed, f"the largest engine of pool {spec.pool!r} has {capacity}")
    if run.lease_timer is not None:
        return None
    budget = run.ledger.budget
    level = budget.max_kv_tokens
    if level and needed > level:
        return _too_small(needed, f"the run's budget is {level}: raise max_kv_tokens or ask for less")
    if not capacity or (budget.training_reserved_mb is None and budget.max_inference_mb is None):
        return None
    memory = largest(budgeting.engine_kv_limit(run, engine) for engine in engines)
    if memory and needed > memory:
        return _too_small(
            needed, f"the run's memory budget leaves at most {memory} per engine: raise it or ask for less"
        )
    return None


def _too_small(needed: int, problem: str) -> Refusal:
    return Refusal(
        Code.FAILED_PRECONDITION, "BUDGET_TOO_SMALL", f"prompt + max_new_tokens need {needed} KV tokens; {problem}"
    )


def _check_group(run: Run, spec: RolloutSpec) -> Refusal | None:
    """Two submissions of a group that both say its size say the same, and what it keeps is said when it is opened."""
    group = run.groups.get(_group_id(spec))
    announced = spec.group_size or spec.samples
    if group is None and spec.group_keep > announced:
        return invalid("group_keep", f"is {spec.group_keep}, more than the group has members ({announced})")
    if group is not None and spec.group_keep not in (0, group.keep):
        opened = group.keep or "none"
        problem = f"is {spec.group_keep}, but group {group.group_id!r} was opened with {opened}; give the same or 0"
        return invalid("group_keep", problem)
    if group is None or not group.stated_size or spec.group_size in (0, group.stated_size):
        return None
    problem = (
        f"is {spec.group_size}, but group {group.group_id!r} was opened with {group.stated_size}; give the same or 0"
    )
    return invalid("group_size", problem)


def _check_room(world: World, run: Run, spec: RolloutSpec, count: int) -> Refusal | None:
    settings = world.config.queue
    rollout_class = spec.rollout_class if spec.rollout_class is not None else run.settings.default_class
    queued = run.ledger.class_queued[rollout_class]
    queued_bytes = run.queued_bytes[rollout_class]
    size = len(spec.token_bytes) + (len(spec.text.encode()) if spec.text else 0)
    if queued + count <= settings.queue_capacity and queued_bytes + size * count <= settings.queue_capacity_bytes:
        return None
    return Refusal(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"the {rollout_class.name} queue of run {run.run_id!r} holds {queued} rollouts ({queued_bytes} bytes); "
        f"limits are {settings.queue_capacity} and {settings.queue_capacity_bytes}",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def _accept(world: World, run: Run, consumer: Consumer, spec: RolloutSpec, ids: list[str], max_new_tokens: int) -> None:
    group = _group_of(run, consumer, spec)
    parent = run.rollouts.get(spec.parent_rollout_id) if spec.parent_rollout_id else None
    hash_ = run.last_prompt.hash_of(spec.token_bytes) if spec.text is None else prompt_hash(spec)
    ttl = spec.queue_ttl_seconds or run.settings.queue_ttl_seconds or world.config.queue.queue_ttl_seconds
    requirement = versions.requirement_of(run, spec)
    accepted_from = f"accepted from {consumer.consumer_id!r}"
    accepted = []
    for index, rollout_id in enumerate(ids):
        rollout = Rollout(run, rollout_id, spec, index, consumer.consumer_id, max_new_tokens, hash_, world.now)
        rollout.ttl_at = world.now + ttl
        rollout.requirement = requirement
        rollout.story.append((world.now, accepted_from))
        if rollout.needed_by_step is not None and rollout.needed_by_step <= run.step:
            rollout.rollout_class = RolloutClass.CRITICAL  # as if it had been here when the step was reported
        run.rollouts[rollout_id] = rollout
        run.unfinished += 1
        if run.mix_hold is not None:
            run.mix_hold.note_state(rollout, None, RolloutState.QUEUED)
        consumer.unfinished += 1
        if group is not None:
            rollout.group = group
            group.add(rollout_id)
            rollout.in_window = not group.has_enough  # else it ends at once, and nothing is reserved for it
        accepted.append(rollout)
        if spec.samples > 1:
            run.sampled.setdefault(spec.rollout_id, {})[rollout_id] = None
        if spec.parent_rollout_id:
            run.family.add(spec.parent_rollout_id, rollout_id)
    for rollout in accepted:  # only now: their group is let in as a whole
        lifecycle.note_step(world, rollout)
        lifecycle.enqueue(world, rollout)
    for rollout in accepted:
        world.deliver(run, consumer.consumer_id, 0, _accepted(world, rollout, attached=False))
    if parent is not None and _is_cancelled(parent):
        for rollout in accepted:  # the subtree was cancelled before this leaf arrived
            lifecycle.cancel(world, rollout)
    if parent is not None and delivering.let_go(world, run, parent):  # the root of a tree now
        delivering.settle(world, run)
    if group is not None and group.has_enough:
        lifecycle.end_surplus(world, run, group)


def _is_cancelled(rollout: Rollout) -> bool:
    """Also where its engine has not stopped it yet."""
    if rollout.result is not None:
        return rollout.result.outcome is Outcome.CANCELLED
    return rollout.attempt is not None and rollout.attempt.abort_reason is AbortReason.CANCEL


def _group_id(spec: RolloutSpec) -> str:
    """Samples of one submission are a group by its id; "" where there is none."""
    return spec.group_id or (spec.rollout_id if spec.samples > 1 else "")


def _group_of(run: Run, consumer: Consumer, spec: RolloutSpec) -> Group | None:
    group_id = _group_id(spec)
    if not group_id:
        return None
    group = run.groups.get(group_id)
    if group is None:
        group = Group(group_id, spec.group_size or spec.samples, consumer.consumer_id, spec.group_keep)
        run.groups[group_id] = group
        run.idle_groups[group_id] = None
    else:
        group.size = max(group.size, spec.group_size)
    group.stated_size = group.stated_size or spec.group_size
    return group


def _accepted(world: World, rollout: Rollout, *, attached: bool) -> Accepted:
    """Where the rollout stands: position is an estimate by arrival within its class, start by the measured supply."""
    run = rollout.run
    entry = rollout.entry
    position = run.ledger.class_queued[rollout.rollout_class] if rollout.state is RolloutState.QUEUED else 0
    supply = run.supply.per_second(world.now)
    expected = entry.expected_tokens if entry is not None else 0.0
    estimate = position * expected / supply if supply > 0.0 else 0.0
    longest = world.index.longest(entry.segments, 1) if entry is not None and entry.segments else []
    matched = longest[0][1] if longest else 0
    return Accepted(rollout.rollout_id, rollout.state, position, matched, estimate, attached)
