"""What every RPC handler does around its own work.

Invariants
- A handler whose task is cancelled ends its RPC with a status. gRPC takes a cancelled handler for a call that is gone
  and would leave the client of a living one waiting for ever (grpc#29248); where the call is gone, the status goes
  nowhere, and of the three ways to end such a handler this one keeps memory flattest (grpc#43360).
- A refusal ends the RPC with its status and details; any other exception is a bug: logged with its trace, INTERNAL
  outside.

What this module does not know: any single RPC.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import Code
from rolloutd.server.errors import Context, FieldErrors, abort
from rolloutd.server.logging import get_logger

Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")

_log = get_logger("rpc")

_INTERRUPTED = Refusal(
    Code.ABORTED, "INTERRUPTED", "the server stopped working on this call; call again", retry_after_seconds=0.1
)


class Refused(Exception):
    """Raised by a handler to end its RPC with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def handler(
    method: Callable[[Service, Request, Any], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """Decorate an RPC method of a service class."""

    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except Refused as refused:
            await abort(context, refused.refusal)
        except FieldErrors as error:
            await abort(context, error.refusal())
        except asyncio.CancelledError:
            await abort(context, _INTERRUPTED)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.error("rpc_failed", method=method.__qualname__, exc_info=True)
            message = f"a bug in the server: {type(error).__name__}; its log has the trace"
            await abort(context, Refusal(Code.INTERNAL, "INTERNAL", message))

    return call


def check(refusal: Refusal | None) -> None:
    """Raise a refusal, if there is one."""
    if refusal is not None:
        raise Refused(refusal)
