"""The best prefix hit a set of prompts allows: one cache that holds everything and never forgets. And beside it what is left of
that where the cache is only so large and forgets what was least recently used.

Invariants
- Hits are whole pages, and at least the last prompt token is always computed: a prompt of P tokens can have at most
  floor((P - 1) / page) pages served from cache (SGLang matches up to the last token but one, then cuts to whole pages).
- Only earlier prompts serve later ones, and the turn before serves the next with its output; hits across policy versions are
  not counted.
- The cache with a bound (`lru_prefix_tokens`) holds pages of prompts, none of outputs, and forgets the end of a prefix before its
  beginning. It takes prompts in the order they arrive in, so it says how much memory there is for reuse; a schedule with
  another order may hit more.

What this module does not know: engines, placement.

Pages are told apart by a 64-bit hash of the whole prefix up to their end, not by their tokens: with n distinct pages
the chance of one false match is about n^2 / 2^65 (3e-8 for a million). The tests hold it against a twin without hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from rolloutd.bench.workload import TOKEN_BYTES, Session, Workload

# Increment and multipliers of the SplitMix64 generator (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def cacheable_prefix_tokens(prompts: Sequence[bytes], page_size_tokens: int) -> npt.NDArray[np.int64]:
    """For each prompt, in arrival order, the tokens that an infinite cache of the earlier ones would serve; shape (n,).

    prompts: token ids as uint32 little-endian bytes. Repeats of a prompt cost almost nothing. Raises ValueError for an
    empty prompt and for one that is not whole tokens.
    """
    _check_page(page_size_tokens)
    cached = np.zeros(len(prompts), dtype=np.int64)
    whole: set[bytes] = set()
    pages: set[int] = set()
    for position, prompt in enumerate(prompts):
        servable_pages = _servable_pages(position, prompt, page_size_tokens)
        if prompt in whole:
            cached[position] = servable_pages * page_size_tokens
            continue
        whole.add(prompt)
        ends = _prefix_hashes(prompt, page_size_tokens)
        held = _held_pages(ends, pages)
        pages.update(ends[held:])
        cached[position] = min(held, servable_pages) * page_size_tokens
    return cached


def lru_prefix_tokens(prompts: Sequence[bytes], page_size_tokens: int, capacity_tokens: int) -> npt.NDArray[np.int64]:
    """For each prompt, in arrival order, the tokens that one cache of `capacity_tokens` would serve; shape (n,).

    A prompt makes all its pages the most recent ones. Of a prompt larger than the cache its beginning stays. Raises ValueError
    as `cacheable_prefix_tokens`, and for a cache without a page.
    """
    _check_page(page_size_tokens)
    capacity_pages = capacity_tokens // page_size_tokens
    if capacity_pages < 1:
        raise ValueError(f"capacity_tokens is {capacity_tokens}; it must be at least one page of {page_size_tokens}")
    cached = np.zeros(len(prompts), dtype=np.int64)
    pages: dict[int, None] = {}  # least recent first
    newest = b""  # whose pages are the most recent ones already
    for position, prompt in enumerate(prompts):
        servable_pages = _servable_pages(position, prompt, page_size_tokens)
        ends = _prefix_hashes(prompt, page_size_tokens)
        cached[position] = min(_held_pages(ends, pages), servable_pages) * page_size_tokens
        if prompt == newest:
            continue
        newest = prompt
        # Its end first, so that no page is more recent than one before it.
        for end in reversed(ends):
            pages.pop(end, None)
            pages[end] = None
        for end in list(islice(pages, max(0, len(pages) - capacity_pages))):
            del pages[end]
    return cached


def prefix_hit_ceiling(prompts: Sequence[bytes], page_size_tokens: int) -> float:
    """Cacheable share of all prompt tokens, in [0, 1). Raises ValueError when there is no prompt."""
    if not prompts:
        raise ValueError("no prompt given: a ceiling needs at least one")
    cached_tokens = int(cacheable_prefix_tokens(prompts, page_size_tokens).sum())
    return cached_tokens / (sum(map(len, prompts)) // TOKEN_BYTES)


def cacheable_turn_tokens(sessions: Sequence[Session], page_size_tokens: int) -> npt.NDArray[np.int64]:
    """For each turn of each session in order, the tokens that an infinite cache would serve; shape (turns,).

    A first turn: from the first prompts of sessions before it. A later one: from the turn before, whose newest token has no KV.
    """
    firsts = cacheable_prefix_tokens([session.turns[0].new_bytes for session in sessions], page_size_tokens)
    cached: list[int] = []
    for session, first in zip(sessions, firsts.tolist(), strict=True):
        lengths = session.lengths()
        cached.append(first)
        for (before, output), (prompt, _) in zip(lengths, lengths[1:], strict=False):
            pages = min((before + output - 1) // page_size_tokens, (prompt - 1) // page_size_tokens)
            cached.append(pages * page_size_tokens)
    return np.array(cached, dtype=np.int64)


def workload_hit_ceiling(workload: Workload, page_size_tokens: int) -> float:
    """Cacheable share of all prompt tokens of a workload, in [0, 1); its items and its sessions share nothing."""
    items, sessions = workload.items, workload.sessions
    cached = int(cacheable_prefix_tokens([item.prompt_bytes for item in items], page_size_tokens).sum())
    cached += int(cacheable_turn_tokens(sessions, page_size_tokens).sum())
    prompts = sum(item.prompt_tokens for item in items)
    prompts += sum(prompt for session in sessions for prompt, _ in session.lengths())
    if not prompts:
        raise ValueError(f"workload {workload.name!r} is empty: a ceiling needs at least one prompt")
    return cached / prompts


def workload_lru_hit(workload: Workload, page_size_tokens: int, capacity_tokens: int) -> float | None:
    """Share of all prompt tokens that one cache of `capacity_tokens` would serve, in [0, 1).

    None for a workload with sessions: when their later turns arrive is up to the schedule.
    """
    if workload.sessions or not workload.items:
        return None
    prompts = [item.prompt_bytes for item in workload.items]
    cached = int(lru_prefix_tokens(prompts, page_size_tokens, capacity_tokens).sum())
    return cached / sum(item.prompt_tokens for item in workload.items)


def _servable_pages(position: int, prompt: bytes, page_size_tokens: int) -> int:
    """Pages of a prompt that may come from a cache: all but the one with its last token."""
    tokens, rest = divmod(len(prompt), TOKEN_BYTES)
    if rest or not tokens:
        raise ValueError(
            f"prompt {position} has {len(prompt)} bytes; it needs one or more whole tokens of {TOKEN_BYTES} bytes"
        )
    return (tokens - 1) // page_size_tokens


def _held_pages(ends: list[int], pages: Collection[int]) -> int:
    """How many leading pages are in `pages`. A held page implies all before it, so bisection is exact."""
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if ends[middle] in pages:
            low = middle + 1
        else:
            high = middle
    return low


def _prefix_hashes(prompt: bytes, page_size_tokens: int) -> list[int]:
    """One hash per whole page: of everything from the prompt's start to that page's end."""
    tokens = np.frombuffer(prompt, dtype="<u4").astype(np.uint64)
    # Mix (position, id) to 64 bits and sum: the sum up to a page's end depends on every id and where it stands.
    mixed = (np.arange(1, len(tokens) + 1, dtype=np.uint64) << np.uint64(32) | tokens) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    ends: list[int] = np.cumsum(mixed)[page_size_tokens - 1 :: page_size_tokens].tolist()
    return ends


def _check_page(page_size_tokens: int) -> None:
    if page_size_tokens < 1:
        raise ValueError(f"page_size_tokens is {page_size_tokens}; a page has at least 1 token")
