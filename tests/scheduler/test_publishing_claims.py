"""Who may say what of a publication: other weights under one number, confirmations, trainers and runs that are gone."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.actions import Control, EndStream, PublishEnded, PublishProgress, Refuse
from rolloutd.scheduler.events import EndRun, ReportStep, WeightsPushed
from rolloutd.scheduler.events import PublishPolicy as Publish
from rolloutd.scheduler.spec import PolicyUpdate, StepReport
from rolloutd.scheduler.states import (
    Code,
    FaultKind,
    OnPreempt,
    TrainerState,
    UpdateMode,
    UpdateState,
    Verb,
)
from tests.scheduler.kit import RUN, Bench, engine, engines, spec


def ends(bench: Bench) -> list[PublishEnded]:
    return [one for one in bench.said if isinstance(one, PublishEnded)]


def test_the_same_version_from_other_weights_is_not_watched_for_them() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    assert bench.refused(Publish(RUN, PolicyUpdate(1, "/weights/1"))).reason == "OTHER_WEIGHTS"
    bench.publish(2)
    error = bench.refused(Publish(RUN, PolicyUpdate(2, "/elsewhere/2")))
    assert error.code is Code.ALREADY_EXISTS and "'/weights/2'" in error.message
    bench.publish(2)  # the same again watches
    bench.publish(1, path="")
    assert bench.out() is Verb.PAUSE


def test_a_version_that_an_engine_holds_is_not_another_checkpoint_too() -> None:
    bench = Bench(*engines(2))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH, "e1")
    bench.call_fails("e1", FaultKind.REFUSED, "no such checkpoint")
    bench.finish_updates()
    error = bench.refused(Publish(RUN, PolicyUpdate(1, "/elsewhere/1")))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "OTHER_WEIGHTS") and "'/weights/1'" in error.message
    bench.published(1)
    bench.publish(2, path="/nowhere")
    for engine_id in ("e0", "e1"):
        bench.answer_through(Verb.FLUSH, engine_id)
        bench.call_fails(engine_id, FaultKind.REFUSED, "no such checkpoint")
    bench.finish_updates()
    bench.published(2)  # where nobody holds it, a wrong path may be put right
    assert {bench.engine(one).version for one in ("e0", "e1")} == {2}


def test_an_interrupted_rollout_that_restarts_has_one_version() -> None:
    bench = Bench(engine())
    bench.run(spec("r", on_preempt=OnPreempt.RESTART), spec("kept"))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    for rollout_id in ("r", "kept"):
        bench.stopped(rollout_id, 5)
    bench.finish_updates()
    again = {one.rollout_id: len(one.token_bytes) // 4 for one in bench.tick()}
    assert again["kept"] - again["r"] == 5, "from its prompt only"
    bench.finish("r")
    assert [(span.policy_version, span.attempt) for span in bench.result("r").spans] == [(1, 2)]
    bench.finish("kept")
    assert [(span.policy_version, span.attempt) for span in bench.result("kept").spans] == [(0, 1), (1, 2)]


def test_a_confirmation_before_any_engine_waits_is_refused() -> None:
    bench = Bench(*engines(2))
    bench.publish(1, path="")
    assert bench.refused(WeightsPushed(RUN, "policy", 1)).reason == "NOT_PUSHING"
    bench.answer_through(Verb.BEGIN, "e0")
    bench.do(WeightsPushed(RUN, "policy", 1))
    assert bench.out("e0") is Verb.END and bench.out("e1") is Verb.PAUSE


@pytest.mark.parametrize("reached", [None, Verb.PAUSE, Verb.FLUSH, Verb.BEGIN])
@pytest.mark.parametrize("end", ["epoch", "run"])
def test_a_push_whose_trainer_is_gone_lets_the_engine_go_on(reached: Verb | None, end: str) -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.publish(2, path="")
    bench.publish(3)
    if reached is not None:
        bench.answer_through(reached)
    if end == "epoch":
        bench.do(ReportStep(RUN, StepReport(0, TrainerState.TRAINING), epoch=7))
    else:
        bench.do(EndRun(RUN))
    if reached is not Verb.BEGIN:
        bench.answer_through(Verb.BEGIN if reached is Verb.FLUSH else bench.out())  # type: ignore[arg-type]
    bench.finish_updates()
    told = {one.version: (one.updated, one.failed) for one in ends(bench)}
    assert told[1] == told[2] == ((), ("e0",))
    assert told[3] == ((("e0",), ()) if end == "epoch" else ((), ("e0",)))
    last = [one for one in bench.said if isinstance(one, PublishProgress) and one.version == 2][-1]
    assert last.state is UpdateState.FAILED and ("epoch 7" if end == "epoch" else "has ended") in last.message
    made = [one.verb for one in bench.said if isinstance(one, Control)]
    assert made.count(Verb.PAUSE) == made.count(Verb.RESUME) > 0 and Verb.END not in made


def test_what_a_higher_epoch_ends_is_said_although_its_event_is_refused() -> None:
    bench = Bench(engine())
    bench.publish(1, path="")
    bench.answer_through(Verb.BEGIN)
    refused, *others = bench.do(Publish(RUN, PolicyUpdate(0, "/weights/0"), epoch=3))
    assert isinstance(refused, Refuse) and refused.error.code is Code.INVALID_ARGUMENT
    assert [one.error.reason for one in others if isinstance(one, EndStream) and one.error is not None] == ["FENCED"]
    assert bench.out() is Verb.RESUME


def test_the_end_names_all_that_hold_the_version() -> None:
    bench = Bench(*engines(2))
    bench.publish(1)
    bench.answer_through(Verb.FLUSH, "e1")
    bench.call_fails("e1", FaultKind.REFUSED)
    bench.finish_updates()
    bench.published(1)
    bench.published(1)
    assert [(one.updated, one.failed) for one in ends(bench)] == [
        (("e0",), ("e1",)),
        (("e0", "e1"), ()),
        (("e0", "e1"), ()),
    ]
