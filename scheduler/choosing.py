"""The best (rollout, engine) pair of one turn, among a bounded number of entries and engines.

Entries: for whom room is kept, those owed a floor, the overdue one, then heads of lanes and of the engines' affinity heaps. A run
that states a target mix: before all lanes, those with a deadline in sight, then what has a turn beside the samples to train on,
then these, one stratum after the other, first the one that is furthest below its share.
Engines: all of a few; of many, those with the longest hits and the emptiest of some drawn at random. Ties by the seeded random.

Invariants
- What is chosen may start now: every gate was asked.
- Choosing books nothing; only what cannot start for a reason of its own may be held or get room reserved.

What this module does not know: whose turn it is, and what is done with the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler import gates, grouping, homing, queueing, turns
from rolloutd.scheduler.common_prefix import common_hit
from rolloutd.scheduler.considered import Row
from rolloutd.scheduler.dearness import dearness
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_LANE, Flow
from rolloutd.scheduler.roomy import Pass, Roomy
from rolloutd.scheduler.scoring import urgency
from rolloutd.scheduler.scoring.crowding import SPREAD_BELOW
from rolloutd.scheduler.scoring.total import EntryTerms, engine_total
from rolloutd.scheduler.states import Gate, RolloutClass, TaskType
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

MAX_ENGINES_SCORED = 5  # for one entry; of more with room, `MAX_HOLDING_SCORED` with a hit and the emptiest
MAX_HOLDING_SCORED: Final = 2
DEEP_HEADS_PER_LANE: Final = 32  # entries looked at where the first ones wait for an engine or a prefix of their own
DEEP_PAUSE_SECONDS: Final = 0.1  # between two looks behind the first entries of lanes that found nothing
PROBES: Final = 16  # engines with room drawn at random, of which the emptiest is scored; as many with the longest hit
STRATA_LOOKED_AT: Final = 8  # by a target mix, of samples and of the rest, before the others are looked at without it
FIRST_OF_LANES: Final = 3  # number of the look that is the first one into lanes
HEADS: Final = (1, HEADS_PER_LANE, DEEP_HEADS_PER_LANE)  # of each lane, in one look after the other


@mypyc_attr(acyclic=True)
class Look:
    """One turn's look for a pair: what is the same for all its entries, and the best pair so far."""

    __slots__ = (
        "claim",
        "common_tokens",
        "emptiest",
        "engine",
        "entry",
        "longest_tokens",
        "many",
        "score",
        "strata",
        "tie",
        "told",
        "weights",
        "_common",
        "_is_critical",
        "_groups",
        "_least_cost",
        "_marginal",
        "_mark",
        "_now",
        "_pass",
        "_prefix_weight",
        "_roomy",
        "_rows",
        "_run",
        "_spares",
        "_spreads",
        "_terms",
        "_token_seconds",
        "_world",
    )

    def __init__(self, world: World, turn: turns.Turn, roomy: Roomy, one_pass: Pass) -> None:
        run = turn.run
        weights = self.weights = queueing.weights_of(world, run)
        self.many = len(roomy.engines) > MAX_ENGINES_SCORED
        self.emptiest: list[Engine] = []
        self.score = -1e9
        self.tie: float | None = None  # drawn when a second pair has the same score
        self.common_tokens = 0  # of the entry that is best so far: on every engine
        self.longest_tokens = 0  # and on the one that has most, 0 where that does not matter
        self.entry: Entry | None = None
        self.engine: Engine | None = None
        self.claim = 0
        self.told: list[Row] = []  # engines scored for the entry that is best so far
        self.strata: list[Flow] | None = None  # that go first, in order; None: not asked for, or no mix is stated
        self._world = world
        self._run = run
        self._roomy = roomy
        self._pass = one_pass
        self._now = world.now
        self._mark = queueing.hits_mark(world, run.lineage(turn.pool))
        self._is_critical = turn.rollout_class is RolloutClass.CRITICAL
        token_seconds = self._token_seconds = queueing.pool_token_seconds(world, run, turn.pool)
        self._terms = EntryTerms(
            weights, turn.rollout_class, world.now, world.config.queue.aging_seconds, token_seconds
        )
        # Of engine terms one adds: at most the share of the longest hit here. One takes away: at least the emptiest's slots.
        self._prefix_weight = max(0.0, weights.prefix)
        self._least_cost = weights.cost * roomy.least_fill if weights.cost > 0.0 else 0.0
        self._marginal = world.config.queue.marginal_credit
        self._spares = world.config.queue.spare_duplicates
        self._groups = self._is_critical and world.config.queue.place_groups
        self._spreads = self._groups and grouping.spreads(run)
        self._common = -1
        self._rows: list[Row] = []

    def diverse(self, stratum: str) -> float:
        """What entries of this stratum get for it."""
        return self.weights.diversity * self._run.mix.missing(stratum)

    def by_mix(self, turn: turns.Turn, tasks: frozenset[TaskType]) -> list[Flow] | None:
        """What has something to dispatch and goes first by the run's mix, in order; None where none is stated."""
        mix = self._run.mix
        if not mix.target or turn.short or not self._world.config.queue.strict_mix:
            return None
        return mix.in_order(turn.backlog.flows(tasks), STRATA_LOOKED_AT)

    def in_sight(self, entry: Entry) -> bool:
        """Whether its deadline is near enough to count."""
        deadline = entry.deadline_at
        if deadline is None:
            return False
        expected_seconds = entry.expected_tokens * self._token_seconds
        return deadline - self._now - expected_seconds < urgency.HORIZON_SECONDS

    def outlook(self, entry: Entry) -> None:
        """Note what an entry could score: at best on any engine, and the part of it that no engine changes."""
        if self._now - entry.hits_at >= queueing.HITS_FRESH_SECONDS or entry.hits_mark != self._mark:
            queueing.refresh_hits(self._world, entry)
        steps: int | None = None
        if not self._is_critical:  # of critical work it makes no difference, and asking a member is dear: it is cold
            step = entry.members[0].needed_by_step
            steps = None if step is None else step - self._run.step
        fixed = self._terms.score(
            entry.queued_at,
            entry.deadline_at,
            entry.expected_tokens,
            entry.worst_tokens,
            steps,
            self.diverse(entry.stratum),
        )
        entry.fixed = fixed
        most = fixed - self._least_cost
        mask = self._roomy.mask
        for holders, tokens in entry.segments:  # longest first
            if holders & mask:
                most += self._prefix_weight * tokens / entry.prompt_tokens
                break
        entry.most = most

    def begin(self) -> None:
        """Another entry is scored now."""
        self._common = -1
        self._rows = []

    def ask(self, entry: Entry, engine: Engine) -> Gate:
        """Whether the engine takes the entry; if so the pair is scored, and kept where it is the best so far."""
        gate, claim = self._pass.space(self._run, engine).gate(entry)
        if gate is not Gate.OPEN:
            return gate
        segments = entry.segments
        hit = 0
        if segments:
            hit = self._world.index.held(segments, engine.cache_key)
            if self._common < 0:
                self._common = common_hit(self._world, entry) if self._marginal else 0
        elif self._common < 0:
            self._common = 0
        capacity = engine.facts.kv_capacity_tokens
        dear = dearness(entry, engine)
        slots_fill = (engine.slots_used + 1) / engine.facts.slots
        kv_fill = (engine.kv_claimed_tokens + claim) / capacity if capacity else 0.0
        most_held = segments[0][1] if segments and not entry.resumed else 0  # of an interrupted one it does not matter
        longest = most_held if self._spares else 0
        missing = most_held - hit  # that another engine has
        if missing and self._world.index.is_longest(segments, engine.cache_key):
            missing = 0  # a part of one of this engine's pages
        siblings = 0
        if entry.continuation and missing:
            if homing.waits(self._world, entry, missing):
                return Gate.HELD_FOR_PREFIX
        elif self._groups:
            if dear < SPREAD_BELOW:
                if self._spreads:
                    siblings = grouping.siblings(entry, engine)
            elif missing and grouping.waits(self._world, entry, engine, missing):
                return Gate.HELD_FOR_PREFIX
        score = entry.fixed + engine_total(
            self.weights, hit - self._common, longest - hit, entry.prompt_tokens, dear, slots_fill, kv_fill, siblings
        )
        if entry.resumed:
            # What an interrupted rollout has in a cache it does not lose by waiting: it says where to go on, not when.
            score -= self._prefix_weight * dear
        self._rows.append(Row(engine.engine_id, score, hit, dear, slots_fill, kv_fill, siblings))
        if score > self.score:
            self.tie = None
        elif score == self.score:
            tie = self._world.rng.random()
            if self.tie is None:
                self.tie = self._world.rng.random()
            if tie <= self.tie:
                return gate
            self.tie = tie
        else:
            return gate
        self.score = score
        self.entry, self.engine, self.claim = entry, engine, claim
        self.common_tokens = self._common
        self.longest_tokens = longest
        self.told = self._rows
        return gate

    def holding(self, entry: Entry) -> list[Engine]:
        """Of the engines with room, some with the longest hits, emptiest first."""
        found: list[Engine] = []
        rest = self._roomy.mask
        world = self._world
        members = world.rooms[entry.pool].members
        for holders, _ in entry.segments:
            here = holders & rest
            if here:
                rest ^= here
                start = 0  # all are seen, and of those that are equally full the first: siblings stay together
                if here.bit_count() > PROBES:  # or those with the lowest bits would get all
                    start = int(world.rng.random() * here.bit_length())
                some = [members[key] for key in world.index.some_of(here, PROBES, start)]
                some.sort(key=Engine.fill)
                found += some[: MAX_HOLDING_SCORED - len(found)]
                if len(found) >= MAX_HOLDING_SCORED:
                    break
        return found

    def emptiest_first(self) -> list[Engine]:
        """`PROBES` engines with room, drawn at random, emptiest first."""
        if not self.emptiest:
            roomy = self._roomy.engines
            start = self._world.draw_below(len(roomy))
            self.emptiest = roomy[start : start + PROBES] + roomy[: max(0, start + PROBES - len(roomy))]
            self.emptiest.sort(key=Engine.fill)
        return self.emptiest


