"""An engine door inside the test: scripted, no sockets. It says what it was asked and answers when told to."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from rolloutd.engines.base import (
    AttemptRequest,
    EngineFault,
    EngineInfo,
    EngineLoad,
    FaultKind,
    Progress,
    Slice,
)
from rolloutd.engines.control import PauseMode, WeightsLoaded


def tokens(count: int, first: int = 1) -> bytes:
    """`count` token ids, little-endian uint32."""
    return struct.pack(f"<{count}I", *range(first, first + count))


class FakeAttempt:
    """See `Running`."""

    def __init__(self, end: asyncio.Future[Slice]) -> None:
        self._end = end

    def hang_up(self) -> None:
        self._end.cancel()


class FakeDoor:
    """Attempts wait in `running` until `finish` or `fail`, or end at once while `auto` is set."""

    def __init__(self, url: str, *, auto: bool = True, slots: int = 8, context_tokens: int = 4096) -> None:
        self.url = url
        self.auto = auto
        self.slots = slots
        self.context_tokens = context_tokens
        self.reachable = True
        self.registers = True
        self.polls = 0
        self.prefilled_tokens_total = 0
        self.is_ready = True
        self.incarnation = "1"
        self.closed = False
        self.registrations = 0
        self.requests: list[AttemptRequest] = []
        self.running: dict[str, asyncio.Future[Slice]] = {}
        self.progress: dict[str, Callable[[Progress], None]] = {}
        self.aborted: list[str] = []
        self.started = asyncio.Condition()
        self._notices: set[asyncio.Future[None]] = set()
        self.crash: Exception | None = None
        self.extras_bytes = 0
        self.controls: list[tuple[object, ...]] = []  # control calls in order, with their arguments
        self.control_faults: dict[str, EngineFault] = {}  # by name of the call: raised until taken out
        self.paused: PauseMode | None = None
        self.flushes = True  # what `flush` answers, and whether a load that asks for one gets it
        self.version = "default"

    async def register(self) -> EngineInfo:
        self.registrations += 1
        self._reach()
        if not self.registers:
            raise EngineFault(FaultKind.BROKEN, "not the model it was")
        return EngineInfo(
            incarnation=self.incarnation,
            model="fake",
            server_version="0",
            page_size_tokens=16,
            kv_capacity_tokens=max(100_000, 2 * self.context_tokens),
            max_running_rollouts=self.slots,
            context_tokens=self.context_tokens,
            max_prompt_tokens=self.context_tokens - 1,
            vocabulary_size=1000,
            weight_version=self.version,
            incremental_streaming=True,
            kv_cache_bytes=100 << 20,
            warnings=("page size 1 costs hits",),
        )

    async def load(self) -> EngineLoad:
        self._reach()
        self.polls += 1
        used_tokens = 100 * len(self.running)
        return EngineLoad(0.0, len(self.running), 0, used_tokens, 100_000, 0.0, self.prefilled_tokens_total, 0.0)

    async def ready(self) -> bool:
        self._reach()
        return self.is_ready

    def begin(
        self,
        request: AttemptRequest,
        on_progress: Callable[[Progress], None],
        on_end: Callable[[Slice | Exception], None],
    ) -> FakeAttempt:
        if not self.reachable:
            raise EngineFault(FaultKind.BROKEN, "connection refused")
        self.requests.append(request)
        if self.crash is not None:
            raise self.crash
        end: asyncio.Future[Slice] = asyncio.get_running_loop().create_future()
        self.running[request.attempt_id] = end
        self.progress[request.attempt_id] = on_progress

        def over(_: asyncio.Future[Slice]) -> None:
            del self.running[request.attempt_id]
            if end.cancelled():
                return
            fault = end.exception()
            on_end(fault if isinstance(fault, Exception) else end.result())

        end.add_done_callback(over)
        self._notices.add(notice := asyncio.ensure_future(self._notice()))
        notice.add_done_callback(self._notices.discard)
        if self.auto:
            asyncio.get_running_loop().call_soon(self._answer, request, end)
        return FakeAttempt(end)

    async def _notice(self) -> None:
        async with self.started:
            self.started.notify_all()

    def _answer(self, request: AttemptRequest, end: asyncio.Future[Slice]) -> None:
        if not end.done():
            self.report(request, 1)
            end.set_result(self.slice_of(request))

    async def abort(self, attempt_id: str) -> None:
        self.aborted.append(attempt_id)
        end = self.running.get(attempt_id)
        if end is not None and not end.done():
            end.set_result(Slice(attempt_id, b"", "abort"))

    async def close(self) -> None:
        self.closed = True
        for end in self.running.values():
            if not end.done():
                end.set_exception(EngineFault(FaultKind.BROKEN, "closed"))

    # -- control -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._control("pause", mode)
        self.paused = mode
        if mode is PauseMode.ABORT:
            for attempt_id, end in self.running.items():
                if not end.done():
                    end.set_result(Slice(attempt_id, b"", "abort"))

    async def resume(self) -> None:
        self._control("resume")
        self.paused = None

    async def flush(self, timeout_seconds: float) -> bool:
        self._control("flush", timeout_seconds)
        return self.flushes

    async def load_weights(self, path: str, version: str, *, flush: bool) -> WeightsLoaded:
        self._control("load_weights", path, version, flush)
        flushed = flush and self.flushes
        if flushed or not flush:
            self.version = version
        return WeightsLoaded(flushed)

    async def begin_update(self) -> None:
        self._control("begin_update")

    async def end_update(self) -> None:
        self._control("end_update")

    async def name_version(self, version: str) -> None:
        self._control("name_version", version)
        self.version = version

    async def weight_version(self) -> str:
        self._control("weight_version")
        return self.version

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        self._control("release_memory", *tags)

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        self._control("resume_memory", *tags)

    # -- for tests ---------------------------------------------------------------------------------------------------

    async def wait_running(self, count: int) -> list[AttemptRequest]:
        """Return when `count` attempts run; the requests of those."""
        async with asyncio.timeout(5), self.started:
            await self.started.wait_for(lambda: len(self.running) >= count)
        return [request for request in self.requests if request.attempt_id in self.running]

    def report(self, request: AttemptRequest, generated_tokens: int) -> None:
        self.progress[request.attempt_id](self._progress_of(request, generated_tokens))

    def finish(self, request: AttemptRequest, count: int | None = None) -> None:
        self.running[request.attempt_id].set_result(self.slice_of(request, count))

    def finish_all(self) -> None:
        for request in self.requests:
            end = self.running.get(request.attempt_id)
            if end is not None and not end.done():
                end.set_result(self.slice_of(request))

    def fail(self, request: AttemptRequest, kind: FaultKind, message: str = "told to") -> None:
        self.running[request.attempt_id].set_exception(EngineFault(kind, message))

    def slice_of(self, request: AttemptRequest, count: int | None = None) -> Slice:
        count = request.max_new_tokens if count is None else count
        return Slice(
            attempt_id=request.attempt_id,
            token_bytes=tokens(count, first=7),
            finish_reason="length",
            logprob_bytes=struct.pack(f"<{count}f", *([-0.5] * count)) if request.logprobs else b"",
            prompt_tokens=len(request.token_bytes) // 4,
            version_spans=((self.version, 0, count),),
            prompt_logprob_bytes=b"\0" * len(request.token_bytes) if request.prompt_logprobs_from is not None else b"",
            extras={"bulk": "x" * self.extras_bytes} if self.extras_bytes else {},
        )

    def _progress_of(self, request: AttemptRequest, generated_tokens: int) -> Progress:
        return Progress(request.attempt_id, generated_tokens, len(request.token_bytes) // 4, 0)

    def _control(self, call: str, *arguments: object) -> None:
        self._reach()
        self.controls.append((call, *arguments))
        if call in self.control_faults:
            raise self.control_faults[call]

    def _reach(self) -> None:
        if not self.reachable:
            raise EngineFault(FaultKind.BROKEN, "connection refused")
