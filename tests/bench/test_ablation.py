"""Ablations: switches that switch, differences with the right sign, one run per mechanism on the same seeds."""

from __future__ import annotations

import json

import pytest

from rolloutd.bench import ablation
from rolloutd.bench.ablation import rows
from rolloutd.bench.ablation_mechanisms import MEASURED_ELSEWHERE, MECHANISMS, VARIANTS, settled
from rolloutd.bench.figures import NAMES, Figures
from rolloutd.bench.quality_report import HEADINGS
from rolloutd.bench.scenarios import SCENARIOS
from rolloutd.bench.training_loop import LOOPS
from rolloutd.scheduler.config import SchedulerConfig


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_a_mechanism_changes_what_is_served_and_shows_in_known_figures(mechanism: ablation.Mechanism) -> None:
    """Also where its workload's settings are not the default ones, which must have it on."""
    for workload, figures in mechanism.shows_in.items():
        plan = ablation._plan(workload, warm=False, steps=3)
        off = mechanism.without(plan)
        assert off != plan and mechanism.without(off) == off
        name, *words = workload.split(" ")
        assert name in SCENARIOS or (name in LOOPS and not words), "a loop goes by its name"
        assert set(words) <= VARIANTS.keys()
        assert figures and set(figures) <= set(NAMES) & set(HEADINGS)


def test_names_are_told_apart() -> None:
    names = [*(one.name for one in MECHANISMS), *MEASURED_ELSEWHERE]
    assert len(set(names)) == len(names)


def test_variants_are_what_they_say() -> None:
    assert settled(SchedulerConfig()).policy.cold_start_steps == 0
    as_it_is, tight, both, floors, warm = (
        ablation._plan(name, name == "Q4", 3) for name in ("Q3", "Q4 tight", "Q4 tight agentic", "Q3 floors", "Q4")
    )
    assert as_it_is.config == SchedulerConfig() and (as_it_is.name, as_it_is.epochs, warm.epochs) == ("Q3", 1, 2)
    assert {one.kv_tokens for one in tight.pool.machines} == {60_000} and tight.config == SchedulerConfig()
    assert both.pool == tight.pool and both.name == "Q4 tight agentic"
    assert {"memory-full", "cache-missed"} <= {rule.name for rule in both.config.rules}
    assert [quota.floor_rollouts for quota in floors.config.budget.default.classes.values()] == [16, 8]


def test_a_rule_and_a_trainers_word_are_switches_too() -> None:
    memory, step = (one for one in MECHANISMS if one.name in ("rule memory-full", "speculation promoted by step"))
    plan = ablation._plan("Q4 tight agentic", warm=False, steps=3)
    left = {rule.name for rule in memory.without(plan).config.rules}
    assert left == {rule.name for rule in plan.config.rules} - {"memory-full"}
    loop = ablation._plan("Q5-off", warm=False, steps=3)
    assert loop.says_steps and not step.without(loop).says_steps and step.without(loop).config == loop.config


def test_worse_is_positive_also_where_more_is_better() -> None:
    (prefix,) = [one for one in MECHANISMS if one.name == "prefix reuse"]

    def line(seed: int, makespan: float, hit: float) -> Figures:
        return Figures("rolloutd", "Q2", seed, 0, makespan_over_bound=makespan, prefix_hit=hit)

    on = [line(0, 1.0, 0.9), line(1, 1.2, 0.8), line(2, 1.1, 0.85)]
    off = [line(0, 1.5, 0.5), line(1, 1.6, 0.5), line(2, 1.6, 0.45)]
    by_figure = {row.figure: row for row in rows(prefix, "Q2", on, off)}
    assert by_figure["makespan_over_bound"].worse.mean == pytest.approx(1.4 / 3)
    assert by_figure["prefix_hit"].worse.mean == pytest.approx(1.1 / 3)
    assert {row.verdict for row in by_figure.values()} == {"helps"}
    assert {row.verdict for row in rows(prefix, "Q2", off, on)} == {"HARMS"}
    assert {row.verdict for row in rows(prefix, "Q2", on, on)} == {"no effect"}
    assert {row.verdict for row in rows(prefix, "Q2", on[:1], off[:1])} == {"not sure"}


def test_the_command_runs_on_and_off_and_ends_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, str]] = []

    def simulate(plan: ablation.Plan, arm: str, seed: int, note: object) -> list[Figures]:
        hold = plan.config.queue.max_defer_seconds
        seen.append((seed, plan.config.policy.cold_start_steps, plan.name))
        return [Figures(arm, plan.name, seed, 0, reusable_over_bound=0.5 if hold else 0.7 + 0.01 * seed)]

    monkeypatch.setattr(ablation, "simulate", simulate)
    assert ablation.main(["--mechanisms", "hold for prefix", "--seeds", "3", "--first", "5"]) == 0
    assert [seed for seed, _, _ in seen] == [5, 5, 6, 6, 7, 7]
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["measured_elsewhere"] == MEASURED_ELSEWHERE and set(found["variants"]) == set(VARIANTS)
    assert all(name in out and how in out for name, how in MEASURED_ELSEWHERE.items())
    (row,) = found["rows"]
    assert row["mechanism"] == "hold for prefix" and row["values"] == [0.25, 0.26, 0.27] and row["verdict"] == "helps"
    assert ablation.main(["--mechanisms", "quiet tail", "--seeds", "1"]) == 0
    assert seen[-1][1:] == (0, "Q3 settled"), "in the phase where it does something"
    with pytest.raises(SystemExit):
        ablation.main(["--mechanisms", "quiet tail", "--workloads", "Q1"])
    assert "Q3 settled" in capsys.readouterr().err
