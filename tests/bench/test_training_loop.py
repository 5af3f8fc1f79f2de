"""Q5: what a training loop waits for, what runs beside it, and its bound."""

from __future__ import annotations

import random

import pytest

from rolloutd.bench import training_loop
from rolloutd.bench.arms import ARMS
from rolloutd.bench.bounds import EngineShape, workload_bound
from rolloutd.bench.simulated import UPDATE_SECONDS, Epochs
from rolloutd.bench.training_loop import TRAIN_SECONDS, TrainingLoop, loop_bound_seconds, loop_figures
from rolloutd.bench.virtual_core import Core
from rolloutd.bench.workload import WorkClass
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.machine import Scheduler

MACHINE = MachineConfig(slots=64, kv_tokens=800_000, write_tokens=False, stream_interval=512)


def _core(arm: str) -> Core:
    return ARMS[arm]() if arm in ARMS else Scheduler(SchedulerConfig(), random.Random(0), 0.0)


def _loop(arm: str, *, steps: int, off: bool) -> tuple[TrainingLoop, Core]:
    core = _core(arm)
    loop = TrainingLoop(Epochs(core, [MACHINE] * 4), 0, 32_000, steps=steps, off=off)
    loop.run()
    return loop, core


@pytest.mark.parametrize("arm", ["rolloutd", "least-in-flight"])
def test_a_synchronous_step_waits_for_all_of_its_rollouts_trains_and_publishes(arm: str) -> None:
    loop, core = _loop(arm, steps=2, off=False)
    assert [len(served.record.records) for served in loop.steps] == [512, 512]
    assert all(served.over and not served.record.failed for served in loop.steps)
    assert loop.waits == loop.taken  # a step is submitted when the trainer begins to wait for it
    spent = sum(loop.waits) + 2 * (TRAIN_SECONDS + UPDATE_SECONDS)
    assert spent < loop.seconds < spent + 2.0  # the calls around an update take a moment
    assert len(loop.background) == 1
    figures = loop_figures(arm, "Q5", 0, loop, [MACHINE] * 4)
    assert figures.makespan_over_bound is not None and figures.makespan_over_bound > 1.0
    assert figures.idle_ratio is not None and figures.idle_ratio_least is not None
    assert 0.0 < figures.idle_ratio_least < figures.idle_ratio < 1.0
    prompts = [item.prompt_tokens for step in range(2) for item in loop.workload(step).items[::8]]
    assert figures.prefix_hit_ceiling == pytest.approx(
        7 / 8 * sum((tokens - 1) // 16 * 16 for tokens in prompts) / sum(prompts), abs=1e-4
    )
    assert figures.prefix_hit is not None and figures.prefix_hit <= figures.prefix_hit_ceiling
    if isinstance(core, Scheduler):
        core.check()


def test_one_step_off_the_next_step_goes_on_while_one_trains() -> None:
    loop, _ = _loop("fifo", steps=3, off=True)
    assert len(loop.steps) == 3
    first = loop.steps[1].record.records
    ahead = [
        one for one in first.values() if one.delivered_seconds is not None and one.delivered_seconds < loop.taken[0]
    ]
    assert ahead  # submitted with the step before, and partly done before that was
    assert loop.waits[1] < loop.taken[1] - TRAIN_SECONDS


def test_a_later_step_is_reusable_until_it_is_due_and_every_tenth_repeats() -> None:
    loop = TrainingLoop(Epochs(_core("fifo"), [MACHINE]), 0, 32_000, steps=20, off=True)
    assert {item.work_class for item in loop.workload(0).items} == {WorkClass.CRITICAL}
    assert {item.work_class for item in loop.workload(3).items} == {WorkClass.REUSABLE}
    assert {item.needed_by_step for item in loop.workload(9).items} == {9}
    assert [a.prompt_bytes for a in loop.workload(9).items] == [a.prompt_bytes for a in loop.workload(0).items]
    assert [a.output_tokens for a in loop.workload(9).items] != [a.output_tokens for a in loop.workload(0).items]
    assert loop.workload(8).items[0].prompt_bytes != loop.workload(0).items[0].prompt_bytes


def test_vectors_of_the_steps() -> None:
    """Seed 0: the first step is Q1's of that seed, the tenth has its prompts and other samples."""
    loop = TrainingLoop(Epochs(_core("fifo"), [MACHINE]), 0, 32_000, steps=10, off=False)
    drawn = [loop.workload(step) for step in (0, 1, 9)]
    drawn.append(training_loop.BACKGROUND.draw(0, 32_000, step=1))
    assert [
        (
            one.rollouts,
            sum(item.prompt_tokens for item in one.items),
            sum(item.output_tokens for item in one.items),
        )
        for one in drawn
    ] == [(512, 82184, 854260), (512, 77232, 933628), (512, 82184, 815057), (80, 26834, 539218)]


def test_a_trainer_may_leave_unsaid_which_step_needs_its_work_of_the_next() -> None:
    said, unsaid = (
        TrainingLoop(Epochs(_core("fifo"), [MACHINE]), 0, 32_000, steps=3, off=True, says_steps=says)
        for says in (True, False)
    )
    assert {(item.work_class, item.needed_by_step) for item in unsaid.workload(2).items} == {(WorkClass.REUSABLE, None)}
    assert unsaid.workload(0).items == said.workload(0).items, "the first step is waited for from the start"
    assert [item.output_tokens for item in unsaid.workload(2).items] == [
        item.output_tokens for item in said.workload(2).items
    ]


def test_the_bound_of_a_loop() -> None:
    shapes = [EngineShape(TimingModel(), 16, 200_000, 16, stalls=True)] * 8
    steps = [training_loop.Q1.draw(0, 32_000, step=step) for step in range(3)]
    bounds = [workload_bound(step, shapes) for step in steps]
    rest = TRAIN_SECONDS + UPDATE_SECONDS
    first, second, third = (one.seconds for one in bounds)
    assert loop_bound_seconds(steps, shapes, False) == pytest.approx(first + second + third + 3 * rest)
    # The second step is there from the start, the third once the second begins.
    begun = first + rest
    after_second = max(begun, second) + rest
    chain = max(after_second, begun + third) + rest
    work = sum(max(one.both_works_seconds, one.decode_work_seconds) for one in bounds)
    assert chain > work + rest and loop_bound_seconds(steps, shapes, True) == pytest.approx(chain)


def test_a_loop_one_step_off_whose_steps_fill_the_engines_is_bound_by_their_work() -> None:
    shapes = [EngineShape(TimingModel(), 16, 200_000, 16, stalls=True)]
    steps = [training_loop.Q1.draw(0, 32_000, step=step) for step in range(3)]
    bounds = [workload_bound(step, shapes) for step in steps]
    least = sum(one.seconds for one in bounds) + TRAIN_SECONDS + UPDATE_SECONDS
    assert all(one.seconds == max(one.both_works_seconds, one.decode_work_seconds) for one in bounds)
    assert loop_bound_seconds(steps, shapes, True) == pytest.approx(least)
