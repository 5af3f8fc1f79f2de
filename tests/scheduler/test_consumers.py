"""Who reads results: attaching with a cursor, taking over, fencing, closing, disconnecting, expiry, verdicts."""

from __future__ import annotations

from rolloutd.scheduler.actions import Attached, Deliver, EndStream, Finished, GroupFinished, NoticeKind, Progressed
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    CancelRollouts,
    CloseConsumer,
    DetachConsumer,
    EndRun,
    PauseRun,
    ReportStep,
    SubmitRollouts,
    UpdateRollouts,
)
from rolloutd.scheduler.spec import Acknowledgement, RolloutUpdate, StepReport
from rolloutd.scheduler.states import Code, Outcome, RolloutState, TrainerState
from tests.scheduler.kit import CONSUMER, RUN, Bench, config, engine, spec, specs


def finished(bench: Bench, count: int = 3) -> Bench:
    bench.run(*specs("r", count))
    for index in range(count):
        bench.finish(f"r{index}")
    return bench


def attach(bench: Bench, consumer: str = CONSUMER, **fields: object) -> list[Deliver]:
    """What the stream carries when it opens."""
    actions = bench.do(AttachConsumer(RUN, consumer, **fields))  # type: ignore[arg-type]
    return [action for action in actions if isinstance(action, Deliver)]


def results(deliveries: list[Deliver]) -> list[str]:
    return [one.event.result.rollout_id for one in deliveries if isinstance(one.event, Finished)]


# cursors


def test_a_cursor_replays_what_was_missed_once_and_in_order() -> None:
    bench = finished(Bench(engine(slots=8)))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.run(spec("late"))
    bench.finish("late")
    assert not bench.heard(Finished)[3:], "nobody listens"
    opened = attach(bench, cursor=2)
    assert opened[0].event == Attached(cursor=4, unfinished_rollouts=0, undelivered_events=2) and opened[0].cursor == 0
    assert results(opened) == ["r2", "late"] and [one.cursor for one in opened[1:]] == [3, 4]
    assert results(attach(bench, cursor=4)) == [] and bench.run_view().undelivered_bytes == 0


def test_without_a_cursor_everything_not_acknowledged_comes_again() -> None:
    bench = finished(Bench(engine(slots=8)))
    bench.acknowledge("r1")
    assert results(attach(bench)) == ["r0", "r2"]
    assert results(attach(bench)) == ["r0", "r2"]


def test_a_cursor_from_before_a_restart_of_the_server_is_where_numbering_goes_on() -> None:
    bench = Bench(engine())
    attach(bench, cursor=41)
    bench.run(spec("a"))
    bench.finish("a")
    assert [d.cursor for d in bench.said if isinstance(d, Deliver) and isinstance(d.event, Finished)] == [42]


def test_acknowledging_by_cursor_and_by_name_frees_bytes_once() -> None:
    bench = finished(Bench(engine(slots=8)))
    size = bench.run_view().undelivered_bytes
    bench.do(AcknowledgeResults(RUN, CONSUMER, (Acknowledgement("r0"),), through_cursor=2))
    assert bench.run_view().undelivered_bytes == size // 3 and bench.run_view().undelivered_results == 1
    for _ in range(2):
        bench.do(
            AcknowledgeResults(RUN, CONSUMER, (Acknowledgement("r2"), Acknowledgement("nobody")), through_cursor=99)
        )
    assert bench.run_view().undelivered_bytes == 0 and not bench.its_run().rollouts


def test_a_consumer_acknowledges_its_own_results_only() -> None:
    bench = finished(Bench(engine(slots=8)))
    attach(bench, "rank-1")
    for _ in range(3):
        bench.acknowledge("r0", used=True, consumer="rank-1")
    assert bench.run_view().undelivered_results == 3 and bench.run_view().valid_samples == 0
    bench.acknowledge("r0", used=True)
    assert bench.run_view().undelivered_results == 2 and bench.run_view().valid_samples == 1


