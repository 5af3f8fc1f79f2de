"""How much later one more sequence in a batch makes each token of the others: one engine's decode curve, as seen from its reports.

Model: a decode step of b sequences takes base + growth x b seconds. Seconds per token are averaged per size of batch (1, 2, 3-4,
5-8, ...), and a line is laid through the averages, each counting the same: an engine is full most of its time, and what it
showed when it was not must not be forgotten for that.

Invariants
- Neither part of the line is negative.
- Nothing is known before two sizes of batch were seen `ENOUGH` times each.

What this module does not know: engines, classes, when a measurement is clean (`attempts.py` leaves out those over which the batch
changed).
"""

from __future__ import annotations

from typing import Final

SIZES: Final = 16  # of batches: the last has all from 2^14 on
SMOOTHING: Final = 0.1  # weight of the newest measurement in the average of its size
ENOUGH: Final = 4  # measurements of a size before it counts


class DecodeCurve:
    __slots__ = ("_batches", "_counts", "_line", "_seconds", "_stale")

    def __init__(self) -> None:
        self._counts = [0] * SIZES
        self._batches = [0.0] * SIZES  # averages
        self._seconds = [0.0] * SIZES
        self._line: tuple[float, float] | None = None
        self._stale = False

    def note(self, batch: int, seconds_per_token: float) -> None:
        """One sequence of a batch of `batch` >= 1 took so long per token, while the batch did not change."""
        size = min(SIZES - 1, (batch - 1).bit_length())
        count = self._counts[size]
        weight = max(SMOOTHING, 1.0 / (count + 1))
        self._counts[size] = count + 1
        self._batches[size] += weight * (batch - self._batches[size])
        self._seconds[size] += weight * (seconds_per_token - self._seconds[size])
        self._stale = True

    def line(self) -> tuple[float, float] | None:
        """(seconds of a step without anybody, seconds that each sequence adds); None while that is not known."""
        if self._stale:
            self._line = self._fitted()
            self._stale = False
        return self._line

    def _fitted(self) -> tuple[float, float] | None:
        seen = [size for size in range(SIZES) if self._counts[size] >= ENOUGH]
        if len(seen) < 2:
            return None
        batch = sum([self._batches[size] for size in seen]) / len(seen)
        seconds = sum([self._seconds[size] for size in seen]) / len(seen)
        spread = sum([(self._batches[size] - batch) ** 2 for size in seen])
        common = sum([(self._batches[size] - batch) * (self._seconds[size] - seconds) for size in seen])
        growth = max(0.0, common / spread)
        return max(0.0, seconds - growth * batch), growth
