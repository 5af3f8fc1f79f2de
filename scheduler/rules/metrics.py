"""What rules may look at: numbers about one run, worked out from the world when a period is over.

Invariants
- Every name of `METRIC_NAMES` has its function in `METRICS`. None means that it is not known: never reported, or nothing happened.
- Looking changes nothing. Shares "of the last period" are of what happened between two looks at the same run.

What this module does not know: rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.rules.counted import Counted
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.states import RolloutClass, TrainerState
from rolloutd.scheduler.world import World


def counted(run: Run) -> Counted:
    return Counted(
        run.prompt_tokens,
        run.cached_tokens,
        run.dispatches,
        run.preemptions,
        sum(run.finished_by_class),
        run.stale_results,
    )


class Look:
    """One look at a run. `engines`: that may serve it and are there. `lately`: what was counted in the last period."""

    __slots__ = ("engines", "lately", "run", "world")

    def __init__(self, world: World, run: Run, before: Counted) -> None:
        self.world = world
        self.run = run
        self.engines: list[Engine] = [
            one
            for one in world.engines.values()
            if not one.lost and not one.removed and (not one.owner or one.owner == run.run_id)
        ]
        self.lately = Counted(*(now - then for now, then in zip(counted(run), before, strict=True)))

    def value_of(self, metric: str) -> float | None:
        return METRICS[metric](self)


def _buffer_fill(look: Look) -> float | None:
    return look.run.report.buffer_fill


def _trainer_waiting_seconds(look: Look) -> float | None:
    run = look.run
    return look.world.now - run.state_since if run.report.trainer_state is TrainerState.WAITING else 0.0


def _training_queued_seconds(look: Look) -> float | None:
    """Of the critical rollout that has been here longest among those that wait: what the training step is kept by."""
    oldest = [
        entry.queued_at
        for (_, rollout_class, _), backlog in look.run.backlogs.items()
        if rollout_class is RolloutClass.CRITICAL and (entry := backlog.oldest()) is not None
    ]
    return look.world.now - min(oldest) if oldest else 0.0


def _queued_critical(look: Look) -> float | None:
    return float(look.run.ledger.class_queued[RolloutClass.CRITICAL])


def _queued_reusable(look: Look) -> float | None:
    return float(look.run.ledger.class_queued[RolloutClass.REUSABLE])


def _queued_background(look: Look) -> float | None:
    return float(look.run.ledger.class_queued[RolloutClass.BACKGROUND])


def _running_rollouts(look: Look) -> float | None:
    return float(look.run.ledger.running)


def _slots_used(look: Look) -> float | None:
    """By anybody."""
    return _ratio(sum(one.slots_used for one in look.engines), sum(one.facts.slots for one in look.engines))


def _kv_fill(look: Look) -> float | None:
    """The larger of what we committed and what the engines reported, over their capacity; by anybody."""
    return _ratio(
        sum(max(one.kv_claimed_tokens, one.kv_used_tokens) for one in look.engines if one.facts.kv_capacity_tokens),
        sum(one.facts.kv_capacity_tokens for one in look.engines),
    )


def _supply_over_demand(look: Look) -> float | None:
    demand = look.run.demand_tokens_per_second()
    return look.run.supply.per_second(look.world.now) / demand if demand > 0.0 else None


def _prefix_hit(look: Look) -> float | None:
    return _ratio(look.lately.cached_tokens, look.lately.prompt_tokens)


def _preemptions_per_dispatch(look: Look) -> float | None:
    return _ratio(look.lately.preemptions, look.lately.dispatches)


def _stale_share(look: Look) -> float | None:
    return _ratio(look.lately.stale, look.lately.finished)


def _undelivered_fill(look: Look) -> float | None:
    run = look.run
    return _ratio(run.undelivered_bytes, look.world.undelivered_limit_bytes(run))


def _diversity_distance(look: Look) -> float | None:
    return look.run.mix.distance() if look.run.finished_samples else None


def _policy_entropy(look: Look) -> float | None:
    """As reported, else its stand-in from log-probs."""
    reported = look.run.report.policy_entropy
    return look.run.phase.surprise if reported is None else reported


def _engines_ready(look: Look) -> float | None:
    return float(sum(one.is_open(look.world.now) for one in look.engines))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


METRICS: Mapping[str, Callable[[Look], float | None]] = {
    "buffer_fill": _buffer_fill,
    "trainer_waiting_seconds": _trainer_waiting_seconds,
    "training_queued_seconds": _training_queued_seconds,
    "queued_critical": _queued_critical,
    "queued_reusable": _queued_reusable,
    "queued_background": _queued_background,
    "running_rollouts": _running_rollouts,
    "slots_used": _slots_used,
    "kv_fill": _kv_fill,
    "supply_over_demand": _supply_over_demand,
    "prefix_hit": _prefix_hit,
    "preemptions_per_dispatch": _preemptions_per_dispatch,
    "stale_share": _stale_share,
    "undelivered_fill": _undelivered_fill,
    "diversity_distance": _diversity_distance,
    "policy_entropy": _policy_entropy,
    "engines_ready": _engines_ready,
}
