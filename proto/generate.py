"""Generates the Python side of the contract beside its .proto files, or checks that what is there is current.

    python proto/generate.py            write the stubs
    python proto/generate.py --check    exit 1 and name every file that is stale, missing or left over

Invariants
- Everything in proto/rolloutd/v1 except the .proto files and py.typed is written here and by nothing else.
- Needs no network: protoc and the well-known types come with grpcio-tools.
- The stubs load with the oldest grpcio and protobuf that pyproject.toml allows, because grpcio-tools is pinned there to
  the release that sets those floors.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent
PACKAGE = "rolloutd/v1"
HAND_WRITTEN_SUFFIXES = (".proto", ".typed")


def generate(out: Path) -> None:
    """Writes the stubs of all .proto files to `out`/rolloutd/v1. Raises RuntimeError when protoc fails."""
    sources = sorted(f"{PACKAGE}/{path.name}" for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    services = [source for source in sources if source.endswith("_service.proto")]
    descriptors = out / "descriptors.bin"
    _protoc("--python_out", str(out), sources)
    _protoc("--mypy_out", f"quiet:{out}", sources)
    _protoc("--grpc_python_out", str(out), services)
    _protoc("--mypy_grpc_out", f"quiet:{out}", services)
    _protoc("--descriptor_set_out", str(descriptors), sources)
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
    descriptors.unlink()
    (out / PACKAGE / "__init__.py").write_text(_package_init(files), encoding="utf-8")


def _protoc(option: str, out: str, sources: list[str]) -> None:
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", f"{option}={out}", *sources]
    # The mypy plugins are installed next to the interpreter, which need not be on PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")


def _package_init(files: descriptor_pb2.FileDescriptorSet) -> str:
    """The package's __init__.py, which re-exports every message, enum, enum value and service."""
    imports: list[str] = []
    exported: list[str] = []
    for file in files.file:
        module = file.name.removesuffix(".proto").replace("/", ".")
        names = [message.name for message in file.message_type]
        for enum in file.enum_type:
            names += [enum.name, *(value.name for value in enum.value)]
        imports.append(_import(f"{module}_pb2", names))
        exported += names
        names = []
        for service in file.service:
            names += [f"{service.name}Stub", f"{service.name}Servicer", f"add_{service.name}Servicer_to_server"]
        if names:
            imports.append(_import(f"{module}_pb2_grpc", names))
            exported += names
    all_names = "".join(f'    "{name}",\n' for name in sorted(exported))
    doc = '"""The gRPC contract of rolloutd. Generated from the .proto files by proto/generate.py: do not edit."""'
    return f"{doc}\n\n{''.join(imports)}\n__all__ = [\n{all_names}]\n"


def _import(module: str, names: list[str]) -> str:
    return f"from {module} import (\n{''.join(f'    {name},{chr(10)}' for name in sorted(names))})\n" if names else ""


def _generated(root: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in (root / PACKAGE).iterdir()
        if path.is_file() and path.suffix not in HAND_WRITTEN_SUFFIXES
    }


def differences() -> list[str]:
    """One line per file that is not what the .proto files say; empty when everything is current."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        wanted = _generated(Path(scratch))
    present = _generated(PROTO_ROOT)
    lines = []
    for name in sorted(wanted.keys() | present.keys()):
        if name not in present:
            lines.append(f"missing: {PACKAGE}/{name}")
        elif name not in wanted:
            lines.append(f"left over: {PACKAGE}/{name}")
        elif wanted[name] != present[name]:
            lines.append(f"stale: {PACKAGE}/{name}")
    return lines


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Generate the Python stubs of the contract.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a stub is not current")
    if not parser.parse_args().check:
        with tempfile.TemporaryDirectory() as scratch:
            generate(Path(scratch))
            wanted = _generated(Path(scratch))
        for name in _generated(PROTO_ROOT).keys() - wanted.keys():
            (PROTO_ROOT / PACKAGE / name).unlink()
        for name, content in wanted.items():
            (PROTO_ROOT / PACKAGE / name).write_bytes(content)
        return 0
    lines = differences()
    for line in lines:
        print(line)
    if lines:
        print("The stubs do not match the .proto files: run `make stubs` and commit the result.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
