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

from collections.abc import Iterator

from rolloutd.scheduler import budgeting, gates, preemption, queueing, turns
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_LANE
from rolloutd.scheduler.lifecycle import arm_timer
from rolloutd.scheduler.permit import Permit
from rolloutd.scheduler.promises import Promise
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.scoring import ENGINE_TERMS, ENTRY_TERMS, TERMS, Facts, clamp, diversity, weighted
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import Candidate, DecisionKind
from rolloutd.scheduler.world import World

MAX_ENGINES_PER_ENTRY = 4  # engines with a hit that are scored for one entry, beside the emptiest
DEEP_HEADS_PER_LANE = 32  # entries looked at where the first ones wait for an engine or a prefix of their own
CANDIDATES_TOLD = 4  # engines a decision tells about
CHEAP_PREFILL = 0.05  # dearness never falls below this: among equals a cached prefix is still better than none


class _Choice:
    """The best pair so far."""

    __slots__ = ("claim", "considered", "engine", "entry", "score", "tie")

    def __init__(self) -> None:
        self.score = -1e9
        self.tie = 0.0
        self.entry: Entry | None = None
        self.engine: Engine | None = None
        self.claim = 0
        self.considered: list[tuple[float, Engine, int]] = []  # (score, engine, claim) of the entry's engines


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
    kept = False
    while True:
        turn = turns.next_turn(world, pool, blocked)
        if turn is None:
            if made and kept:
                world.dirty = (
                    True  # what was dispatched may have ended a reason to keep room that stopped others before
                )
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
            kept = kept or gate is Gate.RESERVED_FOR_LARGE
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
    tasks, closed = _startable_tasks(world, turn)
    if tasks:
        roomy, none = _roomy_engines(world, turn, pool)
        if not roomy:
            closed = none
        else:
            choice, closed = _choose(world, turn, roomy, tasks, closed)
            if choice is not None:
                _dispatch(world, choice, batch_id)
                return Gate.OPEN
    preemption.make_room(world, turn, closed)
    return closed


def _startable_tasks(world: World, turn: turns.Turn) -> tuple[set[TaskType], Gate]:
    """Task types of this turn that the budget lets start, and the gate of one that it does not."""
    run = turn.run
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
    return tasks, closed


def _roomy_engines(world: World, turn: turns.Turn, pool: str) -> tuple[list[Engine], Gate]:
    """Open engines with a slot for this turn's kind of work, and why there is none."""
    engines = [
        engine
        for engine in world.engines.values()
        if engine.is_open(world.now) and world.serves(engine, turn.run, pool, {})
    ]
    if not engines:
        return [], Gate.NO_ENGINE
    keep_short = gates.reserved_short(world)
    if not turn.short and not turn.backlog.brief:
        keep_short = world.config.queue.reserved_short_slots
    roomy = [engine for engine in engines if engine.free_slots(turn.short, keep_short) > 0]
    if not roomy:
        spare = any(engine.free_slots(True, 0) > 0 for engine in engines)
        return [], Gate.SHORT_RESERVED if spare else Gate.ENGINE_SLOTS
    waits_for_critical = turn.run.led and not turn.short and turn.rollout_class is not RolloutClass.CRITICAL
    if waits_for_critical and not turns.owed(turn.run, turn):
        free = sum(engine.free_slots(False, keep_short) for engine in roomy)
        if free <= gates.led_members(world, turn.run, pool):
            return [], Gate.HELD_FOR_LEADER
    return roomy, Gate.ENGINE_SLOTS


def _choose(
    world: World, turn: turns.Turn, roomy: list[Engine], tasks: set[TaskType], closed: Gate
) -> tuple[_Choice | None, Gate]:
    """The best pair of a bounded number of entries and engines; None and the last closed gate where nothing may start."""
    weights = queueing.weights_of(world, turn.run)
    choice = _Choice()
    seen: set[int] = set()
    run = turn.run
    owed = set() if run.ledger.class_owed(turn.rollout_class) else {one for one in tasks if run.ledger.task_owed(one)}
    for entries in _looks(turn, roomy, weights["diversity"], tasks, owed):
        deeper = turn.overdue or bool(owed)  # what was seen may not start for reasons of its own: look behind it
        for entry in entries:
            if entry.sequence in seen:
                continue
            seen.add(entry.sequence)
            if queueing.hold_for_prefix(world, entry):
                gate = Gate.HELD_FOR_PREFIX
                world.decide(DecisionKind.HELD, entry.members[0], "its prefix is being computed", gate=gate)
            else:
                gate = _score_entry(world, entry, roomy, weights, choice)
            if gate is not Gate.OPEN:
                closed = gate
                deeper = deeper or gate in (Gate.HELD_FOR_PREFIX, Gate.NO_ENGINE)
                gates.note_blocked(world, entry, gate)
        if choice.entry is not None:
            return choice, Gate.OPEN
        if not deeper and len(seen) >= HEADS_PER_LANE:
            break
    return None, closed


