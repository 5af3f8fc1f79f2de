"""Shared prompts: leader first, waiting for a prefix, sessions that follow their cache, groups that end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutd.scheduler.actions import Deliver, Finished, GroupFinished, Rejected, Undelivered
from rolloutd.scheduler.config import QueueSettings
from rolloutd.scheduler.events import DetachConsumer
from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutSpec, Weights
from rolloutd.scheduler.states import FaultKind, Gate, Outcome, RolloutClass, RolloutState
from tests.scheduler.kit import BACKGROUND, CRITICAL, REUSABLE, Bench, config, engine, engines, ids, prompt, spec

QUEUE = QueueSettings()
LONG_PROMPT = 64  # tokens: long enough to wait for


def led(samples: int = 4, count: int = 2) -> tuple[Bench, str]:
    """A group whose leader was dispatched; returns its id."""
    bench = Bench(*engines(count, 8))
    bench.submit(spec("g", LONG_PROMPT, samples=samples))
    (leader,) = bench.tick()
    return bench, leader.rollout_id


def siblings(bench: Bench, leader: str) -> list[str]:
    return [f"g/{index}" for index in range(len(bench.its_run().groups["g"].members)) if f"g/{index}" != leader]


def test_siblings_wait_for_their_leaders_first_token_and_then_share_its_prefix() -> None:
    bench, leader = led()
    assert all(bench.view(name).gate is Gate.HELD_FOR_LEADER for name in siblings(bench, leader))
    assert bench.core.statistics().held == 3
    assert not bench.pass_time(QUEUE.leader_timeout_seconds / 2, QUEUE.leader_timeout_seconds / 8)
    bench.write(leader, 1)
    followers = bench.tick()
    assert len(followers) == 3 and {one.engine_id for one in followers} == {bench.live[leader].engine_id}
    for one in bench.live.values():
        bench.write(one.rollout_id, 2, cached=48)
        bench.finish(one.rollout_id)
    assert all(bench.result(name).predicted_cached_tokens == LONG_PROMPT - 1 for name in siblings(bench, leader))
    assert bench.result(leader).predicted_cached_tokens == 0


def test_short_prompts_are_not_worth_waiting_for() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(spec("g", QUEUE.min_shared_tokens - 1, samples=4))
    assert len(bench.tick()) == 4


def test_a_prompt_that_is_cached_already_needs_no_leader() -> None:
    bench, leader = led()
    bench.write(leader, 1)
    bench.finish(leader)
    for name in siblings(bench, leader):
        bench.tick()
        bench.finish(name)
    bench.submit(spec("again", samples=4, token_bytes=prompt("g", LONG_PROMPT)))
    assert len(bench.tick()) == 4


def cancelled(bench: Bench, leader: str) -> None:
    bench.cancel(leader)
    bench.stopped(leader)


def broken(bench: Bench, leader: str) -> None:
    bench.fail(leader, FaultKind.BROKEN)


def refused(bench: Bench, leader: str) -> None:
    bench.fail(leader, FaultKind.REFUSED)


def restarted(bench: Bench, leader: str) -> None:
    from rolloutd.scheduler.events import JoinEngine

    bench.do(JoinEngine(engine(bench.live[leader].engine_id, 8, incarnation="2")))


def too_slow(bench: Bench, leader: str) -> None:
    bench.now += QUEUE.leader_timeout_seconds


def ended_without_progress(bench: Bench, leader: str) -> None:
    bench.finish(leader, 0)


@pytest.mark.parametrize(
    "event", [cancelled, broken, refused, restarted, too_slow, ended_without_progress], ids=lambda e: e.__name__
)
def test_siblings_never_wait_for_a_leader_that_will_not_come(event: Callable[[Bench, str], None]) -> None:
    bench, leader = led()
    event(bench, leader)
    started = bench.tick()
    assert len(started) >= 1, "somebody leads now, or all go"
    for one in started:
        if one.rollout_id in bench.live:
            bench.write(one.rollout_id, 1)
    bench.tick()
    others = siblings(bench, leader)
    assert all(bench.state(name) in (RolloutState.DISPATCHED, RolloutState.RUNNING) for name in others)


def test_a_cancelled_leader_hands_over_to_exactly_one_new_leader() -> None:
    bench, leader = led()
    cancelled(bench, leader)
    (new,) = bench.tick()
    assert new.rollout_id != leader
    assert sum(bench.view(name).gate is Gate.HELD_FOR_LEADER for name in siblings(bench, leader)) == 2


def test_a_promoted_sibling_does_not_stay_held_behind_a_leader_of_another_class() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(spec("g", LONG_PROMPT, BACKGROUND, samples=3, needed_by_step=4))
    (leader,) = bench.tick()
    bench.step(4)
    assert {one.rollout_id for one in bench.tick()} <= {"g/0", "g/1", "g/2"} - {leader.rollout_id}
    for _ in range(3):
        for name in list(bench.live):
            bench.finish(name)
        bench.tick()
    assert bench.ended == {"g/0", "g/1", "g/2"}


# waiting for a prefix that somebody computes


def computing() -> Bench:
    bench = Bench(*engines(2, 8))
    bench.submit(spec("lead", LONG_PROMPT))
    bench.tick()
    return bench


def follower(name: str, rollout_class: RolloutClass = REUSABLE, tail: int = 8) -> RolloutSpec:
    return spec(name, rollout_class=rollout_class, token_bytes=prompt("lead", LONG_PROMPT) + ids([1] * tail))


def hold_of(bench: Bench, *names: str) -> None:
    bench.submit(*[follower(name) for name in names])
    assert not bench.tick()
    assert all(bench.view(name).gate is Gate.HELD_FOR_PREFIX for name in names)


def test_reusable_work_waits_for_a_prefix_and_then_goes_where_it_is() -> None:
    bench = computing()
    hold_of(bench, "a", "b")
    bench.write("lead", 1)
    assert {one.engine_id for one in bench.tick()} == {bench.live["lead"].engine_id}


@pytest.mark.parametrize("rollout_class", [CRITICAL, BACKGROUND])
def test_other_classes_do_not_wait_for_a_prefix(rollout_class: RolloutClass) -> None:
    bench = computing()
    bench.submit(follower("a", rollout_class))
    assert [one.rollout_id for one in bench.tick()] == ["a"]


def test_a_hold_ends_when_who_computes_the_prefix_dies() -> None:
    bench = computing()
    hold_of(bench, "a")
    bench.fail("lead", FaultKind.REFUSED)
    assert [one.rollout_id for one in bench.tick()] == ["a"]


def test_a_hold_ends_after_its_patience_and_does_not_start_again() -> None:
    bench = computing()
    hold_of(bench, "a")
    assert not bench.tick(QUEUE.max_defer_seconds - 0.5)
    assert [one.rollout_id for one in bench.tick(0.6)] == ["a"]


def test_held_work_blocks_nothing_behind_it() -> None:
    bench = computing()
    bench.submit(*[follower(f"a{index}") for index in range(12)], spec("free", rollout_class=REUSABLE))
    assert [one.rollout_id for one in bench.tick()] == ["free"]


def test_a_cancelled_hold_leaves_nothing_behind() -> None:
    bench = computing()
    hold_of(bench, "a", "b")
    bench.cancel("a")
    bench.write("lead", 1)
    assert [one.rollout_id for one in bench.tick()] == ["b"]
    bench.finish("b")
    bench.finish("lead")
    bench.tick()
    bench.quiet()


# sessions


def test_later_turns_of_sessions_follow_their_cache() -> None:
    bench = Bench(*engines(4, 8))
    bench.configure(weights=Weights(prefix=0.4))
    where: dict[str, str] = {}
    text: dict[str, bytes] = {}
    for turn in range(4):
        for index in range(6):
            name = f"s{index}"
            text[name] = text.get(name, prompt(name, 64)) + ids([turn + 1] * 16)
            rollout_id = f"{name}-t{turn}"
            bench.submit(spec(rollout_id, token_bytes=text[name], session_id=name, turn=turn))
            (one,) = bench.tick(0.3)
            if turn:
                assert one.engine_id == where[name], f"turn {turn} of {name} left its cache"
            where[name] = one.engine_id
            piece = bench.piece(rollout_id, 16, "stop")
            text[name] += piece.token_bytes
            bench.finish(rollout_id)
    assert len(set(where.values())) > 1, "all sessions on one engine"


def test_credit_covers_what_the_engine_wrote_too() -> None:
    bench = Bench(*engines(2, 8))
    bench.run(spec("a", 64, max_new_tokens=32))
    piece = bench.piece("a", 32, "stop")
    home = bench.live["a"].engine_id
    bench.finish("a", 32)
    bench.submit(spec("b", token_bytes=prompt("a", 64) + piece.token_bytes + ids([5] * 8), turn=1))
    (one,) = bench.tick()
    bench.write("b", 1, cached=80)
    bench.finish("b")
    assert one.engine_id == home and bench.result("b").predicted_cached_tokens == 80, (
        "whole pages of what has KV: the prompt and all it wrote but the last token"
    )


# groups end


def test_a_group_ends_once_and_names_who_failed() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("g", samples=3), spec("late", group_id="g"))
    for name in ("g/0", "g/1"):
        bench.finish(name)
    assert not bench.heard(GroupFinished)
    bench.cancel("g/2")
    bench.stopped("g/2")
    bench.finish("late")
    (end,) = bench.heard(GroupFinished)
    assert end == GroupFinished("g", False, ("g/0", "g/1", "g/2", "late"), ("g/2",))
    bench.acknowledge("g/0", "g/1", "g/2", "late")
    assert not bench.its_run().groups and bench.run_view().undelivered_bytes == 0


def test_submissions_of_a_group_that_disagree_on_its_size_are_refused() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(spec("a", group_id="g", group_size=3))
    bench.submit(spec("b", group_id="g", group_size=5))
    (refused,) = bench.heard(Rejected)
    assert refused.rollout_id == "b" and refused.error.fields[0][0] == "group_size"
    bench.submit(spec("c", group_id="g"), spec("d", group_id="g", group_size=3))
    assert len(bench.heard(Rejected)) == 1 and bench.its_run().groups["g"].members == ["a", "c", "d"]


def test_a_group_of_announced_size_waits_for_all_its_members() -> None:
    bench = Bench(engine(slots=8))
    bench.run(*[spec(f"m{index}", group_id="g", group_size=4) for index in range(3)])
    for index in range(3):
        bench.finish(f"m{index}")
    bench.acknowledge("m0", "m1", "m2")
    assert not bench.heard(GroupFinished)
    bench.run(spec("m3", group_id="g", group_size=4))
    bench.finish("m3")
    (end,) = bench.heard(GroupFinished)
    assert end.complete and end.rollout_ids == ("m0", "m1", "m2", "m3")


def test_members_of_two_consumers_in_one_group_leave_nothing_undelivered() -> None:
    from rolloutd.scheduler.events import AttachConsumer

    bench = Bench(engine(slots=8))
    bench.do(AttachConsumer("run", "rank-1"))
    for turn in range(2):
        one, two = f"a{turn}", f"b{turn}"
        bench.submit(spec(one, group_id="g", group_size=2))
        bench.submit(spec(two, group_id="g", group_size=2), consumer="rank-1")
        bench.tick()
        bench.finish(two)
        bench.finish(one)  # the group's end goes to rank-0
        bench.acknowledge(one)
        bench.acknowledge(two, consumer="rank-1")
    assert bench.run_view().undelivered_bytes == 0 and not bench.its_run().groups


def test_a_view_of_a_group_follows_it_until_its_last_result_was_acknowledged() -> None:
    bench = Bench(engine(slots=8))
    assert bench.core.group_view("run", "g") is None and bench.core.group_view("other", "g") is None
    bench.run(spec("a", group_id="g", group_size=3), spec("b", group_id="g"))
    bench.finish("a")
    view = bench.core.group_view("run", "g")
    assert view is not None
    assert (view.size, view.members, view.finished, view.failed, view.done) == (3, ("a", "b"), 1, (), False)
    bench.cancel("b")
    bench.stopped("b")
    bench.run(spec("c", group_id="g"))
    bench.finish("c")
    view = bench.core.group_view("run", "g")
    assert view is not None
    assert (view.members, view.finished, view.failed, view.done) == (("a", "b", "c"), 3, ("b",), True)
    bench.acknowledge("a", "b", "c")
    assert bench.core.group_view("run", "g") is None


def test_an_end_is_told_once_whether_its_consumer_is_connected_or_not() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("g", 8, samples=2))
    bench.finish("g/0")
    bench.do(DetachConsumer("run", "rank-0"))
    bench.finish("g/1")
    ends = [action for action in bench.said if isinstance(action, Deliver | Undelivered)]
    told = [(type(one), type(one.event)) for one in ends if isinstance(one.event, Finished | GroupFinished)]
    assert told == [(Deliver, Finished), (Undelivered, Finished), (Undelivered, GroupFinished)]


def test_a_resumed_member_does_not_share_its_siblings_prompt() -> None:
    bench, leader = led(samples=2, count=1)
    bench.write(leader, 4)
    bench.budget(max_rollouts=0)
    bench.stopped(leader, 4)
    bench.budget()
    started = {one.rollout_id: len(one.token_bytes) // TOKEN_BYTES for one in bench.tick()}
    (other,) = siblings(bench, leader)
    assert started == {leader: LONG_PROMPT + 4, other: LONG_PROMPT}
    for name in started:
        bench.finish(name, 12)
    assert bench.whole(leader) and bench.outcome(other) is Outcome.COMPLETED


def test_siblings_go_elsewhere_when_their_leaders_engine_is_full() -> None:
    bench = Bench(engine("e0", 1), engine("e1", 8), settings=config(policy={"cold_start_batch_size": 32}))
    bench.run(*[spec(f"fill{index}") for index in range(8)])
    bench.submit(spec("g", LONG_PROMPT, samples=4))
    (leader,) = bench.tick()
    bench.write(leader.rollout_id, 1)
    for name in [name for name in bench.live if name.startswith("fill")]:
        bench.finish(name)
    for one in bench.tick():  # all of them, or one that computes the prompt for the others on an engine that lacks it
        bench.write(one.rollout_id, 1)
    bench.tick()
    assert len(bench.live) == 4


@pytest.mark.parametrize(("spare", "first"), [(True, "fresh"), (False, "g")], ids=["spared", "switched off"])
def test_what_no_engine_has_goes_before_what_another_one_has(spare: bool, first: str) -> None:
    """A slot frees on the engine that lacks a prompt which the full one has, and a prompt that nobody has waits too."""
    bench = Bench(*engines(2, 1), settings=config(queue={"spare_duplicates": spare, "place_groups": False}))
    for name in ("e0", "e1"):  # computing a prompt is dear
        one = bench.engine(name)
        one.prefill_tokens_per_second, one.decode_seconds_per_token = 100.0, 0.01
        assert one.room is not None
        one.room.note_pace(one)
    bench.run(spec("other"))
    (leader,) = bench.run(spec("g", LONG_PROMPT, samples=2))
    bench.submit(spec("fresh", LONG_PROMPT))
    assert not bench.tick()
    bench.finish("other")
    (next_one,) = bench.tick()
    assert next_one.engine_id != leader.engine_id and next_one.rollout_id.split("/")[0] == first
