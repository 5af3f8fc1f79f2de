"""Publications of policy versions: accepted, one after the other, over the engines of one pool, and what is left of them.

Invariants
- Versions of a lineage only grow; publishing the newest again is a retry that touches only engines which do not hold it.
- An engine serves one run's lineage at a time: it belongs to its configured run, else to the first that published to it.
- An engine that comes, comes back or is fenced holds nothing before it acknowledged the lineage's version; from disk it gets it
  by itself.
- Engines of other pools and other runs are not touched.

What this module does not know: what is done with one engine (`updating`).
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import colocation, time_slice, updating, version_change
from rolloutd.scheduler.actions import NoticeKind, PublishEnded, PublishProgress
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import ControlEnded, ControlFailed, WeightsPushed
from rolloutd.scheduler.lineage import MAX_QUEUED_PUBLICATIONS, Lineage
from rolloutd.scheduler.publication import EngineUpdate, Publication
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import CacheHandling, Code, UpdateMode, UpdateState
from rolloutd.scheduler.world import World

SOUND_CACHES: Final = {
    UpdateMode.DRAIN: (CacheHandling.FLUSH, CacheHandling.NAMESPACE, CacheHandling.KEEP),
    UpdateMode.ABORT_AND_RESUME: (CacheHandling.FLUSH, CacheHandling.NAMESPACE, CacheHandling.KEEP),
    # What is computed again would match prefixes of the old weights under its old namespace.
    UpdateMode.RETRACT: (CacheHandling.FLUSH,),
    # A cache can not be flushed under work that stands on it.
    UpdateMode.IN_PLACE: (CacheHandling.NAMESPACE, CacheHandling.KEEP),
}


def publish(world: World, run: Run, update: PolicyUpdate) -> Refusal | None:
    """Accept a publication; what becomes of it is told by PublishProgress and one PublishEnded."""
    refusal = run.refuse_pool(update.pool)
    if refusal is not None:
        return refusal
    lineage = run.lineage(update.pool)
    refusal = _check(world, run, lineage, update)
    if refusal is not None:
        return refusal
    active = lineage.active
    under_way = ([] if active is None else [active.update]) + list(lineage.queue)
    for one in under_way:
        if one.version == update.version:  # on its way: the caller watches it
            return None if one.path == update.path else _other_weights(run, one, "is being published")
    last = lineage.last
    if last is not None and last.version == update.version and last.path and update.path not in ("", last.path):
        if _holders(world, lineage, update.version):  # else no token was ever written by the other weights
            return _other_weights(run, last, "was published")
    if active is None:
        _begin(world, run, lineage, update)
    else:
        lineage.queue.append(update)
    return None


def confirm(world: World, run: Run, event: WeightsPushed) -> Refusal | None:
    """The trainer pushed its weights to engines, or failed to."""
    lineage = run.lineages.get(event.pool)
    publication = lineage.active if lineage is not None else None
    last = lineage.last if lineage is not None else None
    if publication is None and last is not None and last.version == event.version and not last.path:
        return None  # it is over: told again because the answer was lost
    if publication is None or publication.update.version != event.version or publication.update.path:
        message = f"version {event.version} is not being pushed to pool {event.pool!r} of run {run.run_id!r}"
        return Refusal(Code.FAILED_PRECONDITION, "NOT_PUSHING", message)
    wanted = [one for one in publication.updates.values() if event.engine_id in ("", one.engine.engine_id)]
    if not wanted:
        return Refusal(
            Code.NOT_FOUND,
            "ENGINE_NOT_FOUND",
            f"engine_id: {event.engine_id!r} takes no part in the publication of version {event.version}",
        )
    early = [one.engine.engine_id for one in wanted if updating.not_open(world, one)]
    if len(early) == len(wanted):
        who = f"engine {event.engine_id!r} does not wait" if event.engine_id else "no engine waits"
        message = f"{who} for weights yet; push them once its state is PUSHING"
        return Refusal(Code.FAILED_PRECONDITION, "NOT_PUSHING", message)
    for one in wanted:
        updating.pushed(world, one, event.error)
    return None


def answered(world: World, event: ControlEnded | ControlFailed) -> None:
    """A control call came back; one that nobody waits for any more is ignored."""
    engine = world.engines.get(event.engine_id)
    if engine is None or engine.control_id != event.control_id or not event.control_id:
        return
    if engine.memory is not None:
        colocation.answered(world, engine, event)
    elif isinstance(event, ControlEnded):
        updating.answered(world, engine, event)
    else:
        updating.refused(world, engine, event)


def settle(world: World) -> None:
    """After an event: updates that could go on or are over, and with them their publications."""
    for update in list(world.clearing.values()):
        updating.clear(world, update)
    while world.ended_updates or world.returned:
        ended, world.ended_updates = world.ended_updates, []
        returned, world.returned = world.returned, []
        for publication in dict.fromkeys(update.publication for update in ended):
            _go_on(world, publication)
        for engine in returned:
            _memory_is_back(world, engine)
    colocation.go_on(world)


def joined(world: World, engine: Engine) -> None:
    """An engine came, or came back: before it serves a lineage with a published version it has to hold it."""
    label = engine.facts.engine_version
    if engine.update is None and label != engine.label:
        fence(world, engine, f"it reports weights {label!r} after it had acknowledged {engine.label!r}")
    lineage = lineage_of(world, engine)
    for run in world.runs.values():
        mine = run.lineages.get(engine.facts.pool)
        if mine is not None and mine.held:
            version_change.look_at_held(world, run, mine)
    if lineage is None or engine.version == lineage.version:
        return
    engine.quarantine = engine.quarantine or f"it has not acknowledged version {lineage.version} yet"
    engine.note_held()
    _catch_up(world, lineage, engine)


def fence(world: World, engine: Engine, problem: str) -> None:
    """What the engine says of its weights does not fit what it acknowledged: rely on nothing before it acknowledges again."""
    if engine.quarantine:
        return
    engine.quarantine = problem
    engine.note_held()
    world.record("warning", "engine_fenced", engine=engine.engine_id, problem=problem)
    lineage = lineage_of(world, engine)
    if lineage is not None:
        run = world.runs[lineage.run_id]
        version_change.note(world, run, lineage)
        _catch_up(world, lineage, engine)
    world.dirty = True


def left(world: World, engine: Engine, message: str) -> None:
    """An engine is gone for good, or its process is."""
    updating.abandon(world, engine, message)
    world.releasing.pop(engine.engine_id, None)
    world.controls.pop(engine.control_id, None)
    engine.control_id = 0
    engine.memory = None


def forget_run(world: World, run: Run) -> None:
    """An ended run is forgotten: what its engines hold is nobody's version any more."""
    for engine in world.engines.values():
        if engine.owner != run.run_id:
            continue
        if engine.version:
            held = f"version {engine.version} of run {run.run_id!r}, which has ended"
            engine.quarantine = f"it holds {held}: publish to it, or restart it"
        world.index.clear_engine(engine.cache_key)
        engine.change_owner(engine.facts.run_id)
        engine.note_held()
        world.fleet_mark += 1


