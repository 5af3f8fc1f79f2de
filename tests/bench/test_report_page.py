"""The report: what it reads, what it calls met, lost and missing, and that a page with plots comes of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from rolloutd.bench import report_page
from rolloutd.bench.arms import ARMS
from rolloutd.bench.figures import Figures
from rolloutd.bench.paired import differences, ratios, summary
from rolloutd.bench.peers_report import json_line as peers_line
from rolloutd.bench.peers_report import verdicts
from rolloutd.bench.quality import WORKLOADS
from rolloutd.bench.quality_report import json_line
from rolloutd.bench.report_bars import Bar, bars
from rolloutd.bench.report_comparisons import comparisons, losses
from rolloutd.bench.report_inputs import LINES, OBJECTS, Inputs, figure_lines, read_inputs, session_ratios
from rolloutd.bench.report_plots import Dot, Panel, draw


def line(arm: str, workload: str = "Q1", seed: int = 0, epoch: int = 0, **figures: float) -> Figures:
    return replace(Figures(arm, workload, seed, epoch), **figures)  # type: ignore[arg-type]


def q1(arm: str, values: list[float]) -> list[Figures]:
    return [line(arm, seed=seed, makespan_over_bound=value) for seed, value in enumerate(values)]


def bar(found: list[Bar], what: str) -> Bar:
    (one,) = [each for each in found if what in each.what]
    return one


def test_a_pair_is_of_one_seed_and_one_seed_proves_nothing() -> None:
    paired = differences({0: 3.0, 1: 5.0, 2: 7.0, 9: 100.0}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert paired is not None and paired.values == (1.0, 2.0, 3.0) and paired.mean == 2.0 and paired.deviation == 1.0
    assert paired.error == pytest.approx(1 / 3**0.5)
    assert not paired.sure(), "of three seeds 95 % lie within 4.3 standard errors, which are 2.5 here"
    more = summary([1.0, 2.0, 3.0] * 3)
    assert more is not None and more.sure() and not more.sure(none=1.7)
    alone = ratios({0: 3.0}, {0: 2.0})
    assert alone is not None and alone.mean == 1.5 and alone.error is None and not alone.sure(1.0)
    assert differences({0: 1.0}, {1: 1.0}) is None and summary([]) is None
    same = summary([0.0, 0.0, 0.0])
    assert same is not None and not same.sure()


def test_losses_are_named_and_the_oracle_is_none() -> None:
    lines = [
        *q1("rolloutd", [1.2, 1.2, 1.21]),
        *q1("fifo", [1.3, 1.31, 1.3]),
        *q1("sticky", [1.1, 1.11, 1.1]),
        *q1("prefix", [1.1, 1.4, 1.2]),
        *q1("oracle", [1.0, 1.0, 1.0]),
    ]
    found = {one.arm: one.verdict for one in comparisons(lines)}
    assert found == {"fifo": "wins", "sticky": "LOSES", "prefix": "ahead, within the spread", "oracle": "LOSES"}
    assert [one.arm for one in losses(comparisons(lines))] == ["sticky"]
    few = comparisons([one for one in lines if one.seed == 0])
    assert {one.verdict for one in few} == {"ahead, too few seeds to say", "behind, too few seeds to say"}
    hits = [line("rolloutd", "Q2", prefix_hit=0.5), line("prefix", "Q2", prefix_hit=0.6)]
    assert comparisons(hits)[0].gain == pytest.approx(-1 / 6), "of hits more is better"
    wire = comparisons([*q1("rolloutd", [1.2]), *q1("smg:cache_aware", [1.19])], draw=0.05)
    assert wire[0].verdict == "draws"


def test_bars_are_met_by_their_figures_alone() -> None:
    loop = [
        line("rolloutd", "Q5", idle_ratio=0.5, makespan_seconds=1000.0, idle_ratio_least=0.4, bound_seconds=900.0),
        line("fifo", "Q5", idle_ratio=0.6, makespan_seconds=1250.0),
        line("prefix", "Q5", idle_ratio=0.8, makespan_seconds=2500.0),
    ]
    quality = [
        *q1("rolloutd", [9.0, 1.15]),
        *q1("fifo", [9.4, 1.30]),
        *q1("oracle", [9.0, 1.05]),
        line("rolloutd", "Q4", session_mean_seconds=10.0, prefix_hit=0.9, prefix_hit_ceiling=1.0),
        line("sticky", "Q4", session_mean_seconds=14.0),
    ]
    core = {"core": "compiled core", "us_per_dispatch_1": 80.0, "us_per_dispatch_16": 50.1}
    overhead = {
        "cpu_s_per_1000": {"2048": 0.4},
        "router_cpu_s_per_1000": {"2048": 0.7},
        "added_p50_ms": 1.4,
        "router_added_p50_ms": 1.3,
    }
    inputs = Inputs({"quality": quality, "loop": loop}, {"core": core, "overhead": overhead}, {("Q4", 0, "smg"): 0.8})
    found = bars(inputs)
    assert bar(found, "Q1 cold: makespan / bound, seed 1").value == 1.15
    assert bar(found, "Q1 cold: share of the gap").value == pytest.approx((1.0 + 0.6) / 2)
    idle = bar(found, "Q5: trainer idle time")
    assert idle.value == pytest.approx(500 / 750) and idle.met
    assert idle.note == "1 seed, no schedule is under 0.480", "0.4 x 900 s over fifo's 750 s"
    sessions = bar(found, "mean session")
    assert sessions.value == pytest.approx(1.25) and sessions.met is False, "smg is better than sticky here"
    assert sessions.note.startswith("against smg;")
    assert bar(found, "Q4 cold: prefix hit").met is False
    assert [bar(found, f"{free} freed").met for free in ("1 slot", "16 slots")] == [True, False]
    assert bar(found, "CPU / sglang-router's, 2,048").value == pytest.approx(0.4 / 0.7)
    latency = bar(found, "added latency p50")
    assert latency.limit == 1.3 and latency.met is False, "at most the router's, whatever the other limit"
    small = {
        "rollouts": {"64": 6_400, "128": 12_800},
        "us_per_rollout": {"64": 90.0, "128": 91.0},
        "decision_ratio": 1.1,
    }
    assert [one.value for one in bars(Inputs(objects={"scale": small})) if one.source == "scale"] == [None, None]
    large = {"rollouts": {"64": 6_400, "1000": 100_000}, "us_per_rollout": {"1000": 101.0}, "decision_ratio": 1.1}
    assert [one.met for one in bars(Inputs(objects={"scale": large})) if one.source == "scale"] == [False, True]
    unmeasured = bar(found, "Q3 cold: reward latency")
    assert unmeasured.value is None and unmeasured.met is None


def test_every_bar_without_inputs_is_unmeasured_and_names_a_benchmark() -> None:
    found = bars(Inputs())
    assert len(found) > 40 and all(one.value is None and one.met is None for one in found)
    assert {one.source for one in found} <= {*LINES, *OBJECTS}


def test_inputs_that_broke_off_or_are_of_another_version_are_missing(tmp_path: Path) -> None:
    good = json_line(q1("rolloutd", [1.1])[0])
    (tmp_path / "quality.txt").write_text(f"a table\n{good}\n", encoding="utf-8")
    (tmp_path / "loop.txt").write_text("a table\n", encoding="utf-8")
    (tmp_path / "peers.txt").write_text(good[:-1] + ', "flavour": 1}\n', encoding="utf-8")
    (tmp_path / "core.txt").write_text("Traceback\n", encoding="utf-8")
    (tmp_path / "publish.txt").write_text('{"expire_ms": 1.5}\n', encoding="utf-8")
    (tmp_path / "scale.txt").write_text('{"decision_ratio": 1.5}\n', encoding="utf-8")
    older = {"window": 256, "seeds": 3, "rounding_points": 0.5, "in_order_of_mix_points": {"alike": 4.0}}
    older |= dict.fromkeys(("mean_points", "worst_points", "dispatched_points"), {"alike": {"default": 16.5}})
    (tmp_path / "mix.txt").write_text(json.dumps(older) + "\n", encoding="utf-8")
    (tmp_path / "ablation.txt").write_text('{"seeds": 3, "rows": [], "without_switch": {}}\n', encoding="utf-8")
    inputs = read_inputs(tmp_path)
    assert inputs.of("quality") == q1("rolloutd", [1.1]) and inputs.objects == {"publish": {"expire_ms": 1.5}}
    assert set(inputs.made) == {"quality", "publish"}
    assert "another version (without rollouts, " in inputs.missing["scale"]
    assert "did not come to its end" in inputs.missing["loop"] and "did not come to its end" in inputs.missing["core"]
    assert "another version (flavour)" in inputs.missing["peers"] and inputs.missing["leaks"] == "has not run here"
    assert (
        "(without makespan_seconds, " in inputs.missing["mix"] and "(without variants, " in inputs.missing["ablation"]
    )
    with pytest.raises(ValueError, match="in the middle of a line"):
        figure_lines(good[:40])


def test_arms_and_workloads_that_did_not_run_are_named_and_what_ran_is_no_gap(tmp_path: Path) -> None:
    def written(*left_out: tuple[str, str]) -> Inputs:
        lines = [
            line(arm, workload, makespan_over_bound=1.1)
            for workload in WORKLOADS
            for arm in ("rolloutd", *ARMS)
            if (arm, workload) not in left_out
        ]
        (tmp_path / "quality.txt").write_text("\n".join(map(json_line, lines)) + "\n", encoding="utf-8")
        return read_inputs(tmp_path)

    assert "quality" not in written().missing
    found = written(*(("prefix", workload) for workload in WORKLOADS), ("oracle", "Q3"))
    assert found.missing["quality"] == "has not run prefix; oracle on Q3" and found.of("quality")


def test_sessions_on_the_wire_are_read_from_the_sentences_that_bench_peers_prints(tmp_path: Path) -> None:
    lines = [
        line(arm, "Q4", seed, session_mean_seconds=value + seed, prefix_hit=0.5, makespan_over_bound=2.0)
        for seed in (0, 1)
        for arm, value in (("rolloutd", 60.0), ("smg:cache_aware", 80.0), ("sglang-router:manual", 50.0))
    ]
    sentences = verdicts(lines)
    with (tmp_path / "out").open("w+", encoding="utf-8") as out:
        console = Console(file=out, width=40)  # so that every sentence is broken into lines
        for sentence in sentences:
            console.print(sentence, markup=False)
        out.seek(0)
        text = out.read() + peers_line(lines[0])
    found = session_ratios(text)
    assert found[("Q4", 0, "smg")] == pytest.approx((60 / 80 + 61 / 81) / 2, abs=1e-3)
    assert found[("Q4", 0, "sglang-router")] == pytest.approx((60 / 50 + 61 / 51) / 2, abs=1e-3)


def test_a_page_says_what_is_missing_lost_and_not_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, page = tmp_path / "bench", tmp_path / "docs" / "report.md"
    assert report_page.main(["--inputs", str(inputs), "--page", str(page)]) == 1
    assert "no benchmark has been run here" in capsys.readouterr().err and not page.exists()
    inputs.mkdir()
    lines = [*q1("rolloutd", [1.4, 1.41, 1.4]), *q1("sticky", [1.1, 1.11, 1.12]), *q1("oracle", [1.0, 1.0, 1.0])]
    (inputs / "quality.txt").write_text("\n".join(json_line(one) for one in lines) + "\n", encoding="utf-8")
    rows = [
        {
            "mechanism": "moves", "workload": "Q3 settled", "epoch": 0, "figure": "critical_over_bound",
            "on": 1.2, "worse": 0.1, "deviation": 0.01, "values": [0.1, 0.11, 0.09], "verdict": "not read",
        }
    ]  # fmt: skip
    ablation = {
        "core": "compiled core", "seeds": 3, "rows": rows, "variants": {"settled": "in the STABLE phase"},
        "measured_elsewhere": {"diversity": "`make bench-mix`"},
    }  # fmt: skip
    (inputs / "ablation.txt").write_text(json.dumps(ablation), encoding="utf-8")
    points = {"alike": {"held": 0.5, "default": 3.0}}
    mix = {"window": 256, "seeds": 1, "rounding_points": 0.4, "in_order_of_mix_points": {"alike": 1.5}}
    mix |= dict.fromkeys(("mean_points", "worst_points", "dispatched_points"), points)
    mix |= dict.fromkeys(("makespan_seconds", "samples_per_second", "held_seconds"), points)
    (inputs / "mix.txt").write_text(json.dumps(mix), encoding="utf-8")
    stale = tmp_path / "docs" / "figures" / "report-wire.png"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier run", encoding="utf-8")
    assert report_page.main(["--inputs", str(inputs), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "- Q1 cold: makespan / bound, seed 1: 1.41 (bar at most 1.16)" in text
    assert "- Q1 cold, makespan / bound: sticky 1.2" in text and "oracle 1" not in text
    assert "Compared with sticky (`make bench-quality`)." in text
    assert (
        "- quality has not run rolloutd on Q1s, Q2, Q3, Q4; fifo; round-robin; least-in-flight; sticky on Q1s, Q2, Q3, Q4; prefix; "
        "cache-aware; oracle on Q1s, Q2, Q3, Q4: `make bench-quality`" in text
    )
    assert "- settled: in the STABLE phase" in text and "- diversity: `make bench-mix`" in text
    assert "- core has not run here: `make bench-core`" in text
    assert "had 3 of the 10 seeds" in text
    assert "by 1.50 (alike lengths): more than the bar" in text and "| alike | default | 3.00 " in text
    assert "| moves | Q3 settled | critical / its bound | 1.200 | +0.100 ± 0.010 | **helps** |" in text
    shown = {path.name for path in stale.parent.iterdir()}
    assert shown == {"report-steps.png", "report-pairs.png", "report-ablation.png"}
    assert all(f"figures/{name}" in text for name in shown)
    first = {name: (stale.parent / name).read_bytes() for name in shown}
    assert report_page.main(["--inputs", str(inputs), "--page", str(page)]) == 0
    assert {name: (stale.parent / name).read_bytes() for name in shown} == first, "the same figures, the same files"


def test_a_plot_without_figures_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert not draw([Panel("empty", [])], ["a"], "nothing", path) and not path.exists()
    panel = Panel("x", [Dot("a", 1.0), Dot("a", 9.0, 1), Dot("b", 2.0)], 1.0, "bound")
    assert draw([panel, Panel("empty", [])], ["a", "b", "c"], "title", path, bold="a")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 100_000


def test_the_peers_keys_are_read_as_figures() -> None:
    wire = line("smg:round_robin", "Q3", critical_over_bound=1.2)
    (read,) = figure_lines(peers_line(wire))
    assert asdict(read) == asdict(wire)
