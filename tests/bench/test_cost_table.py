"""The README's cost table says what the benchmarks printed, and what was not run is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutd.bench import cost_table

OVERHEAD: dict[str, Any] = {
    "added_p50_ms": 0.91234,
    "added_p99_ms": 4.5,
    "router_added_p50_ms": 1.02,
    "router_added_p99_ms": 5.0,
    "cpu_s_per_1000": {"16": 0.1, "2048": 0.21, "16384": 0.4},
    "router_cpu_s_per_1000": {"16": 0.2, "2048": 0.6, "16384": 2.5},
    "throughput_ratio": 2.5,
}
CORE = {"us_per_dispatch_1": 71.25, "us_per_dispatch_16": 44.0, "handle_p99_ms": 2.0, "handle_max_ms": 11.5}
README = f"before\n{cost_table.BEGIN}\nold\n{cost_table.END}\nafter\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    cost_table.FOLDER.mkdir(parents=True)
    return tmp_path


def ran(name: str, figures: dict[str, Any]) -> None:
    (cost_table.FOLDER / f"{name}.txt").write_text(f"a table\n\n{json.dumps(figures)}\n")


def test_figures_are_those_of_the_last_lines(here: Path) -> None:
    ran("overhead", OVERHEAD)
    ran("core", CORE)
    assert cost_table.main() == 0
    text = (here / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| CPU seconds per 1,000 rollouts, 16,384 prompt tokens, 64 in flight | 0.4 | sglang-router 2.5 |" in text
    assert "4,096 tokens | 0.912 ms | sglang-router 1.02 ms |" in text
    assert "one slot frees at a time | 71.2 us |" in text
    assert "| core, one event, p99 / longest | 2 / 11.5 ms |" in text
    assert "index" not in text, "it was not run"


def test_again_gives_the_same(here: Path) -> None:
    ran("overhead", OVERHEAD)
    cost_table.main()
    once = (here / "README.md").read_text()
    cost_table.main()
    assert (here / "README.md").read_text() == once


def test_an_interrupted_run_is_named_and_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran("core", CORE)
    (cost_table.FOLDER / "overhead.txt").write_text("closed, 16 tokens, pair 1 of 5\n")
    assert cost_table.main() == 0
    assert "left out: overhead" in capsys.readouterr().err
    assert "sglang-router" not in (here / "README.md").read_text()


def test_nothing_run_changes_nothing(here: Path) -> None:
    assert cost_table.main() == 1
    assert (here / "README.md").read_text() == README


def test_a_readme_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="markers"):
        cost_table.replace("no markers", "table")


def test_the_readme_has_the_markers() -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    cost_table.replace(readme.read_text(encoding="utf-8"), "table")
