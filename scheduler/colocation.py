"""Engine memory that a colocated trainer gets while it trains, and gives back.

    (serving) -> CLEARING -> RELEASING -> RELEASED -> RETURNING -> (serving)
                                  \\-> LOST <-/

Invariants
- An engine is asked to release only when nothing of ours runs there and it is not being updated, and to take back only what it
  released: anything else kills its process. So does either call where another process answers: a lost engine is not asked.
  Where nobody knows any more what it has, nothing is asked of that process again.
- What it had cached is gone with its memory, and is not credited any more.
- Only engines that belong to the run are touched.

What this module does not know: why the trainer needs the memory.
"""

from __future__ import annotations

import enum
from typing import Final

from rolloutd.scheduler import lifecycle, updating
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import ControlEnded, ControlFailed
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, FaultKind, ReleaseMemory, RolloutState, TrainerState, Verb
from rolloutd.scheduler.world import World

TAGS: Final = {
    ReleaseMemory.KV_CACHE: ("kv_cache",),
    ReleaseMemory.KV_CACHE_AND_WEIGHTS: ("kv_cache", "weights"),
}
# The engine did not do what it was asked for.
NOT_TAKEN: Final = frozenset({FaultKind.REFUSED, FaultKind.BUSY, FaultKind.UNREACHED})


class MemoryState(enum.IntEnum):
    CLEARING = 0  # work leaves
    RELEASING = 1
    RELEASED = 2
    RETURNING = 3
    LOST = 4  # nobody knows what it has: only another process of it serves again


class Memory:
    """What an engine gives to the trainer, and how far that is."""

    __slots__ = ("lost", "state", "tags")

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tags = tags
        self.state = MemoryState.CLEARING
        self.lost = ""  # why it is


def follow(world: World, run: Run) -> None:
    """Do what the trainer's state asks for; call after it, the run's settings, or an engine's update changed."""
    training = run.report.trainer_state is TrainerState.TRAINING and not run.ended
    tags = TAGS.get(run.settings.release_memory, ()) if training else ()
    for engine in list(world.engines.values()):
        if engine.owner != run.run_id or engine.removed:
            continue
        memory = engine.memory
        if memory is None and tags and engine.update is None and not engine.quarantine:
            _give(world, engine, tags)
        elif memory is not None and not tags:
            if memory.state is MemoryState.CLEARING:
                _back(world, engine)
            elif memory.state is MemoryState.RELEASED and not engine.lost:  # else another process may answer: `retry`
                memory.state = MemoryState.RETURNING
                updating.call(world, engine, Verb.RESUME_MEMORY, tags=memory.tags)


def has_memory_of(world: World, run: Run) -> bool:
    """Whether a run still has to give memory back."""
    return any(
        one.owner == run.run_id and one.memory is not None and not one.memory.lost for one in world.engines.values()
    )


def retry(world: World) -> None:
    """Call now and then: memory that was not taken back although the trainer does not need it."""
    waiting = {one.owner for one in world.engines.values() if one.memory and one.memory.state is MemoryState.RELEASED}
    for run_id in sorted(waiting):
        owner = world.runs.get(run_id)
        if owner is not None:
            follow(world, owner)


def go_on(world: World) -> None:
    """After an event: engines that have nothing running any more release."""
    for engine in list(world.releasing.values()):
        memory = engine.memory
        if memory is None or engine.attempts or engine.lost:
            continue
        world.releasing.pop(engine.engine_id, None)
        memory.state = MemoryState.RELEASING
        updating.call(world, engine, Verb.RELEASE_MEMORY, tags=memory.tags)


def answered(world: World, engine: Engine, event: ControlEnded | ControlFailed) -> None:
    """The engine released its memory, or has it back; or failed to."""
    memory = engine.memory
    del world.controls[event.control_id]
    engine.control_id = 0
    if memory is None:
        return
    if isinstance(event, ControlFailed):
        world.record("warning", "memory_call_failed", engine=engine.engine_id, error=event.message)
        engine.last_error = event.message
        if event.fault not in NOT_TAKEN or (event.fault is FaultKind.REFUSED and memory.state is MemoryState.RETURNING):
            memory.state = MemoryState.LOST
            memory.lost = f"nobody knows whether it has its memory: {event.message}; restart it"
            engine.note_held()
            world.returned.append(engine)  # a publication does not wait for it
        elif memory.state is MemoryState.RELEASING:
            _back(world, engine)
        else:
            memory.state = MemoryState.RELEASED  # `retry` asks again
        return
    if memory.state is MemoryState.RELEASING:
        memory.state = MemoryState.RELEASED
        world.index.clear_engine(engine.cache_key)
        for run in world.runs.values():
            for lineage in run.lineages.values():
                lineage.mark += 1
    else:
        if "weights" in memory.tags:
            engine.quarantine = "its weights were given up with its memory: publish them again"
        _back(world, engine)
    owner = world.runs.get(engine.owner)
    if owner is not None:
        follow(world, owner)


def _give(world: World, engine: Engine, tags: tuple[str, ...]) -> None:
    engine.memory = Memory(tags)
    engine.note_held()
    world.releasing[engine.engine_id] = engine
    for attempt in list(engine.attempts.values()):
        if attempt.rollout.state is not RolloutState.ABORTING:
            lifecycle.abort(world, attempt.rollout, AbortReason.MEMORY, "the trainer needs its engine's memory")


def _back(world: World, engine: Engine) -> None:
    world.releasing.pop(engine.engine_id, None)
    engine.memory = None
    engine.note_held()
    world.returned.append(engine)
    world.dirty = True
