"""deploy/Dockerfile without a Docker: what it copies is there and let through, and what it runs as and answers with."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest

from rolloutd.server.cli import main
from tests.deploy.manifests import ROOT
from tests.test_repository import PACKAGE_FOLDERS, PROJECT


class Stage:
    """Instructions of one stage, in order."""

    def __init__(self, base: str, name: str) -> None:
        self.base = base
        self.name = name
        self.instructions: list[tuple[str, str]] = []

    def last(self, keyword: str) -> str:
        return [arguments for word, arguments in self.instructions if word == keyword][-1]


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    found: list[Stage] = []
    for line in lines:
        word, _, arguments = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = arguments.partition(" AS ")
            found.append(Stage(base, name))
        elif found:
            found[-1].instructions.append((word, arguments))
    return found


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out: the last rule that names it, or a folder above it, decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        rule = line.removeprefix("!")
        parts = Path(path).parts
        names = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        if rule.startswith("**/"):
            hit = any(fnmatch.fnmatchcase(part, rule[3:]) for part in parts)
        else:
            hit = any(fnmatch.fnmatchcase(name, rule) and name.count("/") == rule.count("/") for name in names)
        if hit:
            out = not line.startswith("!")
    return out


def test_two_stages_of_one_base(stages: list[Stage]) -> None:
    builder, runtime = stages
    assert builder.name == "builder" and builder.base == runtime.base  # the environment moves between them as it is
    copies = [arguments for word, arguments in runtime.instructions if word == "COPY"]
    assert copies == ["--from=builder /opt/rolloutd /opt/rolloutd"]
    assert not any(word == "RUN" for word, _ in runtime.instructions)


def test_everything_that_is_copied_exists_and_is_let_through(stages: list[Stage]) -> None:
    sources = [
        source for word, arguments in stages[0].instructions if word == "COPY" for source in arguments.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source


def test_every_package_is_copied_with_what_the_build_reads(stages: list[Stage]) -> None:
    copied = {
        source for word, arguments in stages[0].instructions if word == "COPY" for source in arguments.split()[:-1]
    }
    for folder in PACKAGE_FOLDERS.values():
        assert any(folder == source or folder.startswith(source + "/") for source in copied), folder
        for path in (ROOT / folder).rglob("*.py"):
            assert not ignored(path.relative_to(ROOT).as_posix()) or "__pycache__" in path.parts
    assert {"pyproject.toml", "setup.py", "requirements.lock", PROJECT["project"]["readme"]} <= copied
    assert set(PROJECT["project"]["license-files"]) <= copied


def test_nothing_else_goes_to_the_builder() -> None:
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "deploy/Dockerfile",
        "api-keys",
        "clients/node/x",
    ):
        assert ignored(path), path
    assert ignored("server/__pycache__/cli.cpython-311.pyc")


def test_requirements_are_the_locked_ones(stages: list[Stage]) -> None:
    installs = [arguments for word, arguments in stages[0].instructions if word == "RUN" and "pip install" in arguments]
    for install in installs:
        assert "--constraint requirements.lock" in install or "--no-deps" in install


def test_it_runs_as_a_numeric_user_that_is_not_root(stages: list[Stage]) -> None:
    user = stages[1].last("USER")
    assert re.fullmatch(r"[1-9]\d+(:[1-9]\d+)?", user)
    after = [word for word, _ in stages[1].instructions]
    assert after.index("USER") < after.index("ENTRYPOINT")


def test_its_commands_are_commands(stages: list[Stage], capsys: pytest.CaptureFixture[str]) -> None:
    runtime = stages[1]
    assert json.loads(runtime.last("ENTRYPOINT")) == ["rolloutd"]  # exec form: SIGTERM reaches it
    assert runtime.last("STOPSIGNAL") == "SIGTERM"
    probe = json.loads(runtime.last("HEALTHCHECK").partition("CMD ")[2])
    assert probe[0] == "rolloutd"
    for command in (json.loads(runtime.last("CMD")), probe[1:-1]):
        with pytest.raises(SystemExit) as done:
            main([*command, "--help"])
        assert done.value.code == 0
        assert "usage" in capsys.readouterr().out


def test_the_image_listens_for_others_and_so_wants_keys(stages: list[Stage]) -> None:
    variables = dict(
        word.split("=", 1)
        for keyword, arguments in stages[1].instructions
        if keyword == "ENV"
        for word in shlex.split(arguments)
    )
    assert variables["ROLLOUTD_SERVER__HOST"] == "0.0.0.0"
    assert not any("KEY" in name or "UNAUTHENTICATED" in name for name in variables)
