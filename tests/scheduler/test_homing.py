"""Later turns of a session wait for the engine that has their context."""

from __future__ import annotations

import pytest

from rolloutd.scheduler import choosing
from rolloutd.scheduler.events import DrainEngine, JoinEngine
from rolloutd.scheduler.spec import TOKEN_BYTES, Quota
from rolloutd.scheduler.states import Gate, UpdateMode
from tests.scheduler.kit import CRITICAL, Bench, config, engine, engines, prompt, spec

CONTEXT = 256  # tokens of the first turn
PATIENCE_SECONDS = 20.0


def between_turns(patience_seconds: float = PATIENCE_SECONDS, **second: float) -> tuple[Bench, str]:
    """The first turn is back, its engine's one slot was taken by somebody else, and the second turn has come. The other is free."""
    bench = Bench(*engines(2, 1), settings=config(queue={"session_patience_seconds": patience_seconds}))
    (first,) = bench.run(spec("s0", CONTEXT, session_id="s", turn=0))
    home = first.engine_id
    (other,) = bench.run(spec("other0"))
    bench.finish("s0")
    (taker,) = bench.run(spec("taker"))
    assert taker.engine_id == home != other.engine_id
    bench.finish("other0")
    context = prompt("s0", CONTEXT) + prompt("answer", 64)
    bench.submit(spec("s1", token_bytes=context, session_id="s", turn=1, **second))
    return bench, home


def test_a_turn_waits_for_its_engine_and_goes_there() -> None:
    bench, home = between_turns()
    assert not bench.pass_time(PATIENCE_SECONDS - 2.0)
    bench.finish("taker")
    (sent,) = bench.tick()
    assert (sent.rollout_id, sent.engine_id) == ("s1", home)


def test_it_goes_elsewhere_when_its_patience_ends() -> None:
    bench, home = between_turns()
    (sent,) = bench.pass_time(PATIENCE_SECONDS + 2.0)
    assert sent.rollout_id == "s1" and sent.engine_id != home


def test_it_goes_at_once_where_that_is_switched_off() -> None:
    bench, home = between_turns(patience_seconds=0.0)
    (sent,) = bench.tick()
    assert sent.rollout_id == "s1" and sent.engine_id != home


def test_it_goes_at_once_when_its_engine_takes_no_more_work() -> None:
    bench, home = between_turns()
    bench.do(DrainEngine(home))
    (sent,) = bench.tick()
    assert sent.rollout_id == "s1" and sent.engine_id != home


def test_it_goes_at_once_where_a_floor_is_owed() -> None:
    bench, home = between_turns()
    bench.budget(classes={CRITICAL: Quota(floor_rollouts=2)})
    (sent,) = bench.tick()
    assert sent.rollout_id == "s1" and sent.engine_id != home


def test_a_first_turn_does_not_wait() -> None:
    bench, home = between_turns()
    bench.submit(spec("t0", token_bytes=prompt("s0", CONTEXT) + prompt("else", 64), session_id="t", turn=0))
    sent = bench.tick()
    assert [(one.rollout_id, one.engine_id != home) for one in sent] == [("t0", True)]


def test_turns_that_wait_do_not_hold_up_one_whose_context_is_nowhere() -> None:
    count = 40
    bench = Bench(engine("home", count), settings=config(policy={"cold_start_batch_size": 64}))
    bench.run(*[spec(f"s{n}-0", CONTEXT, session_id=f"s{n}", turn=0) for n in range(count)])
    for n in range(count):
        bench.finish(f"s{n}-0")
    bench.run(*[spec(f"taker{n}") for n in range(count)])
    bench.do(JoinEngine(engine("other", 8)))
    for n in range(count):
        context = prompt(f"s{n}-0", CONTEXT) + prompt(f"answer{n}", 64)
        bench.submit(spec(f"s{n}-1", token_bytes=context, session_id=f"s{n}", turn=1))
    bench.submit(spec("lone-1", 512, session_id="lone", turn=1))
    assert [one.rollout_id for one in bench.pass_time(2.0, 0.25)] == ["lone-1"]
    bench.finish("taker0")
    (sent,) = bench.tick()
    assert sent.engine_id == "home" and sent.rollout_id != "lone-1"


def test_an_engine_that_can_never_take_the_turn_is_not_waited_for() -> None:
    bench = Bench(engine("home", 1, kv_capacity_tokens=400))
    bench.run(spec("s0", CONTEXT, session_id="s", turn=0))
    bench.finish("s0")
    bench.do(JoinEngine(engine("other", 1)))
    bench.submit(spec("s1", token_bytes=prompt("s0", CONTEXT) + prompt("answer", 200), session_id="s", turn=1))
    assert [one.rollout_id for one in bench.pass_time(3.0)] == ["s1"]


