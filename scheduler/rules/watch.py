"""Rules over a World: when a period is over, each run's book is shown its metrics; what changed is put in force and told.

Invariants
- Nobody looks while no rule is configured: without rules the core does exactly what it did.
- A run that has ended has no active rule.
- Each firing and each end is a decision about the run, kept in the ring and with the run (the newest `KEPT_CHANGES`).

What this module does not know: when a rule fires (`book`), and what a knob does (who reads it).
"""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.scheduler import reordering
from rolloutd.scheduler.actions import Decided
from rolloutd.scheduler.considered import NOTHING
from rolloutd.scheduler.rules.book import RuleChange
from rolloutd.scheduler.rules.knobs import Knobs
from rolloutd.scheduler.rules.metrics import Look, counted
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import Gate
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.views import Decision, DecisionKind
from rolloutd.scheduler.world import World


def arm(world: World) -> None:
    """Look again a period from now, where there is anything to look at."""
    world.timers.cancel(world.rules_timer)
    world.rules_timer = None
    if world.config.rules:
        due = world.now + world.config.queue.rule_period_seconds
        world.rules_timer = world.timers.add(due, TimerKind.RULES, True)


def due(world: World) -> None:
    """A period is over."""
    for run in world.runs.values():
        if run.ended:
            continue
        look = Look(world, run, run.counted)
        run.counted = counted(run)
        before = run.rules.knobs
        _put_in_force(world, run, before, run.rules.look(look.value_of, world.now))
    arm(world)


def adopt(world: World) -> None:
    """The configured rules or their period may be others: every run goes on with them."""
    for run in world.runs.values():
        before = run.rules.knobs
        _put_in_force(world, run, before, run.rules.adopt(world.config.rules, world.now))
    arm(world)


def end_run(world: World, run: Run) -> None:
    """The run has ended: undo what its rules did."""
    before = run.rules.knobs
    _put_in_force(world, run, before, run.rules.end_all(world.now, "the run has ended"))


def _put_in_force(world: World, run: Run, before: Knobs, changes: Sequence[RuleChange]) -> None:
    if not changes:
        return
    knobs = run.rules.knobs
    run.ledger.turn(knobs)
    if not knobs.orders_as(before):
        reordering.begin(world, run)
    world.dirty = True
    for change in changes:
        _tell(world, run, change)


def _tell(world: World, run: Run, change: RuleChange) -> None:
    rule = change.rule
    fired = change.fired
    decision = Decision(
        world.now,
        DecisionKind.RULE_FIRED if fired else DecisionKind.RULE_ENDED,
        run.run_id,
        "",
        0,
        "",
        Gate.OPEN,
        NOTHING,
        f"rule {rule.name!r} {'fired' if fired else 'ended'}: {change.because}",
    )
    world.decisions.append(decision)
    run.rule_decisions.append(decision)
    world.emit(Decided(decision))
    event = "rule_fired" if fired else "rule_ended"
    world.record("info", event, run=run.run_id, rule=rule.name, because=change.because, value=change.value)
