"""One engine on its way to another policy version, one control call at a time.

    WAITING -> CLEARING -> PAUSING -> FLUSHING -> LOADING  -> VERIFYING (-> NAMING -> VERIFYING) -> RESUMING -> UPDATED
                                             \\-> PUSHING -/

Invariants
- Work that must not see the new weights has left before they come; everything else stands still while they do.
- A refused flush repeats the flush, never the weights.
- A failure before the weights changed leaves the engine as it was, running and in quarantine. After one that may have changed
  them, nothing of ours runs there before it generates again, and it stays in quarantine until a whole update succeeds.
- An answer to a call that is not the one that is out is ignored.

What this module does not know: which engines take part and in which order (`publishing`), and how calls are made.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import lifecycle, version_change, versions
from rolloutd.scheduler.actions import Control, PublishProgress
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import ControlEnded, ControlFailed
from rolloutd.scheduler.publication import EngineUpdate
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.states import (
    AbortReason,
    CacheHandling,
    FaultKind,
    PauseMode,
    RolloutState,
    UpdateMode,
    UpdateState,
    Verb,
)
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

_PAUSES = {
    UpdateMode.DRAIN: PauseMode.RETRACT,  # nothing of ours runs any more; what others run must not see the weights change
    UpdateMode.ABORT_AND_RESUME: PauseMode.ABORT,
    UpdateMode.RETRACT: PauseMode.RETRACT,
    UpdateMode.IN_PLACE: PauseMode.IN_PLACE,
}
# Answered at once, and then the engine works again. Work that another engine could get waits for them, but not for long: sending a
# burst of it keeps the caller from hearing the answers, while all engines of a publication come this far at the same time.
LAST_CALLS: Final = frozenset({Verb.VERIFY, Verb.NAME, Verb.RESUME})
LAST_CALLS_SECONDS: Final = 0.03
LAST_CALLS_PAUSE_SECONDS: Final = 0.5  # not again before
MOST_RESUMES: Final = 5  # tries to let an engine generate again
UNTOUCHED: Final = frozenset(
    {UpdateState.CLEARING, UpdateState.PAUSING, UpdateState.FLUSHING}
)  # the old weights are whole


def start(world: World, update: EngineUpdate) -> None:
    """The engine's turn: nothing new goes there, and what must not see the new weights leaves."""
    engine = update.engine
    world.timers.cancel(update.timer)
    update.timer = world.timers.add(world.now + world.config.publish.clear_seconds, TimerKind.UPDATE, update)
    _enter(world, update, UpdateState.CLEARING)
    if update.publication.update.mode is not UpdateMode.DRAIN:
        for attempt in list(engine.attempts.values()):
            if _must_leave(update, attempt):
                _interrupt(world, update, attempt)
    world.clearing[engine.engine_id] = update
    clear(world, update)


def clear(world: World, update: EngineUpdate) -> None:
    """Go on once nothing runs there that has to leave first."""
    engine = update.engine
    if update.state is UpdateState.PAUSING:
        if not engine.attempts and not engine.control_id:
            world.clearing.pop(engine.engine_id, None)
            _flush(world, update)
        return
    if any(_blocks(update, attempt) for attempt in engine.attempts.values()):
        return
    world.clearing.pop(engine.engine_id, None)
    if update.failure:
        _resume(world, update)
        return
    publication = update.publication
    if publication.update.mode is UpdateMode.ABORT_AND_RESUME:
        for attempt in list(engine.attempts.values()):
            if attempt.rollout.state is not RolloutState.ABORTING:
                _mark(world, update, attempt)  # the pause itself stops it
    _enter(world, update, UpdateState.PAUSING)
    _call(world, update, Verb.PAUSE)


def due(world: World, update: EngineUpdate) -> None:
    """Its timer fired: repeat a call, stop waiting for work to end, or give up."""
    update.timer = None
    engine = update.engine
    if update.over or engine.update is not update:
        return
    if update.retry is not None:
        verb, update.retry = update.retry, None
        _call(world, update, verb)
    elif update.state is UpdateState.CLEARING:
        for attempt in list(engine.attempts.values()):
            if _blocks(update, attempt) and attempt.rollout.state is not RolloutState.ABORTING:
                _interrupt(world, update, attempt)
    elif update.state is UpdateState.PUSHING and not engine.control_id:
        _fail(world, update, f"the trainer did not confirm its weights within {world.config.publish.push_seconds:g} s")
    else:
        world.controls.pop(engine.control_id, None)  # whatever it still answers comes too late
        engine.control_id = 0
        _fail(world, update, f"no answer within {world.config.publish.call_seconds:g} s")


