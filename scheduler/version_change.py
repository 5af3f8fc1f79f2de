"""What follows when an engine holds another policy version, or a version becomes the newest one.

Invariants
- Stale prefixes match nothing from that moment on.
- However many wait, one event looks at a bounded number of them.
- Queued rollouts whose kept tokens are of no use any more start again; those whose exact version is gone end; those that waited
  for a version look again.

What this module does not know: why versions changed.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from rolloutd.scheduler import lifecycle, queueing, versions
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Code, Outcome
from rolloutd.scheduler.world import World

MOST_AT_ONCE: Final = 256  # rollouts, and as many entries, looked at in one event: a few milliseconds


def note(world: World, run: Run, lineage: Lineage) -> None:
    """Call after the newest version, an engine's version, its quarantine or its turn changed."""
    engines = [
        one
        for one in world.engines.values()
        if one.owner == run.run_id and one.facts.pool == lineage.pool and not one.removed
    ]
    ttl_versions = prefix_ttl_versions(world, run)
    lineage.note_engines(engines, ttl_versions)
    serving = [one.version for one in engines if one.keeps_version]
    world.index.advance_version(lineage.owner, min(serving, default=lineage.version), ttl_versions)
    for rollout in run.bound.values():
        if rollout.spec.pool == lineage.pool:
            lineage.unseen_rollouts[rollout] = None
    look_at_held(world, run, lineage)
    world.dirty = True


def look_at_held(world: World, run: Run, lineage: Lineage) -> None:
    """Those that wait for a version look again: some now, the rest with the next Ticks."""
    for entry in lineage.held:
        lineage.unseen_entries[entry] = None  # one that is there already keeps its place
    world.unseen[lineage] = run
    _look_on(world, run, lineage)


def go_on(world: World) -> None:
    """With each Tick: those that are still to be looked at after a change of version."""
    for lineage, run in list(world.unseen.items()):
        _look_on(world, run, lineage)


def _look_on(world: World, run: Run, lineage: Lineage) -> None:
    """Look at up to `MOST_AT_ONCE` of those that were here when versions changed. Until all were seen, none of the lineage's
    work that depends on versions starts.
    """
    held: dict[int, bool] = {}  # older exact version -> whether an engine still holds it
    for rollout in list(islice(lineage.unseen_rollouts, MOST_AT_ONCE)):
        del lineage.unseen_rollouts[rollout]
        if run.bound.get(rollout.rollout_id) is rollout:
            _look_at(world, rollout, lineage, held)
    if not lineage.unseen_rollouts:
        for entry in list(islice(lineage.unseen_entries, MOST_AT_ONCE)):
            del lineage.unseen_entries[entry]
            if entry in lineage.held:
                queueing.wake(world, entry)
    if not lineage.unseen:
        world.unseen.pop(lineage, None)
        world.dirty = True


def prefix_ttl_versions(world: World, run: Run) -> int:
    """How many versions old a prefix may be and still count, on engines that kept their cache."""
    own = run.settings.prefix_ttl_versions
    if own is not None:
        return own
    policy = world.config.policy
    return round(run.phase.between(policy.cold_start_prefix_ttl_versions, policy.stable_prefix_ttl_versions))


def _look_at(world: World, rollout: Rollout, lineage: Lineage, held: dict[int, bool]) -> None:
    exact = rollout.requirement.exact_version
    if exact is not None and exact < lineage.version and exact not in held:
        held[exact] = versions.held_somewhere(world, lineage, exact)
    if exact is not None and exact < lineage.version and not held[exact]:
        error = Refusal(
            Code.FAILED_PRECONDITION,
            "POLICY_VERSION_GONE",
            f"rollout {rollout.rollout_id!r} asked for exactly version {exact}; every engine of pool {lineage.pool!r} has left "
            f"it, the newest is {lineage.version}",
        )
        lifecycle.finish(world, rollout, Outcome.VERSION_GONE, error)
    elif rollout.pieces and versions.must_restart(world, rollout):
        lifecycle.restart(world, rollout, f"version {lineage.version} came")
