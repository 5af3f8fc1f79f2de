"""Later turns of a session wait for the engine that has their context."""

from __future__ import annotations

from rolloutd.scheduler.events import DrainEngine, JoinEngine
from rolloutd.scheduler.spec import Quota
from tests.scheduler.kit import CRITICAL, Bench, config, engine, engines, prompt, spec

CONTEXT = 256  # tokens of the first turn
PATIENCE_SECONDS = 20.0


def between_turns(patience_seconds: float = PATIENCE_SECONDS) -> tuple[Bench, str]:
    """The first turn is back, its engine's one slot was taken by somebody else, and the second turn has come. The other is free."""
    bench = Bench(*engines(2, 1), settings=config(queue={"session_patience_seconds": patience_seconds}))
    (first,) = bench.run(spec("s0", CONTEXT, session_id="s", turn=0))
    home = first.engine_id
    (other,) = bench.run(spec("other0"))
    bench.finish("s0")
    (taker,) = bench.run(spec("taker"))
    assert taker.engine_id == home != other.engine_id
    bench.finish("other0")
    bench.submit(spec("s1", token_bytes=prompt("s0", CONTEXT) + prompt("answer", 64), session_id="s", turn=1))
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
