"""Groups that keep fewer than they launch: members that come late, contradict, or stand between two attempts."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.actions import Rejected
from rolloutd.scheduler.states import Outcome, RolloutState, UpdateMode
from tests.scheduler.kit import Bench, engine, spec

SURPLUS = Outcome.SURPLUS


def outstanding(bench: Bench) -> int:
    return bench.run_view().samples_on_their_way


def test_group_keep_of_a_submission_whose_id_is_a_known_group_is_not_ignored_in_silence() -> None:
    bench = Bench(engine(slots=16))
    bench.run(spec("a", group_id="g", group_size=5))  # opened: all are wanted
    answers = bench.submit(spec("g", samples=4, group_keep=2))  # its group is "g" by its id
    assert isinstance(answers[0], Rejected), (
        f"accepted into a group with keep={bench.its_run().groups['g'].keep}; group_keep=2 means nothing"
    )


def test_a_late_surplus_member_takes_no_room_from_others() -> None:
    bench = Bench(engine(slots=64))
    bench.configure(max_staleness=0, batch_samples=4)
    late = {"group_id": "g", "group_size": 6, "group_keep": 4}
    bench.submit(*(spec(f"m{i}", **late) for i in range(5)))
    bench.tick()
    for i in range(4):
        bench.finish(f"m{i}")
    bench.stopped("m4", 1)
    bench.acknowledge(*(f"m{i}" for i in range(4)))
    assert outstanding(bench) == 0
    bench.submit(spec("m5", **late))  # surplus at once
    assert bench.outcome("m5") is SURPLUS
    bench.submit(spec("h", samples=4))
    started = [one.rollout_id for one in bench.tick()]
    assert outstanding(bench) == 4 and len(started) == 4, (
        f"{outstanding(bench)} of 4 are said to be on their way, nothing runs: started {started}"
    )


@pytest.mark.parametrize("queued", [True, False])
def test_what_was_cut_between_two_slices_does_not_say_that_it_was_done(queued: bool) -> None:
    bench = Bench(engine(slots=2))
    bench.configure(slice_tokens=4)
    bench.run(spec("g", samples=2, group_keep=1))
    bench.finish("g/0", 4, "length")  # its first slice
    assert bench.state("g/0") is RolloutState.QUEUED
    if not queued:
        bench.tick()
        bench.write("g/0", 1)
    bench.finish("g/1", 3, "stop")
    if "g/0" in bench.live:
        bench.finish("g/0", 4, "length")  # the slice was over before the abort came
    result = bench.result("g/0")
    assert result.outcome is SURPLUS and result.generated_tokens < 16
    assert result.finish_reason == "abort", (
        f"{result.generated_tokens} of 16 tokens, and it says {result.finish_reason!r}"
    )


def test_late_members_of_a_group_that_is_over_leave_nothing_behind_in_it() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=1))
    bench.finish("g/0")
    bench.stopped("g/1")
    for i in range(50):
        bench.submit(spec(f"late{i}", group_id="g"))
        bench.acknowledge(f"late{i}")
    group = bench.its_run().groups["g"]
    assert not group.fates, f"{len(group.fates)} fates of rollouts that were acknowledged long ago"


def test_groups_that_keep_all_are_not_groups_that_kept_fewer() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=2))
    for name in ("g/0", "g/1"):
        bench.finish(name)
    assert bench.run_view().over_launch is None, "docs: all groups that kept fewer than they were launched with"


def test_a_leaf_that_comes_while_its_cancelled_parent_is_leaving_ends_too() -> None:
    """No over-launch here: the same hole for any parent that runs."""
    bench = Bench(engine(slots=8))
    bench.run(spec("p"))
    bench.cancel("p")
    bench.submit(spec("late", parent_rollout_id="p"))
    bench.stopped("p", 1)
    assert bench.outcome("p") is Outcome.CANCELLED
    assert "late" in bench.ended, f"the subtree was cancelled, and the leaf is {bench.state('late').name}"


def test_what_is_surplus_is_asked_to_stop_also_where_the_pause_that_was_to_stop_it_failed() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=1))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)  # the pause is to stop both
    bench.finish("g/1")  # it was done before
    bench.call_fails()  # and the engine did not pause
    bench.finish_updates()
    bench.tick()
    assert "g/0" in bench.leaving(), f"g/0 is {bench.state('g/0').name}, and nobody has told its engine"


def test_an_engine_whose_pause_failed_is_not_blamed_for_an_abort_that_it_was_never_sent() -> None:
    """No over-launch here: any work that the pause of ABORT_AND_RESUME was to stop."""
    bench = Bench(engine(slots=4))
    bench.run(spec("r", max_new_tokens=4000))
    bench.publish(1, mode=UpdateMode.ABORT_AND_RESUME)
    bench.call_fails()
    bench.finish_updates()
    for tokens in range(2, 14):
        bench.tick(1.0)
        if "r" in bench.live:
            bench.write("r", tokens * 10)  # it works on, nobody told it to stop
    unanswered = bench.records("abort_unanswered")
    assert not unanswered or bench.aborted, "10 s later the engine counts as silent; no abort was ever sent"