def not_open(world: World, update: EngineUpdate) -> bool:
    """Whether it is too early to push weights there."""
    verb = world.controls.get(update.engine.control_id)
    opens = verb is Verb.BEGIN or (verb is Verb.END and update.end_first)
    return update.waiting or update.state in UNTOUCHED or opens


def pushed(world: World, update: EngineUpdate, error: str) -> None:
    """The trainer says that its weights are there, or why they are not."""
    if update.state is not UpdateState.PUSHING or update.engine.control_id:
        return
    if error:
        _fail(world, update, f"the trainer could not push its weights: {error}")
    else:
        _call(world, update, Verb.END)


def orphaned(world: World, update: EngineUpdate) -> None:
    """Nobody will push its weights any more; one that is on its way to be opened for them stops when its call has ended."""
    if update.waiting:
        _over(world, update, UpdateState.FAILED, update.publication.orphaned)
    elif update.state is UpdateState.CLEARING and not update.failure:
        _fail(world, update, update.publication.orphaned, untouched=True)
    elif update.state is UpdateState.PUSHING and not update.engine.control_id:
        _fail(world, update, update.publication.orphaned)


def answered(world: World, engine: Engine, event: ControlEnded) -> None:
    """The call that was out succeeded."""
    update = engine.update
    if update is None:
        return
    verb, engine.control_id = world.controls.pop(event.control_id), 0
    match verb:
        case Verb.PAUSE:
            update.paused = True
            if update.publication.update.mode is UpdateMode.ABORT_AND_RESUME and engine.attempts:
                _clear_rest(world, update)
            else:
                _flush(world, update)
        case Verb.FLUSH if not event.flushed:
            _repeat_flush(world, update)
        case Verb.FLUSH:
            _change(world, update)
        case Verb.BEGIN if update.publication.orphaned:
            _fail(world, update, update.publication.orphaned)
        case Verb.BEGIN:
            _arm(world, update, world.config.publish.push_seconds)
            tell(world, update, "push the weights now, then confirm")
        case Verb.LOAD | Verb.NAME:
            _verify(world, update)
        case Verb.END if update.end_first:
            update.end_first = False
            _call(world, update, Verb.BEGIN)
        case Verb.END:
            _verify(world, update)
        case Verb.VERIFY:
            _verified(world, update, event.label)
        case Verb.RESUME:
            _resumed(world, update)


def refused(world: World, engine: Engine, event: ControlFailed) -> None:
    """The call that was out failed."""
    update = engine.update
    if update is None:
        return
    verb, engine.control_id = world.controls.pop(event.control_id), 0
    engine.last_error = event.message
    match verb:
        case Verb.FLUSH:
            _repeat_flush(world, update, event.message)
        case Verb.RESUME:
            update.tries += 1
            if update.tries < MOST_RESUMES:
                update.retry = Verb.RESUME
                _arm(world, update, world.config.publish.retry_seconds)
            else:
                engine.quarantine = f"it does not generate again: {event.message}"
                _over(world, update, UpdateState.FAILED, update.failure or engine.quarantine)
        case Verb.BEGIN if event.fault is FaultKind.REFUSED and not update.end_first and update.tries == 0:
            update.tries = 1
            update.end_first = True  # a session may have been left open by a publication that failed
            _call(world, update, Verb.END)
        case Verb.LOAD if event.fault is FaultKind.REFUSED:
            _fail(world, update, event.message, untouched=True)  # the engine says that it kept the old weights
        case Verb.BEGIN:
            _fail(world, update, event.message, untouched=True)
        case Verb.END if update.end_first:
            _fail(world, update, event.message, untouched=True)
        case _:
            _fail(world, update, event.message)


def abandon(world: World, engine: Engine, message: str) -> None:
    """The engine is gone: nothing can be done there any more."""
    update = engine.update
    if update is not None:
        _over(world, update, UpdateState.FAILED, message)


# steps -----------------------------------------------------------------------------------------------------------------


def _clear_rest(world: World, update: EngineUpdate) -> None:
    """What had not reached the engine when it was paused waits at its gate, where the pause does not stop it."""
    engine = update.engine
    for attempt in engine.attempts.values():
        lifecycle.send_abort(world, attempt)
    world.clearing[engine.engine_id] = update


