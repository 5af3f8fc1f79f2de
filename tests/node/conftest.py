"""The Node client, installed from its lock once per run, and engines and servers as in the end-to-end tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import serve, sim, started

__all__ = ["npm_client", "serve", "sim", "started"]

CLIENT = Path(__file__).resolve().parents[2] / "clients/node"
INSTALL_SECONDS = 180.0
OLDEST_NODE = 20


@pytest.fixture(scope="session")
def npm_client() -> Path:
    """clients/node with its dependencies, contract and types in place. Skips, saying so, where there is no Node."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip(f"no node and npm on PATH: the Node client is not tested (install Node {OLDEST_NODE} or later)")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version}: the Node client is not tested (install Node {OLDEST_NODE} or later)")
    installed = CLIENT / "node_modules/.package-lock.json"
    current = installed.exists() and installed.stat().st_mtime >= (CLIENT / "package-lock.json").stat().st_mtime
    command = [npm, "run", "prepare"] if current else [npm, "ci"]
    done = subprocess.run(
        command, cwd=CLIENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)} in clients/node failed:\n{done.stdout}"
    return CLIENT
