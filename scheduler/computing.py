"""Prefixes that some engine is computing right now, so that reusable work can wait for them instead of computing them again.

A prompt's stems are its prefixes of 64, 128, 256, ... tokens; two prompts that share a stem share at least that much. Stems
are compared by hash: a collision only makes somebody wait up to `max_defer_seconds` for nothing.

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

Stem = tuple[str, int, int]  # (run id, tokens, hash)


def stems_of(run_id: str, token_bytes: bytes) -> tuple[Stem, ...]:
    """The stems of a prompt, shortest first."""
    stems = []
    length = SHORTEST_STEM_TOKENS
    while length * TOKEN_BYTES <= len(token_bytes) and length <= LONGEST_STEM_TOKENS:
        stems.append((run_id, length, hash(token_bytes[: length * TOKEN_BYTES])))
        length *= 2
    return tuple(stems)


class Computing:
    def __init__(self) -> None:
        self._running: dict[Stem, int] = {}
        self._waiting: dict[Stem, list[Entry]] = {}

    def begin(self, stems: tuple[Stem, ...]) -> None:
        for stem in stems:
            self._running[stem] = self._running.get(stem, 0) + 1

    def end(self, stems: tuple[Stem, ...]) -> list[Entry]:
        """An attempt got its first token or ended; returns the entries that waited for one of its stems."""
        woken: list[Entry] = []
        for stem in stems:
            left = self._running[stem] - 1
            if left:
                self._running[stem] = left
            else:
                del self._running[stem]
            woken.extend(self._waiting.pop(stem, ()))
        return woken

    def longest(self, stems: tuple[Stem, ...]) -> Stem | None:
        """The longest stem of these that is being computed."""
        for stem in reversed(stems):
            if stem in self._running:
                return stem
        return None

    def wait(self, stem: Stem, entry: Entry) -> None:
        self._waiting.setdefault(stem, []).append(entry)

    def __len__(self) -> int:
        return len(self._running)
