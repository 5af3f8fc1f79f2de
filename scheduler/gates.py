"""Whether an entry may start on an engine now: the engine's side of every gate.

Invariants
- Asking changes nothing but caches; `note_blocked` is the one function that reserves room, for what is too large for any gap.
- `engine_gate` names the first gate that is closed.

What this module does not know: scores, turns, the budget's counters beyond asking `ledger` and `budgeting`.
"""

from __future__ import annotations

import math
from typing import Final

from rolloutd.scheduler import budgeting, promises, queueing, tail, versions
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Gate, RolloutClass
from rolloutd.scheduler.world import World

SHORT_ROOM_TOKENS: Final = 4096  # of an engine's KV tokens, not promised to long work: a few reward queries
SHORT_ROOM_PART: Final = 16  # and at most this part of them
MOST_DOUBLINGS: Final = 16  # of a claim: beyond any context
MOVE_SECONDS: Final = 0.5  # a moving rollout waits so long for its destination
LED_SECONDS: Final = 2.0  # prefill takes a fraction of this, unless the engine is in trouble


class Space:
    """What one engine has left for one run, worked out once and asked for many entries.

    Valid until anything is booked or released there.
    """

    __slots__ = (
        "_busy",
        "_continuation_fits",
        "_engine",
        "_fits",
        "_free_kv",
        "_headroom_tokens",
        "_page",
        "_run_kv",
        "_short_only",
        "_unpressed_kv",
        "_world",
    )

    def __init__(self, world: World, run: Run, engine: Engine) -> None:
        facts = engine.facts
        settings = world.config.budget
        capacity = facts.kv_capacity_tokens
        self._world = world
        self._engine = engine
        self._page = facts.page_tokens
        self._headroom_tokens = settings.headroom_tokens
        self._short_only = engine.free_slots(False, world.room(facts.pool).reserved_short) <= 0
        self._busy = engine.slots_used > 0  # an empty engine takes anything that could ever fit
        self._free_kv = self._unpressed_kv = self._run_kv = math.inf
        self._fits = self._continuation_fits = math.inf
        if capacity:
            self._run_kv = float(budgeting.engine_kv_limit(run, engine) - engine.kv_by_run.get(run.run_id, 0))
            if self._busy:
                self._free_kv = float(capacity - engine.kv_claimed_tokens)
                self._unpressed_kv = settings.kv_watermark * capacity - engine.kv_claimed_tokens
                # What the engine would let wait is not sent; long work leaves some room for short work.
                self._continuation_fits = engine.promises.room_tokens(capacity, facts.page_tokens)
                self._fits = self._continuation_fits - min(SHORT_ROOM_TOKENS, capacity // SHORT_ROOM_PART)

    def gate(self, entry: Entry) -> tuple[Gate, int]:
        """Whether the engine takes the entry's first member now, and the KV tokens to book."""
        world, engine = self._world, self._engine
        rollout = entry.members[0]
        remaining = rollout.remaining_tokens
        if not could_serve(world, entry, engine, remaining):
            return Gate.NO_ENGINE, 0
        if entry.particular:
            lineage = entry.run.lineage(entry.pool)
            if lineage.unseen or not versions.fits(lineage, rollout, engine):
                return Gate.POLICY_VERSION, 0
        short = entry.short
        if self._short_only and not short:
            return Gate.SHORT_RESERVED, 0
        bound = rollout.destination
        if bound is not None and bound is not engine and _goes(world, rollout, bound):
            return Gate.NO_ENGINE, 0
        if rollout.excluded and engine.engine_id in rollout.excluded and _another_serves(world, entry, rollout):
            return Gate.NO_ENGINE, 0
        if rollout.outgrown:
            claim = claim_tokens(world, entry, engine)
        else:
            claim = entry.claim_tokens(self._page, self._headroom_tokens)
        run = entry.run
        if run.reserved_for is not None and _kept_for_another(world, run.reserved_for, entry):
            return Gate.RESERVED_FOR_LARGE, claim
        gate = run.ledger.kv_gate(claim)
        if gate is not Gate.OPEN:
            return gate, claim
        if engine.reserved_for is not None and not short and _kept_for_another(world, engine.reserved_for, entry):
            return Gate.RESERVED_FOR_LARGE, claim
        if claim > self._free_kv:
            return Gate.ENGINE_KV, claim
        continuation = entry.continuation
        if claim > self._unpressed_kv and not continuation:
            return Gate.PRESSURE, claim
        needed = promises.needed_tokens(entry.prompt_tokens, remaining, self._page)
        if needed >= (self._continuation_fits if short or continuation else self._fits):
            return Gate.ENGINE_KV, claim
        if claim > self._run_kv:
            return Gate.ENGINE_KV_CEILING, claim
        if entry.rollout_class is not RolloutClass.CRITICAL and not short and _spoils_tail(world, entry, engine):
            return Gate.CRITICAL_TAIL, claim
        return Gate.OPEN, claim


def engine_gate(world: World, entry: Entry, engine: Engine) -> tuple[Gate, int]:
    """Whether this engine takes the entry's first member now, and the KV tokens to book."""
    return Space(world, entry.run, engine).gate(entry)


def claim_tokens(world: World, entry: Entry, engine: Engine) -> int:
    """KV tokens to book for the entry's first member on this engine.

    More than expected for one that had to leave because claims outgrew a ceiling: else two that do not fit together would
    let each other start and interrupt each other for ever. Never more than the ceilings allow one alone.
    """
    settings = world.config.budget
    page = engine.facts.page_tokens
    claim = entry.claim_tokens(page, settings.headroom_tokens)
    outgrown = entry.members[0].outgrown
    if not outgrown:
        return claim
    wanted = entry.claim_tokens(page, settings.growth_tokens << min(outgrown, MOST_DOUBLINGS))
    limits = [
        one for one in (entry.run.ledger.budget.max_kv_tokens, budgeting.engine_kv_limit(entry.run, engine)) if one
    ]
    return max(claim, min([wanted, *(limit // page * page for limit in limits)]))


def servers(world: World, entry: Entry) -> tuple[Engine, ...]:
    """The engines that could run the entry's first member when they are empty; looked up again when engines changed."""
    remaining = entry.members[0].remaining_tokens
    mark = (world.fleet_mark, remaining)
    if entry.servers_mark != mark:
        entry.servers = tuple(
            engine for engine in world.engines.values() if could_serve(world, entry, engine, remaining)
        )
        entry.servers_mark = mark
    return entry.servers


def could_serve(world: World, entry: Entry, engine: Engine, remaining_tokens: int) -> bool:
    """Whether this engine, when empty, could run the entry's first member, with so much output left, to its end."""
    facts = engine.facts
    if (
        entry.labels or engine.owner or entry.run.published or facts.pool != entry.pool or engine.removed
    ) and not world.serves(engine, entry.run, entry.pool, entry.labels):
        return False
    if entry.text is not None:
        return True  # its length is a guess before the engine tokenised it; the engine refuses what is too long
    whole = entry.prompt_tokens + remaining_tokens
    if facts.context_tokens and whole > facts.context_tokens:
        return False
    if facts.max_prompt_tokens and entry.prompt_tokens > facts.max_prompt_tokens:
        return False
    capacity = facts.kv_capacity_tokens
    return not capacity or -(-whole // facts.page_tokens) * facts.page_tokens <= capacity


def led_members(world: World, run: Run, pool: str) -> int:
    """Critical rollouts that will want room as soon as their leader's first token comes: lower classes leave it to them.

    A leader that is slow stops keeping room after `LED_SECONDS`; its siblings go on waiting for it for longer.
    """
    run.led = [
        entry
        for entry in run.led
        if entry.held_gate is Gate.HELD_FOR_LEADER
        and entry.backlog is not None
        and world.now - entry.held_at < LED_SECONDS
    ]
    return sum(len(entry.members) for entry in run.led if entry.pool == pool)


def _another_serves(world: World, entry: Entry, rollout: Rollout) -> bool:
    """Whether some ready engine that has not failed this rollout could take it; if none, the others get another chance."""
    return any(
        engine.engine_id not in rollout.excluded and engine.state(world.now) == "ready"
        for engine in servers(world, entry)
    )


def _goes(world: World, rollout: Rollout, to: Engine) -> bool:
    """Whether it still goes to the engine that it was to move to."""
    return (
        world.now - rollout.queued_at < MOVE_SECONDS
        and to.is_open(world.now)
        and to.free_slots(False, world.room(to.facts.pool).reserved_short) > 0
    )


def _kept_for_another(world: World, keeper: Entry | None, entry: Entry) -> bool:
    """Whether room is kept for another entry that could use it now.

    A run that may not start keeps nobody out, and work of its own run that is owed a floor goes first.
    """
    if keeper is None or keeper is entry or keeper.held:
        return False
    run = keeper.run
    if entry.run is run and (run.ledger.class_owed(entry.rollout_class) or run.ledger.task_owed(entry.task_type)):
        return False
    if budgeting.run_gate(world, run, keeper.rollout_class) is not Gate.OPEN:
        return False
    return run.ledger.gate(keeper.rollout_class, keeper.task_type, world.run_slots(run)) is Gate.OPEN


def _spoils_tail(world: World, entry: Entry, engine: Engine) -> bool:
    """Whether lower-class work would slow the last rollouts of this step, or of the next one, too much: see `tail`."""
    run = entry.run
    step = entry.members[0].needed_by_step
    soon = step is not None and step <= run.step + 1
    if not (engine.critical_used or (run.by_step and not soon)) or not tail.is_on(world, run):
        return False
    if soon and run.pressure(world.now) < 1.0:
        return False
    beside = engine.slots_used - tail.awaited(world, run, engine)
    if beside == engine.slots_used:
        return False  # nobody awaits anything from it
    stall_seconds = 0.0
    if engine.prefill_tokens_per_second:
        held = world.index.held(entry.segments, engine.cache_key) if entry.segments else 0
        missing = max(0, entry.prompt_tokens - held)
        stall_seconds = missing / engine.prefill_tokens_per_second / entry.expected_tokens
    return beside >= tail.most_beside(world, run, engine, stall_seconds, soon)


def note_blocked(world: World, entry: Entry, gate: Gate) -> None:
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
        claim = entry.claim_tokens(page, world.config.budget.headroom_tokens)  # the least it could start with
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
            for engine in servers(world, entry)
            if engine.is_open(world.now) and engine.reserved_for in (None, entry)
        ]
        if engines and not any(engine.reserved_for is entry for engine in engines):
            queueing.release_reservations(world, entry)  # of an engine that is gone
            min(engines, key=lambda engine: engine.kv_claimed_tokens).reserved_for = entry
            entry.keeps_room = True