def test_progress_goes_to_those_who_asked_and_is_not_kept() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("a", want_progress=True), spec("b"))
    bench.write("a", 5)
    bench.write("b", 5)
    assert bench.heard(Progressed) == [Progressed("a", 1, "e0"), Progressed("a", 5, "e0")]
    assert not any(isinstance(one.event, Progressed) for one in attach(bench))


# several consumers


def test_results_go_to_the_consumer_that_submitted() -> None:
    bench = Bench(engine(slots=8))
    attach(bench, "rank-1")
    bench.run(spec("a"))
    bench.run(spec("b"), consumer="rank-1")
    bench.finish("a")
    bench.finish("b")
    assert [event.result.rollout_id for event in bench.heard(Finished)] == ["a"]
    assert [event.result.rollout_id for event in bench.heard(Finished, "rank-1")] == ["b"]


def test_taking_over_moves_what_is_kept_and_what_still_runs() -> None:
    bench = finished(Bench(engine(slots=8)), 2)
    bench.run(spec("g", samples=2))
    bench.finish("g/0")
    opened = attach(bench, "rank-1", take_over=(CONSUMER, "nobody", "rank-1"))
    (ended,) = bench.streams_ended()
    assert ended.consumer_id == CONSUMER and ended.error is not None and ended.error.reason == "REPLACED"
    assert results(opened) == ["r0", "r1", "g/0"]
    assert isinstance(opened[0].event, Attached) and opened[0].event.unfinished_rollouts == 1
    bench.finish("g/1")
    assert [event.group_id for event in bench.heard(GroupFinished, "rank-1")] == ["g"]
    bench.acknowledge("r0", "r1", "g/0", "g/1", consumer="rank-1")
    assert bench.run_view().undelivered_bytes == 0 and CONSUMER not in bench.its_run().consumers


def test_too_many_consumers_are_refused() -> None:
    bench = Bench(engine(), settings=config(delivery={"max_consumers_per_run": 2}))
    attach(bench, "rank-1")
    refusal = bench.refused(AttachConsumer(RUN, "rank-2"))
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CONSUMERS")
    assert bench.refused(SubmitRollouts(RUN, "rank-3", (spec("a"),))).reason == "TOO_MANY_CONSUMERS"


def test_too_many_runs_are_refused() -> None:
    bench = Bench(engine(), settings=config(delivery={"max_runs": 1}))
    refusal = bench.refused(AttachConsumer("second", CONSUMER))
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_RUNS") and "second" in refusal.message


# epochs


def test_a_newer_trainer_fences_the_older_one() -> None:
    bench = Bench(engine(slots=8))
    attach(bench, "old", epoch=1)
    bench.do(SubmitRollouts(RUN, "old", (spec("a"),), epoch=1))
    attach(bench, "new", epoch=2)
    ended = {one.consumer_id: one.error for one in bench.streams_ended()}
    assert set(ended) == {"old", CONSUMER} and all(error and error.reason == "FENCED" for error in ended.values())
    for event in (
        AttachConsumer(RUN, "old", epoch=1),
        SubmitRollouts(RUN, "old", (spec("b"),), epoch=1),
        UpdateRollouts(RUN, (RolloutUpdate("a"),), epoch=1),
        CancelRollouts(RUN, ("a",), epoch=1),
        ReportStep(RUN, StepReport(1, TrainerState.TRAINING), epoch=1),
    ):
        refusal = bench.refused(event)
        assert (refusal.code, refusal.reason) == (Code.ABORTED, "FENCED") and "epoch 2" in refusal.message
    assert bench.state("a") is RolloutState.QUEUED
    bench.do(CancelRollouts(RUN, ("a",), epoch=2))
    assert bench.its_run().rollouts["a"].state is RolloutState.FINISHED


def test_several_ranks_of_one_epoch_do_not_fence_each_other() -> None:
    bench = Bench(engine(slots=8))
    for rank in range(4):
        attach(bench, f"r{rank}", epoch=1)
    assert {one.consumer_id for one in bench.streams_ended()} == {CONSUMER}


