"""Groups that keep fewer than they are made of: who is ended when, what is reserved for them, what is told of their lengths.

The races are in tests/races/test_surplus.py.
"""

from __future__ import annotations

import random

import pytest

from rolloutd.scheduler.actions import GroupFinished
from rolloutd.scheduler.events import EndRun
from rolloutd.scheduler.over_launch import Fate, OverLaunch
from rolloutd.scheduler.states import Outcome, RolloutState
from rolloutd.scheduler.views import OverLaunchView
from tests.scheduler.kit import RUN, Bench, engine, prompt, spec

COMPLETED, SURPLUS = Outcome.COMPLETED, Outcome.SURPLUS


def told(bench: Bench) -> OverLaunchView:
    view = bench.run_view().over_launch
    assert view is not None
    return view


def test_the_first_to_complete_are_kept_and_the_others_end() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=6, group_keep=3))
    running = sorted(bench.live)
    for name in running[:2]:
        bench.finish(name, 8)
    bench.tick()
    assert not bench.leaving(), "two of three"
    bench.write(running[3], 12)
    bench.finish(running[2], 10)
    waited = {name for name, one in bench.its_run().rollouts.items() if one.result and one.result.outcome is SURPLUS}
    assert len(waited) + len(bench.leaving()) == 3 and running[3] in bench.leaving()
    assert not bench.tick(), "nothing of the group starts any more"
    bench.stop_aborted(12)
    (end,) = bench.heard(GroupFinished)
    assert end.complete and not end.failed_rollout_ids and len(end.surplus_rollout_ids) == 3
    assert sum(bench.outcome(f"g/{index}") is COMPLETED for index in range(6)) == 3
    bench.quiet()


def test_without_group_keep_all_are_wanted() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=4))
    for name in list(bench.live):
        bench.finish(name)
    assert all(bench.outcome(f"g/{index}") is COMPLETED for index in range(4))
    assert bench.run_view().over_launch is None


def test_those_that_fail_do_not_count_as_kept() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=4, group_keep=2))
    bench.cancel("g/0")
    bench.stopped("g/0", 3)
    bench.finish("g/1")
    assert bench.state("g/2") is RolloutState.RUNNING
    bench.finish("g/2")
    bench.stopped("g/3", 3)
    (end,) = bench.heard(GroupFinished)
    assert end == GroupFinished("g", True, ("g/0", "g/1", "g/2", "g/3"), ("g/0",), ("g/3",))
    assert (told(bench).launched, told(bench).kept, told(bench).surplus) == (4, 2, 1)


def test_a_group_that_cannot_get_what_it_keeps_is_partial_and_ends_by_itself() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=3, group_keep=2))
    for name in ("g/0", "g/1"):
        bench.cancel(name)
        bench.stopped(name)
    assert bench.state("g/2") is RolloutState.RUNNING, "one result is better than none"
    bench.finish("g/2")
    (end,) = bench.heard(GroupFinished)
    assert not end.complete and end.failed_rollout_ids == ("g/0", "g/1") and not end.surplus_rollout_ids


def test_a_group_over_several_submissions_keeps_what_the_first_said() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("a", group_id="g", group_size=4, group_keep=2))
    bench.run(spec("b", samples=2, group_id="g"), spec("c", group_id="g", group_keep=2))
    refused = bench.rejected(spec("d", group_id="g", group_size=4, group_keep=3))
    assert refused.fields[0][0] == "group_keep" and "opened with 2" in refused.message
    for name in ("b/1", "c"):
        bench.finish(name)
    bench.stop_aborted(2)
    (end,) = bench.heard(GroupFinished)
    assert end.complete and set(end.surplus_rollout_ids) == {"a", "b/0"}
    bench.quiet()


