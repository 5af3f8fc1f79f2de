"""Every rollout of a demonstration: submitted when, ended how, with which tokens.

Invariants
- A rollout is in the ledger before it is submitted, and once.
- Each end that comes back is counted; a second one shows as a delivery too many, whatever its outcome.
- Times are simulated seconds on the demonstration's clock.

What this module does not know: how rollouts are submitted, and whether their tokens are right (`demo_fleet`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.metrics import RolloutRecord
from rolloutd.bench.workload import Item, Kind
from rolloutd.client import RolloutResult

_CANCELLED = "cancelled"


@dataclass(slots=True)
class Tracked:
    """One rollout. tokens: n ids; logprobs: n or 0 values; spans: (engine's weight version, start, end) over tokens.

    outcome: empty until its first end came; the three arrays are those of that end.
    """

    item: Item
    rollout_id: str
    step: int
    record: RolloutRecord
    withdrawing: bool = False
    outcome: str = ""
    complete: bool = False
    problem: str = ""
    tokens: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    spans: tuple[tuple[str, int, int], ...] = ()

    @property
    def ended(self) -> bool:
        """Whether its end has come."""
        return bool(self.outcome)


class Ledger:
    """All of them, by id."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._rollouts: dict[str, Tracked] = {}
        self._pending: Counter[tuple[int, Kind]] = Counter()
        self._expected: Counter[tuple[int, Kind]] = Counter()
        self._changed = asyncio.Event()
        self.submitted: Counter[Kind] = Counter()
        self.delivered: Counter[Kind] = Counter()
        self.withdrawn: Counter[Kind] = Counter()
        self.strangers: list[str] = []  # ids that came back and that nobody submitted

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._rollouts.values())

    def __getitem__(self, rollout_id: str) -> Tracked:
        return self._rollouts[rollout_id]

    def expect(self, rollout_id: str, item: Item, step: int, submitted_seconds: float) -> Tracked:
        """About to be submitted. Raises ValueError for an id that is in the ledger."""
        if rollout_id in self._rollouts:
            raise ValueError(f"rollout {rollout_id!r} is submitted twice")
        tracked = Tracked(item, rollout_id, step, RolloutRecord(item.kind, submitted_seconds))
        self._rollouts[rollout_id] = tracked
        self._pending[step, item.kind] += 1
        self._expected[step, item.kind] += 1
        self.submitted[item.kind] += 1
        return tracked

    def end(self, result: RolloutResult) -> Tracked | None:
        """An end came back. Returns the rollout when it is its first, None for a repetition or a stranger."""
        now = self._clock.now()
        tracked = self._rollouts.get(result.rollout_id)
        if tracked is None:
            self.strangers.append(result.rollout_id)
            return None
        record = tracked.record
        if tracked.ended:
            # Both ends count, so that the repetition shows where repetitions are counted.
            record.deliveries = max(record.deliveries, 1) + 1
            return None
        tracked.outcome = result.outcome
        tracked.complete = result.complete
        tracked.problem = "" if result.problem is None else str(result.problem)
        tracked.tokens, tracked.logprobs = result.tokens, result.logprobs
        tracked.spans = tuple((span.engine_version, span.start, span.end) for span in result.spans)
        self._pending[tracked.step, record.kind] -= 1
        if result.attempts:
            record.started_seconds = max(record.submitted_seconds, now - self._served_seconds(result))
        if result.complete:
            record.deliveries = 1
            record.delivered_seconds = now
            record.prompt_tokens, record.cached_tokens = result.prompt_tokens, result.cached_tokens
            self.delivered[record.kind] += 1
        elif tracked.withdrawing and result.outcome == _CANCELLED:
            record.withdrawn = True
            self.withdrawn[record.kind] += 1
        self._changed.set()
        return tracked

    def pending(self, *kinds: Kind, step: int | None = None) -> int:
        """Rollouts of these kinds (all kinds when none is named) whose end has not come, of one step or of all."""
        wanted = kinds or tuple(Kind)
        return sum(
            count for (of_step, kind), count in self._pending.items() if kind in wanted and step in (None, of_step)
        )

    def of(self, kind: Kind, step: int) -> int:
        """Rollouts of this kind that were submitted in this step."""
        return self._expected[step, kind]

    def unfinished(self) -> list[Tracked]:
        """Rollouts whose end has not come, in order of submission."""
        return [tracked for tracked in self._rollouts.values() if not tracked.ended]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition`, which ends of rollouts make true, is."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _served_seconds(self, result: RolloutResult) -> float:
        """Simulated seconds from the first dispatch to the end, as the service measured them.

        What the service reports as waiting is over all attempts; of a rollout that was preempted, only the part up to
        the first token can belong to its first wait. Whatever lies between the trainer's submission and this span, the
        way there and back included, is counted as waiting.
        """
        times = result.times
        first_wait_seconds = times.queued_seconds
        if result.attempts > 1 and times.first_token_seconds > 0:
            first_wait_seconds = min(first_wait_seconds, times.first_token_seconds)
        return (times.total_seconds - first_wait_seconds) * self._clock.time_scale
