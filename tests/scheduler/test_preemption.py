"""Room for critical work: who is interrupted, who is not, and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rolloutd.scheduler.actions import Abort
from rolloutd.scheduler.events import JoinEngine
from rolloutd.scheduler.spec import Quota
from rolloutd.scheduler.states import AbortReason, OnPreempt, Origin, RolloutState, TaskType
from tests.scheduler.kit import BACKGROUND, CRITICAL, REUSABLE, Bench, config, engine, engines, spec, specs

MIN_RUN_SECONDS = 2.0
COOL_DOWN_SECONDS = 1.0


def filled(count: int = 4, rollout_class: Any = BACKGROUND, **fields: Any) -> Bench:
    """One engine full of lower work that has run long enough to be interrupted."""
    bench = Bench(engine(slots=count))
    bench.run(*specs("b", count, rollout_class, **fields))
    bench.now += MIN_RUN_SECONDS
    return bench


def test_with_all_slots_taken_critical_work_preempts_background() -> None:
    bench = filled()
    bench.submit(spec("urgent"))
    bench.tick()
    (victim,) = bench.leaving()
    assert [action.reason for action in bench.said if isinstance(action, Abort)] == [AbortReason.PREEMPT]
    bench.stopped(victim, 3)
    assert [one.rollout_id for one in bench.tick()] == ["urgent"]
    assert bench.core.statistics().preempted_total == 1


def test_without_preemption_the_next_freed_slot_is_critical() -> None:
    bench = Bench(engine(slots=4), settings=config(preempt={"enabled": False}))
    bench.run(*specs("b", 4, BACKGROUND))
    bench.submit(*specs("b-more", 4, BACKGROUND))
    bench.pass_time(10.0)
    bench.submit(spec("urgent"))
    assert not bench.pass_time(5.0) and not bench.leaving()
    bench.finish("b0")
    assert [one.rollout_id for one in bench.tick()] == ["urgent"]


def test_background_goes_before_reusable_and_who_has_written_least_first() -> None:
    bench = Bench(engine(slots=4), settings=config(preempt={"cool_down_seconds": 0.0}))
    bench.run(*specs("u", 2, REUSABLE), *specs("b", 2, BACKGROUND))
    bench.write("b0", 9)
    bench.write("u1", 9)
    bench.now += MIN_RUN_SECONDS
    order = []
    for index in range(4):
        bench.submit(spec(f"c{index}"))
        bench.tick()
        order += bench.stop_aborted(1)
        bench.tick()
    assert order == ["b1", "b0", "u0", "u1"]


def test_critical_work_is_never_preempted_and_only_critical_work_preempts() -> None:
    bench = filled(rollout_class=CRITICAL)
    bench.submit(spec("urgent"))
    bench.pass_time(5.0)
    assert not bench.leaving()
    bench = filled()
    bench.submit(spec("reusable", rollout_class=REUSABLE))
    bench.pass_time(5.0)
    assert not bench.leaving()


def test_at_most_as_many_go_as_wait() -> None:
    bench = filled(8)
    bench.submit(*specs("c", 3))
    bench.pass_time(9.0)  # many rounds, and no engine answers
    assert len(bench.leaving()) == 3
    bench.submit(*specs("d", 2))
    bench.pass_time(0.9, 0.3)
    assert len(bench.leaving()) == 5


def test_a_minimum_run_time() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("b", rollout_class=BACKGROUND))
    bench.submit(spec("urgent"))
    bench.pass_time(MIN_RUN_SECONDS - 0.5, 0.25)
    assert not bench.leaving()
    bench.pass_time(1.5, 0.25)
    assert bench.leaving() == {"b"}


def test_a_cool_down_between_rounds_of_a_pool() -> None:
    bench = Bench(*engines(1, 2), engine("r0", 2, pool="reward"))
    bench.run(*specs("b", 2, BACKGROUND), *specs("w", 2, BACKGROUND, pool="reward"))
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("c0"))
    bench.tick()
    bench.submit(spec("c1"), spec("c2", pool="reward"))
    bench.tick(COOL_DOWN_SECONDS / 2)
    leaving = Counter(rollout_id[0] for rollout_id in bench.leaving())
    assert leaving == {"b": 1, "w": 1}, "the other pool cools down by itself"
    bench.pass_time(COOL_DOWN_SECONDS)
    assert Counter(rollout_id[0] for rollout_id in bench.leaving()) == {"b": 2, "w": 1}


def test_a_rollout_is_preempted_a_limited_number_of_times() -> None:
    bench = Bench(engine(slots=1), settings=config(preempt={"max_per_rollout": 2}))
    bench.run(spec("b", rollout_class=BACKGROUND, max_new_tokens=100))
    for turn in range(2):
        bench.now += 3.0
        bench.submit(spec(f"c{turn}"))
        bench.tick()
        bench.stopped("b", 5)
        bench.tick()
        bench.finish(f"c{turn}")
        bench.tick()
        bench.write("b", 1)
    bench.now += 3.0
    bench.submit(spec("c2"))
    bench.pass_time(5.0)
    assert not bench.leaving() and bench.view("b").preemptions == 2
    bench.finish("b", 90)
    assert bench.whole("b") and bench.result("b").generated_tokens == 100


@pytest.mark.parametrize("way", ["on_preempt", "current step"])
def test_what_is_never_preempted(way: str) -> None:
    fields = {"on_preempt": OnPreempt.NEVER} if way == "on_preempt" else {"needed_by_step": 5}
    bench = Bench(engine(slots=2))
    bench.run(*specs("b", 2, BACKGROUND, **fields))
    if way == "current step":
        bench.step(5)  # it makes them critical, too
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("urgent"))
    bench.pass_time(5.0)
    assert not bench.leaving()


def test_an_evaluation_with_a_deadline_preempts_at_once() -> None:
    bench = Bench(engine(slots=2))
    bench.run(*specs("b", 2, BACKGROUND))
    bench.submit(spec("patient"), spec("eval", origin=Origin.EVALUATION, deadline_seconds=20.0))
    bench.tick(0.1)
    assert len(bench.leaving()) == 1, "no minimum run time, no cool-down, and only for those that ask for it"
    bench.submit(spec("eval2", origin=Origin.EVALUATION, deadline_seconds=20.0))
    bench.tick(0.1)
    assert len(bench.leaving()) == 2
    bench.submit(spec("no-deadline", origin=Origin.EVALUATION))
    bench.tick(0.1)
    assert len(bench.leaving()) == 2


# floors of the victims


@pytest.mark.parametrize("of", ["class", "task", "run"])
def test_victims_keep_their_floors_over_several_rounds(of: str) -> None:
    bench = Bench(engine(slots=6))
    task = TaskType.REPLAY if of == "task" else TaskType.GENERATION
    if of == "class":
        bench.budget(classes={BACKGROUND: Quota(floor_rollouts=2)})
    elif of == "task":
        bench.budget(tasks={TaskType.REPLAY: Quota(floor_rollouts=2)})
    else:
        bench.configure(floor_rollouts=2)
    bench.submit(*specs("b", 6, BACKGROUND, task_type=task))
    bench.tick()
    bench.now += MIN_RUN_SECONDS
    run = "other" if of == "run" else "run"
    for turn in range(4):  # nobody answers: those on their way out are no longer there
        bench.submit(*[spec(f"c{turn}-{index}") for index in range(2)], run=run)
        bench.pass_time(1.1, 0.55)
    assert len(bench.leaving()) == 4
    bench.stop_aborted()
    bench.tick()
    kept = sum(rollout_id.startswith("b") for rollout_id in bench.live)
    assert kept >= 2 if of == "run" else kept == 2, "another run has its fair share beside its floor"


def test_two_runs_are_each_other_s_victims_down_to_their_floor_in_one_round() -> None:
    bench = Bench(engine(slots=6))
    bench.configure("low", floor_rollouts=4)
    bench.submit(*specs("b", 6, BACKGROUND), run="low")
    bench.tick()
    bench.now += MIN_RUN_SECONDS
    bench.submit(*specs("c", 6))
    bench.tick()
    assert len(bench.leaving()) == 2


# where room would help


def test_full_engines_are_preempted_although_another_pool_has_room() -> None:
    bench = Bench(engine("e0", 1), engine("r0", 4, pool="reward"), engine("x0", 4, run_id="other"))
    bench.run(spec("b", rollout_class=BACKGROUND))
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("urgent"))
    bench.tick()
    assert bench.leaving() == {"b"}


def test_nobody_is_preempted_on_an_engine_that_would_not_serve_the_waiting_run() -> None:
    bench = Bench(engine("mine", 1, run_id="run"), engine("theirs", 1, run_id="other"))
    bench.submit(spec("b", rollout_class=BACKGROUND), run="other")
    bench.run(spec("c"))
    bench.tick(MIN_RUN_SECONDS)
    bench.submit(spec("urgent"))
    bench.pass_time(5.0)
    assert not bench.leaving()


def test_nobody_is_preempted_for_a_ceiling_that_another_run_fills() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(max_rollouts=1)
    bench.run(spec("c"))
    bench.submit(*specs("b", 3, BACKGROUND), run="other")
    bench.tick()
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("urgent"))
    bench.pass_time(5.0)
    assert not bench.leaving()


def test_own_background_gives_way_under_the_runs_own_ceiling() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(max_rollouts=1)
    bench.run(spec("b", rollout_class=BACKGROUND))
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("urgent"))
    bench.tick()
    assert bench.leaving() == {"b"}


def test_memory_is_room_too() -> None:
    bench = Bench(engine(slots=8, kv_capacity_tokens=200))
    bench.run(*specs("b", 2, BACKGROUND, tokens=80))  # 96 each
    bench.now += MIN_RUN_SECONDS
    bench.submit(spec("urgent", 80))
    bench.tick()
    assert len(bench.leaving()) == 1


def test_a_victim_of_a_restarted_engine_is_not_counted_as_leaving_for_ever() -> None:
    bench = filled(2)
    bench.submit(*specs("c", 2))
    bench.tick()
    assert len(bench.leaving()) == 2
    bench.do(JoinEngine(engine(slots=2, incarnation="2")))
    assert {one.rollout_id for one in bench.tick()} == {"c0", "c1"}
    assert bench.state("b0") is RolloutState.QUEUED
