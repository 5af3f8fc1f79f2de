"""A rate over the recent past: an exponentially decayed sum divided by its time constant.

What this module does not know: what is counted.
"""

from __future__ import annotations

import math
from typing import Final

WINDOW_SECONDS: Final = 10.0


class Meter:
    __slots__ = ("_at", "_sum")

    def __init__(self, now: float) -> None:
        self._at = now
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        self._decay(now)
        self._sum += amount

    def per_second(self, now: float) -> float:
        self._decay(now)
        return self._sum / WINDOW_SECONDS

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._sum *= math.exp((self._at - now) / WINDOW_SECONDS)
            self._at = now
