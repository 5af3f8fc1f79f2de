"""A result that is delivered again because its rollout was submitted again ended once: it is counted and written once."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.harness import running_server, submission
from tests.server.test_version_metrics import scrape

COMPLETED = 'rolloutd_rollouts_finished_total{outcome="completed",rollout_class="critical",task_type="generation"}'


async def test_an_end_is_counted_once_also_where_its_group_is_submitted_again() -> None:
    """What clients/python does after each reconnect with a group of which some have ended (auto_acknowledge=False)."""
    async with running_server(auto=False) as rig, rig.stream() as stream:
        group = submission("g", samples=3, group_keep=2, max_new_tokens=8)
        await stream.submit(group)
        first, _, _ = await rig.door.wait_running(3)
        rig.door.finish(first, 4)
        await stream.finished(1)
        before = scrape(rig.server.metrics.registry)
        await stream.submit(group)
        await stream.finished(1)
        after = scrape(rig.server.metrics.registry)
        for name in (COMPLETED, 'rolloutd_generated_tokens_total{rollout_class="critical",task_type="generation"}'):
            assert after[name] == before[name], f"{name}: {before[name]} -> {after[name]}"


async def test_an_end_is_written_once_to_the_lineage(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    async with running_server(auto=False, flags={"lineage.path": str(path)}) as rig, rig.stream() as stream:
        group = submission("g", samples=3, group_keep=2, max_new_tokens=8)
        await stream.submit(group)
        first, _, _ = await rig.door.wait_running(3)
        rig.door.finish(first, 4)
        await stream.finished(1)
        await stream.submit(group)
        await stream.finished(1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = [line["rollout"]["rollout_id"] for line in lines if "rollout" in line]
    assert len(names) == len(set(names)), f"ends of {names}"
