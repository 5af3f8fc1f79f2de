"""What can go wrong, and which question each class answers.

    RolloutdError                 did anything of rolloutd fail?
    +-- ServerUnavailable         was there no server to talk to, for longer than `reconnect_seconds`?
    +-- Fenced                    has somebody taken my place (a newer trainer epoch, another stream of my consumer)?
    +-- Refused                   did the server answer "no"? `code`, `reason` and `fields` say why
    |   +-- Unauthorized          is it because of who I am (no key, wrong key, somebody else's run)?
    +-- RolloutFailed             did a rollout end without completing? `outcome` and `result` say how
    +-- PublishFailed             did some engines not get a policy version? `failed` says which and why
    +-- ClientClosed              did I use, or wait on, a client after its `async with` block ended?

Wrong arguments found before anything is sent raise ValueError or TypeError, as everywhere in Python.
Invariant: every gRPC status that leaves this package is one of the classes above, with the status as `__cause__`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from rolloutd import v1
from rolloutd.client.words import Outcome

if TYPE_CHECKING:
    from rolloutd.client.publishing import EngineUpdate
    from rolloutd.client.results import RolloutResult

STATUS_DETAILS_KEY = "grpc-status-details-bin"  # where google.rpc.Status travels, by gRPC's convention
CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
FENCED_REASON = "FENCED"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the server refused or failed something."""

    code: str  # canonical gRPC code, e.g. "INVALID_ARGUMENT"
    reason: str  # machine-readable, e.g. "QUEUE_FULL"; "" when the server gave none
    message: str  # for a person
    fields: tuple[tuple[str, str], ...] = ()  # (path of the wrong field, what is wrong with it)
    retry_after_seconds: float = 0.0  # 0: at once or never, by the code

    def __str__(self) -> str:
        untold = (one for one in self.fields if one[0] not in self.message)
        named = "".join(f"; {field}: {description}" for field, description in untold)
        reason = f", {self.reason}" if self.reason not in ("", self.code) else ""
        return f"{self.message}{named} ({self.code}{reason})"


class RolloutdError(Exception):
    """Anything of rolloutd that failed."""


class ServerUnavailable(RolloutdError):
    """No server answered within `reconnect_seconds`."""


class Fenced(RolloutdError):
    """A newer trainer epoch, or another stream of the same consumer, took this client's place. Do not reconnect."""


class ClientClosed(RolloutdError):
    """The client was closed, or never entered."""


class Refused(RolloutdError):
    """The server said no."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.code = problem.code
        self.reason = problem.reason
        self.fields = problem.fields
        self.retry_after_seconds = problem.retry_after_seconds


class Unauthorized(Refused):
    """No key, a wrong key, or something that belongs to another run."""


class RolloutFailed(RolloutdError):
    """A rollout ended without completing; `result` holds what there is of it, tokens included."""

    def __init__(self, result: RolloutResult) -> None:
        why = f": {result.problem}" if result.problem else ""
        super().__init__(f"rollout {result.rollout_id} ended as {result.outcome}{why}")
        self.result = result
        self.outcome: Outcome = result.outcome


class PublishFailed(RolloutdError):
    """A publication ended, and some engines do not hold its version. They get no work; publishing it again tries them again."""

    def __init__(self, version: int, updated: tuple[str, ...], failed: tuple[EngineUpdate, ...]) -> None:
        why = "; ".join(f"{engine.engine_id}: {engine.message or 'no reason given'}" for engine in failed)
        super().__init__(f"version {version} is on {len(updated)} engines and failed on {len(failed)}: {why}")
        self.version = version
        self.updated = updated
        self.failed = failed


def problem_of_message(error: v1.Error) -> Problem:
    """An error that came inside a stream message."""
    fields = tuple((violation.field, violation.description) for violation in error.field_violations)
    code = CODE_NAMES.get(error.code, f"CODE_{error.code}")
    return Problem(code, error.reason, error.message, fields, error.retry_after_seconds)


def problem_of_status(error: grpc.aio.AioRpcError) -> Problem:
    """An error that came as a gRPC status, with whatever google.rpc details it carries."""
    reason, retry_after_seconds = "", 0.0
    fields: tuple[tuple[str, str], ...] = ()
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(_bytes(value)).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                reason = info.reason
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest()
                detail.Unpack(bad)
                fields = tuple((violation.field, violation.description) for violation in bad.field_violations)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after_seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return Problem(error.code().name, reason, error.details() or "no details", fields, retry_after_seconds)


def error_of_problem(problem: Problem) -> RolloutdError:
    """The exception for an answer of the server."""
    if problem.code == "ABORTED" and problem.reason == FENCED_REASON:
        return Fenced(str(problem))
    if problem.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return Unauthorized(problem)
    return Refused(problem)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else value
