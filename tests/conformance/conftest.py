"""The two engines that the conformance suite runs against: the simulated one and a real SGLang server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio

from rolloutd.engines.base import EngineInfo
from rolloutd.engines.sglang import SGLangEngine
from tests.sglang_servers import shared_servers

# What the simulated server is started with; the same figures as the real one's (see deploy/sglang-cpu/serve.sh).
VOCABULARY_SIZE = 1024
SIM_FLAGS = (
    *("--vocab-size", str(VOCABULARY_SIZE), "--context-length", "4096", "--kv-tokens", "16384", "--page-size", "16"),
    *("--slots", "32", "--stream-interval", "8", "--time-scale", "3"),
)
SIM_READY_SECONDS = 60.0
# The first test that needs the real servers may build their environment and waits for their start.
REAL = (pytest.mark.sglang, pytest.mark.timeout(1800))


class SimServer:
    """One simulated server on a port of its own; `start` again after it has ended keeps the port."""

    process: subprocess.Popen[bytes]

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rolloutd.engines.sim.server", "--port", str(self._port), *SIM_FLAGS]
        )
        deadline = time.monotonic() + SIM_READY_SECONDS
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the simulated server ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(self.url + "/ready", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    self.stop()
                    raise
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def sim_url() -> Iterator[str]:
    server = SimServer()
    yield server.url
    server.stop()


@pytest.fixture
def own_sim() -> Iterator[SimServer]:
    """A server that the test may break for good."""
    server = SimServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def sglang_url(request: pytest.FixtureRequest) -> str:
    # Two, because the end-to-end tests of the same run want two and starting both at once costs less.
    return shared_servers(request, 2)[0].url


@pytest.fixture(scope="session", params=["sim", pytest.param("sglang", marks=REAL)])
def engine_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sim":
        return str(request.getfixturevalue("sim_url"))
    return str(request.getfixturevalue("sglang_url"))


@pytest.fixture
def is_real(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["engine_url"] == "sglang")


@pytest_asyncio.fixture
async def door(engine_url: str, is_real: bool) -> AsyncIterator[SGLangEngine]:
    # The real one learns the vocabulary from the checkpoint; the simulated one has no checkpoint.
    engine = SGLangEngine(engine_url, vocabulary_size=0 if is_real else VOCABULARY_SIZE)
    await engine.register()
    yield engine
    await engine.close()


@pytest_asyncio.fixture
async def info(door: SGLangEngine) -> EngineInfo:
    return await door.register()


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random ids, the same in every run, different from every other test's: nothing is cached by accident."""
    return np.random.default_rng([ord(letter) for letter in request.node.name])
