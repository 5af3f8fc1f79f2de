"""The simulated machine with a meter: who holds how much KV, and which weights computed what is in its cache.

Invariants
- Behaves as `SimMachine` does.
- A page of the cache knows the weights that computed it, where that is asked for; of several, all.

What this module does not know: what the figures are for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.radix import Node, RadixCache
from rolloutd.engines.sim.request import Sequence


class MeteredMachine(SimMachine):
    """`crossings`: (weights of the KV, weights that used it, cache salt) of prefix hits across weights, with `mark_pages`."""

    def __init__(self, config: MachineConfig, mark_pages: bool) -> None:
        super().__init__(config)
        self.crossings: list[tuple[str, str, str]] = []
        self._marks = mark_pages
        if mark_pages:
            self._pool.cache = _MarkedCache(self._pool.cache.page_tokens, self)
        self._older: dict[str, set[str]] = {}  # running rid -> weights before those of now under which it has run
        self.writers: frozenset[str] = (
            frozenset()
        )  # of the pages that are put into the cache now; empty: the weights of now

    def held_tokens(self, now: float) -> dict[str, int]:
        """KV tokens that each live request holds, in whole pages; those that wait inside hold 0.

        A prefix that siblings share counts for each: never less than is used.
        """
        self._catch_up(now)
        page = self.config.page_size_tokens
        held: dict[str, int] = {sequence.request.rid: 0 for sequence in self._queue}
        for rid, sequence in self._running.items():
            held[rid] = sequence.request.prompt_tokens + self._produced(sequence)  # the step in flight has its place
        for sequence in self._prefilling:
            held[sequence.request.rid] = sequence.request.prompt_tokens + sequence.produced
        return {rid: -(-tokens // page) * page for rid, tokens in held.items()}

    def set_weight_version(self, now: float, version: str, weights: str | None = None) -> None:
        before = self.weights
        super().set_weight_version(now, version, weights)
        if self._marks and before != self.weights:
            for rid in self._running:
                self._older.setdefault(rid, set()).add(before)

    def _end_running(self, sequence: Sequence, reason: dict[str, Any] | None) -> None:
        older = self._older.pop(sequence.request.rid, None)
        if older:
            self.writers = frozenset(older | {self.weights})
        super()._end_running(sequence, reason)
        self.writers = frozenset()

    def _retract(self, sequence: Sequence) -> None:
        self._older.pop(sequence.request.rid, None)  # computed again from its prompt
        super()._retract(sequence)


class _MarkedCache(RadixCache):
    def __init__(self, page_tokens: int, machine: MeteredMachine) -> None:
        super().__init__(page_tokens)
        self._machine = machine
        self._writers: dict[Node, frozenset[str]] = {}

    def match(self, namespace: Hashable, tokens: bytes, limit_tokens: int) -> tuple[Node | None, int]:
        found, pages = super().match(namespace, tokens, limit_tokens)
        weights = self._machine.weights
        node = found
        while node is not None and node.parent is not None:
            for writer in self._writers[node]:
                if writer != weights:
                    salt = namespace[0] if isinstance(namespace, tuple) else ""
                    self._machine.crossings.append((writer, weights, salt))
            node = node.parent
        return found, pages

    def insert(self, namespace: Hashable, tokens: bytes) -> tuple[Node | None, int]:
        node, known = super().insert(namespace, tokens)
        if node is not None and node.parent is not None and node not in self._writers:
            self._writers[node] = self._machine.writers or frozenset({self._machine.weights})
        return node, known

    def evict(self, pages: int) -> int:
        freed = super().evict(pages)
        if len(self._writers) > 2 * len(self._lru) + 64:
            self._forget_gone()
        return freed

    def clear(self) -> None:
        super().clear()
        self._writers.clear()

    def _split(self, node: Node, position: int) -> Node:
        upper = super()._split(node, position)
        self._writers[upper] = self._writers[node]
        return upper

    def _forget_gone(self) -> None:
        here = set(self._nodes())
        self._writers = {node: writers for node, writers in self._writers.items() if node in here}
