"""Later turns of a session wait for the engine that has their context."""

from __future__ import annotations

from rolloutd.scheduler.events import DrainEngine
from rolloutd.scheduler.spec import Quota
from tests.scheduler.kit import CRITICAL, Bench, config, engines, prompt, spec

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
