"""Runs, trainers and engines over a real channel."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc

from rolloutd.server.core_build import core_is_compiled
from rolloutd.v1 import (
    ENGINE_STATE_DOWN,
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_READY,
    ENGINE_STATE_STARTING,
    ORIGIN_REPLAY,
    PHASE_COLD_START,
    ROLLOUT_CLASS_BACKGROUND,
    ROLLOUT_CLASS_CRITICAL,
    ROLLOUT_STATE_DISPATCHED,
    ROLLOUT_STATE_FINISHED,
    ROLLOUT_STATE_QUEUED,
    ROLLOUT_STATE_RUNNING,
    RUN_STATUS_ACTIVE,
    RUN_STATUS_PAUSED,
    TASK_TYPE_REPLAY,
    TASK_TYPE_STATE_QUERY,
    TRAINER_STATE_TRAINING,
    TRAINER_STATE_WAITING,
    Budget,
    ClassQuota,
    ConfigureRunRequest,
    DrainEngineRequest,
    ExplainRolloutRequest,
    GetBudgetRequest,
    GetRolloutRequest,
    GetRunRequest,
    GetServerInfoRequest,
    ListEnginesRequest,
    ListRolloutsRequest,
    ListRunsRequest,
    PauseRunRequest,
    RegisterEngineRequest,
    RemoveEngineRequest,
    ReportStepRequest,
    ResumeRunRequest,
    Rollout,
    RolloutDefaults,
    RolloutSubmission,
    RolloutUpdate,
    RunConfig,
    RunRolloutRequest,
    ScoreWeights,
    SetBudgetRequest,
    UpdateRolloutsRequest,
    WatchRunRequest,
)
from tests.server.fake_door import tokens
from tests.server.harness import refused, running_server, submission, until


async def test_run_rollout_returns_every_sample_in_order() -> None:
    async with running_server() as rig:
        request = RunRolloutRequest(run_id="run", submission=submission("u", samples=4, logprobs=True))
        answer = await rig.rollouts.RunRollout(request)
        assert [result.rollout_id for result in answer.results] == [f"u/{index}" for index in range(4)]
        assert [result.sample_index for result in answer.results] == [0, 1, 2, 3]
        assert struct.unpack("<2f", answer.results[0].logprob_bytes) == (-0.5, -0.5)
        await until(lambda: rig.server.loop.connected_consumers("run") == 0)
        run = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run
        assert run.state.undelivered_results == 0


async def test_a_replay_scores_its_prompt() -> None:
    async with running_server() as rig:
        replay = RolloutSubmission(rollout_id="u", token_bytes=tokens(5), task_type=TASK_TYPE_REPLAY)
        answer = await rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=replay))
        assert len(answer.results[0].prompt_logprob_bytes) == 20
        assert rig.door.requests[0].prompt_logprobs_from == 0


async def test_configure_run_changes_what_is_given_and_keeps_the_rest() -> None:
    async with running_server() as rig:
        first = RunConfig(
            weights=ScoreWeights(prefix=0.7),
            fairness_weight=2.0,
            defaults=RolloutDefaults(rollout_class=ROLLOUT_CLASS_BACKGROUND, max_attempts=5),
            target_mix={"math": 3.0, "code": 1.0},
        )
        await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=first))
        second = RunConfig(disconnect_grace_seconds=7.0)
        run = (await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=second))).run
        assert run.config.weights.prefix == 0.7
        assert run.config.weights.waiting == 0.2  # the server's
        assert run.config.fairness_weight == 2.0
        assert run.config.defaults.rollout_class == ROLLOUT_CLASS_BACKGROUND
        assert run.config.defaults.max_attempts == 5
        assert dict(run.config.target_mix) == {"math": 3.0, "code": 1.0}
        assert run.config.disconnect_grace_seconds == 7.0
        held = RunConfig(mix_hold_seconds=30.0)
        run = (await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=held))).run
        assert run.config.mix_hold_seconds == 30.0 and run.state.held_results == 0
        details = await refused(rig.runs.ConfigureRun(ConfigureRunRequest(run_id="no mix", config=held)))
        assert set(details.fields) == {"config.mix_hold_seconds"}
        bad = RunConfig(fairness_weight=0.0, target_mix={"math": -1.0})
        details = await refused(rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=bad)))
        assert set(details.fields) >= {"config.fairness_weight", "config.target_mix"}


async def test_a_paused_run_accepts_and_waits() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run"))
        paused = await rig.runs.PauseRun(PauseRunRequest(run_id="run"))
        assert paused.state.status == RUN_STATUS_PAUSED
        await stream.submit(submission("r"))
        await stream.next("accepted")
        await rig.server.loop.after_tick(0.05)
        assert rig.door.requests == []
        resumed = await rig.runs.ResumeRun(ResumeRunRequest(run_id="run"))
        assert resumed.state.status == RUN_STATUS_ACTIVE
        assert (await stream.next("finished")).complete


async def test_list_runs_pages_in_order() -> None:
    async with running_server() as rig:
        for name in ("b", "c", "a"):
            await rig.runs.ConfigureRun(ConfigureRunRequest(run_id=name))
        page = await rig.runs.ListRuns(ListRunsRequest(page_size=2))
        assert [run.run_id for run in page.runs] == ["a", "b"]
        rest = await rig.runs.ListRuns(ListRunsRequest(page_size=2, page_token=page.next_page_token))
        assert [run.run_id for run in rest.runs] == ["c"]
        assert rest.next_page_token == ""
        details = await refused(rig.runs.ListRuns(ListRunsRequest(page_token="???")))
        assert details.fields == ["page_token"]


async def test_watch_run_says_what_changed_and_ends_with_the_server() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        watch: Any = rig.runs.WatchRun(WatchRunRequest(run_id="run", interval_seconds=0.1))
        first = await asyncio.wait_for(watch.read(), 5)
        assert first.state.status == RUN_STATUS_ACTIVE
        await stream.submit(submission("r"))
        changed = await asyncio.wait_for(watch.read(), 5)
        assert sum(entry.queued_rollouts + entry.running_rollouts for entry in changed.state.classes) == 1
        unknown: Any = rig.runs.WatchRun(WatchRunRequest(run_id="nowhere"))
        assert (await refused(unknown.read())).code is grpc.StatusCode.NOT_FOUND


async def test_a_budget_replaces_the_one_before_and_falls_back_to_the_default() -> None:
    flags = {"budget.max_running_rollouts": 100}
    async with running_server(flags=flags) as rig:
        quota = ClassQuota(rollout_class=ROLLOUT_CLASS_CRITICAL, max_running_rollouts=3, share=0.5, floor_rollouts=1)
        budget = Budget(max_kv_tokens=5000, classes=[quota], lease_seconds=60.0)
        answer = await rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=budget))
        assert answer.budget.max_running_rollouts == 100
        assert answer.budget.max_kv_tokens == 5000
        assert answer.budget.classes[0] == quota
        in_force = await rig.trainer.GetBudget(GetBudgetRequest(run_id="run"))
        assert not in_force.is_default
        assert 0 < in_force.budget.lease_seconds <= 60.0
        again = await rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=Budget()))
        assert not again.budget.HasField("max_kv_tokens")
        assert again.budget.max_running_rollouts == 100


async def test_a_budget_that_contradicts_itself_is_refused_by_field() -> None:
    async with running_server() as rig:
        half = ClassQuota(rollout_class=ROLLOUT_CLASS_CRITICAL, share=0.7, floor_rollouts=4)
        other = ClassQuota(rollout_class=ROLLOUT_CLASS_BACKGROUND, share=0.7, floor_rollouts=4)
        budget = Budget(max_running_rollouts=6, classes=[half, other, half])
        details = await refused(rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=budget)))
        assert details.code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.fields == ["budget.classes[2].rollout_class", "budget.classes", "budget.classes"]
        missing = await refused(rig.trainer.SetBudget(SetBudgetRequest(run_id="run")))
        assert missing.fields == ["budget"]
        huge = Budget(max_inference_mb=2**64 - 1, training_reserved_mb=2**64 - 1)
        details = await refused(rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=huge)))
        assert details.fields == ["budget.training_reserved_mb", "budget.max_inference_mb"]
        most = Budget(max_inference_mb=2**53)
        answer = await rig.trainer.SetBudget(SetBudgetRequest(run_id="run", budget=most))
        assert answer.budget.max_inference_mb == 2**53
        assert [run.run_id for run in (await rig.runs.ListRuns(ListRunsRequest())).runs] == ["run"]


async def test_report_step_promotes_and_keeps_what_is_not_said() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        needed = [
            submission(f"r{step}", rollout_class=ROLLOUT_CLASS_BACKGROUND, needed_by_step=step) for step in (1, 2, 3)
        ]
        await stream.submit(*needed)
        for _ in range(3):
            await stream.next("accepted")
        answer = await rig.trainer.ReportStep(
            ReportStepRequest(
                run_id="run", step=2, trainer_state=TRAINER_STATE_WAITING, consume_tokens_per_second=500.0
            )
        )
        assert answer.promoted_rollouts == 2
        assert answer.critical_unfinished == 2
        assert answer.phase == PHASE_COLD_START
        assert answer.demand_tokens_per_second == 500.0
        answer = await rig.trainer.ReportStep(
            ReportStepRequest(run_id="run", step=2, trainer_state=TRAINER_STATE_TRAINING)
        )
        assert answer.demand_tokens_per_second == 500.0
        state = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run.state
        assert state.trainer_state == TRAINER_STATE_TRAINING
        assert state.step == 2


async def test_update_rollouts_item_by_item() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        await stream.submit(submission("r", samples=2, rollout_class=ROLLOUT_CLASS_BACKGROUND))
        await stream.next("accepted")
        answer = await rig.rollouts.UpdateRollouts(
            UpdateRolloutsRequest(
                run_id="run",
                updates=[
                    RolloutUpdate(rollout_id="r", rollout_class=ROLLOUT_CLASS_CRITICAL),
                    RolloutUpdate(rollout_id="nobody", deadline_seconds=1.0),
                    RolloutUpdate(rollout_id="r"),
                ],
            )
        )
        assert answer.updated_rollouts == 1
        assert [rejected.rollout_id for rejected in answer.rejected] == ["nobody", "r"]
        listed = await rig.rollouts.ListRollouts(ListRolloutsRequest(run_id="run"))
        assert {rollout.rollout_class for rollout in listed.rollouts} == {ROLLOUT_CLASS_CRITICAL}


async def test_list_rollouts_filters_and_pages() -> None:
    async with running_server(auto=False, slots=2) as rig, rig.stream() as stream:
        await stream.submit(*[submission(f"r{number}") for number in range(6)])
        requests = await rig.door.wait_running(2)
        for request in requests:
            rig.door.report(request, 1)
        rig.door.finish(requests[0])
        await stream.next("finished")
        await rig.door.wait_running(2)

        async def ids(*states: int) -> list[str]:
            found: list[str] = []
            token = ""
            while True:
                page = await rig.rollouts.ListRollouts(
                    ListRolloutsRequest(run_id="run", page_size=2, page_token=token, states=states)  # type: ignore[arg-type]
                )
                assert len(page.rollouts) <= 2
                found += [rollout.rollout_id for rollout in page.rollouts]
                token = page.next_page_token
                if not token:
                    return found

        assert await ids() == [f"r{number}" for number in range(6)]
        assert len(await ids(ROLLOUT_STATE_FINISHED)) == 1
        assert len(await ids(ROLLOUT_STATE_RUNNING)) == 1
        assert len(await ids(ROLLOUT_STATE_QUEUED)) == 3
        page = await rig.rollouts.ListRollouts(ListRolloutsRequest(run_id="run", page_size=2))
        other = ListRolloutsRequest(run_id="run", page_token=page.next_page_token, states=[ROLLOUT_STATE_QUEUED])
        assert (await refused(rig.rollouts.ListRollouts(other))).fields == ["page_token"]


async def test_get_rollout_says_what_was_submitted_and_where_it_is() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(
            submission(
                "r", 6, 7, group_id="g", group_size=2, session_id="s", turn=3, stratum="math", origin=ORIGIN_REPLAY,
                needed_by_step=0, task_type=TASK_TYPE_STATE_QUERY, samples=1,
            )
        )  # fmt: skip
        await rig.door.wait_running(1)
        found = (await rig.rollouts.GetRollout(GetRolloutRequest(run_id="run", rollout_id="r"))).rollout
    assert 0.0 < found.age_seconds < 60.0
    found.ClearField("age_seconds")
    assert found == Rollout(
        rollout_id="r", run_id="run", consumer_id="trainer", state=ROLLOUT_STATE_DISPATCHED,
        rollout_class=ROLLOUT_CLASS_CRITICAL, task_type=TASK_TYPE_STATE_QUERY, pool="policy", group_id="g",
        session_id="s", turn=3, stratum="math", origin=ORIGIN_REPLAY, needed_by_step=0, prompt_tokens=6, max_new_tokens=7,
        attempts=1, engine_id="engine-0:1", batch_id="1",
    )  # fmt: skip


async def test_explain_tells_decisions_and_story() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        await stream.finished(1)
        explained = await rig.rollouts.ExplainRollout(ExplainRolloutRequest(run_id="run", rollout_id="r"))
        dispatched = [decision for decision in explained.decisions if decision.engine_id]
        assert dispatched and dispatched[0].engine_id == "engine-0:1"
        assert any(entry.to_state == "FINISHED" for entry in explained.story)
        assert all(entry.age_seconds >= 0 for entry in explained.story)


async def test_an_engine_registered_later_is_used() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        await stream.next("accepted")
        added = await rig.engines.RegisterEngine(
            RegisterEngineRequest(url="http://late:7/", labels={"zone": "a"}, vocabulary_size=1000)
        )
        assert added.engine.engine_id == "late:7"
        assert added.engine.state == ENGINE_STATE_STARTING
        assert (await stream.next("finished")).engine_id == "late:7"
        same = await rig.engines.RegisterEngine(
            RegisterEngineRequest(url="http://late:7", labels={"zone": "a"}, vocabulary_size=1000)
        )
        assert same.engine.state == ENGINE_STATE_READY
        assert same.engine.warnings == ["page size 1 costs hits"]
        other = RegisterEngineRequest(url="http://late:7", pool="reward")
        assert (await refused(rig.engines.RegisterEngine(other))).code is grpc.StatusCode.ALREADY_EXISTS
        wrong = await refused(rig.engines.RegisterEngine(RegisterEngineRequest(url="late:7")))
        assert wrong.fields == ["url"]


async def test_drain_and_remove_an_engine() -> None:
    async with running_server(auto=False, engines=("http://a:1", "http://b:1")) as rig, rig.stream() as stream:
        drained = await rig.engines.DrainEngine(DrainEngineRequest(engine_id="a:1"))
        assert drained.engine.state == ENGINE_STATE_DRAINING
        await stream.submit(submission("r"))
        kept = rig.doors["http://b:1"]
        await kept.wait_running(1)
        assert rig.doors["http://a:1"].requests == []
        await rig.engines.RemoveEngine(RemoveEngineRequest(engine_id="a:1"))
        gone = rig.doors["http://a:1"]
        await until(lambda: gone.closed)
        listed = await rig.engines.ListEngines(ListEnginesRequest())
        assert [engine.engine_id for engine in listed.engines] == ["b:1"]
        stopped = await rig.engines.RemoveEngine(RemoveEngineRequest(engine_id="b:1"))
        assert stopped.stopped_rollouts == 1
        missing = await refused(rig.engines.RemoveEngine(RemoveEngineRequest(engine_id="b:1")))
        assert missing.code is grpc.StatusCode.NOT_FOUND


async def test_server_info_names_limits_and_instance() -> None:
    async with running_server() as rig:
        info = (await rig.engines.GetServerInfo(GetServerInfoRequest())).server
        assert info.instance_id and info.version
        assert info.limits.max_page_size == 1000
        assert not info.draining
        assert ("core.compiled" in info.features) == core_is_compiled()


async def test_an_engine_that_goes_away_is_lost_and_joins_again_as_another() -> None:
    async with running_server() as rig, rig.stream() as stream:
        rig.door.reachable = False

        async def state() -> int:
            (engine,) = (await rig.engines.ListEngines(ListEnginesRequest())).engines
            return engine.state

        await until(lambda: rig.server.loop.core.engine_views()[0].state == "lost")
        assert await state() == ENGINE_STATE_DOWN
        await stream.submit(submission("r"))
        await stream.next("accepted")
        rig.door.incarnation = "2"
        rig.door.reachable = True
        assert (await stream.next("finished")).complete
        (engine,) = (await rig.engines.ListEngines(ListEnginesRequest())).engines
        assert engine.incarnation == "2"
        assert engine.state == ENGINE_STATE_READY


async def test_not_ready_is_never_a_loss() -> None:
    async with running_server() as rig, rig.stream() as stream:
        rig.door.is_ready = False
        await until(lambda: rig.server.loop.core.engine_views()[0].state == "not_ready")
        registrations = rig.door.registrations
        await stream.submit(submission("r"))
        await stream.next("accepted")
        await rig.server.loop.after_tick(0.05)
        assert rig.door.requests == []
        rig.door.is_ready = True
        assert (await stream.next("finished")).complete
        assert rig.door.registrations == registrations


async def test_an_engine_that_cannot_be_registered_again_is_lost_not_ready() -> None:
    """Its counters start again: another process. Where that one cannot be registered, nothing can be sent to it."""
    async with running_server() as rig:
        door = rig.doors["http://engine-0:1"]
        door.prefilled_tokens_total = 100
        polls = door.polls
        await until(lambda: door.polls > polls + 1)
        door.registers = False
        door.prefilled_tokens_total = 0
        await until(lambda: rig.server.loop.core.engine_views()[0].state == "lost")
        door.registers = True
        await until(lambda: rig.server.loop.core.engine_views()[0].state == "ready")
