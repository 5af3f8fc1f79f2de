"""What a simulation asks of whoever schedules: the production core has it, and so has every control arm.

What this module does not know: how anybody schedules.
"""

from __future__ import annotations

from typing import Protocol

from rolloutd.scheduler.actions import Action
from rolloutd.scheduler.events import Event


class Core(Protocol):
    """Events in, actions out."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at `now` seconds; what is to be done about it."""
        ...

    @property
    def wants_tick(self) -> bool:
        """Whether a Tick now would do something."""
        ...

    def next_due(self) -> float:
        """When a Tick is due anyway; inf for never."""
        ...
