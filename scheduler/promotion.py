"""What is left of making a run's rollouts CRITICAL: see `promoting`.

What this module does not know: why, and when the next of them has its turn.
"""

from __future__ import annotations


class Promotion:
    """Of one run. left: ids of those still to be promoted, in order; done: how many were."""

    __slots__ = ("done", "left")

    def __init__(self) -> None:
        self.done = 0
        self.left: dict[str, None] = {}
