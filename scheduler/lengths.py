"""How long an output will be: priors from earlier epochs, finished siblings, and what is still running.

Formula: expected = max(longest finished sibling's mean, prior of the prompt, twice what a running sibling has written),
else the mean of the run. Doubling is the mean residual life of a log-normal with sigma near 1, where E[L | L > g] is
close to 2g over the middle of the range; 71 % of the variance of log-length lies between prompts (WORKLOADS B.5), so
siblings say most of what can be known.

What this module does not know: which rollouts are asked about; callers pass the prompt's hash and a task type.
"""

from __future__ import annotations

from collections import OrderedDict

from rolloutd.scheduler.states import TaskType

MAX_PROMPTS = 65_536
SMOOTHING = 0.05
PRIOR_SMOOTHING = 0.3
RESIDUAL_FACTOR = 2.0


class LengthPriors:
    def __init__(self) -> None:
        self._prompts: OrderedDict[str, float] = OrderedDict()  # prompt hash -> mean output tokens
        self._mean: dict[TaskType, float] = {}

    def note_finished(self, prompt_hash: str, task_type: TaskType, generated_tokens: int) -> None:
        old = self._mean.get(task_type)
        self._mean[task_type] = generated_tokens if old is None else old + SMOOTHING * (generated_tokens - old)
        known = self._prompts.pop(prompt_hash, None)
        self._prompts[prompt_hash] = (
            float(generated_tokens) if known is None else known + PRIOR_SMOOTHING * (generated_tokens - known)
        )
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def expected(self, prompt_hash: str, task_type: TaskType, max_new_tokens: int, running_tokens: int = 0) -> float:
        """Expected output tokens of one rollout, at most `max_new_tokens`, at least 1."""
        known = self._prompts.get(prompt_hash)
        if known is None:
            known = self._mean.get(task_type, max_new_tokens / 4)
        return max(1.0, min(float(max_new_tokens), max(known, RESIDUAL_FACTOR * running_tokens)))

    def mean(self, task_type: TaskType) -> float:
        """Mean output tokens seen for a task type; 0 when none was."""
        return self._mean.get(task_type, 0.0)

    def __len__(self) -> int:
        return len(self._prompts)
