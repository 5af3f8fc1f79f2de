"""What waits to be written to one consumer's stream, between the core that delivers and the writer that sends.

Invariants
- One outbox per connected consumer; a newer stream of the same consumer closes the older outbox.
- Memory is bounded: durable events are shared with the core, which bounds them by bytes and age, and are dropped here
  at the age at which the core drops them; answers to submissions are bounded because reading pauses at
  `PAUSE_ANSWERS`; progress of a rollout replaces its older progress that was not sent yet.
- Order is that of `put`; progress keeps the place of the report it replaces.

What this module does not know: gRPC and protobuf.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rolloutd.scheduler.actions import Accepted, Deliver, Notice, Progressed
from rolloutd.scheduler.refusal import Refusal

# One message should be small enough that the loop is not held while it is built.
MAX_EVENTS_PER_MESSAGE = 256
# Unsent answers at which the stream stops reading requests: the client does not take what it asked for.
PAUSE_ANSWERS = 4096


_CAN_WAIT = frozenset((Accepted, Progressed, Notice))


@dataclass(frozen=True, slots=True)
class ItemRefused:
    """An item of a request message that was refused before or beside the core. `kind`: the contract's ItemKind."""

    rollout_id: str
    kind: int
    error: Refusal


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why the stream ends; `error` None means everything was delivered."""

    error: Refusal | None


class Outbox:
    """A queue with one reader. `ttl_seconds`: age at which an unsent entry is dropped."""

    def __init__(self, run_id: str, consumer_id: str, ttl_seconds: float) -> None:
        self.run_id = run_id
        self.consumer_id = consumer_id
        self.end: StreamEnd | None = None
        self.expired_events = 0
        self._ttl_seconds = ttl_seconds
        self._entries: deque[tuple[float, Deliver | ItemRefused | str]] = deque()  # str: id whose progress waits here
        self._progress: dict[str, Deliver] = {}
        self._answers = 0
        self._urgent = 0
        self._hurry = asyncio.Event()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Deliver | ItemRefused, now: float) -> None:
        """Add one event; a no-op once the outbox has ended."""
        if self.end is not None:
            return
        while self._entries and now - self._entries[0][0] > self._ttl_seconds:
            self._pop()
            self.expired_events += 1
        if isinstance(entry, Deliver) and isinstance(entry.event, Progressed):
            rollout_id = entry.event.rollout_id
            if rollout_id not in self._progress:
                self._entries.append((now, rollout_id))
            self._progress[rollout_id] = entry
        else:
            self._entries.append((now, entry))
            if isinstance(entry, ItemRefused) or entry.cursor == 0:
                self._answers += 1
                if self._answers >= PAUSE_ANSWERS:
                    self._room.clear()
            if _is_urgent(entry):
                self._urgent += 1
                self._hurry.set()
        self._wake.set()

    def finish(self, error: Refusal | None = None, *, drop_queued: bool = False) -> None:
        """End the stream, with an error or cleanly, after what is queued unless that is dropped. The first end wins."""
        if self.end is None:
            self.end = StreamEnd(error)
            if drop_queued:
                self._entries.clear()
                self._progress.clear()
                self._urgent = 0
            self._room.set()
            self._hurry.set()
            self._wake.set()

    async def wait(self) -> None:
        """Return when there is something to send or the outbox has ended."""
        while not self._entries and self.end is None:
            self._wake.clear()
            await self._wake.wait()

    async def wait_urgent(self, seconds: float) -> None:
        """Return when an entry is queued that somebody may be waiting for, the outbox has ended, or the time is up."""
        if self._urgent or self.end is not None:
            return
        self._hurry.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._hurry.set)
        try:
            await self._hurry.wait()
        finally:
            timer.cancel()

    @property
    def is_urgent(self) -> bool:
        """Whether an entry is queued that somebody may be waiting for: anything but acceptance, progress and news."""
        return self._urgent > 0

    async def wait_for_room(self) -> None:
        """Return when fewer than PAUSE_ANSWERS answers wait, or the outbox has ended."""
        await self._room.wait()

    def take(self, limit: int = MAX_EVENTS_PER_MESSAGE) -> Iterator[Deliver | ItemRefused]:
        """Remove and yield up to `limit` entries, oldest first."""
        for _ in range(min(limit, len(self._entries))):
            yield self._pop()

    def _pop(self) -> Deliver | ItemRefused:
        _, entry = self._entries.popleft()
        if isinstance(entry, str):
            return self._progress.pop(entry)
        if _is_urgent(entry):
            self._urgent -= 1
        if isinstance(entry, ItemRefused) or entry.cursor == 0:
            self._answers -= 1
            if self._answers < PAUSE_ANSWERS and self.end is None:
                self._room.set()
        return entry


def _is_urgent(entry: Deliver | ItemRefused) -> bool:
    return type(entry) is ItemRefused or type(entry.event) not in _CAN_WAIT  # type: ignore[union-attr]
