"""Other settings while the core runs: what follows from each, and what may not change.

Invariants
- Refused as a whole, or in force as a whole.
- `FIXED` settings are those that structures were built with; everything else is read where it is used, or put right here.
- A time limit that runs already keeps its length; the next one is as configured.

What this module does not know: files and their formats.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

from rolloutd.scheduler import budgeting, reordering, version_change
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.rules import watch
from rolloutd.scheduler.rules.rule import problem_of_all
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Code
from rolloutd.scheduler.world import World

# (field of SchedulerConfig, section as a file has it, setting): the index, windows of strata and claims were built with them.
FIXED: Final = (
    ("queue", "scheduler", "max_strata"),
    ("budget", "budget", "headroom_tokens"),
    ("index", "index", "max_bytes"),
    ("index", "index", "page_tokens"),
    ("index", "index", "eviction"),
    ("index", "index", "max_cached_tokens"),
)


def adopt(world: World, config: SchedulerConfig) -> Refusal | None:
    """Put a configuration in force; None when it is accepted."""
    refusal = _refuse(world.config, config)
    if refusal is not None:
        return refusal
    before, world.config = world.config, config
    if config.queue.decision_ring != before.queue.decision_ring:
        world.decisions = deque(world.decisions, maxlen=config.queue.decision_ring)
    for room in world.rooms.values():
        if room.reserved_short != config.queue.reserved_short_slots:
            room.reserved_short = config.queue.reserved_short_slots
            for engine in room.members.values():
                room.note(engine)
    ordered_otherwise = _keys_of(config) != _keys_of(before)
    for run in world.runs.values():
        run.phase.settings = config.policy
        run.lengths.learns = config.queue.learn_lengths
        if run.ledger.budget is before.budget.default:
            _follow_default(world, run, config)
        if ordered_otherwise:
            reordering.begin(world, run)
        if config.policy != before.policy:
            for lineage in run.lineages.values():
                if lineage.version:
                    version_change.note(world, run, lineage)  # how old a prefix may be has changed
    watch.adopt(world)
    world.dirty = True
    world.record("info", "reconfigured", rules=len(config.rules))
    return None


def _keys_of(config: SchedulerConfig) -> tuple[object, ...]:
    """What the keys of those that wait are made of."""
    queue = config.queue
    return config.weights, config.policy, queue.aging_seconds, queue.spare_duplicates, queue.learn_lengths


def keeping_fixed(config: SchedulerConfig, current: SchedulerConfig) -> SchedulerConfig:
    """`config` with the settings of `current` where they are fixed."""
    for field, _, name in FIXED:
        section = getattr(config, field)
        kept = getattr(getattr(current, field), name)
        config = dataclasses.replace(config, **{field: dataclasses.replace(section, **{name: kept})})
    return config


def _refuse(current: SchedulerConfig, config: SchedulerConfig) -> Refusal | None:
    problem = problem_of_all(config.rules)
    if problem is not None:
        return invalid(*problem)
    for field, section, name in FIXED:
        now, then = getattr(getattr(current, field), name), getattr(getattr(config, field), name)
        if now != then:
            key = f"{section}.{name}"
            return Refusal(
                Code.FAILED_PRECONDITION,
                "FIXED_WHILE_RUNNING",
                f"{key}: is {now!r} and cannot become {then!r} while the server runs; start it again to change it",
                ((key, "is fixed while the server runs"),),
            )
    return None


def _follow_default(world: World, run: Run, config: SchedulerConfig) -> None:
    """A run that has the configured budget gets the new one, which is told only where it says something else."""
    if run.ledger.budget == config.budget.default:
        run.ledger.adopt(config.budget.default)
    else:
        budgeting.back_to_default(world, run, "the configured default changed")
