"""Prefixes that some engine is computing right now, so that reusable work can wait for them instead of computing them again.

A prompt's stems are its prefixes of 64, 128, 256, ... tokens, each named by a hash of its tokens and its run; two prompts that
share a stem share at least that much. A collision only makes somebody wait up to `max_defer_seconds` for nothing.

Invariants
- A stem is counted once for every attempt that computes it and has no first token yet; the table is empty when all is quiet.

What this module does not know: who waits; entries register by stem and are handed back when it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.spec import TOKEN_BYTES

if TYPE_CHECKING:
    from rolloutd.scheduler.entry import Entry

SHORTEST_STEM_TOKENS: Final = 64
LONGEST_STEM_TOKENS: Final = 1 << 20

Stem = int


def stems_of(run_id: str, token_bytes: bytes) -> tuple[Stem, ...]:
    """The stems of a prompt, shortest first: `stem_tokens` says how long each is."""
    stems = []
    stem = hash(run_id)
    begin = 0
    end = SHORTEST_STEM_TOKENS * TOKEN_BYTES
    while end <= len(token_bytes) and end <= LONGEST_STEM_TOKENS * TOKEN_BYTES:
        stem = hash((stem, token_bytes[begin:end]))  # each token is hashed once, not for every stem that it is in
        stems.append(stem)
        begin, end = end, 2 * end
    return tuple(stems)


def stem_tokens(place: int) -> int:
    """Length of the stem at this place among those of a prompt."""
    return SHORTEST_STEM_TOKENS << place


class Computing:
    def __init__(self) -> None:
        self._running: dict[Stem, int] = {}
        self._waiting: dict[Stem, list[Entry]] = {}

    def begin(self, stems: tuple[Stem, ...]) -> None:
        running = self._running
        for stem in stems:
            running[stem] = running.get(stem, 0) + 1

    def end(self, stems: tuple[Stem, ...]) -> list[Entry]:
        """An attempt got its first token or ended; returns the entries that waited for one of its stems."""
        woken: list[Entry] = []
        running = self._running
        for stem in stems:
            left = running[stem] - 1
            if left:
                running[stem] = left
            else:
                del running[stem]
            if self._waiting:
                woken.extend(self._waiting.pop(stem, ()))
        return woken

    def longest(self, stems: tuple[Stem, ...]) -> int | None:
        """The place among these of the longest that is being computed."""
        place = len(stems)
        while place:
            place -= 1
            if stems[place] in self._running:
                return place
        return None

    def wait(self, stem: Stem, entry: Entry) -> None:
        self._waiting.setdefault(stem, []).append(entry)

    def __len__(self) -> int:
        return len(self._running)