def _flush(world: World, update: EngineUpdate) -> None:
    if update.publication.update.cache is not CacheHandling.FLUSH:
        _change(world, update)
        return
    update.tries = 0
    _enter(world, update, UpdateState.FLUSHING)
    _call(world, update, Verb.FLUSH)


def _change(world: World, update: EngineUpdate) -> None:
    """Everything stands still and no old KV can be matched: bring the weights."""
    if update.publication.update.path:
        _enter(world, update, UpdateState.LOADING)
        _call(world, update, Verb.LOAD)
    elif update.publication.orphaned:
        _fail(world, update, update.publication.orphaned, untouched=True)
    else:
        update.tries = 0
        update.state = UpdateState.PUSHING  # told once the engine is open for them
        update.engine.note_held()
        _call(world, update, Verb.BEGIN)


def _repeat_flush(world: World, update: EngineUpdate, why: str = "work is still in flight there") -> None:
    settings = world.config.publish
    update.tries += 1
    if update.tries >= settings.flush_tries:
        _fail(world, update, f"the cache could not be flushed in {update.tries} tries: {why}")
        return
    update.retry = Verb.FLUSH
    _arm(world, update, settings.retry_seconds)


def _name(world: World, update: EngineUpdate) -> None:
    update.named = True
    _enter(world, update, UpdateState.NAMING)
    _call(world, update, Verb.NAME)


def _verify(world: World, update: EngineUpdate) -> None:
    _enter(world, update, UpdateState.VERIFYING)
    _call(world, update, Verb.VERIFY)


def _verified(world: World, update: EngineUpdate, label: str) -> None:
    publication = update.publication
    if label != publication.label:
        if (
            update.named or publication.update.path
        ):  # a load from disk gives the label itself: without it, it did not happen
            _fail(world, update, f"it says that it holds weights {label!r}, not {publication.label!r}")
        else:
            _name(world, update)
        return
    engine = update.engine
    version = publication.update.version
    if publication.update.cache is CacheHandling.NAMESPACE:
        engine.salt = world.fresh_salt(publication.label)
    if publication.update.cache is not CacheHandling.KEEP:
        engine.cache_since = version
    engine.acknowledge(version, label)
    mode = publication.update.mode
    for attempt in engine.attempts.values():
        if mode is UpdateMode.RETRACT:
            attempt.kv_version = version  # computed again from its prompt
        elif publication.update.cache is not CacheHandling.KEEP:
            attempt.kv_version = None  # of both, in a namespace that nobody looks into any more
    version_change.note(world, publication.run, publication.lineage)
    _resume(world, update)


def _resume(world: World, update: EngineUpdate) -> None:
    if not update.paused:
        _resumed(world, update)
        return
    update.tries = 0
    _enter(world, update, UpdateState.RESUMING)
    _call(world, update, Verb.RESUME)


def _resumed(world: World, update: EngineUpdate) -> None:
    engine = update.engine
    update.paused = False
    engine.ready = True
    engine.resumed_at = engine.batch_since = world.now
    for attempt in engine.attempts.values():
        attempt.progress_at = world.now  # it stood still through no fault of its own
        if attempt.rollout.state is not RolloutState.ABORTING:
            lifecycle.arm_timer(world, attempt.rollout)
    _over(world, update, UpdateState.FAILED if update.failure else UpdateState.UPDATED, update.failure)


def _fail(world: World, update: EngineUpdate, message: str, untouched: bool = False) -> None:
    """Give up on this engine. Untouched weights run on; what may be half new must not write a token that anybody keeps."""
    engine = update.engine
    publication = update.publication
    untouched = untouched or update.state in UNTOUCHED
    update.failure = message
    engine.quarantine = f"version {publication.update.version} failed: {message}"
    world.record(
        "warning",
        "update_failed",
        run=publication.run.run_id,
        engine=engine.engine_id,
        version=publication.update.version,
        state=update.state.name.lower(),
        error=message,
    )
    if untouched:
        # A pause that was not answered may have been done.
        update.paused = update.paused or update.state is UpdateState.PAUSING
        world.clearing.pop(engine.engine_id, None)
        for attempt in engine.attempts.values():
            if attempt.abort_reason is not None:
                lifecycle.send_abort(world, attempt)  # what the pause was to stop
        _resume(world, update)
        return
    for attempt in list(engine.attempts.values()):
        _interrupt(world, update, attempt)
    _arm(world, update, world.config.publish.clear_seconds)
    _enter(world, update, UpdateState.CLEARING)
    world.clearing[engine.engine_id] = update
    clear(world, update)


