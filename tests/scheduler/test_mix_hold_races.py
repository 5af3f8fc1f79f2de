"""Results kept back for the target mix, where groups, single calls, promotions and bounds on samples come in between."""

from __future__ import annotations

import random

import pytest

from rolloutd.scheduler.actions import Deliver, GroupFinished
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    CloseConsumer,
    DetachConsumer,
    PauseRun,
    ResumeRun,
    UpdateRollouts,
)
from rolloutd.scheduler.spec import RolloutUpdate
from rolloutd.scheduler.states import FaultKind, Outcome, RolloutState, TrainerState
from rolloutd.scheduler.timers import TimerKind
from tests.scheduler.kit import BACKGROUND, CONSUMER, CRITICAL, REUSABLE, RUN, Bench, spec
from tests.scheduler.test_mix_hold import SECONDS, ahead, delivered, held, mixed, started

UNARY = "unary/1"


def ends(bench: Bench) -> list[tuple[str, str]]:
    """(group, consumer that was told) of all ends, in order."""
    said = [one for one in bench.said if isinstance(one, Deliver) and one.cursor]
    return [(one.event.group_id, one.consumer_id) for one in said if isinstance(one.event, GroupFinished)]


def due(bench: Bench) -> list[float]:
    """When results that are kept back must go, as far as anything would wake the core for it."""
    return [one.due for one in bench.core._world.timers.live() if one.kind is TimerKind.MIX]


def behind_a_single_call() -> Bench:
    """Group g: a1 is kept back for b0, which runs in a group of its own, and a2 came last, by a single call."""
    bench = mixed()
    started(bench, "a0")
    bench.run(spec("b0", stratum="b", group_id="h", group_size=1))
    bench.finish("a0")
    bench.do(AttachConsumer(RUN, UNARY))
    bench.run(spec("a1", stratum="a", group_id="g", group_size=2))
    bench.run(spec("a2", stratum="a", group_id="g", group_size=2), consumer=UNARY)
    bench.finish("a1")
    bench.finish("a2")
    assert held(bench) == ["a1"] and not ends(bench)
    return bench


def test_a_groups_end_goes_to_who_made_the_single_call_that_ended_last() -> None:
    bench = behind_a_single_call()
    bench.finish("b0")
    assert ends(bench) == [("h", CONSUMER), ("g", UNARY)]


def test_a_groups_end_goes_behind_the_last_result_where_the_single_call_is_gone() -> None:
    bench = behind_a_single_call()
    bench.do(AcknowledgeResults(RUN, UNARY, through_cursor=10))
    bench.do(CloseConsumer(RUN, UNARY))
    bench.do(DetachConsumer(RUN, UNARY))
    assert UNARY not in bench.its_run().consumers
    bench.finish("b0")
    assert delivered(bench)[-1] == "a1" and not held(bench)
    assert ends(bench) == [("h", CONSUMER), ("g", CONSUMER)]
    bench.acknowledge("a0", "a1", "b0")
    assert not bench.its_run().groups
    bench.quiet()


@pytest.mark.parametrize("keep", [2, 3])
def test_groups_that_keep_some_follow_the_mix_too(keep: int) -> None:
    bench = mixed()
    started(bench, "b0", "b1", "b2", "b3")
    bench.run(spec("a", stratum="a", samples=3, group_keep=keep))
    for number in range(keep):
        bench.finish(f"a/{number}")
    bench.stop_aborted()
    kept = [f"a/{number}" for number in range(keep)]
    assert [one for one in delivered(bench) if one in kept] == ["a/0"] and held(bench) == kept[1:]
    for number in range(keep):
        bench.finish(f"b{number}")
    assert not held(bench) and ends(bench) == [("a", CONSUMER)]
    assert all(bench.outcome(one) is Outcome.COMPLETED for one in kept)


def test_a_step_that_promotes_what_runs_finds_what_is_kept_back() -> None:
    bench = mixed()
    bench.step(0)
    names = ("a0", "a1", "b0", "b1")
    bench.run(*[spec(one, stratum=one[0], rollout_class=REUSABLE, needed_by_step=1) for one in names])
    bench.finish("a0")
    bench.finish("a1")
    assert held(bench) == ["a1"]
    bench.step(1)
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("a1", rollout_class=CRITICAL),)))
    bench.finish("b0")
    bench.finish("b1")
    assert sorted(delivered(bench)) == list(names)


@pytest.mark.parametrize("again", [False, True])
def test_nobody_is_woken_for_what_is_not_kept_back_any_more(again: bool) -> None:
    bench = mixed()
    started(bench, "a0", "a1", "a2", "b0")
    bench.finish("a0")
    bench.finish("a1")
    bench.tick(5.0)
    bench.finish("a2")
    assert held(bench) == ["a1", "a2"] and due(bench) == [bench.now - 5.0 + SECONDS]
    for name, left in (("a1", [bench.now + SECONDS]), ("a2", [])):
        if again:
            bench.submit(spec(name, stratum="a"))
        else:
            bench.cancel(name)
        assert due(bench) == left


