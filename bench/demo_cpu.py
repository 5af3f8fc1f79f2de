"""How busy the processes of a demonstration were, to tell whether simulated time kept up with real time.

Invariants
- Shares are CPU seconds per real second of one process group: 1 is one core. Read from /proc; elsewhere there are none.

What this module does not know: what the groups do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

# A peak is the mean over this long: shorter bursts delay nothing that anybody sees.
WINDOW_SECONDS = 5.0
SAMPLE_SECONDS = 1.0
# From here on a process that uses one core has no time left to be punctual.
BUSY_SHARE = 0.9
_PROC = Path("/proc")
# Fields of /proc/PID/stat after the command: process group, user and system time (proc(5): 5, 14, 15).
_GROUP, _USER, _SYSTEM = 2, 11, 12


class CpuMeter:
    """Watches process groups; `names` maps a group's id to what it is called."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)
        self._samples: deque[tuple[float, dict[str, float]]] = deque()
        self._first: tuple[float, dict[str, float]] | None = None
        self.peaks: defaultdict[str, float] = defaultdict(float)
        self.means: dict[str, float] = {}
        self.total_peak = 0.0

    async def watch(self) -> None:
        """Sample until cancelled."""
        while _PROC.joinpath("self", "stat").exists():
            self.sample(time.monotonic(), self._read())
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self, now: float, used_seconds: dict[str, float]) -> None:
        """CPU seconds that each has used so far."""
        self._first = self._first or (now, used_seconds)
        self._samples.append((now, used_seconds))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        self.means = _shares(self._first, (now, used_seconds))
        if now - self._samples[0][0] >= WINDOW_SECONDS:
            window = _shares(self._samples[0], (now, used_seconds))
            for name, share in window.items():
                self.peaks[name] = max(self.peaks[name], share)
            self.total_peak = max(self.total_peak, sum(window.values()))

    def notes(self) -> list[str]:
        """What a reader of the figures should know: who was short of CPU."""
        notes = [
            f"{name} used {peak:.0%} of a core for {WINDOW_SECONDS:g} s"
            for name, peak in self.peaks.items()
            if peak >= BUSY_SHARE
        ]
        cores = os.cpu_count() or 1
        if self.total_peak >= BUSY_SHARE * cores:
            notes.append(f"all processes together used {self.total_peak:.1f} of {cores} cores for {WINDOW_SECONDS:g} s")
        return notes

    def _read(self) -> dict[str, float]:
        """CPU seconds by name, over all processes of its group that live."""
        used = dict.fromkeys(self._names.values(), 0.0)
        ticks = os.sysconf("SC_CLK_TCK")
        for folder in _PROC.iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            name = self._names.get(int(fields[_GROUP]))
            if folder.name == str(os.getpid()):
                name = self._names.get(os.getpid())
            if name is not None:
                used[name] += (int(fields[_USER]) + int(fields[_SYSTEM])) / ticks
        return used


def _shares(before: tuple[float, dict[str, float]], after: tuple[float, dict[str, float]]) -> dict[str, float]:
    seconds = after[0] - before[0]
    if seconds <= 0:
        return {}
    return {name: max(0.0, used - before[1].get(name, 0.0)) / seconds for name, used in after[1].items()}
