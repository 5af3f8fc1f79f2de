"""Another configuration while the server runs: what is put in force, what is refused, and what is told of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.bench.replay import replay
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Action, Decided
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.server import reload
from rolloutd.server.config import JsonLinesSettings, load_config
from rolloutd.server.event_log import line_of, read_entries
from rolloutd.v1 import DecisionKind, GetRunRequest, ReportStepRequest
from tests.server.harness import WAIT_SECONDS, Rig, running_server, submission

RULE = {
    "name": "buffer-low",
    "when": {"metric": "buffer_fill", "below": 0.3},
    "then": {"scale_engines": 2},
    "until": {"above": 0.7},
}
FAST = {"rule_period_seconds": 0.02}


def write(file: Path, **sections: Any) -> None:
    file.write_text(yaml.safe_dump(sections))


@asynccontextmanager
async def served(file: Path, **changes: Any) -> AsyncIterator[Rig]:
    """A server that was started from this file."""
    source = load_config(file, {}, {}).source
    async with running_server(flags=None, source=source, **changes) as rig:
        base = dataclasses.replace(load_config(file), source=source)
        rig.server.state.config = dataclasses.replace(
            rig.server.state.config, values=base.values, origins=base.origins, source=source
        )
        rig.server.reloader._read = rig.server.reloader._seen = reload._look(file)
        yield rig


def metric(rig: Rig, name: str, **labels: str) -> float | None:
    value = rig.server.metrics.registry.get_sample_value(name, labels)
    return None if value is None else float(value)


def rule_changes(rig: Rig) -> asyncio.Queue[str]:
    """Messages of firings and ends, as they come."""
    messages: asyncio.Queue[str] = asyncio.Queue()

    def observe(_: events.Event, result: list[Action]) -> None:
        for action in result:
            if isinstance(action, Decided):
                messages.put_nowait(action.decision.message)

    rig.server.loop.observers.append(observe)
    return messages


async def test_a_changed_file_is_read_and_its_rules_fire_and_end(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    log = tmp_path / "decisions"
    async with served(file, decision_log=JsonLinesSettings(path=str(log))) as rig:
        world = rig.server.loop.core._world
        changes = rule_changes(rig)
        await rig.trainer.ReportStep(ReportStepRequest(run_id="run", step=1, trainer_state=1, buffer_fill=0.1))
        write(file, preempt={"enabled": False}, scheduler=FAST, rules=[RULE])
        await rig.server.reloader.look()
        assert world.config.preempt.enabled, "it may be half of a file: nobody reads it at the first look"
        await rig.server.reloader.look()
        assert not world.config.preempt.enabled and len(world.config.rules) == 1
        assert rig.server.state.config.scheduler is world.config
        assert "fired" in await asyncio.wait_for(changes.get(), WAIT_SECONDS)
        assert metric(rig, "rolloutd_rule_active", run="run", rule="buffer-low") == 1.0
        assert metric(rig, "rolloutd_rule_metric", run="run", rule="buffer-low", metric="buffer_fill") == pytest.approx(
            0.1
        )
        run = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run
        assert [(one.name, one.active, one.firings) for one in run.state.rules] == [("buffer-low", True, 1)]
        assert run.state.desired_engines == 2
        await rig.trainer.ReportStep(ReportStepRequest(run_id="run", step=1, buffer_fill=0.9))
        assert "ended" in await asyncio.wait_for(changes.get(), WAIT_SECONDS)
        assert metric(rig, "rolloutd_rule_active", run="run", rule="buffer-low") == 0.0
        run = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run
        assert [one.kind for one in run.rule_decisions] == [
            DecisionKind.DECISION_KIND_RULE_FIRED,
            DecisionKind.DECISION_KIND_RULE_ENDED,
        ]
        assert "below 0.3" in run.rule_decisions[0].message
        assert metric(rig, "rolloutd_rule_firings_total", run="run", rule="buffer-low") == 1.0
        assert metric(rig, "rolloutd_config_reloads_total", result="applied") == 1.0
    lines = log.read_text()
    assert '"kind":"rule_fired"' in lines and '"kind":"rule_ended"' in lines


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("scheduler: [1, 2", "not valid YAML"),
        ("scheduler:\n  max_batch_sise: 3\n", "did you mean 'scheduler.max_batch_size'"),
        ("preempt:\n  enabled: false\nserver:\n  port: 1\n", "server.port (file): cannot change while the server runs"),
        ("engines: ['http://other:1']\n", "RegisterEngine"),
        ("index:\n  page_tokens: 64\n", "index.page_tokens: is 16 and cannot become 64"),
        ("rules:\n- {name: a}\n", "rules[0].when (file): is missing"),
        (
            "preempt: {enabled: false}\nrules: [{name: a, when: {metric: kv_fill, above: 0.5}, then: {scale_cap: 0.5}, "
            "until: {below: 0.6}}]\n",
            "rules[0].until.below",
        ),
    ],
)
async def test_what_cannot_be_used_changes_nothing_and_is_told(tmp_path: Path, content: str, key: str) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    async with served(file) as rig:
        before = rig.server.state.config
        file.write_text(content)
        assert not await rig.server.reloader.reload("a test")
        assert key in rig.server.reloader.refused_because
        assert rig.server.state.config is before and rig.server.loop.core._world.config == before.scheduler
        assert metric(rig, "rolloutd_config_reloads_total", result="refused") == 1.0
        assert metric(rig, "rolloutd_config_refused") == 1.0
        write(file, preempt={"enabled": False})
        assert await rig.server.reloader.reload("it was repaired")
        assert metric(rig, "rolloutd_config_refused") == 0.0


async def test_a_file_that_is_gone_or_the_same_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    async with served(file) as rig:
        reloader = rig.server.reloader
        assert await reloader.reload("a test")
        assert reloader.reloads == {"applied": 0, "unchanged": 1, "refused": 0}
        file.unlink()
        for _ in range(3):
            await reloader.look()
        assert reloader.reloads.total() == 1
        write(file, preempt={"enabled": False})
        for _ in range(3):
            await reloader.look()
        assert reloader.reloads["applied"] == 1


async def test_a_refused_file_is_not_read_again_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    async with served(file) as rig:
        file.write_text("scheduler: [")
        for _ in range(5):
            await rig.server.reloader.look()
        assert rig.server.reloader.reloads["refused"] == 1


async def test_work_goes_on_through_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, weights={"waiting": 0.2})
    async with served(file) as rig, rig.stream() as stream:
        await stream.submit(*(submission(f"r{number}") for number in range(50)))
        for number in range(5):
            write(file, weights={"waiting": 0.3 + number / 10}, scheduler={"max_batch_size": 1 + number})
            assert await rig.server.reloader.reload("a test")
        assert len(await stream.finished(50)) == 50


async def test_the_environment_and_flags_stay_stronger_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    environment = {"ROLLOUTD_PREEMPT__ENABLED": "true", "ROLLOUTD_API_KEY": "secret"}
    source = load_config(file, environment, {"server.seed": 3, "server.port": None}).source
    assert source is not None and "secret" not in repr(source)
    write(file, preempt={"enabled": False}, server={"seed": 4})
    again = source.load()
    assert again.scheduler.preempt.enabled and again.seed == 3


async def test_a_server_without_a_source_says_that_it_cannot() -> None:
    async with running_server(source=None) as rig:
        assert not await rig.server.reloader.reload("a test")
        assert "could be read again" in rig.server.reloader.refused_because
        await rig.server.reloader.watch()  # returns: there is nothing to watch


def test_sighup_reads_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": True})
    command = [sys.executable, "-m", "rolloutd.server.cli", "serve", "--config", str(file), "--port", "0", "--log-json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUTD_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            _read_until(server, '"serving"')
            write(file, preempt={"enabled": False})
            server.send_signal(signal.SIGHUP)
            line = _read_until(server, "configuration_reloaded")
            assert "preempt.enabled" in line and "SIGHUP" in line
            write(file, server={"seed": 1})
            server.send_signal(signal.SIGHUP)
            assert "server.seed" in _read_until(server, "configuration_refused")
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()


def _read_until(server: subprocess.Popen[str], word: str) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if word in line:
            return line
    raise AssertionError(f"the server ended before it said {word!r}")


def test_a_reconfiguration_is_kept_in_the_event_log_and_replayed(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    write(file, preempt={"enabled": False}, rules=[RULE], budget={"max_running_rollouts": 3}, index={"page_tokens": 4})
    config = load_config(file).scheduler
    (entry,) = read_entries([line_of((1.5, events.Reconfigure(config)))], "log")
    assert entry == (1.5, events.Reconfigure(config))


async def test_a_replay_follows_reconfigurations_only_where_no_settings_are_to_be_tried(tmp_path: Path) -> None:
    file, log = tmp_path / "rolloutd.yaml", tmp_path / "events"
    write(file, budget={"max_running_rollouts": 4})
    async with served(file, event_log=JsonLinesSettings(path=str(log))) as rig, rig.stream() as stream:
        write(file, budget={"max_running_rollouts": 1})
        assert await rig.server.reloader.reload("a test")
        await stream.submit(*(submission(f"r{number}", max_new_tokens=50) for number in range(4)))
        await stream.finished(4)
    with log.open(encoding="utf-8") as lines:
        entries = list(read_entries(lines, log.name))
    assert any(isinstance(what, events.Reconfigure) for _, what in entries)
    tried = replay(entries, SchedulerConfig(), TimingModel(), 0)
    followed = replay(entries, SchedulerConfig(), TimingModel(), 0, reconfigured=True)
    assert len(tried) == len(followed) == 4
    assert max(at for at, _ in followed) > 2 * max(at for at, _ in tried), "one after the other"
