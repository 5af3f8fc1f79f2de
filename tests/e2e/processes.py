"""The processes of an end-to-end test: `rolloutd serve` and simulated engines, started as a user starts them.

Invariants
- Every process listens on a free loopback port and dies with the test run, however that ends.
- What a process prints goes to a file; a failed start shows its end.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.dying import dying

READY_SECONDS = 60.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02

# Engines are watched closely and shutting down is quick, so that tests need not wait for either.
QUICK: Mapping[str, str] = {
    "ROLLOUTD_ENGINE__POLL_SECONDS": "0.1",
    "ROLLOUTD_ENGINE__REGISTER_BACKOFF_SECONDS": "0.1",
    "ROLLOUTD_ENGINE__REGISTER_BACKOFF_MAX_SECONDS": "0.5",
    "ROLLOUTD_ENGINE__LOSE_SECONDS": "1",
    "ROLLOUTD_SERVER__SHUTDOWN_GRACE_SECONDS": "0",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One process, started by `start` and again after it has ended."""

    process: subprocess.Popen[bytes]

    def __init__(self, command: Sequence[str], listening: str, environment: Mapping[str, str] | None = None) -> None:
        """`listening`: a pattern of the line that says it listens."""
        self._command = list(command)
        self._listening = re.compile(listening)
        self._environment = {**os.environ, **(environment or {})}
        handle, name = tempfile.mkstemp(prefix="rolloutd-e2e-", suffix=".log")
        os.close(handle)
        self.log = Path(name)

    def start(self) -> re.Match[str]:
        """Start it and return when it listens, with the match of its line. RuntimeError with its output if it does not."""
        begin = self.log.stat().st_size
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                dying(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        deadline = time.monotonic() + READY_SECONDS
        while True:
            match = self._listening.search(self.output()[begin:])
            if match is not None:
                return match
            if self.process.poll() is not None:
                raise RuntimeError(f"{self._command} ended with {self.process.returncode}:\n{self.output()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command} does not listen after {READY_SECONDS:g} s:\n{self.output()}")
            time.sleep(_POLL_SECONDS)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def terminate(self) -> int:
        """SIGTERM, and its exit code once it has ended."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def discard(self) -> None:
        """End it, if it still runs, and remove its output."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.unlink(missing_ok=True)


class Rolloutd(Child):
    """`rolloutd serve` with these engines; a start after an end keeps the port."""

    def __init__(self, engines: Sequence[str], *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "rolloutd.server.cli", "serve", "--port", str(self.port)]
        for engine in engines:
            command += ["--engine", engine]
        super().__init__([*command, *flags], r"gRPC on \S+:\d+", {**QUICK, **(environment or {})})


class SimEngine(Child):
    """A simulated engine; a start after an end keeps the port."""

    def __init__(self, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-u", "-m", "rolloutd.engines.sim.server", "--port", str(port)]
        super().__init__([*command, *flags], r"simulated engine listening on \S+")
