"""What a run counts since it began, as it was at one look of its rules: the difference of two is what happened between them.

What this module does not know: who counts.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Counted(NamedTuple):
    """What a run counts since it began, as it was at one look."""

    prompt_tokens: int
    cached_tokens: int
    dispatches: int
    preemptions: int
    finished: int
    stale: int


NOTHING_COUNTED: Final = Counted(0, 0, 0, 0, 0, 0)
