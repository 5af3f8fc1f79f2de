"""What random schedules in virtual time found, each as the shortest list of events that shows it."""

from __future__ import annotations

from collections import Counter

from rolloutd.scheduler.events import (
    AttemptEnded,
    JoinEngine,
    LoseEngine,
    PauseRun,
    ReportStep,
    ResumeRun,
    UpdateRollouts,
)
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import Quota, RolloutUpdate, StepReport
from rolloutd.scheduler.states import Code, FaultKind, Outcome, TaskType, TrainerState, UpdateMode
from tests.scheduler.kit import (
    BACKGROUND,
    CRITICAL,
    FIRST_TOKEN,
    REUSABLE,
    RUN,
    Bench,
    config,
    engine,
    ids,
    prompt,
    spec,
    specs,
)

REPLAY = TaskType.REPLAY


def test_an_end_token_in_an_aborted_piece_is_written_again() -> None:
    """An engine looks at an abort before end tokens, so the last token of the piece may be one that nothing may follow."""
    bench = Bench(engine(slots=1))
    bench.run(spec("a", rollout_class=BACKGROUND))
    bench.budget(max_rollouts=0)
    attempt = bench.live["a"]
    end = FIRST_TOKEN + 3
    bench.do(AttemptEnded(attempt.attempt_id, Piece(ids([1000, 1001, 1002, end]), "abort", prompt_tokens=8)))
    bench.budget()
    (again,) = bench.tick()
    assert again.token_bytes == prompt("a") + ids([1000, 1001, 1002])
    assert again.max_new_tokens == 13
    bench.do(AttemptEnded(again.attempt_id, Piece(ids([end]), "stop", matched_stop=end, prompt_tokens=11)))
    assert bench.result("a").token_bytes == ids([1000, 1001, 1002, end]) and bench.whole("a")
    bench.quiet()


def test_a_cancelled_rollout_keeps_every_token_it_has() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a"))
    bench.cancel("a")
    bench.finish("a", 4, "abort")
    assert bench.outcome("a") is Outcome.CANCELLED and bench.result("a").generated_tokens == 4


def test_the_index_does_not_claim_the_last_token_of_an_output() -> None:
    """It has no KV: a next turn that starts with the whole output finds one token less."""
    bench = Bench(engine(page_tokens=1), settings=config(index={"page_tokens": 1}))
    bench.run(spec("a", 40))
    bench.finish("a", 8)
    bench.submit(spec("b", token_bytes=prompt("a", 40) + bench.result("a").token_bytes + ids([7, 8]), turn=1))
    bench.tick()
    assert bench.its_run().rollouts["b"].predicted_cached_tokens == 40 + 7


def test_promotion_does_not_lift_running_work_over_a_class_ceiling() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(classes={CRITICAL: Quota(max_rollouts=1)})
    bench.run(*specs("a", 3, BACKGROUND, needed_by_step=1))
    bench.step(1)
    assert len(bench.leaving()) == 2
    bench.stop_aborted(1)
    assert bench.tick() == []
    assert bench.run_view().classes[CRITICAL].running == 1


def test_an_update_of_the_class_does_not_lift_running_work_over_a_class_ceiling() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(classes={CRITICAL: Quota(max_rollouts=1)})
    bench.run(*specs("a", 3, BACKGROUND))
    bench.do(UpdateRollouts(RUN, tuple(RolloutUpdate(f"a{index}", CRITICAL) for index in range(3))))
    assert len(bench.leaving()) == 2


def test_a_hold_that_ends_now_is_not_made_again() -> None:
    """In floating point (100.1 + 0.3) - 100.1 < 0.3: a hold that is over had a patience of 1e-14 s left, for ever."""
    bench = Bench(engine(slots=4), settings=config(queue={"max_defer_seconds": 0.3}))
    bench.now = 100.1
    bench.submit(spec("lead", 64))
    bench.tick()
    bench.submit(spec("a", 64, REUSABLE, token_bytes=prompt("lead", 64)))
    assert bench.tick() == []
    bench.now = bench.core.next_due()
    assert bench.now == 100.1 + 0.3
    assert [one.rollout_id for one in bench.tick()] == ["a"]


def test_a_reservation_that_is_used_asks_for_another_pass() -> None:
    """What is left beside the large one goes to who was kept out for it, now and not with the next event."""
    bench = Bench(engine(slots=4), settings=config(queue={"large_reserve_seconds": 1.0}))
    bench.budget(max_kv_tokens=400)
    bench.run(spec("first", 200, BACKGROUND))
    bench.submit(spec("large", 300, BACKGROUND))
    bench.pass_time(2.0, 0.5)
    assert bench.its_run().reserved_for is not None
    bench.submit(spec("small", 8))
    assert bench.tick() == []
    bench.finish("first")
    assert {one.rollout_id for one in bench.tick()} == {"large", "small"}


