"""The best (rollout, engine) pair of one turn, among a bounded number of entries and engines.

Entries: for whom room is kept, those owed a floor, the overdue one, then heads of lanes and of the engines' affinity heaps.
Engines: all of a few; of many, those with the longest hits and the emptiest of some drawn at random. Ties by the seeded random.

Invariants
- What is chosen may start now: every gate was asked.
- Choosing books nothing; only what cannot start for a reason of its own may be held or get room reserved.

What this module does not know: whose turn it is, and what is done with the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rolloutd.scheduler import gates, queueing, turns
from rolloutd.scheduler.considered import Row
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import HEADS_PER_LANE
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.scoring import Facts, diversity, engine_score, entry_score
from rolloutd.scheduler.states import Gate, TaskType
from rolloutd.scheduler.views import DecisionKind
from rolloutd.scheduler.world import World

MAX_ENGINES_SCORED = 5  # for one entry; of more with room, `MAX_HOLDING_SCORED` with a hit and the emptiest
MAX_HOLDING_SCORED = 2
DEEP_HEADS_PER_LANE = 32  # entries looked at where the first ones wait for an engine or a prefix of their own
DEEP_PAUSE_SECONDS = 0.1  # between two looks behind the first entries of lanes that found nothing
PROBES = 16  # engines with room drawn at random, of which the emptiest is scored
CHEAP_PREFILL = 0.05  # dearness never falls below this: among equals a cached prefix is still better than none

Spaces = dict[Engine, dict[Run, gates.Space]]  # of one pass; an engine's go when something is booked there


class Look:
    """One turn's look for a pair: what is the same for all its entries, and the best pair so far."""

    __slots__ = (
        "by_key",
        "claim",
        "common_tokens",
        "emptiest",
        "engine",
        "entry",
        "facts",
        "many",
        "score",
        "tie",
        "told",
        "weights",
        "_least_cost",
        "_mark",
        "_prefix_weight",
        "_run",
        "_spaces",
        "_world",
    )

    def __init__(self, world: World, turn: turns.Turn, roomy: list[Engine], spaces: Spaces) -> None:
        run = turn.run
        weights = self.weights = queueing.weights_of(world, run)
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
        self._mark = run.lineage(turn.pool).mark
        # Of engine terms one adds: at most the share of the longest hit here. One takes away: at least the emptiest's slots.
        self._prefix_weight = max(0.0, weights.prefix)
        self._least_cost = 0.0
        if weights.cost > 0.0:
            least = 1.0
            for engine in roomy:
                least = min(least, (engine.slots_used + 1) / engine.facts.slots)
            self._least_cost = weights.cost * least
        self._spaces = spaces

    def outlook(self, entry: Entry) -> None:
        """Note what an entry could score: at best on any engine, and the part of it that no engine changes."""
        world = self._world
        if world.now - entry.hits_at >= queueing.HITS_FRESH_SECONDS or entry.hits_mark != self._mark:
            queueing.refresh_hits(world, entry)
        facts = self.facts
        queueing.fill_facts(world, entry, facts)
        fixed = entry_score(facts, self.weights)
        entry.fixed = fixed
        entry.most = fixed - self._least_cost
        hits = entry.hits
        if hits:
            here = self.by_key
            longest = 0
            if 2 * len(here) < len(hits):
                for key in here:
                    longest = max(longest, hits.get(key, 0))
            else:
                for key, hit in hits.items():  # longest first
                    if key in here:
                        longest = hit
                        break
            entry.most += self._prefix_weight * longest / entry.prompt_tokens

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
        if len(by_key) < len(hits):
            held = [(-hits[key], engine.fill(), key) for key, engine in by_key.items() if key in hits]
        else:
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


