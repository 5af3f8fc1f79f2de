"""Engines' reports of their KV caches: whose the blocks are, then on to the mirror.

Invariants
- Blocks stored under the salt that an engine's new work carries belong to the version that it holds now. Those of another
  salt are of another version and earn nothing.
- Where the engine kept its cache over a publication, a report that comes late would be taken for the new version's; there
  reports only take away.
- Where several runs use the engine, it does not say whose prompt it stored; there, too, reports only take away.

What this module does not know: how reports arrive.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import KvCacheChanged
from rolloutd.scheduler.index_base import Namespace
from rolloutd.scheduler.kv_changes import KvCleared, KvUnknown
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.world import World

# Blocks recorded per engine, in multiples of its KV capacity: device, host tier (SGLang: twice that by default), spare.
CAPACITIES: Final = 4
MOST_BLOCKS: Final = 1 << 20  # of an engine that does not say its capacity


def changed(world: World, event: KvCacheChanged) -> None:
    """Take in one batch of reports. Those of a process that is gone are passed over."""
    engine = world.engines.get(event.engine_id)
    if engine is None or engine.facts.incarnation != event.incarnation:
        return
    capacity_tokens = engine.facts.kv_capacity_tokens
    most_blocks = CAPACITIES * capacity_tokens // engine.facts.page_tokens if capacity_tokens else MOST_BLOCKS
    world.mirror.follow(engine.cache_key, most_blocks)
    owners = _Owners(world, engine)
    for change in event.changes:
        world.mirror.apply(engine.cache_key, change, owners)
        if isinstance(change, KvUnknown):
            world.record("info", "kv_events_reset", engine=engine.engine_id, reason=change.reason)
        if isinstance(change, KvCleared | KvUnknown):
            for lineage in owners.lineages():
                lineage.mark += 1  # hits that were looked up before count no more


class _Owners:
    """Of one engine's blocks, while one event is handled."""

    def __init__(self, world: World, engine: Engine) -> None:
        self._world = world
        self._engine = engine
        self._lineages: list[Lineage] | None = None

    def earning(self, salt: str, adapter: str) -> Namespace | None:
        engine = self._engine
        lineages = self.lineages()
        if adapter or salt != engine.salt or engine.cache_since != engine.version or len(lineages) != 1:
            return None
        return lineages[0].namespace(engine.version)

    def losing(self, salt: str, adapter: str) -> tuple[Namespace, ...]:
        if adapter or salt != self._engine.salt:
            return ()
        return tuple(namespace for lineage in self.lineages() for namespace, _ in lineage.lookups)

    def lineages(self) -> list[Lineage]:
        """Of the runs that use the engine: its owner, else those at work there, or with prompts in its cache, or any."""
        if self._lineages is None:
            self._lineages = self._find()
        return self._lineages

    def _find(self) -> list[Lineage]:
        world, engine = self._world, self._engine
        pool = engine.facts.pool
        if engine.owner:
            owner = world.runs.get(engine.owner)
            return [owner.lineage(pool)] if owner is not None else []
        at_work = {attempt.rollout.run.run_id for attempt in engine.attempts.values()}
        known = [run for run in world.runs.values() if pool in run.lineages]
        using = [
            run.lineage(pool)
            for run in known
            if run.run_id in at_work
            or any(
                world.index.credited_tokens(namespace, engine.cache_key) for namespace, _ in run.lineage(pool).lookups
            )
        ]
        return using or [run.lineage(pool) for run in known if not run.ended]
