"""COLD_START and STABLE of one run: when it changes, and what that does to parameters.

STABLE needs `cold_start_steps` trainer steps and, where a threshold is set, an entropy at or below it; back to COLD_START
only when the entropy rises above threshold x (1 + band). Parameters move linearly over `phase_ramp_steps`. Without entropy
reports the mean of minus log-prob of recent rollouts stands in; where there is neither, steps alone decide.

Invariants
- `blend` stays in [0, 1] and moves towards the phase, by steps that were not reported before: a report that is repeated or late
  moves it only where there is no ramp.
- STABLE is left through entropy alone, so never where no threshold is set.

What this module does not know: what the parameters are used for.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler.config import PolicySettings
from rolloutd.scheduler.views import Phase

SURPRISE_SMOOTHING: Final = 0.02


class PhaseState:
    __slots__ = ("blend", "phase", "settings", "step", "surprise")

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.phase = Phase.COLD_START
        self.blend = 0.0  # 0: all parameters at their COLD_START value, 1: at their STABLE value
        self.step = 0
        self.surprise: float | None = None  # mean of minus log-prob of recent tokens

    @property
    def wants_log_probs(self) -> bool:
        """Whether anything depends on them: only a threshold on entropy does."""
        return self.settings.cold_start_entropy > 0.0

    def note_log_prob(self, mean_log_prob: float) -> None:
        """Mean log-prob of one finished rollout's tokens."""
        value = -mean_log_prob
        self.surprise = value if self.surprise is None else self.surprise + SURPRISE_SMOOTHING * (value - self.surprise)

    def advance(self, step: int, entropy: float | None) -> bool:
        """Take in a step report; true when the phase changed."""
        settings = self.settings
        steps = max(0, step - self.step)
        self.step = max(self.step, step)
        if entropy is None:
            entropy = self.surprise
        before = self.phase
        threshold = settings.cold_start_entropy
        if self.phase is Phase.COLD_START:
            calm = threshold == 0.0 or entropy is None or entropy <= threshold
            if self.step >= settings.cold_start_steps and calm:
                self.phase = Phase.STABLE
        elif threshold and entropy is not None and entropy > threshold * (1.0 + settings.entropy_band):
            self.phase = Phase.COLD_START
        target = 1.0 if self.phase is Phase.STABLE else 0.0
        stride = steps / settings.phase_ramp_steps if settings.phase_ramp_steps else 1.0
        if self.blend < target:
            self.blend = min(target, self.blend + stride)
        else:
            self.blend = max(target, self.blend - stride)
        return self.phase is not before

    def between(self, cold: float, stable: float) -> float:
        """A parameter's value now."""
        return cold + (stable - cold) * self.blend
