"""Every way to end at every point of a life, in every order: one end, nothing left booked (properties P1, P2).

A race is a list of events. `LIVES` brings a rollout to a point of its life, `ENDS` ends it from there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.events import BeginShutdown, DetachConsumer, EndRun, JoinEngine, UpdateRollouts
from rolloutd.scheduler.spec import RolloutUpdate
from rolloutd.scheduler.states import FaultKind, Outcome, RolloutState
from tests.scheduler.kit import CONSUMER, REUSABLE, RUN, Bench, config, engine, spec

SETTINGS = config(executor={"max_attempts": 1})


def queued(bench: Bench) -> None:
    bench.budget(max_rollouts=0)
    bench.submit(spec("a", 64))
    bench.tick()


def held(bench: Bench) -> None:
    """`a` waits for the first token of `lead`, which has the same prompt."""
    bench.submit(spec("lead", 64, REUSABLE, token_bytes=spec("a", 64).token_bytes))
    bench.tick()
    bench.submit(spec("a", 64, REUSABLE))
    bench.tick()
    assert bench.view("a").gate.name == "HELD_FOR_PREFIX"


def dispatched(bench: Bench) -> None:
    bench.submit(spec("a", 64))
    bench.tick()


def running(bench: Bench) -> None:
    bench.run(spec("a", 64))
    bench.write("a", 3)


def requeued(bench: Bench) -> None:
    running(bench)
    bench.budget(max_rollouts=0)
    bench.stopped("a", 5)
    assert bench.state("a") is RolloutState.QUEUED


def interrupted(bench: Bench) -> None:
    """Asked to stop by a budget, and still there."""
    running(bench)
    bench.budget(max_rollouts=0)


LIVES = [queued, held, dispatched, running, interrupted, requeued]


def cancel(bench: Bench) -> None:
    bench.cancel("a")


def end_run(bench: Bench) -> None:
    bench.do(EndRun(RUN))


def deadline(bench: Bench) -> None:
    bench.do(UpdateRollouts(RUN, (RolloutUpdate("a", deadline_seconds=0.5),)))
    bench.tick(1.0)


def shutdown(bench: Bench) -> None:
    bench.do(BeginShutdown(1.0))
    bench.tick(1.5)


def disconnect(bench: Bench) -> None:
    bench.configure(cancel_on_disconnect=True)
    bench.do(DetachConsumer(RUN, CONSUMER))


ENDS: list[tuple[Callable[[Bench], None], Outcome]] = [
    (cancel, Outcome.CANCELLED),
    (end_run, Outcome.RUN_ENDED),
    (deadline, Outcome.DEADLINE_EXCEEDED),
    (shutdown, Outcome.SHUTDOWN),
    (disconnect, Outcome.CANCELLED),
]


@pytest.mark.parametrize("last_word", ["aborted", "finished", "broken", "silent", "unanswered", "restarted"])
@pytest.mark.parametrize(("end", "outcome"), ENDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_one_end_at_every_point_of_a_life(
    life: Callable[[Bench], None], end: Callable[[Bench], None], outcome: Outcome, last_word: str
) -> None:
    bench = Bench(engine(slots=2), settings=SETTINGS)
    life(bench)
    end(bench)
    bench.tick()
    was_live = "a" in bench.live
    if was_live:
        words: dict[str, Callable[[], object]] = {
            "aborted": lambda: bench.stopped("a", 3),
            "finished": lambda: bench.finish("a", 4),
            "broken": lambda: bench.fail("a", FaultKind.BROKEN, 3),
            "silent": lambda: bench.fail("a", FaultKind.SILENT),
            "unanswered": lambda: None,
            "restarted": lambda: bench.do(JoinEngine(engine(slots=2, incarnation="2"))),
        }
        words[last_word]()
    bench.pass_time(15.0)  # past the abort timeout
    result = bench.its_run().rollouts["a"].result if "a" in bench.its_run().rollouts else bench.result("a")
    assert result is not None
    if was_live and last_word == "finished" and (end is shutdown or (end is deadline and life is interrupted)):
        # It was done before the grace was over, or before anybody asked the engine for the deadline's sake.
        assert result.outcome is Outcome.COMPLETED
    else:
        assert result.outcome is outcome
    assert result.complete == (result.outcome is Outcome.COMPLETED)
    assert (result.error is None) == result.complete
    if "lead" in bench.live:
        bench.finish("lead")
    bench.tick()
    bench.quiet()


def test_the_first_word_stands_between_cancel_and_deadline() -> None:
    for first, second, outcome in (
        (cancel, deadline, Outcome.CANCELLED),
        (deadline, cancel, Outcome.DEADLINE_EXCEEDED),
    ):
        bench = Bench(engine())
        bench.run(spec("a"))
        first(bench)
        second(bench)
        bench.stopped("a", 2)
        assert bench.outcome("a") is outcome
        bench.quiet()


def test_1000_rollouts_cancelled_at_random_moments_leave_nothing_behind() -> None:
    bench = Bench(engine("e0", 8), engine("e1", 8))
    dice = bench.core._world.rng
    for turn in range(125):
        bench.submit(*[spec(f"r{turn}-{index}") for index in range(8)])
        bench.tick(0.05)
        for rollout_id in list(bench.live):
            if dice.random() < 0.3 and rollout_id not in bench.leaving():
                bench.write(rollout_id, 1 + bench.view(rollout_id).generated_tokens)
        open_ids = [view.rollout_id for view in bench.core.list_rollouts(RUN, bench.now, limit=2000) if not view.result]
        bench.cancel(*[rollout_id for rollout_id in open_ids if dice.random() < 0.5])
        for rollout_id in sorted(bench.leaving()):
            if dice.random() < 0.7:
                bench.stopped(rollout_id, 1)
        bench.acknowledge(*bench.ended)
    bench.cancel(*[view.rollout_id for view in bench.core.list_rollouts(RUN, bench.now, limit=2000)])
    bench.stop_aborted()
    assert len(bench.ended) == 1000
    bench.quiet()
    bench.do(JoinEngine(engine("e1", 8, incarnation="2")))
    started: list[Dispatch] = []
    for turn in range(200):
        bench.submit(spec(f"after-{turn}"))
        started += bench.tick(0.1)
        if len(bench.live) == 8:
            for rollout_id in list(bench.live):
                bench.finish(rollout_id)
    shares = [sum(one.engine_id == name for one in started) for name in ("e0", "e1")]
    assert min(shares) >= 80, f"after a restart the load is not even: {shares}"
