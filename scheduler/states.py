"""The closed vocabularies of the core: classes, task types, rollout states and their moves, outcomes.

Invariants
- A move between states that is not in `MOVES` is a bug and raises with the rollout's story.
- FINISHED has no exits: a rollout ends once.
- Every `Outcome` has a row in `OUTCOMES`: the gRPC code a caller sees, the metric label, and whether the engine is to blame.

What this module does not know: protobuf enums (the server translates) and what makes a rollout move.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class RolloutClass(enum.IntEnum):
    """How much the training step depends on a rollout; a smaller number goes first."""

    CRITICAL = 0
    REUSABLE = 1
    BACKGROUND = 2


class TaskType(enum.IntEnum):
    """What is asked of the engine. REWARD and STATE_QUERY are short work; REPLAY generates nothing."""

    GENERATION = 0
    REWARD = 1
    STATE_QUERY = 2
    REPLAY = 3


SHORT_TASKS: Final = frozenset({TaskType.REWARD, TaskType.STATE_QUERY})


class Origin(enum.IntEnum):
    """Where the data comes from, as tagged by the trainer."""

    CURRENT_POLICY = 0
    REPLAY = 1
    EXPLORATION = 2
    EVALUATION = 3


class OnPreempt(enum.IntEnum):
    """What a rollout allows when its slot is wanted for something else."""

    KEEP_PARTIAL = 0  # keep tokens, resume later from prompt + partial
    RESTART = 1  # drop tokens, start again from the prompt
    NEVER = 2  # other work may not take its slot; only a shrinking budget may, last of all, and tokens are kept


class TrainerState(enum.IntEnum):
    """What the trainer says it is doing."""

    UNKNOWN = 0
    TRAINING = 1
    WAITING = 2
    SYNCING = 3
    PAUSED = 4


class RolloutState(enum.IntEnum):
    """Where a rollout is. Cancelling running work is a state (ABORTING), not a deletion."""

    QUEUED = 0  # waits here for room; includes entries held for a prefix or a leader
    DISPATCHED = 1  # sent to an engine, no token yet
    RUNNING = 2  # first token seen
    ABORTING = 3  # the engine was asked to stop; the slot stays booked until it did
    FINISHED = 4


MOVES: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.DISPATCHED, RolloutState.FINISHED}),
    RolloutState.DISPATCHED: frozenset(
        {RolloutState.RUNNING, RolloutState.ABORTING, RolloutState.QUEUED, RolloutState.FINISHED}
    ),
    RolloutState.RUNNING: frozenset({RolloutState.ABORTING, RolloutState.QUEUED, RolloutState.FINISHED}),
    RolloutState.ABORTING: frozenset({RolloutState.QUEUED, RolloutState.FINISHED}),
    RolloutState.FINISHED: frozenset(),
}


class Code(enum.IntEnum):
    """The canonical gRPC status codes the core speaks of (numbers of google.rpc.Code)."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14


class Outcome(enum.IntEnum):
    """How an accepted rollout ended. Closed: a new way to end is a new member and a new row."""

    COMPLETED = 0
    CANCELLED = 1
    DEADLINE_EXCEEDED = 2
    QUEUE_TIMEOUT = 3
    NO_ENGINE = 4
    ENGINE_REFUSED = 5
    ENGINE_FAILED = 6
    RUN_ENDED = 7
    SHUTDOWN = 8
    INTERNAL = 9
    VERSION_UNMET = 10  # no engine came to hold a policy version that it accepts
    VERSION_GONE = 11  # every engine has left the exact version that it asked for
    STALE = 12  # written by a policy that was too old when it was done; withheld
    SURPLUS = 13  # its group had as many complete members as it keeps


class OutcomeRow(NamedTuple):
    """What an outcome means outside the core."""

    code: Code
    label: str
    engines_fault: bool


OUTCOMES: dict[Outcome, OutcomeRow] = {
    Outcome.COMPLETED: OutcomeRow(Code.OK, "completed", False),
    Outcome.CANCELLED: OutcomeRow(Code.CANCELLED, "cancelled", False),
    Outcome.DEADLINE_EXCEEDED: OutcomeRow(Code.DEADLINE_EXCEEDED, "deadline_exceeded", False),
    Outcome.QUEUE_TIMEOUT: OutcomeRow(Code.UNAVAILABLE, "queue_timeout", False),
    Outcome.NO_ENGINE: OutcomeRow(Code.UNAVAILABLE, "no_engine", False),
    Outcome.ENGINE_REFUSED: OutcomeRow(Code.INVALID_ARGUMENT, "engine_refused", False),
    Outcome.ENGINE_FAILED: OutcomeRow(Code.UNAVAILABLE, "engine_failed", True),
    Outcome.RUN_ENDED: OutcomeRow(Code.CANCELLED, "run_ended", False),
    Outcome.SHUTDOWN: OutcomeRow(Code.UNAVAILABLE, "shutdown", False),
    Outcome.INTERNAL: OutcomeRow(Code.INTERNAL, "internal", False),
    Outcome.VERSION_UNMET: OutcomeRow(Code.UNAVAILABLE, "version_unmet", False),
    Outcome.VERSION_GONE: OutcomeRow(Code.FAILED_PRECONDITION, "version_gone", False),
    Outcome.STALE: OutcomeRow(Code.FAILED_PRECONDITION, "stale", False),
    Outcome.SURPLUS: OutcomeRow(Code.CANCELLED, "surplus", False),
}


