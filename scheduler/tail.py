"""How full an engine may be while only the last rollouts of a step run: those that the trainer waits for, or will wait for next.

Every sequence in a batch makes the others' tokens later, by as much as the engine's own decode curve says. So lower classes
may have what is free as long as

    tokens of the awaited rollouts here come at most `slowdown` later,
    slowdown = tail_slowdown + max(0, left of their step's longest rollout / (left of the longest here x tail_doubt) - 1)

What is left is what the length model expects, which may be wrong by the factor `tail_doubt`. An engine whose awaited rollouts
end long before their step does may so be filled to the last slot, and the one with the step's last rollout stays quick. For
rollouts that the next step needs themselves the slowdown is at least `tail_next_slowdown`: room that is left empty is time that
the next step takes. Before an engine's curve is known, `tail_fill` says which share of its slots may be used.

Invariants
- Asking books nothing; what is left is looked at anew every `LOOK_SECONDS`.
- Where a great many awaited rollouts run, that is no tail yet and every engine counts as if it had the longest.

What this module does not know: scores, budgets, prefixes.
"""

from __future__ import annotations

import math
from typing import Final

from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import SHORT_TASKS, RolloutClass
from rolloutd.scheduler.world import World

LOOK_SECONDS: Final = 1.0
MOST_LOOKED_AT: Final = 512  # rollouts that run; one look costs about a microsecond for each
LEAST_LEFT_TOKENS: Final = 16.0  # a rollout that runs has so much left: what is expected of one that is late is a guess


class Awaited:
    """What one step has running: tokens left of the longest on each engine, and of the longest of all."""

    __slots__ = ("left", "longest")

    def __init__(self) -> None:
        self.left: dict[str, float] = {}
        self.longest = 0.0

    def note(self, engine_id: str, left_tokens: float) -> None:
        self.left[engine_id] = max(left_tokens, self.left.get(engine_id, 0.0))
        self.longest = max(self.longest, left_tokens)

    def slack(self, engine_id: str, passed_tokens: float, doubt: float) -> float:
        """By which share the step's rollouts on an engine may be later without being its last ones; inf where it has none.

        passed_tokens: that each rollout wrote since the look.
        """
        here = self.left.get(engine_id)
        if here is None:
            return math.inf
        longest = max(LEAST_LEFT_TOKENS, self.longest - passed_tokens)
        return max(0.0, longest / (max(LEAST_LEFT_TOKENS, here - passed_tokens) * doubt) - 1.0)


class Tail:
    """What one run's steps have running, as of one look."""

    __slots__ = ("at", "counts", "next_step", "this_step")

    def __init__(self, at: float) -> None:
        self.at = at
        self.this_step = Awaited()  # critical rollouts
        self.next_step = Awaited()
        self.counts: dict[str, int] = {}  # awaited rollouts, by engine

    def slack(self, engine_id: str, passed_tokens: float, doubt: float) -> float:
        """The lesser of both steps'."""
        this_step = self.this_step.slack(engine_id, passed_tokens, doubt)
        slack = min(this_step, self.next_step.slack(engine_id, passed_tokens, doubt))
        return 0.0 if slack == math.inf else slack


def is_on(world: World, run: Run) -> bool:
    """Whether lower classes should mind awaited work that runs.

    That is so while the trainer waits, or the next step has work already, and no critical work queues.
    """
    if run.pressure(world.now) < 1.0 and not run.by_step.get(run.step + 1):
        return False
    return not any(
        backlog.count
        for (_, rollout_class, short), backlog in run.backlogs.items()
        if rollout_class is RolloutClass.CRITICAL and not short
    )


def awaited(world: World, run: Run, engine: Engine) -> int:
    """Rollouts of this run here that this step or the next one needs."""
    tail = _tail(world, run)
    return engine.critical_used if tail is None else max(engine.critical_used, tail.counts.get(engine.engine_id, 0))


def most_beside(
    world: World, run: Run, engine: Engine, stall_seconds: float = 0.0, soon: bool = False, grace: float = 1.0
) -> int:
    """Rollouts that may run here now beside the awaited ones of this run.

    stall_seconds: of computing prompts, per token that they write: an engine decodes nothing meanwhile, so a stream of short outputs
    behind long prompts costs the others far more than its places in the batch. soon: the next step needs them. grace: times as much
    slowdown as configured.
    """
    policy = world.config.policy
    slowdown = grace * run.phase.between(policy.cold_start_tail_slowdown, policy.stable_tail_slowdown)
    tail = _tail(world, run)
    if tail is not None and policy.tail_doubt:
        seconds = engine.decode_seconds_per_token
        passed = (world.now - tail.at) / seconds if seconds else 0.0
        slowdown += tail.slack(engine.engine_id, passed, policy.tail_doubt)
    if soon:
        slowdown = max(slowdown, policy.tail_next_slowdown)
    line = engine.curve.line()
    if line is None:
        fill = run.phase.between(policy.cold_start_tail_fill, policy.stable_tail_fill)
        return max(1, int(fill * engine.facts.slots)) - engine.critical_used
    base, growth = line
    allowed = slowdown * (base + growth * awaited(world, run, engine))
    each = growth + stall_seconds
    return int(min(float(engine.facts.slots), allowed / each if each > 0.0 else math.inf))


def _tail(world: World, run: Run) -> Tail | None:
    tail = run.tail
    if tail is not None and 0.0 <= world.now - tail.at < LOOK_SECONDS:
        return tail
    run.tail = None
    if run.ledger.running <= MOST_LOOKED_AT:
        run.tail = _look(world, run)
    return run.tail


def _look(world: World, run: Run) -> Tail:
    tail = Tail(world.now)
    for engine in world.engines.values():
        count = 0
        for attempt in engine.attempts.values():
            rollout = attempt.rollout
            if rollout.run is not run or rollout.task_type in SHORT_TASKS:
                continue
            if rollout.rollout_class is RolloutClass.CRITICAL:
                step = tail.this_step
            elif rollout.needed_by_step is not None and rollout.needed_by_step <= run.step + 1:
                step = tail.next_step
            else:
                continue
            count += 1
            step.note(engine.engine_id, max(attempt.expected_left_tokens(), LEAST_LEFT_TOKENS))
        if count:
            tail.counts[engine.engine_id] = count
    return tail
