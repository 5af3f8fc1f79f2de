"""What follows when an engine holds another policy version, or a version becomes the newest one.

Invariants
- Stale prefixes match nothing from that moment on.
- Queued rollouts whose kept tokens are of no use any more start again; those whose exact version is gone end; those that waited
  for a version look again.

What this module does not know: why versions changed.
"""

from __future__ import annotations

from rolloutd.scheduler import lifecycle, queueing, versions
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Code, Outcome
from rolloutd.scheduler.world import World


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
    held: dict[int, bool] = {}  # older exact version -> whether an engine still holds it
    for rollout in list(run.bound.values()):
        if rollout.spec.pool == lineage.pool and rollout.rollout_id in run.bound:
            _look_at(world, rollout, lineage, held)
    for entry in list(lineage.held):
        queueing.wake(world, entry)
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
