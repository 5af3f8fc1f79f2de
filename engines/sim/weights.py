"""New weights and the engine's memory in the simulated engine, with what kills or misleads in a real one.

Invariants
- Weights are their version string. They change at one moment, at the end of a load; a load that fails changes nothing.
- A refused flush does not undo a load: tokens are the new weights', while the official version and the model's name stay.
- What makes a real scheduler raise kills the process after 5 simulated seconds of silence: two loads from disk at once in
  a pause, releasing memory while it works, resuming memory that was not released, using memory that is released.

What this module does not know: HTTP.
Difference from SGLang 0.5.23: any path loads but an empty one. There, a path without weights is refused and changes nothing, but files
that turn out wrong kill the engine: it rolls back by reading the same path again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rolloutd.engines.sim.driver import Driver
from rolloutd.engines.sim.faults import FaultBoard

# How long a load takes unless told otherwise, simulated seconds.
WEIGHT_LOAD_SECONDS = 0.2
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")

_NO_SESSION = "must run between begin_weight_update() and end_weight_update()"
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Of a weight call: whether all of it was done, and words for the caller."""

    success: bool
    message: str


class Weights:
    """One engine's weights and memory."""

    def __init__(self, driver: Driver, faults: FaultBoard, load_seconds: float) -> None:
        self._driver = driver
        self._faults = faults
        self._load_seconds = load_seconds
        self._session = False
        self._loading_from_disk = False

    async def load_from_disk(self, path: str, version: str | None, *, flush: bool, abort_all: bool) -> UpdateResult:
        """Without a pause it waits until no request is in flight; in a pause it runs at once."""
        driver = self._driver
        if abort_all:
            driver.abort_all()
        async with driver.gate_lock:
            paused = driver.paused
        if paused:
            result = await self._load_from_disk(path, version, flush)
        else:
            async with driver.writer():
                result = await self._load_from_disk(path, version, flush)
        return result

    async def _load_from_disk(self, path: str, version: str | None, flush: bool) -> UpdateResult:
        if self._loading_from_disk:
            self._driver.die("two weight loads from disk at once")
        self._loading_from_disk = True
        async with self._driver.inline():
            result = await self._load(version, flush, path)
        self._loading_from_disk = False
        return result

    async def load_bucket(self, version: str | None, *, flush: bool, abort_all: bool) -> UpdateResult:
        """Tensors that a trainer sends; only between begin and end. In a pause, `resume` waits for it."""
        if abort_all:
            self._driver.abort_all()
        async with self._alone():
            if not self._session:
                return UpdateResult(False, f"update_weights_from_tensor {_NO_SESSION}")
            return await self._load(version, flush, None)

    async def begin_session(self) -> UpdateResult:
        """Open the bracket for `load_bucket`."""
        async with self._alone():
            if self._session:
                return UpdateResult(False, "a weight-update session is already open; call end_weight_update() first")
            self._session = True
            return UpdateResult(True, "Success")

    async def end_session(self) -> UpdateResult:
        """Close it."""
        async with self._alone():
            if not self._session:
                return UpdateResult(False, "no weight-update session is open; call begin_weight_update() first")
            self._session = False
            return UpdateResult(True, "Success")

    async def set_version(self, version: str, abort_all: bool) -> None:
        """Rename the weights."""
        if abort_all:
            self._driver.abort_all()
        async with self._driver.inline():
            self._driver.machine.set_weight_version(self._driver.now(), version)
        self._driver.official_version = version

    async def flush(self, timeout_seconds: float) -> str | None:
        """Drop the prefix cache; None when done, else why not."""
        if self._faults.take("flush_refused") is not None:
            return "Flush cache failed.\n"
        return await self._driver.flush(timeout_seconds)

    async def release_memory(self, tags: list[str] | None) -> None:
        """All of it where no tags are named. Kills an engine that works."""
        driver = self._driver
        async with driver.inline():
            machine = driver.machine
            if not machine.is_idle(driver.now(), count_waiting=machine.paused is None):
                driver.die("memory was released while the engine works")
                return
            driver.released_memory |= set(tags or MEMORY_TAGS)
            if "kv_cache" in (tags or MEMORY_TAGS):
                machine.flush_cache(driver.now())

    async def resume_memory(self, tags: list[str] | None) -> None:
        """Take it back. Kills the engine when it has it already."""
        driver = self._driver
        async with driver.inline():
            for tag in tags or MEMORY_TAGS:
                if tag not in driver.released_memory:
                    driver.die(f"memory {tag!r} was resumed that was not released")
                    return
                driver.released_memory.remove(tag)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """In a pause nobody can resume meanwhile; without one, no request is in flight."""
        driver = self._driver
        async with driver.gate_lock:
            if driver.paused:
                async with driver.inline():
                    yield
                return
        async with driver.writer(), driver.inline():
            yield

    async def _load(self, version: str | None, flush: bool, path: str | None) -> UpdateResult:
        driver, faults = self._driver, self._faults
        if faults.take("load_hangs") is not None:
            await asyncio.Event().wait()
        await asyncio.sleep(self._load_seconds / driver.time_scale)
        if path == "" or faults.take("load_fails") is not None:
            return UpdateResult(False, f"Failed to get weights iterator: Cannot find any model weights with `{path}`.")
        if "weights" in driver.released_memory:
            driver.die("weights were loaded into memory that is released")
            await driver.unless_dying()
        if version is not None:
            driver.machine.set_weight_version(driver.now(), version)
        if faults.take("load_kills") is not None:
            driver.die("told to die after a weight load")
            await driver.unless_dying()
        if flush and (faults.take("flush_refused") is not None or not driver.machine.flush_cache(driver.now())):
            return UpdateResult(False, _NOT_FLUSHED)
        message = "Success" if path is None else "Succeeded to update model weights."
        if path is not None:
            driver.served_model_name = path
        if version is not None:
            driver.official_version = version
            message += f" Weight version updated to {version}."
        return UpdateResult(True, message)
