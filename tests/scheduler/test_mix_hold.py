"""Results kept back until strata behind the target mix catch up: order, bounds, and every way in which they must go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rolloutd.scheduler import mix_hold
from rolloutd.scheduler.actions import Deliver, Finished, GroupFinished, Undelivered
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    BeginShutdown,
    CloseConsumer,
    DetachConsumer,
    DrainEngine,
    EndRun,
    JoinEngine,
    LoseEngine,
    PauseRun,
    RemoveEngine,
    UpdateRollouts,
)
from rolloutd.scheduler.mix_hold import MixHold
from rolloutd.scheduler.share_clock import ShareClock
from rolloutd.scheduler.spec import RolloutUpdate
from rolloutd.scheduler.states import OnStale, Outcome, RolloutClass, TrainerState
from tests.scheduler.kit import BACKGROUND, CONSUMER, CRITICAL, RUN, Bench, engine, spec

EVEN = {"a": 1.0, "b": 1.0}
SECONDS = 30.0


def mixed(slots: int = 16, **settings: Any) -> Bench:
    bench = Bench(engine(slots=slots))
    bench.configure(**{"target_mix": EVEN, "mix_hold_seconds": SECONDS, **settings})
    return bench


def started(bench: Bench, *names: str, **fields: Any) -> None:
    """Running rollouts whose names begin with their stratum."""
    bench.run(*[spec(name, stratum=name[0], **fields) for name in names])


def delivered(bench: Bench) -> list[str]:
    """Ids of results with a cursor, each once, in the order of the stream."""
    found = [
        (action.cursor, action.event.result.rollout_id)
        for action in bench.said
        if isinstance(action, Deliver) and action.cursor and isinstance(action.event, Finished)
    ]
    return [name for _, name in sorted(set(found))]


def held(bench: Bench) -> list[str]:
    hold = bench.its_run().mix_hold
    return [] if hold is None else [one.rollout_id for one in hold.held]


def ahead(**settings: Any) -> Bench:
    """a0 delivered, a1 and a2 kept back for b0, which runs."""
    bench = mixed(**settings)
    started(bench, "a0", "a1", "a2", "b0")
    for name in ("a0", "a1", "a2"):
        bench.finish(name)
    assert delivered(bench) == ["a0"] and held(bench) == ["a1", "a2"]
    return bench


# order


def test_results_come_in_the_order_of_the_mix_whatever_ends_first() -> None:
    bench = mixed()
    started(bench, "a0", "a1", "a2", "b0", "b1", "b2")
    for name in ("a0", "a1", "a2", "b0", "b1", "b2"):
        bench.finish(name)
    assert delivered(bench) == ["a0", "b0", "a1", "b1", "a2", "b2"] and not held(bench)


def test_without_seconds_every_result_goes_at_once() -> None:
    bench = mixed(mix_hold_seconds=0.0)
    started(bench, "a0", "a1", "b0")
    bench.finish("a0")
    bench.finish("a1")
    assert delivered(bench) == ["a0", "a1"] and bench.its_run().mix_hold is None


def test_what_is_kept_back_goes_when_nothing_that_is_behind_is_coming_any_more() -> None:
    bench = ahead()
    bench.cancel("b0")
    assert held(bench) == ["a1", "a2"], "an engine is still to stop it, and may have finished it"
    bench.stop_aborted()
    assert delivered(bench) == ["a0", "b0", "a1", "a2"]


def test_what_did_not_complete_is_no_sample_and_goes_at_once() -> None:
    bench = mixed()
    started(bench, "a0", "a1", "b0")
    bench.finish("a0")
    bench.cancel("a1")
    bench.stop_aborted()
    assert delivered(bench) == ["a0", "a1"] and bench.outcome("a1") is Outcome.CANCELLED


def test_strata_without_a_share_are_none_of_its_business() -> None:
    bench = ahead()
    started(bench, "x0")
    bench.finish("x0")
    assert delivered(bench) == ["a0", "x0"]


def test_critical_results_do_not_wait_for_lower_classes() -> None:
    bench = mixed()
    started(bench, "a0", "a1", rollout_class=CRITICAL)
    started(bench, "b0", rollout_class=BACKGROUND)
    bench.finish("a0")
    bench.finish("a1")
    assert delivered(bench) == ["a0", "a1"]


def test_a_change_of_class_lets_go_who_waited_for_it() -> None:
    bench = ahead()
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("b0", rollout_class=RolloutClass.BACKGROUND),)))
    assert delivered(bench) == ["a0", "a1", "a2"]


def test_what_is_queued_is_waited_for_unless_it_may_not_start() -> None:
    bench = mixed(slots=2)
    started(bench, "a0", "a1")
    bench.submit(spec("b0", stratum="b"))
    bench.finish("a0")
    bench.finish("a1")
    assert held(bench) == ["a1"]
    bench.do(PauseRun(RUN))
    assert delivered(bench) == ["a0", "a1"]


def test_a_bound_on_samples_that_keeps_the_others_queued_lets_go() -> None:
    """Only acknowledging makes room there, and what is kept back cannot be acknowledged."""
    bench = mixed(max_staleness=0, batch_samples=2)
    started(bench, "a0", "a1")
    bench.submit(spec("b0", stratum="b"))
    bench.tick()
    assert "b0" not in bench.live
    bench.finish("a0")
    bench.finish("a1")
    assert delivered(bench) == ["a0", "a1"]


def test_what_is_queued_where_no_engine_could_run_it_is_not_waited_for() -> None:
    bench = mixed()
    started(bench, "a0", "a1", "a2")
    bench.submit(spec("b0", stratum="b", pool="nowhere"), spec("b1", stratum="b", engine_labels={"zone": "x"}))
    bench.finish("a0")
    bench.finish("a1")
    assert delivered(bench) == ["a0", "a1"]
    bench.do(JoinEngine(engine("e1", labels={"zone": "x"})))
    bench.finish("a2")
    assert held(bench) == ["a2"]
    bench.cancel("b1")
    assert delivered(bench) == ["a0", "a1", "b1", "a2"]


@pytest.mark.parametrize("leave", [DrainEngine("e1"), LoseEngine("e1", "it is gone"), RemoveEngine("e1")])
def test_an_engine_that_takes_no_more_work_lets_go_what_waited_for_work_of_its_own(
    leave: DrainEngine | LoseEngine | RemoveEngine,
) -> None:
    bench = mixed()
    bench.do(JoinEngine(engine("e1", slots=1, pool="other")))
    started(bench, "a0", "a1")
    bench.run(spec("x0", pool="other"))
    bench.submit(spec("b0", stratum="b", pool="other"))
    bench.finish("a0")
    bench.finish("a1")
    assert held(bench) == ["a1"]
    bench.do(leave)
    bench.pass_time(2.0)
    assert delivered(bench) == ["a0", "a1"]


# who is never kept back


@pytest.mark.parametrize("fields", [{"session_id": "s"}, {"deadline_seconds": 60.0}, {"parent_rollout_id": "a0"}])
def test_what_somebody_waits_for_goes_at_once(fields: dict[str, Any]) -> None:
    bench = ahead()
    started(bench, "a3", **fields)
    bench.finish("a3")
    assert delivered(bench) == ["a0", "a3"]


def test_what_a_waiting_trainer_needs_for_its_step_goes_at_once() -> None:
    bench = mixed()
    started(bench, "a0", "a1", "a2", needed_by_step=1)
    started(bench, "b0", needed_by_step=9, rollout_class=CRITICAL)
    bench.finish("a0")
    bench.finish("a1")
    assert held(bench) == ["a1"]
    bench.step(1, TrainerState.TRAINING)
    assert held(bench) == ["a1"]
    bench.step(1, TrainerState.WAITING)
    bench.finish("a2")
    assert delivered(bench) == ["a0", "a1", "a2"]


def test_a_waiting_trainer_that_needs_samples_gets_what_belongs_to_no_step() -> None:
    bench = ahead()
    bench.step(0, TrainerState.WAITING)
    assert held(bench) == ["a1", "a2"], "it said that it needs none"
    started(bench, "a3")
    bench.run(spec("a4", stratum="a", needed_by_step=1))
    bench.step(0, TrainerState.WAITING, samples_needed=3)
    assert delivered(bench) == ["a0", "a1", "a2"]
    bench.finish("a3")
    bench.finish("a4")
    assert delivered(bench) == ["a0", "a1", "a2", "a3"] and held(bench) == ["a4"]


def test_the_root_of_a_tree_goes_when_its_first_child_comes() -> None:
    bench = ahead()
    bench.submit(spec("child", stratum="a", parent_rollout_id="a2"))
    assert delivered(bench) == ["a0", "a2"] and held(bench) == ["a1"]


# bounds


def test_nothing_is_kept_back_for_longer_than_its_seconds() -> None:
    bench = ahead()
    bench.tick(SECONDS - 1.0)
    assert held(bench) == ["a1", "a2"]
    bench.tick(1.0)
    assert delivered(bench) == ["a0", "a1", "a2"]


def test_what_is_kept_back_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    most = mix_hold.MOST_RESULTS
    bench = Bench(engine(slots=most + 8, kv_capacity_tokens=1 << 22))
    bench.configure(target_mix=EVEN, mix_hold_seconds=SECONDS)
    started(bench, "b0")
    for number in range(most + 3):
        started(bench, f"a{number}")
        bench.finish(f"a{number}")
    assert len(held(bench)) == most and delivered(bench) == ["a0", "a1", "a2"]


def test_what_is_kept_back_is_bounded_in_bytes_and_counts_as_undelivered() -> None:
    bench = ahead()
    run = bench.its_run()
    hold = run.mix_hold
    assert hold is not None and hold.size_bytes > 0 and run.undelivered_results == 3
    assert bench.run_view().held_results == 2 and bench.run_view().undelivered_bytes > hold.size_bytes
    bench.configure(target_mix=EVEN, mix_hold_seconds=SECONDS, max_undelivered_bytes=4 * hold.size_bytes - 4)
    assert held(bench) == ["a2"] and delivered(bench) == ["a0", "a1"]


# races


@pytest.mark.parametrize("name", ["a1", "a2"])
def test_a_cancelled_one_goes_at_once_with_what_it_has(name: str) -> None:
    bench = ahead()
    bench.cancel(name)
    assert delivered(bench) == ["a0", name] and bench.outcome(name) is Outcome.COMPLETED
    bench.finish("b0")
    assert Counter(delivered(bench)) == Counter(["a0", "a1", "a2", "b0"])


def test_a_consumer_that_comes_back_gets_what_it_missed_in_order_and_once() -> None:
    bench = ahead()
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.finish("b0")
    said = [
        one.event.result.rollout_id
        for one in bench.said
        if isinstance(one, Undelivered) and isinstance(one.event, Finished)
    ]
    assert said == ["b0", "a1", "a2"]
    bench.do(AttachConsumer(RUN, CONSUMER, cursor=1))
    assert delivered(bench) == ["a0", "b0", "a1", "a2"]
    bench.do(AcknowledgeResults(RUN, CONSUMER, through_cursor=4))
    assert not bench.its_run().rollouts
    bench.quiet()


def test_one_that_comes_back_meanwhile_has_still_to_get_what_is_kept_back() -> None:
    bench = ahead()
    bench.do(DetachConsumer(RUN, CONSUMER))
    actions = bench.do(AttachConsumer(RUN, CONSUMER, cursor=1))
    attached = [one.event for one in actions if isinstance(one, Deliver)]
    assert [getattr(one, "unfinished_rollouts", None) for one in attached] == [3], "b0 and what is kept back"


def test_whoever_takes_over_gets_what_was_kept_back_for_another() -> None:
    bench = ahead()
    bench.do(AttachConsumer(RUN, "rank-1", take_over=(CONSUMER,)))
    bench.finish("b0")
    got = [one.result.rollout_id for one in bench.heard(Finished, consumer="rank-1")]
    assert got == ["a0", "b0", "a1", "a2"]


def test_a_stream_that_was_closed_ends_behind_what_was_kept_back() -> None:
    bench = ahead()
    bench.do(CloseConsumer(RUN, CONSUMER))
    bench.tick()
    assert not bench.streams_ended()
    bench.finish("b0")
    bench.tick()
    assert len(bench.streams_ended()) == 1 and len(delivered(bench)) == 4


def test_one_that_left_and_took_its_work_along_leaves_nothing_kept_back() -> None:
    bench = ahead(cancel_on_disconnect=True)
    bench.do(DetachConsumer(RUN, CONSUMER))
    assert not held(bench) and bench.its_run().undelivered_results == 3


def test_acknowledging_what_is_kept_back_changes_nothing() -> None:
    bench = ahead()
    bench.acknowledge("a1")
    assert held(bench) == ["a1", "a2"]


def test_submitting_it_again_lets_it_go() -> None:
    bench = ahead()
    bench.submit(spec("a1", stratum="a"))
    assert delivered(bench) == ["a0", "a1"]
    assert [one.result.rollout_id for one in bench.heard(Finished)] == ["a0", "a1"]


def test_the_end_of_its_run_lets_all_go() -> None:
    bench = ahead()
    bench.do(EndRun(RUN))
    assert delivered(bench) == ["a0", "a1", "a2"]
    bench.stop_aborted()
    assert delivered(bench) == ["a0", "a1", "a2", "b0"]


def test_shutting_down_lets_all_go() -> None:
    bench = ahead()
    bench.do(BeginShutdown(5.0))
    assert delivered(bench) == ["a0", "a1", "a2"]


@pytest.mark.parametrize(
    "change", [{"mix_hold_seconds": 0.0}, {"target_mix": {}}, {"target_mix": {"a": 2.0, "b": 1.0}}]
)
def test_settings_that_say_otherwise_let_all_go(change: dict[str, Any]) -> None:
    bench = ahead()
    bench.configure(**{"target_mix": EVEN, "mix_hold_seconds": SECONDS, **change})
    assert delivered(bench) == ["a0", "a1", "a2"]
    bench.finish("b0")
    bench.quiet()


def test_fewer_seconds_count_for_what_is_kept_back_already() -> None:
    bench = ahead()
    bench.tick(5.0)
    bench.configure(target_mix=EVEN, mix_hold_seconds=6.0)
    bench.tick(1.0)
    assert delivered(bench) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_one_that_becomes_too_old_is_withheld_or_marked_as_it_goes(on_stale: OnStale) -> None:
    bench = ahead(max_staleness=0, on_stale=on_stale)
    bench.publish(1)
    bench.stop_aborted(4)
    bench.finish_updates()
    bench.tick(SECONDS)
    result = bench.result("a1")
    assert result.stale and result.complete is (on_stale is OnStale.FLAG)
    assert result.outcome is (Outcome.COMPLETED if on_stale is OnStale.FLAG else Outcome.STALE)
    assert bool(result.token_bytes) is (on_stale is OnStale.FLAG)
    assert bench.its_run().stale_results == 2


# groups


def test_a_groups_end_comes_behind_the_last_of_its_results() -> None:
    bench = mixed()
    bench.run(spec("g", samples=3, stratum="a"))
    started(bench, "b0")
    for one in bench.tick():
        bench.write(one.rollout_id, 1)
    for index in range(3):
        bench.finish(f"g/{index}")
    assert held(bench) == ["g/1", "g/2"] and not bench.heard(GroupFinished)
    bench.finish("b0")
    (end,) = bench.heard(GroupFinished)
    assert end.complete and bench.said[-1].event is end  # type: ignore[union-attr]
    bench.acknowledge("g/0", "g/1", "g/2", "b0")
    assert not bench.its_run().groups


def test_a_group_with_a_member_that_became_too_old_while_kept_back_is_not_complete() -> None:
    bench = mixed(max_staleness=0)
    bench.run(spec("g", samples=2, stratum="a"))
    started(bench, "b0")
    bench.tick()
    bench.finish("g/0")
    bench.finish("g/1")
    bench.publish(1)
    bench.stop_aborted(4)
    bench.finish_updates()
    bench.tick(SECONDS)
    (end,) = bench.heard(GroupFinished)
    assert not end.complete and end.failed_rollout_ids == ("g/1",)


# turns by share


def test_turns_follow_shares_to_less_than_one() -> None:
    shares = {"a": 5.0, "b": 3.0, "c": 2.0}
    clock = ShareClock(shares, 10.0)
    taken: Counter[str] = Counter()
    for turn in range(1, 101):
        name = min(shares, key=clock.finish)
        clock.take(name)
        taken[name] += 1
        assert all(abs(taken[one] - turn * share / 10.0) <= 1.0 for one, share in shares.items()), taken


def test_what_was_missed_long_ago_is_forgotten() -> None:
    clock = ShareClock(EVEN, 4.0)
    for _ in range(100):
        clock.take("a")
    turns = []
    for _ in range(12):
        name = min(EVEN, key=clock.finish)
        clock.take(name)
        turns.append(name)
    assert 2 < turns.count("b") < 12 and set(turns[-4:]) == {"a", "b"}, turns


@pytest.mark.parametrize("share", [1e-12, 1e-18, 5e-324])
def test_a_share_too_small_for_any_turn_is_none(share: float) -> None:
    assert set(ShareClock({"a": 0.25, "b": 0.75, "c": share}, 32.0).strides) == {"a", "b"}
    assert set(ShareClock({"a": share, "b": share}, 32.0).strides) == {"a", "b"}, "shares are relative"


def test_turns_of_a_very_small_share_leave_the_others_their_order() -> None:
    clock = ShareClock({"a": 0.25, "b": 0.75, "c": 2e-6}, 32.0)
    for _ in range(10):
        clock.take("c")
    taken: Counter[str] = Counter()
    for _ in range(100):
        name = min("abc", key=clock.finish)
        clock.take(name)
        taken[name] += 1
    assert 22 <= taken["a"] <= 28 and not taken["c"], taken


def test_a_turn_given_back_comes_again() -> None:
    clock = ShareClock(EVEN, 4.0)
    clock.take("a")
    assert clock.finish("b") < clock.finish("a")
    clock.give_back("a")
    assert clock.finish("b") == clock.finish("a")


def test_counts_of_a_hold_come_back_to_nothing() -> None:
    bench = ahead()
    hold = bench.its_run().mix_hold
    assert isinstance(hold, MixHold) and hold.coming() == ({}, {("b", CRITICAL): 1})
    bench.submit(spec("b1", stratum="b", pool="nowhere"))
    assert hold.coming() == ({("b", CRITICAL, ("nowhere", ())): 1}, {("b", CRITICAL): 1})
    bench.cancel("b1")
    bench.finish("b0")
    assert hold.coming() == ({}, {}) and not hold.size_bytes
