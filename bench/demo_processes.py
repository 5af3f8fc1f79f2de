"""The child processes of a demonstration: started, watched, measured, and none left behind.

Invariants
- Every child leads a process group of its own; leaving the `async with` ends all groups: SIGTERM first, SIGKILL after
  `STOP_SECONDS`. Where this process is killed outright, the kernel ends the children (Linux).
- The output of each child goes to a file of its own in `folder`.

What this module does not know: what the children are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_SECONDS = 5.0
PROBE_SECONDS = 0.1
LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded here, because between fork and exec a child should do as little as possible.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildFailed(Exception):
    """A child ended, or did not become ready. The message shows the end of its log."""


class Child:
    """One running child."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Of the process, and of the group that it leads."""
        return self.process.pid

    def failed(self, what: str) -> ChildFailed:
        """The exception that says so and shows the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        shown = "".join(f"\n  | {line}" for line in lines) or "\n  (it wrote nothing)"
        return ChildFailed(f"{self.name} {what}; its log ends with{shown}")


class Children:
    """All of them. Use as `async with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopping = asyncio.create_task(self.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping  # a second Ctrl-C must not leave children behind
            raise

    async def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start a child. Raises OSError when its program is not there."""
        log = self.folder / (name.replace(" ", "-") + ".log")
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=None if _LIBC is None else _end_with_parent,
            )
        child = Child(name, process, log)
        self.running.append(child)
        return child

    async def until_ready(self, child: Child, probe: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Return once `probe` says so. Raises ChildFailed when the child ends before, or takes longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not await probe():
                    if child.process.returncode is not None:
                        raise child.failed(f"ended with status {child.process.returncode} before it was ready")
                    await asyncio.sleep(PROBE_SECONDS)
        except TimeoutError:
            raise child.failed(f"was not ready within {seconds:g} s") from None

    async def until_one_ends(self) -> None:
        """Wait until a child ends by itself; then raise ChildFailed."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self.running}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        child = waits[done.pop()]
        raise child.failed(f"ended with status {child.process.returncode} in the middle of the demonstration")

    async def stop(self) -> None:
        """End every child and what it started."""
        children, self.running = self.running, []
        for child in children:
            _signal_group(child.pid, signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in children]
        if waits:
            await asyncio.wait(waits, timeout=STOP_SECONDS)
        # Also where the leader is gone already: what it started may not be.
        for child in children:
            _signal_group(child.pid, signal.SIGKILL)
        await asyncio.gather(*waits)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _end_with_parent() -> None:
    """In the child, before its program starts."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
