"""Page tokens: where the next page starts, bound to the filters of the first.

What this module does not know: what is listed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from rolloutd.server.errors import field_error
from rolloutd.server.state import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE

_FILTER_BYTES = 8


def page_size(asked: int) -> int:
    """0: the default; larger than the maximum: cut to it. Raises FieldErrors for a negative one."""
    if asked < 0:
        raise field_error("page_size", f"must be 0 or more, got {asked}")
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode_token(after: str, filters: object) -> str:
    """A token that continues after this id."""
    return base64.urlsafe_b64encode(_digest(filters) + after.encode()).decode("ascii")


def decode_token(token: str, filters: object) -> str:
    """The id to continue after; "" for the first page. Raises FieldErrors for a token that is not of these filters."""
    if not token:
        return ""
    try:
        raw = base64.urlsafe_b64decode(token.encode("ascii"))
        after = raw[_FILTER_BYTES:].decode()
    except (binascii.Error, ValueError) as error:
        raise field_error("page_token", "is not a next_page_token of this server") from error
    if raw[:_FILTER_BYTES] != _digest(filters):
        raise field_error("page_token", "belongs to a request with other filters; start again without it")
    return after


def _digest(filters: object) -> bytes:
    return hashlib.sha256(repr(filters).encode()).digest()[:_FILTER_BYTES]
