"""What an engine has promised of its KV cache to the rollouts it runs: SGLang's own rule for letting one more in.

A new rollout is let in when its prompt, its output (at most CLIPPED_TOKENS of it) and a page fit into what is neither held
nor promised. A running one is promised a share of what it may still write, or all of it when it ignores the end token. The
share starts at FIRST_SHARE when the engine is empty and falls with each decode step. One that does not fit stays in the
engine's queue, and then nothing behind it is let in either until a running one leaves: so it must not be sent.

Invariants
- The sums are those over the promises that were made and not released; `check()` of the core re-derives them.
- The share used here is never below the engine's, except after it had to retract: the longest output since the engine was
  empty is a lower bound of its decode steps.

What this module does not know: claims and budgets (`permit.py`), which count what is expected and not what is promised.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

# SGLang 0.5.23: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR and
# SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS, at a --schedule-conservativeness of 1.
CLIPPED_TOKENS: Final = 4096
FIRST_SHARE: Final = 0.7
LAST_SHARE: Final = 0.7 * 0.14
SHARE_DECAY_STEPS: Final = 600


def needed_tokens(prompt_tokens: int, output_tokens: int, page_tokens: int) -> int:
    """What a new rollout must find free."""
    return prompt_tokens + min(output_tokens, CLIPPED_TOKENS) + page_tokens


@mypyc_attr(acyclic=True)
class Promise:
    """To one attempt. `in_full`: it ignores the end token."""

    __slots__ = ("generated_tokens", "in_full", "output_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, output_tokens: int, in_full: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.in_full = in_full
        self.generated_tokens = 0

    @property
    def rest_tokens(self) -> int:
        """Output it may still write, as far as it counts."""
        return counted(self.output_tokens - self.generated_tokens)


def counted(rest_tokens: int) -> int:
    """Of so many tokens that may still be written, those that count."""
    if rest_tokens < 0:
        return 0
    return rest_tokens if rest_tokens < CLIPPED_TOKENS else CLIPPED_TOKENS


class Promises:
    """Those of one engine."""

    __slots__ = ("count", "full_tokens", "held_tokens", "longest_tokens", "part_count", "part_tokens")

    def __init__(self) -> None:
        self.count = 0
        self.held_tokens = 0  # prompts and outputs so far; a shared prefix counts once for each
        self.full_tokens = 0  # output that may still come of those that ignore the end token
        self.part_tokens = 0  # and of the others
        self.part_count = 0
        self.longest_tokens = 0  # output since the engine was empty

    def make(self, promise: Promise) -> None:
        self.count += 1
        self.part_count += not promise.in_full
        self._add(promise, 1)

    def note_written(self, promise: Promise, generated_tokens: int) -> None:
        written = promise.generated_tokens
        output = promise.output_tokens
        promise.generated_tokens = generated_tokens
        self.held_tokens += generated_tokens - written
        change = counted(output - generated_tokens) - counted(output - written)
        if promise.in_full:
            self.full_tokens += change
        else:
            self.part_tokens += change
        if generated_tokens > self.longest_tokens:
            self.longest_tokens = generated_tokens

    def release(self, promise: Promise) -> None:
        self.count -= 1
        self.part_count -= not promise.in_full
        self._add(promise, -1)
        if not self.count:
            self.longest_tokens = 0

    def fits(
        self, prompt_tokens: int, output_tokens: int, capacity_tokens: int, page_tokens: int, unreported_tokens: int
    ) -> bool:
        """Whether the engine would let one more in now. An empty one always does. See `room_tokens`."""
        if not self.count:
            return True
        needed = needed_tokens(prompt_tokens, output_tokens, page_tokens)
        return needed < self.room_tokens(capacity_tokens, page_tokens, unreported_tokens)

    def room_tokens(self, capacity_tokens: int, page_tokens: int, unreported_tokens: int) -> float:
        """What is neither held nor promised; one more must need less than this, unless the engine is empty.

        unreported_tokens: that a rollout may have written since its last report.
        """
        share = self.share
        promised = self.full_tokens + share * self.part_tokens + self.count * page_tokens
        unreported = (1.0 - share) * min(self.part_tokens, self.part_count * unreported_tokens)
        return capacity_tokens - self.held_tokens - promised - unreported

    @property
    def share(self) -> float:
        fallen = (FIRST_SHARE - LAST_SHARE) * self.longest_tokens / SHARE_DECAY_STEPS
        return max(LAST_SHARE, FIRST_SHARE - fallen)

    def _add(self, promise: Promise, sign: int) -> None:
        self.held_tokens += sign * (promise.prompt_tokens + promise.generated_tokens)
        if promise.in_full:
            self.full_tokens += sign * promise.rest_tokens
        else:
            self.part_tokens += sign * promise.rest_tokens
