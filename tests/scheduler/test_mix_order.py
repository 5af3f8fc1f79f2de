"""A stated target mix orders dispatches inside a class."""

from __future__ import annotations

from collections import Counter

import pytest

from rolloutd.scheduler.events import AttachConsumer
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import FaultKind, OnStale, Origin, Outcome, TaskType
from tests.scheduler.kit import BACKGROUND, CONSUMER, CRITICAL, RUN, Bench, config, engine, spec

TARGET = {"a": 0.6, "b": 0.3, "c": 0.1}


def waiting(strict: bool = True, slots: int = 1) -> Bench:
    """30 rollouts of each stratum wait; those of c would go first by all else: they came first and may write most."""
    bench = Bench(engine(slots=slots), settings=config(queue={"strict_mix": strict}, preempt={"time_slice_tokens": 0}))
    bench.configure(target_mix=TARGET)
    for stratum, most in (("c", 512), ("b", 64), ("a", 8)):
        bench.submit(*[spec(f"{stratum}{n}", stratum=stratum, max_new_tokens=most) for n in range(30)])
    return bench


def serve(bench: Bench, count: int) -> str:
    """Strata of the next dispatches, each finished before the next."""
    strata = ""
    for _ in range(count):
        (one,) = bench.tick(0.01)
        strata += one.rollout_id[0]
        bench.write(one.rollout_id, 1)
        bench.finish(one.rollout_id, 2)
        bench.acknowledge(one.rollout_id)
    return strata


def test_the_stratum_furthest_below_its_share_goes_first() -> None:
    strata = serve(waiting(), 40)
    for end in range(1, 41):
        counted = Counter(strata[:end])
        assert all(abs(counted[name] - end * share) <= 1.0 for name, share in TARGET.items()), (strata, end)


def test_the_switch_leaves_it_to_the_score() -> None:
    assert serve(waiting(strict=False), 10).count("c") > 2


def test_nobody_waits_for_a_stratum_that_has_nothing_queued() -> None:
    bench = waiting()
    bench.cancel(*[f"a{n}" for n in range(30)])
    assert Counter(serve(bench, 8)) == {"b": 6, "c": 2}


def test_a_stratum_without_a_share_goes_behind_those_with_one() -> None:
    bench = waiting()
    bench.submit(spec("x0", stratum="x"))
    bench.cancel(*[f"{stratum}{n}" for stratum in "abc" for n in range(2, 30)])
    assert serve(bench, 7)[-1] == "x"


def test_class_comes_before_the_mix() -> None:
    bench = waiting()
    bench.cancel(*[f"a{n}" for n in range(30)])
    bench.submit(spec("a-low", stratum="a", rollout_class=BACKGROUND))
    bench.submit(spec("c-first", stratum="c", rollout_class=CRITICAL))
    assert "a" not in serve(bench, 10)


def test_a_deadline_in_sight_comes_before_the_mix() -> None:
    bench = waiting()
    bench.submit(spec("x-timed", stratum="x", deadline_seconds=30.0))
    assert serve(bench, 1) == "x"
    bench.submit(spec("x-later", stratum="x", deadline_seconds=3000.0))
    assert "x" not in serve(bench, 10)


@pytest.mark.parametrize("fault", [FaultKind.BROKEN])
def test_an_attempt_that_made_nothing_gives_its_turn_back(fault: FaultKind) -> None:
    bench = waiting()
    (first,) = bench.tick()
    assert first.rollout_id[0] == "a"
    order = bench.its_run().mix.order
    assert order is not None
    before = order.finish("a")
    bench.fail(first.rollout_id, fault)
    assert order.finish("a") == pytest.approx(before - 1 / TARGET["a"])


def test_what_runs_counts_before_it_is_done() -> None:
    bench = waiting(slots=10)
    started = bench.tick()
    assert Counter(one.rollout_id[0] for one in started) == {"a": 6, "b": 3, "c": 1}


