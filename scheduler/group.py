"""Rollouts whose results are used together (GRPO: the samples of one prompt).

Invariants
- A group finishes once: when `size` members were seen and all of them ended.
- It is forgotten when it has finished and every member was acknowledged.

What this module does not know: prompts and queues (a group's members may have different prompts and be queued apart).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutd.scheduler.entry import Entry


class Group:
    __slots__ = (
        "consumer_id",
        "entry",
        "failed",
        "finished",
        "group_id",
        "members",
        "notified",
        "size",
        "stated_size",
        "unacknowledged",
    )

    def __init__(self, group_id: str, size: int, consumer_id: str) -> None:
        self.group_id = group_id
        self.size = size
        self.stated_size = 0  # the size a submission gave; 0: none did
        self.consumer_id = consumer_id  # who opened it; once it has finished, who is told
        self.members: list[str] = []  # rollout ids in order of submission
        self.entry: Entry | None = None  # that its last member joined when it came
        self.finished = 0
        self.failed: list[str] = []
        self.unacknowledged = 0
        self.notified = False

    def add(self, rollout_id: str) -> None:
        self.members.append(rollout_id)
        self.unacknowledged += 1

    def note_finished(self, rollout_id: str, completed: bool) -> bool:
        """A member ended; true when this was the last one of the whole group."""
        self.finished += 1
        if not completed:
            self.failed.append(rollout_id)
        if self.notified or len(self.members) < self.size or self.finished < len(self.members):
            return False
        self.notified = True
        return True
