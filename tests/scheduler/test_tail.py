"""The last rollouts of a step: how many others run beside them."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.scheduler.decode_curve import ENOUGH, DecodeCurve
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import Gate, TrainerState
from rolloutd.scheduler.tail import Awaited
from tests.scheduler.kit import BACKGROUND, REUSABLE, Bench, config, engines, spec, specs

BASE_SECONDS, GROWTH_SECONDS = 0.007, 0.000045  # the flat curve of Q1 to Q5


def step_seconds(batch: int) -> float:
    return BASE_SECONDS + GROWTH_SECONDS * batch


def teach(bench: Bench, *engine_ids: str) -> None:
    """These engines have shown their curve."""
    for engine_id in engine_ids:
        for batch in (1, 4, 16):
            for _ in range(ENOUGH):
                bench.core._world.engines[engine_id].curve.note(batch, step_seconds(batch))


def waiting(*critical: RolloutSpec, count: int = 1, slots: int = 16, known: bool = True, **policy: Any) -> Bench:
    """The trainer waits for critical rollouts that run, one on each engine."""
    bench = Bench(*engines(count, slots), settings=config(policy=policy, queue={"reserved_short_slots": 0}))
    if known:
        teach(bench, *(f"e{index}" for index in range(count)))
    bench.step(1, TrainerState.WAITING)
    bench.run(*(critical or (spec("last", max_new_tokens=2_000),)))
    return bench


def beside(bench: Bench, name: str = "b") -> list[str]:
    """Engines that run rollouts of that name, one each."""
    return [one.engine_id for rollout_id, one in bench.live.items() if rollout_id.startswith(name)]


def test_a_curve_is_the_line_through_what_was_seen() -> None:
    curve = DecodeCurve()
    for batch in (1, 3, 12, 200):
        for _ in range(ENOUGH):
            assert curve.line() is None or batch > 1
            curve.note(batch, step_seconds(batch))
    line = curve.line()
    assert line is not None and line == pytest.approx((BASE_SECONDS, GROWTH_SECONDS))


def test_a_curve_is_not_known_from_one_size_of_batch_nor_forgotten_when_that_lasts() -> None:
    curve = DecodeCurve()
    for _ in range(1_000):
        curve.note(16, step_seconds(16))
    assert curve.line() is None
    for _ in range(ENOUGH):
        curve.note(2, step_seconds(2))
    for _ in range(1_000):
        curve.note(16, step_seconds(16))
    assert curve.line() == pytest.approx((BASE_SECONDS, GROWTH_SECONDS))


def test_an_engine_that_is_quicker_in_larger_batches_counts_as_flat() -> None:
    curve = DecodeCurve()
    for batch in (1, 16):
        for _ in range(ENOUGH):
            curve.note(batch, 0.02 - 0.001 * batch)
    line = curve.line()
    assert line is not None and line[1] == 0.0 and line[0] > 0.0


def test_an_engine_learns_its_curve_from_reports_between_which_its_batch_was_the_same() -> None:
    bench = Bench(*engines(1, 4))
    bench.run(*specs("a", 4, max_new_tokens=2_000))
    running = [f"a{index}" for index in range(4)]
    written = dict.fromkeys(running, 1)
    curve = bench.core._world.engines["e0"].curve

    def write_on(seconds: float) -> None:
        bench.now += seconds
        for rollout_id in running:
            written[rollout_id] += 10
            bench.write(rollout_id, written[rollout_id])

    for _ in range(ENOUGH):
        write_on(0.4)
    bench.now += 1.0
    while len(running) > 1:
        bench.finish(running[-1], written[running.pop()])
    write_on(9.0)  # spans the change: says nothing of either batch
    for _ in range(ENOUGH):
        write_on(0.1)
    assert curve.line() == pytest.approx((0.0, 0.01))


def test_lower_classes_stay_away_while_a_curve_is_not_known() -> None:
    bench = waiting(known=False, cold_start_tail_slowdown=1.0)
    bench.submit(*specs("b", 4, BACKGROUND))
    assert not bench.pass_time(3.0)
    assert bench.core._world.gates[Gate.CRITICAL_TAIL]
    bench.finish("last")
    assert len(bench.tick()) == 4


@pytest.mark.parametrize(("slowdown", "others"), [(0.0, 0), (0.02, 3), (0.05, 7)])
def test_as_many_run_beside_the_last_rollout_as_its_slowdown_allows(slowdown: float, others: int) -> None:
    """0.02 x (7 + 0.045) ms are three times 0.045 ms and a little."""
    bench = waiting(cold_start_tail_slowdown=slowdown)
    bench.submit(*specs("b", 12, BACKGROUND))
    bench.pass_time(3.0)
    assert len(beside(bench)) == others


def test_prompts_that_stall_the_engine_count_against_what_they_write() -> None:
    bench = waiting(cold_start_tail_slowdown=0.05)
    bench.core._world.engines["e0"].prefill_tokens_per_second = 20_000.0
    # 2,000 tokens stall it for 0.1 s, over at most 100 tokens of output: 1 ms a token, and 0.35 ms are allowed.
    bench.submit(*specs("b", 12, BACKGROUND, tokens=2_000, max_new_tokens=100))
    bench.pass_time(3.0)
    assert not beside(bench)


def test_an_engine_whose_critical_rollouts_end_long_before_the_step_may_be_filled() -> None:
    two = (spec("short", max_new_tokens=40), spec("long", max_new_tokens=3_000))
    bench = waiting(*two, count=2)
    free = bench.live["short"].engine_id
    assert free != bench.live["long"].engine_id
    bench.submit(*specs("b", 12, BACKGROUND))
    bench.pass_time(0.5, 0.1)
    assert beside(bench) == [free] * 12
    careful = waiting(*two, count=2, tail_doubt=0.0)
    careful.submit(*specs("b", 12, BACKGROUND))
    careful.pass_time(0.5, 0.1)
    assert not beside(careful)


def test_slack_is_what_lies_between_ends_and_never_below_nothing() -> None:
    step = Awaited()
    step.note("early", 100.0)
    step.note("late", 1_000.0)
    assert step.slack("early", 0.0, 2.0) == pytest.approx(4.0)
    assert step.slack("late", 0.0, 2.0) == 0.0
    assert step.slack("early", 50.0, 2.0) == pytest.approx(8.5)


def test_what_the_next_step_needs_may_have_the_room_that_is_left() -> None:
    bench = waiting()
    bench.submit(*specs("next", 8, REUSABLE, needed_by_step=2), *specs("later", 4, REUSABLE, needed_by_step=3))
    bench.pass_time(3.0)
    assert len(beside(bench, "next")) == 8 and not beside(bench, "later")


def test_background_leaves_room_to_what_the_next_step_needs_although_the_trainer_trains() -> None:
    bench = waiting()
    bench.run(*specs("next", 2, REUSABLE, needed_by_step=2, max_new_tokens=2_000))
    bench.finish("last")
    bench.step(1, TrainerState.TRAINING)
    bench.submit(*specs("b", 8, BACKGROUND))
    bench.pass_time(3.0)
    assert not beside(bench)
    bench.finish("next0")
    bench.finish("next1")
    bench.tick()
    assert len(beside(bench)) == 8
