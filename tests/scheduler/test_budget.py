"""Stage one: what may run now. Ceilings, shares, floors, leases, shrinking, undelivered results."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from rolloutd.scheduler.actions import Abort, NoticeKind
from rolloutd.scheduler.events import SetBudget
from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import (
    AbortReason,
    Code,
    FaultKind,
    Gate,
    OnPreempt,
    Outcome,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
)
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
    spec,
    specs,
)

NO_PREEMPTION = config(preempt={"enabled": False})


def running_by_class(bench: Bench) -> Counter[RolloutClass]:
    return Counter(bench.view(rollout_id).rollout_class for rollout_id in bench.live)


# ceilings


def test_a_ceiling_on_rollouts_is_hard() -> None:
    bench = Bench(*engines(2, 8))
    bench.budget(max_rollouts=3)
    bench.submit(*specs("r", 10))
    assert len(bench.tick()) == 3
    assert bench.gates()[Gate.CEILING_ROLLOUTS]
    bench.finish(next(iter(bench.live)))
    assert len(bench.tick()) == 1


def test_a_ceiling_of_a_class_and_one_of_a_task_type() -> None:
    bench = Bench(engine(slots=16), settings=NO_PREEMPTION)
    bench.budget(classes={BACKGROUND: Quota(max_rollouts=2)}, tasks={TaskType.REPLAY: Quota(max_rollouts=1)})
    bench.submit(*specs("b", 5, BACKGROUND), *specs("p", 4, task_type=TaskType.REPLAY), *specs("c", 3))
    bench.tick()
    kinds = Counter(rollout_id[0] for rollout_id in bench.live)
    assert kinds == {"b": 2, "p": 1, "c": 3}
    assert bench.gates()[Gate.CLASS_CEILING] and bench.gates()[Gate.TASK_CEILING]


def test_a_ceiling_on_kv_tokens_counts_claims() -> None:
    bench = Bench(engine(slots=16, page_tokens=16))
    bench.budget(max_kv_tokens=320)
    bench.submit(*specs("r", 10, tokens=48, max_new_tokens=32))  # 80 tokens each, at most
    assert len(bench.tick()) == 4
    assert bench.run_view().kv_claimed_tokens == 320 and bench.gates()[Gate.CEILING_KV]


def test_zero_is_a_pause_and_none_is_no_limit() -> None:
    for budget in (Budget(max_rollouts=0), Budget(max_kv_tokens=0)):
        bench = Bench(engine(slots=4))
        bench.run(*specs("r", 2))
        bench.do(SetBudget(RUN, budget))
        bench.submit(spec("late"))
        assert bench.leaving() == {"r0", "r1"} and not bench.tick()
        bench.stop_aborted(4)
        assert not bench.pass_time(30.0)
        bench.budget()
        assert len(bench.tick()) == 3
        for rollout_id in list(bench.live):
            bench.finish(rollout_id, 12 if rollout_id.startswith("r") else 16)
        assert all(
            bench.whole(rollout_id) and bench.result(rollout_id).generated_tokens == 16 for rollout_id in bench.ended
        )
        bench.quiet()


def test_memory_limits_become_tokens_through_the_engines_own_figures() -> None:
    megabyte_per_token = engine(slots=16, kv_capacity_tokens=1024, kv_cache_bytes=1024 << 20, page_tokens=16)
    for budget, room in (
        (Budget(max_inference_mb=160.0), 160),
        (Budget(training_reserved_mb=864.0), 160),
        (Budget(training_reserved_mb=100.0, max_inference_mb=80.0), 80),
        (Budget(training_reserved_mb=2000.0), 0),
    ):
        bench = Bench(megabyte_per_token)
        bench.submit(*specs("r", 20, tokens=16, max_new_tokens=64))  # 80 tokens each
        bench.do(SetBudget(RUN, budget))
        bench.tick()
        assert bench.engine("e0").kv_claimed_tokens == room, budget
        assert bench.gates()[Gate.ENGINE_KV_CEILING]


def test_a_memory_limit_needs_engines_that_say_what_their_cache_weighs() -> None:
    bench = Bench(engine())
    refusal = bench.refused(SetBudget(RUN, Budget(max_inference_mb=100.0)))
    assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "ENGINE_MEMORY_UNKNOWN")
    assert "e0" in refusal.message and "max_kv_tokens" in refusal.message


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        (Budget(max_rollouts=-1), "max_rollouts"),
        (Budget(max_kv_tokens=-1), "max_kv_tokens"),
        (Budget(training_reserved_mb=-0.5), "training_reserved_mb"),
        (Budget(training_reserved_mb=math.nan), "training_reserved_mb"),
        (Budget(max_inference_mb=math.inf), "max_inference_mb"),
        (Budget(lease_seconds=-1.0), "lease_seconds"),
        (Budget(lease_seconds=math.nan), "lease_seconds"),
        (Budget(classes={BACKGROUND: Quota(share=1.5)}), "classes[BACKGROUND].share"),
        (Budget(tasks={TaskType.REWARD: Quota(share=math.nan)}), "tasks[REWARD].share"),
        (Budget(classes={BACKGROUND: Quota(max_rollouts=1, floor_rollouts=2)}), "classes[BACKGROUND].floor_rollouts"),
        (Budget(max_rollouts=1, tasks={TaskType.REWARD: Quota(floor_rollouts=2)}), "tasks.floor_rollouts"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_and_changes_nothing(budget: Budget, field: str) -> None:
    bench = Bench(engine(kv_cache_bytes=1 << 30))
    bench.budget(max_rollouts=1)
    before = bench.run_view()
    refusal = bench.refused(SetBudget(RUN, budget))
    assert refusal.code is Code.INVALID_ARGUMENT and [name for name, _ in refusal.fields] == [field]
    assert bench.run_view() == before


def test_an_older_trainer_sets_no_budget() -> None:
    from rolloutd.scheduler.events import AttachConsumer

    bench = Bench(engine())
    bench.do(AttachConsumer(RUN, CONSUMER, epoch=3))
    refusal = bench.refused(SetBudget(RUN, Budget(max_rollouts=0), epoch=2))
    assert (refusal.code, refusal.reason) == (Code.ABORTED, "FENCED")


# shrinking


def test_a_shrink_interrupts_the_lowest_class_first_and_work_resumes_with_its_tokens() -> None:
    bench = Bench(engine(slots=6))
    bench.run(*specs("c", 2), *specs("u", 2, REUSABLE), *specs("b", 2, BACKGROUND))
    bench.budget(max_rollouts=3)
    assert {rollout_id[0] for rollout_id in bench.leaving()} == {"b", "u"} and len(bench.leaving()) == 3
    aborts = [action for action in bench.said if isinstance(action, Abort)]
    assert [action.reason for action in aborts] == [AbortReason.BUDGET] * 3
    bench.stop_aborted(7)
    assert not bench.tick()
    bench.budget(max_rollouts=6)
    again = bench.tick()
    assert all((len(one.token_bytes) // 4, one.max_new_tokens) == (15, 9) for one in again) and len(again) == 3
    for one in again:
        bench.finish(one.rollout_id, 9)
        assert bench.whole(one.rollout_id) and bench.result(one.rollout_id).preemptions == 1


def test_within_a_class_those_who_have_written_least_go_first_and_never_goes_last() -> None:
    bench = Bench(engine(slots=4))
    bench.run(
        spec("new", rollout_class=BACKGROUND),
        spec("old", rollout_class=BACKGROUND),
        spec("never", rollout_class=BACKGROUND, on_preempt=OnPreempt.NEVER),
    )
    bench.write("old", 9)
    order = []
    for left in (2, 1, 0):
        bench.budget(max_rollouts=left)
        order += bench.stop_aborted(2)
    assert order == ["new", "old", "never"]


def test_a_shrink_keeps_the_floors_of_classes() -> None:
    bench = Bench(engine(slots=8))
    bench.run(*specs("c", 4), *specs("b", 4, BACKGROUND))
    bench.budget(max_rollouts=4, classes={BACKGROUND: Quota(floor_rollouts=2)})
    bench.stop_aborted(3)
    assert running_by_class(bench) == {CRITICAL: 2, BACKGROUND: 2}


def test_a_shrunk_class_and_a_shrunk_task_lose_their_own_only() -> None:
    bench = Bench(engine(slots=8))
    bench.run(*specs("c", 2), *specs("b", 3, BACKGROUND), *specs("w", 2, task_type=TaskType.REWARD))
    bench.budget(classes={BACKGROUND: Quota(max_rollouts=1)}, tasks={TaskType.REWARD: Quota(max_rollouts=1)})
    assert Counter(rollout_id[0] for rollout_id in bench.leaving()) == {"b": 2, "w": 1}


def test_a_shrunk_memory_limit_empties_each_engine_down_to_it() -> None:
    facts = [
        engine(f"e{index}", 4, kv_capacity_tokens=1024, kv_cache_bytes=1024 << 20, page_tokens=16) for index in range(2)
    ]
    bench = Bench(*facts)
    bench.run(*specs("r", 8, tokens=16, max_new_tokens=64))
    bench.budget(max_inference_mb=160.0)
    bench.stop_aborted(1)
    assert [bench.engine(name).kv_claimed_tokens for name in ("e0", "e1")] == [160, 160]


def test_a_claim_that_outgrows_the_ceiling_interrupts_and_everything_still_completes() -> None:
    settings = config(budget={"headroom_tokens": 16, "growth_tokens": 32})
    bench = Bench(engine(slots=4), settings=settings)
    bench.budget(max_kv_tokens=300)
    bench.run(*specs("r", 2, tokens=20, max_new_tokens=256))
    assert bench.run_view().kv_claimed_tokens < 2 * (20 + 256) // 2, "claims start at what is expected"
    for written in range(16, 161, 16):
        for rollout_id in sorted(set(bench.live) - bench.leaving()):
            bench.write(rollout_id, written)
    assert len(bench.leaving()) == 1, "together they claim more than the ceiling"
    (loser,) = bench.stop_aborted(100)
    assert bench.view(loser).generated_tokens == 100
    (winner,) = bench.live
    bench.finish(winner, 200)
    bench.tick()
    bench.finish(loser, 100)
    assert bench.whole(loser) and bench.result(loser).generated_tokens == 200
    bench.quiet()


def test_a_slow_rollout_that_is_interrupted_is_never_started_over() -> None:
    bench = Bench(*engines(2, 4), settings=config(executor={"timeout_seconds": 1e6}))
    bench.run(*specs("slow", 5, max_new_tokens=400))
    made = 0
    for step in range(40):
        bench.step(step)
        bench.run(*[spec(f"fast{step}-{index}") for index in range(3)])
        for rollout_id in [name for name in bench.live if name.startswith("fast")]:
            bench.finish(rollout_id)
        bench.budget(max_rollouts=step % 4)
        bench.stop_aborted(10)
        bench.budget()
        bench.tick()
        made = max([made, *[one.max_new_tokens for one in bench.dispatched[-5:] if one.rollout_id.startswith("slow")]])
    for rollout_id in sorted(name for name in bench.live if name.startswith("slow")):
        bench.finish(rollout_id, 5)
        result = bench.result(rollout_id)
        assert bench.whole(rollout_id) and result.generated_tokens == 10 * result.preemptions + 5
        assert result.outcome is Outcome.COMPLETED


# leases


def test_a_lease_that_runs_out_falls_back_to_the_default_with_a_warning() -> None:
    bench = Bench(engine(slots=8), settings=config(budget={"default": Budget(max_rollouts=2)}))
    bench.submit(*specs("r", 8))
    bench.budget(max_rollouts=5, lease_seconds=30.0)
    bench.tick()
    assert len(bench.live) == 5 and bench.run_view().budget_lease_remaining_seconds == 30.0
    bench.tick(29.0)
    assert not bench.leaving()
    bench.tick(1.0)
    assert len(bench.leaving()) == 3
    assert bench.run_view().budget_is_default and len(bench.notices(NoticeKind.BUDGET_LEASE_EXPIRED)) == 1
    (record,) = bench.records("budget_lease_expired")
    assert record.level == "warning" and record.fields["run"] == RUN


def test_a_renewed_lease_does_not_run_out_by_the_old_one() -> None:
    bench = Bench(engine(slots=8), settings=config(budget={"default": Budget(max_rollouts=0)}))
    bench.budget(max_rollouts=5, lease_seconds=30.0)
    bench.tick(20.0)
    bench.budget(max_rollouts=4, lease_seconds=30.0)
    bench.pass_time(29.0)
    assert bench.run_view().budget.max_rollouts == 4
    bench.budget(max_rollouts=3)  # for good
    bench.pass_time(100.0)
    assert bench.run_view().budget.max_rollouts == 3
    assert not bench.notices(NoticeKind.BUDGET_LEASE_EXPIRED)
    assert len(bench.notices(NoticeKind.BUDGET_CHANGED)) == 3


# shares and floors


def test_a_share_binds_only_while_somebody_else_wants_the_room() -> None:
    bench = Bench(engine(slots=8), settings=NO_PREEMPTION)
    bench.budget(classes={CRITICAL: Quota(share=0.5)})
    bench.submit(*specs("c", 8))
    assert len(bench.tick()) == 8, "nobody else wants it"
    bench.submit(*specs("b", 8, BACKGROUND))
    bench.submit(*[spec(f"d{index}") for index in range(8)])
    for index in range(8):
        bench.finish(f"c{index}")
        bench.tick()
    assert running_by_class(bench) == {CRITICAL: 4, BACKGROUND: 4}
    assert bench.gates()[Gate.CLASS_SHARE]


def test_a_share_of_a_task_type() -> None:
    bench = Bench(engine(slots=8), settings=NO_PREEMPTION)
    bench.budget(tasks={TaskType.REPLAY: Quota(share=0.25)})
    bench.submit(*specs("p", 8, task_type=TaskType.REPLAY, deadline_seconds=5.0), *specs("g", 8))
    bench.tick()
    assert Counter(rollout_id[0] for rollout_id in bench.live) == {"p": 2, "g": 6}


@pytest.mark.parametrize("floored", ["class", "task"])
def test_a_floor_is_lent_while_unused_and_returned_first(floored: str) -> None:
    bench = Bench(engine(slots=4), settings=NO_PREEMPTION)
    quota = Quota(floor_rollouts=2)
    if floored == "class":
        bench.budget(classes={BACKGROUND: quota})
        owed = specs("b", 4, BACKGROUND)
    else:
        bench.budget(tasks={TaskType.REPLAY: quota})
        owed = specs("b", 4, task_type=TaskType.REPLAY)
    bench.submit(*specs("c", 40))
    assert len(bench.tick()) == 4, "lent"
    bench.submit(*owed)
    assert not bench.tick()
    order = []
    for _ in range(4):
        bench.finish(next(rollout_id for rollout_id in bench.live if rollout_id.startswith("c")))
        order += [one.rollout_id[0] for one in bench.tick()]
        if order == ["b", "b"]:
            break
    assert order == ["b", "b"], "returned first"
    for _ in range(30):
        bench.finish(next(iter(bench.live)))
        bench.tick()
        owed_left = sum(
            1 for view in bench.core.list_rollouts(RUN, bench.now) if view.rollout_id[0] == "b" and not view.result
        )
        held = sum(rollout_id.startswith("b") for rollout_id in bench.live)
        assert held >= min(2, owed_left) - 1, "a floor holds within one rollout"


def test_a_floor_keeps_the_last_room_free_for_those_it_is_owed_to() -> None:
    bench = Bench(engine(slots=4, labels={"gpu": "old"}), settings=NO_PREEMPTION)
    bench.budget(classes={BACKGROUND: Quota(floor_rollouts=1)})
    bench.submit(spec("b", rollout_class=BACKGROUND, engine_labels={"gpu": "new"}), *specs("c", 8))
    assert len(bench.tick()) == 3 and bench.gates()[Gate.FLOOR_OWED]


# small and large


def test_two_rollouts_over_four_engines_and_one_over_eight_make_progress() -> None:
    for budget, count in ((2, 4), (1, 8)):
        bench = Bench(*engines(count, 4))
        bench.budget(
            max_rollouts=budget, classes={CRITICAL: Quota(share=0.01)}, tasks={TaskType.GENERATION: Quota(share=0.01)}
        )
        bench.submit(*specs("r", 12), *specs("b", 2, BACKGROUND))
        for _ in range(14):
            bench.tick(0.1)
            assert len(bench.live) == min(budget, 14 - len(bench.ended))
            bench.finish(next(iter(bench.live)))
        assert len(bench.ended) == 14
        bench.quiet()


def test_no_path_past_the_budget_of_a_run() -> None:
    from rolloutd.scheduler.events import AttachConsumer

    bench = Bench(engine(slots=16))
    bench.budget(max_rollouts=4)
    bench.submit(*specs("r", 4))
    assert len(bench.tick()) == 4
    bench.do(AttachConsumer(RUN, "rank-1"))
    bench.submit(*specs("second", 4), consumer="rank-1")
    bench.submit(spec("many", samples=4), spec("turn", session_id="s", turn=3), spec("eval", deadline_seconds=5.0))
    assert not bench.tick() and len(bench.live) == 4
    bench.do(AttachConsumer("other", CONSUMER))
    bench.submit(*specs("other", 4), run="other")
    assert {one.rollout_id for one in bench.tick()} == {f"other{index}" for index in range(4)}, (
        "another run, another budget"
    )
    bench.fail("r0", FaultKind.BROKEN)
    assert len(bench.tick()) == 1 and len(bench.live) == 8, "a retry takes the same room"


def test_undelivered_results_stop_admission_and_acknowledgement_reopens_it() -> None:
    bench = Bench(engine(slots=8))
    limit = 8_000
    bench.configure(max_undelivered_bytes=limit)
    bench.submit(*specs("r", 250, max_new_tokens=64))
    ages: list[float] = []
    unread: list[tuple[float, str]] = []
    for turn in range(150):
        bench.tick(0.1)
        for rollout_id in list(bench.live):
            bench.finish(rollout_id, 64)
            unread.append((bench.now, rollout_id))
        one_round = 8 * bench.result(unread[0][1]).size_bytes
        assert bench.run_view().undelivered_bytes <= limit + one_round, "more than what ran when the gate closed"
        if turn % 10 == 9:  # the reader is ten times slower than the producer
            ages += [bench.now - at for at, _ in unread[:8]]
            bench.acknowledge(*[rollout_id for _, rollout_id in unread[:8]])
            del unread[:8]
    assert bench.gates()[Gate.UNDELIVERED] and len(bench.ended) < 200
    assert max(ages[len(ages) // 2 :]) <= max(ages[: len(ages) // 2]) + 1.0, "what is delivered gets older and older"
    bench.acknowledge(*[rollout_id for _, rollout_id in unread])
    assert bench.run_view().undelivered_bytes == 0 and len(bench.tick()) == 8


# the trainer's state


def test_a_paused_trainer_gets_nothing_and_a_syncing_one_gets_no_critical_work() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(*specs("c", 2), *specs("b", 2, BACKGROUND))
    bench.step(1, TrainerState.PAUSED)
    assert not bench.tick() and bench.gates()[Gate.RUN_PAUSED]
    bench.step(1, TrainerState.SYNCING)
    assert {one.rollout_id[0] for one in bench.tick()} == {"b"} and bench.gates()[Gate.TRAINER_SYNCING]
    bench.step(1, TrainerState.WAITING)
    assert {one.rollout_id[0] for one in bench.tick()} == {"c"}


def test_a_paused_run_keeps_what_runs_and_starts_nothing() -> None:
    from rolloutd.scheduler.events import PauseRun, ResumeRun

    bench = Bench(engine(slots=2))
    bench.run(spec("a"))
    bench.do(PauseRun(RUN))
    bench.submit(spec("b"))
    assert not bench.pass_time(5.0) and bench.state("a") is RolloutState.RUNNING
    bench.finish("a")
    bench.do(ResumeRun(RUN))
    assert [one.rollout_id for one in bench.tick()] == ["b"]
