"""Order and waiting: classes, aging, promotion, short beside long work, runs beside each other, strata."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from rolloutd.scheduler.actions import Deliver, Finished
from rolloutd.scheduler.config import QueueSettings
from rolloutd.scheduler.events import UpdateRollouts
from rolloutd.scheduler.mix import OTHER, WINDOW_ROLLOUTS, Mix, Window
from rolloutd.scheduler.spec import RolloutUpdate, Weights
from rolloutd.scheduler.states import Code, Outcome, RolloutState, TaskType, TrainerState
from tests.scheduler.kit import (
    BACKGROUND,
    CONSUMER,
    CRITICAL,
    REUSABLE,
    RUN,
    Bench,
    config,
    engine,
    engines,
    ids,
    prompt,
    spec,
    specs,
)

QUEUE = QueueSettings()
NO_PREEMPTION = config(preempt={"enabled": False})


# nobody waits for ever


@pytest.mark.parametrize("weights", ["default", "waiting counts for nothing"])
def test_background_under_a_steady_overload_of_critical_work_starts_within_its_bound(weights: str) -> None:
    """Critical work at 110 % of capacity for ten minutes, and 20 rollouts that everything else is preferred to.

    The bound, from the configuration: after `overdue_seconds` every `overdue_turn`-th dispatch goes to who waits longest, so
    the k-th of them starts at most `overdue_seconds` + k x `overdue_turn` / (dispatches per second) after it came,
    and one service time later where all slots are taken.
    """
    slots, service_seconds, step_seconds = 8, 4.0, 1.0
    rate = slots / service_seconds
    settings = config(preempt={"enabled": False}, queue={"overdue_seconds": 60.0})
    bound = settings.queue.overdue_seconds + 20 * settings.queue.overdue_turn / rate + service_seconds
    assert bound < 150.0
    bench = Bench(engine(slots=slots), settings=settings)
    if weights != "default":
        bench.configure(weights=Weights(waiting=0.0))
    bench.submit(*specs("c-before", 4 * slots))
    due = {one.rollout_id: bench.now + service_seconds for one in bench.tick()}
    came = bench.now
    # Four of them critical, and so short that newer, longer critical work has the better score for ever.
    bench.submit(*specs("b", 16, BACKGROUND), *specs("short", 4, max_new_tokens=2))
    started: dict[str, float] = {}
    submitted = 0
    while bench.now < came + 600.0 and len(started) < 20:
        bench.now += step_seconds
        for rollout_id in [name for name, at in due.items() if at <= bench.now]:
            bench.finish(rollout_id, 2 if rollout_id.startswith("short") else 16)
            bench.acknowledge(rollout_id)
            del due[rollout_id]
        while submitted < 1.1 * rate * (bench.now - came):
            bench.submit(spec(f"c{submitted}"))
            submitted += 1
        for one in bench.tick():
            due[one.rollout_id] = bench.now + service_seconds
            if not one.rollout_id.startswith("c"):
                started[one.rollout_id] = bench.now - came
    assert len(started) == 20, f"only {sorted(started)} started"
    assert max(started.values()) <= bound, f"{max(started.values()):.0f} s, bound {bound:.0f} s"


def test_waiting_counts_older_work_goes_before_newer_of_its_kind() -> None:
    bench = Bench(engine(slots=1), settings=NO_PREEMPTION)
    bench.run(spec("first"))
    bench.submit(spec("old"))
    bench.tick(QUEUE.aging_seconds / 2)
    bench.submit(*specs("new", 3))
    bench.finish("first")
    assert [one.rollout_id for one in bench.tick()] == ["old"]


def test_longest_expected_first_among_critical_work_of_one_age() -> None:
    bench = Bench(engine(slots=1), settings=NO_PREEMPTION)
    bench.run(spec("first"))
    bench.submit(
        spec("short", max_new_tokens=16), spec("long", max_new_tokens=2000), spec("middle", max_new_tokens=200)
    )
    order = []
    for _ in range(3):
        bench.finish(next(iter(bench.live)))
        order += [one.rollout_id for one in bench.tick()]
    assert order == ["long", "middle", "short"]


def test_a_deadline_that_is_near_goes_before_one_that_is_far() -> None:
    bench = Bench(engine(slots=1), settings=NO_PREEMPTION)
    bench.run(spec("first"))
    bench.submit(spec("far", deadline_seconds=500.0), spec("near", deadline_seconds=20.0), spec("none"))
    bench.finish("first")
    assert [one.rollout_id for one in bench.tick()] == ["near"]
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("far", deadline_seconds=5.0),)))
    bench.finish("near")
    assert [one.rollout_id for one in bench.tick()] == ["far"]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_an_update_with_a_deadline_that_makes_no_sense_is_refused(seconds: float) -> None:
    bench = Bench(engine())
    bench.submit(spec("a", deadline_seconds=50.0), spec("b"))
    updates = (RolloutUpdate("b", rollout_class=BACKGROUND), RolloutUpdate("a", deadline_seconds=seconds))
    refusal = bench.refused(UpdateRollouts(RUN, updates))
    assert refusal.code is Code.INVALID_ARGUMENT and "deadline_seconds" in refusal.message
    assert bench.view("b").rollout_class is CRITICAL, "nothing changed"


def test_a_deadline_set_while_held_counts_when_the_hold_ends() -> None:
    bench = Bench(engine(slots=1), settings=NO_PREEMPTION)
    bench.submit(spec("g", 64, samples=2))
    (leader,) = bench.tick()
    (waiting,) = {"g/0", "g/1"} - {leader.rollout_id}
    assert bench.view(waiting).gate.name == "HELD_FOR_LEADER"
    bench.do(UpdateRollouts(RUN, (RolloutUpdate(waiting, deadline_seconds=10.0),)))
    bench.write(leader.rollout_id, 1)
    bench.submit(*specs("other", 5, max_new_tokens=300))
    bench.finish(leader.rollout_id)
    assert [one.rollout_id for one in bench.tick(0.5)] == [waiting]


# classes


def test_classes_in_order_in_cold_start() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("first"))
    bench.submit(*specs("b", 3, BACKGROUND), *specs("u", 3, REUSABLE), *specs("c", 3))
    order = ""
    for _ in range(9):
        bench.finish(next(iter(bench.live)))
        (one,) = bench.tick()
        order += one.rollout_id[0]
    assert order == "cccuuubbb"


def test_stable_phase_lets_a_lower_class_in_now_and_then_while_the_trainer_does_not_wait() -> None:
    policy = {"cold_start_steps": 1, "phase_ramp_steps": 1, "stable_lower_turn": 4}
    for state, expected in ((TrainerState.TRAINING, True), (TrainerState.WAITING, False)):
        bench = Bench(engine(slots=1), settings=config(policy=policy, preempt={"enabled": False}))
        bench.step(2, state)
        bench.submit(*specs("c", 40), *specs("b", 5, BACKGROUND))
        started = ""
        for _ in range(30):
            (one,) = bench.tick(0.01)
            started += one.rollout_id[0]
            bench.finish(one.rollout_id)
        assert ("b" in started) is expected, f"{state.name}: {started}"


# promotion by step


def test_what_a_step_needs_becomes_critical_queued_or_running() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("running", rollout_class=REUSABLE, needed_by_step=3))
    bench.submit(
        spec("queued", rollout_class=BACKGROUND, needed_by_step=3),
        spec("later", rollout_class=BACKGROUND, needed_by_step=4),
        spec("never", rollout_class=BACKGROUND),
    )
    bench.step(2)
    assert bench.view("queued").rollout_class is BACKGROUND
    bench.step(3)
    assert bench.view("queued").rollout_class is CRITICAL and bench.view("running").rollout_class is CRITICAL
    assert bench.view("later").rollout_class is BACKGROUND
    bench.finish("running")
    assert [one.rollout_id for one in bench.tick()] == ["queued"]
    bench.step(7)
    assert bench.view("later").rollout_class is CRITICAL and bench.view("never").rollout_class is BACKGROUND


def test_what_arrives_after_its_step_was_reached_is_critical_at_once() -> None:
    bench = Bench(engine(slots=1))
    bench.step(5)
    bench.submit(
        spec("due", rollout_class=REUSABLE, needed_by_step=5), spec("soon", rollout_class=REUSABLE, needed_by_step=6)
    )
    assert bench.view("due").rollout_class is CRITICAL and bench.view("soon").rollout_class is REUSABLE


def test_a_step_goes_forward_only_and_a_repeated_report_changes_nothing() -> None:
    from rolloutd.scheduler.events import ReportStep
    from rolloutd.scheduler.spec import StepReport

    bench = Bench(engine())
    bench.step(5)
    refusal = bench.refused(ReportStep(RUN, StepReport(4, TrainerState.TRAINING)))
    assert (refusal.code, refusal.reason) == (
        Code.FAILED_PRECONDITION,
        "STEP_BACKWARDS",
    ) and "4 is below step 5" in refusal.message
    assert not bench.step(5) and bench.run_view().step == 5


def test_an_update_moves_class_and_step_and_ignores_what_has_ended() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", rollout_class=BACKGROUND))
    bench.submit(spec("b", rollout_class=BACKGROUND))
    bench.step(2)
    updates = (RolloutUpdate("a", rollout_class=CRITICAL), RolloutUpdate("b", needed_by_step=2), RolloutUpdate("gone"))
    bench.do(UpdateRollouts(RUN, updates))
    assert bench.view("a").rollout_class is CRITICAL and bench.view("b").rollout_class is CRITICAL
    bench.finish("a")
    assert bench.do(UpdateRollouts(RUN, (RolloutUpdate("a", rollout_class=BACKGROUND),))) == []
    assert bench.result("a").rollout_class is CRITICAL


# results wait for their reader


def test_of_100_results_the_reader_took_3_and_97_are_still_there_in_order() -> None:
    bench = Bench(engine(slots=100))
    bench.run(*specs("r", 100))
    for index in range(100):
        bench.finish(f"r{index}")
    bench.acknowledge("r0", "r1", "r2")
    before = len(bench.said)
    bench.do(attach(CONSUMER))
    again = [a for a in bench.said[before:] if isinstance(a, Deliver) and isinstance(a.event, Finished)]
    names = [a.event.result.rollout_id for a in again if isinstance(a.event, Finished)]
    assert names == [f"r{index}" for index in range(3, 100)]
    assert [a.cursor for a in again] == list(range(4, 101))


def attach(consumer: str, **fields: Any) -> Any:
    from rolloutd.scheduler.events import AttachConsumer

    return AttachConsumer(RUN, consumer, **fields)


# expiry


def test_a_queue_ttl_is_the_rollouts_the_runs_or_the_configured_one() -> None:
    bench = Bench(engine(slots=1), settings=config(queue={"queue_ttl_seconds": 300.0}))
    bench.budget(max_rollouts=0)
    bench.submit(spec("own", queue_ttl_seconds=10.0), spec("default"))
    bench.configure(queue_ttl_seconds=50.0)
    bench.submit(spec("runs"))
    for seconds, ended in ((11.0, {"own"}), (40.0, {"own", "runs"}), (250.0, {"own", "runs", "default"})):
        bench.pass_time(seconds, 5.0)
        assert bench.ended == ended
    error = bench.result("own").error
    assert bench.outcome("own") is Outcome.QUEUE_TIMEOUT and error is not None
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "QUEUE_TIMEOUT") and error.retry_after_seconds > 0.0
    bench.quiet()


# short and long work


def test_300_long_generations_cannot_block_reward_queries() -> None:
    bench = Bench(*engines(2, 8))
    bench.submit(spec("reward", task_type=TaskType.REWARD, max_new_tokens=4))
    bench.tick()
    bench.finish("reward", 2)
    bench.submit(*specs("g", 300, max_new_tokens=4000))
    bench.pass_time(5.0)
    for turn in range(20):
        bench.submit(*specs(f"w{turn}-", 2, task_type=TaskType.REWARD, max_new_tokens=4))
        started = bench.tick(1.0)
        assert {one.rollout_id for one in started} == {f"w{turn}-0", f"w{turn}-1"}, "no long work ended, and yet"
        for one in started:
            bench.finish(one.rollout_id, 2)
        bench.acknowledge(*bench.ended)


def test_a_slot_is_reserved_for_short_work_only_while_some_was_seen() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(*specs("g", 8))
    assert len(bench.tick()) == 8, "no short work was seen: all slots are free for all"
    for index in range(8):
        bench.finish(f"g{index}")
    bench.submit(spec("w", task_type=TaskType.REWARD))
    bench.tick()
    bench.finish("w", 2)
    bench.submit(*specs("h", 8))
    assert len(bench.tick()) == 7
    assert len(bench.pass_time(QUEUE.reserve_memory_seconds + 2.0)) == 1


def test_small_engines_keep_nothing_back_for_short_work() -> None:
    bench = Bench(engine(slots=7))
    bench.submit(spec("w", task_type=TaskType.STATE_QUERY))
    bench.tick()
    bench.finish("w", 2)
    bench.submit(*specs("g", 8))
    assert len(bench.tick()) == 7


def test_a_flood_of_short_work_cannot_block_long_work_either() -> None:
    bench = Bench(engine(slots=1))
    bench.submit(*specs("w", 60, task_type=TaskType.REWARD), *specs("g", 40))
    started = ""
    for _ in range(40):
        (one,) = bench.tick(0.01)
        started += one.rollout_id[0]
        bench.finish(one.rollout_id, 2)
    assert "g" in started[: QUEUE.short_quantum + 1] and "w" * (QUEUE.short_quantum + 1) not in started[:30]


# runs beside each other


def shares(bench: Bench, dispatches: int, tokens: int) -> Counter[str]:
    """Expected tokens per run over some dispatches on one slot, both runs always waiting."""
    counted: Counter[str] = Counter()
    for _ in range(dispatches):
        (one,) = bench.tick(0.01)
        counted[one.run_id] += one.max_new_tokens
        bench.finish(one.rollout_id, tokens)
        bench.acknowledge(one.rollout_id, run=one.run_id)
    return counted


def two_runs(bench: Bench, count: int, **fields: Any) -> None:
    for run in ("heavy", "light"):
        bench.do(attach_run(run))
        bench.submit(*specs(run, count, **fields), run=run)


def attach_run(run: str) -> Any:
    from rolloutd.scheduler.events import AttachConsumer

    return AttachConsumer(run, CONSUMER)


def test_two_runs_share_by_weight_in_expected_tokens() -> None:
    bench = Bench(engine(slots=1))
    bench.configure("heavy", fairness_weight=3.0)
    two_runs(bench, 80)
    counted = shares(bench, 80, 16)
    assert 2.6 <= counted["heavy"] / counted["light"] <= 3.4


def test_a_run_with_long_rollouts_does_not_get_more_tokens() -> None:
    bench = Bench(engine(slots=1))
    for run, tokens in (("long", 160), ("short", 16)):
        bench.do(attach_run(run))
        bench.submit(*specs(run, 120, max_new_tokens=tokens), run=run)
    counted: Counter[str] = Counter()
    for _ in range(110):
        (one,) = bench.tick(0.01)
        counted[one.run_id] += 1
        bench.finish(one.rollout_id, one.max_new_tokens)
        bench.acknowledge(one.rollout_id, run=one.run_id)
    assert 4 <= counted["short"] / counted["long"] <= 12, counted


def test_a_run_that_was_away_does_not_use_up_its_absence() -> None:
    for first_is_queued in (True, False):
        bench = Bench(engine(slots=1))
        bench.do(attach_run("steady"))
        bench.do(attach_run("late"))
        bench.submit(spec("once"), run="late")
        bench.tick()
        bench.finish("once")
        for index in range(60):
            bench.submit(spec(f"s{index}"), run="steady")
            bench.tick(0.01)
            bench.finish(f"s{index}")
            bench.acknowledge(f"s{index}", run="steady")
        if first_is_queued:
            bench.submit(*specs("t", 40), run="steady")
        bench.submit(*specs("l", 40), run="late")
        if not first_is_queued:
            bench.submit(*specs("t", 40), run="steady")
        counted = shares(bench, 30, 16)
        assert abs(counted["steady"] - counted["late"]) <= 2 * 16, f"queued first: {first_is_queued}: {counted}"


def test_work_in_one_pool_does_not_keep_a_run_present_in_another() -> None:
    bench = Bench(engine("e0", 1), engine("r0", 1, pool="reward"))
    bench.do(attach_run("steady"))
    bench.do(attach_run("late"))
    bench.submit(spec("once"), *specs("waiting", 3, pool="reward"), run="late")
    bench.tick()
    bench.finish("once")
    for index in range(60):
        bench.submit(spec(f"s{index}"), run="steady")
        bench.tick(0.01)
        bench.finish(f"s{index}")
    bench.submit(*specs("t", 40), run="steady")
    bench.submit(*specs("l", 40), run="late")
    counted: Counter[str] = Counter()
    for _ in range(20):
        (one,) = bench.tick(0.01)
        counted[one.run_id] += 1
        bench.finish(one.rollout_id)
    assert sum(counted.values()) == 20 and abs(counted["steady"] - counted["late"]) <= 2, counted


def test_a_runs_floor_goes_first_whatever_others_ask_for() -> None:
    bench = Bench(engine(slots=4), settings=NO_PREEMPTION)
    bench.do(attach_run("floored"))
    bench.configure("floored", floor_rollouts=2, fairness_weight=0.001)
    bench.submit(*specs("c", 40))
    bench.tick()
    bench.submit(*specs("f", 10, BACKGROUND), run="floored")
    for _ in range(2):
        bench.finish(next(name for name in bench.live if name.startswith("c")))
        assert [one.run_id for one in bench.tick()] == ["floored"]
    for _ in range(10):
        bench.finish(next(iter(bench.live)))
        bench.tick()
        assert sum(name.startswith("f") for name in bench.live) >= 2 or len(bench.live) < 4


# strata


def test_dispatches_approach_the_target_mix_over_a_window() -> None:
    bench = Bench(engine(slots=8), settings=config(weights={"waiting": 0.0}))
    bench.configure(target_mix={"math": 0.5, "code": 0.3, "chat": 0.2})
    counted: Counter[str] = Counter()
    made = 0
    for stratum in ("chat",) * 90 + ("code",) * 90 + ("math",) * 90:
        bench.submit(spec(f"r{made}", stratum=stratum))
        made += 1
    for _ in range(20):
        for one in bench.tick(0.1):
            counted[bench.view(one.rollout_id).stratum] += 1
            bench.finish(one.rollout_id)
        bench.acknowledge(*bench.ended)
    total = sum(counted.values())
    distance = 0.5 * sum(
        abs(counted[name] / total - share) for name, share in {"math": 0.5, "code": 0.3, "chat": 0.2}.items()
    )
    assert total == 160 and distance <= 0.05, counted


def test_the_mix_is_judged_over_the_last_rollouts_only() -> None:
    window = Window()
    for _ in range(WINDOW_ROLLOUTS):
        window.add("old")
    for count in range(1, WINDOW_ROLLOUTS + 1):
        window.add("new")
        assert (window.counts.get("old", 0), window.counts["new"], len(window)) == (
            WINDOW_ROLLOUTS - count,
            count,
            WINDOW_ROLLOUTS,
        )
    assert set(window.counts) == {"new"}


@pytest.mark.parametrize("target", [{}, {"s0": 0.5, "s9": 0.5}])
def test_shares_are_those_of_this_moment(target: dict[str, float]) -> None:
    """They are remembered between two dispatches, and no longer: while the window fills, when it is full, when a stratum is new."""
    rng = random.Random(3)
    mix = Mix(target, max_strata=20)
    dispatched: list[str] = []
    for number in range(3 * WINDOW_ROLLOUTS):
        stratum = mix.name(f"s{rng.randrange(3 + number // 100)}")
        mix.note_dispatched(stratum)
        dispatched.append(stratum)
        window = dispatched[-WINDOW_ROLLOUTS:]
        for one in (stratum, rng.choice(dispatched), "s0"):
            assert mix.shares(one) == (window.count(one) / len(window), mix.target_share(one))


def test_more_strata_than_allowed_share_one_name() -> None:
    mix = Mix({}, max_strata=2)
    assert [mix.name(stratum) for stratum in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert mix.target_share("a") == 0.5


def test_prompts_are_not_confused_by_equal_lengths() -> None:
    bench = Bench(engine(slots=2))
    first, second = ids([7] * 8), ids([8] * 8)
    bench.submit(spec("a", token_bytes=first), spec("b", token_bytes=second))
    assert {one.rollout_id: one.token_bytes for one in bench.tick()} == {"a": first, "b": second}
    assert prompt("a") != prompt("b") and bench.state("a") is RolloutState.DISPATCHED