# closing


def test_a_half_closed_stream_ends_when_everything_was_delivered() -> None:
    bench = Bench(engine(slots=4))
    bench.submit(*specs("r", 50))
    bench.do(PauseRun(RUN))
    bench.do(CloseConsumer(RUN, CONSUMER))
    bench.pass_time(5.0)
    assert not bench.streams_ended()
    from rolloutd.scheduler.events import ResumeRun

    bench.do(ResumeRun(RUN))
    while len(bench.ended) < 50:
        bench.tick(0.1)
        for rollout_id in list(bench.live):
            bench.finish(rollout_id)
    bench.tick()
    assert bench.streams_ended() == [EndStream(RUN, CONSUMER, None)]
    assert isinstance(bench.said[-1], EndStream), "after the last result"
    bench.pass_time(5.0)
    assert len(bench.streams_ended()) == 1
    bench.quiet()


def test_closing_with_nothing_pending_ends_the_stream_at_once_and_attaching_again_takes_it_back() -> None:
    bench = Bench(engine())
    assert EndStream(RUN, CONSUMER, None) in bench.do(CloseConsumer(RUN, CONSUMER))
    bench.submit(spec("a"))
    bench.do(CloseConsumer(RUN, CONSUMER))
    attach(bench)
    bench.cancel("a")
    bench.pass_time(3.0)
    assert len(bench.streams_ended()) == 1


def test_a_run_that_ends_lets_its_streams_end() -> None:
    bench = Bench(engine(slots=4))
    bench.run(*specs("r", 6))
    bench.do(CloseConsumer(RUN, CONSUMER))
    bench.do(EndRun(RUN))
    assert bench.ended == {"r4", "r5"} or len(bench.ended) == 2
    bench.stop_aborted(2)
    bench.tick()
    assert {bench.outcome(rollout_id) for rollout_id in bench.ended} == {Outcome.RUN_ENDED}
    assert bench.streams_ended() == [EndStream(RUN, CONSUMER, None)]
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.acknowledge(*bench.ended)
    bench.pass_time(3.0)
    assert bench.core.run_view(RUN, bench.now) is None, "an ended run without results is forgotten"


# disconnecting


def test_work_survives_a_disconnect_by_default() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("a"))
    bench.submit(spec("b"))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.pass_time(30.0)
    bench.finish("a")
    bench.finish("b")
    assert results(attach(bench)) == ["a", "b"]


def test_cancel_on_disconnect_at_once() -> None:
    bench = Bench(engine(slots=1))
    bench.configure(cancel_on_disconnect=True)
    attach(bench, "rank-1")
    bench.run(spec("a"))
    bench.submit(spec("b"))
    bench.submit(spec("theirs"), consumer="rank-1")
    bench.do(DetachConsumer(RUN, CONSUMER))
    assert bench.leaving() == {"a"} and bench.view("b").result is not None
    assert bench.state("theirs") is RolloutState.QUEUED
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.stopped("a")
    assert results(attach(bench)) == ["b", "a"]


def test_cancel_on_disconnect_after_a_grace_that_a_reconnection_ends() -> None:
    bench = Bench(engine(slots=4))
    bench.configure(cancel_on_disconnect=True, disconnect_grace_seconds=10.0)
    bench.run(spec("a"))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.pass_time(8.0)
    attach(bench)
    bench.pass_time(8.0)
    assert not bench.leaving(), "it came back in time"
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.pass_time(9.0)
    assert not bench.leaving(), "a new absence has a new grace"
    bench.pass_time(2.0)
    assert bench.leaving() == {"a"}


def test_the_grace_of_an_earlier_absence_does_not_end_a_later_one() -> None:
    bench = Bench(engine(slots=4))
    bench.configure(cancel_on_disconnect=True, disconnect_grace_seconds=10.0)
    bench.run(spec("a"))
    bench.do(DetachConsumer(RUN, CONSUMER))
    bench.pass_time(5.0)
    attach(bench)
    bench.pass_time(4.0)
    bench.do(DetachConsumer(RUN, CONSUMER))  # 1 s before the first grace would have ended
    bench.pass_time(5.0)
    assert not bench.leaving()
    bench.pass_time(6.0)
    assert bench.leaving() == {"a"}


