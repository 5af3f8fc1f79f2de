"""When the garbage collector may look at everything: when nobody waits for the event loop.

A full collection walks every container the process holds: tens of milliseconds beside a large index or queue, during which
no rollout moves (40 ms with 100,000 queued; none after a freeze). Almost all garbage here is freed by its reference count;
collections of the youngest generation, a few milliseconds, find most of the rest. What the compiled core makes most of is not
looked at (`mypyc_attr(acyclic=True)`): each has many neighbours, and looking at one is a cache miss.

Invariants
- The interpreter starts no collection but those of the youngest generation by itself between `start()` and `stop()`.
- A full one runs when nothing is queued or on an engine for `QUIET_SECONDS`, and something was made since the last; a
  server that is never quiet runs one after `BUSY_SECONDS`, over what was made since the last.
- What lives through one is frozen: no later collection walks it, until a quiet one looks at everything again.

What this module does not know: what quiet means.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from rolloutd.server.logging import get_logger

QUIET_SECONDS = 2.0
BUSY_SECONDS = 600.0
_LOOK_SECONDS = 1.0
# Net containers made before a young collection. The default of 700 collects thousands of times a second what a finishing
# rollout frees by itself. Beside a full queue many times as many live through one, for what old ones free is taken off the count,
# and each is a cache miss: 3,000 stop the loop for up to 24 ms, 1,000 for 8.
_YOUNG = 1_000
_NEVER = 1 << 30
# Containers made since the last full collection that make another one worth its time.
WORTHWHILE = 10_000


class Garbage:
    """`is_quiet` is asked on the event loop, about once a second."""

    def __init__(self, is_quiet: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_quiet = is_quiet
        self._clock = clock
        self._collected_at = clock()
        self._quiet_since: float | None = None
        self._before = gc.get_threshold()
        self._log = get_logger("garbage")

    def start(self) -> None:
        """After start-up: what is loaded stays."""
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        self._collect(everything=True)

    def stop(self) -> None:
        """Back to the interpreter's ways."""
        gc.unfreeze()
        gc.set_threshold(*self._before)

    async def run(self) -> None:
        """Look from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> bool:
        """Collect if it is time. Returns whether it did."""
        now = self._clock()
        if not self._is_quiet():
            self._quiet_since = None
            if now - self._collected_at < BUSY_SECONDS:
                return False
            self._collect(everything=False)
            return True
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < QUIET_SECONDS or made_since_collection() < WORTHWHILE:
            return False
        self._collect(everything=True)
        return True

    def _collect(self, *, everything: bool) -> None:
        started = time.perf_counter()
        if everything:
            gc.unfreeze()
        freed = gc.collect()
        gc.freeze()
        self._collected_at = self._clock()
        self._log.debug("collected", everything=everything, freed=freed, seconds=time.perf_counter() - started)


def made_since_collection() -> int:
    """Containers made and not freed since the last full collection, roughly."""
    young, middle, _ = gc.get_count()
    return young + _YOUNG * middle
