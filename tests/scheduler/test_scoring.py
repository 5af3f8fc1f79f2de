"""Score terms: each in [0,1] and finite whatever the facts, so that the order is total."""

from __future__ import annotations

import math
from functools import cmp_to_key
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rolloutd.scheduler.scoring import (
    TERMS,
    EntryTerms,
    Facts,
    Term,
    Weights,
    clamp,
    diversity,
    engine_score,
    engine_total,
    entry_score,
    static_key,
)
from rolloutd.scheduler.states import RolloutClass

COUNTS = st.integers(0, 1 << 40)
SIZES = st.floats(0.0, 1e12) | st.sampled_from([0.0, 5e-324, 1.0])
SHARES = st.floats(0.0, 1.0) | st.sampled_from([0.0, 5e-324, 1.0])
WEIGHTS = st.fixed_dictionaries({term.weight: st.floats(0.0, 1e6) | st.just(0.0) for term in TERMS})


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    facts = Facts()
    facts.rollout_class = draw(st.sampled_from(list(RolloutClass)))
    facts.prompt_tokens = draw(COUNTS)
    facts.hit_tokens = draw(COUNTS)
    facts.common_tokens = draw(COUNTS)
    facts.longest_tokens = draw(COUNTS)
    facts.siblings = draw(st.integers(0, 64))
    facts.expected_tokens = draw(SIZES)
    facts.worst_tokens = draw(SIZES)
    facts.expected_seconds = draw(SIZES)
    facts.waited_seconds = draw(SIZES)
    facts.aging_seconds = draw(SIZES)
    facts.slack_seconds = draw(st.none() | st.floats(-1e12, 1e12))
    facts.steps_away = draw(st.none() | st.integers(-(1 << 40), 1 << 40))
    facts.stratum_share = draw(SHARES)
    facts.target_share = draw(SHARES)
    facts.dearness = draw(SHARES)
    facts.slots_fill = draw(st.floats(0.0, 2.0))
    facts.kv_fill = draw(st.floats(0.0, 2.0))
    return facts


def idle() -> Facts:
    """One idle engine, an empty prompt, age 0: everything that a max could be divided by is 0."""
    facts = Facts()
    facts.expected_tokens = facts.worst_tokens = facts.aging_seconds = 0.0
    return facts


def score(facts: Facts, weights: dict[str, float]) -> float:
    return sum(term.sign * weights[term.weight] * clamp(term.score(facts)) for term in TERMS)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
@given(facts=any_facts())
@example(facts=idle())
def test_a_term_is_finite_and_in_0_to_1_whatever_the_facts(term: Term, facts: Facts) -> None:
    raw = term.score(facts)
    assert math.isfinite(raw), f"{term.name}: {raw}"
    assert 0.0 <= clamp(raw) <= 1.0


@given(facts=any_facts(), by_name=WEIGHTS)
def test_the_score_that_is_spelled_out_is_the_sum_of_all_terms(facts: Facts, by_name: dict[str, float]) -> None:
    """Weights are named as in `TERMS`; a term that is missing, or counted on the wrong side, shows."""
    for per_engine, spelled_out in ((False, entry_score), (True, engine_score)):
        of_side = [term for term in TERMS if term.per_engine is per_engine]
        expected = sum(term.sign * by_name[term.weight] * clamp(term.score(facts)) for term in of_side)
        assert spelled_out(facts, Weights(**by_name)) == pytest.approx(expected, abs=1e-9)


@given(
    facts=any_facts(),
    by_name=WEIGHTS,
    now=st.floats(0.0, 1e9),
    deadline_at=st.none() | st.floats(0.0, 1e9),
    token_seconds=st.floats(0.0, 10.0),
)
def test_from_plain_numbers_the_score_is_the_same(
    facts: Facts, by_name: dict[str, float], now: float, deadline_at: float | None, token_seconds: float
) -> None:
    """What `choosing` adds up for many entries is what a decision about one of them tells."""
    weights = Weights(**by_name)
    queued_at = now - facts.waited_seconds
    facts.waited_seconds = now - queued_at
    facts.slack_seconds = None if deadline_at is None else deadline_at - now - facts.expected_tokens * token_seconds
    terms = EntryTerms(weights, facts.rollout_class, now, facts.aging_seconds, token_seconds)
    diverse = weights.diversity * clamp(diversity.score(facts))
    plain = terms.score(queued_at, deadline_at, facts.expected_tokens, facts.worst_tokens, facts.steps_away, diverse)
    assert plain == pytest.approx(entry_score(facts, weights), abs=1e-9, rel=1e-9)
    uncommon = facts.hit_tokens - facts.common_tokens
    missing = facts.longest_tokens - facts.hit_tokens
    total = engine_total(
        weights,
        uncommon,
        missing,
        facts.prompt_tokens,
        facts.dearness,
        facts.slots_fill,
        facts.kv_fill,
        facts.siblings,
    )
    assert total == pytest.approx(engine_score(facts, weights), abs=1e-9, rel=1e-9)


