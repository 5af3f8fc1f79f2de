"""The two engines that the conformance suite runs against: the simulated one and a real SGLang server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rolloutd.engines.base import EngineInfo
from rolloutd.engines.sglang import SGLangEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sglang_servers import shared_servers

# What the simulated server is started with; the same figures as the real one's (see deploy/sglang-cpu/serve.sh).
VOCABULARY_SIZE = 1024
SIM_FLAGS = (
    *("--vocab-size", str(VOCABULARY_SIZE), "--context-length", "4096", "--kv-tokens", "16384", "--page-size", "16"),
    *("--slots", "32", "--stream-interval", "8", "--time-scale", "10"),
)
SIM_READY_SECONDS = 30.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sglang: needs a real SGLang server")


def _start_sim() -> tuple[str, subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "rolloutd.engines.sim.server", "--port", str(port), *SIM_FLAGS], start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + SIM_READY_SECONDS
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the simulated server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url + "/ready", timeout=1):
                return url, process
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        time.sleep(0.05)


@pytest.fixture(scope="session")
def sim_url() -> Iterator[str]:
    url, process = _start_sim()
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session", params=["sim", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sim":
        return str(request.getfixturevalue("sim_url"))
    return shared_servers(request.config, 2)[0].url


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
