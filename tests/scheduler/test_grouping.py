"""Siblings together or apart: `grouping` and the term `crowding`."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.config import QueueSettings
from rolloutd.scheduler.events import JoinEngine, LoseEngine
from rolloutd.scheduler.states import RolloutClass
from tests.scheduler.kit import BACKGROUND, REUSABLE, Bench, config, engine, engines, prompt, spec

LONGEST_WAIT_SECONDS = QueueSettings().leader_timeout_seconds
LONG_PROMPT = 100  # long enough for siblings to wait for a leader
SHORT_OUTPUT = 64  # a median of 8 tokens is expected of it, before any is known


def speeds(bench: Bench, prefill_tokens_per_second: float, decode_seconds_per_token: float) -> None:
    """What the engines have shown so far."""
    for one in bench.core._world.engines.values():
        one.prefill_tokens_per_second = prefill_tokens_per_second
        one.decode_seconds_per_token = decode_seconds_per_token
        assert one.room is not None
        one.room.note_pace(one)


def settled_home(**queue: float) -> tuple[Bench, str]:
    """A leader has its prompt computed on the one slot of its engine; the other engine is free, and the leader's name comes back.

    A prompt takes a second to compute, an output of 8 tokens a tenth of one.
    """
    bench = Bench(*engines(2, 1), settings=config(queue=queue))
    speeds(bench, 100.0, 0.01)
    (leader,) = bench.run(spec("g", LONG_PROMPT, samples=2, max_new_tokens=SHORT_OUTPUT))
    return bench, leader.rollout_id


def test_siblings_go_apart_where_their_prompt_is_cheap() -> None:
    """One engine is emptier by two slots, which one sibling there outweighs."""
    for apart, engine_id in ((True, "fuller"), (False, "emptier")):
        bench = Bench(engine("fuller", 8), settings=config(queue={"place_groups": apart}))
        bench.run(spec("a"), spec("b"))
        bench.do(JoinEngine(engine("emptier", 8)))
        speeds(bench, 20_000.0, 0.0077)
        first, second = bench.run(spec("g", samples=2, max_new_tokens=2_000))
        assert (first.engine_id, second.engine_id) == ("emptier", engine_id)


@pytest.mark.parametrize("lower", [REUSABLE, BACKGROUND])
def test_siblings_stay_together_while_lower_classes_wait_for_the_other_engines(lower: RolloutClass) -> None:
    bench = Bench(engine("fuller", 8), settings=config(policy={"cold_start_batch_size": 32}))
    bench.run(spec("a"), spec("b"))
    bench.do(JoinEngine(engine("emptier", 8)))
    speeds(bench, 20_000.0, 0.0077)
    bench.submit(spec("lower", 8, lower), spec("g", samples=2, max_new_tokens=2_000))
    sent = {one.rollout_id: one.engine_id for one in bench.tick()}
    assert (sent["g/0"], sent["g/1"]) == ("emptier", "emptier")


def test_siblings_stay_together_where_their_prompt_is_dear() -> None:
    bench = Bench(engine("fuller", 8))
    bench.run(spec("a"), spec("b"))
    bench.do(JoinEngine(engine("emptier", 8)))
    speeds(bench, 10.0, 0.0077)
    sent = bench.run(spec("g", samples=2, max_new_tokens=16))
    assert [one.engine_id for one in sent] == ["emptier", "emptier"]


def test_a_sibling_waits_for_the_engine_that_has_its_dear_prompt() -> None:
    bench, leader = settled_home()
    home = bench.live[leader].engine_id
    bench.pass_time(1.0)
    assert set(bench.live) == {leader}
    bench.finish(leader)
    (other,) = bench.tick()
    assert other.engine_id == home


def test_it_goes_at_once_where_that_is_switched_off() -> None:
    bench, leader = settled_home(place_groups=False)
    assert len(bench.live) == 2 or len(bench.tick()) == 1
    assert len({one.engine_id for one in bench.live.values()}) == 2


def test_it_does_not_wait_for_ever() -> None:
    """The estimate was wrong: the leader writes on and on."""
    bench, _ = settled_home()
    bench.pass_time(LONGEST_WAIT_SECONDS - 1.0)
    assert len(bench.live) == 1
    bench.pass_time(2.0)
    assert len(bench.live) == 2


def test_it_waits_as_long_as_the_settings_say() -> None:
    bench, _ = settled_home(leader_timeout_seconds=5.0)
    bench.pass_time(4.0)
    assert len(bench.live) == 1
    bench.pass_time(2.0)
    assert len(bench.live) == 2


def test_it_does_not_wait_for_an_engine_that_is_gone() -> None:
    bench, leader = settled_home()
    bench.pass_time(1.0)
    assert len(bench.live) == 1
    bench.do(LoseEngine(bench.live[leader].engine_id, "gone"))
    bench.pass_time(1.0)
    assert any(one.engine_id != bench.live[leader].engine_id for name, one in bench.live.items() if name != leader)


@pytest.mark.parametrize(("waiting", "goes"), [(1, False), (8, True)])
def test_it_goes_elsewhere_where_too_many_wait(waiting: int, goes: bool) -> None:
    """Each of them would have the slot for as long as an output takes: together longer than the prompt."""
    bench = Bench(*engines(2, 1))
    speeds(bench, 200.0, 0.01)
    bench.run(spec("g", LONG_PROMPT, samples=1 + waiting, max_new_tokens=SHORT_OUTPUT))
    bench.pass_time(1.0)
    assert (len(bench.live) == 2) is goes


def test_siblings_wait_no_longer_together_than_one_may() -> None:
    bench = Bench(engine("home", 1))
    bench.run(spec("first", token_bytes=prompt("g", LONG_PROMPT), max_new_tokens=SHORT_OUTPUT))
    bench.finish("first")
    bench.run(spec("taker", max_new_tokens=SHORT_OUTPUT))
    for one in engines(3, 1):
        bench.do(JoinEngine(one))
    speeds(bench, 100.0, 0.001)
    bench.submit(spec("g", token_bytes=prompt("g", LONG_PROMPT), samples=3, max_new_tokens=SHORT_OUTPUT))
    assert not bench.pass_time(LONGEST_WAIT_SECONDS - 2.0)
    sent = []
    for _ in range(6):
        for one in bench.tick(1.0):
            sent.append(one.engine_id)
            bench.write(one.rollout_id, 1)
    assert len(sent) == 3 and "home" not in sent
