"""The integrity check of policy versions: see `audit`. Raises AssertionError naming what is off."""

from __future__ import annotations

from rolloutd.scheduler.colocation import MemoryState
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Gate, RolloutState, UpdateState
from rolloutd.scheduler.versions import ANYTHING
from rolloutd.scheduler.world import World


def check(world: World) -> None:
    assert not world.ended_updates and not world.returned, "something that ended was not settled"
    out = {engine.control_id for engine in world.engines.values() if engine.control_id}
    assert set(world.controls) == out, f"calls out: counted {set(world.controls)}, derived {out}"
    for engine in world.engines.values():
        _check_engine(world, engine.engine_id)
    for run in world.runs.values():
        _check_run(world, run)


def _check_engine(world: World, engine_id: str) -> None:
    engine = world.engines[engine_id]
    update = engine.update
    if update is not None:
        publication = update.publication
        assert publication.updates.get(engine_id) is update, f"{engine_id}: its update is not in its publication"
        assert publication.lineage.active is publication, f"{engine_id}: its publication is over"
        assert not update.over, f"{engine_id}: its update is over"
        if update.waiting:
            assert not engine.control_id or engine.memory is not None, f"{engine_id}: a call before its turn"
        else:
            moved = update.timer is not None or engine.control_id or engine.attempts  # which have timers of their own
            assert moved, f"{engine_id}: nothing would ever move its update"
            assert engine.memory is None, f"{engine_id}: an update while the trainer has its memory"
        clearing = update.state is UpdateState.CLEARING
        assert not clearing or engine_id in world.clearing, f"{engine_id}: nobody watches it clear"
    memory = engine.memory
    if memory is not None:
        releasing = memory.state is MemoryState.CLEARING
        assert releasing == (engine_id in world.releasing), f"{engine_id}: nobody watches it release"
        assert releasing or not engine.attempts, f"{engine_id}: work runs where the trainer has the memory"
    held = engine.held_because
    engine.note_held()
    assert engine.held_because == held, f"{engine_id}: held because {held!r}, derived {engine.held_because!r}"
    if engine.owner and engine.version and engine.owner in world.runs:
        newest = world.runs[engine.owner].newest_version(engine.facts.pool)
        assert engine.version <= newest, f"{engine_id} holds {engine.version}, the newest is {newest}"


def _check_run(world: World, run: Run) -> None:
    bound = {
        rollout.rollout_id
        for rollout in run.rollouts.values()
        if rollout.state is RolloutState.QUEUED
        and rollout.requirement is not ANYTHING
        and (rollout.pieces or rollout.requirement.exact_version is not None)
    }
    assert set(run.bound) == bound, f"{run.run_id} bound: counted {set(run.bound)}, derived {bound}"
    waiting = {entry for entry in run.entries.values() if entry.held_gate is Gate.POLICY_VERSION}
    held = {entry for lineage in run.lineages.values() for entry in lineage.held}
    assert held == waiting, f"{run.run_id}: {len(held)} entries wait for a version, {len(waiting)} are held for one"
    for rollout in run.rollouts.values():
        for piece in rollout.pieces:
            assert len(piece.versions) == len(piece.version_spans), f"{rollout.rollout_id}: spans without a version"
        of = [version for piece in rollout.pieces for version in piece.versions]
        assert of == sorted(of), f"{rollout.rollout_id}: versions go back: {of}"
    window = run.window
    kept_out = {entry for entry in run.entries.values() if entry.held_gate is Gate.STALENESS}
    assert kept_out == (set(window.waiting) if window is not None else set()), f"{run.run_id}: who waits to be let in"
    if window is not None:
        assert window.outstanding == sum(window.left.values()), f"{run.run_id}: samples on their way"
        assert all(left > 0 for left in window.left.values()), f"{run.run_id}: an empty reservation"
        assert window.left.keys() == window.open_to.keys(), f"{run.run_id}: reservations"