def choose(
    world: World,
    turn: turns.Turn,
    roomy: Roomy,
    tasks: frozenset[TaskType],
    closed: Gate,
    one_pass: Pass,
) -> tuple[Look | None, Gate]:
    """The best pair of a bounded number of entries and engines; None and the last closed gate where nothing may start.

    Entries are taken in the order of the best score they could have on any engine, until no other can beat the best pair: gates
    are asked and engines scored for a few of them only.
    """
    look = Look(world, turn, roomy, one_pass)
    seen: set[int] = set()
    ledger = turn.run.ledger
    owed: frozenset[TaskType] = frozenset()
    if ledger.has_floors and ledger.owes() and not ledger.class_owed(turn.rollout_class):
        owed = frozenset([one for one in tasks if ledger.task_owed(one)])
    deeper = turn.overdue or bool(owed)  # what was seen may not start for reasons of its own: look behind it
    stage = 0
    while True:
        entries = LOOK(turn, roomy, look, tasks, owed, stage)
        if entries is None:
            break
        stage += 1
        if not entries:
            continue
        hopeful = [entry for entry in entries if entry.sequence not in seen] if seen else entries
        for entry in hopeful:
            look.outlook(entry)
        deeper = turn.overdue or bool(owed)
        while hopeful:
            entry = _most_hopeful(hopeful)
            seen.add(entry.sequence)
            if entry.most < look.score:
                break
            if queueing.hold_for_prefix(world, entry):
                gate = Gate.HELD_FOR_PREFIX
                deeper = True
                world.decide(DecisionKind.HELD, entry.members[0], "its prefix is being computed", gate=gate)
            else:
                gate = _score_entry(entry, roomy, look)
                if gate is Gate.HELD_FOR_PREFIX and entry.lane_key is not None and not entry.lane_key.apart:
                    queueing.order(world, entry)  # among those that wait: what need not wait does not stand behind it
                    deeper = True
            if gate is not Gate.OPEN:
                closed = gate
                deeper = deeper or gate in (Gate.NO_ENGINE, Gate.POLICY_VERSION)
                if gate is Gate.POLICY_VERSION:
                    queueing.hold_for_version(world, entry)
                gates.note_blocked(world, entry, gate)
        if look.entry is not None:
            return look, Gate.OPEN
        # What stands first may be too large for what is left, and what stands behind it not: look on, but where that was
        # in vain, not at every pass.
        rested = world.now - turn.backlog.fruitless_at >= DEEP_PAUSE_SECONDS
        by_mix = look.strata is not None and stage <= FIRST_OF_LANES + len(look.strata)  # each stratum has its look
        if not deeper and not rested and len(seen) >= HEADS_PER_LANE and not by_mix:
            return None, closed
    turn.backlog.fruitless_at = world.now
    return None, closed