@pytest.mark.parametrize("before", [{}, {"a": 0.5, "b": 0.5}])
def test_a_new_target_gets_no_turns_back_that_it_never_gave(before: dict[str, float]) -> None:
    bench = Bench(engine(slots=16))
    bench.configure(target_mix=before)
    first = [f"a{n}" for n in range(16)]
    bench.run(*[spec(name, stratum="a") for name in first])
    bench.configure(target_mix={"a": 0.25, "b": 0.75})
    bench.cancel(*first)
    bench.stop_aborted()
    bench.submit(*[spec(f"{stratum}1{n}", stratum=stratum) for stratum in "ab" for n in range(20)])
    assert Counter(one.rollout_id[0] for one in bench.tick()) == {"a": 4, "b": 12}


def test_a_target_with_a_share_next_to_nothing_orders_the_others() -> None:
    bench = Bench(engine(slots=16))
    bench.configure(target_mix={"a": 0.25, "b": 0.75, "c": 1e-18})
    bench.run(spec("c0", stratum="c"), spec("c1", stratum="c"))
    bench.finish("c0")
    bench.finish("c1")
    bench.submit(*[spec(f"{stratum}{n}", stratum=stratum) for stratum in "abc" for n in range(2, 22)])
    assert Counter(one.rollout_id[0] for one in bench.tick()) == {"a": 4, "b": 12}


# what is no sample to train on


def evaluations(stratum: str, count: int) -> list[RolloutSpec]:
    return [spec(f"e{n}", stratum=stratum, origin=Origin.EVALUATION) for n in range(count)]


def one_slot() -> Bench:
    bench = Bench(engine(slots=1), settings=config(preempt={"time_slice_tokens": 0}))
    bench.configure(target_mix={"a": 1.0, "b": 1.0})
    return bench


def test_evaluation_of_one_stratum_and_samples_of_another_do_not_shut_each_other_out() -> None:
    bench = one_slot()
    bench.submit(*evaluations("b", 60))
    bench.submit(*[spec(f"a{n}", stratum="a") for n in range(60)])
    strata = serve(bench, 30)
    assert Counter(strata) == {"a": 20, "e": 10}, strata
    assert "aaa" not in strata and "ee" not in strata, strata


def test_replays_go_beside_the_samples_too() -> None:
    bench = one_slot()
    bench.submit(*[spec(f"r{n}", stratum="b", task_type=TaskType.REPLAY) for n in range(9)])
    bench.submit(*[spec(f"a{n}", stratum="a") for n in range(9)])
    started = ""
    for _ in range(9):
        (one,) = bench.tick(0.01)
        started += one.rollout_id[0]
        bench.fail(one.rollout_id, FaultKind.REFUSED)
    assert Counter(started) == {"a": 6, "r": 3}, started


def test_evaluation_changes_nothing_in_the_mix_of_samples() -> None:
    bench = waiting()
    bench.submit(*evaluations("c", 30))
    strata = serve(bench, 44)
    assert strata.count("e") == 4, strata
    samples = strata.replace("e", "")
    for end in range(1, 41):
        counted = Counter(samples[:end])
        assert all(abs(counted[name] - end * share) <= 1.0 for name, share in TARGET.items()), (strata, end)


def test_evaluation_that_went_alone_is_not_shut_out_afterwards_nor_are_the_samples() -> None:
    bench = one_slot()
    bench.submit(*evaluations("b", 60))
    assert serve(bench, 40) == "e" * 40
    bench.submit(*[spec(f"a{n}", stratum="a") for n in range(60)])
    strata = serve(bench, 9)
    assert strata.startswith("aa") and strata.count("e") == 2, strata


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_a_sample_that_became_too_old_before_anybody_took_it_gives_its_turn_back(on_stale: OnStale) -> None:
    bench = Bench(engine(slots=4))
    bench.configure(target_mix={"a": 1.0, "b": 1.0}, max_staleness=0, on_stale=on_stale)
    bench.run(spec("a0", stratum="a"), spec("a1", stratum="a"))
    bench.finish("a0")
    bench.finish("a1")
    order = bench.its_run().mix.order
    assert order is not None
    before = order.finish("a")
    bench.published(1)
    for _ in range(2):  # once, however often it is delivered
        bench.do(AttachConsumer(RUN, CONSUMER))
    withheld = on_stale is OnStale.WITHHOLD
    assert bench.outcome("a0") is (Outcome.STALE if withheld else Outcome.COMPLETED)
    assert order.finish("a") == pytest.approx(before - 2 * 2.0 if withheld else before)
