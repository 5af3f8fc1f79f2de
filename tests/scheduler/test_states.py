"""The closed vocabularies: every member has what it needs, and moves outside the table are told with their story."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rolloutd.scheduler import lifecycle
from rolloutd.scheduler.rollout import IllegalMove, Rollout
from rolloutd.scheduler.states import MOVES, OUTCOMES, Code, Outcome, RolloutState
from tests.scheduler.kit import RUN, Bench, engine, spec


def rollout_in(bench: Bench, rollout_id: str) -> Rollout:
    return bench.its_run().rollouts[rollout_id]


def test_every_outcome_has_a_row_and_a_label_of_its_own() -> None:
    assert set(OUTCOMES) == set(Outcome)
    labels = [row.label for row in OUTCOMES.values()]
    assert len(set(labels)) == len(labels)


def test_only_completed_is_ok_and_only_our_bugs_are_internal() -> None:
    assert [outcome for outcome, row in OUTCOMES.items() if row.code is Code.OK] == [Outcome.COMPLETED]
    assert [outcome for outcome, row in OUTCOMES.items() if row.code is Code.INTERNAL] == [Outcome.INTERNAL]
    assert [outcome for outcome, row in OUTCOMES.items() if row.engines_fault] == [Outcome.ENGINE_FAILED]


def test_every_state_has_its_moves_and_can_end() -> None:
    assert set(MOVES) == set(RolloutState)
    for state, moves in MOVES.items():
        assert state not in moves
        assert (RolloutState.FINISHED in moves) == (state is not RolloutState.FINISHED)


@pytest.mark.parametrize("start", RolloutState)
@pytest.mark.parametrize("goal", RolloutState)
def test_a_move_outside_the_table_raises_with_the_story(start: RolloutState, goal: RolloutState) -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    rollout = rollout_in(bench, "a")
    rollout.state = start
    if goal in MOVES[start]:
        rollout.move(goal, bench.now, "allowed")
        assert rollout.state is goal
    else:
        with pytest.raises(IllegalMove, match=f"a: {start.name} -> {goal.name} .*story: .*accepted from 'rank-0'"):
            rollout.move(goal, bench.now, "forbidden")
        assert rollout.state is start


def test_finish_is_idempotent() -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    rollout = rollout_in(bench, "a")
    bench.cancel("a")
    first = rollout.result
    lifecycle.finish(bench.core._world, rollout, Outcome.INTERNAL)
    assert rollout.result is first and bench.outcome("a") is Outcome.CANCELLED
    bench.core.check()
    bench.quiet()


def test_a_rollout_with_a_live_attempt_is_never_finished_directly() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    with pytest.raises(AssertionError, match="a finished with a live attempt; story: .*first token"):
        lifecycle.finish(bench.core._world, rollout_in(bench, "a"), Outcome.COMPLETED)


def test_a_permit_is_released_once() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    attempt = rollout_in(bench, "a").attempt
    assert attempt is not None
    bench.finish("a")
    with pytest.raises(AssertionError, match="released twice"):
        attempt.permit.release()


def test_the_story_tells_every_move_with_its_time() -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    bench.tick(1.0)
    bench.write("a", 1)
    bench.now += 1.0
    bench.finish("a")
    told = bench.core.explain(RUN, "a")
    assert told is not None
    decisions, story = told
    assert [decision.rollout_id for decision in decisions] == ["a"]
    moves = [entry.text.split(":")[0] for entry in story]
    assert moves == ["accepted from 'rank-0'", "QUEUED -> DISPATCHED", "DISPATCHED -> RUNNING", "RUNNING -> FINISHED"]
    assert [entry.at_seconds for entry in story] == [100.0, 101.0, 101.0, 102.0]


def scripted(seed: int) -> list[object]:
    """A busy mix on three engines that ends whenever its own dice say."""
    bench = Bench(*[engine(f"e{index}", 4) for index in range(3)], seed=seed)
    dice = random.Random(7)
    for turn in range(120):
        bench.submit(spec(f"r{turn}", dice.randrange(8, 80)))
        bench.tick(0.1)
        for rollout_id in sorted(bench.live):
            if dice.random() < 0.2:
                bench.finish(rollout_id, dice.randrange(1, 16))
    return list(bench.said)


def test_the_same_events_and_the_same_seed_give_the_same_actions() -> None:
    once, again, other = scripted(1), scripted(1), scripted(2)
    assert once == again
    assert once != other, "the seed decides nothing: ties are not broken by it"


def test_time_never_goes_back() -> None:
    bench = Bench(engine(slots=1))
    bench.submit(spec("a"), spec("b"))
    bench.tick(5.0)
    bench.now -= 3.0
    bench.cancel("b")
    told = bench.core.explain(RUN, "b")
    assert told is not None
    times = [entry.at_seconds for entry in told[1]]
    assert all(before <= after for before, after in pairwise(times))
