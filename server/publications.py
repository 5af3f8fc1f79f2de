"""Publications as their watchers see them: the newest state of every engine, told to whoever watches.

Invariants
- A watcher first hears of every engine that has a state, then of changes, then of one end, after which nothing comes.
- A slow watcher blocks nobody and holds bounded memory: beyond `MAX_PENDING` it keeps the newest state per engine.
- A publication is kept from its acceptance to its end; the core ends every one that it accepted.

What this module does not know: gRPC, and what a publication does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import UpdateState
from rolloutd.server.logging import get_logger
from rolloutd.server.loop import RunLoop, refusal_of

MAX_PENDING = 256

Key = tuple[str, str, int]  # run, pool, version


@dataclass(frozen=True, slots=True)
class Step:
    """One engine went on."""

    elapsed_seconds: float
    progress: actions.PublishProgress


@dataclass(frozen=True, slots=True)
class End:
    """It is over. `failures`: what was last told of each engine that failed."""

    elapsed_seconds: float
    ended: actions.PublishEnded
    failures: Mapping[str, actions.PublishProgress]


class Watcher:
    """What one caller has not been told yet."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._limit = MAX_PENDING
        self._end: End | Refusal | None = None
        self._wake = asyncio.Event()

    def put(self, step: Step) -> None:
        self._steps.append(step)
        if len(self._steps) > self._limit:
            newest = {kept.progress.engine_id: kept for kept in self._steps}
            self._steps = deque(newest.values())
            self._limit = max(MAX_PENDING, 2 * len(newest))
        self._wake.set()

    def finish(self, end: End | Refusal) -> None:
        """Nothing comes after what was put; a refusal says that the watch ends before the publication does."""
        self._end = end
        self._wake.set()

    async def next(self) -> Step | End | Refusal:
        """The next step, or the end."""
        while not self._steps:
            if self._end is not None:
                return self._end
            self._wake.clear()
            await self._wake.wait()
        return self._steps.popleft()


@dataclass(slots=True)
class _Publication:
    accepted_at: float
    update: PolicyUpdate
    engines: dict[str, Step] = field(default_factory=dict)


class Publications:
    """All publications that are not over. Hangs on the run loop."""

    def __init__(self, loop: RunLoop) -> None:
        self._loop = loop
        self._active: dict[Key, _Publication] = {}
        self._watchers: dict[Key, set[Watcher]] = {}
        self._log = get_logger("publications")
        loop.observers.append(self.observe)

    @contextmanager
    def watch(self, run_id: str, pool: str, version: int) -> Iterator[Watcher]:
        """Watch a publication that is active, or is about to be posted."""
        key = (run_id, pool, version)
        watcher = Watcher()
        active = self._active.get(key)
        for step in active.engines.values() if active is not None else ():
            watcher.put(step)
        self._watchers.setdefault(key, set()).add(watcher)
        try:
            yield watcher
        finally:
            watchers = self._watchers[key]
            watchers.discard(watcher)
            if not watchers:
                del self._watchers[key]

    def close(self, refusal: Refusal) -> None:
        """End every watch."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.finish(refusal)

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """One event and what the core made of it."""
        if isinstance(event, events.PublishPolicy) and refusal_of(result) is None:
            self._accept(event)
        for action in result:
            if isinstance(action, actions.PublishProgress):
                self._step(action)
            elif isinstance(action, actions.PublishEnded):
                self._end(action)

    def _accept(self, event: events.PublishPolicy) -> None:
        update = event.update
        key = (event.run_id, update.pool, update.version)
        if key not in self._active:
            self._active[key] = _Publication(self._loop.clock(), update)
            self._log.info(
                "publication_accepted",
                run_id=event.run_id,
                pool=update.pool,
                version=update.version,
                mode=update.mode.name.lower(),
                cache=update.cache.name.lower(),
                path=update.path,
            )

    def _step(self, progress: actions.PublishProgress) -> None:
        key = (progress.run_id, progress.pool, progress.version)
        active = self._active.get(key)
        if active is None:  # an engine that came later gets the newest version, with nobody to watch
            return
        step = Step(self._loop.clock() - active.accepted_at, progress)
        active.engines[progress.engine_id] = step
        if progress.state is UpdateState.FAILED:
            self._log.warning(
                "engine_update_failed",
                run_id=progress.run_id,
                engine_id=progress.engine_id,
                version=progress.version,
                message=progress.message,
            )
        for watcher in self._watchers.get(key, ()):
            watcher.put(step)

    def _end(self, ended: actions.PublishEnded) -> None:
        key = (ended.run_id, ended.pool, ended.version)
        active = self._active.pop(key, None)
        if active is None:
            return
        failures = {
            engine_id: active.engines[engine_id].progress for engine_id in ended.failed if engine_id in active.engines
        }
        end = End(self._loop.clock() - active.accepted_at, ended, failures)
        write = self._log.warning if ended.failed else self._log.info
        write(
            "publication_ended",
            run_id=ended.run_id,
            pool=ended.pool,
            version=ended.version,
            seconds=end.elapsed_seconds,
            updated=len(ended.updated),
            failed=list(ended.failed),
        )
        for watcher in self._watchers.get(key, ()):
            watcher.finish(end)
