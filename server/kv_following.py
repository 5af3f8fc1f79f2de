"""Follows one engine's KV events and tells the core.

Invariants
- What the core is told carries the incarnation that the events were subscribed for: another process's are never mixed in.
- An endpoint that is not reachable, or cannot be read, is a warning: placement then goes by our own dispatches, as it does
  for an engine that publishes nothing.

What this module does not know: sockets, and what the core does with events.
"""

from __future__ import annotations

import asyncio

from rolloutd.engines.base import KvEventsAddress
from rolloutd.engines.kv_events import KvEvents, KvEventsCount, KvEventsUnreadable
from rolloutd.engines.kv_wire import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from rolloutd.scheduler.events import KvCacheChanged
from rolloutd.scheduler.kv_changes import KvChange, KvCleared, KvRemoved, KvStored, KvUnknown
from rolloutd.server.logging import get_logger
from rolloutd.server.loop import RunLoop

UNREACHED_SECONDS = 10.0  # without a connection for so long, somebody should know


class KvFollower:
    """One subscription, from its construction until `stop`. Construct inside the running event loop."""

    def __init__(self, loop: RunLoop, engine_id: str, incarnation: str, address: KvEventsAddress) -> None:
        self.incarnation = incarnation
        self.address = address
        self.connected = False
        self.blocks = 0  # stored, removed, or all of them cleared, so far
        self._loop = loop
        self._engine_id = engine_id
        self._log = get_logger("kv_events")
        self._events = KvEvents(address, self._took, self._connection)
        self._warning: asyncio.TimerHandle | None = None
        self._await_connection()
        self._task = asyncio.create_task(self._run(), name=f"KV events of {engine_id}")

    @property
    def count(self) -> KvEventsCount:
        return self._events.count

    async def stop(self) -> None:
        """Hang up."""
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def cancel(self) -> None:
        """Hang up, without waiting for it. Nothing is told any more."""
        self._task.cancel()
        if self._warning is not None:
            self._warning.cancel()

    async def _run(self) -> None:
        try:
            await self._events.run()
        except KvEventsUnreadable as error:
            self._log.warning(
                "kv_events_unreadable", engine_id=self._engine_id, endpoint=self.address.endpoint, message=str(error)
            )
            self._given_up(str(error))
        except Exception as error:  # a bug here must not leave the core with a cache that nobody corrects
            self._log.error("kv_events_failed", engine_id=self._engine_id, exc_info=True)
            self._given_up(f"unexpected {type(error).__name__}: {error}")

    def _given_up(self, reason: str) -> None:
        self._connection(False)
        if self._warning is not None:
            self._warning.cancel()
        self._tell((KvUnknown(reason),))

    def _took(self, events: tuple[KvEvent, ...]) -> None:
        self._tell(tuple(map(change_of, events)))
        self.blocks += sum(
            len(event.hashes) if isinstance(event, BlocksStored | BlocksRemoved) else 1 for event in events
        )

    def _tell(self, changes: tuple[KvChange, ...]) -> None:
        self._loop.post(KvCacheChanged(self._engine_id, self.incarnation, changes))

    def _connection(self, connected: bool) -> None:
        if connected and self._warning is not None:
            self._warning.cancel()
        elif not connected and self.connected:
            self._await_connection()
        if connected is not self.connected:
            self._log.info("kv_events_connection", engine_id=self._engine_id, connected=connected)
        self.connected = connected

    def _await_connection(self) -> None:
        self._warning = asyncio.get_running_loop().call_later(UNREACHED_SECONDS, self._warn)

    def _warn(self) -> None:
        self._log.warning(
            "kv_events_unreachable",
            engine_id=self._engine_id,
            endpoint=self.address.endpoint,
            message="the engine publishes KV events there, but not for us: prefix credit goes by our own dispatches; "
            "let this host reach the port, or start the engine without --kv-events-config",
        )


def change_of(event: KvEvent) -> KvChange:
    """What an event says, in the core's words."""
    if isinstance(event, BlocksStored):
        return KvStored(event.hashes, event.parent_hash, event.token_bytes, event.salt, event.adapter, event.on_host)
    if isinstance(event, BlocksRemoved):
        return KvRemoved(event.hashes, event.on_host)
    if isinstance(event, AllCleared):
        return KvCleared()
    return KvUnknown(event.reason)
