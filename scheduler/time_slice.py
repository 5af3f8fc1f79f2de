"""Time slices: a running critical rollout gives its slot to a waiting one that may take longer.

A step ends with its longest rollout, and nobody knows which that is. Among more rollouts than slots, the one that may still write
most goes first (`scoring.urgency`); what that is changes while they write. So whenever a rollout has written another
`preempt.time_slice_tokens`, it is compared with those that wait, and interrupted where one of them may take clearly longer, at
worst and on average: of what has no near limit, that which got far has more before it than what is fresh, and runs on. Its
tokens are kept, and its prefix stays in its engine's cache until it goes on, mostly there.

In the end all those that may be the longest have got about equally far, and none of them was started last.

Invariants
- Only where every slot that the waiting one could have is taken, and only for work of the same run, pool and class.
- Nobody is interrupted whose tokens would be lost: text prompts, `on_preempt` other than KEEP_PARTIAL, output that depends on state.
- Never while a version is being published. A version published under DRAIN must not find rollouts half written: the first one
  that does starts them again, and ends time slices for that lineage.

What this module does not know: who gets the slot; the next pass decides.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import gates, lifecycle
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.lanes import Backlog
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import AbortReason, OnPreempt, RolloutClass, RolloutState, TaskType, UpdateMode
from rolloutd.scheduler.world import World

DIVIDING: Final = frozenset({AbortReason.SLICE, AbortReason.MOVE})
DIVIDED_ENDS: Final = frozenset(
    [reason.name.lower() for reason in DIVIDING]
)  # how such attempts stand in a rollout's history
NEVER: Final = 1 << 62  # tokens
MOST_HEADS: Final = 32  # of each lane that are compared: as many slices may end at once
CLEARLY_LONGER: Final = 1.1  # below this nobody is interrupted: what is gained is less than what is not known


def consider(world: World, attempt: Attempt) -> int:
    """It has written more: at the end of a slice, interrupt it where somebody should go first. Returns where its slice ends."""
    settings = world.config.preempt
    slice_tokens = settings.time_slice_tokens
    if not slice_tokens or not settings.enabled:
        return NEVER
    end = attempt.slice_end_tokens
    if attempt.generated_tokens >= end:
        if end:
            _end_of_slice(world, attempt)
        attempt.slice_end_tokens = end = (attempt.generated_tokens // slice_tokens + 1) * slice_tokens
    return end


def _end_of_slice(world: World, attempt: Attempt) -> None:
    rollout = attempt.rollout
    run = rollout.run
    pool = rollout.spec.pool
    backlog = run.backlogs.get((pool, rollout.rollout_class, False))
    if backlog is None or not backlog.ready or not may_wait(world, attempt):
        return
    room = world.room(pool)
    if any(engine.is_open(world.now) for engine in room.long):
        return
    written = rollout.kept_tokens + attempt.generated_tokens
    whole, left = run.lengths.outlook(rollout.prompt_hash, rollout.kind, rollout.max_new_tokens, written)
    longer = _longer(world, backlog, attempt, left * CLEARLY_LONGER, whole - written)
    if longer is None:
        return
    first = longer.members[0].rollout_id
    lifecycle.abort(world, rollout, AbortReason.SLICE, f"{first} may take longer")


def may_wait(world: World, attempt: Attempt) -> bool:
    """Whether it could go on later as if nothing had happened."""
    rollout = attempt.rollout
    lineage = rollout.run.lineage(rollout.spec.pool)
    return (
        rollout.state is RolloutState.RUNNING
        and rollout.rollout_class is RolloutClass.CRITICAL
        and rollout.task_type is TaskType.GENERATION
        and rollout.deadline_at is None
        and rollout.on_preempt is OnPreempt.KEEP_PARTIAL
        and rollout.resumable
        and rollout.spec.text is None
        and lineage.active is None
        and not lineage.undivided
        and attempt.engine.is_open(world.now)
    )


def _longer(world: World, backlog: Backlog, attempt: Attempt, worst_tokens: float, tokens: float) -> Entry | None:
    """The first of those who wait that could run here, may write more than `worst_tokens` and is expected to write more than
    `tokens`, if no slot is on its way to it yet."""
    engine = attempt.engine
    run = attempt.rollout.run
    found: Entry | None = None
    waiting = 0
    for entry in backlog.candidates((), lambda _: 0.0, frozenset((TaskType.GENERATION,)), MOST_HEADS):
        if entry.worst_tokens <= worst_tokens or entry.expected_tokens <= tokens or entry.deadline_at is not None:
            continue
        if not gates.could_serve(world, entry, engine, entry.members[0].remaining_tokens):
            continue
        waiting += len(entry.members)
        if found is None or entry.worst_tokens > found.worst_tokens:
            found = entry
    pool = attempt.rollout.spec.pool
    leaving = sum(one.rollout.run is run and one.rollout.spec.pool == pool for one in world.aborting.values())
    return found if waiting > leaving else None


def begin_publication(world: World, lineage: Lineage, run: Run, mode: UpdateMode) -> None:
    """A version is about to be published: under DRAIN what slices left half written starts again, and nothing is divided any more."""
    if mode is not UpdateMode.DRAIN:
        return
    for entry in list(run.entries.values()):
        rollout = entry.members[0]  # one that was interrupted waits alone
        if entry.resumed and entry.pool == lineage.pool and rollout.history[-1].end in DIVIDED_ENDS:
            lineage.undivided = True
            lifecycle.restart(world, rollout, "a version is published, and running work was to end before it")
    for attempt in world.aborting.values():
        rollout = attempt.rollout
        if attempt.abort_reason in DIVIDING and rollout.run is run and rollout.spec.pool == lineage.pool:
            lineage.undivided = True


def keeps_tokens(rollout: Rollout) -> bool:
    """Whether a rollout that was interrupted at the end of a slice goes on from there: not where a version came in between."""
    lineage = rollout.run.lineage(rollout.spec.pool)
    return not (lineage.undivided and lineage.active is not None)
