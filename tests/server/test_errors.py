"""The error table of the contract, row by row, over a real channel: stream items as messages, unary calls as status."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rolloutd.engines.base import FaultKind
from rolloutd.scheduler.config import ExecutorSettings, QueueSettings, SchedulerConfig
from rolloutd.v1 import (
    ON_PREEMPT_NEVER,
    OUTCOME_CANCELLED,
    OUTCOME_DEADLINE_EXCEEDED,
    OUTCOME_ENGINE_FAILED,
    OUTCOME_ENGINE_REFUSED,
    OUTCOME_NO_ENGINE,
    OUTCOME_QUEUE_TIMEOUT,
    OUTCOME_RUN_ENDED,
    RUN_STATUS_ACTIVE,
    Budget,
    CancelRolloutsRequest,
    ConfigureRunRequest,
    EndRunRequest,
    GetRolloutRequest,
    PauseRunRequest,
    ReportStepRequest,
    RunConfig,
    RunRolloutRequest,
    SamplingParams,
    SetBudgetRequest,
    TokenIds,
)
from tests.server.fake_door import FakeDoor, tokens
from tests.server.harness import Rig, refused, running_server, submission, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]

BAD_SUBMISSIONS: dict[str, tuple[Any, str]] = {
    "no id": (submission(""), "rollout_id"),
    "an id with a slash": (submission("a/b"), "rollout_id"),
    "no prompt": (submission("r", token_bytes=b""), "token_bytes"),
    "half a token": (submission("r", token_bytes=b"\1\0\0\0\2"), "token_bytes"),
    "no token ids": (submission("r", token_ids=TokenIds(ids=[])), "token_ids"),
    "an empty text": (submission("r", text=""), "text"),
    "a token id out of range": (submission("r", token_bytes=tokens(3, first=998)), "prompt"),
    "no tokens to generate": (submission("r", max_new_tokens=0), "sampling.max_new_tokens"),
    "a negative temperature": (
        submission("r", sampling=SamplingParams(max_new_tokens=1, temperature=-1.0)),
        "sampling.temperature",
    ),
    "a temperature that is no number": (
        submission("r", sampling=SamplingParams(max_new_tokens=1, temperature=float("nan"))),
        "sampling.temperature",
    ),
    "top_k 0": (submission("r", sampling=SamplingParams(max_new_tokens=1, top_k=0)), "sampling.top_k"),
    "an empty stop": (submission("r", sampling=SamplingParams(max_new_tokens=1, stop=["x", ""])), "sampling.stop[1]"),
    "seeds that do not match": (submission("r", samples=3, seeds=[1, 2]), "seeds"),
    "a turn without a session": (submission("r", turn=2), "turn"),
    "a negative deadline": (submission("r", deadline_seconds=-1.0), "deadline_seconds"),
    "an unknown class": (submission("r", rollout_class=99), "rollout_class"),
}


@pytest.mark.parametrize("case", BAD_SUBMISSIONS)
async def test_a_bad_field_is_invalid_argument_before_any_engine_call(case: str) -> None:
    bad, field = BAD_SUBMISSIONS[case]
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(bad)
        rejected = await stream.next("rejected")
        assert rejected.error.code == INVALID
        assert rejected.error.reason == "INVALID_ARGUMENT"
        fields = [violation.field for violation in rejected.error.field_violations]
        assert any(name.startswith(field) for name in fields), fields
        assert rejected.error.message
        details = await refused(rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=bad)))
        assert details.code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.reason == "INVALID_ARGUMENT"
        assert details.fields
        assert rig.door.requests == []


async def test_an_empty_prompt_in_a_batch_of_8_harms_nobody_else() -> None:
    async with running_server() as rig, rig.stream() as stream:
        good = [submission(f"r{number}") for number in range(7)]
        await stream.submit(*good[:3], submission("empty", token_bytes=b""), *good[3:])
        assert (await stream.next("rejected")).rollout_id == "empty"
        assert len(await stream.finished(7)) == 7
        assert len(rig.door.requests) == 7


async def test_over_the_context_is_refused_with_the_limit_in_the_message() -> None:
    async with running_server() as rig, rig.stream() as stream:
        for prompt, room in ((4096, 1), (4097, 1), (4090, 7)):
            await stream.submit(submission(f"r{prompt}", token_bytes=bytes(4 * prompt), max_new_tokens=room))
            rejected = await stream.next("rejected")
            assert rejected.error.code == INVALID
            assert "409" in rejected.error.message
        await stream.submit(submission("fits", token_bytes=bytes(4 * 4090), max_new_tokens=6))
        assert (await stream.next("finished")).complete
        assert len(rig.door.requests) == 1


async def test_clipping_is_the_callers_choice_and_shows() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r", token_bytes=bytes(4 * 4090), max_new_tokens=200, clip_max_new_tokens=True))
        result = await stream.next("finished")
        assert result.complete and result.clipped
        assert rig.door.requests[0].max_new_tokens == 6


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_retry() -> None:
    scheduler = SchedulerConfig(queue=QueueSettings(queue_capacity=2))
    async with running_server(auto=False, slots=1, scheduler=scheduler) as rig, rig.stream() as stream:
        await stream.submit(submission("running"))
        await rig.door.wait_running(1)
        await stream.submit(*[submission(f"r{number}") for number in range(4)])
        rejected = await stream.next("rejected")
        assert rejected.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert rejected.error.reason == "QUEUE_FULL"
        assert rejected.error.retry_after_seconds > 0
        details = await refused(rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=submission("u"))))
        assert details.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.reason == "QUEUE_FULL"
        assert details.retry_seconds > 0


async def test_what_can_never_fit_the_budget_is_failed_precondition() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=Budget(max_kv_tokens=100)))
        await stream.submit(submission("r", prompt=4, max_new_tokens=500))
        rejected = await stream.next("rejected")
        assert rejected.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert rejected.error.reason == "BUDGET_TOO_SMALL"
        request = RunRolloutRequest(run_id="run", submission=submission("u", max_new_tokens=500))
        details = await refused(rig.rollouts.RunRollout(request))
        assert details.code is grpc.StatusCode.FAILED_PRECONDITION
        assert details.reason == "BUDGET_TOO_SMALL"


async def test_a_passing_shortage_waits() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=Budget(max_running_rollouts=1)))
        await stream.submit(submission("a"), submission("b"))
        (first,) = await rig.door.wait_running(1)
        rig.door.finish(first)
        await stream.next("finished")
        (second,) = await rig.door.wait_running(1)
        rig.door.finish(second)
        await stream.next("finished")


async def test_no_engine_waits_until_the_ttl_then_unavailable() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        await stream.submit(submission("r", queue_ttl_seconds=0.1))
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_NO_ENGINE
        assert result.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert result.error.reason == "NO_ENGINE"


async def test_fail_fast_without_an_engine_fails_at_once() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        await stream.submit(submission("r", fail_fast=True))
        event = None
        while event is None or event.WhichOneof("event") not in ("rejected", "finished"):
            event = await stream.event()
            assert event is not None
        error = event.rejected.error if event.WhichOneof("event") == "rejected" else event.finished.error
        assert error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert error.reason == "NO_ENGINE"


async def test_all_busy_is_a_queue_timeout_not_a_missing_engine() -> None:
    async with running_server(auto=False, slots=1) as rig, rig.stream() as stream:
        await stream.submit(submission("running"))
        await rig.door.wait_running(1)
        await stream.submit(submission("waiting", queue_ttl_seconds=0.1))
        result = await stream.next("finished")
        assert result.rollout_id == "waiting"
        assert result.outcome == OUTCOME_QUEUE_TIMEOUT
        assert result.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert result.error.reason == "QUEUE_TIMEOUT"


async def test_the_callers_own_deadline() -> None:
    async with running_server(auto=False, slots=1) as rig, rig.stream() as stream:
        await stream.submit(submission("running", deadline_seconds=0.1), submission("waiting", deadline_seconds=0.1))
        for result in await stream.finished(2):
            assert result.outcome == OUTCOME_DEADLINE_EXCEEDED
            assert result.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        try:  # the deadline of the call is the rollout's: whichever side notices first tells
            answer = await rig.rollouts.RunRollout(
                RunRolloutRequest(run_id="run", submission=submission("u")), timeout=0.2
            )
            assert answer.results[0].outcome == OUTCOME_DEADLINE_EXCEEDED
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(1):
            await rig.server.loop.wait_idle()


async def test_cancelled_at_every_point_of_its_life() -> None:
    async with running_server(auto=False, slots=1) as rig, rig.stream() as stream:
        await stream.submit(submission("running"), submission("waiting"))
        (request,) = await rig.door.wait_running(1)
        rig.door.report(request, 1)
        answer = await rig.rollouts.CancelRollouts(
            CancelRolloutsRequest(run_id="run", rollout_ids=["running", "waiting", "nobody"])
        )
        assert answer.cancelled_rollouts == 2
        assert list(answer.unknown_ids) == ["nobody"]
        for result in await stream.finished(2):
            assert result.outcome == OUTCOME_CANCELLED
            assert result.error.code == grpc.StatusCode.CANCELLED.value[0]
        answer = await rig.rollouts.CancelRollouts(CancelRolloutsRequest(run_id="run", rollout_ids=["running"]))
        assert answer.finished_rollouts == 1


async def test_a_cancelled_unary_call_cancels_its_rollouts() -> None:
    async with running_server(auto=False) as rig:
        call = rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=submission("u", samples=3)))
        requests = await rig.door.wait_running(3)
        call.cancel()
        async with asyncio.timeout(1):
            await rig.server.loop.wait_idle()
        assert sorted(rig.door.aborted) == sorted(request.attempt_id for request in requests)


async def test_an_engine_that_refuses_a_request_is_invalid_argument() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        (request,) = await rig.door.wait_running(1)
        rig.door.fail(request, FaultKind.REFUSED, "temperature: no")
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_ENGINE_REFUSED
        assert result.error.code == INVALID
        assert "temperature: no" in result.error.message


async def test_an_engine_that_breaks_every_attempt_is_unavailable() -> None:
    scheduler = SchedulerConfig(executor=ExecutorSettings(max_attempts=2))
    engines = ("http://engine-0:1", "http://engine-1:1")
    async with running_server(auto=False, engines=engines, scheduler=scheduler) as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        for _ in range(2):
            door = await _running_door(rig)
            (request,) = await door.wait_running(1)
            door.fail(request, FaultKind.BROKEN)
            await asyncio.sleep(0)
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_ENGINE_FAILED
        assert result.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert result.attempts == 2
        assert all(len(door.requests) == 1 for door in rig.doors.values())  # another engine the second time


async def test_a_door_that_crashes_is_a_broken_attempt_and_an_error_in_the_log(capsys: Any) -> None:
    scheduler = SchedulerConfig(executor=ExecutorSettings(max_attempts=1))
    async with running_server(scheduler=scheduler) as rig, rig.stream() as stream:
        rig.door.crash = ZeroDivisionError("a bug in the door")
        await stream.submit(submission("r"))
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_ENGINE_FAILED
        assert "ZeroDivisionError" in result.error.message
    captured = capsys.readouterr()
    assert "attempt_crashed" in captured.out + captured.err


async def test_fenced_by_a_newer_trainer() -> None:
    async with running_server() as rig:
        await rig.trainer.ReportStep(ReportStepRequest(run_id="run", trainer_epoch=0, step=1))
        async with rig.stream(trainer_epoch=5):
            pass
        calls = (
            rig.trainer.ReportStep(ReportStepRequest(run_id="run", trainer_epoch=4, step=2)),
            rig.trainer.SetBudget(SetBudgetRequest(run_id="run", trainer_epoch=4, budget=Budget())),
            rig.runs.PauseRun(PauseRunRequest(run_id="run", trainer_epoch=4)),
            rig.rollouts.CancelRollouts(CancelRolloutsRequest(run_id="run", trainer_epoch=4, rollout_ids=["x"])),
            rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", trainer_epoch=4, submission=submission("u"))),
        )
        for call in calls:
            details = await refused(call)
            assert details.code is grpc.StatusCode.ABORTED
            assert details.reason == "FENCED"


async def test_same_id_and_payload_attaches_another_payload_is_already_exists() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(submission("r", prompt=4))
        assert not (await stream.next("accepted")).attached
        await stream.submit(submission("r", prompt=4))
        assert (await stream.next("accepted")).attached
        await stream.submit(submission("r", prompt=5))
        rejected = await stream.next("rejected")
        assert rejected.error.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert len(await rig.door.wait_running(1)) == 1


async def test_an_ended_run_ends_its_rollouts_and_takes_no_more() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        await rig.door.wait_running(1)
        ended = await rig.runs.EndRun(EndRunRequest(run_id="run"))
        assert ended.ended_rollouts == 1
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_RUN_ENDED
        await stream.submit(submission("late"))
        rejected = await stream.next("rejected")
        assert rejected.error.reason == "RUN_ENDED"


async def test_an_ended_run_goes_on_when_it_is_configured_again_with_the_same_settings() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await rig.runs.EndRun(EndRunRequest(run_id="run"))
        again = await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run"))
        assert again.run.state.status == RUN_STATUS_ACTIVE
        await stream.submit(submission("r"))
        assert (await stream.next("finished")).complete


async def test_the_end_of_a_run_does_not_count_results_that_were_kept_back() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        config = RunConfig(target_mix={"a": 1.0, "b": 1.0}, mix_hold_seconds=60.0)
        await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=config))
        await stream.submit(
            *[submission(name, stratum=name[0], prompt=4 + (name == "b0")) for name in ("a0", "a1", "b0")]
        )
        for request in await rig.door.wait_running(3):
            if len(request.token_bytes) == len(tokens(4)):
                rig.door.finish(request)
        await stream.next("finished")
        await until(lambda: rig.server.loop.core.run_views(rig.server.loop.clock())[0].held_results == 1)
        ended = await rig.runs.EndRun(EndRunRequest(run_id="run"))
        assert ended.ended_rollouts == 1 and ended.state.held_results == 0
        assert (await stream.next("finished")).complete


async def test_unknown_names_are_not_found() -> None:
    async with running_server() as rig:
        for call in (
            rig.rollouts.GetRollout(GetRolloutRequest(run_id="nowhere", rollout_id="r")),
            rig.runs.PauseRun(PauseRunRequest(run_id="nowhere")),
            rig.rollouts.CancelRollouts(CancelRolloutsRequest(run_id="nowhere", rollout_ids=["r"])),
        ):
            details = await refused(call)
            assert details.code is grpc.StatusCode.NOT_FOUND
            assert details.message


async def test_engine_params_that_belong_to_the_scheduler_are_refused_by_name() -> None:
    async with running_server() as rig, rig.stream() as stream:
        bad = submission("r", on_preempt=ON_PREEMPT_NEVER)
        bad.engine_params.update({"rid": "mine", "lora_path": "a"})
        await stream.submit(bad)
        rejected = await stream.next("rejected")
        assert [violation.field for violation in rejected.error.field_violations] == ["engine_params.rid"]
        good = submission("g")
        good.engine_params.update({"lora_path": "a", "priority": 3})
        await stream.submit(good)
        await stream.next("finished")
        assert rig.door.requests[0].engine_params == {"lora_path": "a", "priority": 3}


async def test_only_remaining_time_travels() -> None:
    """A deadline is time left from receipt: the rollout runs although the two clocks never met."""
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r", deadline_seconds=30.0))
        assert (await stream.next("finished")).complete


async def _running_door(rig: Rig) -> FakeDoor:
    async with asyncio.timeout(5):
        while True:
            for door in rig.doors.values():
                if door.running:
                    return door
            await asyncio.sleep(0.002)  # which engine it is, is the scheduler's choice
