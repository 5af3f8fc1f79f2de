"""What the simulated model writes for one rollout, when several weights write parts of it.

What this module does not know: attempts, engines, how the parts came about.
"""

from __future__ import annotations

from collections.abc import Iterable

from rolloutd.engines.sim.tokens import Model, Sampling, TokenWriter
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.states import TaskType


class Writing:
    """Writes span after span; each must be as long as was asked for, unless the output ends there."""

    def __init__(self, model: Model, rollout: Rollout) -> None:
        spec = rollout.spec
        words = spec.sampling
        self._prompt = spec.token_bytes
        sampling = Sampling(
            max_new_tokens=0 if spec.task_type is TaskType.REPLAY else rollout.max_new_tokens,
            min_new_tokens=words.get("min_new_tokens", 0),
            sampling_seed=spec.seeds[rollout.sample_index] if spec.seeds else None,
            end_at_tokens=words.get("custom_params", {}).get("end_at_tokens"),
            stop_token_ids=frozenset(words.get("stop_token_ids", ())),
        )
        self._writer = TokenWriter(model, spec.token_bytes, sampling, "")

    def write(self, spans: Iterable[tuple[str, int]]) -> None:
        """spans: (weights, index after its last token), in order."""
        for weights, end in spans:
            self._writer.switch_weights(weights, len(self._writer.tokens), self._prompt)
            self._writer.write_until(end)

    @property
    def tokens(self) -> list[int]:
        return self._writer.tokens

    @property
    def logprobs(self) -> list[float]:
        return self._writer.logprobs

    @property
    def finish_reason(self) -> str | None:
        """None where it goes on."""
        finish = self._writer.finish
        return None if finish is None else finish.kind
