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
from functools import lru_cache

from rolloutd.scheduler import budgeting, gates, preemption, queueing, turns
from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.considered import Considered, Row
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_LANE
from rolloutd.scheduler.lifecycle import arm_timer
from rolloutd.scheduler.permit import Permit
from rolloutd.scheduler.promises import Promise
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.room import Room
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.scoring import ENGINE_TERMS, ENTRY_TERMS, Facts, clamp, diversity
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

MAX_ENGINES_SCORED = 5  # for one entry; of more with room, `MAX_HOLDING_SCORED` with a hit and the emptiest
MAX_HOLDING_SCORED = 2
DEEP_HEADS_PER_LANE = 32  # entries looked at where the first ones wait for an engine or a prefix of their own
PROBES = 16  # engines with room drawn at random, of which the emptiest is scored
SHORT_KINDS = tuple(sorted(SHORT_TASKS))
LONG_KINDS = tuple(one for one in TaskType if one not in SHORT_TASKS)
CHEAP_PREFILL = 0.05  # dearness never falls below this: among equals a cached prefix is still better than none


Spaces = dict[Engine, dict[Run, gates.Space]]  # of one pass; an engine's go when something is booked there


class _Look:
    """One turn's look for a pair: what is the same for all its entries, and the best pair so far."""

    __slots__ = (
        "by_key",
        "claim",
        "common_tokens",
        "emptiest",
        "engine",
        "engine_terms",
        "entry",
        "entry_terms",
        "facts",
        "many",
        "score",
        "tie",
        "told",
        "_prefix_weight",
        "_run",
        "_spaces",
        "_world",
    )

    def __init__(self, world: World, turn: turns.Turn, roomy: list[Engine], spaces: Spaces) -> None:
        run = turn.run
        weights = queueing.weights_of(world, run)
        self.entry_terms, self.engine_terms = _signed_terms(tuple(weights.items()))
        self.facts = queueing.turn_facts(world, run, turn.rollout_class, turn.pool)
        self.many = len(roomy) > MAX_ENGINES_SCORED
        self.by_key = {engine.cache_key: engine for engine in roomy}  # by their name in the index
        self.emptiest: list[Engine] = []
        self.score = -1e9
        self.tie: float | None = None  # drawn when a second pair has the same score
        self.common_tokens = 0
        self.entry: Entry | None = None
        self.engine: Engine | None = None
        self.claim = 0
        self.told: list[Row] = []  # engines scored for the entry that is best so far
        self._world = world
        self._run = run
        # The one engine term that adds: its most is the longest hit here, where computing it is dearest.
        self._prefix_weight = max(0.0, weights["prefix"])
        self._spaces = spaces

    def outlook(self, entry: Entry) -> tuple[float, float]:
        """(the best score an entry could have on any engine, the part of it that no engine changes)."""
        world = self._world
        if world.now - entry.hits_at >= queueing.HITS_FRESH_SECONDS:
            queueing.refresh_hits(world, entry)
        facts = self.facts
        queueing.fill_facts(world, entry, facts)
        fixed = 0.0
        for weight, term in self.entry_terms:
            value = term(facts)
            fixed += weight * (value if 0.0 <= value <= 1.0 else clamp(value))
        most = fixed
        hits = entry.hits
        if hits:
            longest = 0
            here = self.by_key
            for key, hit in hits.items():
                if hit > longest and key in here:
                    longest = hit
            most += self._prefix_weight * longest / entry.prompt_tokens
        return most, fixed

    def space(self, engine: Engine) -> gates.Space:
        """What the engine has left for the run; of use until something is booked there."""
        spaces = self._spaces.get(engine)
        if spaces is None:
            spaces = self._spaces[engine] = {}
        space = spaces.get(self._run)
        if space is None:
            space = spaces[self._run] = gates.Space(self._world, self._run, engine)
        return space

    def holding(self, hits: dict[str, int]) -> list[Engine]:
        """Of the engines with room, those with the longest hits."""
        by_key = self.by_key
        held = [(-hit, by_key[key].fill(), key) for key, hit in hits.items() if key in by_key]
        held.sort()
        return [by_key[key] for _, _, key in held[:MAX_HOLDING_SCORED]]

    def emptiest_first(self, roomy: list[Engine]) -> list[Engine]:
        """Engines with room: `PROBES` of them drawn at random, emptiest first, then the others."""
        if not self.emptiest:
            start = self._world.rng.randrange(len(roomy))
            drawn = roomy[start : start + PROBES] + roomy[: max(0, start + PROBES - len(roomy))]
            drawn.sort(key=Engine.fill)
            self.emptiest = (
                drawn + [engine for engine in roomy if engine not in drawn] if len(roomy) > PROBES else drawn
            )
        return self.emptiest


