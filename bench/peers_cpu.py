"""Whether the figures of a run are about scheduling, or about a machine that was too slow for its time scale.

Invariants
- The check looks at the busiest stretch of `WINDOW_SECONDS`, not at the mean: a burst of a few seconds bends the figures too.

What this module does not know: what ran.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rolloutd.bench.demo_cpu import STARVED_SHARE, WINDOW_SECONDS, CpuMeter

# Of a core. Above it queues form inside a process that nobody asked about.
BOUND_SHARE = 0.6
_ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class CpuReport:
    """Shares of a core, by process. problems: empty when the check passed."""

    means: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, meter: CpuMeter) -> CpuReport:
        problems = [
            f"{name} used {peak:.0%} of a core for {WINDOW_SECONDS:g} s"
            for name, peak in meter.peaks.items()
            if peak > BOUND_SHARE
        ]
        problems += [
            f"{name} waited for a core {peak:.0%} of {WINDOW_SECONDS:g} s"
            for name, peak in meter.starved_peaks.items()
            if peak > STARVED_SHARE
        ]
        return cls(dict(meter.means), dict(meter.peaks), tuple(problems))

    def words(self) -> str:
        """Mean and peak of each, the engines as the busiest of them."""
        if not self.means:
            return "CPU not measured: no /proc here, or a run shorter than its sampling"
        shown: dict[str, str] = {}
        for name in sorted(self.means, key=lambda one: (one.startswith(_ENGINE), -self.peaks.get(one, 0.0))):
            kind = "busiest engine" if name.startswith(_ENGINE) else name
            shown.setdefault(kind, f"{self.means[name]:.0%} (peak {self.peaks.get(name, self.means[name]):.0%})")
        return "CPU " + ", ".join(f"{kind} {share}" for kind, share in shown.items())
