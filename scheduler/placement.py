"""Stage two: choose (rollout, engine) pairs within the budget, best score first, and book them.

A pass makes one batch: at most `max_batch_size` dispatches with one id. For each dispatch: whose turn (`turns`), a bounded set
of entries (`lanes`), for each the engines that hold its prefix and the emptiest one, the weighted score, ties by the seeded
random. Choosing and booking are one step, so a burst cannot pile onto one engine.

Invariants
- Nothing is placed through a closed gate; the first closed gate is counted and kept for the decision.
- Engine queues stay near zero: an engine is given at most its slots.

What this module does not know: what makes a gate close beyond asking (`budgeting`, `ledger`, `engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rolloutd.scheduler import budgeting, preemption, queueing, turns
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_LANE
from rolloutd.scheduler.lifecycle import arm_timer
from rolloutd.scheduler.permit import Permit
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.scoring import TERMS, Facts, clamp
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import Candidate, DecisionKind
from rolloutd.scheduler.world import World

MAX_ENGINES_PER_ENTRY = 4  # engines with a hit that are scored for one entry, beside the emptiest
DEEP_HEADS_PER_LANE = 32  # entries looked at where the first ones wait for an engine or a prefix of their own
LONG_HOLD_SECONDS = 5.0  # a slot that is held for less frees up soon enough for the first short rollout that comes
TYPICAL_TOKEN_SECONDS = 0.02  # of one sequence in a full batch, before it was measured; on the slow side
CHEAP_PREFILL = 0.05  # dearness never falls below this: among equals a cached prefix is still better than none


class _Choice:
    """The best pair so far."""

    __slots__ = ("candidates", "claim", "engine", "entry", "score", "tie")

    def __init__(self) -> None:
        self.score = -1e9
        self.tie = 0.0
        self.entry: Entry | None = None
        self.engine: Engine | None = None
        self.claim = 0
        self.candidates: list[Candidate] = []


def schedule(world: World) -> None:
    """One pass over all pools. Leaves `world.dirty` set when the batch limit cut it short."""
    world.dirty = False
    if world.shutting_down:
        return
    batch_id = world.batches + 1
    made = 0
    for run in world.runs.values():
        budgeting.note_stalled(world, run)
    for pool in sorted({engine.facts.pool for engine in world.engines.values()}):
        made += _fill(world, pool, batch_id, world.config.queue.max_batch_size - made)
    if made:
        world.batches = batch_id


def _fill(world: World, pool: str, batch_id: int, limit: int) -> int:
    blocked: set[tuple[str, RolloutClass, bool]] = set()
    per_run: dict[str, int] = {}
    made = 0
    while True:
        turn = turns.next_turn(world, pool, blocked)
        if turn is None:
            return made
        if made >= limit:
            world.dirty = True
            return made
        run = turn.run
        if per_run.get(run.run_id, 0) >= batch_limit(world, run):
            world.dirty = True  # the next pass goes on; COLD_START wants small batches and quick results
            gate = Gate.BATCH_LIMIT
        else:
            gate = _place(world, turn, pool, batch_id)
        if gate is Gate.OPEN:
            made += 1
            per_run[run.run_id] = per_run.get(run.run_id, 0) + 1
            if budgeting.note_stalled(world, run):
                world.dirty = True  # room that was kept is free now, for work that this pass has passed by
        else:
            world.gates[gate] += 1
            blocked.add((run.run_id, turn.rollout_class, turn.short))


def batch_limit(world: World, run: Run) -> int:
    """Dispatches of one run in one batch, by its phase."""
    limit = run.phase.between(world.config.policy.cold_start_batch_size, world.config.queue.max_batch_size)
    return max(1, min(world.config.queue.max_batch_size, round(limit)))


def _place(world: World, turn: turns.Turn, pool: str, batch_id: int) -> Gate:
    """Dispatch the best pair of this turn; returns OPEN, or the gate that kept everything waiting."""
    run = turn.run
    gate = budgeting.run_gate(world, run, turn.rollout_class)
    if gate is not Gate.OPEN:
        return gate
    slots = world.run_slots(run)
    tasks: set[TaskType] = set()
    closed = Gate.ENGINE_SLOTS
    for task_type in TaskType:
        if (task_type in SHORT_TASKS) is turn.short and run.ledger.task_queued[task_type]:
            gate = run.ledger.gate(turn.rollout_class, task_type, slots)
            if gate is Gate.OPEN:
                tasks.add(task_type)
            else:
                closed = gate
    if not tasks:
        preemption.make_room(world, turn, closed)
        return closed
    weights = queueing.weights_of(world, run)
    engines = [
        engine for engine in world.engines.values() if engine.is_open(world.now) and world.serves(engine, run, pool, {})
    ]
    keep_short = reserved_short(world, run)
    roomy = [engine for engine in engines if engine.free_slots(turn.short, keep_short) > 0]

    def lane_bonus(stratum: str) -> float:
        target = run.mix.target_share(stratum)
        missing = max(0.0, target - run.mix.dispatched_share(stratum)) / target if target > 0 else 0.0
        return weights["diversity"] * missing

    if not roomy:
        closed = Gate.ENGINE_SLOTS if engines else Gate.NO_ENGINE
        if any(engine.free_slots(True, 0) > 0 for engine in engines):
            closed = Gate.SHORT_RESERVED
        preemption.make_room(world, turn, closed)
        return closed
    choice = _Choice()
    seen: set[int] = set()
    owed = set() if run.ledger.class_owed(turn.rollout_class) else {one for one in tasks if run.ledger.task_owed(one)}
    for entries in _looks(turn, roomy, lane_bonus, tasks, owed):
        deeper = turn.overdue or bool(owed)  # what was seen may not start for reasons of its own: look behind it
        for entry in entries:
            if entry.sequence in seen:
                continue
            seen.add(entry.sequence)
            if queueing.hold_for_prefix(world, entry):
                gate = Gate.HELD_FOR_PREFIX
                world.decide(DecisionKind.HELD, entry.members[0], "its prefix is being computed", gate=gate)
            else:
                gate = _score_entry(world, entry, roomy, weights, keep_short, choice)
            if gate is not Gate.OPEN:
                closed = gate
                deeper = deeper or gate in (Gate.HELD_FOR_PREFIX, Gate.NO_ENGINE)
                _note_blocked(world, entry, gate)
        if choice.entry is not None or not deeper:
            break
    if choice.entry is None or choice.engine is None:
        preemption.make_room(world, turn, closed)
        return closed
    _dispatch(world, choice.entry, choice.engine, choice, batch_id)
    return Gate.OPEN


def _looks(
    turn: turns.Turn, roomy: list[Engine], lane_bonus: Callable[[str], float], tasks: set[TaskType], owed: set[TaskType]
) -> Iterator[list[Entry]]:
    """Entries to score, one look after the other: tasks below their floor, who is overdue, the heads, what is behind them."""
    if owed:
        yield turn.backlog.candidates([engine.cache_key for engine in roomy], lane_bonus, owed, HEADS_PER_LANE)
    oldest = turn.backlog.oldest()
    if turn.overdue and oldest is not None and not oldest.held and oldest.task_type in tasks:
        yield [oldest]
    keys = [engine.cache_key for engine in roomy]
    for heads in (HEADS_PER_LANE, DEEP_HEADS_PER_LANE):
        yield turn.backlog.candidates(keys, lane_bonus, tasks, heads)


def reserved_short(world: World, run: Run) -> int:
    """Slots per engine kept for short work: only while some was seen lately, else long work may have them all."""
    settings = world.config.queue
    for other in world.runs.values():
        if other.short_seen_at is not None and world.now - other.short_seen_at <= settings.reserve_memory_seconds:
            return settings.reserved_short_slots
    return 0


def _score_entry(
    world: World, entry: Entry, roomy: list[Engine], weights: dict[str, float], keep_short: int, choice: _Choice
) -> Gate:
    """Score one entry on the engines worth looking at; returns OPEN when at least one would take it."""
    queueing.refresh_hits(world, entry)
    facts = queueing.entry_facts(world, entry)
    fixed = sum(term.sign * weights[term.weight] * clamp(term.score(facts)) for term in TERMS if not term.per_engine)
    closed = Gate.NO_ENGINE
    open_to: list[tuple[Engine, int]] = []
    for engine in roomy:
        gate, claim = engine_gate(world, entry, engine)
        if gate is Gate.OPEN:
            open_to.append((engine, claim))
        elif gate is not Gate.NO_ENGINE or closed is Gate.NO_ENGINE:
            closed = gate
    if not open_to:
        return closed
    hits = entry.hits
    facts.common_tokens = _common_hit(world, entry) if hits else 0
    seen: list[Candidate] = []
    for engine, claim in _worth_scoring(world, open_to, hits):
        facts.hit_tokens = hits.get(engine.cache_key, 0)
        facts.dearness = dearness(entry, engine)
        facts.slots_fill = (engine.slots_used + 1) / engine.facts.slots
        capacity = engine.facts.kv_capacity_tokens
        facts.kv_fill = (engine.kv_claimed_tokens + claim) / capacity if capacity else 0.0
        score = fixed + sum(
            term.sign * weights[term.weight] * clamp(term.score(facts)) for term in TERMS if term.per_engine
        )
        tie = world.rng.random()
        if (score, tie) > (choice.score, choice.tie):
            choice.score, choice.tie = score, tie
            choice.entry, choice.engine, choice.claim = entry, engine, claim
            choice.candidates = seen
        seen.append(_candidate(engine, facts, score))
    return Gate.OPEN


def _candidate(engine: Engine, facts: Facts, score: float) -> Candidate:
    terms = {term.name: round(clamp(term.score(facts)), 4) for term in TERMS}
    return Candidate(engine.engine_id, facts.hit_tokens, terms, round(score, 5))


def _worth_scoring(world: World, open_to: list[tuple[Engine, int]], hits: dict[str, int]) -> list[tuple[Engine, int]]:
    """The engines with the longest hits, and the emptiest ones (all that tie, one drawn at random)."""
    if len(open_to) <= MAX_ENGINES_PER_ENTRY + 1:
        return open_to
    emptiest = min(engine.fill() for engine, _ in open_to)
    empty = [pair for pair in open_to if pair[0].fill() <= emptiest]
    chosen = [empty[world.rng.randrange(len(empty))]]
    if hits:
        held = [pair for pair in open_to if hits.get(pair[0].cache_key) and pair is not chosen[0]]
        held.sort(key=lambda pair: (-hits[pair[0].cache_key], pair[0].fill()))
        chosen.extend(held[:MAX_ENGINES_PER_ENTRY])
    return chosen


def _common_hit(world: World, entry: Entry) -> int:
    """Tokens of the prompt that every open engine of the pool has: they favour nobody."""
    engines = [
        engine
        for engine in world.pool_engines(entry.run, entry.pool, entry.labels)
        if not engine.lost and not engine.draining
    ]
    if len(engines) < 2 or len(entry.hits) < len(engines):
        return 0
    return min(entry.hits.get(engine.cache_key, 0) for engine in engines)


def dearness(entry: Entry, engine: Engine) -> float:
    """rho of WORKLOADS B.3, clipped: seconds to compute this prompt over the engine time that decoding one output takes.

    An output of L tokens takes L x seconds per token, shared with the others of its batch. 1 before speeds are known.
    """
    if not engine.prefill_tokens_per_second or not engine.decode_seconds_per_token:
        return 1.0
    prefill = entry.prompt_tokens / engine.prefill_tokens_per_second
    batch = max(1, engine.facts.slots)
    decode = entry.expected_tokens * engine.decode_seconds_per_token / batch
    return min(1.0, max(CHEAP_PREFILL, prefill / decode)) if decode > 0.0 else 1.0


def engine_gate(world: World, entry: Entry, engine: Engine) -> tuple[Gate, int]:
    """Whether this engine takes the entry's first member now, and the KV tokens to book."""
    run = entry.run
    facts = engine.facts
    rollout = entry.members[0]
    if not _could_serve(world, entry, engine):
        return Gate.NO_ENGINE, 0
    if not entry.short and _takes_last_slots(world, engine, rollout):
        return Gate.SHORT_RESERVED, 0
    if engine.engine_id in rollout.excluded and _another_serves(world, entry, rollout):
        return Gate.NO_ENGINE, 0
    settings = world.config.budget
    claim = entry.claim_tokens(facts.page_tokens, settings.headroom_tokens)
    if _kept_for_another(world, run.reserved_for, entry):
        return Gate.RESERVED_FOR_LARGE, claim
    gate = run.ledger.kv_gate(claim)
    if gate is not Gate.OPEN:
        return gate, claim
    if _kept_for_another(world, engine.reserved_for, entry):
        return Gate.RESERVED_FOR_LARGE, claim
    if facts.kv_capacity_tokens:
        if engine.slots_used:  # an empty engine takes anything that could ever fit
            if engine.kv_claimed_tokens + claim > facts.kv_capacity_tokens:
                return Gate.ENGINE_KV, claim
            pressed = engine.kv_claimed_tokens + claim > settings.kv_watermark * facts.kv_capacity_tokens
            if pressed and not entry.continuation:
                return Gate.PRESSURE, claim
        if engine.kv_by_run.get(run.run_id, 0) + claim > budgeting.engine_kv_limit(run, engine):
            return Gate.ENGINE_KV_CEILING, claim
    if _spoils_tail(world, entry, engine):
        return Gate.CRITICAL_TAIL, claim
    return Gate.OPEN, claim