def choose(
    world: World,
    turn: turns.Turn,
    roomy: list[Engine],
    tasks: frozenset[TaskType],
    closed: Gate,
    spaces: Spaces,
) -> tuple[Look | None, Gate]:
    """The best pair of a bounded number of entries and engines; None and the last closed gate where nothing may start.

    Entries are taken in the order of the best score they could have on any engine, until no other can beat the best pair: gates
    are asked and engines scored for a few of them only.
    """
    look = Look(world, turn, roomy, spaces)
    seen: set[int] = set()
    ledger = turn.run.ledger
    owed: frozenset[TaskType] = frozenset()
    if ledger.has_floors and not ledger.class_owed(turn.rollout_class):
        owed = frozenset(one for one in tasks if ledger.task_owed(one))
    for entries in LOOKS(turn, roomy, look, tasks, owed):
        deeper = turn.overdue or bool(owed)  # what was seen may not start for reasons of its own: look behind it
        hopeful = [entry for entry in entries if entry.sequence not in seen]
        for entry in hopeful:
            look.outlook(entry)
        while hopeful:
            entry = _most_hopeful(hopeful)
            seen.add(entry.sequence)
            if entry.most < look.score:
                break
            if queueing.hold_for_prefix(world, entry):
                gate = Gate.HELD_FOR_PREFIX
                world.decide(DecisionKind.HELD, entry.members[0], "its prefix is being computed", gate=gate)
            else:
                gate = _score_entry(world, entry, entry.fixed, roomy, look)
            if gate is not Gate.OPEN:
                closed = gate
                deeper = deeper or gate in (Gate.HELD_FOR_PREFIX, Gate.NO_ENGINE, Gate.POLICY_VERSION)
                if gate is Gate.POLICY_VERSION:
                    queueing.hold_for_version(world, entry)
                gates.note_blocked(world, entry, gate)
        if look.entry is not None:
            return look, Gate.OPEN
        # What stands first may be too large for what is left, and what stands behind it not: look on, but where that was
        # in vain, not at every pass.
        rested = world.now - turn.backlog.fruitless_at >= DEEP_PAUSE_SECONDS
        if not deeper and not rested and len(seen) >= HEADS_PER_LANE:
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


def _bounded_looks(
    turn: turns.Turn, roomy: list[Engine], look: Look, tasks: frozenset[TaskType], owed: frozenset[TaskType]
) -> Iterator[list[Entry]]:
    """Entries to score, one look after the other.

    For whom room is kept (nobody else may have it, so it must be seen), tasks below their floor, who is overdue, the first of
    each lane, the rest.
    """
    mix = turn.run.mix
    backlog = turn.backlog
    weight = look.weights.diversity

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


# A variable, so that a benchmark can put an exact scan in its place: compiled, a call of a function is bound for good.
LOOKS: Callable[[turns.Turn, list[Engine], Look, frozenset[TaskType], frozenset[TaskType]], Iterator[list[Entry]]] = (
    _bounded_looks
)


def _score_entry(world: World, entry: Entry, fixed: float, roomy: list[Engine], look: Look) -> Gate:
    """Score one entry on the engines worth looking at; returns OPEN when at least one would take it.

    fixed: the part of its score that no engine changes.
    """
    open_to, gate = _open_engines(entry, roomy, look)
    if not open_to:
        return gate
    facts = look.facts
    facts.prompt_tokens = entry.prompt_tokens
    hits = entry.hits
    facts.common_tokens = _common_hit(world, entry, hits) if hits else 0
    considered: list[Row] = []
    waits_well = look.weights.prefix if entry.members[0].pieces else 0.0
    for engine, claim in open_to:
        fill_engine_facts(facts, entry, engine, claim)
        score = fixed + engine_score(facts, look.weights)
        if waits_well:
            # What an interrupted rollout has in a cache it does not lose by waiting: it says where to go on, not when.
            score -= waits_well * facts.dearness
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


def _open_engines(entry: Entry, roomy: list[Engine], look: Look) -> tuple[list[tuple[Engine, int]], Gate]:
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
    remaining = entry.members[0].remaining_tokens
    for engine in world.rooms[entry.pool].members.values():
        if engine.lost or engine.draining:
            continue
        hit = hits.get(engine.cache_key, 0)
        if not gates.could_serve(world, entry, engine, remaining):
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