def test_a_group_that_was_opened_without_it_cannot_be_told_later_what_to_keep() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("a", group_id="g", group_size=3))
    refused = bench.rejected(spec("b", group_id="g", group_size=3, group_keep=2))
    assert refused.fields[0][0] == "group_keep" and "opened with none" in refused.message


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"samples": 4, "group_keep": 5}, "is 5, more than the group has members (4)"),
        ({"group_id": "g", "group_size": 3, "group_keep": 4}, "is 4, more than the group has members (3)"),
        ({"group_keep": 1}, "is 1, but there is no group"),
    ],
)
def test_what_cannot_be_kept_is_refused(fields: dict[str, object], problem: str) -> None:
    refused = Bench(engine()).rejected(spec("r", **fields))
    assert refused.fields[0][0] == "group_keep" and problem in refused.message


def test_keeping_all_of_a_group_is_keeping_all_of_it() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=2))
    for name in ("g/0", "g/1"):
        bench.finish(name)
    (end,) = bench.heard(GroupFinished)
    assert end.complete and not end.surplus_rollout_ids


def test_a_group_can_be_looked_at_meanwhile() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=3, group_keep=1))
    bench.finish("g/1")
    view = bench.core.group_view(RUN, "g")
    assert view is not None
    assert (view.keep, view.completed, view.surplus, view.done) == (1, 1, (), False)
    bench.stop_aborted(1)
    view = bench.core.group_view(RUN, "g")
    assert view is not None and (set(view.surplus), view.done) == ({"g/0", "g/2"}, True)


def test_children_of_a_surplus_member_go_on() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=1))
    bench.run(spec("leaf", parent_rollout_id="g/0"))
    bench.finish("g/1")
    bench.stopped("g/0", 2)
    assert bench.state("leaf") is RolloutState.RUNNING
    bench.finish("leaf")
    bench.quiet()


# samples on their way


def bounded(batch_samples: int) -> Bench:
    bench = Bench(engine(slots=64))
    bench.configure(max_staleness=0, batch_samples=batch_samples)
    return bench


def outstanding(bench: Bench) -> int:
    return bench.run_view().samples_on_their_way


def test_what_a_group_keeps_is_reserved_and_not_what_it_launches() -> None:
    bench = bounded(8)
    bench.submit(*(spec(f"g{index}", samples=5, group_keep=4) for index in range(3)))
    names = [one.rollout_id for one in bench.tick()]
    assert {name.split("/")[0] for name in names} == {"g0", "g1"} and len(names) == 10
    assert outstanding(bench) == 8
    for group in ("g0", "g1"):
        for index in range(4):
            bench.finish(f"{group}/{index}")
        bench.stopped(f"{group}/4", 1)
        bench.acknowledge(f"{group}/4")
    assert outstanding(bench) == 8, "what was surplus frees nothing"
    assert not bench.tick()
    bench.acknowledge(*(f"g0/{index}" for index in range(4)))
    assert outstanding(bench) == 8 and len(bench.tick()) == 5


def test_a_failure_gives_back_what_cannot_come_any_more() -> None:
    bench = bounded(4)
    bench.submit(spec("g", samples=5, group_keep=4))
    bench.tick()
    for index, left in ((0, 4), (1, 3), (2, 2)):
        bench.cancel(f"g/{index}")
        bench.stopped(f"g/{index}", 1)
        assert outstanding(bench) == left
    for index in (3, 4):
        bench.finish(f"g/{index}")
    assert outstanding(bench) == 2
    bench.acknowledge(*(f"g/{index}" for index in range(5)))
    assert outstanding(bench) == 0
    bench.quiet()


def test_a_trainer_that_starts_again_counts_what_may_still_come() -> None:
    bench = bounded(8)
    bench.submit(spec("g", samples=6, group_keep=4))
    bench.tick()
    bench.finish("g/0")
    from rolloutd.scheduler.events import AttachConsumer

    bench.do(AttachConsumer(RUN, "rank-0", epoch=1))
    assert outstanding(bench) == 3, "five run, three of them are wanted"
    for index in (1, 2, 3):
        bench.finish(f"g/{index}")
    bench.stop_aborted(1)
    bench.acknowledge(*(f"g/{index}" for index in range(6)))
    assert outstanding(bench) == 0
    bench.quiet()


