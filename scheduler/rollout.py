"""One rollout and one attempt of it.

Invariants
- A rollout has at most one live attempt; an attempt id is used once, ever.
- `pieces` are the slices that count: tokens of a restarted rollout are dropped, tokens of an interrupted one are kept.
- `move` is the only way to change `state`, and only along `states.MOVES`.

What this module does not know: queues, budgets, engines' room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.result import AttemptRecord, Piece, RolloutResult
from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutSpec
from rolloutd.scheduler.states import MOVES, AbortReason, OnPreempt, RolloutState, TaskType
from rolloutd.scheduler.versions import ANYTHING

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.entry import Entry
    from rolloutd.scheduler.group import Group
    from rolloutd.scheduler.permit import Permit
    from rolloutd.scheduler.promises import Promise
    from rolloutd.scheduler.run import Run
    from rolloutd.scheduler.share_clock import ShareClock
    from rolloutd.scheduler.timers import Timer

NOBODY: frozenset[str] = frozenset()
STORY_ENTRIES: Final = 48
HISTORY_ATTEMPTS: Final = 32
STATE_NAMES: Final = tuple(
    state.name for state in RolloutState
)  # by value; an enum's own look-up of its name costs ten times as much
STATEFUL_SAMPLING: Final = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "stop_regex",
)


class IllegalMove(Exception):
    """A state change that the table does not allow; carries the rollout's story."""


class Attempt:
    """One dispatch of a rollout to an engine."""

    __slots__ = (
        "abort_reason",
        "abort_sent",
        "aborted_at",
        "attempt_id",
        "batch_id",
        "cached_tokens",
        "charged_tokens",
        "dispatched_at",
        "engine",
        "first_token_at",
        "generated_tokens",
        "kv_version",
        "look_tokens",
        "number",
        "permit",
        "predicted_tokens",
        "progress_at",
        "promise",
        "rollout",
        "run",
        "slice_end_tokens",
        "slice_tokens",
        "stems",
        "token_bytes",
        "version",
    )

    def __init__(
        self,
        attempt_id: str,
        rollout: Rollout,
        engine: Engine,
        permit: Permit,
        promise: Promise,
        batch_id: int,
        now: float,
        token_bytes: bytes,
    ) -> None:
        # First what each report of progress reads: compiled, fields lie in this order.
        self.first_token_at: float | None = None
        self.progress_at = now
        self.generated_tokens = 0
        self.look_tokens = 0  # nothing but sums depends on how much it has written before it has written so many
        self.run = rollout.run
        self.engine = engine
        self.promise = promise
        self.attempt_id = attempt_id
        self.rollout = rollout
        self.permit = permit
        self.batch_id = batch_id
        self.number = rollout.attempts
        self.dispatched_at = now
        self.cached_tokens = 0
        self.predicted_tokens = 0
        self.charged_tokens = 0.0  # against its run's share of the pool
        self.abort_reason: AbortReason | None = None
        self.aborted_at = 0.0
        self.abort_sent = False  # else its engine stops it without being asked for this one
        self.stems: tuple[int, ...] = ()  # prefixes this attempt is computing, see computing.py
        self.token_bytes = token_bytes  # what was sent: prompt and kept partial
        self.version = engine.version  # that the engine held when it was dispatched
        self.kv_version: int | None = engine.version  # whose KV the engine keeps of it; None: mixed, of use to nobody
        self.slice_end_tokens = 0  # its time slice is over when it has written so many, see `time_slice`
        self.slice_tokens = 0  # it ends after so many tokens although more are wanted; 0: it does not

    def expected_left_tokens(self) -> float:
        """What its rollout is expected to write still; negative for one that is longer than was expected."""
        rollout = self.rollout
        written = rollout.kept_tokens + self.generated_tokens
        whole = self.run.lengths.expected(rollout.prompt_hash, rollout.kind, rollout.max_new_tokens, written)
        return whole - written


