"""What this client has submitted and is still owed, and where each result goes.

Life of an entry: waiting to be sent -> sent -> accepted -> each of its rollouts ends once -> forgotten. A refusal that says
"later" puts it back to waiting; any other refusal ends all its rollouts at once.

Invariants: every rollout of an entry is delivered to its sink exactly once, whatever the server repeats; entries keep their
message until the last rollout ended, because a server that lost its memory must be told again; ids of finished rollouts are
remembered within a bound. What this does not know: streams, acknowledgements.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rolloutd import v1
from rolloutd.client.errors import Problem
from rolloutd.client.results import Acceptance, Progress, RolloutResult
from rolloutd.client.submissions import member_ids

REMEMBERED_ROLLOUTS = 16_384  # finished ids kept to recognise a repeated event

Arrival = Literal["owed", "repeated", "foreign"]


class Sink(Protocol):
    """Where the results of an entry go."""

    def expect(self, rollouts: int) -> None:
        """An entry of so many rollouts was taken."""

    def deliver(self, result: RolloutResult) -> None:
        """One result of the entry. Called once for each of its rollouts."""

    def refuse(self, problem: Problem, remaining: Iterable[RolloutResult]) -> None:
        """The server refused the submission; `remaining` are results that say so, for the rollouts not delivered yet."""

    def fail(self, error: Exception) -> None:
        """No further result will come."""


@dataclass(slots=True, eq=False)
class Entry:
    """One submission that has not ended."""

    message: v1.RolloutSubmission
    sink: Sink
    submitted_at: float  # loop time
    on_progress: Callable[[Progress], None] | None = None
    state: Literal["waiting", "sent", "accepted", "ended"] = "waiting"
    cancelled: bool = False
    acceptance: Acceptance | None = None
    on_accepted: Callable[[Acceptance], None] | None = None
    problem: Problem | None = None  # why it was refused
    settled: asyncio.Event | None = None  # made by whoever waits for acceptance or refusal
    retry: asyncio.TimerHandle | None = None  # a refusal said "later"
    size_bytes: int = field(init=False)
    rollout_ids: tuple[str, ...] = field(init=False)
    remaining: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = self.message.ByteSize()
        self.rollout_ids = member_ids(self.message)
        self.remaining = set(self.rollout_ids)

    @property
    def rollout_id(self) -> str:
        """Id of the submission."""
        return self.message.rollout_id

    @property
    def give_up_at(self) -> float:
        """Loop time after which "later" is no answer any more: its deadline or queue TTL passed, or it was to fail fast."""
        if self.message.fail_fast:
            return self.submitted_at
        limits = [seconds for seconds in (self.message.deadline_seconds, self.message.queue_ttl_seconds) if seconds > 0]
        return self.submitted_at + min(limits, default=math.inf)

    def accepted(self, acceptance: Acceptance) -> None:
        """The server's answer is yes. No effect the second time."""
        if self.acceptance is None:
            self.acceptance = acceptance
            if self.on_accepted is not None:
                self.on_accepted(acceptance)
        self.settle()

    def settle(self) -> None:
        """Wakes whoever waits for acceptance, refusal or failure."""
        if self.settled is not None:
            self.settled.set()

    def refused_results(self, run_id: str, problem: Problem) -> list[RolloutResult]:
        """What the caller gets for the rollouts that never came to be."""
        group_id = self.message.group_id or (self.rollout_id if len(self.rollout_ids) > 1 else "")
        outcome: Literal["cancelled", "refused"] = "cancelled" if problem.code == "CANCELLED" else "refused"
        return [
            RolloutResult(rollout_id, run_id, outcome, problem=problem, group_id=group_id, sample_index=index)
            for index, rollout_id in enumerate(self.rollout_ids)
            if rollout_id in self.remaining
        ]


class Ledger:
    """All entries that have not ended."""

    def __init__(self) -> None:
        self._submissions: dict[str, Entry] = {}
        self._rollouts: dict[str, Entry] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self.unaccepted = 0
        self.unaccepted_bytes = 0

    def __len__(self) -> int:
        return len(self._submissions)

    @property
    def rollouts(self) -> int:
        """Rollouts of entries that have not ended."""
        return len(self._rollouts)

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        return list(self._submissions.values())

    def get(self, any_id: str) -> Entry | None:
        """The entry of a submission or of one of its rollouts."""
        return self._submissions.get(any_id) or self._rollouts.get(any_id)

    def add(self, entry: Entry) -> None:
        """ValueError when its id is in flight already."""
        if entry.rollout_id in self._submissions or not self._rollouts.keys().isdisjoint(entry.rollout_ids):
            raise ValueError(f"rollout_id {entry.rollout_id!r} is in flight already in this client; ids are used once")
        entry.sink.expect(len(entry.rollout_ids))
        self._submissions[entry.rollout_id] = entry
        self._rollouts.update(dict.fromkeys(entry.rollout_ids, entry))
        self.unaccepted += 1
        self.unaccepted_bytes += entry.size_bytes

    def accept(self, entry: Entry) -> None:
        """The server has it. No effect the second time."""
        if entry.state in ("waiting", "sent"):
            entry.state = "accepted"
            self.unaccepted -= 1
            self.unaccepted_bytes -= entry.size_bytes

    def unaccept(self, entry: Entry) -> None:
        """The server may not have it any more, or not yet."""
        if entry.state == "accepted":
            self.unaccepted += 1
            self.unaccepted_bytes += entry.size_bytes
        entry.state = "waiting"

    def arrive(self, rollout_id: str) -> tuple[Arrival, Entry | None]:
        """A rollout has ended: whether it is owed to an entry, was delivered before, or was submitted by somebody else."""
        entry = self._rollouts.get(rollout_id)
        if entry is None:
            return ("repeated" if rollout_id in self._finished else "foreign"), None
        if rollout_id not in entry.remaining:
            return "repeated", entry
        self.accept(entry)
        entry.remaining.discard(rollout_id)
        if not entry.remaining:
            self.end(entry)
        return "owed", entry

    def remember(self, rollout_id: str) -> None:
        """Recognise this rollout as delivered from now on."""
        self._finished[rollout_id] = None
        if len(self._finished) > REMEMBERED_ROLLOUTS:
            self._finished.popitem(last=False)

    def end(self, entry: Entry) -> None:
        """Forgets an entry. Rollouts of it that have not ended are foreign from now on."""
        self.accept(entry)
        entry.state = "ended"
        if entry.retry is not None:
            entry.retry.cancel()
        del self._submissions[entry.rollout_id]
        for rollout_id in entry.rollout_ids:
            del self._rollouts[rollout_id]
            if rollout_id not in entry.remaining:
                self.remember(rollout_id)
