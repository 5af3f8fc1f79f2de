"""Real engines' outputs are compared with what an engine gives alone; here the engine is a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.demo_ledger import Ledger
from rolloutd.bench.demo_sglang import RECIPE, REFERENCES, Reference, SglangFleet, environment_folder
from rolloutd.bench.workload import Item, TaskType, WorkClass
from rolloutd.client import RolloutResult

OUTPUT = [11, 12, 13, 14]
NEAR = 0.0005


@pytest.mark.parametrize(
    ("tokens", "gaps", "expected"),
    [
        ([11, 12, 13, 14], [1.0] * 4, (0, False)),
        ([11, 12], [1.0] * 4, (0, False)),
        ([11, 99, 13, 98], [1.0] * 4, (2, False)),
        ([11, 99, 98, 97], [1.0, NEAR, 1.0, 1.0], (0, True)),
        ([11, 99, 98, 97], [1.0, 1.0, NEAR, NEAR], (3, False)),
    ],
    ids=["same", "the start of it", "two differ", "a near tie, then anything", "a near tie after the difference"],
)
def test_compare(tokens: list[int], gaps: list[float], expected: tuple[int, bool]) -> None:
    assert Reference(OUTPUT, gaps).compare(np.array(tokens, np.uint32)) == expected


@pytest.fixture
async def engine(aiohttp_requests: list[dict[str, Any]]) -> AsyncIterator[str]:
    """URL of an engine that always writes OUTPUT, with a near tie at its third token."""

    async def generate(request: web.Request) -> web.Response:
        aiohttp_requests.append(await request.json())
        tops = [
            [[-0.1, token, None], [-0.1 - gap, 0, None]] for token, gap in zip(OUTPUT, [1, 1, NEAR, 1], strict=True)
        ]
        return web.json_response({"output_ids": OUTPUT, "meta_info": {"output_top_logprobs": tops}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
def aiohttp_requests() -> list[dict[str, Any]]:
    return []


def item(number: int, prompt: int) -> Item:
    return Item(
        rollout_id=f"r{number}",
        work_class=WorkClass.CRITICAL,
        task_type=TaskType.GENERATION,
        prompt_bytes=np.array([3, prompt], "<u4").tobytes(),
        output_tokens=4,
        max_new_tokens=4,
        sampling_seed=0,
        stratum="math",
    )


def ledger_of(outputs: list[tuple[int, list[int]]]) -> Ledger:
    """One complete result for each (prompt, tokens)."""
    ledger = Ledger(SimClock(1.0))
    for number, (prompt, tokens) in enumerate(outputs):
        ledger.expect(f"r{number}", item(number, prompt), 0, 0.0)
        result = RolloutResult(f"r{number}", "demo", "completed", complete=True, tokens=np.array(tokens, np.uint32))
        ledger.end(result)
    return ledger


async def test_each_prompt_is_asked_for_once_and_all_its_rollouts_compared(
    engine: str, aiohttp_requests: list[dict[str, Any]]
) -> None:
    ledger = ledger_of([(5, OUTPUT), (5, [11, 12, 99, 98]), (5, [11, 77, 13, 14]), (6, OUTPUT), (6, [11, 12, 13])])
    notes = await SglangFleet().check(ledger, [engine], lambda line: None)
    assert [rollout.record.wrong_tokens for rollout in ledger] == [0, 0, 1, 0, 1]
    assert sorted(request["input_ids"] for request in aiohttp_requests) == [[3, 5], [3, 6]]
    assert all(request["sampling_params"]["temperature"] == 0.0 for request in aiohttp_requests)
    assert notes[0].startswith("5 outputs compared") and "1 first differences" in notes[0]


async def test_only_so_many_prompts_are_asked_for(engine: str, aiohttp_requests: list[dict[str, Any]]) -> None:
    ledger = ledger_of([(prompt, OUTPUT) for prompt in range(3, 3 + 2 * REFERENCES)])
    await SglangFleet().check(ledger, [engine], lambda line: None)
    assert len(aiohttp_requests) == REFERENCES


def test_the_environment_is_where_the_recipe_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("ROLLOUTD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment_folder() == Path("/home/somebody/.cache/rolloutd/sglang-cpu-0.5.23")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert environment_folder() == Path("/caches/rolloutd/sglang-cpu-0.5.23")
    monkeypatch.setenv("ROLLOUTD_CACHE", "/ours")
    assert environment_folder() == Path("/ours/sglang-cpu-0.5.23")
    assert environment_folder().name in (RECIPE / "setup.sh").read_text()


def test_lengths_are_the_engines_own_business() -> None:
    options = SglangFleet().options([item(0, 5)])
    assert options == {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
