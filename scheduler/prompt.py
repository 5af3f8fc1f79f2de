"""What is asked of a prompt when it is submitted, worked out once where the same comes again.

Invariants
- The answers are those for the bytes that were given.

What this module does not know: who submits it.
"""

from __future__ import annotations

import hashlib

import numpy as np


def hash_of(content: bytes) -> str:
    """Names a prompt in results and in what is learnt of it."""
    return hashlib.sha256(content).hexdigest()


class LastPrompt:
    """Of one run. The samples of a group come one after the other, each with the same prompt."""

    __slots__ = ("_hash", "_largest_id", "_token_bytes")

    def __init__(self) -> None:
        self._token_bytes = b""
        self._hash = ""
        self._largest_id = -1

    def hash_of(self, token_bytes: bytes) -> str:
        self._see(token_bytes)
        if not self._hash:
            self._hash = hash_of(token_bytes)
        return self._hash

    def largest_id(self, token_bytes: bytes) -> int:
        """The largest of its token ids (uint32 LE); there is at least one."""
        self._see(token_bytes)
        if self._largest_id < 0:
            self._largest_id = int(np.frombuffer(token_bytes, dtype="<u4").max())
        return self._largest_id

    def _see(self, token_bytes: bytes) -> None:
        if token_bytes != self._token_bytes:
            self._token_bytes, self._hash, self._largest_id = token_bytes, "", -1