def orphan(world: World, run: Run, message: str, *, pushed_only: bool) -> None:
    """Nobody will push what this run was about to push, and (unless only that) its queued versions are not wanted any more.

    An engine that waits for a push goes on with what it has, in quarantine, instead of standing still until `push_seconds`.
    """
    for lineage in run.lineages.values():
        dropped = [one for one in lineage.queue if not (pushed_only and one.path)]
        for update in dropped:
            lineage.queue.remove(update)
            _drop(world, run, lineage, update, message)
        publication = lineage.active
        if publication is not None and not publication.update.path:
            publication.orphaned = message
            for one in list(publication.updates.values()):
                updating.orphaned(world, one)


def lineage_of(world: World, engine: Engine) -> Lineage | None:
    """The lineage whose versions an engine holds or is to hold; None where nothing was published for it."""
    pool = engine.facts.pool
    owner = engine.owner
    if not owner:
        owners = {one.owner for one in world.engines.values() if one.facts.pool == pool and one.owner}
        owners |= {run.run_id for run in world.runs.values() if run.has_published(pool) and not run.ended}
        if len(owners) != 1:
            return None
        owner = owners.pop()
    run = world.runs.get(owner)
    lineage = run.lineages.get(pool) if run is not None else None
    if lineage is None or not lineage.version:
        return None
    _hand_over(world, engine, owner)
    return lineage


