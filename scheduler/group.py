"""Rollouts whose results are used together (GRPO: the samples of one prompt).

Invariants
- A group finishes once: when `size` members were seen and all of them ended.
- It is forgotten when it has finished and every member was acknowledged.
- Of a group that keeps fewer than it is made of, never more than `keep` members end COMPLETED.

What this module does not know: prompts and queues (a group's members may have different prompts and be queued apart).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.states import Outcome

if TYPE_CHECKING:
    from rolloutd.scheduler.entry import Entry
    from rolloutd.scheduler.over_launch import Fate


@mypyc_attr(acyclic=True)
class Group:
    __slots__ = (
        "completed",
        "consumer_id",
        "entry",
        "failed",
        "fates",
        "finished",
        "group_id",
        "held",
        "keep",
        "members",
        "notified",
        "size",
        "stated_size",
        "surplus",
        "told",
        "unacknowledged",
    )

    def __init__(self, group_id: str, size: int, consumer_id: str, keep: int = 0) -> None:
        self.group_id = group_id
        self.size = size
        self.stated_size = 0  # the size a submission gave; 0: none did
        self.keep = keep  # complete members that are enough; 0: all of them are wanted
        self.consumer_id = consumer_id  # who opened it; once it has finished, who is told
        self.members: list[str] = []  # rollout ids in order of submission
        self.entry: Entry | None = None  # that its last member joined when it came
        self.finished = 0
        self.completed = 0
        self.failed: list[str] = []
        self.surplus: list[str] = []
        self.fates: list[Fate] = []  # of members that ended, where not all are kept
        self.unacknowledged = 0
        self.notified = False  # all have ended
        self.held = 0  # members whose results are kept back
        self.told = False  # its consumer has its end

    @property
    def has_enough(self) -> bool:
        """Whether what is still to end is not wanted any more."""
        return 0 < self.keep <= self.completed

    @property
    def spare(self) -> int:
        """Members that may still end without a complete result before one is missing."""
        if not self.keep:
            return 0
        return max(self.size, len(self.members)) - self.keep - len(self.failed) - len(self.surplus)

    @property
    def is_complete(self) -> bool:
        """Whether all that is wanted of it is there."""
        return self.completed >= self.keep if self.keep else not self.failed

    def add(self, rollout_id: str) -> None:
        self.members.append(rollout_id)
        self.unacknowledged += 1

    def note_finished(self, rollout_id: str, outcome: Outcome) -> bool:
        """A member ended; true when this was the last one of the whole group."""
        self.finished += 1
        if outcome is Outcome.COMPLETED:
            self.completed += 1
        elif outcome is Outcome.SURPLUS:
            self.surplus.append(rollout_id)
        else:
            self.failed.append(rollout_id)
        if self.notified or len(self.members) < self.size or self.finished < len(self.members):
            return False
        self.notified = True
        return True

    def note_stale(self, rollout_id: str) -> None:
        """A member that had completed became too old before anybody took it."""
        self.completed -= 1
        self.failed.append(rollout_id)