def test_the_grace_of_a_consumer_that_was_taken_over_harms_no_later_one_of_its_name() -> None:
    bench = Bench(engine(slots=4))
    bench.configure(cancel_on_disconnect=True, disconnect_grace_seconds=10.0)
    bench.do(DetachConsumer(RUN, CONSUMER))
    attach(bench, "rank-1", take_over=(CONSUMER,))
    attach(bench)
    bench.run(spec("a"))
    bench.pass_time(12.0)
    assert not bench.leaving() and bench.state("a") is RolloutState.RUNNING


# expiry


def test_results_nobody_fetches_expire_with_a_notice_and_free_their_bytes() -> None:
    bench = Bench(engine(slots=8))
    bench.configure(undelivered_ttl_seconds=60.0)
    finished(bench)
    bench.pass_time(50.0, 5.0)
    bench.run(spec("young"))
    bench.finish("young")
    bench.pass_time(20.0, 5.0)
    (notice,) = bench.notices(NoticeKind.RESULTS_EXPIRED)
    assert notice.message.startswith("3 results were dropped")
    (record,) = bench.records("results_expired")
    assert record.level == "warning" and record.fields["count"] == 3
    assert results(attach(bench)) == ["young"]
    assert bench.rejected(spec("r0")).reason == "ALREADY_DELIVERED", "it will not run twice"


def test_expired_groups_are_counted_in_results() -> None:
    bench = Bench(engine(slots=8))
    bench.configure(undelivered_ttl_seconds=60.0)
    bench.run(spec("g", samples=3))
    for index in range(3):
        bench.finish(f"g/{index}")
    bench.pass_time(70.0, 5.0)
    (record,) = bench.records("results_expired")
    assert record.fields["count"] == 3 and bench.run_view().undelivered_bytes == 0 and not bench.its_run().groups


# verdicts


def test_verdicts_feed_the_valid_count_and_the_consumed_mix() -> None:
    bench = Bench(engine(slots=8))
    bench.configure(target_mix={"math": 1.0, "code": 1.0})
    bench.run(spec("m0", stratum="math"), spec("m1", stratum="math"), spec("c0", stratum="code"))
    for name in ("m0", "m1", "c0"):
        bench.finish(name)
    assert bench.run_view().finished_samples == 3 and bench.run_view().valid_samples == 0
    bench.acknowledge("m0", "m1", used=True)
    assert bench.run_view().valid_samples == 2 and bench.run_view().diversity_distance == 0.5
    bench.acknowledge("c0", used=False)
    assert bench.run_view().valid_samples == 2 and bench.run_view().strata_coverage == 0.5
    bench.acknowledge("m0", used=True)
    assert bench.run_view().valid_samples == 2, "a verdict counts once"


def test_rewards_and_reasons_of_dropped_results_can_be_seen() -> None:
    bench = Bench(engine(slots=8))
    bench.run(*specs("r", 3))
    for name in ("r0", "r1", "r2"):
        bench.finish(name)
    assert bench.run_view().mean_reward is None
    verdicts = (
        Acknowledgement("r0", used=True, reward=1.0),
        Acknowledgement("r1", used=False, drop_reason="too long", reward=0.0),
        Acknowledgement("r2", used=False, drop_reason="stale", reward=float("nan")),
    )
    bench.do(AcknowledgeResults(RUN, CONSUMER, verdicts))
    view = bench.run_view()
    assert (view.valid_samples, view.dropped_samples) == (1, 2)
    assert view.mean_reward is not None and 0.9 < view.mean_reward < 1.0, "a reward that is no number changes nothing"
    assert [record.fields["reason"] for record in bench.records("result_dropped")] == ["too long", "stale"]
