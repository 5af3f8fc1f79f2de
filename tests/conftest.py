"""What every test shares: which core runs, the real engine's switch, hypothesis without time limits, and no process left behind."""

from __future__ import annotations

import contextlib
import os

import hypothesis
import psutil
import pytest

from rolloutd.server.core_build import core_is_compiled, core_words

# A busy machine is no finding: examples are limited by number, never by time.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
# pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=5_000)
hypothesis.settings.load_profile("default")

# `make test` says "compiled" where it could compile the core: the tests then refuse to run on anything else.
TEST_CORE = "ROLLOUTD_TEST_CORE"
collect_ignore = [] if os.environ.get(TEST_CORE) == "compiled" else ["test_compiled.py"]

SKIP_SGLANG = "ROLLOUTD_SKIP_SGLANG"


def pytest_report_header() -> str:
    return core_words()


def pytest_configure() -> None:
    wanted = os.environ.get(TEST_CORE, "")
    if wanted not in ("", "compiled"):
        raise pytest.UsageError(f"{TEST_CORE}={wanted}: must be compiled, or not set")
    if wanted and not core_is_compiled():
        raise pytest.UsageError(f"{TEST_CORE}=compiled, but the core on the path is plain Python: see `make test`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a real SGLang when asked to, and says so in the summary."""
    if os.environ.get(SKIP_SGLANG) != "1":
        return
    for item in items:
        if item.get_closest_marker("sglang") is not None:
            item.add_marker(pytest.mark.skip(reason=f"{SKIP_SGLANG}=1: not run against a real SGLang"))


def _is_helper_of_the_interpreter(process: psutil.Process) -> bool:
    # multiprocessing keeps it until the interpreter ends.
    return "multiprocessing.resource_tracker" in " ".join(process.cmdline())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session when a test left a child process running, and stops that process."""
    _, running = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=2)
    left = []
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE or _is_helper_of_the_interpreter(process):
                continue
            print(f"\nleft running by a test: {process.pid} {' '.join(process.cmdline())}")
            process.kill()
            left.append(process)
    if left:
        psutil.wait_procs(left, timeout=10)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
