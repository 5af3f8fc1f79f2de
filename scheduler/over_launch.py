"""What became of groups that were launched with more members than they keep: an honest account of their length bias.

The first to end are the short ones, so what is kept is shorter than what was launched. How long the others would have been
nobody knows: what they had written when they were ended is a lower bound, and the length model's expectation, given that, an
estimate. Both are told apart here.

Invariants
- A group is counted once, when its last member ended.
- Bounded: lengths are counted in `BUCKETS_PER_DOUBLING` buckets per factor of two, whatever their number.

What this module does not know: why a member ended, and when others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rolloutd.scheduler.states import Outcome
from rolloutd.scheduler.views import OverLaunchView

QUINTILES: Final = 5
BUCKETS_PER_DOUBLING: Final = 4  # 19 % wide: finer than a quintile of the lengths that rollouts have
MOST_BUCKETS: Final = 32 * BUCKETS_PER_DOUBLING


class Fate:
    """One member at its end. expected_tokens: of its whole output, as far as anybody can tell by then."""

    __slots__ = ("expected_tokens", "outcome", "tokens", "whole")

    def __init__(self, outcome: Outcome, tokens: int, expected_tokens: float, whole: bool) -> None:
        self.outcome = outcome
        self.tokens = tokens
        self.expected_tokens = expected_tokens
        self.whole = whole  # it was done, needed or not


class OverLaunch:
    """Of one run."""

    __slots__ = (
        "_kept_in",
        "_launched_in",
        "groups",
        "kept",
        "kept_tokens",
        "launched",
        "longest_cut_groups",
        "surplus",
        "surplus_tokens",
    )

    def __init__(self) -> None:
        self.groups = 0
        self.launched = 0
        self.kept = 0
        self.surplus = 0
        self.kept_tokens = 0
        self.surplus_tokens = 0
        self.longest_cut_groups = 0
        self._launched_in = [0] * MOST_BUCKETS  # by expected length
        self._kept_in = [0] * MOST_BUCKETS

    def note_group(self, fates: Sequence[Fate]) -> None:
        """All members of a group ended."""
        self.groups += 1
        self.launched += len(fates)
        longest_kept = 0
        longest_cut = -1
        for fate in fates:
            bucket = min(MOST_BUCKETS - 1, int(math.log2(max(1.0, fate.expected_tokens)) * BUCKETS_PER_DOUBLING))
            self._launched_in[bucket] += 1
            if fate.outcome is Outcome.COMPLETED:
                self.kept += 1
                self.kept_tokens += fate.tokens
                self._kept_in[bucket] += 1
                longest_kept = max(longest_kept, fate.tokens)
            elif fate.outcome is Outcome.SURPLUS:
                self.surplus += 1
                self.surplus_tokens += fate.tokens
                if not fate.whole:
                    longest_cut = max(longest_cut, fate.tokens)
        self.longest_cut_groups += longest_cut >= longest_kept

    def view(self) -> OverLaunchView | None:
        """None before any such group ended."""
        if not self.groups:
            return None
        return OverLaunchView(
            groups=self.groups,
            launched=self.launched,
            kept=self.kept,
            surplus=self.surplus,
            kept_tokens=self.kept_tokens,
            surplus_tokens=self.surplus_tokens,
            longest_cut_groups=self.longest_cut_groups,
            kept_share_by_quintile=self._kept_shares(),
        )

    def _kept_shares(self) -> tuple[float, ...]:
        """Of each fifth of what was launched, shortest first, the share that was kept. A bucket on a border counts in parts."""
        shares = []
        fifth = self.launched / QUINTILES
        bucket = 0
        left = float(self._launched_in[0])  # of this bucket, not in any fifth yet
        for _ in range(QUINTILES):
            wanted = fifth
            kept = 0.0
            while wanted > 1e-9 and bucket < MOST_BUCKETS:
                part = min(wanted, left)
                if part > 0.0:
                    kept += self._kept_in[bucket] * part / self._launched_in[bucket]
                    wanted -= part
                    left -= part
                if left <= 1e-9:
                    bucket += 1
                    left = float(self._launched_in[bucket]) if bucket < MOST_BUCKETS else 0.0
            shares.append(kept / fifth)
        return tuple(shares)