class FaultKind(enum.IntEnum):
    """Why an attempt failed: bad request, busy, not reached and broken are different things (property P7)."""

    REFUSED = 0
    BUSY = 1
    BROKEN = 2
    SILENT = 3
    UNREACHED = 4


class AbortReason(enum.IntEnum):
    """Why an attempt was asked to stop; decides what happens to its rollout afterwards."""

    CANCEL = 0
    PREEMPT = 1
    BUDGET = 2
    DEADLINE = 3
    NO_PROGRESS = 4
    RUN_ENDED = 5
    SHUTDOWN = 6
    RECALL = 7  # it waits in an engine's own queue
    PUBLISH = 8  # its engine gets other weights
    MEMORY = 9  # its engine's memory goes to the trainer
    SLICE = 10  # its time slice is over, and one that may take longer waits
    SURPLUS = 11  # its group has as many complete members as it keeps
    MOVE = 12  # its step ends sooner with it on another engine


class Gate(enum.IntEnum):
    """Why work may not start now. The first gate that closes is the one a decision names."""

    OPEN = 0
    RUN_PAUSED = 1
    TRAINER_SYNCING = 2
    UNDELIVERED = 3  # the trainer has not acknowledged enough of its results
    CEILING_ROLLOUTS = 4
    CEILING_KV = 5
    CLASS_CEILING = 6
    TASK_CEILING = 7
    CLASS_SHARE = 8
    TASK_SHARE = 9
    FLOOR_OWED = 10  # the room is owed to a class, task type or run below its floor
    NO_ENGINE = 11
    ENGINE_SLOTS = 12
    ENGINE_KV = 13
    ENGINE_KV_CEILING = 14
    SHORT_RESERVED = 15
    PRESSURE = 16
    CRITICAL_TAIL = 17
    HELD_FOR_LEADER = 18
    HELD_FOR_PREFIX = 19
    RESERVED_FOR_LARGE = 20
    SHUTTING_DOWN = 21
    BATCH_LIMIT = 22  # the run's batch is full; the next pass goes on
    POLICY_VERSION = 23  # no engine that has room holds a version that it accepts
    STALENESS = 24  # enough samples are on their way: more would be too old when the trainer takes them


class UpdateMode(enum.IntEnum):
    """What happens to work that runs while its engine gets other weights."""

    DRAIN = 0  # it ends first
    ABORT_AND_RESUME = 1  # it is interrupted; its tokens are kept and continued anywhere
    RETRACT = 2  # it stays and is computed again under the new weights, from its prompt and its tokens
    IN_PLACE = 3  # it stays and goes on over the KV of the old weights


class CacheHandling(enum.IntEnum):
    """What becomes of prefixes that the old weights computed."""

    FLUSH = 0  # the engine drops its cache
    NAMESPACE = 1  # it keeps it, where new work cannot match it
    KEEP = 2  # new work may match it; an explicit choice of the run (prefix_ttl_versions)


class PauseMode(enum.IntEnum):
    """How an engine is paused; the words of SGLang's /pause_generation."""

    ABORT = 0
    RETRACT = 1
    IN_PLACE = 2


class Verb(enum.IntEnum):
    """One control call to an engine."""

    PAUSE = 0
    RESUME = 1  # generation goes on
    FLUSH = 2
    LOAD = 3  # weights from a disk path
    BEGIN = 4  # the trainer is about to push weights
    END = 5
    NAME = 6  # give the weights that it holds their label
    VERIFY = 7  # ask which label it holds
    RELEASE_MEMORY = 8
    RESUME_MEMORY = 9


class UpdateState(enum.IntEnum):
    """Where one engine is on its way to another policy version."""

    WAITING = 0  # for its turn; it still serves the version that it holds
    CLEARING = 1  # for running work that must not see the new weights
    PAUSING = 2
    FLUSHING = 3
    LOADING = 4
    PUSHING = 5  # the trainer pushes its weights now
    NAMING = 6
    VERIFYING = 7
    RESUMING = 8
    UPDATED = 9
    FAILED = 10


class OnStale(enum.IntEnum):
    """What becomes of a finished rollout whose oldest token is too old."""

    WITHHOLD = 0  # it ends with STALE and without its tokens
    FLAG = 1  # it is delivered, marked as stale


class ReleaseMemory(enum.IntEnum):
    """Engine memory that a colocated trainer gets while it trains."""

    NOTHING = 0
    KV_CACHE = 1
    KV_CACHE_AND_WEIGHTS = 2  # the weights are gone: the engine serves again after the next publish
