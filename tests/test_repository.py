"""What holds for the repository as a whole: stubs, layering, packaging, size of files."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
MAX_LINES = 500


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is in stdout."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def python_files() -> list[Path]:
    """Every hand-written Python file of the packages and the tests."""
    folders = [*PACKAGE_FOLDERS.values(), "tests"]
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "proto/rolloutd" not in path.as_posix())


# Contract


def test_stubs_are_what_the_proto_files_say() -> None:
    done = run(sys.executable, "proto/generate.py", "--check")
    assert done.returncode == 0, done.stdout


def test_a_stale_missing_or_left_over_stub_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    package = tmp_path / "proto/rolloutd/v1"
    with (package / "budget.proto").open("a", encoding="utf-8") as proto:
        proto.write("\n// New.\nmessage Appended {}\n")
    (package / "error_pb2.pyi").unlink()
    (package / "gone_pb2.py").write_text("", encoding="utf-8")

    done = run(sys.executable, "proto/generate.py", "--check", cwd=tmp_path)

    assert done.returncode == 1
    for line in (
        "stale: rolloutd/v1/budget_pb2.py",
        "missing: rolloutd/v1/error_pb2.pyi",
        "left over: rolloutd/v1/gone_pb2.py",
    ):
        assert line in done.stdout

    assert run(sys.executable, "proto/generate.py", cwd=tmp_path).returncode == 0
    done = run(sys.executable, "proto/generate.py", "--check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_buf_finds_the_contract_clean() -> None:
    done = run(BIN / "buf", "lint")
    assert done.returncode == 0, done.stdout


def test_buf_refuses_a_field_without_a_comment(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    with (tmp_path / "proto/rolloutd/v1/budget.proto").open("a", encoding="utf-8") as proto:
        proto.write("\n// New.\nmessage Appended {\n  string name = 1;\n}\n")

    done = run(BIN / "buf", "lint", cwd=tmp_path)

    assert done.returncode != 0
    assert 'Field "name"' in done.stdout


# Layering


@pytest.fixture(scope="module")
def copied_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages under their import names, to be broken on purpose."""
    tree = tmp_path_factory.mktemp("layering")
    for package, folder in PACKAGE_FOLDERS.items():
        shutil.copytree(ROOT / folder, tree / package.replace(".", "/"), ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter with our contracts over the packages in `tree`."""
    return run(
        sys.executable,
        BIN / "lint-imports",
        "--no-logo",
        "--no-cache",
        ROOT / "pyproject.toml",
        cwd=tree,
        PYTHONPATH=str(tree),
    )


def test_layers_are_kept(copied_packages: Path) -> None:
    done = lint_imports(copied_packages)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("package", "imported"),
    [
        ("rolloutd.scheduler", "rolloutd.engines.base"),
        ("rolloutd.scheduler.scoring", "rolloutd.v1.rollout_pb2"),
        ("rolloutd.scheduler", "asyncio"),
        ("rolloutd.scheduler.scoring", "time"),
        ("rolloutd.scheduler", "grpc.aio"),
        ("rolloutd.engines", "rolloutd.scheduler"),
        ("rolloutd.engines.sim", "rolloutd.server"),
        ("rolloutd.client", "rolloutd.scheduler"),
        ("rolloutd.client", "rolloutd.server"),
        ("rolloutd.v1", "rolloutd.client"),
    ],
)
def test_an_import_across_layers_is_refused(copied_packages: Path, package: str, imported: str) -> None:
    added = copied_packages / package.replace(".", "/") / "crossing.py"
    added.write_text(f"import {imported}\n", encoding="utf-8")
    try:
        done = lint_imports(copied_packages)
    finally:
        added.unlink()

    assert done.returncode != 0
    assert f"{package}.crossing" in done.stdout


def test_the_scheduler_takes_its_randomness_from_outside() -> None:
    """The module-level functions of `random` share one generator nobody seeded: only the type `Random` is allowed."""
    found = []
    for path in sorted((ROOT / "scheduler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                found += [f"{path.name}:{node.lineno} random.{node.attr}"] if node.attr != "Random" else []
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                found += [f"{path.name}:{node.lineno} {alias.name}" for alias in node.names if alias.name != "Random"]
    assert not found


# Packaging


def test_every_package_folder_is_shipped_and_typed() -> None:
    shipped = set(PROJECT["tool"]["setuptools"]["packages"])
    present = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in PACKAGE_FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert shipped == present
    untyped = [package for package, folder in PACKAGE_FOLDERS.items() if not (ROOT / folder / "py.typed").exists()]
    assert not untyped


def test_the_lock_satisfies_every_requirement() -> None:
    pins: dict[str, set[str]] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split(";")[0].strip().split("==")
            pins.setdefault(canonicalize_name(name), set()).add(version)
    project = PROJECT["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]

    unlocked = [
        str(requirement)
        for requirement in wanted
        if canonicalize_name(requirement.name) != "rolloutd"
        and not any(requirement.specifier.contains(pin) for pin in pins.get(canonicalize_name(requirement.name), ()))
    ]

    assert not unlocked


def test_no_file_has_more_lines_than_can_be_read_at_once() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_ci_runs_the_test_command_and_nothing_else() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert commands[-1] == "exec make test"


# Benchmarks


@pytest.mark.parametrize(
    ("printed", "status", "kept"),
    [("a table\n{}\n", 0, "a table\n{}\n"), ("a table\n{}\n", 1, "a table\n{}\n"), ("a tab", 1, "before\n{}\n")],
    ids=["done", "done, and it failed", "broke off"],
)
def test_a_benchmark_that_breaks_off_leaves_the_last_result(
    tmp_path: Path, printed: str, status: int, kept: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.lock", "pyproject.toml", "installed"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{printed}'\nexit {status}\n", encoding="utf-8")
    python.chmod(0o755)
    result = tmp_path / "runs/bench/mix.txt"
    result.parent.mkdir(parents=True)
    result.write_text("before\n{}\n", encoding="utf-8")

    done = run("make", "COMPILED=0", "STAMP=installed", "PYTHON=./python", "bench-mix", cwd=tmp_path)

    assert (done.returncode != 0) is (status != 0), done.stdout
    assert printed in done.stdout and result.read_text(encoding="utf-8") == kept
    assert (result.parent / "mix.txt.new").exists() is (kept != printed)