def _looks(
    turn: turns.Turn, roomy: list[Engine], weight: float, tasks: set[TaskType], owed: set[TaskType]
) -> Iterator[list[Entry]]:
    """Entries to score, one look after the other.

    For whom room is kept (nobody else may have it, so it must be seen), tasks below their floor, who is overdue, the first of
    each lane, the rest.
    """
    mix = turn.run.mix
    backlog = turn.backlog

    def lane_bonus(stratum: str) -> float:
        return weight * diversity.missing(mix.target_share(stratum), mix.dispatched_share(stratum))

    keys = [engine.cache_key for engine in roomy]
    keepers = [turn.run.reserved_for, *(engine.reserved_for for engine in roomy)]
    kept = [one for one in keepers if one is not None and one.backlog is backlog and not one.held]
    if kept:
        yield [one for one in kept if one.task_type in tasks]
    if owed:
        yield backlog.candidates(keys, lane_bonus, owed, HEADS_PER_LANE)
    oldest = backlog.oldest()
    if turn.overdue and oldest is not None and not oldest.held and oldest.task_type in tasks:
        yield [oldest]
    for heads in (1, HEADS_PER_LANE, DEEP_HEADS_PER_LANE):
        yield backlog.candidates(keys, lane_bonus, tasks, heads)


def _score_entry(world: World, entry: Entry, roomy: list[Engine], weights: dict[str, float], choice: _Choice) -> Gate:
    """Score one entry on the engines worth looking at; returns OPEN when at least one would take it."""
    closed = Gate.NO_ENGINE
    open_to: list[tuple[Engine, int]] = []
    for engine in roomy:
        gate, claim = gates.engine_gate(world, entry, engine)
        if gate is Gate.OPEN:
            open_to.append((engine, claim))
        elif gate is not Gate.NO_ENGINE or closed is Gate.NO_ENGINE:
            closed = gate
    if not open_to:
        return closed
    queueing.refresh_hits(world, entry)
    facts = queueing.entry_facts(world, entry)
    fixed = weighted(ENTRY_TERMS, facts, weights)
    hits = entry.hits
    facts.common_tokens = _common_hit(world, entry) if hits else 0
    considered: list[tuple[float, Engine, int]] = []
    for engine, claim in _worth_scoring(world, open_to, hits):
        _fill_facts(facts, entry, engine, claim)
        score = fixed + weighted(ENGINE_TERMS, facts, weights)
        tie = world.rng.random()
        if (score, tie) > (choice.score, choice.tie):
            choice.score, choice.tie = score, tie
            choice.entry, choice.engine, choice.claim = entry, engine, claim
            choice.considered = considered
        considered.append((score, engine, claim))
    return Gate.OPEN


def _fill_facts(facts: Facts, entry: Entry, engine: Engine, claim: int) -> None:
    """The engine side of the facts, as if the entry's first member were placed there."""
    facts.hit_tokens = entry.hits.get(engine.cache_key, 0)
    facts.dearness = dearness(entry, engine)
    facts.slots_fill = (engine.slots_used + 1) / engine.facts.slots
    capacity = engine.facts.kv_capacity_tokens
    facts.kv_fill = (engine.kv_claimed_tokens + claim) / capacity if capacity else 0.0


def _candidates(world: World, choice: _Choice, entry: Entry) -> tuple[Candidate, ...]:
    """What a decision tells of the engines considered for the entry that was chosen: the best few."""
    facts = queueing.entry_facts(world, entry)
    facts.common_tokens = _common_hit(world, entry) if entry.hits else 0
    told = []
    for score, engine, claim in sorted(choice.considered, key=lambda one: -one[0])[:CANDIDATES_TOLD]:
        _fill_facts(facts, entry, engine, claim)
        terms = {term.name: round(clamp(term.score(facts)), 4) for term in TERMS}
        told.append(Candidate(engine.engine_id, facts.hit_tokens, terms, round(score, 5)))
    return tuple(told)


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
    """Tokens of the prompt that every live engine of the pool has: they favour nobody."""
    hits = entry.hits
    fewest = -1
    engines = 0
    for engine in gates.servers(world, entry):
        if engine.lost or engine.draining:
            continue
        engines += 1
        hit = hits.get(engine.cache_key, 0)
        if not hit:
            return 0
        fewest = hit if fewest < 0 else min(fewest, hit)
    return fewest if engines > 1 else 0


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


def _dispatch(world: World, choice: _Choice, batch_id: int) -> None:
    """Book the permit and send the entry's first member."""
    entry, engine = choice.entry, choice.engine
    if entry is None or engine is None:
        raise AssertionError("nothing was chosen")
    candidates = _candidates(world, choice, entry)
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
    promise = Promise(entry.prompt_tokens, rollout.remaining_tokens, bool(rollout.spec.sampling.get("ignore_eos")))
    engine.promises.make(promise)
    attempt = Attempt(world.fresh_attempt_id(), rollout, engine, permit, promise, batch_id, world.now, token_bytes)
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
    world.decide(
        DecisionKind.DISPATCHED,
        rollout,
        f"{entry.rollout_class.name}, waited {world.now - rollout.submitted_at:.3f} s",
        batch_id=batch_id,
        engine_id=engine.engine_id,
        candidates=candidates,
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
    entry.held_at = world.now
    if entry.rollout_class is RolloutClass.CRITICAL and not entry.short:
        entry.run.led.append(entry)
    world.decide(
        DecisionKind.HELD,
        entry.members[0],
        f"leader {leader.rollout.rollout_id} computes the prompt",
        gate=Gate.HELD_FOR_LEADER,
    )
