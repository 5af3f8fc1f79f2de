"""The control side of the SGLang door: pausing, flushing, new weights, the engine's memory (SGLang 0.5.23).

Invariants
- Nothing is sent that is known to stop the server or to block it for good: a pause by abort after one in place, a second
  load while one runs, releasing memory while it works, resuming what was not released, working on released memory.
- An order whose answer did not come may have been taken, so it counts as taken: the door then takes the engine for
  paused, or its memory for released. A new incarnation of the engine starts with a clean sheet.
- Every wait has an end. A weight load that was given up on may still happen in the engine.

What this module does not know: versions other than as strings, in which order to publish, what other clients of the same
server do. An engine that an earlier process of ours left paused or released is not told from one that is just busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import orjson

from rolloutd.engines.base import EngineFault, FaultKind
from rolloutd.engines.control import MEMORY_TAGS, PauseMode, WeightsLoaded
from rolloutd.engines.sglang_attempt import Timeouts
from rolloutd.engines.sglang_calls import Calls
from rolloutd.engines.sglang_info import ModelInfo

# How often a refused flush is tried again. Not left to SGLang's own `?timeout=`: that waits for an empty queue, which a
# pause by retract never has, and a second flush meanwhile is refused.
_FLUSH_RETRY_SECONDS = 0.05
# The batch of an attempt that has just ended may still count as work; a flush proves that it is over.
_IDLE_WITHIN_SECONDS = 2.0
_NOT_TAKEN = (FaultKind.UNREACHED, FaultKind.REFUSED, FaultKind.BUSY)
_LOAD_ROUTE = "/update_weights_from_disk"
# How SGLang begins its word per data-parallel rank, joined by _RANKS_JOINED_BY.
_LOADED = "Succeeded to update model weights"
_LOADED_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
# Said when reading failed half-way. The roll-back reads the new path once more, since SGLang forgets the old one first: if that
# works, the new weights run under the old label; if it fails too, the server ends.
_ROLLED_BACK = b"Rolling back to original weights"
_RANKS_JOINED_BY = " | "


class _Updated(msgspec.Struct):
    """SGLang's answer to weight calls, with status 200 or 400."""

    success: bool
    message: str


