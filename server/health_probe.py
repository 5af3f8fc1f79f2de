"""`rolloutd health`: one question to a server's gRPC health service, for container probes and people.

What this module does not know: how a server decides (`process.py`).
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rolloutd.client.access import Access


def probe(target: str, access: Access, timeout_seconds: float) -> int:
    """Says what the server answers; 0 when it serves, else 1."""
    if access.credentials is None:
        channel = grpc.insecure_channel(target)
    else:
        named = [("grpc.ssl_target_name_override", access.server_name)] if access.server_name else []
        channel = grpc.secure_channel(target, access.credentials, options=named)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
            )
        except grpc.RpcError as error:
            print(f"{target}: no answer: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{target}: {status}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