def _most_hopeful(entries: list[Entry]) -> Entry:
    """The one with the best score that it could have, taken out. (Mostly one or two are wanted of twenty, so none is sorted.)"""
    found = 0
    best = entries[0]
    for place, entry in enumerate(entries):
        if entry.most > best.most or (
            entry.most == best.most
            and (entry.fixed > best.fixed or (entry.fixed == best.fixed and entry.sequence > best.sequence))
        ):
            found, best = place, entry
    entries[found] = entries[-1]
    entries.pop()
    return best


def _bounded_look(
    turn: turns.Turn, roomy: Roomy, look: Look, tasks: frozenset[TaskType], owed: frozenset[TaskType], stage: int
) -> list[Entry] | None:
    """Entries to score in the look number `stage`, none where there is nothing for it; None after the last look.

    For whom room is kept (nobody else may have it, so it must be seen), tasks below their floor, who is overdue, by a target mix,
    the first of each lane, the rest.
    """
    backlog = turn.backlog
    if stage == 0:
        keepers = [engine.reserved_for for engine in roomy.keepers if engine.reserved_for is not None]
        if turn.run.reserved_for is not None:
            keepers.append(turn.run.reserved_for)
        return [one for one in keepers if one.backlog is backlog and not one.held and one.task_type in tasks]
    if stage == 1:
        return backlog.candidates(roomy.keys, look.diverse, owed, HEADS_PER_LANE) if owed else []
    if stage == 2:
        oldest = backlog.oldest_ready() if turn.overdue else None
        return [oldest] if oldest is not None and not oldest.held and oldest.task_type in tasks else []
    place = stage - FIRST_OF_LANES
    if place == 0:
        look.strata = look.by_mix(turn, tasks)
    strata = look.strata
    if strata is not None:
        if place == 0:
            return [one for one in backlog.timed(tasks) if look.in_sight(one)]
        if place <= len(strata):
            return backlog.of_flow(strata[place - 1], roomy.keys, tasks)
        place -= 1 + len(strata)
    if place < len(HEADS):
        return backlog.candidates(roomy.keys, look.diverse, tasks, HEADS[place])
    return None


