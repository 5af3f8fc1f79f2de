"""The manifests: valid for Kubernetes, and the order of starting and ending holds."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest

from rolloutd.scheduler.config import ExecutorSettings
from rolloutd.server.process import FLUSH_SECONDS
from tests.deploy.manifests import MANIFESTS, container, documents, environment, of_kind, pod_of

VERSIONS = ("1.29", "1.31", "1.34")  # native sidecars are on by default since 1.29


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_is_valid(name: str, version: str) -> None:
    assert documents(name)
    for document in documents(name):
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_validation_notices_a_misspelt_field() -> None:
    broken = copy.deepcopy(of_kind("sidecar.yaml", "Deployment"))
    sidecar = broken["spec"]["template"]["spec"]["initContainers"][0]
    sidecar["restartPolcy"] = sidecar.pop("restartPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_service_finds_the_pods_and_their_port(name: str) -> None:
    service, deployment = of_kind(name, "Service"), of_kind(name, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container(pod_of(name), "rolloutd")["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    assert ports["grpc"] == int(environment(container(pod_of(name), "rolloutd"))["ROLLOUTD_SERVER__PORT"])


def test_the_sidecar_is_one_and_starts_first() -> None:
    pod = pod_of("sidecar.yaml")
    sidecar = container(pod, "rolloutd")
    assert sidecar in pod["initContainers"] and sidecar["restartPolicy"] == "Always"
    # Without a startupProbe the engine is started too early; with one that asks for the engine, never.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert sidecar[probe]["grpc"] == {"port": 50051}  # health, which needs no engine and no key
    assert of_kind("sidecar.yaml", "Service")["spec"]["clusterIP"] == "None"


def test_the_engine_is_reached_over_loopback_only() -> None:
    pod = pod_of("sidecar.yaml")
    url = environment(container(pod, "rolloutd"))["ROLLOUTD_ENGINES"]
    arguments = container(pod, "engine")["args"]
    assert url == "http://127.0.0.1:30000"
    assert "--host=127.0.0.1" in arguments and "--port=30000" in arguments
    assert {"--page-size=16", "--incremental-streaming-output", "--stream-interval=16"} <= set(arguments)


def drain_seconds(variables: dict[str, str]) -> float:
    """The longest that a server takes from SIGTERM to its end."""
    grace = float(variables["ROLLOUTD_SERVER__SHUTDOWN_GRACE_SECONDS"])
    return grace + ExecutorSettings().abort_seconds + FLUSH_SECONDS


def test_grace_periods_are_in_order_in_the_sidecar_s_pod() -> None:
    """server drains < the engine's hook waits < the pod is killed."""
    pod = pod_of("sidecar.yaml")
    command = container(pod, "engine")["lifecycle"]["preStop"]["exec"]["command"]
    found = re.search(r"timeout (\d+)", command[-1])
    assert found is not None
    hook_seconds = int(found.group(1))
    assert drain_seconds(environment(container(pod, "rolloutd"))) < hook_seconds
    assert hook_seconds + 15 <= pod["terminationGracePeriodSeconds"]  # and the engine has time to end as well
    assert container(pod, "rolloutd")["lifecycle"]["preStop"]["exec"]["command"][-1] == "kill -TERM 1"


def test_grace_periods_are_in_order_in_the_central_pod() -> None:
    """preStop + server drains < the pod is killed."""
    pod = pod_of("central.yaml")
    server = container(pod, "rolloutd")
    hook_seconds = float(server["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert hook_seconds + drain_seconds(environment(server)) < pod["terminationGracePeriodSeconds"]
    deployment = of_kind("central.yaml", "Deployment")["spec"]
    assert deployment["replicas"] == 1 and deployment["strategy"]["type"] == "Recreate"


@pytest.mark.parametrize("name", MANIFESTS)
def test_keys_come_from_a_secret_and_nothing_runs_as_root(name: str) -> None:
    pod = pod_of(name)
    server = container(pod, "rolloutd")
    (secret,) = [volume for volume in pod["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in server["volumeMounts"] if mount["name"] == secret["name"]]
    variables = environment(server)
    assert variables["ROLLOUTD_SERVER__API_KEYS_FILE"].startswith(mount["mountPath"] + "/")
    assert not any("KEY" in variable and not variable.endswith("_FILE") for variable in variables)
    assert "ROLLOUTD_SERVER__ALLOW_UNAUTHENTICATED" not in variables
    assert not any(document["kind"] == "Secret" for document in documents(name))  # a committed key is no key
    security: dict[str, Any] = server["securityContext"]
    assert security["runAsNonRoot"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]} and security["readOnlyRootFilesystem"]
