import io
import json
from dataclasses import replace

import pytest

from rolloutd.bench.metrics import RolloutRecord, StepRecord, summarise
from rolloutd.bench.report import json_line, print_report
from rolloutd.bench.workload import Kind

SUMMARY = summarise(
    [RolloutRecord(kind, 0.0, 1.25 * number + 1 / 3, 9.0, 1, 0, 100, 37) for number, kind in enumerate(Kind)],
    [StepRecord(0.0, 50.0, 50.0, 60.0, 37.0)],
    0.871234,
)


def printed(columns: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    print_report(SUMMARY, "demo", out)
    return out.getvalue()


@pytest.mark.parametrize("columns", ["30", "80", "200"])
def test_last_line_is_the_json_and_the_table_shows_the_same_numbers(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(columns, monkeypatch)
    assert text.endswith("\n")
    *table_lines, last = text.splitlines()
    assert last == json_line(SUMMARY)
    fields = json.loads(last)
    rows = {cells[0]: cells[1:] for line in table_lines if "│" in line and (cells := line.replace("│", " ").split())}
    assert set(rows) == set(fields)
    for name, value in fields.items():
        values = list(value.values()) if isinstance(value, dict) else [value]
        assert [json.loads(cell) for cell in rows[name]] == values


def test_columns_line_up(monkeypatch: pytest.MonkeyPatch) -> None:
    table_lines = [line.rstrip() for line in printed("80", monkeypatch).splitlines()[1:-1]]
    assert len({len(line) for line in table_lines}) == 1


def test_missing_figures_show_as_a_dash() -> None:
    out = io.StringIO()
    print_report(replace(SUMMARY, critical_over_bound=None), "demo", out)
    row = next(line for line in out.getvalue().splitlines() if "critical_over_bound" in line)
    assert " - " in row
    assert json.loads(out.getvalue().splitlines()[-1])["critical_over_bound"] is None


def test_a_number_that_json_cannot_hold_prints_nothing() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="JSON"):
        print_report(replace(SUMMARY, prefix_hit=float("nan")), "demo", out)
    assert out.getvalue() == ""


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(SUMMARY, "demo")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rollouts"] == 4
