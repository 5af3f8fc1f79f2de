"""Rules in the scheduler: what each action does to the work of a run, what is told of it, and that it all ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rolloutd.scheduler.actions import Abort, Decided
from rolloutd.scheduler.config import PolicySettings, PreemptSettings, SchedulerConfig, WeightDefaults
from rolloutd.scheduler.events import ConfigureRun, EndRun, Reconfigure, Tick
from rolloutd.scheduler.queueing import weights_of
from rolloutd.scheduler.reordering import SLICE_ENTRIES
from rolloutd.scheduler.rules.rule import Effects, Rule
from rolloutd.scheduler.spec import Budget, Quota, RunSettings, Weights
from rolloutd.scheduler.states import AbortReason, Gate, OnPreempt, RolloutState, TrainerState
from rolloutd.scheduler.views import DecisionKind
from tests.scheduler.kit import BACKGROUND, CRITICAL, REUSABLE, RUN, Bench, config, engine, spec, specs

PERIOD_SECONDS = 10.0
SLOTS = 8


def rule(name: str = "buffer-low", **fields: Any) -> Rule:
    whole: dict[str, Any] = {"metric": "buffer_fill", "above": False, "threshold": 0.3, "end_threshold": 0.7, **fields}
    return Rule(name, **whole)


def with_rules(*rules: Rule, **sections: Any) -> SchedulerConfig:
    return replace(config(**sections), rules=rules)


def period(bench: Bench, buffer_fill: float | None = None, step: int = 1, **fields: Any) -> None:
    """The trainer reports, and a period goes by."""
    bench.step(step, TrainerState.TRAINING, buffer_fill=buffer_fill, **fields)
    bench.pass_time(PERIOD_SECONDS)


def active(bench: Bench) -> set[str]:
    return {one.name for one in bench.run_view().rules if one.active}


def running(bench: Bench, prefix: str) -> int:
    return sum(name.startswith(prefix) for name in bench.live)


def weight(bench: Bench, name: str) -> float:
    return float(getattr(weights_of(bench.core._world, bench.its_run()), name))


def test_a_rule_fires_ends_and_each_is_a_decision_an_action_and_a_line_of_the_log() -> None:
    bench = Bench(engine(), settings=with_rules(rule(effects=Effects(engines_factor=2.0))))
    period(bench, 0.5)
    assert active(bench) == set()
    period(bench, 0.1)
    assert active(bench) == {"buffer-low"}
    period(bench, 0.5)
    assert active(bench) == {"buffer-low"}
    period(bench, 0.8)
    assert active(bench) == set()
    decisions = bench.run_view().rule_decisions
    assert [one.kind for one in decisions] == [DecisionKind.RULE_FIRED, DecisionKind.RULE_ENDED]
    assert [one.message for one in decisions] == [
        "rule 'buffer-low' fired: buffer_fill is 0.1, below 0.3",
        "rule 'buffer-low' ended: buffer_fill is 0.8, above 0.7",
    ]
    assert [one.decision for one in bench.said if isinstance(one, Decided)] == list(decisions)
    assert all(one.run_id == RUN and not one.rollout_id for one in decisions)
    assert len(bench.records("rule_fired")) == len(bench.records("rule_ended")) == 1
    (view,) = bench.run_view().rules
    assert (view.firings, view.value) == (1, 0.8)


def test_rules_look_once_a_period_and_not_at_all_without_rules() -> None:
    bench = Bench(engine(), settings=with_rules(rule(effects=Effects(cap_factor=0.5), for_periods=2)))
    bench.step(1, TrainerState.TRAINING, buffer_fill=0.0)
    bench.pass_time(19.0)
    assert active(bench) == set()
    bench.pass_time(1.0)
    assert active(bench) == {"buffer-low"}
    assert Bench(engine()).core._world.rules_timer is None


# shares


def contended(bench: Bench) -> None:
    """Long background holds what it may get; reusable work waits beside it."""
    bench.submit(*specs("b", 3 * SLOTS, BACKGROUND), *specs("u", 3 * SLOTS, REUSABLE))


def test_beside_a_class_that_is_raised_the_others_keep_to_their_part_of_the_slots() -> None:
    raised = rule(effects=Effects(share_factors={REUSABLE: 2.0}))
    bench = Bench(engine(slots=SLOTS), settings=with_rules(raised))
    period(bench, 0.1)
    bench.run(*specs("b", 3 * SLOTS, BACKGROUND))
    assert running(bench, "b") == SLOTS, "there is no work of a raised class: background may have it all"
    bench = Bench(engine(slots=SLOTS), settings=with_rules(raised))
    period(bench, 0.1)
    bench.run(spec("u0", rollout_class=REUSABLE))
    bench.run(*specs("b", 3 * SLOTS, BACKGROUND))
    assert running(bench, "b") == SLOTS // 2, "the next of the raised class finds room at once"
    assert bench.gates()[Gate.CLASS_SHARE]
    assert len(bench.run(*specs("more", 9, REUSABLE))) == SLOTS // 2 - 1
    bench.finish("u0")
    period(bench, 0.9)
    assert running(bench, "b") + running(bench, "more") == SLOTS, "the rule has ended"


def test_a_share_of_the_budget_is_scaled() -> None:
    raised = rule(effects=Effects(share_factors={REUSABLE: 1.5}))
    for fill, share in ((0.5, 4), (0.1, 6)):
        bench = Bench(engine(slots=SLOTS), settings=with_rules(raised))
        bench.budget(classes={REUSABLE: Quota(share=0.5)})
        period(bench, fill)
        contended(bench)
        bench.tick()
        assert (running(bench, "u"), running(bench, "b")) == (share, SLOTS - share)


# the cap


def test_a_cap_that_shrinks_starts_nothing_and_interrupts_nothing_until_work_has_ended() -> None:
    bench = Bench(engine(slots=SLOTS), settings=with_rules(rule(effects=Effects(cap_factor=0.5))))
    bench.run(*specs("c", 2 * SLOTS))
    period(bench, 0.1)
    assert running(bench, "c") == SLOTS and not bench.leaving()
    for _ in range(5):
        bench.finish(next(iter(bench.live)))
        bench.tick()
    assert running(bench, "c") == SLOTS // 2
    assert bench.gates()[Gate.CEILING_ROLLOUTS]
    period(bench, 0.9)
    bench.tick()
    assert running(bench, "c") == SLOTS


def test_caps_leave_room_for_one_and_stay_below_the_budget() -> None:
    bench = Bench(engine(slots=SLOTS), settings=with_rules(rule(effects=Effects(cap_factor=0.01))))
    period(bench, 0.1)
    bench.run(*specs("c", 3))
    assert running(bench, "c") == 1
    bench = Bench(engine(slots=SLOTS), settings=with_rules(rule(effects=Effects(cap_factor=0.5))))
    bench.budget(max_rollouts=2)
    period(bench, 0.1)
    bench.run(*specs("c", 3))
    assert running(bench, "c") == 1


# preemption

PATIENT = {"timeout_seconds": 10_000.0}  # nobody writes while minutes go by
QUEUED_LONG = rule(
    "training-queued",
    metric="training_queued_seconds",
    above=True,
    threshold=300.0,
    end_threshold=60.0,
    effects=Effects(preempt=(REUSABLE, BACKGROUND)),
)


def test_training_that_is_queued_for_five_minutes_may_preempt_lower_work() -> None:
    bench = Bench(engine(slots=2), settings=with_rules(QUEUED_LONG, executor=PATIENT, preempt={"enabled": False}))
    bench.run(spec("u", rollout_class=REUSABLE), spec("b", rollout_class=BACKGROUND))
    bench.submit(*specs("c", 2))
    bench.pass_time(295.0, step=5.0)
    assert not bench.leaving() and not active(bench)
    bench.pass_time(20.0)
    assert bench.leaving() == {"u", "b"} and active(bench) == {"training-queued"}
    assert {one.reason for one in bench.said if isinstance(one, Abort)} == {AbortReason.PREEMPT}
    bench.stop_aborted(1)
    assert {one.rollout_id for one in bench.tick()} == {"c0", "c1"}
    bench.pass_time(PERIOD_SECONDS)
    assert not active(bench), "nobody critical waits"


def test_a_rule_opens_work_of_its_own_run_only_and_not_what_must_not_be_interrupted() -> None:
    bench = Bench(engine(slots=3), settings=with_rules(QUEUED_LONG, executor=PATIENT, preempt={"enabled": False}))
    bench.submit(spec("other", rollout_class=BACKGROUND), run="other")
    bench.run(
        spec("never", rollout_class=BACKGROUND, on_preempt=OnPreempt.NEVER),
        spec("mine", rollout_class=BACKGROUND),
    )
    assert len(bench.live) == 3
    bench.submit(*specs("c", 3))
    bench.pass_time(315.0, step=5.0)  # an abort that nobody answers is given up after ten seconds
    assert bench.leaving() == {"mine"}


def test_it_lifts_the_guards_of_those_it_opens() -> None:
    guards = {"min_run_seconds": 10_000.0, "max_per_rollout": 0}
    bench = Bench(engine(slots=1), settings=with_rules(QUEUED_LONG, executor=PATIENT, preempt=guards))
    bench.run(spec("b", rollout_class=BACKGROUND))
    bench.submit(spec("c"))
    bench.pass_time(315.0, step=5.0)  # an abort that nobody answers is given up after ten seconds
    assert bench.leaving() == {"b"}


# weights and engines


def test_weights_are_turned_and_go_back() -> None:
    turned = Effects(weights={"prefix": 0.9}, weight_factors={"waiting": 3.0})
    bench = Bench(engine(), settings=with_rules(rule(effects=turned)))
    before = weight(bench, "prefix"), weight(bench, "waiting")
    period(bench, 0.1)
    assert (weight(bench, "prefix"), weight(bench, "waiting")) == (0.9, pytest.approx(3.0 * before[1]))
    period(bench, 0.9)
    assert (weight(bench, "prefix"), weight(bench, "waiting")) == before


def test_the_queue_is_ordered_by_the_weights_in_force() -> None:
    """Without urgency the oldest goes first, with it the one whose deadline is near."""
    calm = rule(effects=Effects(weights={"critical": 0.0}))
    for fill, first in ((0.1, "old"), (0.5, "hurry")):
        bench = Bench(engine(slots=1), settings=with_rules(calm, queue={"aging_seconds": 3600.0}))
        bench.run(spec("runs"))
        bench.submit(spec("old", deadline_seconds=5_000.0))
        bench.now += 5.0
        bench.submit(spec("hurry", deadline_seconds=45.0))
        period(bench, fill)
        bench.finish("runs")
        assert [one.rollout_id for one in bench.tick()] == [first]


def test_a_long_queue_is_put_in_order_a_slice_at_a_time() -> None:
    calm = rule(effects=Effects(weights={"critical": 0.0}))
    bench = Bench(engine(slots=1), settings=with_rules(calm, queue={"aging_seconds": 3600.0}))
    bench.run(spec("runs"))
    bench.submit(*specs("q", 3 * SLICE_ENTRIES))
    bench.step(1, buffer_fill=0.1)
    bench.now += PERIOD_SECONDS
    left = []
    while bench.core.wants_tick or not left:
        bench.do(Tick())
        left.append(len(bench.core._world.reordering))
    assert left[:3] == [2 * SLICE_ENTRIES, SLICE_ENTRIES, 0]
    bench.cancel(*(f"q{number}" for number in range(3 * SLICE_ENTRIES)))
    period(bench, 0.9)
    assert not bench.core._world.reordering


def test_other_settings_of_a_run_put_its_queue_in_order_a_slice_at_a_time() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("runs"))
    bench.submit(*specs("q", 3 * SLICE_ENTRIES))
    bench.tick()
    before = {entry: entry.static_key for entry in bench.its_run().entries.values()}
    bench.configure(weights=Weights(critical=0.0))
    assert all(entry.static_key == key for entry, key in before.items())
    for changed in (SLICE_ENTRIES, 2 * SLICE_ENTRIES, 3 * SLICE_ENTRIES):
        bench.do(Tick())
        assert sum(entry.static_key != key for entry, key in before.items()) == changed


def test_desired_engines_are_scaled() -> None:
    bench = Bench(engine("e0"), engine("e1"), settings=with_rules(rule(effects=Effects(engines_factor=1.5))))
    assert bench.run_view().desired_engines == 2
    period(bench, 0.1)
    assert bench.run_view().desired_engines == 3
    period(bench, 0.9)
    assert bench.run_view().desired_engines == 2


# ends


def test_a_run_that_ends_has_no_rule_left_and_starts_fresh() -> None:
    bench = Bench(engine(), settings=with_rules(rule(effects=Effects(cap_factor=0.5))))
    bench.run(spec("c"))
    period(bench, 0.1)
    bench.do(EndRun(RUN))
    assert not active(bench)
    assert "the run has ended" in bench.run_view().rule_decisions[-1].message
    bench.pass_time(3 * PERIOD_SECONDS)
    assert not active(bench)
    bench.do(ConfigureRun(RUN, RunSettings()))
    bench.pass_time(PERIOD_SECONDS)
    assert active(bench) == {"buffer-low"}, "its buffer is still low"


def test_rules_of_one_run_leave_another_alone() -> None:
    bench = Bench(engine(), settings=with_rules(rule(effects=Effects(cap_factor=0.5))))
    bench.submit(spec("o"), run="other")
    period(bench, 0.1)
    assert active(bench) == {"buffer-low"}
    assert not any(one.active for one in bench.run_view("other").rules)


# other settings while it runs


def test_rules_come_change_and_go_while_it_runs() -> None:
    bench = Bench(engine(slots=SLOTS))
    bench.run(*specs("c", 3))
    first = rule(effects=Effects(cap_factor=0.5))
    bench.do(Reconfigure(with_rules(first)))
    period(bench, 0.1)
    assert active(bench) == {"buffer-low"}
    bench.do(Reconfigure(with_rules(first, rule("other", metric="kv_fill", effects=Effects(cap_factor=0.9)))))
    assert active(bench) == {"buffer-low"}, "it was not touched"
    bench.do(Reconfigure(with_rules(replace(first, threshold=0.2))))
    assert not active(bench)
    period(bench, 0.1)
    assert active(bench) == {"buffer-low"}
    bench.do(Reconfigure(with_rules()))
    assert bench.run_view().rules == () and bench.core._world.rules_timer is None
    assert "changed or removed" in bench.run_view().rule_decisions[-1].message


def test_a_period_that_changes_counts_from_then_on() -> None:
    first = rule(effects=Effects(cap_factor=0.5))
    bench = Bench(engine(), settings=with_rules(first))
    bench.step(1, TrainerState.TRAINING, buffer_fill=0.0)
    bench.pass_time(5.0)
    bench.do(Reconfigure(with_rules(first, queue={"rule_period_seconds": 2.0})))
    bench.pass_time(1.9, step=0.1)
    assert not active(bench)
    bench.pass_time(0.2, step=0.1)
    assert active(bench) == {"buffer-low"}


def test_settings_hold_from_then_on_for_what_is_there() -> None:
    bench = Bench(engine(slots=SLOTS), settings=config(preempt={"enabled": False}))
    bench.run(*specs("b", SLOTS, BACKGROUND))
    bench.submit(spec("c"))
    bench.pass_time(5.0)
    assert not bench.leaving()
    bench.do(Reconfigure(config(queue={"reserved_short_slots": 0, "decision_ring": 2})))
    bench.tick()
    assert len(bench.leaving()) == 1
    assert bench.core._world.decisions.maxlen == 2
    bench.do(Reconfigure(replace(config(), policy=PolicySettings(cold_start_prefix_weight=0.77))))
    assert weight(bench, "prefix") == 0.77 and bench.its_run().phase.settings.cold_start_prefix_weight == 0.77


def test_a_new_order_holds_for_what_is_queued() -> None:
    settings = config(queue={"aging_seconds": 3600.0})
    bench = Bench(engine(slots=1), settings=settings)
    bench.run(spec("runs"))
    bench.submit(spec("old", deadline_seconds=5_000.0))
    bench.now += 5.0
    bench.submit(spec("hurry", deadline_seconds=45.0))
    bench.do(Reconfigure(replace(settings, weights=WeightDefaults(critical=0.0))))
    bench.finish("runs")
    assert [one.rollout_id for one in bench.tick()] == ["old"]


def test_runs_with_the_default_budget_follow_it_and_others_keep_theirs() -> None:
    bench = Bench(engine(slots=SLOTS))
    bench.run(*specs("c", SLOTS))
    bench.budget(run="other", max_rollouts=7)
    bench.do(Reconfigure(config(budget={"default": Budget(max_rollouts=3)})))
    assert bench.run_view().budget == Budget(max_rollouts=3) and bench.run_view().budget_is_default
    assert len(bench.leaving()) == SLOTS - 3, "the ceiling is hard"
    assert bench.run_view("other").budget.max_rollouts == 7


@pytest.mark.parametrize(
    ("section", "fields", "key"),
    [
        ("index", {"page_tokens": 32}, "index.page_tokens"),
        ("index", {"max_bytes": 1 << 20}, "index.max_bytes"),
        ("queue", {"max_strata": 3}, "scheduler.max_strata"),
        ("budget", {"headroom_tokens": 3}, "budget.headroom_tokens"),
    ],
)
def test_what_is_fixed_is_refused_by_its_key_and_nothing_changes(
    section: str, fields: dict[str, Any], key: str
) -> None:
    bench = Bench(engine())
    refusal = bench.refused(Reconfigure(config(preempt={"enabled": False}, **{section: fields})))
    assert refusal.reason == "FIXED_WHILE_RUNNING" and refusal.message.startswith(f"{key}: ")
    assert bench.core._world.config == SchedulerConfig() and bench.core._world.config.preempt == PreemptSettings()


def test_a_rule_without_a_band_is_refused_and_nothing_changes() -> None:
    bench = Bench(engine())
    refusal = bench.refused(Reconfigure(with_rules(rule(end_threshold=0.2, effects=Effects(cap_factor=0.5)))))
    assert refusal.fields[0][0] == "rules[0].until.above"
    assert bench.run_view().rules == ()


# metrics


def value_of(bench: Bench, metric: str) -> float | None:
    """Of a rule that never fires, at its last look."""
    (view,) = [one for one in bench.run_view().rules if one.metric == metric]
    return view.value


def watching(metric: str, *facts: Any, **sections: Any) -> Bench:
    never = Rule("watch", metric, True, 1e9, 1e8, Effects(engines_factor=2.0))
    return Bench(*facts, settings=with_rules(never, **sections))


def test_time_the_trainer_waits_counts_from_when_it_began() -> None:
    bench = watching("trainer_waiting_seconds", engine())
    bench.step(1, TrainerState.TRAINING)
    bench.pass_time(9.0)
    bench.step(1, TrainerState.WAITING)
    bench.pass_time(8.0)
    bench.step(1, TrainerState.WAITING)
    bench.pass_time(3.0)
    assert value_of(bench, "trainer_waiting_seconds") == pytest.approx(11.0)
    bench.step(2, TrainerState.TRAINING)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "trainer_waiting_seconds") == 0.0


def test_how_full_engines_are() -> None:
    for metric, expected in (("slots_used", 0.5), ("running_rollouts", 2.0), ("engines_ready", 1.0)):
        bench = watching(metric, engine(slots=4))
        bench.run(*specs("c", 2))
        bench.pass_time(PERIOD_SECONDS)
        assert value_of(bench, metric) == pytest.approx(expected), metric
    bench = watching("kv_fill", engine(slots=4, kv_capacity_tokens=1_024))
    bench.run(spec("c", tokens=500))
    bench.pass_time(PERIOD_SECONDS)
    claimed = bench.run_view().kv_claimed_tokens
    assert claimed and value_of(bench, "kv_fill") == pytest.approx(claimed / 1_024)


def test_what_waits_by_class() -> None:
    for rollout_class, metric in (
        (CRITICAL, "queued_critical"),
        (REUSABLE, "queued_reusable"),
        (BACKGROUND, "queued_background"),
    ):
        bench = watching(metric, engine(slots=1))
        bench.run(spec("runs"))
        bench.submit(*specs("q", 3, rollout_class))
        bench.pass_time(PERIOD_SECONDS)
        assert value_of(bench, metric) == 3.0


def test_shares_are_of_the_last_period() -> None:
    bench = watching("prefix_hit", engine(slots=4))
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "prefix_hit") is None
    bench.submit(spec("a", tokens=10), spec("b", tokens=10))
    bench.tick()
    bench.write("a", 1, cached=8)
    bench.write("b", 1)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "prefix_hit") == pytest.approx(8 / 20)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "prefix_hit") is None


def test_preemptions_per_dispatch() -> None:
    bench = watching("preemptions_per_dispatch", engine(slots=2))
    bench.run(*specs("b", 2, BACKGROUND))
    bench.now += 5.0
    bench.submit(spec("c"))
    bench.tick()
    bench.stop_aborted(1)
    bench.tick()
    assert bench.state("c") is not RolloutState.QUEUED
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "preemptions_per_dispatch") == pytest.approx(1 / 3)


def test_supply_over_demand_is_not_known_without_a_demand() -> None:
    bench = watching("supply_over_demand", engine())
    bench.step(1, TrainerState.TRAINING)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "supply_over_demand") is None
    bench.step(1, TrainerState.TRAINING, consume_tokens_per_second=100.0)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "supply_over_demand") == 0.0


def test_entropy_is_the_reported_one() -> None:
    bench = watching("policy_entropy", engine())
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "policy_entropy") is None
    bench.step(1, TrainerState.TRAINING, policy_entropy=0.4)
    bench.pass_time(PERIOD_SECONDS)
    assert value_of(bench, "policy_entropy") == 0.4
