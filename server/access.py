"""Who may call: API keys, and which addresses nobody else can reach.

Invariants
- A key is compared with every key of the server, in constant time, on digests of equal length; none is logged, shown or
  sent back, and what is kept of the keys in memory is their digests.
- The check comes before anything else of an RPC, its method's existence included; only gRPC health is open, because
  kubelets and load balancers ask for it and have no key.

What this module does not know: TLS (`tls.py`), and what a caller may do once it is known.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from rolloutd.server.config_keys import ConfigError
from rolloutd.server.errors import ERROR_DOMAIN, Context

UNAUTHENTICATED = "UNAUTHENTICATED"
_OPEN_METHODS = "/grpc.health.v1.Health/"
_HEADER = "authorization"
_SCHEME = "bearer"
_KEY = re.compile(r"[!-~]+")  # what may travel in gRPC metadata, less the space that ends a word
_COMMENT = re.compile(r"(^|\s)#.*")
_HOW = "send the metadata `authorization: Bearer KEY` (Python: connect(..., api_key=KEY), or the variable ROLLOUTD_API_KEY)"

Continuation = Callable[
    [grpc.HandlerCallDetails], Awaitable[Any]
]  # of a grpc.RpcMethodHandler, or None: no such method


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port bound to `host`. Names other than localhost count as reachable."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def read_api_keys(path: str, name: str) -> tuple[str, ...]:
    """The keys of a file: one per line; blank lines, whitespace around a key, and `#` at the start or after a space, ignored.

    `name`: the setting, for the message of ConfigError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not text") from None
    keys: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = _COMMENT.sub("", line).strip()
        if not key:
            continue
        if _KEY.fullmatch(key) is None:
            raise ConfigError(f"{name}: line {number} of {path}: a key is one word of printable ASCII characters")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{name}: {path} has no key; write one per line (for example of `openssl rand -hex 32`)")
    return tuple(keys)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Lets calls with one of the keys through, and ends the others with UNAUTHENTICATED."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys:
            raise ValueError("a server that checks keys needs at least one")
        self._digests = tuple(_digest(key.encode("ascii")) for key in keys)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of the call, or one that refuses it without reading what it sends."""
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        problem = self.problem(handler_call_details.invocation_metadata or ())
        if problem is None:
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: Context) -> None:
            await context.abort_with_status(_unauthenticated(problem))

        # On the wire a call of any kind can be answered as a stream, and as such before its first message.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def problem(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        """Why a call with this metadata is refused; None when it may pass."""
        given = [value for key, value in metadata if key == _HEADER]
        if not given:
            return f"this server needs an API key: {_HOW}"
        if len(given) > 1:
            return f"more than one authorization came with the call: {_HOW}"
        value = given[0].encode("utf-8", "replace") if isinstance(given[0], str) else given[0]
        scheme, _, key = value.strip().partition(b" ")
        if scheme.lower() != _SCHEME.encode():
            return f"the authorization of the call is of another kind: {_HOW}"
        digest = _digest(key.strip())
        known = False
        for other in self._digests:  # all of them: time says nothing about which one matched
            known |= hmac.compare_digest(digest, other)
        return None if known else "the API key of the call is none of this server's: ask its operator for a current one"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthenticated(problem: str) -> grpc.Status:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=UNAUTHENTICATED, domain=ERROR_DOMAIN))
    code: int = grpc.StatusCode.UNAUTHENTICATED.value[0]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=problem, details=[info]))
    return status