class Rollout:
    __slots__ = (
        "attempt",
        "attempts",
        "clipped",
        "consumer_id",
        "deadline_at",
        "destination",
        "entry",
        "excluded",
        "faults",
        "first_token_at",
        "group",
        "history",
        "in_window",
        "kind",
        "last_batch_id",
        "max_new_tokens",
        "needed_by_step",
        "outgrown",
        "pieces",
        "pieces_by",
        "predicted_cached_tokens",
        "preemptions",
        "prompt_hash",
        "queued_at",
        "queued_seconds",
        "requirement",
        "result",
        "rollout_class",
        "rollout_id",
        "run",
        "running_seconds",
        "sample_index",
        "siblings",
        "spec",
        "state",
        "story",
        "submitted_at",
        "task_type",
        "timer",
        "ttl_at",
        "turn",
        "yielded",
    )

    def __init__(
        self,
        run: Run,
        rollout_id: str,
        spec: RolloutSpec,
        sample_index: int,
        consumer_id: str,
        max_new_tokens: int,
        prompt_hash: str,
        now: float,
    ) -> None:
        self.run = run
        self.rollout_id = rollout_id
        self.spec = spec
        self.task_type = spec.task_type
        # What it is alike with in length.
        self.kind: tuple[TaskType, str] = (spec.task_type, run.mix.name(spec.stratum))
        self.sample_index = sample_index
        self.consumer_id = consumer_id
        self.rollout_class = spec.rollout_class if spec.rollout_class is not None else run.settings.default_class
        self.max_new_tokens = max_new_tokens
        self.prompt_hash = prompt_hash
        self.last_batch_id = 0
        self.predicted_cached_tokens = 0  # what the index believed at the first dispatch
        self.clipped = max_new_tokens < spec.max_new_tokens
        self.needed_by_step = spec.needed_by_step
        self.submitted_at = now
        self.queued_at = now
        self.queued_seconds = 0.0
        self.running_seconds = 0.0
        self.first_token_at: float | None = None
        self.deadline_at = now + spec.deadline_seconds if spec.deadline_seconds else None
        self.ttl_at = 0.0
        self.state = RolloutState.QUEUED
        self.destination: Engine | None = None  # where it was asked to go on, until it is sent somewhere
        self.entry: Entry | None = None
        self.siblings: Entry | None = None  # the entry it was dispatched from: who shares its prompt and still waits
        self.group: Group | None = None
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.faults = 0
        self.preemptions = 0
        self.outgrown = (
            0  # how often it left because claims had outgrown a KV ceiling: it claims twice as much each time
        )
        self.yielded = 0  # of these, how often it was for other work
        self.excluded: frozenset[str] = NOBODY  # engines that failed this rollout
        self.pieces: list[Piece] = []
        self.pieces_by: list[tuple[str, int]] = []  # (engine id, attempt number) of each piece
        self.history: list[AttemptRecord] = []  # the last `HISTORY_ATTEMPTS`
        self.requirement = ANYTHING  # versions that it accepts
        self.turn: ShareClock | None = None  # the order of a target mix in which its stratum had a turn for its attempt
        self.in_window = True  # not consumed yet, as far as a bound on samples counts it
        self.result: RolloutResult | None = None
        self.timer: Timer | None = None
        self.story: list[tuple[float, str]] = []  # the last `STORY_ENTRIES`

    @property
    def on_preempt(self) -> OnPreempt:
        return self.spec.on_preempt if self.spec.on_preempt is not None else self.run.settings.on_preempt

    @property
    def resumable(self) -> bool:
        """Whether going on from prompt + partial gives what an uninterrupted attempt would have given.

        Not so where the engine keeps state over the output alone: grammars, penalties, stop strings across the cut.
        """
        return not any(self.spec.sampling.get(name) for name in STATEFUL_SAMPLING)

    @property
    def kept_tokens(self) -> int:
        """Generated tokens of earlier attempts that a new attempt continues from."""
        kept_bytes = 0
        for piece in self.pieces:  # compiled, a generator costs more than the sum, and each report asks for it
            kept_bytes += len(piece.token_bytes)
        return kept_bytes // TOKEN_BYTES

    @property
    def oldest_version(self) -> int | None:
        """Policy version of its first token; None without tokens."""
        for piece in self.pieces:
            if piece.versions:
                return min(piece.versions)
        return None

    @property
    def newest_version(self) -> int | None:
        """Policy version of its last token; None without tokens."""
        for piece in reversed(self.pieces):
            if piece.versions:
                return max(piece.versions)
        return None

    @property
    def remaining_tokens(self) -> int:
        return self.max_new_tokens - self.kept_tokens if self.pieces else self.max_new_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it has all that was asked for: every token it may write; for a REPLAY, the prompt's log-probs."""
        if self.task_type is TaskType.REPLAY:
            return any(piece.prompt_logprob_bytes for piece in self.pieces)
        return self.remaining_tokens <= 0

    def move(self, state: RolloutState, now: float, why: str) -> None:
        """Change state; raises IllegalMove where the table has no such move."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"{self.rollout_id}: {self.state.name} -> {state.name} ({why}); story: {self.tell()}")
        self.note(now, f"{STATE_NAMES[self.state]} -> {STATE_NAMES[state]}: {why}")
        self.state = state

    def note(self, now: float, text: str) -> None:
        """Put something into its story. (A list: a deque is ten times as large, for each of all that wait.)"""
        story = self.story
        story.append((now, text))
        if len(story) > STORY_ENTRIES:
            del story[0]

    def note_attempt(self, record: AttemptRecord) -> None:
        """One of its attempts is over."""
        history = self.history
        history.append(record)
        if len(history) > HISTORY_ATTEMPTS:
            del history[0]

    def tell(self) -> str:
        """The story in one line."""
        return "; ".join(f"{at:.3f} {text}" for at, text in self.story)