Terms = tuple[tuple[float, Callable[[Facts], float]], ...]


@lru_cache(maxsize=64)
def _signed_terms(weights: tuple[tuple[str, float], ...]) -> tuple[Terms, Terms]:
    """(signed weight, term) of the terms of entries, and of those of engines."""
    of = dict(weights)
    entry_terms = tuple((term.sign * of[term.weight], term.score) for term in ENTRY_TERMS)
    return entry_terms, tuple((term.sign * of[term.weight], term.score) for term in ENGINE_TERMS)


def schedule(world: World) -> None:
    """One pass over all pools. Leaves `world.dirty` set when the batch limit cut it short."""
    world.dirty = False
    if world.shutting_down:
        return
    batch_id = world.batches + 1
    made = 0
    pools = [pool for pool, waiting in world.waiting.items() if waiting and pool in world.rooms]
    for pool in pools if len(pools) < 2 else sorted(pools):
        room = world.rooms[pool]
        may_help = preemption.may_help(world, pool) if not room.long else False
        if room.free or may_help:
            for run in world.runs.values():
                if run.ledger.has_floors:
                    budgeting.note_stalled(world, run)
            made += _fill(world, pool, room, batch_id, world.config.queue.max_batch_size - made)
        else:
            world.gates[_full_gate(world, room)] += 1
    if made:
        world.batches = batch_id


def _fill(world: World, pool: str, room: Room, batch_id: int, limit: int) -> int:
    blocked: set[tuple[str, RolloutClass, bool]] = set()
    spaces: Spaces = {}
    per_run: dict[str, int] = {}
    made = 0
    kept = False
    brief_room = gates.reserved_short(world) < room.reserved_short  # no short slots are kept back now
    while room.free:
        turn = turns.next_turn(world, pool, blocked, bool(room.long), brief_room)
        if turn is None:
            if made and kept:
                world.dirty = (
                    True  # what was dispatched may have ended a reason to keep room that stopped others before
                )
            break
        if made >= limit:
            world.dirty = True
            return made
        run = turn.run
        if per_run.get(run.run_id, 0) >= batch_limit(world, run):
            world.dirty = True  # the next pass goes on; COLD_START wants small batches and quick results
            gate = Gate.BATCH_LIMIT
        else:
            gate = _place(world, turn, room, batch_id, spaces)
        if gate is Gate.OPEN:
            made += 1
            per_run[run.run_id] = per_run.get(run.run_id, 0) + 1
            if run.ledger.has_floors and budgeting.note_stalled(world, run):
                world.dirty = True  # room that was kept is free now, for work that this pass has passed by
        else:
            kept = kept or gate is Gate.RESERVED_FOR_LARGE
            world.gates[gate] += 1
            blocked.add((run.run_id, turn.rollout_class, turn.short))
    if not room.long and world.waiting.get(pool):
        world.gates[_full_gate(world, room)] += 1
        if preemption.may_help(world, pool):
            _make_room(world, pool, blocked)
    return made


def _full_gate(world: World, room: Room) -> Gate:
    """Why a pool takes no long work: no engine is open, none has a slot, or those left are for short work."""
    if not any(engine.is_open(world.now) for engine in room.members.values()):
        return Gate.NO_ENGINE
    return Gate.SHORT_RESERVED if room.free else Gate.ENGINE_SLOTS


