"""The process: health, reflection, metrics, start without engines, and the order of stopping."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from rolloutd.server.config import JsonLinesSettings, ServerConfig, load_config
from rolloutd.server.process import SERVICE_NAMES, Server, grpc_options
from rolloutd.v1 import (
    OUTCOME_COMPLETED,
    OUTCOME_SHUTDOWN,
    ReportStepRequest,
    RunRolloutRequest,
)
from tests.server.harness import Rig, Stream, refused, running_server, submission

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(rig: Rig, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def test_alive_and_accepting_without_any_engine() -> None:
    async with running_server(engines=()) as rig, rig.stream() as stream:
        for name in ("", *SERVICE_NAMES):
            assert await _health(rig, name) == SERVING
        await stream.submit(submission("r"))
        assert (await stream.next("accepted")).rollout_id == "r"


async def test_reflection_lists_every_service() -> None:
    async with running_server(engines=()) as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            listed = {service.name for service in answer.list_services_response.service}
            break
        assert listed >= {*SERVICE_NAMES, "grpc.health.v1.Health"}


async def test_shutting_down_in_order() -> None:
    async with running_server(auto=False, slots=20) as rig, rig.stream() as stream:
        await stream.submit(*[submission(f"r{number}") for number in range(30)])
        running = await rig.door.wait_running(20)
        stopping = asyncio.create_task(rig.server.stop(grace_seconds=30.0))
        ended: dict[str, int] = {}
        while len(ended) < 10:  # what waits ends at once
            result = await stream.next("finished")
            ended[result.rollout_id] = result.outcome
        assert set(ended.values()) == {OUTCOME_SHUTDOWN}
        assert await _health(rig, "") == NOT_SERVING
        unary = await refused(rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=submission("u"))))
        assert unary.code is grpc.StatusCode.UNAVAILABLE
        late = Stream(rig.rollouts, None)
        async with late:
            await late.send(hello={"run_id": "run", "consumer_id": "late"})
            assert await late.event() is None
            assert await late.code() is grpc.StatusCode.UNAVAILABLE
        await stream.submit(submission("late"))
        assert (await stream.next("rejected")).rollout_id == "late"
        assert not rig.door.closed
        for request in running:
            rig.door.finish(request)
        assert {result.outcome for result in await stream.finished(20)} == {OUTCOME_COMPLETED}
        assert await stream.event() is None
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
        assert rig.door.closed


async def test_the_grace_ends_what_still_runs_with_a_reason() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(submission("r", max_new_tokens=1000))
        await rig.door.wait_running(1)
        stopping = asyncio.create_task(rig.server.stop(grace_seconds=0.05))
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_SHUTDOWN
        assert result.error.reason == "SHUTDOWN"
        await stopping


def test_every_channel_option_is_explicit() -> None:
    options = dict(grpc_options(ServerConfig()))
    assert options["grpc.max_receive_message_length"] == 64 << 20
    assert options["grpc.max_send_message_length"] == 64 << 20
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1


async def test_a_second_loop_in_the_process_is_refused() -> None:
    def second_loop() -> None:
        asyncio.run(Server(load_config(flags={"server.port": 0})).start())

    async with running_server(engines=()):
        with concurrent.futures.ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="one loop per process"):
            await asyncio.get_running_loop().run_in_executor(pool, second_loop)


async def test_a_port_that_is_taken_says_so() -> None:
    async with running_server(engines=()) as rig:
        config = load_config(flags={"server.port": rig.server.port})
        with pytest.raises(OSError, match=str(rig.server.port)):
            await Server(config).start()


async def test_the_metrics_endpoint_tells_what_happened() -> None:
    async with running_server(flags={"server.prometheus_port": 0}) as rig, rig.stream() as stream:
        for step, state in ((1, 2), (1, 1)):
            report = ReportStepRequest(run_id="run", step=step, step_seconds=2.0)
            report.trainer_state = state  # type: ignore[assignment]
            await rig.trainer.ReportStep(report)
        await stream.submit(
            *[submission(f"r{number}") for number in range(3)], submission("bad", token_bytes=b"\xff" * 8)
        )
        await stream.finished(3)
        async with rig.stream() as again:  # delivered again, counted once
            await again.finished(3)
        url = f"http://127.0.0.1:{rig.server.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
            text = await response.text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    labels = 'outcome="completed",rollout_class="critical",task_type="generation"'
    assert values[f"rolloutd_rollouts_finished_total{{{labels}}}"] == "3.0"
    assert values['rolloutd_submissions_refused_total{reason="INVALID_ARGUMENT"}'] == "1.0"
    assert values["rolloutd_training_step_seconds_count"] == "2.0"
    assert values['rolloutd_engine_up{engine="engine-0:1",pool="policy"}'] == "1.0"
    assert values['rolloutd_run_undelivered_bytes{run="run"}'] != "0.0"
    assert 0.0 < float(values['rolloutd_trainer_idle_ratio{run="run"}']) < 1.0
    assert float(values["rolloutd_dispatched_total"]) == 3.0


async def test_the_decision_log_has_a_line_per_decision(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with running_server(decision_log=JsonLinesSettings(path=str(path))) as rig, rig.stream() as stream:
        await stream.submit(*[submission(f"r{number}") for number in range(5)])
        await stream.finished(5)
        await rig.server.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    dispatched = [line for line in lines if line["kind"] == "dispatched"]
    assert sorted(line["rollout_id"] for line in dispatched) == [f"r{number}" for number in range(5)]
    assert dispatched[0]["engine_id"] == "engine-0:1"
    assert dispatched[0]["candidates"][0]["terms"].keys() >= {"prefix", "waiting", "cost"}
