"""The calls beside the stream: every argument reaches its field, every answer and error its caller."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import rolloutd.client
from rolloutd import v1
from tests.client.fake_server import Abort, FakeServer


def connect(server: FakeServer, **options: Any) -> rolloutd.client.Client:
    return rolloutd.client.connect(server.address, run="r", **options)


async def test_configure_run(server: FakeServer) -> None:
    async with connect(server, epoch=3) as client:
        run = await client.configure_run(
            weights={"prefix": 0.0, "critical": 2.0},
            fairness_weight=2.0,
            floor_rollouts=4,
            queue_ttl_seconds=0.0,
            max_attempts=5,
            on_preempt="never",
            rollout_class="reusable",
            target_mix={"math": 3.0, "code": 1.0},
            mix_hold_seconds=30.0,
            on_disconnect="cancel",
            disconnect_grace_seconds=0.0,
            max_undelivered_bytes=1 << 20,
            undelivered_ttl_seconds=60.0,
            min_version=0,
            max_staleness=1,
            max_partial_span=-1,
            on_stale="flag",
            batch_samples=64,
            slice_tokens=0,
            prefix_ttl_versions=0,
            release_memory="kv_cache",
        )
        assert run.run_id == "r"
        await client.configure_run()
    request, bare = server.calls
    assert request == v1.ConfigureRunRequest(
        run_id="r",
        trainer_epoch=3,
        config=v1.RunConfig(
            weights=v1.ScoreWeights(prefix=0.0, critical=2.0),
            fairness_weight=2.0,
            floor_rollouts=4,
            defaults=v1.RolloutDefaults(
                queue_ttl_seconds=0.0,
                max_attempts=5,
                on_preempt=v1.ON_PREEMPT_NEVER,
                rollout_class=v1.ROLLOUT_CLASS_REUSABLE,
                min_version=0,
                max_staleness=1,
                max_partial_span=-1,
            ),
            target_mix={"math": 3.0, "code": 1.0},
            mix_hold_seconds=30.0,
            on_disconnect=v1.ON_DISCONNECT_CANCEL,
            disconnect_grace_seconds=0.0,
            max_undelivered_bytes=1 << 20,
            undelivered_ttl_seconds=60.0,
            on_stale=v1.ON_STALE_FLAG,
            batch_samples=64,
            slice_tokens=0,
            prefix_ttl_versions=0,
            release_memory=v1.RELEASE_MEMORY_KV_CACHE,
        ),
    )
    assert bare.config == v1.RunConfig()


async def test_budget_and_step(server: FakeServer) -> None:
    async with connect(server, epoch=3) as client:
        await client.set_budget(
            max_running_rollouts=0,
            max_kv_tokens=10,
            training_reserved_mb=11,
            max_inference_mb=12,
            classes={"critical": {"share": 0.5, "floor_rollouts": 2}},
            tasks={"reward": {"max_running_rollouts": 3}},
            lease_seconds=30.0,
        )
        assert (await client.get_budget()).is_default
        answer = await client.report_step(
            7,
            trainer_state="waiting",
            samples_needed=0,
            consume_samples_per_second=1.0,
            consume_tokens_per_second=2.0,
            policy_entropy=0.3,
            buffer_fill=0.4,
            update_period_seconds=5.0,
            step_seconds=6.0,
        )
        assert answer.promoted_rollouts == 2
        with pytest.raises(ValueError, match="trainer_state must be one of 'training', 'waiting'"):
            await client.report_step(7, trainer_state="idle")  # type: ignore[arg-type]
    budget, _, step = server.calls
    assert budget == v1.SetBudgetRequest(
        run_id="r",
        trainer_epoch=3,
        budget=v1.Budget(
            max_running_rollouts=0,
            max_kv_tokens=10,
            training_reserved_mb=11,
            max_inference_mb=12,
            classes=[v1.ClassQuota(rollout_class=v1.ROLLOUT_CLASS_CRITICAL, share=0.5, floor_rollouts=2)],
            tasks=[v1.TaskQuota(task_type=v1.TASK_TYPE_REWARD, max_running_rollouts=3)],
            lease_seconds=30.0,
        ),
    )
    assert step == v1.ReportStepRequest(
        run_id="r",
        trainer_epoch=3,
        step=7,
        trainer_state=v1.TRAINER_STATE_WAITING,
        samples_needed=0,
        consume_samples_per_second=1.0,
        consume_tokens_per_second=2.0,
        policy_entropy=0.3,
        buffer_fill=0.4,
        update_period_seconds=5.0,
        step_seconds=6.0,
    )


async def test_lists_follow_their_pages(server: FakeServer) -> None:
    async with connect(server) as client:
        assert [run.run_id for run in await client.list_runs()] == ["r0", "r1"]
        assert [engine.engine_id for engine in await client.list_engines("reward")] == ["e0", "e1"]
        listed = client.list_rollouts(states=["queued", "held"], rollout_classes=["background"])
        assert [rollout.rollout_id async for rollout in listed] == ["x0", "x1", "x2"]
    assert server.calls[-1].states == [v1.ROLLOUT_STATE_QUEUED, v1.ROLLOUT_STATE_HELD]
    assert server.calls[2].pool == "reward"


async def test_runs_engines_and_questions(server: FakeServer) -> None:
    async with connect(server) as client:
        assert (await client.get_run()).run_id == "r"
        assert (await client.pause_run()).status == v1.RUN_STATUS_PAUSED
        assert (await client.resume_run()).status == v1.RUN_STATUS_ACTIVE
        assert (await client.end_run()).ended_rollouts == 3
        assert (await client.get_rollout("x")).rollout_id == "x"
        assert await client.get_lineage("not ended") is None
        lineage = await client.get_lineage("x")
        assert lineage is not None and lineage.rollout_id == "x"
        assert (await client.get_group("g")).group_id == "g"
        assert (await client.explain("x")).rollout.rollout_id == "x"
        assert (await client.get_server_info()).version == "fake"
        engine = await client.register_engine("http://e:1", pool="p", labels={"a": "b"}, run_id="r", vocabulary_size=9)
        assert engine.url == "http://e:1"
        assert (await client.drain_engine("e")).engine_id == "e"
        assert (await client.remove_engine("e")).stopped_rollouts == 1
    registered = next(call for call in server.calls if isinstance(call, v1.RegisterEngineRequest))
    assert registered == v1.RegisterEngineRequest(
        url="http://e:1", pool="p", labels={"a": "b"}, run_id="r", vocabulary_size=9
    )
    assert not server.calls[1].HasField("trainer_epoch")  # an operator's call


async def test_watch_run_survives_a_cut_and_ends_with_the_run(server: FakeServer) -> None:
    async with connect(server) as client:
        assert [state.step async for state in client.watch_run(0.5)] == [1, 2]
    assert server.calls[0].interval_seconds == 0.5


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", rolloutd.client.Refused),
        (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", rolloutd.client.Refused),
        (grpc.StatusCode.ABORTED, "FENCED", rolloutd.client.Fenced),
        (grpc.StatusCode.PERMISSION_DENIED, "", rolloutd.client.Unauthorized),
    ],
)
async def test_an_answer_is_an_answer(
    server: FakeServer, code: grpc.StatusCode, reason: str, error: type[Exception]
) -> None:
    server.unary_error = Abort(code, "because", reason, retry_seconds=1.5 if reason else 0.0)
    async with connect(server) as client:
        with pytest.raises(error, match="because") as raised:
            await client.get_run()
    assert len(server.calls) == 1 and isinstance(raised.value.__cause__, grpc.aio.AioRpcError)
    if isinstance(raised.value, rolloutd.client.Refused):
        assert (raised.value.reason, raised.value.retry_after_seconds) == (reason, 1.5 if reason else 0.0)


async def test_a_call_about_a_run_needs_its_name(server: FakeServer) -> None:
    async with rolloutd.client.connect(server.address) as client:
        assert (await client.get_server_info()).version == "fake"
        with pytest.raises(ValueError, match="run="):
            await client.get_run()
    with pytest.raises(rolloutd.client.ClientClosed, match="async with"):
        await connect(server).get_run()
    with pytest.raises(ValueError, match="a consumer belongs to a run"):
        rolloutd.client.connect(server.address, consumer="c")
