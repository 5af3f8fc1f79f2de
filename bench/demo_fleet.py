"""The engines of a demonstration as it sees them, and the simulated ones.

Invariants
- What tells a simulated engine how long an output is goes through sampling's `custom_params`, which the service passes
  on unread: it knows `max_new_tokens` and nothing more.
- `check` leaves in every record how many of its tokens are not those that the engine generates for that prompt alone,
  missing ones and extra ones included; of a withdrawn rollout the tokens so far are checked.

What this module does not know: processes, time, who submits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from rolloutd.bench.bounds import EngineShape
from rolloutd.bench.demo_ledger import Tracked
from rolloutd.bench.demo_processes import Children
from rolloutd.bench.w1 import FULL_DEMO, DemoShape
from rolloutd.bench.workload import Item, Limits
from rolloutd.client import RolloutOptions
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Model, expected_output, verify

# Measured on 2 cores: at 4 the busiest process, the service, uses a fifth of a core; at 10 a third, and every tenth of a
# real second by which an event loop is late is a whole simulated one.
SIM_TIME_SCALE = 4.0
# Large, because each frame costs the engine and the service CPU that shortens the largest possible time scale.
SIM_STREAM_INTERVAL_TOKENS = 64
Say = Callable[[str], None]


class Fleet(Protocol):
    """Engines, and what is asked of them."""

    engines: int
    slots: int  # of each engine
    time_scale: float
    page_size_tokens: int
    ready_seconds: float  # longest start of one engine
    limits: Limits
    shape: DemoShape
    training_seconds: float

    @property
    def title(self) -> str:
        """What they are, for a person."""
        ...

    @property
    def modelled(self) -> Sequence[EngineShape]:
        """Their shapes where a timing model exists, else nothing."""
        ...

    async def prepare(self, children: Children, say: Say) -> None:
        """Whatever is needed before the first engine can start."""
        ...

    def command(self, port: int) -> list[str]:
        """How to start one engine."""
        ...

    def options(self, items: Sequence[Item]) -> RolloutOptions:
        """How to sample these members of one group (or one item alone)."""
        ...

    async def check(self, rollouts: Iterable[Tracked], urls: Sequence[str], say: Say) -> list[str]:
        """Set `wrong_tokens` of every record. Returns notes for the reader."""
        ...


@dataclass(slots=True)
class SimFleet:
    """Simulated engines: 32 slots, 200,000 KV tokens and a flat decode curve each, unless told otherwise."""

    engines: int = 4
    slots: int = 32
    kv_tokens: int = 200_000
    time_scale: float = SIM_TIME_SCALE
    page_size_tokens: int = 16
    ready_seconds: float = 30.0
    limits: Limits = field(default_factory=lambda: Limits(vocabulary_size=32_000, context_tokens=32_768))
    shape: DemoShape = FULL_DEMO
    training_seconds: float = 20.0

    @property
    def title(self) -> str:
        return f"{self.engines} simulated engines of {self.slots} slots"

    @property
    def modelled(self) -> Sequence[EngineShape]:
        return [EngineShape(TimingModel("flat"), self.slots, self.kv_tokens, self.page_size_tokens)] * self.engines

    async def prepare(self, children: Children, say: Say) -> None:
        """Nothing."""

    def command(self, port: int) -> list[str]:
        words: dict[str, object] = {
            "--port": port,
            "--slots": self.slots,
            "--kv-tokens": self.kv_tokens,
            "--page-size": self.page_size_tokens,
            "--context-length": self.limits.context_tokens,
            "--vocab-size": self.limits.vocabulary_size,
            "--curve": "flat",
            "--schedule-policy": "fcfs",
            "--stream-interval": SIM_STREAM_INTERVAL_TOKENS,
            "--time-scale": self.time_scale,
        }
        flags = [str(word) for pair in words.items() for word in pair]
        return [sys.executable, "-m", "rolloutd.engines.sim.server", *flags]

    def options(self, items: Sequence[Item]) -> RolloutOptions:
        ends = {str(item.sampling_seed): item.prompt_tokens + item.output_tokens for item in items}
        return {
            "max_new_tokens": items[0].max_new_tokens,
            "temperature": 1.0,
            "seeds": [item.sampling_seed for item in items],
            "custom_params": {"end_at_tokens": ends},
        }

    async def check(self, rollouts: Iterable[Tracked], urls: Sequence[str], say: Say) -> list[str]:
        model = Model(vocabulary_size=self.limits.vocabulary_size)
        checked = 0
        for rollout in rollouts:
            rollout.record.wrong_tokens = _wrong_tokens(rollout, model)
            checked += len(rollout.tokens)
        return [f"{checked:,} tokens compared one by one with the simulated model's function"]


def _wrong_tokens(rollout: Tracked, model: Model) -> int:
    item = rollout.item
    end_at_tokens = item.prompt_tokens + item.output_tokens
    missing = item.output_tokens - len(rollout.tokens) if rollout.complete else 0
    if len(rollout.tokens) == 0 and missing == 0:
        return 0
    logprobs = rollout.logprobs if len(rollout.logprobs) else None
    first_wrong = verify(
        item.prompt_bytes,
        rollout.tokens,
        logprobs,
        sampling_seed=item.sampling_seed,
        spans=rollout.spans,
        end_at_tokens=end_at_tokens,
        model=model,
    )
    if first_wrong is None and missing == 0:
        return 0
    expected = expected_output(
        item.prompt_bytes,
        item.max_new_tokens,
        sampling_seed=item.sampling_seed,
        end_at_tokens=end_at_tokens,
        model=model,
    ).tokens
    if not rollout.complete:
        expected = expected[: len(rollout.tokens)]
    wrong = sum(want != got for want, got in zip_longest(expected, rollout.tokens.tolist()))
    # Right tokens under a wrong log-prob or a wrong version label are wrong from there on.
    return wrong or len(rollout.tokens) - (first_wrong or 0)