# A variable, so that a benchmark can put an exact scan in its place: compiled, a call of a function is bound for good.
LOOK: Callable[[turns.Turn, Roomy, Look, frozenset[TaskType], frozenset[TaskType], int], list[Entry] | None] = (
    _bounded_look
)


def _score_entry(entry: Entry, roomy: Roomy, look: Look) -> Gate:
    """Score one entry on the engines worth looking at; returns OPEN when at least one would take it, else a closed gate.

    All of a few engines. Of many: those with the longest hits, and the first one open of the others, emptiest first.
    """
    look.begin()
    result = Gate.NO_ENGINE
    if not look.many:
        for engine in roomy.engines:
            result = _sum_up(result, look.ask(entry, engine))
        return result
    holding = look.holding(entry)
    for engine in holding:
        result = _sum_up(result, look.ask(entry, engine))
    drawn = look.emptiest_first()
    for some in (drawn, roomy.engines) if len(drawn) < len(roomy.engines) else (drawn,):
        for engine in some:
            if engine not in holding:
                gate = look.ask(entry, engine)
                result = _sum_up(result, gate)
                if gate is Gate.OPEN:
                    return result
    return result


def _sum_up(sofar: Gate, gate: Gate) -> Gate:
    """Of two engines' gates: OPEN, else waiting for another engine (it could go elsewhere), else the one that says more."""
    if sofar is Gate.OPEN or gate is Gate.OPEN:
        return Gate.OPEN
    if sofar is Gate.HELD_FOR_PREFIX or (gate is Gate.NO_ENGINE and sofar is not Gate.NO_ENGINE):
        return sofar
    return gate
