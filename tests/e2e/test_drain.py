"""The life of a whole process as Kubernetes sees it: alive before its engine, and an orderly end."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc
import numpy as np
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rolloutd.client import Refused, connect
from rolloutd.engines.sim.tokens import VOCABULARY_SIZE
from rolloutd.server.config import load_config
from tests.deploy.manifests import MANIFESTS, container, pod_of
from tests.e2e.conftest import MakeServer, MakeSim
from tests.e2e.processes import Rolloutd
from tests.e2e.rollouts import prompt, submit_running

HEALTH = health_pb2.HealthCheckResponse


def probe(target: str) -> tuple[int, str]:
    """What `rolloutd health` says."""
    command = [sys.executable, "-m", "rolloutd.server.cli", "health", target, "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


async def test_alive_and_accepting_before_the_engine_is_there(
    sim: MakeSim, started: list[Rolloutd], random: np.random.Generator
) -> None:
    engine = sim(start=False)
    server = Rolloutd([engine.url], "--vocabulary-size", str(VOCABULARY_SIZE))
    started.append(server)
    server.start()
    assert await asyncio.to_thread(probe, server.target) == (0, f"{server.target}: SERVING\n")
    async with connect(server.target, run="run", consumer="trainer") as client, asyncio.timeout(60):
        submission = await client.submit(prompt(random), max_new_tokens=10)
        await submission.accepted()
        engine.start()
        (result,) = [result async for result in client.drain()]
        assert result.ok
    assert server.terminate() == 0


async def test_sigterm_in_the_order_that_kubernetes_needs(
    sim: MakeSim, serve: MakeServer, random: np.random.Generator
) -> None:
    """NOT_SERVING, refuse new, finish what runs, deliver, exit 0: and the engine's hook of the manifest waits for all of it."""
    server = await serve(sim(), environment={"ROLLOUTD_SERVER__SHUTDOWN_GRACE_SECONDS": "60"})
    hook = container(pod_of("sidecar.yaml"), "engine")["lifecycle"]["preStop"]["exec"]["command"]
    draining = asyncio.Event()
    async with (
        connect(
            server.target,
            run="run",
            consumer="trainer",
            on_notice=lambda notice: draining.set() if notice.kind == "draining" else None,
        ) as client,
        grpc.aio.insecure_channel(server.target) as channel,
        asyncio.timeout(90),
    ):
        running = await submit_running(client, [prompt(random) for _ in range(4)], "r", max_new_tokens=1500)
        hooked = await asyncio.create_subprocess_exec(*[part.replace("50051", str(server.port)) for part in hook])
        server.process.terminate()
        await draining.wait()
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == HEALTH.NOT_SERVING
        late = await client.submit(prompt(random), max_new_tokens=10, rollout_id="late")
        try:
            await late.accepted()
        except Refused as refusal:
            assert refusal.reason == "SHUTDOWN"
        else:
            raise AssertionError("a draining server accepted new work")
        assert hooked.returncode is None and server.process.poll() is None  # both wait for what runs
        results = {}
        async for result in client.results():
            results[result.rollout_id] = result
            if len(results) == 5:
                break
    assert {rollout_id: results[rollout_id].outcome for rollout_id in running} == dict.fromkeys(running, "completed")
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert await asyncio.wait_for(hooked.wait(), 30) == 0


async def test_the_sidecar_s_hook_starts_the_drain(sim: MakeSim, serve: MakeServer) -> None:
    server = await serve(sim())
    hook = container(pod_of("sidecar.yaml"), "rolloutd")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[-1] == "kill -TERM 1"
    hooked = await asyncio.create_subprocess_exec(*hook[:-1], hook[-1].replace(" 1", f" {server.process.pid}"))
    assert await asyncio.wait_for(hooked.wait(), 10) == 0
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert (await asyncio.to_thread(probe, server.target))[0] == 1


def test_the_environment_of_the_manifests_is_a_configuration() -> None:
    for name in MANIFESTS:
        variables = {entry["name"]: entry["value"] for entry in container(pod_of(name), "rolloutd")["env"]}
        assert yaml.safe_load(variables["ROLLOUTD_SERVER__PORT"]) == 50051
        # The file of keys is a mounted Secret; here there is none.
        del variables["ROLLOUTD_SERVER__API_KEYS_FILE"]
        config = load_config(environment={**variables, "ROLLOUTD_SERVER__ALLOW_UNAUTHENTICATED": "true"})
        assert config.engines and config.host == "0.0.0.0"