def test_what_became_too_old_while_kept_back_gives_its_turn_back() -> None:
    bench = ahead(max_staleness=0)
    order = bench.its_run().mix.order
    assert order is not None
    before = order.finish("a")
    bench.publish(1)
    bench.stop_aborted(4)
    bench.finish_updates()
    bench.tick(SECONDS)
    assert [bench.outcome(name) for name in ("a0", "a1", "a2")] == [Outcome.COMPLETED, Outcome.STALE, Outcome.STALE]
    assert order.finish("a") == pytest.approx(before - 2 * 2.0)


def test_a_window_that_is_full_of_what_is_kept_back_gets_on() -> None:
    bench = mixed(max_staleness=0, batch_samples=4)
    started(bench, "a0", "a1", "a2", "b0")
    for one in ("a0", "a1", "a2"):
        bench.finish(one)
    assert held(bench) == ["a1", "a2"]
    bench.acknowledge("a0")
    bench.submit(*[spec(f"b{number}", stratum="b") for number in (1, 2, 3)])
    bench.finish("b0")
    bench.pass_time(3.0)
    assert delivered(bench) == ["a0", "b0", "a1", "a2"]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_result_goes_once(seed: int) -> None:
    """150 random events; the bench checks the core and that nothing ends twice after each."""
    rng = random.Random(seed)
    window = rng.choice([{}, {"max_staleness": 1, "batch_samples": 6}])
    bench = mixed(slots=6, max_undelivered_bytes=rng.choice([0, 3000, 20000]), **window)
    run = bench.its_run()
    names: list[str] = []
    for _ in range(150):
        random_event(bench, rng, names)
    bench.do(ResumeRun(RUN))
    bench.step(run.step, TrainerState.TRAINING)
    for _ in range(300):
        if not (run.unfinished or held(bench)):
            break
        for name in sorted(bench.live):
            if name in bench.live:
                end(bench, name)
        bench.acknowledge(*names)
        bench.tick(1.0)
    assert not held(bench) and not run.unfinished
    assert sorted(set(delivered(bench))) == sorted(names)


def random_event(bench: Bench, rng: random.Random, names: list[str]) -> None:
    what = rng.random()
    run = bench.its_run()
    number = len(names)
    if what < 0.25:
        stratum = rng.choice("aab")
        name = f"{stratum}{number}"
        rollout_class = rng.choice([CRITICAL, REUSABLE, BACKGROUND])
        group, step = rng.choice(["", "", f"g{number // 6}"]), rng.choice([None, None, number // 20])
        one = spec(name, stratum=stratum, rollout_class=rollout_class, group_id=group, needed_by_step=step)
        bench.submit(one)
        names.append(name)
    elif what < 0.55 and bench.live:
        end(bench, rng.choice(sorted(bench.live)))
    elif what < 0.6 and names:
        bench.cancel(rng.choice(names))
    elif what < 0.65:
        bench.acknowledge(*rng.sample(names, min(len(names), 3)))
    elif what < 0.7:
        bench.do(rng.choice([PauseRun(RUN), ResumeRun(RUN), ResumeRun(RUN)]))
    elif what < 0.75:
        target = rng.choice([{"a": 1.0, "b": 1.0}, {"a": 0.1, "b": 0.9}, {}])
        bench.configure(target_mix=target, mix_hold_seconds=rng.choice([0.0, 5.0, 30.0]))
    elif what < 0.8:
        state = rng.choice(list(TrainerState)[1:])
        bench.step(run.step + rng.choice([0, 0, 1]), state, samples_needed=rng.choice([0, 2]))
    elif what < 0.83:
        bench.do(DetachConsumer(RUN, CONSUMER))
        bench.do(AttachConsumer(RUN, CONSUMER))
    elif what < 0.87 and names:
        update = RolloutUpdate(rng.choice(names), rollout_class=rng.choice([CRITICAL, BACKGROUND]))
        bench.do(UpdateRollouts(RUN, (update,)))
    elif what < 0.9 and bench.live:
        name = rng.choice(sorted(bench.live))
        if run.rollouts[name].state is not RolloutState.ABORTING:
            bench.fail(name, FaultKind.BUSY)
    else:
        bench.tick(rng.choice([0.1, 1.0, 3.0]))


def end(bench: Bench, name: str) -> None:
    """Its engine ends its attempt, as it was asked or by itself."""
    if bench.its_run().rollouts[name].state is RolloutState.ABORTING:
        bench.stopped(name)
    else:
        bench.finish(name)
