"""One publication, and the way of one engine through it. Data only; `publishing` and `updating` move it.

Invariants
- `updates` has one entry per engine that takes part; an entry ends UPDATED or FAILED, once.

What this module does not know: order and calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import UpdateState, Verb

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.lineage import Lineage
    from rolloutd.scheduler.run import Run
    from rolloutd.scheduler.timers import Timer

OVER: Final = frozenset({UpdateState.UPDATED, UpdateState.FAILED})
CHANGING: Final = frozenset(
    {
        UpdateState.LOADING,
        UpdateState.PUSHING,
        UpdateState.NAMING,
        UpdateState.VERIFYING,
        UpdateState.RESUMING,
    }
)


class Publication:
    __slots__ = ("accepted_at", "lineage", "orphaned", "run", "update", "updates")

    def __init__(self, run: Run, lineage: Lineage, update: PolicyUpdate, now: float) -> None:
        self.run = run
        self.lineage = lineage
        self.update = update
        self.accepted_at = now
        self.updates: dict[str, EngineUpdate] = {}
        self.orphaned = ""  # why nobody will push its weights any more

    @property
    def label(self) -> str:
        """The version as engines know it."""
        return str(self.update.version)


class EngineUpdate:
    __slots__ = (
        "aborted",
        "end_first",
        "engine",
        "failure",
        "message",
        "named",
        "paused",
        "publication",
        "retry",
        "state",
        "timer",
        "tries",
    )

    def __init__(self, publication: Publication, engine: Engine) -> None:
        self.publication = publication
        self.engine = engine
        self.state = UpdateState.WAITING
        self.message = ""
        self.failure = ""  # why it will end FAILED, once the engine is running again
        self.paused = False  # generation stands still there
        self.timer: Timer | None = None
        self.retry: Verb | None = None  # to be called again when the timer fires
        self.tries = 0  # of the call that is repeated
        self.named = False  # its label was set by a call of its own
        self.end_first = False  # a push session of an earlier publication was open
        self.aborted = 0  # attempts of the run that were interrupted for it

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def changing(self) -> bool:
        """Whether the new weights may be in place already, or in part: tokens may carry their label."""
        return self.state in CHANGING

    @property
    def waiting(self) -> bool:
        return self.state is UpdateState.WAITING
