"""How busy the processes of a demonstration were, to tell whether simulated time kept up with real time.

Invariants
- Shares are seconds per real second of one process group: of CPU used (1 is one core, over all its processes), and of
  its leader's main thread ready to run but without a core, because others had them all.
- Read from /proc; elsewhere than on Linux there are none.

What this module does not know: what the groups do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# A peak is the mean over this long: shorter bursts delay nothing that anybody sees.
WINDOW_SECONDS = 5.0
SAMPLE_SECONDS = 1.0
# From here on a process that uses one core has no time left to be punctual.
BUSY_SHARE = 0.9
# Of a second without a core: event loops are then late by many times what they would be on a quiet machine.
STARVED_SHARE = 0.3
_PROC = Path("/proc")
# Fields of /proc/PID/stat after the command: process group, user and system time (proc(5): 5, 14, 15).
_GROUP, _USER, _SYSTEM = 2, 11, 12


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since its start."""

    used_seconds: float = 0.0
    starved_seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.used_seconds + other.used_seconds, self.starved_seconds + other.starved_seconds)

    def since(self, before: Usage, seconds: float) -> Usage:
        """Shares of the `seconds` between the two. A process that ended takes its past away: never below 0."""
        return Usage(
            max(0.0, self.used_seconds - before.used_seconds) / seconds,
            max(0.0, self.starved_seconds - before.starved_seconds) / seconds,
        )


class CpuMeter:
    """Watches process groups; `names` maps a group's id to what it is called."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)
        self._samples: deque[tuple[float, dict[str, Usage]]] = deque()
        self._first: tuple[float, dict[str, Usage]] | None = None
        self.means: dict[str, float] = {}
        self.peaks: defaultdict[str, float] = defaultdict(float)
        self.starved_peaks: defaultdict[str, float] = defaultdict(float)
        self.total_peak = 0.0

    async def watch(self) -> None:
        """Sample until cancelled."""
        while _PROC.joinpath("self", "stat").exists():
            self.sample(time.monotonic(), self._read())
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self, now: float, usage: dict[str, Usage]) -> None:
        """What each has used so far."""
        if self._first is None:
            self._first = (now, usage)
        else:
            self.means = {name: share.used_seconds for name, share in _shares(self._first, now, usage).items()}
        self._samples.append((now, usage))
        while now - self._samples[0][0] > WINDOW_SECONDS and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        if now - self._samples[0][0] >= WINDOW_SECONDS:
            window = _shares(self._samples[0], now, usage)
            for name, share in window.items():
                self.peaks[name] = max(self.peaks[name], share.used_seconds)
                self.starved_peaks[name] = max(self.starved_peaks[name], share.starved_seconds)
            self.total_peak = max(self.total_peak, sum(share.used_seconds for share in window.values()))

    def notes(self) -> list[str]:
        """What a reader of the figures should know: who was short of CPU."""
        window = f"for {WINDOW_SECONDS:g} s"
        busy = [f"{name} used {peak:.0%} of a core {window}" for name, peak in self.peaks.items() if peak >= BUSY_SHARE]
        cores = os.cpu_count() or 1
        if self.total_peak >= BUSY_SHARE * cores:
            busy.append(f"all processes together used {self.total_peak:.1f} of {cores} cores {window}")
        starved = [
            f"{name} waited for a core {peak:.0%} of the time {window}: the machine was busy with something else"
            for name, peak in self.starved_peaks.items()
            if peak >= STARVED_SHARE
        ]
        return busy + starved

    def _read(self) -> dict[str, Usage]:
        """By name, over all processes of its group that live."""
        usage = dict.fromkeys(self._names.values(), Usage())
        ticks = os.sysconf("SC_CLK_TCK")
        for folder in _PROC.iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
                # This process may belong to a group of somebody else's.
                group = os.getpid() if int(folder.name) == os.getpid() else int(fields[_GROUP])
                name = self._names.get(group)
                if name is None:
                    continue
                starved_seconds = _starved_seconds(folder / "schedstat") if int(folder.name) == group else 0.0
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            used_seconds = (int(fields[_USER]) + int(fields[_SYSTEM])) / ticks
            usage[name] += Usage(used_seconds, starved_seconds)
        return usage


def _starved_seconds(schedstat: Path) -> float:
    """How long the main thread was ready to run without a core; 0 where the kernel does not say."""
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


def _shares(before: tuple[float, dict[str, Usage]], now: float, usage: dict[str, Usage]) -> dict[str, Usage]:
    seconds = now - before[0]
    return {name: used.since(before[1].get(name, Usage()), seconds) for name, used in usage.items()}
