"""The benchmark of KV events, small: it takes in and out what it says, and prints JSON last."""

import json
import sys

import pytest

from rolloutd.bench import kv_events_cost


def test_every_key_is_printed_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_events_cost", "--engines", "2", "--sessions", "3"])
    kv_events_cost.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.pop("blocks") == 2 * (64 + 3 * 4 * 32)
    assert len(figures) == 6 and all(value > 0 for value in figures.values())
