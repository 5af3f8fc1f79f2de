"""Records as lines of JSON in a rotating file.

Invariants
- Writing never holds the event loop: records gather in memory, and a thread renders and writes them, twice a second.
- Memory is bounded: above `MAX_BUFFERED` records the newest are dropped; what a full disk refuses is dropped too. Both are
  counted and said in the log, never silent.
- A file holds whole lines only: a write that fails half-way is taken back.
- The disk is bounded: `max_bytes` a file, `files` older ones beside it ("PATH.1" is the newest of them), the oldest removed.

What this module does not know: what the records are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from rolloutd.server.config import JsonLinesSettings
from rolloutd.server.logging import get_logger

MAX_BUFFERED = 16_384
_FLUSH_SECONDS = 0.5

Item = TypeVar("Item")


class JsonLines(Generic[Item]):
    """One file. `render` makes the line of a record, without its end, in a thread. `name`: for the log."""

    def __init__(self, settings: JsonLinesSettings, render: Callable[[Item], str], name: str) -> None:
        assert settings.path is not None
        self.dropped_records = 0
        self._path = settings.path
        self._max_bytes = settings.max_bytes
        self._files = settings.files
        self._render = render
        self._name = name
        self._items: list[Item] = []
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._log = get_logger(name)
        self._open()

    def put(self, item: Item) -> None:
        """Keep a record until it is written. It must not change any more."""
        if len(self._items) >= MAX_BUFFERED:
            self.dropped_records += 1
        else:
            self._items.append(item)

    def start(self) -> None:
        """Begin to write, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def close(self) -> None:
        """Write what is left and close the file."""
        self._closing.set()
        if self._task is not None:
            await self._task
        await self._flush()
        os.close(self._file)

    async def _run(self) -> None:
        while not self._closing.is_set():
            await self._flush()
            try:
                await asyncio.wait_for(self._closing.wait(), _FLUSH_SECONDS)
            except TimeoutError:
                continue

    async def _flush(self) -> None:
        items, self._items = self._items, []
        if items:
            unwritten, problem = await asyncio.to_thread(self._write, items)
            self.dropped_records += unwritten
            if problem is not None:
                self._log.error("records_not_written", path=self._path, records=unwritten, exc_info=problem)
        if self.dropped_records:
            self._log.warning("records_dropped", path=self._path, records=self.dropped_records)
            self.dropped_records = 0

    def _write(self, items: Sequence[Item]) -> tuple[int, Exception | None]:
        """Write all; else how many were not written, and why."""
        chunk, held, done = bytearray(), 0, 0
        try:
            for item in items:
                line = self._render(item).encode() + b"\n"
                if self._size + len(chunk) + len(line) > self._max_bytes and self._size + len(chunk) > 0:
                    self._append(chunk)
                    done, held, chunk = done + held, 0, bytearray()
                    self._rotate()
                chunk += line
                held += 1
            self._append(chunk)
        except Exception as error:  # the next ones are tried again; the log says what became of these
            return len(items) - done, error
        return 0, None

    def _append(self, chunk: bytearray) -> None:
        left = memoryview(chunk)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(chunk)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            if os.path.exists(older := f"{self._path}.{number}"):
                os.replace(older, f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
        old = self._file
        self._open()
        os.close(old)
