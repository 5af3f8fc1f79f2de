"""Publications as their watchers see them: the newest state of every engine, told to whoever watches.

Invariants
- A watcher first hears of every engine that has a state, then of changes, then of one end, after which nothing comes.
- A slow watcher blocks nobody and holds bounded memory: beyond `MAX_PENDING` it keeps the newest state per engine.
- A publication is kept from its acceptance, or the first that is heard of it, to its end; the core ends every one.

What this module does not know: gRPC, and what a publication does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.refusal import Refusal
from rolloutd.server.loop import RunLoop, refusal_of

MAX_PENDING = 256

Key = tuple[str, str, int]  # run, pool, version


@dataclass(frozen=True, slots=True)
class Step:
    """One engine went on. `engine_count`: engines that were heard of by then."""

    elapsed_seconds: float
    engine_count: int
    progress: actions.PublishProgress


@dataclass(frozen=True, slots=True)
class End:
    """It is over. `failures`: what was last told of each engine that failed."""

    elapsed_seconds: float
    engine_count: int
    ended: actions.PublishEnded
    failures: Mapping[str, actions.PublishProgress]


class Watcher:
    """What one caller has not been told yet."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._limit = MAX_PENDING
        self._end: End | Refusal | None = None
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, step: Step) -> None:
        self._steps.append(step)
        if len(self._steps) > self._limit:
            newest = {kept.progress.engine_id: kept for kept in self._steps}
            self._steps = deque(newest.values())
            self._limit = max(MAX_PENDING, 2 * len(newest))
        self._wake.set()

    def finish(self, end: End | Refusal) -> None:
        """Nothing comes after what was put; a refusal says that the watch ends before the publication does. The first wins."""
        if self._end is None:
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
    engines: dict[str, Step] = field(default_factory=dict)


class Publications:
    """All publications that are not over. Hangs on the run loop."""

    def __init__(self, loop: RunLoop) -> None:
        self._loop = loop
        self._active: dict[Key, _Publication] = {}
        self._watchers: dict[Key, set[Watcher]] = {}
        loop.observers.append(self.observe)

    @property
    def watched(self) -> int:
        """Publications that somebody watches."""
        return len(self._watchers)

    @contextmanager
    def watch(self, run_id: str, pool: str, version: int) -> Iterator[Watcher]:
        """Watch a publication that is active, or is about to be posted."""
        key = (run_id, pool, version)
        watcher = Watcher()
        if key in self._active:
            engines = self._active[key].engines
            for step in engines.values():
                watcher.put(replace(step, engine_count=len(engines)))
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
        key = (event.run_id, event.update.pool, event.update.version)
        self._active.setdefault(key, _Publication(self._loop.clock()))

    def _step(self, progress: actions.PublishProgress) -> None:
        now = self._loop.clock()
        key = (progress.run_id, progress.pool, progress.version)
        active = self._active.setdefault(key, _Publication(now))
        count = len(active.engines.keys() | {progress.engine_id})
        step = Step(now - active.accepted_at, count, progress)
        active.engines[progress.engine_id] = step
        for watcher in self._watchers.get(key, ()):
            watcher.put(step)

    def _end(self, ended: actions.PublishEnded) -> None:
        now = self._loop.clock()
        key = (ended.run_id, ended.pool, ended.version)
        active = self._active.pop(key, _Publication(now))
        failures = {
            engine_id: active.engines[engine_id].progress for engine_id in ended.failed if engine_id in active.engines
        }
        end = End(now - active.accepted_at, len(active.engines), ended, failures)
        for watcher in self._watchers.get(key, ()):
            watcher.finish(end)
