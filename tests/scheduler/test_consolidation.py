"""The last rollouts of a step move to where it ends sooner: when that pays, when not, and what becomes of what they wrote."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.scheduler.consolidation import MOST_MOVES
from rolloutd.scheduler.decode_curve import ENOUGH
from rolloutd.scheduler.events import DrainEngine
from rolloutd.scheduler.states import OnPreempt, TrainerState, UpdateMode
from tests.scheduler.kit import REUSABLE, Bench, config, engines, spec, specs

MOST = 16_000  # tokens; of unknown length, so some 2,000 are expected
WRITTEN = 100
STEEP_SECONDS, FLAT_SECONDS = 0.001, 0.000045  # that one more in a batch adds to a step of 7 ms


def taught(count: int, growth_seconds: float, on: bool = True, slowdowns: tuple[int, ...] = (1, 1, 1)) -> Bench:
    """Empty engines that have shown their speeds."""
    settings = config(preempt={"consolidate": on}, queue={"reserved_short_slots": 0})
    bench = Bench(*engines(count, 16, context_tokens=32_768, kv_capacity_tokens=1 << 18), settings=settings)
    for one, slowdown in zip(bench.core._world.engines.values(), slowdowns, strict=False):
        one.prefill_tokens_per_second = 20_000.0
        for batch in (1, 4, 16):
            for _ in range(ENOUGH):
                one.curve.note(batch, slowdown * (0.007 + growth_seconds * batch))
    return bench


def uneven(growth_seconds: float = STEEP_SECONDS, on: bool = True, count: int = 12, **fields: Any) -> Bench:
    """The trainer waits for half of them, which run on one engine, and for one on the other."""
    bench = taught(2, growth_seconds, on)
    bench.step(1, TrainerState.WAITING)
    bench.run(*specs("a", count, max_new_tokens=MOST, **fields))
    for rollout_id in list(bench.live):
        bench.write(rollout_id, WRITTEN)
    for rollout_id in bench.running_on("e1")[1:]:
        bench.finish(rollout_id, WRITTEN)
    assert len(bench.running_on("e0")) == count // 2 and len(bench.running_on("e1")) == 1
    return bench


def slow_and_quick(slowdown: int) -> tuple[Bench, str]:
    """The trainer waits for the one that runs on the slow engine, e0; the quick one, e1, is free."""
    bench = taught(2, FLAT_SECONDS, slowdowns=(slowdown, 1))
    bench.step(1, TrainerState.WAITING)
    bench.run(*specs("a", 2, max_new_tokens=MOST))
    (slow,), (quick,) = bench.running_on("e0"), bench.running_on("e1")
    for rollout_id in (slow, quick):
        bench.write(rollout_id, WRITTEN)
    bench.finish(quick, WRITTEN)
    return bench, slow


def test_they_move_to_the_engine_with_fewer_and_lose_nothing() -> None:
    bench = uneven()
    bench.tick(1.0)
    moving = bench.leaving()
    assert 1 < len(moving) < 4 and moving < set(bench.running_on("e0"))
    bench.stop_aborted(WRITTEN)
    sent = bench.tick()
    assert {one.rollout_id for one in sent} == moving
    assert {(one.engine_id, one.max_new_tokens) for one in sent} == {("e1", MOST - WRITTEN)}
    for one in sent:
        bench.write(one.rollout_id, 1)
        bench.finish(one.rollout_id, 50)
        assert bench.whole(one.rollout_id) and bench.result(one.rollout_id).generated_tokens == WRITTEN + 50


def test_the_last_one_leaves_a_slow_engine_for_a_quick_one_that_is_free() -> None:
    bench, slow = slow_and_quick(2)
    bench.tick(1.0)
    assert bench.leaving() == {slow}
    bench.stopped(slow, WRITTEN)
    (sent,) = bench.tick()
    assert (sent.rollout_id, sent.engine_id) == (slow, "e1")
    bench.write(slow, WRITTEN)
    bench.pass_time(3.0)
    assert not bench.leaving()


def test_nobody_moves_while_others_are_on_their_way_nor_without_a_reason_afterwards() -> None:
    bench = uneven()
    bench.tick(1.0)
    moving = bench.leaving()
    bench.pass_time(2.0)
    assert bench.leaving() == moving
    bench.stop_aborted(WRITTEN)
    for one in bench.tick():
        bench.write(one.rollout_id, WRITTEN)
    bench.pass_time(5.0)
    assert not bench.leaving()


def test_each_moves_so_many_times_at_most() -> None:
    bench = uneven(on_preempt=OnPreempt.NEVER)
    bench.run(spec("mover", max_new_tokens=MOST))
    bench.write("mover", WRITTEN)
    for turn in range(MOST_MOVES + 1):
        bench.run(*specs(f"late{turn}-", 8, max_new_tokens=MOST, on_preempt=OnPreempt.NEVER))
        here = bench.live["mover"].engine_id
        for rollout_id in bench.running_on("e1" if here == "e0" else "e0"):
            bench.finish(rollout_id, 2 * WRITTEN)
        assert len(bench.running_on(here)) > 3
        bench.tick(1.0)
        assert bench.leaving() == ({"mover"} if turn < MOST_MOVES else set())
        if turn < MOST_MOVES:
            bench.stopped("mover", WRITTEN)
            (sent,) = bench.tick()
            assert sent.engine_id != here
            bench.write("mover", WRITTEN)


@pytest.mark.parametrize(
    "unlike",
    [
        {"growth_seconds": FLAT_SECONDS},
        {"on": False},
        {"on_preempt": OnPreempt.RESTART},
        {"deadline_seconds": 500.0},
        {"sampling": {"frequency_penalty": 0.5}},
    ],
)
def test_not_where_it_does_not_pay_or_is_switched_off_or_would_lose_something(unlike: dict[str, Any]) -> None:
    bench = uneven(**unlike)
    bench.pass_time(3.0)
    assert not bench.leaving()


def test_not_while_the_trainer_trains_or_critical_work_waits() -> None:
    bench = uneven()
    bench.step(1, TrainerState.TRAINING)
    bench.pass_time(3.0)
    assert not bench.leaving()
    bench = uneven()
    bench.submit(*specs("b", 40, max_new_tokens=MOST))
    bench.pass_time(3.0)
    assert not bench.leaving()


def test_it_goes_anywhere_when_its_engine_takes_nothing_more() -> None:
    bench = uneven()
    bench.tick(1.0)
    moving = bench.leaving()
    bench.do(DrainEngine("e1"))
    bench.stop_aborted(WRITTEN)
    assert {one.rollout_id for one in bench.tick()} == moving
    assert moving <= set(bench.running_on("e0"))


def test_who_was_on_its_way_when_a_version_under_drain_came_starts_again() -> None:
    bench = uneven(count=6)
    bench.tick(1.0)
    (mover,) = bench.leaving()
    bench.publish(1, mode=UpdateMode.DRAIN)
    bench.stopped(mover, WRITTEN)
    for other in [one for one in bench.live if one != mover]:
        bench.finish(other, WRITTEN + 1)
    bench.finish_updates()
    (again,) = bench.tick()
    assert (again.rollout_id, again.max_new_tokens) == (mover, MOST)


def test_a_slot_that_others_wait_for_is_not_moved_to() -> None:
    """It was freed since the last pass, and the next one gives it away."""
    bench, _ = slow_and_quick(3)
    bench.run(*specs("b", 60, REUSABLE, max_new_tokens=2000))
    while bench.core.wants_tick or len(bench.running_on("e1")) < 16:
        bench.tick(0.1)
    for _ in range(5):
        bench.finish(bench.running_on("e1")[0], WRITTEN)
        (sent,) = bench.tick(1.0)
        assert sent.engine_id == "e1" and not bench.leaving()
        bench.write(sent.rollout_id, 1)