# ----------------------------------------------------------------------------------------------------------------------


def _check(world: World, run: Run, lineage: Lineage, update: PolicyUpdate) -> Refusal | None:
    if update.version < 1:
        return invalid("version", f"is {update.version}; published versions start at 1, 0 is what engines came with")
    if update.engines_at_once < 0:
        return invalid("engines_at_once", f"is {update.engines_at_once}; must be 0 (all) or more")
    if run.ended:
        message = f"run {run.run_id!r} has ended; configure it again or use another run"
        return Refusal(Code.FAILED_PRECONDITION, "RUN_ENDED", message)
    sound = SOUND_CACHES[update.mode]
    if update.cache not in sound:
        names = " or ".join(one.name for one in sound)
        return invalid("cache", f"is {update.cache.name}, which mode {update.mode.name} can not do safely; use {names}")
    if update.version < lineage.newest_asked:
        return Refusal(
            Code.FAILED_PRECONDITION,
            "VERSION_BACKWARDS",
            f"version: {update.version} is below {lineage.newest_asked}, the newest of run {run.run_id!r} in pool "
            f"{update.pool!r}; versions only grow",
            (("version", "goes backwards"),),
        )
    if len(lineage.queue) >= MAX_QUEUED_PUBLICATIONS:
        return Refusal(
            Code.RESOURCE_EXHAUSTED,
            "TOO_MANY_PUBLICATIONS",
            f"{len(lineage.queue)} versions of run {run.run_id!r} wait to be published already",
            retry_after_seconds=1.0,
        )
    in_pool = [one for one in world.engines.values() if one.facts.pool == update.pool and not one.removed]
    if in_pool and not any(_may_take(world, run, one) for one in in_pool):
        owners = sorted({one.owner for one in in_pool})
        return Refusal(
            Code.FAILED_PRECONDITION,
            "ENGINES_OWNED",
            f"every engine of pool {update.pool!r} holds the weights of another run ({', '.join(owners)})",
        )
    return None


def _holders(world: World, lineage: Lineage, version: int) -> tuple[str, ...]:
    """Engines that acknowledged this version and may be relied on, by id."""
    return tuple(
        sorted(
            one.engine_id
            for one in world.engines.values()
            if (one.owner, one.facts.pool) == lineage.owner
            and one.version == version
            and not one.quarantine
            and not one.removed
        )
    )


def _other_weights(run: Run, before: PolicyUpdate, done: str) -> Refusal:
    source = f"from {before.path!r}" if before.path else "with weights that the trainer pushes"
    return Refusal(
        Code.ALREADY_EXISTS,
        "OTHER_WEIGHTS",
        f"version {before.version} of run {run.run_id!r} in pool {before.pool!r} {done} {source} already; one version has one "
        "set of weights: give these a higher one",
    )


def _drop(world: World, run: Run, lineage: Lineage, update: PolicyUpdate, message: str) -> None:
    """A publication ends before its turn; no engine was touched."""
    engines = sorted(
        one.engine_id for one in world.engines.values() if one.owner == run.run_id and one.facts.pool == lineage.pool
    )
    for engine_id in engines:
        world.emit(PublishProgress(run.run_id, lineage.pool, update.version, engine_id, UpdateState.FAILED, message, 0))
    world.emit(PublishEnded(run.run_id, lineage.pool, update.version, (), tuple(engines)))
    world.record(
        "warning", "publication_dropped", run=run.run_id, pool=lineage.pool, version=update.version, reason=message
    )


def _may_take(world: World, run: Run, engine: Engine) -> bool:
    """Whether this run may give an engine its weights: its own, nobody's, or one whose run has ended."""
    if engine.facts.run_id:
        return engine.facts.run_id == run.run_id
    if engine.update is not None and engine.update.publication.run is not run:
        return False  # it is still being updated for a run that has ended
    owner = world.runs.get(engine.owner)
    return owner is None or owner is run or owner.ended


