"""The buf templates generate stubs: TypeScript in full, C++ and Java messages always, the rest where its plugins are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.node.conftest import npm_client

__all__ = ["npm_client"]

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")
SOURCES = sorted(path.stem for path in (ROOT / "proto/rolloutd/v1").glob("*.proto"))
SERVICES = [name for name in SOURCES if name.endswith("_service")]
SECONDS = 120.0


def template_of(language: str) -> dict[str, Any]:
    template: dict[str, Any] = yaml.safe_load((ROOT / f"proto/buf.gen.{language}.yaml").read_text(encoding="utf-8"))
    return template


def finding(*folders: Path) -> dict[str, str]:
    """An environment in which programs of these folders are found, and protoc."""
    return {**os.environ, "PATH": os.pathsep.join(map(str, [*folders, BUF.parent, os.environ["PATH"]]))}


def generate(template: Path, out: Path, environment: Mapping[str, str]) -> Path:
    """Runs the template; the folder that its first plugin wrote to."""
    command = [str(BUF), "generate", "--template", str(template), "-o", str(out)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return out / str(yaml.safe_load(template.read_text(encoding="utf-8"))["plugins"][0]["out"])


def names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.rglob(pattern)}


def test_there_is_a_template_for_every_language_and_a_word_on_each() -> None:
    languages = {path.name.split(".")[2] for path in (ROOT / "proto").glob("buf.gen.*.yaml")}
    assert languages == {"cpp", "go", "java", "rust", "typescript"}
    page = (ROOT / "docs/languages.md").read_text(encoding="utf-8")
    for language in languages:
        assert f"buf.gen.{language}.yaml" in page
        for plugin in template_of(language)["plugins"]:
            assert "protoc_builtin" in plugin or f"`{plugin['local']}`" in page


def test_typescript_stubs_type_check(npm_client: Path, tmp_path: Path) -> None:
    binaries = npm_client / "node_modules/.bin"
    stubs = generate(ROOT / "proto/buf.gen.typescript.yaml", tmp_path, finding(binaries))
    assert names(stubs, "*.ts") == {f"{name}_pb.ts" for name in SOURCES}
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(npm_client / "node_modules", target_is_directory=True)
    (tmp_path / "user.ts").write_text(
        "import { create, toBinary } from '@bufbuild/protobuf'\n"
        "import { SubmitRolloutRequestSchema } from './gen/typescript/rolloutd/v1/rollout_service_pb.js'\n"
        "const request = create(SubmitRolloutRequestSchema, { hello: { runId: 'r', consumerId: 'c' } })\n"
        "const bytes: Uint8Array = toBinary(SubmitRolloutRequestSchema, request)\n"
        "// @ts-expect-error no such field\n"
        "create(SubmitRolloutRequestSchema, { hallo: bytes })\n",
        encoding="utf-8",
    )
    flags = ["--strict", "--noEmit", "--module", "nodenext", "--target", "es2022", "--types", "node"]
    done = subprocess.run(
        [str(binaries / "tsc"), *flags, "user.ts"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("language", ["cpp", "java"])
def test_messages_of_languages_that_protoc_itself_knows(language: str, tmp_path: Path) -> None:
    """Without the gRPC plugins, which this machine need not have."""
    template = template_of(language)
    template["plugins"] = [plugin for plugin in template["plugins"] if "protoc_builtin" in plugin]
    messages = tmp_path / "messages.yaml"
    messages.write_text(yaml.safe_dump(template), encoding="utf-8")
    stubs = generate(messages, tmp_path, finding())
    if language == "cpp":
        assert names(stubs, "*.pb.cc") == {f"{name}.pb.cc" for name in SOURCES}
        header = (stubs / "rolloutd/v1/rollout.pb.h").read_text(encoding="utf-8")
        assert "token_bytes() const" in header
    else:
        assert {"RolloutSubmission.java", "SubmitRolloutRequest.java", "Outcome.java"} <= names(stubs, "*.java")
        source = (stubs / "com/rolloutd/v1/RolloutSubmission.java").read_text(encoding="utf-8")
        assert "com.google.protobuf.ByteString getTokenBytes()" in source


@pytest.mark.parametrize("language", ["cpp", "go", "java", "rust"])
def test_stubs_where_the_plugins_are_installed(language: str, tmp_path: Path) -> None:
    plugins = [plugin["local"] for plugin in template_of(language)["plugins"] if "local" in plugin]
    missing = [plugin for plugin in plugins if shutil.which(plugin) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not on PATH: no {language} stubs of the services generated")
    stubs = generate(ROOT / f"proto/buf.gen.{language}.yaml", tmp_path, finding())
    services = {
        "cpp": {f"{name}.grpc.pb.cc" for name in SERVICES},
        "go": {f"{name}_grpc.pb.go" for name in SERVICES},
        "java": {f"{''.join(word.title() for word in name.split('_'))}Grpc.java" for name in SERVICES},
        "rust": {"rolloutd.v1.rs", "rolloutd.v1.tonic.rs"},
    }
    assert services[language] <= names(stubs, "*")
