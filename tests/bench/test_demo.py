"""The whole demonstration in small, as real processes; and its command line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.bench.demo import demo as run_demo
from rolloutd.bench.demo import main
from rolloutd.bench.demo_cast import settings
from rolloutd.bench.demo_fleet import SimFleet
from rolloutd.bench.demo_screen import Screen
from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.report import json_line
from rolloutd.bench.w1 import FULL_DEMO, DemoShape

KEYS = (
    "rollouts delivered lost duplicated wrong_tokens trainer_idle_ratio step_seconds_p50 critical_over_bound "
    "samples_per_second prefix_hit prefix_hit_ceiling wait_p50_seconds wait_p99_seconds"
).split()
SHORT = LogNormal(5.0, 0.8, 1, 600)
TINY = DemoShape(
    critical=replace(FULL_DEMO.critical, groups=6, output=SHORT),
    reusable=replace(FULL_DEMO.reusable, groups=4, head_tokens=256, output=SHORT),
    background=replace(FULL_DEMO.background, groups=2, output=LogNormal(9.0, 0.1, 1, 10_000)),
    reward=replace(FULL_DEMO.reward, queries=10, seconds=5.0),
)


async def test_demo_in_small(tmp_path: Path) -> None:
    """Two engines, two steps, a few seconds: all is delivered once and right, and all processes are gone."""
    fleet = SimFleet(engines=2, slots=6, time_scale=10.0, shape=TINY, training_seconds=8.0)
    shown = io.StringIO()
    outcome = await asyncio.wait_for(run_demo(fleet, 2, 1, tmp_path, Screen(shown)), 90.0)
    summary = outcome.summary
    assert outcome.problems == []
    assert summary.rollouts == summary.delivered
    assert summary.rollouts >= 2 * (48 + 8)
    assert (summary.lost, summary.duplicated, summary.wrong_tokens) == (0, 0, 0)
    assert list(json.loads(json_line(summary))) == KEYS
    assert summary.critical_over_bound is not None and summary.critical_over_bound >= 0.95
    assert summary.prefix_hit is not None and summary.prefix_hit_ceiling is not None
    assert 0.0 < summary.prefix_hit <= summary.prefix_hit_ceiling
    assert all(summary.wait_p99_seconds[kind] is not None for kind in ("critical", "reusable", "reward"))
    text = shown.getvalue()
    assert "step 1: critical rollouts back after" in text
    assert text.count("  ready  ") == 3
    assert children_of_this_process() == []


def children_of_this_process() -> list[str]:
    return [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.exists() and path.read_text().rpartition(")")[2].split()[1] == str(os.getpid())
    ]


def test_an_interrupted_demo_leaves_no_process_and_says_where_the_logs_are(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rolloutd.bench.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "rolloutd " in line and "ready" in line:
                break
        assert mentions(tmp_path) != []
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert output == ""
    assert f"logs: {tmp_path}" in errors
    assert mentions(tmp_path) == []


def mentions(folder: Path) -> list[str]:
    """Commands of running processes that name the folder: the service, by its configuration file."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in command:
            commands.append(command)
    return commands


def test_a_cast_member_that_does_not_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(SimFleet, "command", lambda self, port: [sys.executable, "-c", "raise SystemExit('no luck')"])
    assert main(["--json-only"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ended with status 1 before it was ready; its log ends with\n  | no luck" in printed.err
    assert f"logs: {tmp_path}" in printed.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engine", "sglang", "--time-scale", "2"], "--time-scale is for simulated engines"),
        (["--steps", "0"], "0 is not at least 1"),
        (["--time-scale", "-1"], "-1 is not above 0"),
        (["--engine", "vllm"], "invalid choice"),
    ],
)
def test_wrong_usage(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_the_service_lives_in_simulated_time() -> None:
    slow, fast = settings(SimFleet(time_scale=1.0)), settings(SimFleet(time_scale=4.0))
    for key in ("scheduler.aging_seconds", "preempt.min_run_seconds", "budget.shrink_seconds"):
        assert fast[key] == slow[key] / 4.0 > 0
    assert "scheduler.queue_ttl_seconds" not in fast
    assert not any(key.startswith("executor.") for key in fast)
