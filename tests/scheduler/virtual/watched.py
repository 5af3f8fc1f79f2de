"""One accepted rollout as an observer of the simulation sees it: what it must write, and what happened to it."""

from __future__ import annotations

from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rollout import Rollout

Key = tuple[str, str]  # (run id, rollout id)


class Watched:
    """One accepted rollout and what happened to it."""

    __slots__ = (
        "accepted_at",
        "busy",
        "cancelled",
        "deadline_abort",
        "faults",
        "refused",
        "result",
        "rollout",
    )

    def __init__(self, rollout: Rollout, accepted_at: float) -> None:
        self.rollout = rollout
        self.accepted_at = accepted_at
        self.result: RolloutResult | None = None
        self.faults = 0  # attempts that an engine broke, left silent or aborted by itself
        self.busy = 0
        self.refused = False
        self.cancelled = False
        self.deadline_abort = False
