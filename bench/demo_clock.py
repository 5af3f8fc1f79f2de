"""Simulated time: the seconds that simulated engines live by, read off the real clock.

Invariants
- Simulated seconds = real seconds x time scale, from 0 when the clock is made. Never goes back.

What this module does not know: what happens at which time.
"""

from __future__ import annotations

import asyncio
import time


class SimClock:
    """`time_scale`: simulated seconds per real second, above 0; 1 where engines are real."""

    def __init__(self, time_scale: float) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale is {time_scale}; it must be above 0")
        self.time_scale = time_scale
        self._started = time.monotonic()

    def now(self) -> float:
        """Simulated seconds since the start."""
        return (time.monotonic() - self._started) * self.time_scale

    def real(self, simulated_seconds: float) -> float:
        """Real seconds that so many simulated ones take."""
        return simulated_seconds / self.time_scale

    async def sleep_until(self, simulated_seconds: float) -> None:
        """Return at that time, or at once when it is past."""
        await asyncio.sleep(max(0.0, self.real(simulated_seconds - self.now())))

    async def sleep(self, simulated_seconds: float) -> None:
        """Return so much later."""
        await asyncio.sleep(self.real(simulated_seconds))
