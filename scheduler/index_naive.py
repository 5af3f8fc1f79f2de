"""The naive twin of the prefix index: a list of (namespace, engine, tokens), searched in full. It defines the semantics.

No bound, no eviction, no sweeping. Tests drive it and the radix index with the same calls; without a bound both must
answer alike, with a bound the radix index may only claim less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from rolloutd.scheduler.index_base import TOKEN_BYTES, Namespace


class NaivePrefixIndex:
    def __init__(self, page_tokens: int = 16) -> None:
        self.page_tokens = page_tokens
        self.units: dict[str, int] = {}  # engine -> tokens per creditable unit
        self.entries: list[tuple[Namespace, str, bytes]] = []
        self.floors: dict[Hashable, int] = {}  # owner -> oldest version that may hold credit
        self.added = 0

    def add_engine(self, engine: str, page_tokens: int, max_tokens: int = 0) -> int:
        self.units[engine] = math.lcm(self.page_tokens, page_tokens)
        self.added += 1
        return self.added - 1

    def drop_engine(self, engine: str) -> bool:
        self.clear_engine(engine)
        return self.units.pop(engine, None) is not None

    def clear_engine(self, engine: str) -> int | None:
        self.entries = [entry for entry in self.entries if entry[1] != engine]
        return self.added if engine in self.units else None

    def match(self, namespace: Namespace, tokens: bytes) -> dict[str, int]:
        hits = {engine: self._held(namespace, engine, tokens) // unit * unit for engine, unit in self.units.items()}
        return {engine: hit for engine, hit in hits.items() if hit}

    def insert(self, namespace: Namespace, tokens: bytes, engine: str) -> int:
        if engine not in self.units or namespace.version < self.floors.get(namespace.owner, namespace.version):
            return 0
        size = len(tokens) // TOKEN_BYTES // self.units[engine] * self.units[engine]
        fresh = size - self._held(namespace, engine, tokens[: size * TOKEN_BYTES])
        self.entries.append((namespace, engine, tokens[: size * TOKEN_BYTES]))
        return fresh // self.page_tokens

    def forget(self, namespace: Namespace, tokens: bytes, engine: str, keep_tokens: int) -> None:
        if engine not in self.units:
            return
        keep = keep_tokens // self.units[engine] * self.units[engine]
        self.entries = [
            (ns, name, held[: keep * TOKEN_BYTES])
            if (ns, name) == (namespace, engine) and self._common(held, tokens) > keep
            else (ns, name, held)
            for ns, name, held in self.entries
        ]

    def advance_version(self, owner: Hashable, version: int, ttl_versions: int = 0) -> int:
        floor = self.floors[owner] = max(version - ttl_versions, self.floors.get(owner, version - ttl_versions))
        return self._bury(lambda ns: ns.owner == owner and ns.version < floor)

    def drop_owner(self, owner: Hashable) -> int:
        self.floors.pop(owner, None)
        return self._bury(lambda ns: ns.owner == owner)

    def _bury(self, dead: Callable[[Namespace], bool]) -> int:
        buried = {ns for ns, _, held in self.entries if dead(ns) and held}
        self.entries = [entry for entry in self.entries if not dead(entry[0])]
        return len(buried)

    def _held(self, namespace: Namespace, engine: str, tokens: bytes) -> int:
        held = (self._common(entry, tokens) for ns, name, entry in self.entries if (ns, name) == (namespace, engine))
        return max(held, default=0)

    def _common(self, a: bytes, b: bytes) -> int:
        """Tokens of the longest common prefix, in whole pages of the index."""
        page = self.page_tokens * TOKEN_BYTES
        pages = 0
        while (pages + 1) * page <= min(len(a), len(b)) and a[: (pages + 1) * page] == b[: (pages + 1) * page]:
            pages += 1
        return pages * self.page_tokens
