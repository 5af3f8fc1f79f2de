"""setup.py: what a wheel holds with and without a C compiler, and that a compiled core is keyed by its sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_repository import PACKAGE_FOLDERS, ROOT


def setup_script(root: Path = ROOT) -> ModuleType:
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("rolloutd_setup", root / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads."""
    root = tmp_path / "checkout"
    for folder in PACKAGE_FOLDERS.values():
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    return root


def build_wheel(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
        ".",
    ]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ROLLOUTD_COMPILE")}
    return subprocess.run(
        command,
        cwd=root,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_without_a_compiler_a_wheel_is_plain_python_and_says_so(checkout: Path) -> None:
    done = build_wheel(checkout, CC="there-is-no-such-compiler")
    assert done.returncode == 0, done.stdout
    assert "The core stays plain Python" in done.stdout and "no C compiler" in done.stdout
    (wheel,) = (checkout / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "rolloutd/server/presets/simple.yaml" in names
    assert "rolloutd/scheduler/machine.py" in names and not any(name.endswith((".so", ".pyd")) for name in names)


def test_a_compiled_core_that_was_asked_for_and_cannot_be_is_an_error(checkout: Path) -> None:
    done = build_wheel(checkout, CC="there-is-no-such-compiler", ROLLOUTD_COMPILE="1")
    assert done.returncode != 0
    assert "ROLLOUTD_COMPILE=1, but the core cannot be compiled: no C compiler" in done.stdout


def test_the_switch_is_0_or_1(checkout: Path) -> None:
    done = build_wheel(checkout, ROLLOUTD_COMPILE="yes")
    assert done.returncode != 0 and "ROLLOUTD_COMPILE=yes: must be 0" in done.stdout


def test_an_editable_install_never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["setup.py", "editable_wheel"])
    monkeypatch.setenv("ROLLOUTD_COMPILE", "1")
    assert setup_script().wanted() == []


def test_an_edit_to_any_source_asks_for_a_new_core(checkout: Path) -> None:
    setup = setup_script(checkout)
    keys = [setup.fingerprint()]
    for name in ("scheduler/scoring/cost.py", "scheduler/__init__.py", "setup.py"):
        with (checkout / name).open("a", encoding="utf-8") as source:
            source.write("\n")
        keys.append(setup.fingerprint())
    (checkout / "scheduler/added.py").write_text("", encoding="utf-8")
    keys.append(setup.fingerprint())
    assert len(set(keys)) == len(keys)
    (checkout / "server/cli.py").write_text("", encoding="utf-8")
    assert setup.fingerprint() == keys[-1]


def test_what_cannot_be_compiled_any_more_leaves_no_old_core_behind(checkout: Path) -> None:
    setup = setup_script(checkout)
    (setup.CORE / setup.PACKAGE).mkdir(parents=True)
    (setup.CORE / "fingerprint").write_text("of other sources", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "compile_core"],
        cwd=checkout,
        env={**os.environ, "CC": "there-is-no-such-compiler"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "the core is not compiled: no C compiler" in done.stderr
    assert not setup.CORE.exists()
