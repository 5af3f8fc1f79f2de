"""What stands in the queue: rollouts of one run, class and task that share one prompt.

Invariants
- Members are QUEUED, share `token_bytes` exactly and leave in order of arrival.
- A rollout with kept partial tokens has a prompt of its own (prompt + partial) and so an entry of its own.
- An entry is in a lane (may be dispatched), held (waits for a leader's first token or for a prefix), or dead (empty).
- `sequence` changes with every insertion into the lanes, so stale heap items are recognised.

What this module does not know: how entries are ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from mypy_extensions import mypyc_attr

from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import SHORT_TASKS, Gate, RolloutClass, TaskType
from rolloutd.scheduler.versions import ANYTHING, Requirement

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.lanes import Backlog, Lane, LaneKey
    from rolloutd.scheduler.rollout import Rollout
    from rolloutd.scheduler.run import Run
    from rolloutd.scheduler.timers import Timer


CHARACTERS_PER_TOKEN: Final = 3  # a cautious guess for text the engine will tokenise; only for booking


class EntryKey(NamedTuple):
    """Rollouts with equal keys may share an entry."""

    pool: str
    rollout_class: RolloutClass
    task_type: TaskType
    prompt_hash: str
    group_id: str  # "" and `alone` set for a rollout without a group
    alone: str
    labels: tuple[tuple[str, str], ...]
    requirement: Requirement = ANYTHING
    sample: bool = True  # to train on, which a bound on staleness and a target mix are about


@mypyc_attr(acyclic=True)
class Entry:
    __slots__ = (
        "affine",
        "apart_since",
        "arrival",
        "backlog",
        "blocked_since",
        "continuation",
        "deadline_at",
        "evaluation",
        "expected_tokens",
        "fixed",
        "held_at",
        "held_gate",
        "hits_at",
        "hits_mark",
        "hold_timer",
        "keeps_room",
        "key",
        "keyed_tokens",
        "labels",
        "lane",
        "lane_key",
        "leader_id",
        "looked_at",
        "members",
        "most",
        "particular",
        "pool",
        "prompt_hash",
        "prompt_tokens",
        "queued_at",
        "resumed",
        "rollout_class",
        "run",
        "sample",
        "segments",
        "sequence",
        "servers",
        "servers_mark",
        "short",
        "size_bytes",
        "static_key",
        "stems",
        "stratum",
        "task_type",
        "text",
        "token_bytes",
        "worst_tokens",
    )

    def __init__(
        self,
        run: Run,
        key: EntryKey,
        token_bytes: bytes,
        text: str | None,
        stratum: str,
        labels: Mapping[str, str],
        now: float,
    ) -> None:
        # First what a look at many entries reads: compiled, fields lie in this order, and most entries are in no cache.
        self.sequence = 0
        self.looked_at = 0  # in which look of its backlog it was found last
        self.hits_at = -1.0
        self.hits_mark = -1  # `queueing.hits_mark`, when they were looked up
        self.segments: list[tuple[int, int]] = []  # who has its prompt cached, as `PrefixIndex.segments` says it
        self.queued_at = now
        self.deadline_at: float | None = None
        self.expected_tokens = 1.0
        self.worst_tokens = 1.0  # the first member may still write
        self.stratum = stratum
        self.most = self.fixed = (
            0.0  # of `choosing`, during one look: the best score it could have, and what no engine changes
        )
        self.members: deque[Rollout] = deque()
        self.held_gate = Gate.OPEN
        self.static_key = 0.0
        self.task_type = key.task_type
        self.rollout_class = key.rollout_class
        self.run = run
        self.key = key
        self.pool = key.pool
        self.short = key.task_type in SHORT_TASKS
        self.prompt_hash = key.prompt_hash
        self.token_bytes = token_bytes
        self.text = text
        self.prompt_tokens = len(token_bytes) // TOKEN_BYTES
        if text is not None:
            self.prompt_tokens = max(1, len(text) // CHARACTERS_PER_TOKEN)
        self.size_bytes = len(token_bytes) + (len(text.encode()) if text is not None else 0)  # of one member's prompt
        self.labels = labels
        self.evaluation = False  # its data are for evaluation; set before it joins a backlog
        self.sample = True  # to train on: a target mix is about it; set before it joins
        self.continuation = False  # a later turn or a resumed rollout: its context is resident somewhere
        self.resumed = False  # of these, one that was interrupted; set before it joins
        self.keyed_tokens = 1.0  # worst_tokens when the entry was last ordered
        self.backlog: Backlog | None = None
        self.arrival = 0  # order of arrival: breaks ties of equal keys
        self.lane: Lane | None = None  # that holds it
        self.lane_key: LaneKey | None = None  # of the lane that it was in last
        self.affine: tuple[str, ...] = ()  # engines whose affinity heap holds this entry
        self.leader_id: str | None = None  # attempt whose first token this entry waits for
        self.held_at = 0.0
        self.hold_timer: Timer | None = None
        self.keeps_room = False  # an engine is reserved for it, see `gates.note_blocked`
        self.particular = False  # not every policy version may run it; set before it joins a backlog
        self.stems: tuple[int, ...] | None = None
        self.blocked_since: float | None = None
        self.apart_since: float | None = None  # it first waited for an engine with its prompt, `grouping.within`
        self.servers: tuple[Engine, ...] = ()  # engines that could run the first member, see `gates.servers`
        self.servers_mark = (-1, -1)

    @property
    def held(self) -> bool:
        return self.held_gate is not Gate.OPEN

    def claim_tokens(self, page_tokens: int, headroom_tokens: int) -> int:
        """KV tokens to book for the first member: prompt and expected output, in whole pages, never more than it can use."""
        most = self.members[0].remaining_tokens
        output = min(most, max(int(self.expected_tokens), headroom_tokens))
        return -(-(self.prompt_tokens + output) // page_tokens) * page_tokens
