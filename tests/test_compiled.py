"""The compiled core is the one of these sources, whole, and does what they do. Collected where `make test` could compile one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from rolloutd import scheduler
from tests.scheduler.kit import Bench
from tests.scheduler.virtual.test_determinism import fingerprint
from tests.test_build import setup_script

SEEDS = range(1_000, 1_016)


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return setup_script()


def test_it_was_compiled_from_the_sources_as_they_are(setup: ModuleType) -> None:
    assert (setup.CORE / "fingerprint").read_text(encoding="utf-8") == setup.fingerprint()


def test_every_module_of_it_is_machine_code(setup: ModuleType) -> None:
    assert Path(scheduler.__path__[0]) == setup.CORE / setup.PACKAGE
    for path in setup.sources():
        name = ".".join(("rolloutd.scheduler", *path.relative_to(setup.SOURCES).with_suffix("").parts))
        file = importlib.import_module(name).__file__
        assert file is not None and file.endswith(tuple(EXTENSION_SUFFIXES)), name


def test_it_decides_what_plain_python_decides() -> None:
    """Every event and action of whole schedules, with their times."""
    program = (
        "from rolloutd.server.core_build import core_is_compiled\n"
        "from tests.scheduler.virtual.test_determinism import fingerprint\n"
        "assert not core_is_compiled()\n"
        f"print(*[fingerprint(seed) for seed in {SEEDS}])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [fingerprint(seed) for seed in SEEDS]


def test_an_error_in_it_names_the_line_of_its_source() -> None:
    with pytest.raises(TypeError) as caught:
        Bench().core.handle(None, 0.0)  # type: ignore[arg-type]
    last = caught.traceback[-1]
    assert Path(last.path).parts[-3:] == ("rolloutd", "scheduler", "machine.py")
    assert "def handle" in str(last.statement)
