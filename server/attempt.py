"""One dispatch on its way: begun at its door, its progress thinned out before it becomes events, its end told once.

Invariants
- Every attempt that was begun, or could not be, tells the run loop one end: a slice, a fault, an exception (BROKEN, with an
  error in the log), or that it was hung up on.
- Progress waits for two turns of the event loop: tokens that came together with the end are told by the end alone.
- Nothing is posted from inside `begin` but the end of what could not begin; the run loop calls it outside of the core.

What this module does not know: what the core makes of it, and how a door does its work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutd.engines.base import AttemptRequest, Engine, EngineFault, Progress, Running, Slice
from rolloutd.engines.base import FaultKind as DoorFault
from rolloutd.scheduler import actions, events
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.states import FaultKind
from rolloutd.server.controlling import FAULTS

if TYPE_CHECKING:
    from rolloutd.server.loop import RunLoop

# Progress is passed on at the first token, then after this many tokens (half of the core's KV headroom of 64) or this much
# time, whichever comes first.
PROGRESS_TOKENS = 32
PROGRESS_SECONDS = 0.1


@dataclass(slots=True)
class Door:
    """What the run loop keeps of a door."""

    door: Engine
    attempts: int = 0
    controls: int = 0
    removed: bool = False
    paused: bool = False  # by a call of ours that no resume came after


class Attempt:
    """`held`: what the run loop keeps of its door, handed back at the end; None where the engine is not known any more."""

    __slots__ = ("_loop", "_pending", "_posted_at", "_posted_tokens", "_running", "dispatch", "held")

    def __init__(self, loop: RunLoop, dispatch: actions.Dispatch, held: Door | None) -> None:
        self.dispatch = dispatch
        self.held = held
        self._running: Running | None = None
        self._loop = loop
        self._pending: Progress | None = None
        self._posted_tokens = 0
        self._posted_at = -math.inf

    def begin(self) -> None:
        try:
            if self.held is None:
                raise EngineFault(DoorFault.BROKEN, f"engine {self.dispatch.engine_id} is not known any more")
            self._running = self.held.door.begin(_request(self.dispatch), self.report, self.ended)
        except Exception as error:
            self.ended(error)

    def report(self, progress: Progress) -> None:
        """Progress from the door."""
        if self._pending is not None:
            self._pending = progress
            return
        if (
            self._posted_tokens == 0
            or progress.generated_tokens - self._posted_tokens >= PROGRESS_TOKENS
            or self._loop.clock() - self._posted_at >= PROGRESS_SECONDS
        ):
            self._pending = progress
            self._loop.progressed(self)

    def post_progress(self) -> None:
        progress, self._pending = self._pending, None
        if progress is not None:
            self._posted_tokens = progress.generated_tokens
            self._posted_at = self._loop.clock()
            self._loop.post(
                events.AttemptProgress(
                    progress.attempt_id, progress.generated_tokens, progress.prompt_tokens, progress.cached_tokens
                )
            )

    def ended(self, end: Slice | Exception) -> None:
        """The end from the door."""
        self._pending = None  # the end says what is left to say
        self._running = None  # it knows us: a ring that only the garbage collector would find
        self._loop.attempt_over(self, self._event_of(end))

    def hang_up(self) -> None:
        """The loop's own end."""
        if self._running is not None:
            self._running.hang_up()
        self.ended(EngineFault(DoorFault.BROKEN, "hung up"))

    def _event_of(self, end: Slice | Exception) -> events.Event:
        attempt_id = self.dispatch.attempt_id
        if isinstance(end, Slice):
            return events.AttemptEnded(attempt_id, _piece(end))
        if isinstance(end, EngineFault):
            partial = _piece(end.partial) if end.partial is not None else None
            return events.AttemptFailed(attempt_id, FAULTS[end.kind], end.message, partial)
        self._loop.log.error("attempt_crashed", attempt_id=attempt_id, engine_id=self.dispatch.engine_id, exc_info=end)
        return events.AttemptFailed(attempt_id, FaultKind.BROKEN, f"unexpected {type(end).__name__}: {end}")


def _request(dispatch: actions.Dispatch) -> AttemptRequest:
    return AttemptRequest(
        attempt_id=dispatch.attempt_id,
        max_new_tokens=dispatch.max_new_tokens,
        token_bytes=dispatch.token_bytes,
        text=dispatch.text,
        sampling=dispatch.sampling,
        logprobs=dispatch.logprobs,
        top_logprobs=dispatch.top_logprobs,
        prompt_logprobs_from=dispatch.prompt_logprobs_from,
        engine_params=dispatch.engine_params,
        cache_salt=dispatch.cache_salt,
    )


def _piece(piece: Slice) -> Piece:
    return Piece(
        token_bytes=piece.token_bytes,
        finish_reason=piece.finish_reason,
        logprob_bytes=piece.logprob_bytes,
        top_logprobs=piece.top_logprobs,
        matched_stop=piece.matched_stop,
        text=piece.text,
        prompt_tokens=piece.prompt_tokens,
        cached_tokens=piece.cached_tokens,
        prompt_token_bytes=piece.prompt_token_bytes,
        prompt_logprob_bytes=piece.prompt_logprob_bytes,
        version_spans=piece.version_spans,
        extras=piece.extras,
    )
