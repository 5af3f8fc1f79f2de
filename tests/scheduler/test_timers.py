"""Timers against a sorted list: order, cancelling, and what cancelled ones cost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler.timers import REBUILD_MINIMUM, Timer, TimerKind, Timers

DUES = st.floats(0.0, 5.0) | st.integers(0, 5).map(float) | st.floats(0.0, 1e18) | st.just(math.inf)
STEPS = st.lists(st.tuples(st.just("add"), DUES) | st.tuples(st.sampled_from(("cancel", "pass")), st.floats(0.0, 3.0)))


@given(steps=STEPS)
def test_they_fire_in_order_of_time_and_of_making(steps: list[tuple[str, float]]) -> None:
    timers, now = Timers(), 0.0
    kept: list[tuple[float, int, Timer]] = []
    for number, (step, value) in enumerate(steps):
        if step == "add":
            kept.append((value, number, timers.add(value, TimerKind.ROLLOUT, number)))
        elif step == "cancel" and kept:
            _, _, timer = kept.pop(int(value * 1000) % len(kept))
            timers.cancel(timer)
            timers.cancel(timer)  # again: no effect
        elif step == "pass":
            now += value
            due = sorted(item[:2] for item in kept if item[0] <= now)
            assert [timers.pop_due(now) for _ in due] == [(TimerKind.ROLLOUT, subject) for _, subject in due]
            assert timers.pop_due(now) is None
            kept = [item for item in kept if item[0] > now]
        assert timers.next_due() == min((item[0] for item in kept), default=math.inf)
        assert len(timers) == len(kept) == len(timers.live())


def test_what_was_taken_back_keeps_no_memory() -> None:
    timers = Timers()
    timers.add(0.0, TimerKind.HOUSEKEEPING, True)
    assert timers.next_due() == 0.0  # the first second is in the heap now
    for number in range(10 * REBUILD_MINIMUM):
        timers.cancel(timers.add(0.5, TimerKind.ROLLOUT, number))
        timers.cancel(timers.add(number + 1.0, TimerKind.ROLLOUT, number))
    assert len(timers) == 1
    assert len(timers._near) <= 2 * REBUILD_MINIMUM and len(timers._seconds) <= 2 * REBUILD_MINIMUM
    assert not timers._later
