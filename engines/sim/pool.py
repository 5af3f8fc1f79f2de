"""KV memory of one simulated engine, in pages: the prefix cache plus what running sequences hold beside it.

Invariants
- cached pages + owned pages never exceed the capacity.
- A running sequence with `prompt` + `produced` tokens has KV for all of them but the last; it holds a locked path of the
  cache (`shared_pages`) and owns the rest.
- Decode growth is counted, not stepped: a sequence takes a new page every `page_tokens` steps, at a step given by its
  phase, so any number of steps costs O(page_tokens).

What this module does not know: time, queues, why a sequence leaves.
"""

from __future__ import annotations

from collections.abc import Hashable

from rolloutd.engines.sim.kv_log import CacheLog
from rolloutd.engines.sim.radix import TOKEN_BYTES, Node, RadixCache


class Holding:
    """The KV of one admitted sequence."""

    __slots__ = ("node", "phase", "shared_pages")

    def __init__(self, node: Node | None, shared_pages: int) -> None:
        self.node = node
        self.shared_pages = shared_pages
        self.phase = -1


class KvPool:
    """Capacity of `kv_tokens` in pages of `page_tokens`. `log` is told what the cache does."""

    def __init__(self, kv_tokens: int, page_tokens: int, log: CacheLog | None = None) -> None:
        self.page_tokens = page_tokens
        self.capacity_pages = kv_tokens // page_tokens
        self.cache = RadixCache(page_tokens, log)
        self.owned_pages = 0
        self._phase_counts = [0] * page_tokens
        self._decoding = 0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.capacity_pages - self.cache.cached_pages - self.owned_pages

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be made so by eviction."""
        return self.free_pages + self.cache.evictable_pages

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_tokens)

    def match(self, namespace: Hashable, tokens: bytes, limit_tokens: int) -> Holding:
        """Lock the longest cached prefix."""
        node, pages = self.cache.match(namespace, tokens, limit_tokens)
        self.cache.lock(node)
        return Holding(node, pages)

    def drop_match(self, holding: Holding) -> None:
        """Take back `match` when the sequence is not admitted after all."""
        self.cache.unlock(holding.node)

    def start(self, holding: Holding, kv_tokens: int) -> None:
        """Allocate the uncached part of a prefill; the caller has checked that it fits."""
        self._take(self.pages(kv_tokens) - holding.shared_pages)

    def cache_prefilled(self, holding: Holding, namespace: Hashable, tokens: bytes) -> None:
        """After prefill: move whole pages into the cache (pages that it has by now are freed) and lock them there."""
        node = self._give(holding, namespace, tokens)
        self.cache.lock(node)
        self.cache.unlock(holding.node)
        holding.node = node
        holding.shared_pages = len(tokens) // TOKEN_BYTES // self.page_tokens

    def _give(self, holding: Holding, namespace: Hashable, tokens: bytes) -> Node | None:
        # Owned pages leave the sequence before the cache counts them: the sum never passes the capacity.
        self.owned_pages -= len(tokens) // TOKEN_BYTES // self.page_tokens - holding.shared_pages
        node, _ = self.cache.insert(namespace, tokens)
        return node

    def finish(self, holding: Holding, namespace: Hashable, tokens: bytes, kv_tokens: int) -> None:
        """A sequence with KV for `kv_tokens` ends: cache the whole pages of `tokens`, a prefix of them, free the rest."""
        self.owned_pages -= self.pages(kv_tokens) - len(tokens) // TOKEN_BYTES // self.page_tokens
        self._give(holding, namespace, tokens)
        self.cache.unlock(holding.node)

    def release(self, holding: Holding, kv_tokens: int) -> None:
        """A sequence is retracted: free what it owns, cache nothing."""
        self.owned_pages -= self.pages(kv_tokens) - holding.shared_pages
        self.cache.unlock(holding.node)

    def join_decode(self, holding: Holding, kv_tokens: int, step: int) -> None:
        """The sequence decodes from `step` on; it has KV for `kv_tokens` tokens now."""
        holding.phase = (kv_tokens - step) % self.page_tokens
        self._phase_counts[holding.phase] += 1
        self._decoding += 1

    def leave_decode(self, holding: Holding) -> None:
        """The sequence decodes no more."""
        self._phase_counts[holding.phase] -= 1
        self._decoding -= 1

    def growth_pages(self, step: int, steps: int) -> int:
        """New pages that launching `steps` decode steps from `step` on takes."""
        cycles, rest = divmod(steps, self.page_tokens)
        counts, size = self._phase_counts, self.page_tokens
        return cycles * self._decoding + sum(counts[-(step + offset) % size] for offset in range(rest))

    def steps_that_fit(self, step: int) -> int:
        """How many decode steps from `step` on can be launched before memory ends. At least one sequence must decode."""
        available = self.available_pages
        cycles = available // self._decoding
        available -= cycles * self._decoding
        steps = cycles * self.page_tokens
        counts, size = self._phase_counts, self.page_tokens
        while True:
            available -= counts[-(step + steps) % size]
            if available < 0:
                return steps
            steps += 1

    def grow(self, step: int, steps: int) -> None:
        """Take the pages of `steps` launched decode steps; evicts where needed."""
        self._take(self.growth_pages(step, steps))

    def _take(self, pages: int) -> None:
        short = pages - self.free_pages
        if short > 0:
            self.cache.evict(short)
        self.owned_pages += pages
        if self.free_pages < 0:
            raise AssertionError(f"KV capacity exceeded by {-self.free_pages} pages")
