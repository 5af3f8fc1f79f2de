"""Builds wheels, and compiles the scheduling core in them with mypyc where there is a C compiler.

`scheduler/` is plain Python and stays that for development: an editable install never compiles, so no edited file hides behind
an older binary. Wheels (`pip install .`, the container) hold the compiled modules beside their sources. ROLLOUTD_COMPILE=0
leaves them out, ROLLOUTD_COMPILE=1 makes a build without them an error; `rolloutd --version` says which core is installed.

`python setup.py compile_core` (that is `make compiled`) puts only the compiled core into `CORE`, for PYTHONPATH to put first.
It is keyed by the content of every source and by what compiles it: nothing is done when nothing changed, and an old build is
removed before a new one is tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import Command, Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "scheduler"
PACKAGE = Path("rolloutd/scheduler")
CORE = ROOT / "build/compiled"
STAGING = ROOT / "build/mypyc"  # sources under their import names, and the C code made of them
SWITCH = "ROLLOUTD_COMPILE"
LIBRARY = "rolloutd_core"  # of the one shared library with all modules; mypyc appends "__mypyc"
OPTIMISATION = "1"  # -O2 takes twice as long to build and gains less than could be measured
# What tests compare the core with need not be fast.
TOOLS = ("mypy", "numpy")  # numpy for its types
LEFT_OUT = ("__init__.py", "_naive.py")


def sources() -> list[Path]:
    """The modules to compile."""
    return sorted(path for path in SOURCES.rglob("*.py") if not path.name.endswith(LEFT_OUT))


def fingerprint() -> str:
    """Of everything a compiled core depends on."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(SOURCES.rglob("*.py"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    tools = [f"{name} {importlib.metadata.version(name)}" for name in ("setuptools", *TOOLS) if installed(name)]
    flags = [f"{name}={os.environ.get(name, '')}" for name in ("CC", "CFLAGS", "LDFLAGS")]
    digest.update("\n".join([sys.version, sysconfig.get_platform(), *tools, *flags]).encode())
    return digest.hexdigest()


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_tool() -> str:
    """What a build lacks, in words; "" when it can go ahead."""
    for name in TOOLS:
        if not installed(name):
            return f"{name} is not installed"
    from setuptools._distutils import ccompiler
    from setuptools._distutils import sysconfig as compiler_settings

    with tempfile.TemporaryDirectory(prefix="rolloutd-") as folder:
        probe = Path(folder, "probe.c")
        probe.write_text("#include <Python.h>\nint main(void) { return 0; }\n", encoding="utf-8")
        try:
            compiler: Any = ccompiler.new_compiler()
            compiler_settings.customize_compiler(compiler)
            headers = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
            compiler.compile([str(probe)], output_dir=folder, include_dirs=headers)
        except (BaseError, CCompilerError, OSError) as error:
            return f"no C compiler that finds Python's headers ({error})"
    return ""


def extensions() -> list[Extension]:
    """The core as C. SystemExit, after mypy's report, when the sources do not fit mypyc."""
    from mypyc.build import mypycify

    shutil.rmtree(STAGING, ignore_errors=True)
    shutil.copytree(SOURCES, STAGING / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    files = [str(PACKAGE / path.relative_to(SOURCES)) for path in sources()]
    options = ["--config-file=", "--namespace-packages", "--explicit-package-bases"]
    report = io.StringIO()  # of interest only when it failed: it also names every generator expression
    try:
        # mypyc keeps the names of files as they are given, for tracebacks.
        with contextlib.chdir(STAGING), contextlib.redirect_stdout(report):
            found = mypycify(
                [*options, *files], opt_level=OPTIMISATION, group_name=LIBRARY, target_dir=str(STAGING / "c")
            )
    except SystemExit:
        say(f"mypyc does not accept the core ({SWITCH}=0 leaves it plain Python):\n{report.getvalue()}")
        raise
    for extension in found:
        extension.sources = [os.path.relpath(source, ROOT) for source in extension.sources]
        # A newer compiler's new warning is no reason to be without the core.
        extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
    return found


def wanted() -> list[Extension]:
    """What this run of setuptools compiles: nothing but for wheels."""
    choice = os.environ.get(SWITCH, "")
    if choice not in ("", "0", "1"):
        raise SystemExit(
            f"{SWITCH}={choice}: must be 0 (plain Python), 1 (compiled or an error) or not set (if possible)"
        )
    if choice == "0" or "bdist_wheel" not in sys.argv:
        return []
    lacking = missing_tool()
    if not lacking:
        return extensions()
    if choice == "1":
        raise SystemExit(f"{SWITCH}=1, but the core cannot be compiled: {lacking}")
    say(f"The core stays plain Python, which costs about twice the CPU time: {lacking}.")
    return []


def say(line: str) -> None:
    print(f"rolloutd: {line}", file=sys.stderr, flush=True)


class FreshPackages(build_py):
    """Modules of an earlier build are not shipped with this one's."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, "rolloutd"), ignore_errors=True)
        super().run()


class CompileExtensions(build_ext):
    """Says how to do without when the compiler fails."""

    def run(self) -> None:
        try:
            super().run()
        except (BaseError, CCompilerError):
            say(f"the core cannot be compiled here; {SWITCH}=0 leaves it plain Python")
            raise


class CompileCore(Command):
    """`python setup.py compile_core`: the compiled core alone, in `CORE`; prints whether it is there."""

    description = "compile the scheduling core with mypyc"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        key = CORE / "fingerprint"
        now = fingerprint()
        if key.exists() and key.read_text(encoding="utf-8") == now:
            return
        shutil.rmtree(CORE, ignore_errors=True)
        lacking = missing_tool()
        if lacking:
            say(f"the core is not compiled: {lacking}. Plain Python is used in its place.")
            return
        say("compiling the core, which takes some minutes")
        with building() as folder:
            distribution = Distribution({"name": LIBRARY, "ext_modules": extensions()})
            command = CompileExtensions(distribution)
            command.build_lib = str(folder)
            command.build_temp = str(STAGING / "objects")
            command.ensure_finalized()
            command.run()
            shutil.copytree(STAGING / PACKAGE, folder / PACKAGE, dirs_exist_ok=True)
            (folder / "fingerprint").write_text(now, encoding="utf-8")
        say(f"compiled into {CORE.relative_to(ROOT)}")


@contextlib.contextmanager
def building() -> Iterator[Path]:
    """A folder that becomes `CORE` when all went well, in one step."""
    CORE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=CORE.parent) as folder:
        new = Path(folder, CORE.name)
        new.mkdir()
        yield new
        new.rename(CORE)


if __name__ == "__main__":
    commands = {"build_py": FreshPackages, "build_ext": CompileExtensions, "compile_core": CompileCore}
    setup(cmdclass=commands, ext_modules=wanted())
