"""`make bench-core` on a small load: it runs, keeps the core's counters right, and prints every figure."""

from __future__ import annotations

import json

import pytest

from rolloutd.bench import core_cost
from rolloutd.bench.core_load import CoreLoad


def test_the_load_fills_the_engines_and_goes_on() -> None:
    load = CoreLoad(400, runs=2, engines=4, slots=8)
    for free in (1, 3):
        for _ in range(50):
            load.step(free)
    load.scheduler.check()
    assert load.ended >= 150
    assert 0 < load.hit_tokens < load.prompt_tokens


def test_every_figure_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_cost, "WARM_UP", 50)
    monkeypatch.setattr(core_cost, "MEASURED", 100)
    monkeypatch.setattr(core_cost, "ENGINES", 8)
    monkeypatch.setattr(core_cost, "EXACT_QUEUED", 400)
    monkeypatch.setattr(core_cost, "EXACT_DISPATCHES", 60)
    monkeypatch.setattr(core_cost, "EXACT_SEEDS", 1)
    monkeypatch.setattr("sys.argv", ["core_cost", "--queued", "3000"])
    core_cost.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = "us_per_dispatch_1 us_per_dispatch_16 handle_p99_ms handle_max_ms hit_share_of_exact"
    assert set(names.split()) <= figures.keys()
    assert all(figures[name] > 0 for name in names.split())