def _make_room(world: World, pool: str, blocked: set[tuple[str, RolloutClass, bool]]) -> None:
    """For critical work that had no turn because nothing is free: what keeps it, and whether interrupting others helps."""
    for run in list(world.waiting.get(pool, ())):
        for (rollout_class, short), backlog in list(run.ready.get(pool, {}).items()):
            if rollout_class is not RolloutClass.CRITICAL or (run.run_id, rollout_class, short) in blocked:
                continue
            turn = turns.Turn(run, pool, rollout_class, short, backlog)
            gate = budgeting.run_gate(world, run, rollout_class)
            if gate is Gate.OPEN:
                tasks, gate = _startable_tasks(world, turn)
                if tasks:
                    gate = _no_room(world, turn, world.rooms[pool])
            world.gates[gate] += 1
            preemption.make_room(world, turn, gate)
    preemption.note_fruitless(world, pool)


def batch_limit(world: World, run: Run) -> int:
    """Dispatches of one run in one batch, by its phase."""
    limit = run.phase.between(world.config.policy.cold_start_batch_size, world.config.queue.max_batch_size)
    return max(1, min(world.config.queue.max_batch_size, round(limit)))


def _place(world: World, turn: turns.Turn, room: Room, batch_id: int, spaces: Spaces) -> Gate:
    """Dispatch the best pair of this turn; returns OPEN, or the gate that kept everything waiting."""
    run = turn.run
    gate = budgeting.run_gate(world, run, turn.rollout_class)
    if gate is not Gate.OPEN:
        return gate
    tasks, closed = _startable_tasks(world, turn)
    if tasks:
        roomy, none = _roomy_engines(world, turn, room)
        if not roomy:
            closed = none
        else:
            look, closed = _choose(world, turn, roomy, tasks, closed, spaces)
            if look is not None:
                _dispatch(world, look, batch_id)
                if look.engine is not None:
                    spaces.pop(look.engine, None)
                return Gate.OPEN
    preemption.make_room(world, turn, closed)
    return closed


def _startable_tasks(world: World, turn: turns.Turn) -> tuple[frozenset[TaskType], Gate]:
    """Task types of this turn that the budget lets start, and the gate of one that it does not."""
    run = turn.run
    ledger = run.ledger
    slots = world.run_slots(run)
    tasks = []
    closed = Gate.ENGINE_SLOTS
    for task_type in SHORT_KINDS if turn.short else LONG_KINDS:
        if ledger.task_queued[task_type]:
            gate = ledger.gate(turn.rollout_class, task_type, slots)
            if gate is Gate.OPEN:
                tasks.append(task_type)
            else:
                closed = gate
    return frozenset(tasks), closed


def _roomy_engines(world: World, turn: turns.Turn, room: Room) -> tuple[list[Engine], Gate]:
    """Open engines with a slot for this turn's kind of work, and why there is none."""
    now = world.now
    run_id = turn.run.run_id
    keep_short = gates.reserved_short(world)
    if not turn.short and not turn.backlog.brief:
        keep_short = room.reserved_short
    if turn.short:
        having = room.free
    elif keep_short == room.reserved_short:
        having = room.long
    else:
        having = {engine: None for engine in room.free if engine.free_slots(False, keep_short) > 0}
    roomy = [
        engine
        for engine in having
        if engine.is_open(now) and not engine.removed and engine.facts.run_id in ("", run_id)
    ]
    if not roomy:
        return [], _no_room(world, turn, room)
    waits_for_critical = turn.run.led and not turn.short and turn.rollout_class is not RolloutClass.CRITICAL
    if waits_for_critical and not turns.owed(turn.run, turn):
        free = sum(engine.free_slots(False, keep_short) for engine in roomy)
        if free <= gates.led_members(world, turn.run, turn.pool):
            return [], Gate.HELD_FOR_LEADER
    return roomy, Gate.ENGINE_SLOTS


def _no_room(world: World, turn: turns.Turn, room: Room) -> Gate:
    """Why no engine has a slot for this turn."""
    now = world.now
    allowed = ("", turn.run.run_id)
    for engine in room.free:
        if engine.is_open(now) and not engine.removed and engine.facts.run_id in allowed:
            return Gate.SHORT_RESERVED
    for engine in room.members.values():
        if engine.is_open(now) and not engine.removed and engine.facts.run_id in allowed:
            return Gate.ENGINE_SLOTS
    return Gate.NO_ENGINE


