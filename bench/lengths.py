"""Log-normal lengths whose spread is split between prompts and the samples of one prompt.

Invariants
- A draw is a function of its generators alone: same generators, same lengths.
- The marginal over all prompts and samples is ln(mu, sigma), whatever the split; clipping comes last.
- The part that belongs to the prompt and the part that belongs to the sample come from two generators, so a second
  epoch can keep the first and renew the second.

What this module does not know: what the lengths are lengths of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

# Share of the variance of the log-length that lies between prompts; the rest lies between samples of one prompt.
# 64.8 : 26.1 in TailSieve's decomposition of reasoning lengths.
BETWEEN_PROMPTS_SHARE = 0.71


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens with natural log ~ N(mu, sigma^2), rounded and clipped to [low_tokens, high_tokens]."""

    mu: float
    sigma: float
    low_tokens: int
    high_tokens: int

    def __post_init__(self) -> None:
        if self.sigma < 0:
            raise ValueError(f"sigma is {self.sigma}; a spread cannot be negative")
        if not 1 <= self.low_tokens <= self.high_tokens:
            raise ValueError(
                f"range is {self.low_tokens}..{self.high_tokens} tokens; it must start at 1 or more and not end before"
            )

    def capped(self, high_tokens: int) -> LogNormal:
        """The same lengths, clipped at `high_tokens` too. Raises ValueError when that leaves nothing of the range."""
        if high_tokens < self.low_tokens:
            raise ValueError(f"cap of {high_tokens} tokens is under the shortest length, {self.low_tokens}")
        return replace(self, high_tokens=min(self.high_tokens, high_tokens))

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        """`count` independent lengths, shape (count,)."""
        return self._clip(self.mu + self.sigma * rng.standard_normal(count))

    def draw_groups(
        self,
        prompt_rng: np.random.Generator,
        sample_rng: np.random.Generator,
        groups: int,
        samples: int,
        between_share: float = BETWEEN_PROMPTS_SHARE,
    ) -> Tokens:
        """Lengths of `samples` outputs for each of `groups` prompts, shape (groups, samples).

        between_share: part of sigma^2 shared by the samples of one prompt, in [0, 1]. `prompt_rng` draws that part,
        `sample_rng` the rest.
        """
        if not 0.0 <= between_share <= 1.0:
            raise ValueError(f"between_share is {between_share}; it is a share of the variance, in [0, 1]")
        of_prompt = prompt_rng.standard_normal((groups, 1))
        of_sample = sample_rng.standard_normal((groups, samples))
        spread = math.sqrt(between_share) * of_prompt + math.sqrt(1.0 - between_share) * of_sample
        return self._clip(self.mu + self.sigma * spread)

    def _clip(self, logs: npt.NDArray[np.float64]) -> Tokens:
        # Clip before the cast: a length beyond int64 would wrap.
        clipped: Tokens = np.clip(np.rint(np.exp(logs)), self.low_tokens, self.high_tokens).astype(np.int64)
        return clipped
