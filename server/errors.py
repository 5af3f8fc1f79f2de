"""How the server says no: refusals of the core as gRPC status with details, and as the contract's Error message.

Invariants
- Both forms carry the same facts: canonical code, stable reason, message for a person, wrong fields, when to try again.
- A unary call that is refused never returns normally.

What this module does not know: why something was refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import Code
from rolloutd.v1 import Error, FieldViolation

ERROR_DOMAIN = "rolloutd"

Context = grpc.aio.ServicerContext[Any, Any]


class FieldErrors(Exception):
    """A message that proto accepts and the contract does not. `fields`: (field path, what is wrong with it)."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {problem}" for field, problem in fields))
        self.fields = fields

    def refusal(self) -> Refusal:
        return Refusal(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", str(self), tuple(self.fields))


def field_error(field: str, problem: str) -> FieldErrors:
    return FieldErrors([(field, problem)])


def to_error(refusal: Refusal) -> Error:
    """The message form, for items of a stream and for results."""
    return Error(
        code=int(refusal.code),
        reason=refusal.reason,
        message=refusal.message,
        field_violations=[FieldViolation(field=field, description=problem) for field, problem in refusal.fields],
        retry_after_seconds=refusal.retry_after_seconds,
    )


def to_status(refusal: Refusal) -> grpc.Status:
    """The status form, with google.rpc details."""
    details: list[any_pb2.Any] = []

    def add(message: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=refusal.reason, domain=ERROR_DOMAIN))
    if refusal.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
            for field, problem in refusal.fields
        ]
        add(error_details_pb2.BadRequest(field_violations=violations))
    if refusal.retry_after_seconds > 0:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(refusal.retry_after_seconds * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=int(refusal.code), message=refusal.message, details=details)
    packed: grpc.Status = rpc_status.to_status(status)
    return packed


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    """End the RPC with the refusal as its status."""
    await context.abort_with_status(to_status(refusal))
    raise AssertionError("abort_with_status returned")


def not_found(what: str, name: str) -> Refusal:
    return Refusal(Code.NOT_FOUND, "NOT_FOUND", f"{what} {name!r} is not known to this server")


SHUTTING_DOWN = Refusal(
    Code.UNAVAILABLE, "SHUTDOWN", "the server is shutting down; connect again once it is back", retry_after_seconds=1.0
)