def _choose(
    world: World,
    turn: turns.Turn,
    roomy: list[Engine],
    tasks: frozenset[TaskType],
    closed: Gate,
    spaces: Spaces,
) -> tuple[_Look | None, Gate]:
    """The best pair of a bounded number of entries and engines; None and the last closed gate where nothing may start.

    Entries are taken in the order of the best score they could have on any engine, until no other can beat the best pair: gates
    are asked and engines scored for a few of them only.
    """
    look = _Look(world, turn, roomy, spaces)
    seen: set[int] = set()
    ledger = turn.run.ledger
    owed: frozenset[TaskType] = frozenset()
    if ledger.has_floors and not ledger.class_owed(turn.rollout_class):
        owed = frozenset(one for one in tasks if ledger.task_owed(one))
    for entries in _looks(turn, roomy, look, tasks, owed):
        deeper = turn.overdue or bool(owed)  # what was seen may not start for reasons of its own: look behind it
        hopeful = [(*look.outlook(entry), entry.sequence, entry) for entry in entries if entry.sequence not in seen]
        hopeful.sort(reverse=True)
        for most, fixed, sequence, entry in hopeful:
            seen.add(sequence)
            if most < look.score:
                break
            if queueing.hold_for_prefix(world, entry):
                gate = Gate.HELD_FOR_PREFIX
                world.decide(DecisionKind.HELD, entry.members[0], "its prefix is being computed", gate=gate)
            else:
                gate = _score_entry(world, entry, fixed, roomy, look)
            if gate is not Gate.OPEN:
                closed = gate
                deeper = deeper or gate in (Gate.HELD_FOR_PREFIX, Gate.NO_ENGINE)
                gates.note_blocked(world, entry, gate)
        if look.entry is not None:
            return look, Gate.OPEN
        if not deeper and len(seen) >= HEADS_PER_LANE:
            break
    return None, closed


def _looks(
    turn: turns.Turn, roomy: list[Engine], look: _Look, tasks: frozenset[TaskType], owed: frozenset[TaskType]
) -> Iterator[list[Entry]]:
    """Entries to score, one look after the other.

    For whom room is kept (nobody else may have it, so it must be seen), tasks below their floor, who is overdue, the first of
    each lane, the rest.
    """
    mix = turn.run.mix
    backlog = turn.backlog
    weight = next(weight for weight, score in look.entry_terms if score is diversity.score)

    def lane_bonus(stratum: str) -> float:
        share, target = mix.shares(stratum)
        return weight * diversity.missing(target, share)

    keys = [engine.cache_key for engine in roomy]
    keepers = [engine.reserved_for for engine in roomy if engine.reserved_for is not None]
    if turn.run.reserved_for is not None:
        keepers.append(turn.run.reserved_for)
    kept = [one for one in keepers if one.backlog is backlog and not one.held]
    if kept:
        yield [one for one in kept if one.task_type in tasks]
    if owed:
        yield backlog.candidates(keys, lane_bonus, owed, HEADS_PER_LANE)
    oldest = backlog.oldest()
    if turn.overdue and oldest is not None and not oldest.held and oldest.task_type in tasks:
        yield [oldest]
    for heads in (1, HEADS_PER_LANE, DEEP_HEADS_PER_LANE):
        yield backlog.candidates(keys, lane_bonus, tasks, heads)


def _score_entry(world: World, entry: Entry, fixed: float, roomy: list[Engine], look: _Look) -> Gate:
    """Score one entry on the engines worth looking at; returns OPEN when at least one would take it.

    fixed: the part of its score that no engine changes.
    """
    open_to: list[tuple[Engine, int]]
    if len(roomy) == 1:
        engine = roomy[0]
        gate, claim = look.space(engine).gate(entry)
        if gate is not Gate.OPEN:
            return gate
        open_to = [(engine, claim)]
    else:
        open_to, gate = _open_engines(world, entry, roomy, look)
        if not open_to:
            return gate
    facts = look.facts
    facts.prompt_tokens = entry.prompt_tokens
    hits = entry.hits
    facts.common_tokens = _common_hit(world, entry, hits) if hits else 0
    considered: list[Row] = []
    for engine, claim in open_to:
        fill_engine_facts(facts, entry, engine, claim)
        score = fixed
        for weight, term in look.engine_terms:
            value = term(facts)
            score += weight * (value if 0.0 <= value <= 1.0 else clamp(value))
        considered.append(
            Row(engine.engine_id, score, facts.hit_tokens, facts.dearness, facts.slots_fill, facts.kv_fill)
        )
        if score < look.score:
            continue
        if score == look.score:
            tie = world.rng.random()
            if look.tie is None:
                look.tie = world.rng.random()
            if tie <= look.tie:
                continue
            look.tie = tie
        else:
            look.tie = None
        look.score = score
        look.entry, look.engine, look.claim = entry, engine, claim
        look.common_tokens = facts.common_tokens
        look.told = considered
    return Gate.OPEN