def test_whom_room_is_kept_for_is_looked_at_however_many_wait_before_it() -> None:
    """Only the first few of a queue are scored: with the room kept for one behind them, nobody could start any more."""
    bench = Bench(engine(slots=16))
    bench.do(PauseRun(RUN))
    bench.submit(*specs("a", 12))
    run = bench.its_run()
    run.reserved_for = run.rollouts["a11"].entry
    bench.do(ResumeRun(RUN))
    assert [one.rollout_id for one in bench.tick()][0] == "a11"
    assert len(bench.live) == 12


def test_two_reservations_of_one_run_do_not_keep_each_other_out() -> None:
    """One entry has the run's KV tokens kept for it, the other the only engine that is left: neither could ever start."""
    bench = Bench(
        engine("e0", 4, kv_capacity_tokens=256),
        engine("e1", 4, kv_capacity_tokens=256),
        settings=config(queue={"large_reserve_seconds": 1.0}, preempt={"enabled": False}),
    )
    bench.run(*specs("first", 2, BACKGROUND, tokens=200))
    bench.submit(spec("a", 100), spec("b", 100, BACKGROUND))
    bench.pass_time(2.5, 0.5)
    kept = {one: bench.engine(one).reserved_for for one in ("e0", "e1")}
    (of_a,) = (one for one, entry in kept.items() if entry is not None and entry.rollout_class is CRITICAL)
    assert all(kept.values()), kept
    bench.budget(max_kv_tokens=500)
    bench.pass_time(1.0)
    assert bench.its_run().reserved_for is kept[of_a]
    bench.do(LoseEngine(of_a, "no route"))
    bench.finish("first0")
    bench.finish("first1")
    assert [one.rollout_id for one in bench.tick()] == ["a"]
    bench.finish("a")
    assert [one.rollout_id for one in bench.tick()] == ["b"]


def test_a_probe_that_completes_just_as_it_is_given_up_closes_the_breaker() -> None:
    """It counted neither as a success nor as a fault, so the engine waited for its probe for ever."""
    bench = Bench(engine(slots=1), settings=config(executor={"breaker_faults": 1, "breaker_seconds": 2.0}))
    bench.run(spec("a", progress_timeout_seconds=5.0))
    bench.fail("a", FaultKind.BROKEN)
    bench.pass_time(3.0)
    assert bench.running_on("e0") == ["a"], "the probe"
    bench.pass_time(6.0)
    assert bench.leaving() == {"a"}
    bench.finish("a")
    assert bench.outcome("a") is Outcome.COMPLETED
    bench.submit(spec("b"))
    assert [one.rollout_id for one in bench.tick()] == ["b"]


# floors ----------------------------------------------------------------------------------------------------------------


def test_a_floor_of_work_without_an_engine_keeps_no_room() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(max_rollouts=2, classes={BACKGROUND: Quota(floor_rollouts=2)})
    bench.submit(*specs("nowhere", 2, BACKGROUND, pool="nowhere"))
    bench.submit(*specs("a", 2))
    assert [one.rollout_id for one in bench.tick()] == ["a0", "a1"]


def test_the_floor_of_critical_work_keeps_no_room_while_the_trainer_syncs() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(max_rollouts=2, classes={CRITICAL: Quota(floor_rollouts=2)})
    bench.step(1, TrainerState.SYNCING)
    bench.submit(*specs("critical", 2))
    bench.submit(*specs("a", 2, BACKGROUND))
    assert len(bench.tick()) == 2
    bench.step(2, TrainerState.WAITING)
    bench.finish("a0")
    bench.finish("a1")
    assert {one.rollout_id for one in bench.tick()} == {"critical0", "critical1"}


def test_a_floor_behind_another_ceiling_keeps_no_room() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(
        max_rollouts=2,
        classes={BACKGROUND: Quota(floor_rollouts=2)},
        tasks={TaskType.GENERATION: Quota(max_rollouts=1)},
    )
    bench.submit(*specs("a", 3, BACKGROUND))
    assert len(bench.tick()) == 1
    bench.submit(spec("replay", task_type=REPLAY))
    assert [one.rollout_id for one in bench.tick()] == ["replay"]


def test_a_task_below_its_floor_goes_before_a_higher_class() -> None:
    """Another run has the rest of the pool, so the ceiling does not keep the last slot for it."""
    bench = Bench(engine(slots=4))
    bench.budget(tasks={REPLAY: Quota(floor_rollouts=1)})
    bench.submit(*specs("other", 3), run="other")
    bench.tick()
    bench.submit(*specs("a", 2))
    bench.submit(spec("replay", rollout_class=BACKGROUND, task_type=REPLAY))
    assert [one.rollout_id for one in bench.tick()] == ["replay"]


def test_a_task_below_its_floor_goes_before_others_of_its_class() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(tasks={REPLAY: Quota(floor_rollouts=1)})
    bench.submit(*specs("other", 3), run="other")
    bench.tick()
    bench.submit(*specs("a", 2))
    bench.submit(spec("replay", task_type=REPLAY))
    assert [one.rollout_id for one in bench.tick()] == ["replay"]


