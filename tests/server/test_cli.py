"""The command line: parsing here, and whole processes against the simulated engine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rolloutd.engines.base import EngineFault, FaultKind
from rolloutd.engines.sim.tokens import VOCABULARY_SIZE
from rolloutd.server.cli import main
from rolloutd.server.core_build import core_is_compiled
from rolloutd.v1 import OUTCOME_COMPLETED, OUTCOME_SHUTDOWN, RolloutServiceStub
from tests.server.harness import Stream, running_server, submission

START_SECONDS = 30.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One `rolloutd` command, with what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def says(self, pattern: str) -> re.Match[str]:
        """Read its output until the pattern appears."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            while (found := re.search(pattern, self.text)) is None:
                line = await self.process.stdout.readline()
                assert line, f"it ended without saying {pattern!r}:\n{self.text}"
                self.text += line.decode()
        return found

    async def ends(self) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            self.text += (await self.process.stdout.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def command(*arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rolloutd.server.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def simulated_engine(*flags: str) -> AsyncIterator[str]:
    port = _free_port()
    async with command("engine-sim", "--port", str(port), *flags) as engine:
        await engine.says("listening")
        yield f"http://127.0.0.1:{port}"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "engine-sim" in capsys.readouterr().err


def test_the_version_says_which_core_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    core = "compiled core" if core_is_compiled() else "plain Python core"
    assert capsys.readouterr().out == f"rolloutd {importlib.metadata.version('rolloutd')} ({core})\n"


def test_check_prints_every_key_with_its_origin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("weights: {prefix: 0.9}\n")
    monkeypatch.setenv("ROLLOUTD_SERVER__SEED", "5")
    assert main(["check", "--config", str(file)]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert lines["weights.prefix"] == ["0.9", "file"]
    assert lines["server.seed"] == ["5", "env"]
    assert lines["weights.cost"] == ["0.1", "default"]


def test_a_bad_configuration_is_exit_code_1_and_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("weights: {prefx: 0.9}\n")
    assert main(["check", "--config", str(file)]) == 1
    assert capsys.readouterr().err == "rolloutd: unknown key 'weights.prefx' (file); did you mean 'weights.prefix'?\n"
    assert main(["serve", "--engine", "nonsense"]) == 1
    assert "engines[0].url" in capsys.readouterr().err


def test_check_fails_when_an_engine_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--engine", f"http://127.0.0.1:{_free_port()}"]) == 1
    assert "no usable answer: " in capsys.readouterr().out


async def test_check_says_what_an_engine_lacks_that_answers() -> None:
    async with simulated_engine() as url, command("check", "--engine", url) as check:
        assert await check.ends() == 1
        assert "  answers, but cannot be used: " in check.text and "does not answer" not in check.text
        assert "the vocabulary size is unknown" in check.text and "--vocabulary-size" in check.text


async def test_sigterm_drains_a_whole_process_and_exits_0() -> None:
    vocabulary = ("--vocabulary-size", str(VOCABULARY_SIZE))
    async with (
        simulated_engine("--slots", "4") as url,
        command("serve", "--port", "0", "--engine", url, *vocabulary) as server,
    ):
        address = (await server.says(r"gRPC on (\S+)")).group(1)
        await server.says(r"engine +http\S+ \(policy\) simulated: 4 slots")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = Stream(RolloutServiceStub(channel), None)
            async with stream:
                rollouts = [submission(f"r{number}", prompt=16, max_new_tokens=100) for number in range(8)]
                await stream.send(hello={"run_id": "run", "consumer_id": "c"}, submissions=rollouts)
                async with asyncio.timeout(10):
                    while True:  # four run, four wait
                        event = await stream.event()
                        assert event is not None
                        if event.WhichOneof("event") == "accepted" and event.accepted.rollout_id == "r7":
                            break
                server.process.send_signal(signal.SIGTERM)
                outcomes = [result.outcome for result in await stream.finished(8)]
                assert sorted(outcomes) == sorted([OUTCOME_COMPLETED] * 4 + [OUTCOME_SHUTDOWN] * 4)
                assert await stream.event() is None
                assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await server.ends() == 0


async def test_a_second_sigterm_exits_now() -> None:
    vocabulary = ("--vocabulary-size", str(VOCABULARY_SIZE))
    async with (
        simulated_engine("--time-scale", "0.01") as url,
        command("serve", "--port", "0", "--engine", url, *vocabulary) as server,
    ):
        address = (await server.says(r"gRPC on (\S+)")).group(1)
        await server.says(r"engine_joined|simulated: ")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = Stream(RolloutServiceStub(channel), None)
            async with stream:
                forever = submission("r", max_new_tokens=4000, want_progress=True)
                await stream.send(hello={"run_id": "run", "consumer_id": "c"}, submissions=[forever])
                await stream.next("accepted")
                server.process.send_signal(signal.SIGTERM)
                await stream.next("notice")  # draining: the grace of 30 s has begun
                server.process.send_signal(signal.SIGTERM)
                assert await server.ends() == 130


async def test_submit_runs_a_file_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": [1, 2, number], "max_new_tokens": 4, "samples": 2}) for number in range(1, 6)]
    source.write_text("\n".join([*lines, "not json", json.dumps({"prompt": [5], "max_new_tokens": 0})]) + "\n")
    async with running_server() as rig:
        arguments = ("submit", "--server", f"127.0.0.1:{rig.server.port}", "--run", "run", str(source), str(target))
        async with command(*arguments) as first:
            assert await first.ends() == 1
            assert "2 lines failed" in first.text
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        results = {row["rollout_id"]: row for row in rows if row.get("rollout_id")}
        assert sorted(results) == sorted(f"in-{line}/{sample}" for line in range(1, 6) for sample in range(2))
        assert all(row["tokens"] == [7, 8, 9, 10] and row["error"] is None for row in results.values())
        assert {row["line"] for row in rows if row["error"]} == {6, 7}
        served = len(rig.door.requests)
        target.write_text("".join(line + "\n" for line in target.read_text().splitlines() if '"in-3"' not in line)[:-1])
        source.write_text("\n".join(lines) + "\n")
        async with command(*arguments) as second:
            assert await second.ends() == 1  # in-3 was acknowledged: the server does not run it twice
        assert len(rig.door.requests) == served


async def test_check_says_what_an_engines_settings_cost() -> None:
    async with (
        simulated_engine("--no-incremental-streaming-output", "--page-size", "1") as url,
        command("check", "--engine", url, "--vocabulary-size", str(VOCABULARY_SIZE)) as check,
    ):
        assert await check.ends() == 0
        assert "page        1 tokens" in check.text
        assert len(re.findall("costs ", check.text)) >= 2


async def test_submit_picks_up_results_that_an_earlier_life_did_not_write(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": [1, 2, 3, 4], "max_new_tokens": 4}) + "\n")
    async with running_server() as rig:
        async with rig.stream("submit-in") as killed:
            await killed.submit(submission("in-1", prompt=4, max_new_tokens=4))
            await killed.finished(1)
        async with command(
            "submit", "--server", f"127.0.0.1:{rig.server.port}", "--run", "run", str(source), str(target)
        ) as again:
            assert await again.ends() == 0, again.text
        (row,) = [json.loads(line) for line in target.read_text().splitlines()]
        assert row["tokens"] == [7, 8, 9, 10]
        assert len(rig.door.requests) == 1


@pytest.mark.parametrize(
    ("version", "path", "problem"),
    [
        ("0", "/weights", "VERSION: is 0"),
        (str(2**63), "/weights", "VERSION: is 9223372036854775808"),
        ("1", "", "PATH: is empty"),
        ("1", "/weights/\udcff", "PATH: '/weights/\\udcff' has characters"),
    ],
)
def test_publish_says_which_argument_is_wrong(
    version: str, path: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "run", version, path, "--server", "127.0.0.1:1"]) == 1
    assert problem in capsys.readouterr().err


async def test_publish_shows_how_the_engines_get_on() -> None:
    async with running_server() as rig:
        target = ("--server", f"127.0.0.1:{rig.server.port}")
        async with rig.stream(trainer_epoch=7):
            async with command("publish", "run", "5", "/weights/5", "--mode", "drain", *target) as publish:
                assert await publish.ends() == 0, publish.text
                assert re.search(r"\d s  engine-0:1  loading\n", publish.text)
                assert "version 5: 1 engine updated" in publish.text
            async with command("publish", "run", "5", "/weights/5", *target) as again:
                assert await again.ends() == 0 and "version 5: every engine held it already" in again.text
            async with command("publish", "run", "5", "/weights/5", "--pool", "rewards", *target) as nowhere:
                assert await nowhere.ends() == 0 and "no engine is in pool 'rewards' yet" in nowhere.text
            rig.door.control_faults["load_weights"] = EngineFault(FaultKind.REFUSED, "no such file")
            async with command("publish", "run", "6", "/weights/6", *target) as failing:
                assert await failing.ends() == 1
                assert "no such file" in failing.text and "the same command again" in failing.text
            async with command("publish", "run", "5", "/weights/5", *target) as backwards:
                assert await backwards.ends() == 1
                assert "versions only grow" in backwards.text
