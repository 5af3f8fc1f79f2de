"""A trainer that serves one workload through a door, in real time, and keeps the record of it.

What it does is what the trainer of the simulation does (`bench.simulated`), so both give the same kind of record: everything that
arrives together is handed over together, a turn follows when the turn before it is back and its tool has answered.

Invariants
- Times are simulated seconds since the start: real ones times the time scale. An open-loop query counts from when it was due.
- Every rollout comes back exactly once, as long as its hidden length says; anything else is a `Wrong`, not a figure.
- Bodies that are known beforehand are written before the clock starts.

What this module does not know: what is behind the door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.metrics import RolloutRecord
from rolloutd.bench.peers_doors import Answer, Door
from rolloutd.bench.sessions import SessionsUnderWay
from rolloutd.bench.simulated import EpochRecord
from rolloutd.bench.workload import TOKEN_BYTES, Item, Workload
from rolloutd.scheduler.states import Outcome

# Simulated. Nothing of these workloads takes half as long; where nothing came back for this long something is broken.
PATIENCE_SECONDS = 900.0


class Wrong(Exception):
    """What came back is not what was asked for, or did not come back."""


class Epoch:
    """One workload on its way. Use once: `await Epoch(...).run()`."""

    def __init__(
        self,
        door: Door,
        workload: Workload,
        step: int,
        time_scale: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """step: the training step that waits for it. on_progress: called with the rollouts that are back."""
        self.record = EpochRecord()
        self.problems: dict[str, str] = {}  # of rollouts that ended incomplete
        self._door = door
        self._workload = workload
        self._step = step
        self._time_scale = time_scale
        self._on_progress = on_progress
        self._left = workload.rollouts
        self._sessions = SessionsUnderWay(workload.sessions)
        self._out: dict[str, Item] = {}
        self._waits: set[asyncio.Task[None]] = set()
        self._clock: SimClock

    async def run(self) -> EpochRecord:
        """Serve it all. Raises Wrong, and what the door raises."""
        arrivals = self._arrivals()
        await self._door.begin(self._step, [item for items in arrivals.values() for item in items], self._left)
        self._clock = SimClock(self._time_scale)
        try:
            for seconds, items in arrivals.items():
                self._later(seconds, items)
            while self._left:
                self._take(await self._next())
        finally:
            for wait in self._waits:
                wait.cancel()
            await asyncio.gather(*self._waits, return_exceptions=True)
        self.record.seconds = max(
            (one.delivered_seconds for one in self.record.records.values() if one.delivered_seconds is not None),
            default=self._clock.now(),
        )
        await self._door.end(self._step)
        return self.record

    def _arrivals(self) -> dict[float, list[Item]]:
        by_time: dict[float, list[Item]] = {}
        for item in self._workload.items:
            by_time.setdefault(item.arrival_seconds, []).append(item)
        for session in self._workload.sessions:
            by_time.setdefault(session.arrival_seconds, []).append(self._sessions.first(session))
        return by_time

    def _later(self, seconds: float, items: Sequence[Item]) -> None:
        wait = asyncio.create_task(self._submit(seconds, items))
        self._waits.add(wait)
        wait.add_done_callback(self._submitted)

    def _submitted(self, wait: asyncio.Task[None]) -> None:
        self._waits.discard(wait)
        if not wait.cancelled() and (error := wait.exception()) is not None:
            self._door.answers.put_nowait(error)

    async def _submit(self, seconds: float, items: Sequence[Item]) -> None:
        await self._clock.sleep_until(seconds)
        for item in items:
            self.record.records[item.rollout_id] = RolloutRecord(item.kind, seconds)
            self._out[item.rollout_id] = item
        await self._door.submit(items)

    async def _next(self) -> Answer:
        try:
            async with asyncio.timeout(self._clock.real(PATIENCE_SECONDS)):
                answer = await self._door.answers.get()
        except TimeoutError:
            names = sorted(self._out)[:3]
            raise Wrong(
                f"nothing came back for {PATIENCE_SECONDS:g} simulated s; {len(self._out)} rollouts are out: {names}"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _take(self, answer: Answer) -> None:
        item = self._out.pop(answer.rollout_id, None)
        if item is None:
            known = answer.rollout_id in self.record.records
            raise Wrong(f"{answer.rollout_id} {'came back twice' if known else 'was never submitted'}")
        self.record.dispatches += answer.attempts
        self._left -= 1
        if answer.problem:
            self.problems[answer.rollout_id] = answer.problem
            self.record.failed[answer.rollout_id] = Outcome.ENGINE_FAILED
        else:
            self._keep(item, answer)
        if item.session_id:
            self._turn_over(item, answer)
        if self._on_progress is not None:
            self._on_progress(self._workload.rollouts - self._left)

    def _keep(self, item: Item, answer: Answer) -> None:
        tokens = len(answer.output) // TOKEN_BYTES
        if tokens != item.output_tokens or answer.prompt_tokens != item.prompt_tokens:
            raise Wrong(
                f"{item.rollout_id} came back with {tokens} tokens for a prompt of {answer.prompt_tokens}; it has "
                f"{item.output_tokens} for {item.prompt_tokens}: was a field of the request lost on the way?"
            )
        record = self.record.records[item.rollout_id]
        record.deliveries = 1
        record.delivered_seconds = self._clock.now()
        record.prompt_tokens = answer.prompt_tokens
        record.cached_tokens = answer.cached_tokens

    def _turn_over(self, item: Item, answer: Answer) -> None:
        now = self._clock.now()
        following = None
        if answer.problem:
            self._left -= self._sessions.give_up(item.session_id, item.turn)
        else:
            following = self._sessions.after(item.session_id, item.turn, answer.output, now)
        if following is None:
            self.record.session_ends[item.session_id] = now
        else:
            self._later(following.arrival_seconds, [following])
