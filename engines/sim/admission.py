"""Which waiting requests enter the next prefill batch, and how much memory that promises away.

Invariants
- Head of line: the first request that does not fit ends the scan. Order is arrival (fcfs), or longest cached prefix
  first (lpm) while at most 128 wait.
- A running request is expected to use `ratio` of what it may still generate (at most 4,096 tokens of it); a new one is
  charged in full. The ratio falls with every decode step and rises after a retraction.
- Prefixes are matched against what earlier batches cached; requests of one batch do not see each other.

What this module does not know: time, tokens, frames. Constants are SGLang 0.5.23's (schedule_policy, environ).
"""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd.engines.sim.pool import KvPool
from rolloutd.engines.sim.radix import RadixCache
from rolloutd.engines.sim.request import Sequence

CLIP_MAX_NEW_TOKENS = 4096
LPM_MAX_WAITING = 128
IN_BATCH_CHECK_TOKENS = 32
IN_BATCH_DEPRIORITIZE_TOKENS = 32
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = 0.7 * 0.14
NEW_TOKEN_RATIO_DECAY = (INIT_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """Share of their remaining output that running requests are expected to use."""

    def __init__(self) -> None:
        self.value = INIT_NEW_TOKEN_RATIO

    def decay(self, steps: int) -> None:
        """`steps` decode steps went by."""
        self.value = max(MIN_NEW_TOKEN_RATIO, self.value - steps * NEW_TOKEN_RATIO_DECAY)

    def reset(self) -> None:
        """The engine is idle."""
        self.value = INIT_NEW_TOKEN_RATIO

    def after_retraction(self, running: list[Sequence]) -> None:
        """Expect of the requests that stayed what they have shown."""
        produced = sum(s.produced for s in running) + RETRACT_DECODE_STEPS * len(running)
        self.value = min(1.0, produced / (sum(s.max_new_tokens for s in running) + 1))


class WaitingQueue:
    """Requests that hold no KV, oldest first; retracted ones come back at the tail."""

    def __init__(self, policy: str, pool: KvPool) -> None:
        self._policy = policy
        self._pool = pool
        self._items: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items.values())

    def append(self, sequence: Sequence) -> None:
        """At the tail."""
        self._items[sequence.request.rid] = sequence

    def remove(self, sequence: Sequence) -> bool:
        """Whether it waited."""
        return self._items.pop(sequence.request.rid, None) is not None

    def ordered(self) -> list[Sequence]:
        """In the order in which admission looks at them."""
        waiting = list(self._items.values())
        if self._policy != "lpm" or len(waiting) > LPM_MAX_WAITING:
            return waiting
        page = self._pool.page_tokens
        seen = RadixCache(page)  # prefixes of this pass, to put a request behind the one that computes its prefix
        keys: dict[str, int] = {}
        for sequence in waiting:
            request = sequence.request
            hit = self._pool.cache.peek_pages(request.namespace, request.prompt, request.prompt_tokens - 1) * page
            keys[request.rid] = -hit
            if hit <= IN_BATCH_CHECK_TOKENS:
                if seen.peek_pages(request.namespace, request.prompt, request.prompt_tokens) * page >= (
                    IN_BATCH_DEPRIORITIZE_TOKENS
                ):
                    keys[request.rid] = 1
                else:
                    seen.insert(request.namespace, request.prompt)
        return sorted(waiting, key=lambda s: keys[s.request.rid])


def select_prefill(
    queue: WaitingQueue,
    pool: KvPool,
    running: list[Sequence],
    free_slots: int,
    max_prefill_tokens: int,
    ratio: NewTokenRatio,
) -> tuple[list[Sequence], bool]:
    """Take the next prefill batch out of the queue, with its memory allocated.

    Returns (batch, full): full means that nothing can be admitted until a running request leaves.
    """
    if not running:
        ratio.reset()
    page = pool.page_tokens
    promised = 0.0
    for sequence in running:
        share = 1.0 if sequence.request.sampling.ignore_eos else ratio.value
        promised += min(sequence.remaining_tokens, CLIP_MAX_NEW_TOKENS) * share
    batch: list[Sequence] = []
    extend_total = 0
    for sequence in queue.ordered():
        if len(batch) >= free_slots:
            return batch, True
        request = sequence.request
        length = request.prompt_tokens + sequence.produced
        limit = length - 1 if request.logprob_start < 0 else min(length - 1, request.logprob_start)
        holding = pool.match(request.namespace, sequence.context_bytes(), limit)
        extend = length - holding.shared_pages * page
        expected = min(max(sequence.remaining_tokens, 0), CLIP_MAX_NEW_TOKENS)
        alone = not running and not batch
        if not alone:
            if batch and extend_total + extend > max_prefill_tokens:
                pool.drop_match(holding)
                return batch, False
            if extend + expected + page >= pool.available_pages * page - promised:
                pool.drop_match(holding)
                return batch, True
        pool.start(holding, length)
        promised += expected + page
        extend_total += extend
        sequence.holding = holding
        queue.remove(sequence)
        batch.append(sequence)
    return batch, False
