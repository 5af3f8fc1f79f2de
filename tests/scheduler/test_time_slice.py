"""Time slices: who gives way to what may take longer, when, and what becomes of what it wrote."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.scheduler.actions import Abort
from rolloutd.scheduler.states import AbortReason, CacheHandling, OnPreempt, RolloutClass, UpdateMode
from tests.scheduler.kit import BACKGROUND, Bench, config, engine, spec, specs

SLICE = 10
MOST = 100  # of unknown length: at worst all of it


def full(slots: int = 2, time_slice_tokens: int = SLICE, enabled: bool = True, **fields: Any) -> Bench:
    """An engine whose slots are all taken by rollouts a0, a1, ... that have begun to write."""
    bench = Bench(
        engine(slots=slots), settings=config(preempt={"time_slice_tokens": time_slice_tokens, "enabled": enabled})
    )
    assert len(bench.run(*specs("a", slots, max_new_tokens=MOST, **fields))) == slots
    for number in range(slots):
        bench.write(f"a{number}", 1)
    return bench


def half_written() -> Bench:
    """a0 has given way to b at the end of its slice, and waits; a1 and b run."""
    bench = full()
    bench.submit(spec("b", max_new_tokens=MOST))
    bench.write("a0", SLICE)
    bench.stopped("a0", SLICE)
    bench.tick()
    return bench


def slices(bench: Bench) -> int:
    return sum(isinstance(one, Abort) and one.reason is AbortReason.SLICE for one in bench.said)


def test_it_gives_way_at_the_end_of_its_slice_and_goes_on_where_it_was() -> None:
    bench = full()
    bench.submit(spec("b", max_new_tokens=MOST))
    bench.write("a0", SLICE - 1)
    assert not bench.leaving()
    bench.write("a0", SLICE)
    assert bench.leaving() == {"a0"}
    bench.stopped("a0", SLICE)
    assert [one.rollout_id for one in bench.tick()] == ["b"]
    bench.finish("b")
    (again,) = bench.tick()
    assert (again.rollout_id, again.max_new_tokens) == ("a0", MOST - SLICE)
    bench.finish("a0", 5)
    assert bench.whole("a0") and bench.result("a0").preemptions == 1


def test_its_next_slice_is_as_long() -> None:
    bench = full()
    bench.write("a0", SLICE + 1)
    bench.submit(*specs("b", 2, max_new_tokens=MOST))
    bench.write("a0", 2 * SLICE - 1)
    assert not bench.leaving()
    bench.write("a0", 2 * SLICE)
    assert bench.leaving() == {"a0"}


def test_not_for_what_will_be_shorter() -> None:
    bench = full()
    bench.submit(spec("b", max_new_tokens=MOST // 2))
    bench.write("a0", 2 * SLICE)
    assert not bench.leaving()


def test_not_when_nobody_waits_or_a_slot_is_free() -> None:
    bench = full()
    bench.write("a0", SLICE)
    assert not bench.leaving()
    bench.finish("a1")
    bench.submit(spec("b", max_new_tokens=MOST))
    bench.write("a0", 2 * SLICE)
    assert not bench.leaving()


def test_no_more_go_than_wait() -> None:
    bench = full(8)
    bench.submit(*specs("b", 3, max_new_tokens=MOST))
    for number in range(8):
        bench.write(f"a{number}", SLICE)
    assert len(bench.leaving()) == 3


@pytest.mark.parametrize("preempt", [{"time_slice_tokens": 0}, {"time_slice_tokens": SLICE, "enabled": False}])
def test_it_can_be_turned_off(preempt: dict[str, Any]) -> None:
    bench = full(**preempt)
    bench.submit(spec("b", max_new_tokens=MOST))
    bench.write("a0", MOST - 1)
    assert not bench.leaving()


@pytest.mark.parametrize(
    "fields",
    [
        {"on_preempt": OnPreempt.RESTART},
        {"on_preempt": OnPreempt.NEVER},
        {"text": "a text"},
        {"deadline_seconds": 500.0},
        {"sampling": {"frequency_penalty": 0.5}},
        {"rollout_class": BACKGROUND},
    ],
)
def test_who_would_lose_by_it_does_not_give_way(fields: dict[str, Any]) -> None:
    bench = full(**fields)
    bench.submit(spec("b", rollout_class=fields.get("rollout_class", RolloutClass.CRITICAL), max_new_tokens=MOST))
    bench.write("a0", 3 * SLICE)
    assert not slices(bench)


def test_a_version_under_drain_never_meets_half_of_a_rollout_again() -> None:
    """What was to end before the version starts again, once; after that nothing of this run is divided any more."""
    bench = half_written()
    bench.publish(1, mode=UpdateMode.DRAIN)
    for rollout_id in ("a1", "b"):
        bench.finish(rollout_id)
    bench.finish_updates()
    (again,) = bench.tick()
    assert (again.rollout_id, again.max_new_tokens) == ("a0", MOST)
    bench.write("a0", 1)
    bench.run(spec("c", max_new_tokens=MOST))
    bench.submit(spec("d", max_new_tokens=MOST))
    bench.write("a0", 2 * SLICE)
    assert not bench.leaving() and slices(bench) == 1
    bench.finish("a0", 2 * SLICE)
    assert {span.policy_version for span in bench.result("a0").spans} == {1}


def test_who_was_just_giving_way_when_a_version_under_drain_came_starts_again_too() -> None:
    bench = full()
    bench.submit(spec("b", max_new_tokens=MOST))
    bench.write("a0", SLICE)
    bench.publish(1, mode=UpdateMode.DRAIN)
    bench.stopped("a0", SLICE)
    bench.finish("a1")
    bench.finish_updates()
    started = {one.rollout_id: one.max_new_tokens for one in bench.tick()}
    assert started == {"a0": MOST, "b": MOST}


def test_other_modes_write_on_behind_what_was_written() -> None:
    bench = half_written()
    bench.published(1, mode=UpdateMode.RETRACT, cache=CacheHandling.FLUSH)
    bench.finish("b")
    (again,) = bench.tick()
    assert (again.rollout_id, again.max_new_tokens) == ("a0", MOST - SLICE)
