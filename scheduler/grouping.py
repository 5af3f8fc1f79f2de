"""Critical siblings together or apart: what a group's prompt costs to compute again, against what being together costs.

By dearness, the cost of one prefill over the decode cost of one output:

- Cheap (below `scoring.crowding.SPREAD_BELOW`): siblings go apart. Their lengths are alike, so together the longest of a step would
  share one engine, each slowed by the others, while the rest of the pool runs dry. Not while lower classes wait: they fill
  the rest, and an engine with one of the step's last rollouts is closed to them as much as one with four (`tail.py`).
- Dear: siblings wait for a slot where their prompt is cached, as long as that wastes less than computing it again,

      wait x 1 slot  <  prefill x (1 + rollouts that stand still meanwhile)
      wait           =  members that wait x expected output x seconds per token / slots

Invariants
- Counts are of live attempts, by run, prompt and engine; `check()` of the core re-derives them.
- Turns of sessions and interrupted rollouts do not wait: others are not their siblings (`homing.py` has turns).
- Nobody waits who is owed a floor, or whose deadline or time in the queue could end with it.
- Members of one entry wait no longer than `scheduler.leader_timeout_seconds` together (beyond it the estimate was wrong), nor for an
  engine that would not take it if it had a slot.

What this module does not know: scores, and who else may have the slot.
"""

from __future__ import annotations

from typing import Final

from rolloutd.scheduler import gates, queueing, versions
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutClass
from rolloutd.scheduler.world import World

MOST_HOMES: Final = 4  # engines with the prompt that are looked at


def note_started(run: Run, prompt_hash: str, engine: Engine) -> None:
    """An attempt was sent there."""
    here = run.together.get(prompt_hash)
    if here is None:
        here = run.together[prompt_hash] = {}
    here[engine.engine_id] = here.get(engine.engine_id, 0) + 1


def note_ended(run: Run, prompt_hash: str, engine: Engine) -> None:
    """It left."""
    here = run.together[prompt_hash]
    count = here[engine.engine_id] - 1
    if count:
        here[engine.engine_id] = count
        return
    del here[engine.engine_id]
    if not here:
        del run.together[prompt_hash]


def spreads(run: Run) -> bool:
    """Whether nobody would have the engines that the step's last rollouts leave alone when they are together."""
    ledger = run.ledger
    return ledger.queued == ledger.class_queued[RolloutClass.CRITICAL]


def siblings(entry: Entry, engine: Engine) -> int:
    """Rollouts of the entry's prompt that run there."""
    here = entry.run.together.get(entry.prompt_hash)
    return 0 if here is None else here.get(engine.engine_id, 0)


def waits(world: World, entry: Entry, engine: Engine, missing_tokens: int) -> bool:
    """Whether the entry had better wait for an engine that has its prompt. missing_tokens: that are cached there and not here.

    Notes since when it waits.
    """
    rate, pace = engine.prefill_tokens_per_second, engine.decode_seconds_per_token
    if not rate or not pace:
        return False
    again = missing_tokens / rate * (1 + engine.slots_used)
    wait = len(entry.members) * entry.expected_tokens * pace / engine.facts.slots
    return wait < again and within(world, entry, world.config.queue.leader_timeout_seconds)


def within(world: World, entry: Entry, patience_seconds: float) -> bool:
    """Whether an engine that has its prompt is there, and the entry has waited for one for less than that. Notes since when."""
    run = entry.run
    ledger = run.ledger
    if ledger.running < run.settings.floor_rollouts or (
        ledger.has_floors and (ledger.class_owed(entry.rollout_class) or ledger.task_owed(entry.task_type))
    ):
        return False
    if _ends_within(world, entry, patience_seconds) or not _is_there(world, entry):
        return False
    if entry.apart_since is None:
        entry.apart_since = world.now
    return world.now - entry.apart_since < patience_seconds


def _ends_within(world: World, entry: Entry, seconds: float) -> bool:
    """Whether it would have waited too long by then: what remains to its deadline is needed, or it may not wait at all."""
    if entry.members[0].ttl_at - world.now < seconds:
        return True
    deadline = entry.deadline_at
    if deadline is None:
        return False
    needed = entry.expected_tokens * queueing.pool_token_seconds(world, entry.run, entry.pool)
    return deadline - world.now - needed < seconds


def _is_there(world: World, entry: Entry) -> bool:
    """Whether an engine that has its prompt lacks no more than a slot to take it."""
    rollout = entry.members[0]
    lineage = entry.run.lineage(entry.pool) if entry.particular else None
    members = world.rooms[entry.pool].members
    for key in world.index.some_of(entry.segments[0][0], MOST_HOMES, 0):
        home = members.get(key)
        if (
            home is not None
            and home.is_open(world.now)
            and home.engine_id not in rollout.excluded
            and (lineage is None or versions.fits(lineage, rollout, home))
            and gates.could_serve(world, entry, home, rollout.remaining_tokens)
        ):
            return True
    return False
