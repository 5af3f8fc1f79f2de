"""What is expected of outputs: bounds, what finished and running siblings teach, kinds kept apart."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler.lengths import MAX_PROMPTS, LengthModel
from rolloutd.scheduler.states import TaskType
from tests.scheduler.kit import Bench, config, engine, prompt, spec

MATH = (TaskType.GENERATION, "math")
CODE = (TaskType.GENERATION, "code")
MOST = 16_384


def taught(*tokens: int, prompt: str = "p") -> LengthModel:
    model = LengthModel()
    for number, count in enumerate(tokens):
        model.note_finished(prompt, MATH, f"r{number}", count)
    return model


@given(
    st.lists(st.integers(0, 10**9), max_size=20), st.lists(st.integers(0, 10**9), max_size=20), st.integers(1, 10**6)
)
def test_estimates_are_finite_and_bounded(finished: list[int], running: list[int], most: int) -> None:
    model = taught(*finished)
    for number, tokens in enumerate(running):
        model.note_running("p", MATH, f"live{number}", tokens)
    model.refresh()
    for written in (0, 1, most - 1, most):
        assert 1.0 <= model.worst("p", MATH, most, written) <= max(1, most - written)
    for written in (0, 1, most):
        assert 1.0 <= model.expected("p", MATH, most, written) <= most


def test_finished_siblings_move_the_estimate_towards_themselves() -> None:
    unknown = LengthModel().expected("p", MATH, MOST)
    assert taught(100, 120, 90).expected("p", MATH, MOST) < unknown < taught(9000, 11000).expected("p", MATH, MOST)


def test_a_sibling_that_still_runs_counts_as_longer_than_what_it_wrote() -> None:
    """Two short ones finished first; without the third, which runs on, the prompt would look short."""
    model = taught(200, 300)
    without = model.worst("p", MATH, MOST, 0)
    assert model.note_running("p", MATH, "live", 6000)
    assert model.worst("p", MATH, MOST, 0) > 1.5 * without
    model.note_stopped("p", MATH, "live")
    assert model.worst("p", MATH, MOST, 0) == pytest.approx(without)


def test_only_news_is_news() -> None:
    model = LengthModel()
    assert model.note_running("p", MATH, "r", 100)
    assert not model.note_running("p", MATH, "r", 105)
    assert model.note_running("p", MATH, "r", 120)


@pytest.mark.parametrize("written", [0, 60, 400, 2_000])
def test_at_worst_is_exceeded_once_in_a_thousand_times_by_those_that_got_so_far(written: int) -> None:
    model = taught(100, 140, 120, 180)
    log_mean, deviation, doubt = model._predict("p", MATH, MOST)
    logs = NormalDist(log_mean, math.sqrt(deviation * deviation + doubt))

    def beyond(tokens: float) -> float:
        return 1.0 - logs.cdf(math.log(tokens)) if tokens else 1.0

    left = model.worst("p", MATH, MOST, written)
    assert beyond(written + left) / beyond(written) == pytest.approx(0.001, rel=0.01)


def test_at_worst_is_what_the_limit_leaves_for_what_is_longer_than_anything_known() -> None:
    assert taught(10, 11, 10, 9, 10, 12).worst("p", MATH, MOST, 16_000) == MOST - 16_000


def test_strata_teach_each_other_nothing() -> None:
    model = LengthModel()
    for number in range(64):
        model.note_finished(f"p{number}", CODE, "r", 100)
    model.refresh()
    assert model.expected("new", CODE, MOST) < 200
    assert model.expected("new", MATH, MOST) == LengthModel().expected("new", MATH, MOST)
    assert model.mean(TaskType.GENERATION) == 100


def test_a_kinds_prior_is_learnt_with_those_that_run() -> None:
    """Thirty short ones are back and thirty run on far beyond them: a new prompt is not expected to be short."""
    model = LengthModel()
    for number in range(30):
        model.note_finished(f"short{number}", MATH, "r", 100)
        model.note_running(f"long{number}", MATH, "r", 3000)
    model.refresh()
    assert model.expected("new", MATH, MOST) > 400


def test_memory_is_bounded_and_keeps_who_runs() -> None:
    model = LengthModel()
    model.note_running("live", MATH, "r", 5000)
    for number in range(MAX_PROMPTS + 10):
        model.note_finished(f"p{number}", MATH, "r", 10)
    assert len(model) == MAX_PROMPTS
    alone = LengthModel()
    alone.note_running("live", MATH, "r", 5000)
    assert model.worst("live", MATH, MOST, 0) == pytest.approx(alone.worst("live", MATH, MOST, 0))
    assert math.isfinite(model.expected("p1", MATH, MOST))


def test_without_learning_the_limit_and_what_it_has_written_itself_are_all_that_counts() -> None:
    model, new = taught(9_000, 11_000, 10_000), LengthModel()
    model.note_running("p", MATH, "live", 12_000)
    for number in range(64):
        model.note_finished(f"q{number}", MATH, "r", 9_000)
    model.refresh()
    model.learns = False
    for written in (0, 60, 6_000):
        assert model.outlook("p", MATH, MOST, written) == new.outlook("p", MATH, MOST, written)
    model.learns = True
    assert model.expected("p", MATH, MOST) > 2.0 * new.expected("p", MATH, MOST), "what was seen meanwhile is not lost"


@pytest.mark.parametrize(("learns", "first"), [(True, "long"), (False, "short")], ids=["learnt", "switched off"])
def test_a_prompt_whose_outputs_were_long_goes_first(learns: bool, first: str) -> None:
    """Of two that wait, with one limit; else the one that came earlier does."""
    bench = Bench(engine(slots=1), settings=config(queue={"learn_lengths": learns}))
    for number in range(4):
        for name, tokens in (("long", 2_000), ("short", 20)):
            bench.run(spec(f"{name}-{number}", token_bytes=prompt(name), max_new_tokens=2_048))
            bench.finish(f"{name}-{number}", tokens)
    bench.run(spec("busy"))
    bench.submit(spec("short", max_new_tokens=2_048))
    bench.now += 1.0
    bench.submit(spec("long", max_new_tokens=2_048))
    bench.finish("busy")
    assert [one.rollout_id for one in bench.tick()] == [first]
