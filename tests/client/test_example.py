"""The example of the README, as it stands there, against a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import rolloutd.client
from rolloutd import v1
from tests.client.fake_server import FakeServer

EXAMPLE = Path(rolloutd.client.__file__).with_name("example_grpo.py")


async def test_the_grpo_example_runs_from_a_shell(server: FakeServer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        server.address,
        "2",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    assert [line.split(",")[0] for line in out.decode().splitlines()] == ["step 0: 512 samples", "step 1: 512 samples"]
    assert len(server.rollouts) == 1024 and not server.kept_results
    assert {acknowledgement.verdict for acknowledgement in server.acknowledgements} <= {
        v1.VERDICT_USED,
        v1.VERDICT_DROPPED,
    }
    steps = [call for call in server.calls if isinstance(call, v1.ReportStepRequest)]
    assert [(call.step, call.samples_needed) for call in steps] == [(0, 512), (0, 0), (1, 512), (1, 0)]
    assert len([message for message in server.messages if message.submissions]) < 10


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
