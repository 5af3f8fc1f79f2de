"""The Kubernetes manifests of deploy/, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = tuple(sorted(path.name for path in FOLDER.glob("*.yaml")))


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")) if document]


def of_kind(name: str, kind: str) -> dict[str, Any]:
    """The only object of this kind."""
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


def pod_of(name: str) -> dict[str, Any]:
    """The pod's spec of a file's Deployment."""
    spec: dict[str, Any] = of_kind(name, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """A container of the pod, sidecars included."""
    (found,) = [entry for entry in [*pod.get("initContainers", []), *pod["containers"]] if entry["name"] == name]
    return dict(found)


def environment(entry: dict[str, Any]) -> dict[str, str]:
    """Plain variables of a container."""
    return {variable["name"]: variable["value"] for variable in entry["env"] if "value" in variable}
