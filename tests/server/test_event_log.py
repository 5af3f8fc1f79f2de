"""The event log of a server: what it was told and how rollouts ended, each once, in a form that can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.bench.replay import recorded, replay
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler import events
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.server.config import JsonLinesSettings, load_config
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.event_log import End, read_entries
from tests.server.harness import running_server, submission


async def test_a_server_writes_what_a_replay_needs(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with running_server(event_log=JsonLinesSettings(path=str(path))) as rig:
        await rig.engines_joined()
        async with rig.stream() as stream:
            await stream.submit(submission("a"), submission("b", max_new_tokens=5, samples=2))
            await stream.finished(3)
    with path.open(encoding="utf-8") as lines:
        entries = list(read_entries(lines, path.name))
    told = [type(what) for _, what in entries if not isinstance(what, End)]
    assert {events.JoinEngine, events.AttachConsumer, events.SubmitRollouts} <= set(told)
    ends = [end for _, end in recorded(entries)]
    assert sorted(end.rollout_id for end in ends) == ["a", "b/0", "b/1"]
    again = replay(entries, SchedulerConfig(), TimingModel(), 0)
    assert {end.rollout_id: (end.outcome, end.output_tokens) for _, end in again} == {
        end.rollout_id: (end.outcome, end.output_tokens) for end in ends
    }


def test_two_logs_in_one_file_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with pytest.raises(ConfigError, match="event_log.path.*lineage.path"):
        load_config(None, {}, {"event_log.path": path, "lineage.path": path})