def _over(world: World, update: EngineUpdate, state: UpdateState, message: str) -> None:
    engine = update.engine
    world.clearing.pop(engine.engine_id, None)
    world.timers.cancel(update.timer)
    update.timer = None
    update.retry = None
    world.controls.pop(engine.control_id, None)
    engine.control_id = 0
    update.message = message
    _enter(world, update, state)
    engine.update = None
    engine.note_held()
    publication = update.publication
    version_change.note(world, publication.run, publication.lineage)
    world.ended_updates.append(update)
    world.dirty = True


# work on the engine ----------------------------------------------------------------------------------------------------


def _must_leave(update: EngineUpdate, attempt: Attempt) -> bool:
    """Whether an attempt may not see the new weights: another run's, one of a single version, or one that the engine could not
    tell apart, because the label of the new weights is one it had before."""
    publication = update.publication
    run = publication.run
    if attempt.rollout.run is not run or publication.label in update.engine.labels:
        return True
    version = publication.update.version
    return update.publication.update.mode is not UpdateMode.ABORT_AND_RESUME and not versions.may_cross(
        attempt, version, publication.lineage.version
    )


def _blocks(update: EngineUpdate, attempt: Attempt) -> bool:
    mode = update.publication.update.mode
    if update.failure or mode is UpdateMode.DRAIN:
        return True
    if mode is UpdateMode.IN_PLACE and attempt.first_token_at is None:
        return True  # else its prompt would be computed by the new weights over prefixes of the old ones
    return _must_leave(update, attempt)


def _interrupt(world: World, update: EngineUpdate, attempt: Attempt) -> None:
    """Ask the engine to stop it; its tokens are kept as far as its rollout can use them."""
    if attempt.rollout.state is RolloutState.ABORTING:
        return
    version = update.publication.update.version
    lifecycle.abort(
        world, attempt.rollout, AbortReason.PUBLISH, f"engine {attempt.engine.engine_id} gets version {version}"
    )
    update.aborted += 1


def _mark(world: World, update: EngineUpdate, attempt: Attempt) -> None:
    """The engine stops it by itself."""
    version = update.publication.update.version
    lifecycle.expect_abort(
        world, attempt, AbortReason.PUBLISH, f"engine {attempt.engine.engine_id} gets version {version}"
    )
    update.aborted += 1


# calls -----------------------------------------------------------------------------------------------------------------


def _call(world: World, update: EngineUpdate, verb: Verb) -> None:
    publication = update.publication
    call(
        world,
        update.engine,
        verb,
        mode=_PAUSES[publication.update.mode],
        path=publication.update.path,
        label=publication.label,
    )
    _arm(world, update, world.config.publish.call_seconds)


def last_calls_out(world: World) -> bool:
    """Whether engines are about to work again that a burst of work for others would keep waiting."""
    recent = world.now < world.last_calls_since + LAST_CALLS_SECONDS
    return recent and any(verb in LAST_CALLS for verb in world.controls.values())


def call(
    world: World,
    engine: Engine,
    verb: Verb,
    *,
    mode: PauseMode = PauseMode.RETRACT,
    path: str = "",
    label: str = "",
    tags: tuple[str, ...] = (),
) -> None:
    """Make one control call; the engine has none out."""
    if engine.control_id:
        raise AssertionError(f"{engine.engine_id}: {verb.name} while {world.controls[engine.control_id].name} is out")
    control_id = world.next_control()
    engine.control_id = control_id
    world.controls[control_id] = verb
    if verb in LAST_CALLS and world.now >= world.last_calls_since + LAST_CALLS_PAUSE_SECONDS:
        world.last_calls_since = world.now
    world.emit(Control(control_id, engine.engine_id, verb, mode, path, label, tags))


def _arm(world: World, update: EngineUpdate, seconds: float) -> None:
    world.timers.cancel(update.timer)
    update.timer = world.timers.add(world.now + seconds, TimerKind.UPDATE, update)


def _enter(world: World, update: EngineUpdate, state: UpdateState) -> None:
    update.state = state
    update.engine.note_held()
    tell(world, update, update.failure or update.message)


def tell(world: World, update: EngineUpdate, message: str) -> None:
    """Say where the engine is."""
    publication = update.publication
    world.emit(
        PublishProgress(
            publication.run.run_id,
            publication.lineage.pool,
            publication.update.version,
            update.engine.engine_id,
            update.state,
            message,
            update.aborted,
        )
    )