def _could_serve(world: World, entry: Entry, engine: Engine) -> bool:
    """Whether this engine, when empty, could run the entry's first member to its end."""
    facts = engine.facts
    if not world.serves(engine, entry.run, entry.pool, entry.labels):
        return False
    if entry.text is not None:
        return True  # its length is a guess before the engine tokenised it; the engine refuses what is too long
    whole = entry.prompt_tokens + entry.members[0].remaining_tokens
    pages = -(-whole // facts.page_tokens) * facts.page_tokens
    return not (
        (facts.context_tokens and whole > facts.context_tokens)
        or (facts.max_prompt_tokens and entry.prompt_tokens > facts.max_prompt_tokens)
        or (facts.kv_capacity_tokens and pages > facts.kv_capacity_tokens)
    )


def _takes_last_slots(world: World, engine: Engine, rollout: Rollout) -> bool:
    """Whether this rollout may hold one of the engine's last slots for so long that short work should find it free.

    Short work that was seen lately has its slots anyway (`reserved_short`); the first of it must not wait for the end of a
    long generation either.
    """
    seconds = rollout.remaining_tokens * (engine.decode_seconds_per_token or TYPICAL_TOKEN_SECONDS)
    return seconds > LONG_HOLD_SECONDS and engine.free_slots(False, world.config.queue.reserved_short_slots) <= 0


def _another_serves(world: World, entry: Entry, rollout: Rollout) -> bool:
    """Whether some ready engine that has not failed this rollout could take it; if none, the others get another chance."""
    return any(
        engine.engine_id not in rollout.excluded
        and engine.state(world.now) == "ready"
        and _could_serve(world, entry, engine)
        for engine in world.engines.values()
    )


def _kept_for_another(world: World, keeper: Entry | None, entry: Entry) -> bool:
    """Whether room is kept for another entry that could use it now: a run that may not start keeps nobody out."""
    if keeper is None or keeper is entry or keeper.held:
        return False
    run = keeper.run
    if budgeting.run_gate(world, run, keeper.rollout_class) is not Gate.OPEN:
        return False
    return run.ledger.gate(keeper.rollout_class, keeper.task_type, world.run_slots(run)) is Gate.OPEN


def _spoils_tail(world: World, entry: Entry, engine: Engine) -> bool:
    """Whether lower-class work would slow the last critical rollouts of a step the trainer waits for.

    While no critical work queues but some runs here, lower classes fill the engine only up to a share of its slots: every
    sequence in a batch makes each token of the others later.
    """
    if entry.rollout_class is RolloutClass.CRITICAL or entry.short or not engine.critical_used:
        return False
    run = entry.run
    if run.pressure(world.now) < 1.0 or any(
        backlog.count
        for (_, rollout_class, short), backlog in run.backlogs.items()
        if rollout_class is RolloutClass.CRITICAL and not short
    ):
        return False
    policy = world.config.policy
    fill = run.phase.between(policy.cold_start_tail_fill, policy.stable_tail_fill)
    return engine.slots_used >= max(1, int(fill * engine.facts.slots))


def _note_blocked(world: World, entry: Entry, gate: Gate) -> None:
    """A rollout too large for any gap gets what frees up kept for it after a while, so that it cannot starve.

    Too large for an engine: one engine's room. Too large for the budget's gaps: the run's KV tokens.
    """
    if gate not in (Gate.ENGINE_KV, Gate.PRESSURE, Gate.ENGINE_KV_CEILING, Gate.CEILING_KV):
        return
    if entry.blocked_since is None:
        entry.blocked_since = world.now
    elif gate is Gate.CEILING_KV:
        run = entry.run
        limit = run.ledger.budget.max_kv_tokens
        page = world.config.index.page_tokens
        claim = entry.claim_tokens(page, world.config.budget.headroom_tokens)
        waited = world.now - entry.blocked_since >= world.config.queue.large_reserve_seconds
        if waited and run.reserved_for is None and limit is not None and claim <= limit:
            run.reserved_for = entry
            for engine in world.engines.values():
                keeper = engine.reserved_for
                if keeper is not None and keeper is not entry and keeper.run is run:
                    engine.reserved_for = None  # or the two would keep each other out
    elif world.now - entry.blocked_since >= world.config.queue.large_reserve_seconds:
        engines = [
            engine
            for engine in world.engines.values()
            if engine.is_open(world.now) and _could_serve(world, entry, engine) and engine.reserved_for in (None, entry)
        ]
        if engines and not any(engine.reserved_for is entry for engine in engines):
            queueing.release_reservations(world, entry)  # of an engine that is gone
            min(engines, key=lambda engine: engine.kv_claimed_tokens).reserved_for = entry


def _dispatch(world: World, entry: Entry, engine: Engine, choice: _Choice, batch_id: int) -> None:
    """Book the permit and send the entry's first member."""
    run = entry.run
    rollout = entry.members[0]
    expected = entry.expected_tokens
    predicted = min(entry.hits.get(engine.cache_key, 0), most_cacheable(entry.prompt_tokens, engine.facts.page_tokens))
    token_bytes, text = entry.token_bytes, entry.text
    queueing.take(world, rollout)
    permit = Permit(engine, run.ledger, run.run_id, rollout.rollout_class, rollout.task_type, choice.claim)
    rollout.queued_seconds += world.now - rollout.queued_at
    rollout.attempts += 1
    rollout.last_batch_id = batch_id
    if rollout.attempts == 1:
        rollout.predicted_cached_tokens = predicted
    attempt = Attempt(world.fresh_attempt_id(), rollout, engine, permit, batch_id, world.now, token_bytes)
    attempt.predicted_tokens = predicted
    rollout.attempt = attempt
    rollout.siblings = entry
    world.attempts[attempt.attempt_id] = attempt
    engine.attempts[attempt.attempt_id] = attempt
    engine.note_dispatch(world.config.executor)
    queueing.release_reservations(world, entry)
    entry.blocked_since = None
    rollout.move(RolloutState.DISPATCHED, world.now, f"to {engine.engine_id} in batch {batch_id}")
    arm_timer(world, rollout)
    attempt.charged_tokens = expected + entry.prompt_tokens - predicted
    turns.charge(run, entry.pool, attempt.charged_tokens, entry.short)
    run.mix.dispatched.add(entry.stratum)
    run.no_capacity_since = None
    world.dispatched_total += 1
    if text is None and predicted + world.config.queue.min_shared_tokens <= entry.prompt_tokens:
        attempt.stems = queueing.entry_stems(entry)
        world.computing.begin(attempt.stems)
    _hold_siblings(world, entry, attempt, predicted)
    if entry.members and not entry.held:
        queueing.order(world, entry)  # fewer wait, so the longest of them is expected to be shorter
    best = tuple(sorted(choice.candidates, key=lambda candidate: -candidate.score)[:4])
    world.decide(
        DecisionKind.DISPATCHED,
        rollout,
        f"{entry.rollout_class.name}, waited {world.now - rollout.submitted_at:.3f} s",
        batch_id=batch_id,
        engine_id=engine.engine_id,
        candidates=best,
    )
    spec = rollout.spec
    sampling = dict(spec.sampling)
    if spec.seeds:
        sampling["sampling_seed"] = spec.seeds[rollout.sample_index]
    if rollout.pieces and sampling.get("min_new_tokens"):
        sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - rollout.kept_tokens)
    world.emit(
        Dispatch(
            attempt_id=attempt.attempt_id,
            engine_id=engine.engine_id,
            batch_id=batch_id,
            run_id=run.run_id,
            rollout_id=rollout.rollout_id,
            token_bytes=token_bytes,
            text=text,
            max_new_tokens=rollout.remaining_tokens if spec.task_type is not TaskType.REPLAY else 0,
            sampling=sampling,
            logprobs=spec.logprobs,
            top_logprobs=spec.top_logprobs,
            prompt_logprobs_from=0 if spec.task_type is TaskType.REPLAY else None,
            engine_params=spec.engine_params,
        )
    )


def most_cacheable(prompt_tokens: int, page_tokens: int) -> int:
    """Tokens of a prompt that an engine can serve from cache: whole pages, and at least one token is always computed."""
    return max(0, prompt_tokens - 1) // page_tokens * page_tokens


def _hold_siblings(world: World, entry: Entry, leader: Attempt, predicted: int) -> None:
    """Leader first: those that share its prompt wait for its first token, unless the prompt is cached there or too short."""
    if not entry.members or entry.text is not None:
        return
    settings = world.config.queue
    missing = len(leader.token_bytes) // TOKEN_BYTES - predicted
    if missing < max(settings.min_shared_tokens, leader.engine.facts.page_tokens + 1):
        return
    queueing.hold(world, entry, Gate.HELD_FOR_LEADER, world.now + settings.leader_timeout_seconds)
    entry.leader_id = leader.attempt_id
    world.decide(
        DecisionKind.HELD,
        entry.members[0],
        f"leader {leader.rollout.rollout_id} computes the prompt",
        gate=Gate.HELD_FOR_LEADER,
    )