class SGLangControl:
    """The control calls of `Engine`, and what the door remembers of them."""

    def __init__(self, calls: Calls, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._calls = calls
        self._paused: PauseMode | None = None
        self._released: frozenset[str] = frozenset()
        self._releasing = False
        self._loading = False
        self._load_in_doubt = False
        self._incarnation = ""
        self._version = ""  # of the weights, as last read

    def _attempts_running(self) -> int:
        """Attempts through this door that have not ended."""
        raise NotImplementedError

    def _note_swap_in_place(self, version: str) -> None:
        """The weights became `version` in a pause in place."""
        raise NotImplementedError

    def _is_paused(self) -> bool:
        """Whether this door has paused the engine."""
        return self._paused is not None

    def _is_asleep(self) -> bool:
        """Whether memory that work needs is released, or about to be."""
        return self._releasing or bool(self._released)

    def _note_incarnation(self, incarnation: str, version: str) -> None:
        """A process that was started anew is neither paused nor without memory. `version`: of its weights."""
        self._version = version
        if self._incarnation and incarnation != self._incarnation:
            self._paused = None
            self._released = frozenset()
            self._load_in_doubt = False
        self._incarnation = incarnation

    # ---- pause ----

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. ABORT takes a second whenever work was in flight."""
        if mode is PauseMode.ABORT and self._paused is PauseMode.IN_PLACE:
            raise self._refused(
                "pause by abort after a pause in place blocks SGLang for good: resume first, then pause by abort"
            )
        before, self._paused = self._paused, mode
        try:
            await self._order("/pause_generation", {"mode": mode.value}, self.timeouts.pause_seconds)
        except EngineFault as fault:
            if fault.kind in _NOT_TAKEN:
                self._paused = before
            raise

    async def resume(self) -> None:
        """See `Engine.resume`."""
        if self._is_asleep():
            raise self._refused(
                "resume: the engine's memory is released, work would run on nothing: resume_memory first"
            )
        await self._order("/continue_generation", {}, self.timeouts.control_seconds)
        self._paused = None

    async def flush(self, timeout_seconds: float) -> bool:
        """See `Engine.flush`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while not await self._flush_once():
            left = deadline - loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(_FLUSH_RETRY_SECONDS, left))
        return True

    async def _flush_once(self) -> bool:
        path = "/flush_cache"
        status, body = await self._calls.order(path, b"", self.timeouts.control_seconds)
        if status not in (200, 400):
            raise self._calls.refusal(path, status, body)
        return status == 200

    # ---- weights ----

    async def load_weights(self, path: str, version: str, *, flush: bool) -> WeightsLoaded:
        """See `Engine.load_weights`. Takes up to `weights_seconds`."""
        self._check_words("load_weights", path=path, version=version)
        self._weights_in_place("load_weights")
        if self._loading:
            raise self._refused("load_weights: another load runs, and SGLang dies of two at once in a pause")
        order = {"model_path": path, "weight_version": version, "flush_cache": flush, "abort_all_requests": False}
        self._loading = True
        try:
            if self._load_in_doubt:
                await self._outlast_earlier_load()
            status, body = await self._load(orjson.dumps(order))
        finally:
            self._loading = False
        if status == 200:
            return WeightsLoaded(flushed=flush)
        if status == 400 and _is_loaded_not_flushed(body):
            return WeightsLoaded(flushed=False)
        refusal = self._calls.refusal(_LOAD_ROUTE, status, body)
        if _ROLLED_BACK in body:
            message = (
                f"{refusal.message} (it reads the same path again for that: whose weights it has now is not known)"
            )
            raise EngineFault(FaultKind.BROKEN, message)
        raise refusal

    async def _load(self, order: bytes) -> tuple[int, bytes]:
        self._load_in_doubt = True
        try:
            answer = await self._calls.order(_LOAD_ROUTE, order, self.timeouts.weights_seconds)
        except EngineFault as fault:
            self._load_in_doubt = fault.kind not in _NOT_TAKEN
            raise
        self._load_in_doubt = False
        return answer

    async def _outlast_earlier_load(self) -> None:
        """A load that was given up on may still run in the engine, which says nothing of its scheduler until its end."""
        try:
            await self._calls.get("/server_info", self.timeouts.control_seconds)
        except EngineFault as fault:
            if fault.kind is not FaultKind.SILENT:
                raise
            raise self._calls.fault(
                FaultKind.BUSY, "load_weights: an earlier load that was given up on still runs; try again later"
            ) from fault

    async def begin_update(self) -> None:
        """See `Engine.begin_update`."""
        self._weights_in_place("begin_update")
        await self._order("/begin_weight_update", {"selector": "all"}, self.timeouts.weights_seconds)

    async def end_update(self) -> None:
        """See `Engine.end_update`."""
        self._weights_in_place("end_update")
        await self._order("/end_weight_update", {}, self.timeouts.weights_seconds)

    async def name_version(self, version: str) -> None:
        """See `Engine.name_version`."""
        self._check_words("name_version", version=version)
        order = {"new_version": version, "abort_all_requests": False}
        await self._order("/update_weight_version", order, self.timeouts.control_seconds)

    async def weight_version(self) -> str:
        """See `Engine.weight_version`."""
        path = "/model_info"
        body = await self._calls.get(path, self.timeouts.control_seconds)
        version = self._calls.decode(body, ModelInfo, path).weight_version
        if version != self._version:
            if self._paused is PauseMode.IN_PLACE:
                self._note_swap_in_place(version)
            self._version = version
        return version

    def _weights_in_place(self, call: str) -> None:
        if "weights" in self._released:
            raise self._refused(f"{call}: the engine's weights are released: resume_memory of weights first")

    # ---- memory ----

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        """See `Engine.release_memory`. Drops the prefix cache: only a flush proves that the engine is idle."""
        self._check_tags("release_memory", tags)
        if again := self._released.intersection(tags):
            raise self._refused(f"release_memory: {_names(again)} is released already")
        running = self._attempts_running()
        if running and self._paused is not PauseMode.RETRACT:
            raise self._refused(
                f"release_memory: {running} attempts are running, and SGLang dies when it is not idle: wait for them, "
                "or pause by abort or retract first"
            )
        self._releasing = True
        try:
            if not await self.flush(_IDLE_WITHIN_SECONDS):
                raise self._calls.fault(
                    FaultKind.BUSY,
                    "release_memory: the engine still works, and SGLang dies when it is not idle; try again later",
                )
            before, self._released = self._released, self._released.union(tags)
            try:
                await self._order("/release_memory_occupation", {"tags": tags}, self.timeouts.weights_seconds)
            except EngineFault as fault:
                if fault.kind in _NOT_TAKEN:
                    self._released = before
                raise
        finally:
            self._releasing = False

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        """See `Engine.resume_memory`."""
        self._check_tags("resume_memory", tags)
        if missing := set(tags) - self._released:
            raise self._refused(
                f"resume_memory: {_names(missing)} was not released through this door, and SGLang dies of resuming what "
                "it still has"
            )
        before, self._released = self._released, self._released.difference(tags)
        self._releasing = True  # no work before the memory is back
        try:
            await self._order("/resume_memory_occupation", {"tags": tags}, self.timeouts.weights_seconds)
        except EngineFault as fault:
            if fault.kind in _NOT_TAKEN:
                self._released = before
            raise
        finally:
            self._releasing = False

    def _check_tags(self, call: str, tags: tuple[str, ...]) -> None:
        unknown = sorted(set(tags).difference(MEMORY_TAGS))
        if not tags or unknown or len(set(tags)) < len(tags):
            raise self._refused(f"{call}: tags {tags} must be one or more of {_names(MEMORY_TAGS)}, each once")

    # ---- words ----

    def _check_words(self, call: str, **words: str) -> None:
        for name, value in words.items():
            if not value:
                raise self._refused(f"{call}: {name} is empty")

    async def _order(self, path: str, body: object, seconds: float) -> None:
        status, answer = await self._calls.order(path, orjson.dumps(body), seconds)
        if status != 200:
            raise self._calls.refusal(path, status, answer)

    def _refused(self, message: str) -> EngineFault:
        return self._calls.fault(FaultKind.REFUSED, message)


def _is_loaded_not_flushed(body: bytes) -> bool:
    try:
        answer = msgspec.json.decode(body, type=_Updated)
    except msgspec.MsgspecError:
        return False
    ranks = answer.message.split(_RANKS_JOINED_BY)
    return all(rank.startswith((_LOADED, _LOADED_NOT_FLUSHED)) for rank in ranks)


def _names(words: Sequence[str] | set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(words))
