"""Turns the service's own account of the run, and the trainer's ledger, into views for the screen.

What this module does not know: how a view looks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from rolloutd import v1
from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.demo_ledger import Ledger
from rolloutd.bench.demo_screen import Row, Screen, View
from rolloutd.bench.demo_trainer import Trainer
from rolloutd.bench.metrics import StepRecord
from rolloutd.bench.workload import Kind

INTERVAL_SECONDS = 0.5
_CLASSES = {
    Kind.CRITICAL: v1.ROLLOUT_CLASS_CRITICAL,
    Kind.REUSABLE: v1.ROLLOUT_CLASS_REUSABLE,
    Kind.BACKGROUND: v1.ROLLOUT_CLASS_BACKGROUND,
}


class RunWatcher(Protocol):
    """What watching needs of `rolloutd.client.Client`."""

    def watch_run(self, interval_seconds: float = 1.0) -> AsyncIterator[v1.RunState]: ...


async def watch(
    client: RunWatcher, trainer: Trainer, ledger: Ledger, clock: SimClock, steps: int, screen: Screen
) -> None:
    """Show views, and a line that stays for each finished step, until cancelled or until the run is gone."""
    said = 0
    async for state in client.watch_run(INTERVAL_SECONDS):
        for number, step in enumerate(trainer.steps[said:], start=said + 1):
            screen.say(step_line(number, step))
        said = len(trainer.steps)
        screen.show(view_of(state, trainer, ledger, clock, steps))


def step_line(number: int, step: StepRecord) -> str:
    """A finished step in one line."""
    took_seconds = step.critical_done_seconds - step.started_seconds
    against = (
        ""
        if step.bound_seconds is None
        else f" ({step.critical_over_bound:.2f} x the bound of {step.bound_seconds:.0f} s)"
    )
    trained_seconds = step.training_ended_seconds - step.training_started_seconds
    return f"  step {number}: critical rollouts back after {took_seconds:.0f} s{against}, trained for {trained_seconds:.0f} s"


def view_of(state: v1.RunState, trainer: Trainer, ledger: Ledger, clock: SimClock, steps: int) -> View:
    """One moment."""
    queued, running = _counts(state)
    status = trainer.status
    critical_all = ledger.of(Kind.CRITICAL, status.step)
    return View(
        simulated_seconds=clock.now(),
        time_scale=clock.time_scale,
        step=status.step,
        steps=steps,
        doing=status.doing,
        critical_done=critical_all - ledger.pending(Kind.CRITICAL, step=status.step),
        critical_all=critical_all,
        running=sum(running.values()),
        ceiling=status.ceiling,
        rows={
            kind: Row(
                submitted=ledger.submitted[kind],
                queued=queued[kind],
                running=running[kind],
                delivered=ledger.delivered[kind],
                cancelled=ledger.withdrawn[kind],
            )
            for kind in Kind
        },
    )


def _counts(state: v1.RunState) -> tuple[dict[Kind, int], dict[Kind, int]]:
    """Queued and running rollouts by kind. Reward queries are of the critical class and have a row of their own."""
    queued, running = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
    for of_class in state.classes:
        for kind, rollout_class in _CLASSES.items():
            if of_class.rollout_class == rollout_class:
                queued[kind], running[kind] = of_class.queued_rollouts, of_class.running_rollouts
    for of_task in state.tasks:
        if of_task.task_type == v1.TASK_TYPE_REWARD:
            queued[Kind.REWARD], running[Kind.REWARD] = of_task.queued_rollouts, of_task.running_rollouts
            queued[Kind.CRITICAL] -= of_task.queued_rollouts
            running[Kind.CRITICAL] -= of_task.running_rollouts
    return queued, running
