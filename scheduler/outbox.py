"""What one consumer has not acknowledged yet: durable events by cursor.

Invariants
- Cursors of one consumer grow by one per durable event and are never reused.
- An event leaves once: acknowledged, expired, or moved to a consumer that takes over.
- `size_bytes` is the sum over the events that are kept.

What this module does not know: streams. The core emits a Deliver for every event when it happens and again on re-attachment.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.actions import Finished, GroupFinished

if TYPE_CHECKING:
    from rolloutd.scheduler.timers import Timer

GROUP_EVENT_BYTES: Final = 256


@mypyc_attr(acyclic=True)
class Kept:
    __slots__ = ("at_seconds", "event", "size_bytes")

    def __init__(self, event: Finished | GroupFinished, size_bytes: int, at_seconds: float) -> None:
        self.event = event
        self.size_bytes = size_bytes
        self.at_seconds = at_seconds


class Consumer:
    """One reader of a run's results."""

    __slots__ = (
        "attached",
        "by_group",
        "by_rollout",
        "closing",
        "consumer_id",
        "cursor",
        "epoch",
        "grace_timer",
        "kept",
        "size_bytes",
        "unfinished",
    )

    def __init__(self, consumer_id: str) -> None:
        self.consumer_id = consumer_id
        self.epoch = 0
        self.attached = False
        self.closing = False  # half-closed: ends when nothing is pending
        self.grace_timer: Timer | None = None  # while it is gone and its work is to be cancelled
        self.cursor = 0
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self.by_rollout: dict[str, int] = {}
        self.by_group: dict[str, int] = {}
        self.size_bytes = 0
        self.unfinished = 0  # accepted rollouts of this consumer that have not ended

    def keep(self, event: Finished | GroupFinished, now: float) -> int:
        """Keep a durable event; returns its cursor."""
        self.cursor += 1
        size = _size_bytes(event)
        self.kept[self.cursor] = Kept(event, size, now)
        self.size_bytes += size
        if isinstance(event, Finished):
            self.by_rollout[event.result.rollout_id] = self.cursor
        else:
            self.by_group[event.group_id] = self.cursor
        return self.cursor

    def drop(self, cursor: int) -> Kept | None:
        """Forget one event; None when it is not here (any more)."""
        kept = self.kept.pop(cursor, None)
        if kept is None:
            return None
        self.size_bytes -= kept.size_bytes
        if isinstance(kept.event, Finished):
            del self.by_rollout[kept.event.result.rollout_id]
        else:
            del self.by_group[kept.event.group_id]
        return kept

    def replace(self, cursor: int, event: Finished | GroupFinished) -> int:
        """Another event about the same in the place of a kept one; returns the bytes that it is larger."""
        kept = self.kept[cursor]
        size = _size_bytes(event)
        self.kept[cursor] = Kept(event, size, kept.at_seconds)
        grown = size - kept.size_bytes
        self.size_bytes += grown
        return grown

    def through(self, cursor: int) -> list[int]:
        """Cursors kept up to and including `cursor`, oldest first."""
        found = []
        for known in self.kept:
            if known > cursor:
                break
            found.append(known)
        return found

    def older_than(self, at_seconds: float) -> list[int]:
        """Cursors of events kept since before `at_seconds`, oldest first."""
        found = []
        for cursor, kept in self.kept.items():
            if kept.at_seconds >= at_seconds:
                break
            found.append(cursor)
        return found


def _size_bytes(event: Finished | GroupFinished) -> int:
    return event.result.size_bytes if isinstance(event, Finished) else GROUP_EVENT_BYTES
