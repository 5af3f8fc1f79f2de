"""The trainer of a demonstration: a GRPO loop that knows the service only through its client.

One step: report SYNCING and hand over the critical groups while the weights move, so that the service knows the whole
step before any of it starts; report WAITING, open the budget, submit reusable and background groups, send reward queries
as they fall due, wait for what the step needs; then report TRAINING, shrink the budget, train, and go on.

Invariants
- Reward queries are an open loop: each counts as submitted when it was due, however late it really left.
- Reusable and background rollouts wait for nobody and nobody waits for them; what is unfinished at the end of a step
  goes on in the next. At the end of the last step everything but background is waited for; background gets
  `DRAIN_SECONDS` more, and what is then left is cancelled, and waited for as well.
- Every result is acknowledged once, with what became of it.

What this module does not know: engines, processes, screens.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, Unpack

from rolloutd.bench.bounds import bound
from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.demo_fleet import Fleet
from rolloutd.bench.demo_ledger import Ledger, Tracked
from rolloutd.bench.metrics import StepRecord
from rolloutd.bench.w1 import demo_step
from rolloutd.bench.workload import Item, Kind, TaskType
from rolloutd.client import Prompt, Quota, RolloutOptions, RolloutResult
from rolloutd.client.words import TaskType as TaskWord
from rolloutd.client.words import TrainerState

DRAIN_SECONDS = 30.0  # simulated
# A budget outlives the longest step by far; it is set again at every change of phase.
LEASE_SECONDS = 1_800.0  # simulated
# What inference keeps while the trainer computes: three quarters of the places.
TRAINING_SHARE = 0.75
# Real seconds. Something is broken where one step takes this long.
PATIENCE_SECONDS = 300.0
_NO_SPREAD = "no_spread"


class Handle(Protocol):
    """A submission."""

    async def accepted(self) -> Any: ...


class RolloutClient(Protocol):
    """What the loop needs of `rolloutd.client.Client`."""

    async def submit(self, prompt: Prompt, **options: Unpack[RolloutOptions]) -> Handle: ...

    def results(self) -> AsyncIterator[RolloutResult]: ...

    def acknowledge(
        self, result: RolloutResult, *, used: bool | None = None, drop_reason: str = "", reward: float | None = None
    ) -> None: ...

    async def cancel(self, *rollout_ids: str) -> Any: ...

    async def report_step(
        self,
        step: int,
        *,
        trainer_state: TrainerState | None = None,
        samples_needed: int | None = None,
        step_seconds: float | None = None,
    ) -> Any: ...

    async def set_budget(
        self,
        *,
        max_running_rollouts: int | None = None,
        tasks: Mapping[TaskWord, Quota] | None = None,
        lease_seconds: float = 0.0,
    ) -> Any: ...

    async def get_budget(self) -> Any: ...


class Stuck(Exception):
    """What a step needs did not come."""


@dataclass(slots=True)
class Status:
    """Where the loop is, for whoever shows it. step counts from 0."""

    step: int = 0
    doing: str = "starting"
    ceiling: int = 0


class Trainer:
    """Runs the loop once."""

    def __init__(self, client: RolloutClient, fleet: Fleet, clock: SimClock, ledger: Ledger, steps: int, seed: int):
        self.status = Status()
        self.steps: list[StepRecord] = []
        self.problems: list[str] = []
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._ledger = ledger
        self._count = steps
        self._seed = seed
        self._groups: defaultdict[str, list[RolloutResult]] = defaultdict(list)
        self._sizes: dict[str, int] = {}

    async def run(self) -> None:
        """The whole loop. Raises Stuck, and what the client raises."""
        reader = asyncio.create_task(self._read())
        loop = asyncio.create_task(self._loop())
        try:
            await asyncio.wait((reader, loop), return_when=asyncio.FIRST_COMPLETED)
            if not loop.done():
                await reader  # it never returns by itself: this raises why it ended
            await loop
        finally:
            for task in (loop, reader):
                task.cancel()
            await asyncio.gather(loop, reader, return_exceptions=True)

    async def _loop(self) -> None:
        for step in range(self._count):
            await self._step(step)
        await self._drain()

    async def _step(self, step: int) -> None:
        clock, ledger = self._clock, self._ledger
        self.status.step, self.status.doing = step, "waiting for critical rollouts"
        items = demo_step(self._seed, self._fleet.limits, step=step, shape=self._fleet.shape).items
        critical = [item for item in items if item.kind is Kind.CRITICAL]
        bound_seconds = bound(critical, self._fleet.modelled).seconds if self._fleet.modelled else None
        before = self.steps[-1].step_seconds if self.steps else None
        generations = [item for item in items if item.task_type is TaskType.GENERATION]
        started = clock.now()
        await self._client.report_step(step, trainer_state="syncing", samples_needed=len(critical))
        rewards = asyncio.create_task(
            self._send_rewards([item for item in items if item.kind is Kind.REWARD], step, started)
        )
        try:
            handed_over = await self._submit_groups(critical, step)
            await asyncio.gather(*(submission.accepted() for submission in handed_over))
            await self._client.report_step(
                step, trainer_state="waiting", step_seconds=None if before is None else clock.real(before)
            )
            await self._set_budget(1.0)
            await self._submit_groups([item for item in generations if item.kind is not Kind.CRITICAL], step)
            await self._until(lambda: ledger.pending(Kind.CRITICAL, step=step) == 0, "critical rollouts")
            critical_done = clock.now()
            self.status.doing = "waiting for reward queries"
            await rewards
            await self._until(lambda: ledger.pending(Kind.REWARD, step=step) == 0, "reward queries")
        finally:
            rewards.cancel()
        training_started = clock.now()
        self.status.doing = "training"
        await self._train(step)
        self.steps.append(StepRecord(started, critical_done, training_started, clock.now(), bound_seconds))

    async def _train(self, step: int) -> None:
        """The simulated training phase, on a smaller budget that must hold by its end."""
        ends_at = self._clock.now() + self._fleet.training_seconds
        await self._client.report_step(step, trainer_state="training", samples_needed=0)
        shrink_seconds = await self._set_budget(TRAINING_SHARE)
        await asyncio.sleep(shrink_seconds)
        budget = await self._client.get_budget()
        if budget.running_rollouts > self.status.ceiling:
            self.problems.append(
                f"step {step}: {budget.running_rollouts} rollouts ran under a budget of {self.status.ceiling} "
                f"after the {shrink_seconds:g} s that the service had asked for"
            )
        await self._clock.sleep_until(ends_at)

    async def _drain(self) -> None:
        """No rollout of the last step is left behind."""
        ledger = self._ledger
        self.status.doing = "collecting what is left"
        await self._client.report_step(self._count - 1, trainer_state="paused")
        await self._set_budget(1.0)
        others = [kind for kind in Kind if kind is not Kind.BACKGROUND]
        await self._until(lambda: ledger.pending(*others) == 0, "rollouts")
        try:
            async with asyncio.timeout(self._clock.real(DRAIN_SECONDS)):
                await ledger.until(lambda: ledger.pending() == 0)
        except TimeoutError:
            left = ledger.unfinished()
            self.status.doing = f"cancelling {len(left)} background rollouts"
            for tracked in left:
                tracked.withdrawing = True
            await self._client.cancel(*(tracked.rollout_id for tracked in left))
            await self._until(lambda: ledger.pending() == 0, "cancelled rollouts")

    async def _submit_groups(self, items: Sequence[Item], step: int) -> list[Handle]:
        """One submission per prompt, the prompt travelling once."""
        now = self._clock.now()
        submissions = []
        for group_id, grouped in groupby(items, key=lambda item: item.group_id):
            members = list(grouped)
            self._sizes[group_id] = len(members)
            for item in members:
                name = f"{group_id}/{item.sample}" if len(members) > 1 else group_id
                self._ledger.expect(name, item, step, now)
            submissions.append(await self._submit(group_id, members))
            await asyncio.sleep(0)  # results and reward queries go on meanwhile
        return submissions

    async def _send_rewards(self, items: Sequence[Item], step: int, started: float) -> None:
        for item in items:
            due = started + item.arrival_seconds
            await self._clock.sleep_until(due)
            self._ledger.expect(item.rollout_id, item, step, due)
            await self._submit(item.rollout_id, [item])

    async def _submit(self, rollout_id: str, items: Sequence[Item]) -> Handle:
        first = items[0]
        options: RolloutOptions = {
            **self._fleet.options(items),
            "rollout_id": rollout_id,
            "samples": len(items),
            "rollout_class": first.work_class.value,
            "task_type": first.task_type.value,
            "stratum": first.stratum,
        }
        if first.needed_by_step is not None:
            options["needed_by_step"] = first.needed_by_step
        return await self._client.submit(first.prompt_bytes, **options)

    async def _read(self) -> None:
        async for result in self._client.results():
            tracked = self._ledger.end(result)
            if tracked is not None:
                self._acknowledge(tracked, result)

    def _acknowledge(self, tracked: Tracked, result: RolloutResult) -> None:
        """A reward query is no sample; a group is judged as a whole, once all of it is there; the rest was useful."""
        if not result.complete:
            self._client.acknowledge(result, used=False, drop_reason=result.outcome)
        elif tracked.item.kind is Kind.REWARD:
            self._client.acknowledge(result)
        elif tracked.item.kind is not Kind.CRITICAL:
            self._client.acknowledge(result, used=True)
        else:
            group = self._groups[tracked.item.group_id]
            group.append(result)
            if len(group) == self._sizes[tracked.item.group_id]:
                self._judge(self._groups.pop(tracked.item.group_id))

    def _judge(self, group: Sequence[RolloutResult]) -> None:
        """GRPO learns from the spread of rewards in a group; a group whose rewards are all the same is dropped."""
        rewards = [float(len(result.tokens) % 2) for result in group]
        spread = len(set(rewards)) > 1 or len(group) == 1
        for result, reward in zip(group, rewards, strict=True):
            self._client.acknowledge(result, used=spread, drop_reason="" if spread else _NO_SPREAD, reward=reward)

    async def _set_budget(self, share: float) -> float:
        """Real seconds until it holds."""
        self.status.ceiling = max(1, int(self._fleet.engines * self._fleet.slots * share))
        answer = await self._client.set_budget(
            max_running_rollouts=self.status.ceiling,
            tasks={"reward": {"floor_rollouts": 1}},
            lease_seconds=self._clock.real(LEASE_SECONDS),
        )
        return float(answer.shrink_seconds)

    async def _until(self, condition: Any, what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._ledger.until(condition)
        except TimeoutError:
            left = self._ledger.unfinished()
            raise Stuck(
                f"step {self.status.step}: waited {PATIENCE_SECONDS:g} s for {what}; {len(left)} rollouts have not ended, "
                f"the first of them {left[0].rollout_id if left else '-'}"
            ) from None
