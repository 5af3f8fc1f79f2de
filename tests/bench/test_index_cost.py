"""The benchmark of the index, small: its shapes are what they say, and every promised key is printed last as JSON."""

import json
import sys

import pytest

from rolloutd.bench import index_cost
from rolloutd.bench.index_shapes import PAGE_TOKENS, QUERY_PAGES, Shape, shapes

PROMISED = (
    "match_us_p50",
    "match_us_p99",
    "insert_us_p50",
    "evict_us_p50",
    "bytes_per_page",
    "sweep_slice_max_ms",
)


def test_every_key_is_printed_last_for_both_shapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["index_cost", "--scale", "0.025", "--rounds", "1"])
    index_cost.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in PROMISED:
        assert figures[key].keys() == {"A", "B"}, key
        assert all(value > 0 for value in figures[key].values()), key
    for key in ("insert_us_p50_by_fill", "evict_us_p50_by_fill"):
        assert all(by_fill.keys() == {"10", "50", "100"} for by_fill in figures[key].values()), key


@pytest.mark.parametrize(("shape", "nodes", "masks"), [(shapes(0.025)[0], 9, 2), (shapes(0.025)[1], 20, 7)])
def test_a_query_is_known_to_the_last_page(shape: Shape, nodes: int, masks: int) -> None:
    index = shape.empty_index()
    shape.fill(index, range(shape.families))
    index.check()
    assert index.statistics().nodes // shape.families >= nodes
    for path in shape.queries(20, seed=3):
        segments = index_cost.look_up(index, path)[-1]
        assert segments[0][1] == QUERY_PAGES * PAGE_TOKENS
        assert len(segments) == masks


def test_chains_are_covered_by_one_to_three_versions() -> None:
    shape = shapes(0.5)[1]
    families = range(0, shape.families, 50)
    homes = [shape.query(number).home.version for number in families]
    assert [homes.count(version) for version in (2, 1, 0)] == [12, 5, 3]
    index = shape.empty_index()
    shape.fill(index, families)
    lookups = [len(index_cost.look_up(index, shape.query(number))) for number in families]
    assert [lookups.count(count) for count in (1, 2, 3)] == [12, 5, 3]
