"""How long outputs will be: what a prompt's finished and running rollouts say about those that still wait.

Model: log-lengths of a task type and stratum are normal; 71 % of their variance lies between prompts, 29 % between samples
of one prompt. A prompt's log-mean has its kind's distribution as its prior. A finished rollout is an observation; one that
has written g tokens is an observation cut off at g, imputed by its conditional mean

    E[x | x > a] = m + s * phi(z) / (1 - Phi(z)),  z = (a - m) / s

and the posterior mean is found in a few rounds. Without the cut-off ones the first to finish, the shortest, would make every
prompt look short. What earlier epochs of a prompt did counts as finished rollouts.

`scheduler.learn_lengths` off: nothing of that is used for estimates, which stand on the caller's limit and on what the rollout has
written itself. It is noted all the same, so that switching it on again starts from all that was seen.

Invariants
- Bounded: at most `MAX_PROMPTS` prompts are remembered, least recently used first to go; running ones are never forgotten.
- Estimates are finite, at least 1 and at most the caller's `max_new_tokens`.

What this module does not know: classes, engines, time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import NormalDist
from typing import Final

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.states import TaskType

Kind = tuple[TaskType, str]  # task type and stratum: what is alike in length
MAX_PROMPTS: Final = 65_536
BETWEEN_SHARE: Final = 0.71  # of the variance of log-length, between prompts
START_VARIANCE: Final = 1.0  # of log-length, before there are data: W1's is 0.98, W2's 0.72
LEAST_VARIANCE, MOST_VARIANCE = 0.2, 3.0
UNKNOWN_SHARE: Final = 1 / 8  # of max_new_tokens: median length before there are data
ENOUGH_SAMPLES: Final = 32  # finished and running, before the task's own mean and variance are believed
OLD_SAMPLES: Final = 16  # a prompt's history counts as at most this many; older epochs fade
ROUNDS: Final = 3
CALM_SAMPLES, CALM_SECONDS = 256, 4  # a kind with so many finished ones is re-estimated so often
GROWTH: Final = 1.1  # a running rollout's tokens are looked at again when they grew by this
# A step of some hundred rollouts ends with the longest of them, so what counts is how long one may be once in 1,000 times.
WORST_SHARE: Final = 0.001
LEAST_SHARE: Final = 1e-15

NORMAL: Final = NormalDist()
DENSITY: Final = 1.0 / math.sqrt(2.0 * math.pi)  # of the standard normal at 0
FAR_DEVIATIONS: Final = 6.0  # beyond the mean, where the normal's tail needs no integral
SQRT_HALF: Final = math.sqrt(0.5)
ERFC: Final = math.erfc  # compiled, found once and not at each call
WORST_DEVIATIONS: Final = -NORMAL.inv_cdf(WORST_SHARE)
UNKNOWN_BETWEEN: Final = BETWEEN_SHARE * START_VARIANCE
UNKNOWN_WITHIN: Final = math.sqrt((1.0 - BETWEEN_SHARE) * START_VARIANCE)


class _Task:
    """Prior of one kind of work: mean and variance of log-length over all its prompts."""

    __slots__ = ("count", "log_sum", "mean", "running", "square_sum", "token_sum", "variance", "version")

    def __init__(self) -> None:
        self.mean: float | None = None
        self.variance = START_VARIANCE
        self.version = 0
        self.count = 0.0
        self.log_sum = 0.0
        self.square_sum = 0.0
        self.token_sum = 0.0
        self.running: dict[str, _Prompt] = {}  # those with rollouts that run

    def refresh(self) -> None:
        """Re-estimate mean and variance from what finished and what runs."""
        # Said before the pass over them all, whose terms are dear.
        if self.count + sum(len(prompt.running) for prompt in self.running.values()) < ENOUGH_SAMPLES:
            return
        deviation = math.sqrt(self.variance)
        count, log_sum, square_sum = self.count, self.log_sum, self.square_sum
        for prompt in self.running.values():
            for tokens in prompt.running.values():
                middle = self.mean if self.mean is not None else math.log(max(2, tokens))
                log = _imputed(math.log(max(1, tokens)), middle, deviation)
                count += 1
                log_sum += log
                square_sum += log * log
        mean = log_sum / count
        variance = min(MOST_VARIANCE, max(LEAST_VARIANCE, square_sum / count - mean * mean))
        if self.mean is None or abs(mean - self.mean) > 0.02 or abs(variance - self.variance) > 0.02:
            self.mean, self.variance = mean, variance
            self.version += 1


@mypyc_attr(acyclic=True)
class _Prompt:
    __slots__ = ("finished", "log_mean", "log_sum", "running", "stale", "task", "task_version")

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.finished = 0.0
        self.log_sum = 0.0
        self.running: dict[str, int] = {}  # rollout id -> tokens written
        self.log_mean = 0.0
        self.stale = True
        self.task_version = -1


class LengthModel:
    """learns: whether estimates use what was noted; may be changed at any time."""

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self._seconds = 0
        self._tasks: dict[Kind, _Task] = {}
        self._prompts: OrderedDict[tuple[str, Kind], _Prompt] = OrderedDict()

    # observations ------------------------------------------------------------------------------------------------------

    def note_running(self, prompt_hash: str, kind: Kind, rollout_id: str, tokens: int) -> bool:
        """A rollout has written this many tokens; true when that may change what is expected of its siblings."""
        prompt = self._prompts.get((prompt_hash, kind))
        if prompt is None:
            prompt = self._prompt(prompt_hash, kind)
        if tokens <= prompt.running.get(rollout_id, 0) * GROWTH:
            return False
        prompt.running[rollout_id] = tokens
        if not prompt.stale:
            # One that has written next to nothing is imputed by the mean, and so leaves the mean where it is.
            deviation = math.sqrt((1.0 - BETWEEN_SHARE) * prompt.task.variance)
            prompt.stale = math.log(max(1, tokens)) >= prompt.log_mean - FAR_DEVIATIONS * deviation
        prompt.task.running[prompt_hash] = prompt
        return True

    def note_stopped(self, prompt_hash: str, kind: Kind, rollout_id: str) -> None:
        """A rollout stopped running without an end: it says nothing more."""
        prompt = self._prompts.get((prompt_hash, kind))
        if prompt is not None and prompt.running.pop(rollout_id, None) is not None:
            prompt.stale = True
            if not prompt.running:
                prompt.task.running.pop(prompt_hash, None)

    def note_finished(self, prompt_hash: str, kind: Kind, rollout_id: str, tokens: int) -> None:
        prompt = self._prompt(prompt_hash, kind)
        task = prompt.task
        prompt.running.pop(rollout_id, None)
        if not prompt.running:
            task.running.pop(prompt_hash, None)
        log = math.log(max(1, tokens))
        if prompt.finished >= OLD_SAMPLES:
            prompt.log_sum *= 0.5
            prompt.finished *= 0.5
        prompt.finished += 1
        prompt.log_sum += log
        prompt.stale = True
        if task.count >= 4096:  # forget slowly: the policy changes
            task.count, task.log_sum, task.square_sum, task.token_sum = (
                task.count / 2,
                task.log_sum / 2,
                task.square_sum / 2,
                task.token_sum / 2,
            )
        task.count += 1
        task.log_sum += log
        task.square_sum += log * log
        task.token_sum += tokens

    def note_second(self) -> bool:
        """Called once a second: re-estimates priors at once while little is known, every `CALM_SECONDS` after that.

        True when a prior changed, and with it what is expected of everything of that kind.
        """
        self._seconds += 1
        calm = self._seconds % CALM_SECONDS != 0
        changed = False
        for task in self._tasks.values():
            if not calm or task.count < CALM_SAMPLES:
                version = task.version
                task.refresh()
                changed = changed or task.version != version
        return changed

    def refresh(self) -> None:
        """Re-estimate all priors from what finished and what runs. Costs a pass over running rollouts."""
        for task in self._tasks.values():
            task.refresh()

    # estimates ---------------------------------------------------------------------------------------------------------

    def outlook(self, prompt_hash: str, kind: Kind, max_new_tokens: int, written: int) -> tuple[float, float]:
        """(mean output of one rollout that has written `written`, what it may still write at worst), in tokens.

        At worst: exceeded once in `1 / WORST_SHARE` times. Of the predictive distribution, which is wider while little is
        known of the prompt: of two that look alike, the one that was not tried yet may hide the longest of the step.
        """
        log_mean, deviation, doubt = self._predict(prompt_hash, kind, max_new_tokens)
        return (
            _expected(log_mean, deviation, max_new_tokens, written),
            _worst(log_mean, math.sqrt(deviation * deviation + doubt), max_new_tokens, written),
        )

    def expected(self, prompt_hash: str, kind: Kind, max_new_tokens: int, written: int = 0) -> float:
        """Mean output tokens of one rollout of this prompt that has written `written` already."""
        log_mean, deviation, _ = self._predict(prompt_hash, kind, max_new_tokens)
        return _expected(log_mean, deviation, max_new_tokens, written)

    def worst(self, prompt_hash: str, kind: Kind, max_new_tokens: int, written: int) -> float:
        """The second figure of `outlook`."""
        return self.outlook(prompt_hash, kind, max_new_tokens, written)[1]

    def mean(self, task_type: TaskType) -> float:
        """Mean output tokens of finished rollouts of a task type, over all strata; 0 when there were none."""
        tasks = [task for kind, task in self._tasks.items() if kind[0] is task_type]
        count = sum(task.count for task in tasks)
        return sum(task.token_sum for task in tasks) / count if count else 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def _predict(self, prompt_hash: str, kind: Kind, max_new_tokens: int) -> tuple[float, float, float]:
        """(log-mean of the prompt, standard deviation between its samples, variance of what is not known of the log-mean)."""
        if not self.learns:
            return _unknown(max_new_tokens), UNKNOWN_WITHIN, UNKNOWN_BETWEEN
        prompt = self._prompts.get((prompt_hash, kind))
        task = self._task(kind) if prompt is None else prompt.task
        within = math.sqrt((1.0 - BETWEEN_SHARE) * task.variance)
        between = BETWEEN_SHARE * task.variance
        prior = task.mean if task.mean is not None else _unknown(max_new_tokens)
        if prompt is None:
            return prior, within, between
        if prompt.stale or prompt.task_version != task.version:
            prompt.log_mean = _posterior(prompt, prior, between, within)
            prompt.stale = False
            prompt.task_version = task.version
        # One that runs counts in full: what it will tell is on its way, and trying others meanwhile tells more.
        observations = prompt.finished + len(prompt.running)
        return prompt.log_mean, within, 1.0 / (1.0 / between + observations / (within * within))

    def _task(self, kind: Kind) -> _Task:
        task = self._tasks.get(kind)
        if task is None:
            task = self._tasks[kind] = _Task()
        return task

    def _prompt(self, prompt_hash: str, kind: Kind) -> _Prompt:
        key = (prompt_hash, kind)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(self._task(kind))
            while len(self._prompts) > MAX_PROMPTS:
                oldest, kept = self._prompts.popitem(last=False)
                if kept.running:  # never forget who runs; it becomes the most recent
                    self._prompts[oldest] = kept
        else:
            self._prompts.move_to_end(key)
        return prompt


def _unknown(max_new_tokens: int) -> float:
    """Log-mean before there are data."""
    return math.log(max(2.0, max_new_tokens * UNKNOWN_SHARE))


def _expected(log_mean: float, deviation: float, max_new_tokens: int, written: int) -> float:
    if written > 1:
        log_mean = max(log_mean, _imputed(math.log(written), log_mean, deviation) - 0.5 * deviation * deviation)
    return _tokens(log_mean + 0.5 * deviation * deviation, max_new_tokens)


def _worst(log_mean: float, spread: float, max_new_tokens: int, written: int) -> float:
    """What is left at the quantile `1 - WORST_SHARE` of log-normal lengths above `written`."""
    limit = max(1, max_new_tokens - written)
    if written <= 1:
        return _tokens(log_mean + WORST_DEVIATIONS * spread, limit)
    beyond = 0.5 * math.erfc((math.log(written) - log_mean) / spread * SQRT_HALF)
    share = WORST_SHARE * beyond
    if share < LEAST_SHARE:
        return float(limit)  # it is longer than anything that was thought of
    return max(1.0, min(limit, math.exp(min(50.0, log_mean - NORMAL.inv_cdf(share) * spread)) - written))


def _posterior(prompt: _Prompt, prior: float, between: float, within: float) -> float:
    """Posterior mean of a prompt's log-length, cut-off observations imputed round by round."""
    precision = 1.0 / (within * within)
    weight = 1.0 / between + (prompt.finished + len(prompt.running)) * precision
    base = prior / between + prompt.log_sum * precision
    cuts = [math.log(tokens) if tokens > 1 else 0.0 for tokens in prompt.running.values()]
    log_mean = (prior / between + prompt.log_sum * precision) / (1.0 / between + prompt.finished * precision)
    far = log_mean - FAR_DEVIATIONS * within
    for cut in cuts:
        if cut >= far:
            break
    else:
        return log_mean  # none of them says anything yet: each is imputed by the mean itself
    for _ in range(ROUNDS):
        total = 0.0
        for cut in cuts:  # compiled, a generator costs as much as what is added up
            total += _imputed(cut, log_mean, within)
        log_mean = (base + precision * total) / weight
    return log_mean


def _imputed(cut: float, mean: float, deviation: float) -> float:
    """Conditional mean of a normal above `cut`."""
    z = (cut - mean) / deviation
    if z > FAR_DEVIATIONS:  # the tail's ratio in its asymptotic form
        return cut + deviation / z
    if z < -FAR_DEVIATIONS:
        return mean
    return mean + deviation * DENSITY * math.exp(-0.5 * z * z) / (0.5 * ERFC(z * SQRT_HALF))


def _tokens(log_tokens: float, max_new_tokens: int) -> float:
    return max(1.0, min(float(max_new_tokens), math.exp(min(log_tokens, 50.0))))
