"""Real SGLang servers on the CPU, started once for the whole pytest run and shared by every test that asks for them.

Invariants
- The environment comes from `deploy/sglang-cpu/setup.sh` and lives in a cache folder outside the checkout; the first
  run builds it.
- They publish their KV events, so that every test in front of them runs with a prefix index that follows them.
- Servers listen on free loopback ports, start side by side, and die with the pytest process, however it ends.
- `ROLLOUTD_SKIP_SGLANG=1` skips the tests that need them and says so; nothing else does.

A conftest makes them a session-scoped fixture with one line: `return shared_servers(request, 2)`. Several may do so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.dying import dying

SKIP_VARIABLE = "ROLLOUTD_SKIP_SGLANG"
RECIPE = Path(__file__).resolve().parents[1] / "deploy" / "sglang-cpu"
# Slots of each server: few enough to fill them in a test, and about where this model's throughput stops growing.
MAX_RUNNING_ROLLOUTS = 32
# Start takes 20-30 s on an idle machine of 2 cores, most of it imports; several servers beside other work, minutes.
READY_SECONDS = 600.0
_POLL_SECONDS = 0.25
_STOP_SECONDS = 10.0


@dataclass(slots=True)
class SGLangServer:
    """One running server. `log` is its combined output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    command: list[str]

    def start_again(self) -> None:
        """Start it anew, on the port that it had, after it has ended; `wait_ready` next."""
        self.process.wait(_STOP_SECONDS)
        with self.log.open("ab") as log:
            self.process = _start(self.command, log)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """Ask the server to end, and after a while end the whole process group; the schedulers are its children.

        Only the leader is asked: it removes the shared memory of its schedulers, which they leave behind when killed.
        """
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"SGLang server {self.url} had to be killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def cache_folder() -> Path:
    """Where the environment lives: as setup.sh decides it."""
    if root := os.environ.get("ROLLOUTD_CACHE"):
        return Path(root) / "sglang-cpu-0.5.23"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rolloutd" / "sglang-cpu-0.5.23"


def environment() -> Path:
    """Folder of the finished environment; builds it on the first use (about 3 minutes)."""
    folder = cache_folder()
    subprocess.run([str(RECIPE / "setup.sh"), str(folder)], check=True, stdout=sys.stderr)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(folder: Path, flags: tuple[str, ...] = ()) -> SGLangServer:
    """Start one server and return at once; `wait_ready` next. Its caller stops it."""
    port = _free_port()
    command = [
        str(RECIPE / "serve.sh"),
        str(folder),
        str(port),
        "--max-running-requests",
        str(MAX_RUNNING_ROLLOUTS),
        *flags,
    ]
    handle, name = tempfile.mkstemp(prefix=f"sglang-{port}-", suffix=".log")
    with os.fdopen(handle, "wb") as log:
        process = _start(command, log)
    return SGLangServer(f"http://127.0.0.1:{port}", process, Path(name), command)


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        dying(command), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _publishing() -> tuple[str, ...]:
    """Flags that publish KV events on loopback."""
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{_free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{_free_port()}",
        "bind": True,
    }
    return "--kv-events-config", json.dumps(config)


def wait_ready(servers: list[SGLangServer]) -> None:
    """Until every server answers 200 on /ready. RuntimeError with the end of its log when one does not."""
    deadline = time.monotonic() + READY_SECONDS
    for server in servers:
        while True:
            if server.process.poll() is not None:
                raise RuntimeError(f"SGLang server ended with {server.process.returncode}:\n{server.log_tail()}")
            try:
                with urllib.request.urlopen(server.url + "/ready", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or 503 while it loads
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang server not ready after {READY_SECONDS:g} s:\n{server.log_tail()}")
            time.sleep(_POLL_SECONDS)


_shared: list[SGLangServer] = []


def _stop_shared() -> None:
    for server in _shared:
        server.process.terminate()  # all at once: each takes some seconds
    while _shared:
        server = _shared.pop()
        server.stop()
        server.log.unlink(missing_ok=True)


def shared_servers(request: pytest.FixtureRequest, count: int) -> list[SGLangServer]:
    """The first `count` servers of this pytest run, ready; starts those that do not run yet, all at once.

    `request` is a session-scoped, unparametrised fixture's: they stop when it ends.
    """
    if os.environ.get(SKIP_VARIABLE) == "1":
        pytest.skip(f"needs a real SGLang server, and {SKIP_VARIABLE}=1 is set")
    missing = count - len(_shared)
    if missing > 0:
        request.addfinalizer(_stop_shared)
        folder = environment()
        _shared.extend(start_server(folder, _publishing()) for _ in range(missing))
        wait_ready(_shared)
    return _shared[:count]
