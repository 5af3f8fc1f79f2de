"""The README's GRPO loop against `rolloutd serve` and two simulated engines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import rolloutd.client
from tests.e2e.conftest import MakeServer, MakeSim
from tests.e2e.engine_http import EngineHttp

EXAMPLE = Path(rolloutd.client.__file__).with_name("example_grpo.py")


async def test_the_grpo_example(sim: MakeSim, serve: MakeServer) -> None:
    engines = [sim(), sim()]
    server = await serve(*engines)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), server.target, "2", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert [line.split(",")[0] for line in out.decode().splitlines()] == ["step 0: 512 samples", "step 1: 512 samples"]
    for engine in engines:
        async with EngineHttp(engine.url) as http:
            assert (await http.load()).running == 0