def test_a_turn_does_not_wait_at_home_for_a_part_of_a_page_of_it() -> None:
    """The index counts pages of 16 tokens, the engine's have 64: what both have in common ends inside one of the engine's."""
    bench = Bench(engine("home", 1, page_tokens=64))
    bench.run(spec("s0", 1280, session_id="s", turn=0))
    bench.finish("s0")
    context = prompt("s0", 1280)[: 1075 * TOKEN_BYTES] + prompt("answer", 64)
    bench.submit(spec("s1", token_bytes=context, session_id="s", turn=1))
    assert [one.rollout_id for one in bench.tick()] == ["s1"]


@pytest.mark.parametrize("limit", [{"deadline_seconds": 10.0}, {"queue_ttl_seconds": 10.0}])
def test_a_turn_does_not_wait_past_what_it_was_given(limit: dict[str, float]) -> None:
    bench, home = between_turns(**limit)
    (sent,) = bench.tick()
    assert sent.rollout_id == "s1" and sent.engine_id != home


def test_a_turn_waits_while_its_deadline_is_far() -> None:
    bench, _ = between_turns(deadline_seconds=1000.0)
    assert not bench.pass_time(PATIENCE_SECONDS - 2.0)


def test_a_turn_does_not_wait_for_an_engine_whose_policy_version_may_not_write_it() -> None:
    bench = Bench(*engines(3, 1))
    sent = bench.run(*[spec(f"first{n}", CONTEXT, session_id=f"s{n}", turn=0) for n in range(3)])
    first, session_id = next((one.rollout_id, f"s{one.rollout_id[-1]}") for one in sent if one.engine_id == "e2")
    bench.finish(first)
    bench.run(spec("taker"))
    for one in sent:
        if one.rollout_id != first:
            bench.finish(one.rollout_id)
    bench.publish(1, engines_at_once=1, mode=UpdateMode.DRAIN)
    while "e0" in bench.controls:
        bench.answer("e0")
    assert bench.engine("e2").is_open(bench.now), "its turn is the last"
    context = prompt(first, CONTEXT) + prompt("answer", 64)
    bench.submit(spec("second", token_bytes=context, session_id=session_id, turn=1, min_version=1))
    assert [(one.rollout_id, one.engine_id) for one in bench.tick()] == [("second", "e0")]


@pytest.mark.parametrize("other", [Gate.ENGINE_KV, Gate.PRESSURE, Gate.NO_ENGINE])
def test_waiting_for_another_engine_says_more_than_what_that_lacks(other: Gate) -> None:
    """Else an engine would be kept for a turn that does not want it (`gates.note_blocked`)."""
    assert choosing._sum_up(Gate.HELD_FOR_PREFIX, other) is Gate.HELD_FOR_PREFIX
    assert choosing._sum_up(other, Gate.HELD_FOR_PREFIX) is Gate.HELD_FOR_PREFIX
    assert choosing._sum_up(Gate.HELD_FOR_PREFIX, Gate.OPEN) is Gate.OPEN
    assert choosing._sum_up(Gate.OPEN, Gate.HELD_FOR_PREFIX) is Gate.OPEN


def test_a_turn_goes_home_though_other_engines_that_have_its_context_may_not_take_it() -> None:
    """Of many engines only some of those with its context are looked at, here two with another label."""
    labels = [{"gpu": "a"}] * 2 + [{"gpu": "b"}] * 22
    facts = [engine(f"e{number}", 4, labels=one) for number, one in enumerate(labels)]
    bench = Bench(*facts, settings=config(queue={"reserved_short_slots": 0}))
    mine = {"engine_labels": {"gpu": "b"}}
    bench.run(spec("s0", CONTEXT, session_id="s", turn=0, **mine))
    home = bench.live["s0"].engine_id
    bench.finish("s0")
    world = bench.core._world
    ((space, _), *_) = bench.its_run().lineage("policy").lookups
    for other in ("e0", "e1"):
        world.index.insert(space, prompt("s0", CONTEXT), world.engines[other].cache_key)
    for number in range(100):
        bench.run(spec(f"f{number}", **mine))
        if bench.live[f"f{number}"].engine_id == home:
            break  # so that home is none of the emptiest
        bench.finish(f"f{number}")
    bench.submit(spec("s1", token_bytes=prompt("s0", CONTEXT) + prompt("answer", 64), session_id="s", turn=1, **mine))
    assert [(one.rollout_id, one.engine_id) for one in bench.tick()] == [("s1", home)]
