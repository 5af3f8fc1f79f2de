"""Stage two: choose (rollout, engine) pairs within the budget, best score first, and book them.

A pass makes one batch: at most `max_batch_size` dispatches with one id. For each dispatch: whose turn (`turns`), what the
budget lets start, which engines have room, the best pair (`choosing`), and its booking (`dispatching`).

Invariants
- Nothing is placed through a closed gate; the first closed gate is counted and kept for the decision.
- Engine queues stay near zero: an engine is given at most its slots.

What this module does not know: scores, and what makes a gate close beyond asking (`budgeting`, `ledger`, `engine`).
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import budgeting, gates, preemption, turns, updating
from rolloutd.scheduler.choosing import choose
from rolloutd.scheduler.dispatching import dispatch
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.room import Room
from rolloutd.scheduler.roomy import Pass, Roomy
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass, TaskType
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

SHORT_KINDS: Final = tuple(sorted(SHORT_TASKS))
# While control calls are out engines stand still until somebody hears their answers, so the caller is not kept for long.
BATCH_BESIDE_CALLS: Final = 4
LONG_KINDS: Final = tuple(one for one in TaskType if one not in SHORT_TASKS)
# Every set of task types, by the sum of 1 << task type.
TASK_SETS: Final = tuple(
    frozenset(one for one in TaskType if number >> one & 1) for number in range(1 << len(TaskType))
)


def schedule(world: World) -> None:
    """One pass over all pools. Leaves `world.dirty` set when the batch limit cut it short."""
    world.dirty = False
    if world.shutting_down:
        return
    if world.controls and updating.last_calls_out(world):
        _look_again(world, world.last_calls_since + updating.LAST_CALLS_SECONDS)
        return
    batch_id = world.batches + 1
    made = 0
    most = world.config.queue.max_batch_size
    if world.controls:
        most = min(most, BATCH_BESIDE_CALLS)
    pools = [pool for pool, waiting in world.waiting.items() if waiting and pool in world.rooms]
    for pool in pools if len(pools) < 2 else sorted(pools):
        room = world.rooms[pool]
        _keep_back(world, room)
        may_help = preemption.may_help(world, pool) if not room.long else False
        if room.free or may_help:
            made += _fill(world, pool, room, batch_id, most - made)
        else:
            world.gates[_full_gate(world, room)] += 1
    if made:
        world.batches = batch_id


def _keep_back(world: World, room: Room) -> None:
    """Slots for short work are kept back while some was seen lately; else long work may have them all."""
    settings = world.config.queue
    lately = world.now - room.short_seen_at <= settings.reserve_memory_seconds
    room.keep_back(settings.reserved_short_slots if lately else 0)


def _look_again(world: World, at: float) -> None:
    if world.place_at != at:
        world.place_at = at
        world.timers.add(at, TimerKind.PLACE, True)


def _fill(world: World, pool: str, room: Room, batch_id: int, limit: int) -> int:
    blocked: set[tuple[str, RolloutClass, bool]] = set()
    one_pass = Pass(world)
    noted: set[Run] = set()  # whose floors that hold no room were looked for
    per_run: dict[str, int] = {}
    made = 0
    kept = False
    while room.free:
        turn = turns.next_turn(world, pool, blocked, bool(room.long))
        if turn is None:
            if made and kept:
                # What was dispatched may have ended a reason to keep room that stopped others before.
                world.dirty = True
            break
        if made >= limit:
            world.dirty = True
            return made
        run = turn.run
        if run.ledger.has_floors and run not in noted:
            noted.add(run)
            budgeting.note_stalled(world, run)
        if per_run.get(run.run_id, 0) >= batch_limit(world, run):
            world.dirty = True  # the next pass goes on; COLD_START wants small batches and quick results
            gate = Gate.BATCH_LIMIT
        else:
            gate = _place(world, turn, room, batch_id, one_pass)
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
        if run.ledger.has_floors:
            budgeting.note_stalled(world, run)
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
    return max(1, min(world.config.queue.max_batch_size, int(limit + 0.5)))


def _place(world: World, turn: turns.Turn, room: Room, batch_id: int, one_pass: Pass) -> Gate:
    """Dispatch the best pair of this turn; returns OPEN, or the gate that kept everything waiting."""
    run = turn.run
    gate = budgeting.run_gate(world, run, turn.rollout_class)
    if gate is not Gate.OPEN:
        return gate
    tasks, closed = _startable_tasks(world, turn)
    if tasks:
        roomy = one_pass.roomy.get((run, turn.short))
        if roomy is None:
            having = room.free if turn.short else room.long
            roomy = Roomy(world, [engine for engine in having if _usable(world, engine, turn)])
            one_pass.roomy[run, turn.short] = roomy
        none = _kept_back(world, turn, room, roomy)
        if none is not Gate.OPEN:
            closed = none
        else:
            look, closed = choose(world, turn, roomy, tasks, closed, one_pass)
            if look is not None:
                dispatch(world, look, batch_id)
                if look.engine is not None:
                    one_pass.booked(look.engine)
                return Gate.OPEN
    preemption.make_room(world, turn, closed)
    return closed


def _startable_tasks(world: World, turn: turns.Turn) -> tuple[frozenset[TaskType], Gate]:
    """Task types of this turn that the budget lets start, and the gate of one that it does not."""
    run = turn.run
    ledger = run.ledger
    slots = world.run_slots(run)
    chosen = 0
    closed = Gate.ENGINE_SLOTS
    for task_type in SHORT_KINDS if turn.short else LONG_KINDS:
        if ledger.task_queued[task_type]:
            gate = ledger.gate(turn.rollout_class, task_type, slots)
            if gate is Gate.OPEN:
                chosen |= 1 << task_type
            else:
                closed = gate
    return TASK_SETS[chosen], closed


def _kept_back(world: World, turn: turns.Turn, room: Room, roomy: Roomy) -> Gate:
    """OPEN where a slot may go to this turn's work, else why none may."""
    if not roomy.engines:
        return _no_room(world, turn, room)
    waits_for_critical = turn.run.led and not turn.short and turn.rollout_class is not RolloutClass.CRITICAL
    if waits_for_critical and not turns.owed(turn.run, turn):
        free = sum([engine.free_slots(False, room.reserved_short) for engine in roomy.engines])
        if free <= gates.led_members(world, turn.run, turn.pool):
            return Gate.HELD_FOR_LEADER
    return Gate.OPEN


def _no_room(world: World, turn: turns.Turn, room: Room) -> Gate:
    """Why no engine has a slot for this turn."""
    if any(_usable(world, engine, turn) for engine in room.free):
        return Gate.SHORT_RESERVED
    if any(_usable(world, engine, turn) for engine in room.members.values()):
        return Gate.ENGINE_SLOTS
    return Gate.NO_ENGINE


def _usable(world: World, engine: Engine, turn: turns.Turn) -> bool:
    """Whether this engine takes work of the turn's run and pool now, room aside."""
    return engine.is_open(world.now) and world.serves(engine, turn.run, turn.pool, {})