def test_a_floor_does_not_wait_for_the_leader_of_critical_work() -> None:
    bench = Bench(engine(slots=4))
    bench.budget(classes={BACKGROUND: Quota(floor_rollouts=2)})
    bench.submit(spec("g", 64, samples=4))
    assert len(bench.tick()) == 1
    bench.submit(*specs("a", 4, BACKGROUND))
    assert sorted(one.rollout_id for one in bench.tick()) == ["a0", "a1"]


def test_two_that_outgrow_a_kv_ceiling_together_take_turns_and_both_end() -> None:
    """Either fits beside what the other claims at first; with its first token each made the other leave, for ever."""
    settings = config(budget={"growth_tokens": 64, "headroom_tokens": 16})
    bench = Bench(engine(slots=4, page_tokens=16, kv_capacity_tokens=1 << 20), settings=settings)
    bench.budget(max_kv_tokens=160)
    bench.submit(*(spec(f"r{index}", tokens=16, max_new_tokens=100) for index in range(2)))
    written: Counter[str] = Counter()
    for _ in range(100):
        for attempt in bench.tick(0.1):
            written[attempt.attempt_id] = 1
            bench.write(attempt.rollout_id, 1)
        for rollout_id, attempt in list(bench.live.items()):
            if attempt.attempt_id in bench.aborted:
                bench.stopped(rollout_id)  # with its first token, which is written again
            elif len(bench.live) == 1 and written[attempt.attempt_id] > 4:
                bench.finish(rollout_id, attempt.max_new_tokens, "length")
            else:
                written[attempt.attempt_id] += len(bench.live) == 1
        if bench.ended == {"r0", "r1"}:
            return
    raise AssertionError(f"still there: {bench.live}")


def test_small_work_behind_three_that_fit_nowhere_takes_the_room_they_cannot() -> None:
    bench = Bench(*(engine(f"e{index}", slots=8, kv_capacity_tokens=4096) for index in range(4)))
    bench.run(*(spec(f"hog{index}", tokens=1800, max_new_tokens=300) for index in range(4)))
    bench.submit(*(spec(f"large{index}", tokens=2600, max_new_tokens=1000) for index in range(4)))
    bench.tick(1.0)
    bench.submit(*(spec(f"small{index}", max_new_tokens=100) for index in range(20)))
    bench.tick(1.0)
    assert sum(one.startswith("small") for one in bench.live) >= 16


def test_after_a_restart_with_work_on_it_an_engine_is_known_at_once() -> None:
    bench = Bench(engine(incarnation="1", vocabulary_size=1000))
    bench.run(spec("a", token_bytes=ids([5] * 8)))
    bench.do(JoinEngine(engine(incarnation="2", vocabulary_size=1000)))
    bench.tick()
    assert bench.rejected(spec("bad", token_bytes=ids([5000] * 8))).code is Code.INVALID_ARGUMENT
    bench.submit(spec("now", token_bytes=ids([5] * 8), fail_fast=True))


def test_a_trainer_that_starts_again_under_a_higher_epoch_may_count_from_an_earlier_step() -> None:
    bench = Bench(engine())
    bench.step(5)
    assert bench.refused(ReportStep(RUN, StepReport(3, TrainerState.TRAINING))).reason == "STEP_BACKWARDS"
    bench.do(ReportStep(RUN, StepReport(3, TrainerState.TRAINING), epoch=2))
    assert bench.run_view().step == 3
    assert bench.refused(ReportStep(RUN, StepReport(9, TrainerState.TRAINING), epoch=1)).reason == "FENCED"
    assert bench.streams_ended(), "the older trainer's stream"


def test_a_retracted_prompt_that_was_stopped_before_it_was_computed_again_is_cached_for_nobody() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", tokens=64))
    bench.write("a", 1)
    bench.publish(1, mode=UpdateMode.RETRACT)
    bench.finish_updates()
    bench.cancel("a")
    bench.finish("a", 1, "abort", spans=(("default", 0, 1),))
    bench.run(spec("b", token_bytes=prompt("a", 64)))
    assert predicted(bench, "b") == 0


def test_what_was_written_after_a_retraction_shows_that_the_prompt_is_cached() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a", tokens=64))
    bench.write("a", 1)
    bench.publish(1, mode=UpdateMode.RETRACT)
    bench.finish_updates()
    bench.finish("a", 16, spans=(("default", 0, 1), (bench.labels["e0"], 1, 16)))
    bench.run(spec("b", token_bytes=prompt("a", 64)))
    assert predicted(bench, "b") > 0


def predicted(bench: Bench, rollout_id: str) -> int:
    """Tokens of the live attempt's prompt that are believed to be cached."""
    return bench.core._world.attempts[bench.live[rollout_id].attempt_id].predicted_tokens