@given(facts=st.lists(any_facts(), min_size=1, max_size=8), weights=WEIGHTS)
def test_the_order_of_scores_is_total(facts: list[Facts], weights: dict[str, float]) -> None:
    scores = [score(one, weights) for one in facts]
    assert all(math.isfinite(one) for one in scores)

    def compare(a: float, b: float) -> int:
        assert (a < b) + (a == b) + (a > b) == 1
        return (a > b) - (a < b)

    assert sorted(scores, key=cmp_to_key(compare)) == sorted(scores)


@given(facts=any_facts(), queued_at=st.floats(0.0, 1e9), deadline_at=st.none() | st.floats(0.0, 1e9), by_name=WEIGHTS)
def test_the_static_key_is_finite(facts: Facts, queued_at: float, deadline_at: float | None, by_name: Any) -> None:
    facts.aging_seconds = max(facts.aging_seconds, 1e-3)  # a setting, and checked as one
    assert math.isfinite(static_key(facts, queued_at, deadline_at, Weights(**by_name)))


@pytest.mark.parametrize(
    ("raw", "clamped"), [(-0.5, 0.0), (0.0, 0.0), (0.4, 0.4), (1.0, 1.0), (7.0, 1.0), (math.nan, 0.0)]
)
def test_what_a_term_gets_wrong_is_clamped(raw: float, clamped: float) -> None:
    assert clamp(raw) == clamped


# what each term says


def facts_of(**fields: Any) -> Facts:
    facts = Facts()
    for name, value in fields.items():
        setattr(facts, name, value)
    return facts


def term(name: str) -> Term:
    return next(one for one in TERMS if one.name == name)


def test_names_are_unique_and_costs_count_against() -> None:
    assert len({one.name for one in TERMS}) == len(TERMS)
    assert [one.name for one in TERMS if one.sign < 0] == ["duplicate", "cost", "crowding"]


def test_prefix_credit_is_marginal_and_worth_what_computing_costs() -> None:
    prefix = term("prefix").score
    assert prefix(facts_of(prompt_tokens=100, hit_tokens=80)) == pytest.approx(0.8)
    assert prefix(facts_of(prompt_tokens=100, hit_tokens=80, common_tokens=80)) == 0.0
    assert prefix(facts_of(prompt_tokens=100, hit_tokens=80, dearness=0.5)) == pytest.approx(0.4)


def test_computing_again_what_another_engine_has_costs_what_is_missing_here() -> None:
    duplicate = term("duplicate").score
    assert duplicate(facts_of(prompt_tokens=100, longest_tokens=80)) == pytest.approx(0.8)
    assert duplicate(facts_of(prompt_tokens=100, longest_tokens=80, hit_tokens=60, dearness=0.5)) == pytest.approx(0.1)
    assert duplicate(facts_of(prompt_tokens=100, longest_tokens=80, hit_tokens=80)) == 0.0
    assert duplicate(facts_of(prompt_tokens=100)) == 0.0


def test_siblings_crowd_an_engine_where_their_prompt_is_cheap() -> None:
    crowding = term("crowding").score
    assert crowding(facts_of(siblings=1, dearness=0.05)) == pytest.approx(0.25)
    assert crowding(facts_of(siblings=1, dearness=0.5)) == 0.0
    assert crowding(facts_of(dearness=0.05)) == 0.0


def test_urgency_grows_as_slack_shrinks() -> None:
    urgency = term("urgency").score
    slacks = [urgency(facts_of(slack_seconds=slack)) for slack in (1000.0, 60.0, 30.0, 0.0, -10.0)]
    assert slacks == sorted(slacks) and (slacks[0], slacks[-1]) == (0.0, 1.0)


def test_work_that_a_nearer_step_needs_is_more_urgent_than_work_nobody_waits_for() -> None:
    urgency = term("urgency").score
    near, far, never = (
        urgency(facts_of(rollout_class=RolloutClass.REUSABLE, steps_away=steps)) for steps in (1, 5, None)
    )
    assert near > far > never == 0.0


def test_waiting_grows_linearly_to_one() -> None:
    waiting = term("waiting").score
    assert [waiting(facts_of(waited_seconds=w, aging_seconds=60.0)) for w in (0.0, 30.0, 60.0, 600.0)] == [
        0.0,
        0.5,
        1.0,
        1.0,
    ]


def test_diversity_favours_strata_below_their_target() -> None:
    diversity = term("diversity").score
    assert diversity(facts_of(target_share=0.5, stratum_share=0.1)) == pytest.approx(0.8)
    assert diversity(facts_of(target_share=0.5, stratum_share=0.7)) == 0.0
    assert diversity(facts_of(target_share=0.0, stratum_share=0.0)) == 0.0


def test_cost_is_the_fuller_of_slots_and_memory() -> None:
    cost = term("cost").score
    assert cost(facts_of(slots_fill=0.3, kv_fill=0.6)) == 0.6 and cost(facts_of(slots_fill=0.9, kv_fill=0.6)) == 0.9