# what is told of lengths


def test_what_is_told_tells_kept_from_cut() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=4, group_keep=2))
    bench.finish("g/0", 4)
    bench.write("g/2", 9)
    bench.finish("g/1", 8)
    bench.stopped("g/2", 9)
    assert bench.run_view().over_launch is None, "told once the group is over"
    bench.stopped("g/3", 2)
    view = told(bench)
    assert (view.groups, view.launched, view.kept, view.surplus) == (1, 4, 2, 2)
    assert (view.kept_tokens, view.surplus_tokens, view.longest_cut_groups) == (12, 11, 1)
    assert len(view.kept_share_by_quintile) == 5
    assert sum(view.kept_share_by_quintile) / 5 == pytest.approx(2 / 4)
    assert view.kept_share_by_quintile[0] > view.kept_share_by_quintile[4]


def test_a_group_that_was_cut_before_it_was_longer_is_not_counted_as_such() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=1))
    bench.finish("g/0", 9)
    bench.stopped("g/1", 3)
    assert told(bench).longest_cut_groups == 0


def test_one_that_was_done_in_the_same_moment_was_not_cut() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=2, group_keep=1))
    bench.finish("g/0", 5)
    bench.finish("g/1", 9)
    assert (told(bench).surplus, told(bench).surplus_tokens, told(bench).longest_cut_groups) == (1, 9, 0)


def test_a_run_that_ends_tells_of_its_groups_too() -> None:
    bench = Bench(engine(slots=4))
    bench.run(spec("g", samples=3, group_keep=2))
    bench.finish("g/0", 5)
    bench.do(EndRun(RUN))
    bench.stop_aborted(2)
    assert (told(bench).launched, told(bench).kept, told(bench).surplus) == (3, 1, 0)


def naive_shares(fates: list[Fate]) -> list[float]:
    """Fifths of the launched in the order of their lengths."""
    ordered = sorted(fates, key=lambda fate: fate.expected_tokens)
    fifth = len(ordered) // 5
    parts = [ordered[index * fifth : (index + 1) * fifth] for index in range(5)]
    return [sum(fate.outcome is COMPLETED for fate in part) / fifth for part in parts]


@pytest.mark.parametrize("seed", range(5))
def test_shares_by_quintile_are_those_of_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    account, fates = OverLaunch(), []
    for _ in range(100):
        lengths = sorted(int(rng.lognormvariate(7.0, 1.0)) + 1 for _ in range(10))
        group = [Fate(COMPLETED if i < 8 else SURPLUS, n if i < 8 else lengths[7], float(n), i < 8)
                 for i, n in enumerate(lengths)]  # fmt: skip
        account.note_group(group)
        fates += group
    view = account.view()
    assert view is not None and view.longest_cut_groups == 100
    assert view.kept_share_by_quintile == pytest.approx(naive_shares(fates), abs=0.06)  # a bucket is 19 % wide
    assert sum(view.kept_share_by_quintile) / 5 == pytest.approx(0.8)


def test_lengths_beyond_every_bucket_are_counted_in_the_last() -> None:
    account = OverLaunch()
    account.note_group([Fate(COMPLETED, 1, 1.0, True), Fate(SURPLUS, 0, 1e300, False)])
    view = account.view()
    assert view is not None and view.kept_share_by_quintile == pytest.approx((1.0, 1.0, 0.5, 0.0, 0.0))


def test_prompts_of_a_group_may_differ() -> None:
    bench = Bench(engine(slots=4))
    bench.run(*(spec(f"m{i}", group_id="g", group_size=3, group_keep=2, token_bytes=prompt(f"m{i}")) for i in range(3)))
    bench.finish("m2")
    bench.finish("m0")
    bench.stopped("m1")
    assert [bench.outcome(f"m{index}") for index in range(3)] == [COMPLETED, SURPLUS, COMPLETED]
    bench.quiet()
