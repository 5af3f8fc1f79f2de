"""What a trainer says of itself and its run: settings, steps, updates, the end.

Invariants
- When the reported step advances, everything needed by it becomes CRITICAL, queued or running.
- Ending a run ends all its rollouts; results stay until they are acknowledged or expire.

What this module does not know: what classes mean to the placement.
"""

from __future__ import annotations

import math
from typing import Final

from rolloutd.scheduler import (
    budgeting,
    colocation,
    delivering,
    ending,
    letting_in,
    lifecycle,
    promoting,
    publishing,
    queueing,
    reordering,
    version_change,
)
from rolloutd.scheduler.mix import Mix
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.rules import watch
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import RolloutUpdate, RunSettings, StepReport
from rolloutd.scheduler.states import Code, Gate, RolloutState
from rolloutd.scheduler.world import World

RUN_ENDED: Final = "run_ended"  # the record of a run's end, with the number of `rollouts` that end because of it


def configure(world: World, run: Run, settings: RunSettings) -> Refusal | None:
    refusal = _check_settings(settings)
    if refusal is not None:
        return refusal
    waiting = letting_in.configure(world, run, settings)
    run.settings = settings
    ending.complete(world, run)
    run.ended = False
    mix = Mix(settings.target_mix, world.config.queue.max_strata)
    mix.dispatched, mix.consumed = run.mix.dispatched, run.mix.consumed
    if mix.target == run.mix.target:
        mix.order, mix.beside = run.mix.order, run.mix.beside
    run.mix = mix
    delivering.configure(world, run, settings)
    reordering.begin(world, run)  # weights may have changed, and with them every key
    for entry in waiting:
        queueing.wake(world, entry)
    colocation.follow(world, run)
    for lineage in run.lineages.values():
        if lineage.version:
            version_change.note(world, run, lineage)  # how old a prefix may be has changed
    world.dirty = True
    return None


def report_step(world: World, run: Run, report: StepReport) -> Refusal | None:
    refusal = _check_report(run, report)
    if refusal is not None:
        return refusal
    advanced = report.step > run.report.step
    if report.trainer_state is not run.report.trainer_state:
        run.state_since = world.now
    run.report = report
    if run.phase.advance(report.step, report.policy_entropy):
        world.record("info", "phase_changed", run=run.run_id, phase=run.phase.phase.name, step=report.step)
    if advanced:
        promoting.begin(world, run)
    delivering.reported(world, run)
    colocation.follow(world, run)
    world.dirty = True
    return None


def update(world: World, run: Run, updates: tuple[RolloutUpdate, ...]) -> Refusal | None:
    """Apply each update that names an unfinished rollout; unknown and finished ones are ignored (they may just have ended)."""
    for one in updates:
        seconds = one.deadline_seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0.0):
            problem = f"is {seconds} for {one.rollout_id!r}; must be a finite number of seconds from now, 0 for none"
            return invalid("deadline_seconds", problem)
    for one in updates:
        rollout = run.rollouts.get(one.rollout_id)
        if rollout is None or rollout.state is RolloutState.FINISHED:
            continue
        if one.deadline_seconds is not None:
            _set_deadline(world, rollout, one.deadline_seconds)
        if one.needed_by_step is not None:
            _set_step(world, rollout, one.needed_by_step)
        if one.rollout_class is not None:
            promoting.settle(world, run, one.rollout_id)
            lifecycle.change_class(world, rollout, one.rollout_class, "updated by the trainer")
    if any(one.needed_by_step is not None for one in updates):
        promoting.begin(world, run)
    budgeting.enforce(world, run)  # running work may have changed its class, and classes have ceilings
    return None


def end_run(world: World, run: Run) -> None:
    """What still goes on ends; its record says how many rollouts that are, though most end with the next ticks."""
    ending_rollouts = 0 if run.ended else sum([lifecycle.goes_on(one) for one in run.rollouts.values()])
    watch.end_run(world, run)
    ending.begin(world, run)
    delivering.settle(world, run)
    publishing.orphan(world, run, f"run {run.run_id!r} has ended", pushed_only=False)
    colocation.follow(world, run)
    world.record("info", RUN_ENDED, run=run.run_id, rollouts=ending_rollouts)


def _set_deadline(world: World, rollout: Rollout, seconds: float) -> None:
    rollout.deadline_at = world.now + seconds if seconds > 0.0 else None
    lifecycle.arm_timer(world, rollout)
    entry = rollout.entry
    if entry is None or entry.backlog is None:
        return
    if entry.held:
        entry.deadline_at = rollout.deadline_at  # its lane is chosen when the hold ends
        return
    entry.backlog.hold(entry, world.next_sequence(), Gate.HELD_FOR_PREFIX)  # leave the old lane before the key changes
    entry.deadline_at = rollout.deadline_at
    queueing.order(world, entry)


def _set_step(world: World, rollout: Rollout, step: int) -> None:
    run = rollout.run
    old = run.by_step.get(rollout.needed_by_step) if rollout.needed_by_step is not None else None
    if old is not None:
        old.discard(rollout.rollout_id)
        if not old and rollout.needed_by_step is not None:
            del run.by_step[rollout.needed_by_step]
    rollout.needed_by_step = step
    lifecycle.note_step(world, rollout)


def _check_settings(settings: RunSettings) -> Refusal | None:
    for name in ("prefix", "critical", "waiting", "diversity", "cost"):
        weight = getattr(settings.weights, name)
        if weight is not None and not (math.isfinite(weight) and weight >= 0.0):
            return invalid(f"weights.{name}", f"is {weight}; must be a finite number, 0 or more")
    if not (math.isfinite(settings.fairness_weight) and settings.fairness_weight > 0.0):
        return invalid("fairness_weight", f"is {settings.fairness_weight}; must be a finite number above 0")
    if any(not (math.isfinite(share) and share >= 0.0) for share in settings.target_mix.values()):
        return invalid("target_mix", "holds a share that is negative or not finite")
    if settings.target_mix and not sum(settings.target_mix.values()) > 0.0:
        return invalid("target_mix", "sums to 0; give at least one stratum a share")
    for name in ("queue_ttl_seconds", "disconnect_grace_seconds", "undelivered_ttl_seconds", "mix_hold_seconds"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value >= 0.0):
            return invalid(name, f"is {value}; must be a finite number of seconds, 0 for the default")
    for name in (
        "min_version",
        "max_staleness",
        "max_partial_span",
        "batch_samples",
        "slice_tokens",
        "prefix_ttl_versions",
    ):
        number = getattr(settings, name)
        if number is not None and number < 0:
            return invalid(name, f"is {number}; must be 0 or more")
    return None


def _check_report(run: Run, report: StepReport) -> Refusal | None:
    if report.step < run.report.step:
        return Refusal(
            Code.FAILED_PRECONDITION,
            "STEP_BACKWARDS",
            f"step: {report.step} is below step {run.report.step} of run {run.run_id!r}; a restarted trainer uses a higher "
            "epoch, or another run",
            (("step", "goes backwards"),),
        )
    for name in ("consume_samples_per_second", "consume_tokens_per_second", "update_period_seconds"):
        value = getattr(report, name)
        if not (math.isfinite(value) and value >= 0.0):
            return invalid(name, f"is {value}; must be a finite number, 0 when not reported")
    if report.policy_entropy is not None and not math.isfinite(report.policy_entropy):
        return invalid("policy_entropy", f"is {report.policy_entropy}; must be finite")
    if report.buffer_fill is not None and not 0.0 <= report.buffer_fill <= 1.0:
        return invalid("buffer_fill", f"is {report.buffer_fill}; must be 0 to 1")
    return None
