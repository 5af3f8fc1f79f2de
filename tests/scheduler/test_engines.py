"""Engines: busy, bad request and broken are three things (property P7); joining, restarting, draining, leaving."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.scheduler.actions import NoticeKind
from rolloutd.scheduler.config import ExecutorSettings
from rolloutd.scheduler.events import (
    DrainEngine,
    EngineLoad,
    EngineReadiness,
    JoinEngine,
    LoseEngine,
    RemoveEngine,
)
from rolloutd.scheduler.states import Code, FaultKind, Outcome, RolloutState
from tests.scheduler.kit import RUN, Bench, config, engine, engines, ids, prompt, spec, specs

EXECUTOR = ExecutorSettings()
PATIENT = config(executor={"max_attempts": 1000})


def load(engine_id: str = "e0", running: int = 0, waiting: int = 0, **fields: Any) -> EngineLoad:
    fields = {"prefilled_tokens_total": 0, "prefill_busy_seconds_total": 0.0, **fields}
    return EngineLoad(engine_id, running, waiting, 0, 1 << 16, 0.0, **fields)


def break_it(bench: Bench, times: int = EXECUTOR.breaker_faults, fault: FaultKind = FaultKind.BROKEN) -> None:
    """`times` faults in a row on the only engine."""
    for _ in range(times):
        if not bench.live:
            bench.tick(1.0)
        bench.fail(next(iter(bench.live)), fault)


# the breaker


def test_bad_requests_harm_nobody_and_only_500s_open_the_breaker() -> None:
    bench = Bench(engine(slots=4), settings=PATIENT)
    for index in range(20):
        bench.run(spec(f"bad{index}"))
        bench.fail(f"bad{index}", FaultKind.REFUSED, message="too long")
        error = bench.result(f"bad{index}").error
        assert bench.outcome(f"bad{index}") is Outcome.ENGINE_REFUSED and error is not None
        assert error.code is Code.INVALID_ARGUMENT and "too long" in error.message
    view = bench.core.engine_views()[0]
    assert view.state == "ready" and view.faults == 0
    for index in range(EXECUTOR.breaker_faults):  # bad requests between faults neither open nor close it
        assert bench.core.engine_views()[0].state == "ready"
        bench.run(spec(f"worse{index}"), spec(f"broken{index}"))
        bench.fail(f"worse{index}", FaultKind.REFUSED)
        bench.fail(f"broken{index}", FaultKind.BROKEN)
        bench.cancel(f"broken{index}")
    view = bench.core.engine_views()[0]
    assert view.state == "broken" and view.breaker_open and view.faults == EXECUTOR.breaker_faults
    assert bench.records("engine_breaker_open")


def test_a_success_between_faults_starts_the_count_again() -> None:
    bench = Bench(engine(slots=4), settings=PATIENT)
    for index in range(10):
        bench.run(spec(f"a{index}"), spec(f"b{index}"))
        bench.fail(f"a{index}", FaultKind.BROKEN)
        bench.cancel(f"a{index}")
        bench.finish(f"b{index}")
    assert bench.core.engine_views()[0].state == "ready"


@pytest.mark.parametrize("fault", [FaultKind.BROKEN, FaultKind.SILENT])
def test_an_open_breaker_lets_one_probe_through_and_a_success_closes_it(fault: FaultKind) -> None:
    bench = Bench(engine(slots=8), settings=PATIENT)
    bench.submit(*specs("r", 3))
    break_it(bench, fault=fault)
    assert not bench.live
    bench.submit(*specs("s", 4))
    assert not bench.tick(EXECUTOR.breaker_seconds - 1.1)
    while not bench.live:
        bench.tick(0.5)
    assert len(bench.live) == 1, "half open: one at a time"
    assert not bench.pass_time(2.0)
    bench.fail(next(iter(bench.live)), fault)
    assert bench.core.engine_views()[0].state == "broken" and not bench.pass_time(EXECUTOR.breaker_seconds - 1.5)
    while not bench.live:
        bench.tick(0.5)
    (probe,) = bench.live
    bench.finish(probe)
    assert len(bench.tick()) >= 3, "closed"


@pytest.mark.parametrize("fault", [FaultKind.REFUSED, FaultKind.BUSY])
def test_a_probe_that_says_nothing_about_health_is_followed_by_another(fault: FaultKind) -> None:
    bench = Bench(engine(slots=8), settings=PATIENT)
    bench.submit(*specs("r", 3))
    break_it(bench)
    assert not bench.live
    bench.submit(*specs("s", 6))
    for _ in range(3):
        while not bench.live:
            bench.tick(0.5)
        assert len(bench.live) == 1
        bench.fail(next(iter(bench.live)), fault)
    while not bench.live:
        bench.tick(0.5)
    bench.finish(next(iter(bench.live)))
    assert len(bench.tick()) > 1


def test_a_busy_engine_is_left_alone_for_a_moment_and_is_back_at_full_rate_within_a_second() -> None:
    bench = Bench(engine(slots=8), settings=config(executor={"max_attempts": 1}))
    bench.submit(*specs("r", 16))
    until = bench.now + 5.0
    while bench.now < until:
        for rollout_id in [one.rollout_id for one in bench.tick(0.05)]:
            bench.fail(rollout_id, FaultKind.BUSY, message="queue full")
        assert bench.core.engine_views()[0].state == "ready", "busy is not broken"
    assert not bench.ended and bench.core.engine_views()[0].faults == 0
    assert len(bench.dispatched) <= 8 * (5.0 / EXECUTOR.busy_seconds + 2), "it was hammered"
    bench.pass_time(1.0, 0.05)
    assert len(bench.live) == 8
    for _ in range(2):
        for rollout_id in list(bench.live):
            bench.finish(rollout_id)
        bench.tick()
    assert len(bench.ended) == 16


def test_a_busy_engine_is_asked_again_when_its_back_off_ends_and_not_a_second_later() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.fail("a", FaultKind.BUSY)
    assert not bench.tick()
    assert bench.core.next_due() <= bench.now + EXECUTOR.busy_seconds + 1e-6
    bench.now = bench.core.next_due()
    assert [one.rollout_id for one in bench.tick()] == ["a"]


def test_not_ready_then_busy_is_never_removal() -> None:
    bench = Bench(engine("e0"), settings=PATIENT)
    bench.do(EngineReadiness("e0", False))
    bench.submit(spec("a"))
    assert not bench.pass_time(60.0, 5.0)
    assert bench.core.engine_views()[0].state == "not_ready"
    bench.do(EngineReadiness("e0", True))
    bench.tick()
    for _ in range(10):
        bench.fail("a", FaultKind.BUSY)
        bench.pass_time(1.0, 0.25)
    assert bench.core.engine_views()[0].state == "ready" and bench.state("a") is RolloutState.DISPATCHED


def test_a_retry_leaves_the_dead_engine_that_holds_the_prefix() -> None:
    bench = Bench(engine("e0", 8), engine("e1", 8))
    (first,) = bench.run(spec("warm", token_bytes=prompt("stem", 64)))
    bench.finish("warm")
    bench.submit(spec("a", token_bytes=prompt("stem", 64) + ids([1] * 8)))
    (one,) = bench.tick()
    assert one.engine_id == first.engine_id, "it has the prefix"
    bench.fail("a", FaultKind.BROKEN, message="connection refused")
    (again,) = bench.tick()
    assert again.engine_id != first.engine_id
    bench.finish("a")
    assert bench.outcome("a") is Outcome.COMPLETED and bench.result("a").attempts == 2
    assert bench.result("a").total_seconds < 1.0


@pytest.mark.parametrize("other", ["absent", "lost", "draining", "not ready", "too small"])
def test_an_engine_that_failed_gets_another_chance_where_no_other_could_serve(other: str) -> None:
    bench = Bench(engine("e0"), settings=PATIENT)
    bench.run(spec("a", 40))
    if other != "absent":
        bench.do(JoinEngine(engine("e1", context_tokens=50 if other == "too small" else 4096)))
    match other:
        case "lost":
            bench.do(LoseEngine("e1", "gone"))
        case "draining":
            bench.do(DrainEngine("e1"))
        case "not ready":
            bench.do(EngineReadiness("e1", False))
    bench.fail("a", FaultKind.BROKEN)
    assert [one.engine_id for one in bench.tick()] == ["e0"]


def test_every_attempt_has_a_fresh_id() -> None:
    bench = Bench(engine(slots=1), settings=PATIENT)
    bench.submit(spec("a"))
    for _ in range(20):
        bench.pass_time(1.0, 0.5)
        if "a" in bench.live:
            bench.fail("a", FaultKind.BUSY)
    attempts = [one.attempt_id for one in bench.dispatched]
    assert len(attempts) > 10 and len(set(attempts)) == len(attempts)


# coming and going


def test_a_restarted_engine_fails_its_attempts_over_and_loses_its_credit() -> None:
    bench = Bench(engine("e0", 4))
    bench.run(spec("warm", token_bytes=prompt("stem", 64)))
    bench.finish("warm")
    bench.run(spec("a"), spec("b"))
    bench.write("a", 5)
    assert bench.submit(spec("hit", token_bytes=prompt("stem", 64)))[0].matched_prefix_tokens == 64  # type: ignore[union-attr]
    bench.do(JoinEngine(engine("e0", 4, incarnation="2")))
    assert {bench.state(name) for name in ("a", "b")} == {RolloutState.QUEUED}
    assert bench.submit(spec("miss", token_bytes=prompt("stem", 64)))[0].matched_prefix_tokens == 0  # type: ignore[union-attr]
    assert {one.rollout_id for one in bench.tick()} >= {"a", "b"}
    assert len(bench.core.engine_views()) == 1 and bench.engine("e0").faults == 0


def test_engines_that_come_and_go_leave_no_credit_behind() -> None:
    bench = Bench()
    sizes = []
    for cycle in range(60):
        name = f"e{cycle}"
        bench.do(JoinEngine(engine(name, 4)))
        bench.run(spec(f"r{cycle}", 1000))
        bench.finish(f"r{cycle}")
        bench.acknowledge(f"r{cycle}")
        bench.do(RemoveEngine(name))
        bench.pass_time(2.0)
        statistics = bench.core._world.index.statistics()
        assert statistics.engine_tokens == {}
        sizes.append(statistics.bytes)
    assert max(sizes[30:]) <= max(sizes[:30]), "memory grows with churn"
    assert not bench.its_run().backlogs or all(not backlog._affine for backlog in bench.its_run().backlogs.values())


def test_a_flushed_cache_is_no_hit_and_its_nodes_are_freed() -> None:
    bench = Bench(engine("e0", 4))
    bench.run(spec("warm", 1000))
    bench.finish("warm")
    before = bench.core.statistics().index_pages
    bench.do(JoinEngine(engine("e0", 4, incarnation="2")))
    bench.pass_time(5.0)
    assert before > 50 and bench.core.statistics().index_pages == 0


def test_the_same_incarnation_joining_again_changes_nothing_that_runs() -> None:
    bench = Bench(engine("e0", 2))
    bench.run(spec("a", 64))
    bench.do(LoseEngine("e0", "a network blip"))
    bench.do(JoinEngine(engine("e0", 2)))
    assert bench.state("a") is RolloutState.RUNNING
    bench.submit(spec("b", token_bytes=prompt("a", 64)))
    assert [one.rollout_id for one in bench.tick()] == ["b"]
    bench.write("b", 1, cached=63)
    bench.finish("b")
    assert bench.result("b").predicted_cached_tokens == 63, "its cache is still there"


def test_an_engine_that_joins_again_with_fewer_slots_keeps_what_runs_and_takes_nothing_more() -> None:
    bench = Bench(engine("e0", 4))
    bench.run(*specs("r", 4))
    bench.do(JoinEngine(engine("e0", 2)))
    bench.submit(*specs("s", 4))
    assert not bench.tick()
    for index in range(3):
        bench.finish(f"r{index}")
    assert len(bench.tick()) == 1


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing() -> None:
    bench = Bench(engine("e0", 4))
    bench.run(spec("a"))
    bench.do(DrainEngine("e0"))
    bench.submit(spec("b"))
    assert not bench.pass_time(5.0)
    bench.finish("a")
    assert bench.outcome("a") is Outcome.COMPLETED and bench.core.engine_views()[0].state == "draining"
    bench.do(JoinEngine(engine("e1")))
    assert [one.engine_id for one in bench.tick()] == ["e1"]


def test_a_removed_engine_hands_its_work_over_with_its_tokens() -> None:
    bench = Bench(*engines(2, 4))
    bench.run(spec("a"))
    home = bench.live["a"].engine_id
    bench.do(RemoveEngine(home))
    assert bench.leaving() == {"a"} and not bench.tick()
    bench.stopped("a", 6)
    (again,) = bench.tick()
    assert again.engine_id != home and again.max_new_tokens == 10
    assert home not in {view.engine_id for view in bench.core.engine_views()}
    bench.finish("a", 10)
    assert bench.whole("a")


def test_a_removed_engine_may_come_back() -> None:
    bench = Bench(engine("e0"))
    bench.run(spec("a"))
    bench.do(RemoveEngine("e0"))
    bench.do(JoinEngine(engine("e0")))
    bench.stopped("a", 2)
    assert [one.engine_id for one in bench.tick()] == ["e0"]
    bench.finish("a", 14)
    bench.do(RemoveEngine("e0"))
    assert not bench.core.engine_views()
    bench.do(JoinEngine(engine("e0")))
    bench.run(spec("b"))
    assert bench.running_on("e0") == ["b"]


def test_commands_for_unknown_engines_are_refused_and_reports_ignored() -> None:
    bench = Bench(engine())
    for event in (DrainEngine("nobody"), RemoveEngine("nobody")):
        assert bench.refused(event).reason == "ENGINE_NOT_FOUND"
    for report in (LoseEngine("nobody", "?"), EngineReadiness("nobody", True), load("nobody")):
        assert bench.do(report) == []


@pytest.mark.parametrize("fields", [{"slots": 0}, {"page_tokens": 0}])
def test_an_engine_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    bench = Bench()
    refusal = bench.refused(JoinEngine(engine("e0", **fields)))
    assert refusal.code is Code.INVALID_ARGUMENT and "e0" in refusal.message


def test_a_lost_engine_takes_nothing_and_a_load_report_brings_it_back() -> None:
    bench = Bench(engine())
    bench.do(LoseEngine("e0", "timeout"))
    bench.submit(spec("a"))
    assert not bench.pass_time(5.0)
    assert bench.core.engine_views()[0].last_error == "timeout" and bench.records("engine_lost")
    bench.do(load())
    assert [one.rollout_id for one in bench.tick()] == ["a"]


# differing engines


def test_prompts_go_where_they_fit() -> None:
    bench = Bench(
        engine("context", 32, context_tokens=64),
        engine("input", 32, max_prompt_tokens=64),
        engine("memory", 32, kv_capacity_tokens=64),
        engine("large", 32),
    )
    bench.submit(*specs("r", 20, tokens=70))
    assert {one.engine_id for one in bench.tick()} == {"large"}
    bench.submit(*specs("s", 40, tokens=8))
    assert {one.engine_id for one in bench.tick()} >= {"context", "input", "memory"}


def test_interrupted_work_that_no_engine_would_take_back_starts_over() -> None:
    bench = Bench(engine(context_tokens=40, max_prompt_tokens=20))
    bench.run(spec("a", 8))
    bench.budget(max_rollouts=0)
    bench.stopped("a", 14)
    bench.budget()
    (again,) = bench.tick()
    assert (len(again.token_bytes) // 4, again.max_new_tokens) == (8, 16)
    bench.finish("a", 16)
    assert bench.whole("a")


def test_labels_narrow_a_pool() -> None:
    bench = Bench(engine("a0", 8, labels={"gpu": "a", "zone": "1"}), engine("b0", 8, labels={"gpu": "b"}))
    bench.submit(*specs("a", 4, engine_labels={"gpu": "a", "zone": "1"}), *specs("b", 4, engine_labels={"gpu": "b"}))
    bench.tick()
    assert {one.rollout_id[0] + one.engine_id[0] for one in bench.dispatched} == {"aa", "bb"}


def test_an_engine_assigned_to_a_run_serves_that_run_only() -> None:
    bench = Bench(
        engine("mine", 4, run_id=RUN), engine("theirs", 4, run_id="other"), engine("shared", 4, pool="reward")
    )
    bench.submit(*specs("m", 8), spec("mw", pool="reward"))
    bench.submit(*specs("t", 8), spec("tw", pool="reward"), run="other")
    bench.tick()
    assert all(name[0] == "m" for name in bench.running_on("mine")) and len(bench.running_on("mine")) == 4
    assert all(name[0] == "t" for name in bench.running_on("theirs")) and len(bench.running_on("theirs")) == 4
    assert bench.running_on("shared") == ["mw", "tw"]


# what engines report about themselves


def test_ghosts_are_what_runs_there_beyond_what_we_sent() -> None:
    bench = Bench(engine(slots=4))
    bench.run(*specs("r", 2))
    bench.do(load(running=4, waiting=1))
    assert bench.core.engine_views()[0].ghosts == 3 and bench.core.engine_views()[0].reported_rollouts == 5
    bench.do(load(running=1))
    assert bench.core.engine_views()[0].ghosts == 0


def test_speeds_are_learned_from_reports_and_a_restart_between_two_is_no_negative_speed() -> None:
    bench = Bench(engine())
    bench.do(load(prefilled_tokens_total=1000, prefill_busy_seconds_total=1.0))
    assert bench.core.engine_views()[0].prefill_tokens_per_second == 1000.0
    bench.do(load(prefilled_tokens_total=10, prefill_busy_seconds_total=0.01))
    bench.do(load(prefilled_tokens_total=1010, prefill_busy_seconds_total=0.51))
    assert 1000.0 < bench.core.engine_views()[0].prefill_tokens_per_second < 2000.0


def test_what_the_engine_says_it_had_cached_corrects_the_index() -> None:
    bench = Bench(engine("e0", 8))
    bench.run(spec("warm", 640))
    bench.finish("warm")
    for name, cached in (("first", 64), ("second", 639)):
        bench.submit(spec(name, token_bytes=prompt("warm", 640)))
        bench.tick(1.0)
        bench.write(name, 1, cached=cached)
        bench.finish(name)
    assert bench.result("first").predicted_cached_tokens == 639 and bench.result("first").cached_tokens in (0, 64)
    assert bench.core.engine_views()[0].cached_tokens == 64 + 639


# not reached, and lost


def test_an_engine_that_cannot_be_reached_costs_a_rollout_nothing_but_time() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    for _ in range(50):  # far more than max_attempts
        while "a" not in bench.live:
            bench.tick(1.0)
        bench.fail("a", FaultKind.UNREACHED, message="connection refused")
    assert bench.state("a") is RolloutState.QUEUED
    assert bench.core.engine_views()[0].breaker_open
    while "a" not in bench.live:
        bench.tick(1.0)
    bench.finish("a")
    assert bench.outcome("a") is Outcome.COMPLETED


def test_an_engine_that_cannot_be_reached_gives_its_work_to_another() -> None:
    bench = Bench(*engines(2, slots=4))
    first = bench.run(spec("a"))[0].engine_id
    bench.fail("a", FaultKind.UNREACHED)
    assert [dispatch.engine_id for dispatch in bench.tick()] == [{"e0": "e1", "e1": "e0"}[first]]


def test_silent_work_on_a_lost_engine_moves_within_seconds_and_a_stream_that_flows_stays() -> None:
    bench = Bench(*engines(2, slots=4))
    bench.run(*specs("r", 2))
    lost = bench.live["r0"].engine_id
    other = next(rollout_id for rollout_id in bench.live if bench.live[rollout_id].engine_id != lost)
    bench.do(LoseEngine(lost, "health check: no answer"))
    silent = EXECUTOR.lost_seconds
    for number in range(1, 4):
        bench.pass_time(silent - 1.0)
        bench.write("r0", 8 * number)
        bench.write(other, 8 * number)
    assert bench.state("r0") is RolloutState.RUNNING, "it still writes"
    bench.pass_time(silent + 1.0)
    assert bench.state("r0") is RolloutState.ABORTING
    assert bench.state(other) is RolloutState.RUNNING, "its engine is well"
    bench.pass_time(EXECUTOR.abort_seconds + 1.0)
    assert bench.live["r0"].engine_id != lost


def test_no_capacity_is_told_with_its_reason_and_ever_more_rarely() -> None:
    bench = Bench(engine())
    bench.do(LoseEngine("e0", "connection refused"))
    bench.submit(spec("a"))
    bench.pass_time(120.0)
    told = bench.notices(NoticeKind.NO_CAPACITY)
    assert 5 <= len(told) <= 12
    assert "connection refused" in told[0].message


def test_no_tick_does_the_housekeeping_of_all_runs() -> None:
    bench = Bench()
    runs = [RUN, "second", "third", "fourth"]
    for run in runs:
        bench.submit(spec("a"), run=run)  # no engine: the housekeeping of each run says so
    told: list[list[str]] = []
    for _ in range(8):
        before = len(bench.records("no_capacity"))
        bench.tick(0.25)
        told.append([record.fields["run"] for record in bench.records("no_capacity")[before:]])
    assert [one for some in told for one in some] == runs
    assert max(len(some) for some in told) == 1
