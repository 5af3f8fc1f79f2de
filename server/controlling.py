"""One control call of the core carried out at an engine's door, and what it came to as an event.

Invariants
- Every call ends in one event, whatever the door does; only a cancelled task ends without.
- A fault keeps its kind; an exception that is none is logged with its trace and becomes BROKEN.

What this module does not know: why the core wants a call, and what it does about its end.
"""

from __future__ import annotations

from rolloutd.engines.base import Engine, EngineFault
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.engines.control import PauseMode as DoorPause
from rolloutd.scheduler import actions, events
from rolloutd.scheduler.states import FaultKind, PauseMode, Verb
from rolloutd.server.logging import get_logger

# A refused flush is tried again this long by the door, whose tries are closer together than the core's.
FLUSH_SECONDS = 2.0

FAULTS = {
    DoorFault.REFUSED: FaultKind.REFUSED,
    DoorFault.BUSY: FaultKind.BUSY,
    DoorFault.UNREACHED: FaultKind.UNREACHED,
    DoorFault.BROKEN: FaultKind.BROKEN,
    DoorFault.SILENT: FaultKind.SILENT,
}
_PAUSES = {
    PauseMode.ABORT: DoorPause.ABORT,
    PauseMode.RETRACT: DoorPause.RETRACT,
    PauseMode.IN_PLACE: DoorPause.IN_PLACE,
}
_log = get_logger("control")


async def carry_out(control: actions.Control, door: Engine | None) -> events.ControlEnded | events.ControlFailed:
    """Make the call and say how it ended. `door` None: the engine is not known any more."""
    engine_id, control_id = control.engine_id, control.control_id
    if door is None:
        message = f"engine {engine_id} is not known any more"
        return events.ControlFailed(engine_id, control_id, FaultKind.BROKEN, message)
    try:
        return await _call(control, door)
    except EngineFault as fault:
        return events.ControlFailed(engine_id, control_id, FAULTS[fault.kind], fault.message)
    except Exception as error:
        _log.error("control_crashed", engine_id=engine_id, verb=control.verb.name.lower(), exc_info=True)
        message = f"unexpected {type(error).__name__}: {error}"
        return events.ControlFailed(engine_id, control_id, FaultKind.BROKEN, message)


async def _call(control: actions.Control, door: Engine) -> events.ControlEnded:
    flushed, label = True, ""
    match control.verb:
        case Verb.PAUSE:
            await door.pause(_PAUSES[control.mode])
        case Verb.RESUME:
            await door.resume()
        case Verb.FLUSH:
            flushed = await door.flush(FLUSH_SECONDS)
        case Verb.LOAD:
            # The core flushes by calls of its own: a refused one must not cost a second load.
            flushed = (await door.load_weights(control.path, control.label, flush=False)).flushed
        case Verb.BEGIN:
            await door.begin_update()
        case Verb.END:
            await door.end_update()
        case Verb.NAME:
            await door.name_version(control.label)
        case Verb.VERIFY:
            label = await door.weight_version()
        case Verb.RELEASE_MEMORY:
            await door.release_memory(control.tags)
        case Verb.RESUME_MEMORY:
            await door.resume_memory(control.tags)
    return events.ControlEnded(control.engine_id, control.control_id, flushed, label)