def _begin(world: World, run: Run, lineage: Lineage, update: PolicyUpdate) -> None:
    """Its turn: the version is the newest from now on, and engines that do not hold it get it."""
    publication = Publication(run, lineage, update, world.now)
    lineage.active = publication
    time_slice.begin_publication(world, lineage, run, update.mode)
    lineage.version = update.version
    lineage.last = update
    run.published.add(update.pool)
    world.fleet_mark += 1  # engines that are nobody's do not serve it any more
    for engine in sorted(world.engines.values(), key=lambda one: one.engine_id):
        if engine.facts.pool != update.pool or engine.removed or not _may_take(world, run, engine):
            continue
        _hand_over(world, engine, run.run_id)
        if engine.version != update.version or engine.quarantine:
            _take_part(publication, engine)
    world.record(
        "info",
        "publishing",
        run=run.run_id,
        pool=lineage.pool,
        version=update.version,
        mode=update.mode.name.lower(),
        engines=len(publication.updates),
    )
    for one in publication.updates.values():
        updating.tell(world, one, "")
    _go_on(world, publication)
    version_change.note(world, run, lineage)


def _hand_over(world: World, engine: Engine, run_id: str) -> None:
    """An engine serves this run's versions from now on."""
    if engine.owner == run_id:
        return
    if engine.owner:  # this run may have credit there from before it was the other's
        world.index.clear_engine(engine.cache_key)
    engine.change_owner(run_id)
    world.fleet_mark += 1


def _take_part(publication: Publication, engine: Engine) -> None:
    update = EngineUpdate(publication, engine)
    publication.updates[engine.engine_id] = update
    engine.update = update


def _memory_is_back(world: World, engine: Engine) -> None:
    """An update that waited for it may start; one that lost its weights gets them again."""
    lineage = lineage_of(world, engine)
    if lineage is None:
        return
    if engine.update is not None:
        _go_on(world, engine.update.publication)
    elif engine.quarantine:
        _catch_up(world, lineage, engine)


def _catch_up(world: World, lineage: Lineage, engine: Engine) -> None:
    """Give one engine the newest version, where the engines can read it by themselves."""
    run = world.runs[lineage.run_id]
    publication = lineage.active
    if engine.update is not None:
        return
    if publication is None:
        last = lineage.last
        if last is None or not last.path:
            engine.quarantine = (
                f"{engine.quarantine}; version {lineage.version} was pushed by the trainer: publish it again"
            )
            engine.note_held()
            return
        publication = lineage.active = Publication(run, lineage, last, world.now)
    elif engine.engine_id in publication.updates and publication.updates[engine.engine_id].engine is engine:
        return  # it failed in this one: no second try before the next
    _take_part(publication, engine)
    _go_on(world, publication)


def _go_on(world: World, publication: Publication) -> None:
    """Start those whose turn has come; the end, when all are over."""
    lineage = publication.lineage
    if lineage.active is not publication:
        return
    at_once = publication.update.engines_at_once
    updates = list(publication.updates.values())
    busy = sum(not one.over and not one.waiting for one in updates)
    for one in updates:
        if one.waiting and one.engine.memory is not None and one.engine.memory.lost:
            updating.abandon(world, one.engine, one.engine.memory.lost)
        elif one.waiting and (not at_once or busy < at_once) and one.engine.memory is None:
            busy += 1
            updating.start(world, one)
    if not all(one.over for one in updates):
        return
    failed = tuple(one.engine.engine_id for one in updates if one.state is UpdateState.FAILED)
    run = publication.run
    version = publication.update.version
    updated = _holders(world, lineage, version)
    lineage.active = None
    world.emit(PublishEnded(run.run_id, lineage.pool, version, updated, failed))
    world.record(
        "warning" if failed else "info",
        "published",
        run=run.run_id,
        pool=lineage.pool,
        version=version,
        updated=len(updated),
        failed=list(failed),
        seconds=world.now - publication.accepted_at,
    )
    trouble = f"; failed on {', '.join(failed)}" if failed else ""
    world.notify(
        run,
        NoticeKind.VERSION_PUBLISHED,
        f"version {version} of pool {lineage.pool!r} is on {len(updated)} engines{trouble}",
        world.now - publication.accepted_at,
    )
    if lineage.queue:
        _begin(world, run, lineage, lineage.queue.popleft())
        return
    colocation.follow(world, run)
    for engine in list(world.engines.values()):  # came back while this one was under way
        late = engine.owner == run.run_id and engine.facts.pool == lineage.pool and engine.version != lineage.version
        if late and engine.engine_id not in publication.updates and not engine.removed:
            _catch_up(world, lineage, engine)
