"""Plain calls to one SGLang server: each is sent once, bounded in time, and its failure says what to do.

Invariants
- Pages are read with the normal key, orders are given with the admin key where there is one: with both set, the server
  refuses the normal key on controlling routes.
- A fault of an order tells whether the server can have taken it: UNREACHED, REFUSED and BUSY mean no; BROKEN and SILENT
  leave it open.

What this module does not know: generations, what an order changes.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
import orjson

from rolloutd.engines.base import EngineFault, FaultKind, Slice
from rolloutd.engines.http_client import ConnectionCut, HttpClient, Unreached

_ERROR_TEXT_BYTES = 2000
_JSON = {"Content-Type": "application/json"}

_Answer = TypeVar("_Answer")


def kind_of_status(status: int) -> FaultKind:
    """What an HTTP status, or the code in an error frame, says about the request and the engine."""
    if status in (429, 503):
        return FaultKind.BUSY
    # Wrong key, wrong URL, too slow to read us: this engine's trouble, another one may well accept the request.
    if status in (401, 403, 404, 405, 408) or not 400 <= status < 500:
        return FaultKind.BROKEN
    return FaultKind.REFUSED


def error_text(body: bytes) -> str:
    """The sentence inside SGLang's several error shapes, or the start of the body."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_ERROR_TEXT_BYTES].decode("utf-8", "replace").strip()
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error", value.get("message", value))
    return value if isinstance(value, str) else orjson.dumps(value)[:_ERROR_TEXT_BYTES].decode("utf-8", "replace")


class Calls:
    """One server's calls. Every method raises `EngineFault`."""

    def __init__(self, url: str, http: HttpClient, api_key: str, admin_api_key: str) -> None:
        self._url = url
        self._http = http
        self._normal = _authorization(api_key)
        self._control = _authorization(admin_api_key or api_key)
        self.closed = False

    def normal_head(self, path: str) -> bytes:
        """Header of a POST on a route that generates."""
        return self._http.head("POST", path, self._normal | _JSON)

    def control_head(self, path: str) -> bytes:
        """Header of a POST on a route that controls."""
        return self._http.head("POST", path, self._control | _JSON)

    async def page(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body of a GET, whatever the status."""
        head = self._http.head("GET", path, self._normal)
        try:
            return await self.call(path, head, b"", seconds)
        except EngineFault as fault:
            if fault.kind is FaultKind.UNREACHED:  # a page changes nothing: only whether it can be read counts
                raise EngineFault(FaultKind.BROKEN, fault.message) from fault
            raise

    async def get(self, path: str, seconds: float) -> bytes:
        """Body of a GET that must succeed."""
        status, body = await self.page(path, seconds)
        if status in (401, 403):
            raise self.fault(FaultKind.REFUSED, f"{path} answered {status}: set api_key for this engine")
        if status != 200:
            raise self.refusal(path, status, body)
        return body

    async def order(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of a POST on a controlling route, whatever the status, except for a wrong key."""
        status, answer = await self.call(path, self.control_head(path), body, seconds)
        if status in (401, 403):
            raise self.fault(FaultKind.REFUSED, f"{path} answered {status}: set admin_api_key for this engine")
        return status, answer

    async def call(self, path: str, head: bytes, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of one call. UNREACHED, SILENT after `seconds`, or BROKEN."""
        if self.closed:
            raise self.fault(FaultKind.BROKEN, "the door was closed")
        try:
            async with asyncio.timeout(seconds):
                return await self._http.call(head, body)
        except TimeoutError as error:
            raise self.fault(FaultKind.SILENT, f"{path}: no answer within {seconds:g} s") from error
        except Unreached as error:
            raise self.fault(FaultKind.UNREACHED, f"{path}: {error}") from error
        except ConnectionCut as error:
            raise self.fault(FaultKind.BROKEN, f"{path}: {error}") from error

    def decode(self, body: bytes, kind: type[_Answer], path: str) -> _Answer:
        """An answer as a struct; BROKEN when it is something else."""
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self.fault(FaultKind.BROKEN, f"{path}: answer not understood ({error}); is this SGLang?") from error

    def refusal(self, path: str, status: int, body: bytes) -> EngineFault:
        """The fault of a status that was not hoped for."""
        return self.fault(kind_of_status(status), f"{path} answered {status}: {error_text(body)}")

    def fault(self, kind: FaultKind, message: str, partial: Slice | None = None) -> EngineFault:
        """A fault that names the engine."""
        return EngineFault(kind, f"engine {self._url}: {message}", partial)


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