def _open_engines(
    world: World, entry: Entry, roomy: list[Engine], look: _Look
) -> tuple[list[tuple[Engine, int]], Gate]:
    """Engines worth scoring that would take the entry, with the KV tokens to book; or the gate that is closed everywhere.

    All of a few. Of many: those with the longest hits, and the first one open of the others, emptiest first.
    """
    closed = Gate.NO_ENGINE
    open_to: list[tuple[Engine, int]] = []
    holding = look.holding(entry.hits) if look.many else []
    others = look.emptiest_first(roomy) if look.many else roomy
    for asked, until_first in ((holding, False), (others, look.many)):
        for engine in asked:
            if until_first and engine in holding:
                continue
            gate, claim = look.space(engine).gate(entry)
            if gate is Gate.OPEN:
                open_to.append((engine, claim))
                if until_first:
                    break
            elif gate is not Gate.NO_ENGINE or closed is Gate.NO_ENGINE:
                closed = gate
    return open_to, closed


def _common_hit(world: World, entry: Entry, hits: dict[str, int]) -> int:
    """Tokens of the prompt that every live engine of the pool has: they favour nobody."""
    fewest = -1
    engines = 0
    for engine in world.rooms[entry.pool].members.values():
        if engine.lost or engine.draining:
            continue
        hit = hits.get(engine.cache_key, 0)
        if not gates.could_serve(world, entry, engine):
            continue
        if not hit:
            return 0
        engines += 1
        fewest = hit if fewest < 0 else min(fewest, hit)
    return fewest if engines > 1 else 0


def fill_engine_facts(facts: Facts, entry: Entry, engine: Engine, claim: int) -> None:
    """The engine side of the facts, as if the entry's first member were placed there."""
    facts.hit_tokens = entry.hits.get(engine.cache_key, 0)
    facts.dearness = dearness(entry, engine)
    facts.slots_fill = (engine.slots_used + 1) / engine.facts.slots
    capacity = engine.facts.kv_capacity_tokens
    facts.kv_fill = (engine.kv_claimed_tokens + claim) / capacity if capacity else 0.0


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


def _dispatch(world: World, look: _Look, batch_id: int) -> None:
    """Book the permit and send the entry's first member."""
    entry, engine = look.entry, look.engine
    if entry is None or engine is None:
        raise AssertionError("nothing was chosen")
    queueing.fill_facts(world, entry, look.facts)
    look.facts.common_tokens = look.common_tokens
    run = entry.run
    rollout = entry.members[0]
    expected = entry.expected_tokens
    predicted = min(entry.hits.get(engine.cache_key, 0), most_cacheable(entry.prompt_tokens, engine.facts.page_tokens))
    token_bytes, text = entry.token_bytes, entry.text
    queueing.take(world, rollout)
    permit = Permit(engine, run.ledger, run.run_id, rollout.rollout_class, rollout.task_type, look.claim)
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
    world.note_attempt(attempt)
    arm_timer(world, rollout)
    attempt.charged_tokens = expected + entry.prompt_tokens - predicted
    turns.charge(run, entry.pool, attempt.charged_tokens, entry.short)
    run.mix.note_dispatched(entry.stratum)
    run.no_capacity_since = None
    world.dispatched_total += 1
    if text is None and predicted + world.config.queue.min_shared_tokens <= entry.prompt_tokens:
        attempt.stems = queueing.entry_stems(entry)
        world.computing.begin(attempt.stems)
    _hold_siblings(world, entry, attempt, predicted)
    world.decide(
        DecisionKind.DISPATCHED,
        rollout,
        f"{entry.rollout_class.name}, waited {world.now - rollout.submitted_at:.3f} s",
        batch_id=batch_id,
        engine_id=engine.engine_id,
        considered=Considered(look.facts, look.told),
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
