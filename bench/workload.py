"""What a workload is: a list of rollouts with prompts, hidden output lengths and arrival times.

Invariants
- Items are in arrival order, ids are unique, and the members of a group carry one prompt (the same bytes object).
- `output_tokens` is the truth that a simulated engine needs; a scheduler is told `max_new_tokens` and nothing more.
- Every prompt token is at or above `FIRST_TOKEN_ID` and below the vocabulary size, and every rollout fits the context.
- Random streams are named: drawing more of one traffic never moves the draws of another.

What this module does not know: engines, time, who submits the items and how.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Ids 0 to 2 are padding, start and end in the common tokenisers; a prompt of random ids stays clear of them.
FIRST_TOKEN_ID = 3
TOKEN_BYTES = 4

TokenIds = npt.NDArray[np.uint32]


class WorkClass(enum.Enum):
    """How urgently the trainer needs it."""

    CRITICAL = "critical"
    REUSABLE = "reusable"
    BACKGROUND = "background"


class TaskType(enum.Enum):
    """What the engine is asked for."""

    GENERATION = "generation"
    REWARD = "reward"
    STATE_QUERY = "state_query"
    REPLAY = "replay"


class Kind(enum.Enum):
    """The rows of a report: the class, except that reward queries, whatever their class, are a row of their own."""

    CRITICAL = "critical"
    REUSABLE = "reusable"
    BACKGROUND = "background"
    REWARD = "reward"


@dataclass(frozen=True, slots=True)
class Item:
    """One rollout of a workload.

    prompt_bytes: token ids, uint32 little-endian. group_id, session_id: empty for none; `turn` counts from 0.
    sample: position in the group. output_tokens: hidden from the scheduler, at most `max_new_tokens`.
    sampling_seed: below 2^31. arrival_seconds: after the start of the workload.
    needed_by_step: the training step that waits for it, None when none does. group_keep: members of its group that the trainer
    takes, the first to complete; 0: all.
    """

    rollout_id: str
    work_class: WorkClass
    task_type: TaskType
    prompt_bytes: bytes
    output_tokens: int
    max_new_tokens: int
    sampling_seed: int
    stratum: str
    group_id: str = ""
    sample: int = 0
    arrival_seconds: float = 0.0
    session_id: str = ""
    turn: int = 0
    needed_by_step: int | None = None
    group_keep: int = 0

    @property
    def kind(self) -> Kind:
        """The row of the report it belongs to."""
        return Kind.REWARD if self.task_type is TaskType.REWARD else Kind(self.work_class.value)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_bytes) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session. new_bytes: what it adds to the context (turn 0: the whole prompt), ids uint32 little-endian.

    gap_seconds: from the end of the turn before it to its arrival, while a tool runs. output_tokens: hidden, as an item's.
    """

    new_bytes: bytes
    output_tokens: int
    sampling_seed: int
    gap_seconds: float


@dataclass(frozen=True, slots=True)
class Session:
    """A multi-turn trajectory in a closed loop: each turn's prompt is all before it and its own new tokens."""

    session_id: str
    work_class: WorkClass
    task_type: TaskType
    stratum: str
    max_new_tokens: int
    turns: tuple[Turn, ...]
    arrival_seconds: float = 0.0
    needed_by_step: int | None = None

    @property
    def kind(self) -> Kind:
        """The row of the report its turns belong to."""
        return Kind(self.work_class.value)

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each turn."""
        lengths, context = [], 0
        for turn in self.turns:
            context += len(turn.new_bytes) // TOKEN_BYTES
            lengths.append((context, turn.output_tokens))
            context += turn.output_tokens
        return lengths


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engines take. Workloads are clipped to it as they are drawn.

    context_tokens: prompt + output of one rollout. max_output_tokens: a further cap on outputs, None for the workload's
        own.
    """

    vocabulary_size: int
    context_tokens: int = 32_768
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.vocabulary_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocabulary_size is {self.vocabulary_size}; prompts need ids from {FIRST_TOKEN_ID} up")
        if self.context_tokens < 2:
            raise ValueError(f"context_tokens is {self.context_tokens}; one prompt and one output token need 2")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValueError(
                f"max_output_tokens is {self.max_output_tokens}; it must be at least 1, or None for no cap"
            )


@dataclass(frozen=True, slots=True)
class Workload:
    """Items in arrival order, and sessions whose turns become items as they go."""

    name: str
    items: tuple[Item, ...]
    sessions: tuple[Session, ...] = ()

    @classmethod
    def of(cls, name: str, items: Iterable[Item], sessions: Iterable[Session] = ()) -> Workload:
        """Sort by arrival (stable) and refuse an id that occurs twice."""
        ordered = tuple(sorted(items, key=lambda item: item.arrival_seconds))
        in_order = tuple(sorted(sessions, key=lambda session: session.arrival_seconds))
        seen: set[str] = set()
        for name_of, ids in (
            ("rollout_id", [item.rollout_id for item in ordered]),
            ("session_id", [session.session_id for session in in_order]),
        ):
            for one in ids:
                if one in seen:
                    raise ValueError(f"{name_of} {one!r} occurs twice in workload {name!r}")
                seen.add(one)
        return cls(name, ordered, in_order)

    @property
    def rollouts(self) -> int:
        """Rollouts in it, turns included."""
        return len(self.items) + sum(len(session.turns) for session in self.sessions)

    def of_kind(self, kind: Kind) -> tuple[Item, ...]:
        """The items of one kind, in arrival order."""
        return tuple(item for item in self.items if item.kind is kind)


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream of that name: independent of every other name, the same in every process."""
    words = [zlib.crc32(str(name).encode()) for name in names]
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=words))


def random_tokens(rng: np.random.Generator, count: int, limits: Limits) -> TokenIds:
    """`count` uniform ids. Two draws share a page of 16 by chance with less than 1e-48 for a vocabulary of 1,000."""
    return rng.integers(FIRST_TOKEN_ID, limits.vocabulary_size, size=count, dtype=np.uint32)


def token_bytes(tokens: TokenIds) -> bytes:
    """Ids as uint32 little-endian bytes, on any machine."""
    return tokens.astype("<u4", copy=False).tobytes()
