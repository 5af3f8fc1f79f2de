"""An engine that admits less than its slots: what waits in its queue comes back, and short work finds a place."""

from __future__ import annotations

from rolloutd.scheduler.events import EngineLoad, EngineReadiness, Reconfigure
from rolloutd.scheduler.states import TaskType
from tests.scheduler.kit import Bench, config, engine, engines, specs


def report(bench: Bench, running: int, waiting: int, prefilled: int = 1000, engine_id: str = "e0") -> None:
    bench.do(
        EngineLoad(
            engine_id=engine_id,
            running_rollouts=running,
            waiting_rollouts=waiting,
            kv_used_tokens=0,
            kv_capacity_tokens=1 << 16,
            generated_tokens_per_second=0.0,
            prefilled_tokens_total=prefilled,
            prefill_busy_seconds_total=0.0,
        )
    )


def overfull(bench: Bench, admitted: int, prefix: str = "r", count: int = 8) -> None:
    """Submit `count`; e0 admits some of what it got and reports the rest as waiting for longer than a prefill takes."""
    bench.submit(*specs(prefix, count, max_new_tokens=100))
    bench.tick()
    for rollout_id in bench.running_on("e0")[:admitted]:
        bench.write(rollout_id, 1)
    for _ in range(2):
        report(bench, admitted, len(bench.running_on("e0")) - admitted)
        bench.now += 1.0
    report(bench, admitted, len(bench.running_on("e0")) - admitted)


def test_what_an_engine_lets_wait_comes_back_and_does_not_return_there() -> None:
    bench = Bench(engine(slots=8))
    overfull(bench, admitted=3)
    assert len(bench.leaving()) == 5
    recalled = bench.stop_aborted()
    assert bench.tick() == [], "the engine is full at 3, whatever its slots"
    assert all(bench.view(rollout_id).preemptions == 0 for rollout_id in recalled)
    for rollout_id in bench.running_on("e0"):
        bench.finish(rollout_id, 100)
    assert len(bench.tick()) == 3
    for _ in range(5):
        for rollout_id in bench.running_on("e0"):
            bench.finish(rollout_id, 100)
        bench.tick()
    assert len(bench.ended) == 8 and all(bench.whole(rollout_id) for rollout_id in bench.ended)
    bench.quiet()


def test_switched_off_it_stays_where_it_waits() -> None:
    bench = Bench(engine(slots=8), settings=config(budget={"learn_limits": False}))
    overfull(bench, admitted=3)
    assert not bench.leaving() and len(bench.live) == 8


def test_switched_off_later_a_limit_is_gone_with_the_next_report() -> None:
    bench = Bench(engine(slots=8))
    overfull(bench, admitted=3)
    assert len(bench.stop_aborted()) == 5
    bench.do(Reconfigure(config(budget={"learn_limits": False})))
    assert bench.tick() == []
    report(bench, 3, 0)
    assert len(bench.tick()) == 5
    for _ in range(5):
        report(bench, 3, 5)
        bench.now += 1.0
    assert not bench.leaving()


def test_it_goes_to_an_engine_with_room() -> None:
    bench = Bench(*engines(2, 8))
    overfull(bench, admitted=1)
    recalled = set(bench.stop_aborted())
    assert len(recalled) == 3
    assert {one.engine_id for one in bench.tick()} == {"e1"}


def test_an_engine_that_prefills_is_only_busy() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(*specs("r", 8, max_new_tokens=100))
    bench.tick()
    for second in range(10):
        report(bench, 2, 6, prefilled=1000 * second)
        bench.now += 1.0
    assert not bench.leaving()


def test_a_paused_engine_is_not_full() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(*specs("r", 8, max_new_tokens=100))
    bench.tick()
    bench.do(EngineReadiness("e0", False))
    for _ in range(10):
        report(bench, 2, 6)
        bench.now += 1.0
    assert not bench.leaving()


def test_the_limit_rises_while_nothing_waits_and_more_slowly_after_it_was_too_early() -> None:
    bench = Bench(engine(slots=64))
    overfull(bench, admitted=3, count=8)
    bench.stop_aborted()
    tried = []
    for second in range(1, 16):
        bench.now += 1.0
        waiting = len(bench.running_on("e0")) - 3
        report(bench, 3, waiting)
        bench.stop_aborted()
        if bench.tick():
            tried.append(second)
    pauses = [later - earlier for earlier, later in zip(tried, tried[1:], strict=False)]
    assert len(tried) >= 3 and pauses == sorted(pauses) and pauses[-1] > pauses[0]


def test_short_work_passes_the_limit() -> None:
    bench = Bench(engine(slots=8))
    overfull(bench, admitted=3)
    bench.stop_aborted()
    bench.tick()
    bench.submit(*specs("q", 2, task_type=TaskType.REWARD, max_new_tokens=4))
    assert [one.rollout_id for one in bench.tick()] == ["q0", "q1"]


def test_the_first_short_rollout_takes_the_next_slot_and_one_is_kept_from_then_on() -> None:
    bench = Bench(engine(slots=8))
    assert len(bench.run(*specs("long", 12, max_new_tokens=3000))) == 8, (
        "nobody asked for short work: every slot is used"
    )
    assert bench.run(*specs("q", 1, task_type=TaskType.REWARD, max_new_tokens=4)) == []
    bench.finish("long0")
    assert [one.rollout_id for one in bench.tick()] == ["q0"]
    bench.finish("q0", 2)
    assert bench.tick() == [], "the slot is kept for the next short rollout"
    bench.submit(*specs("p", 1, task_type=TaskType.REWARD, max_new_tokens=4))
    assert [one.rollout_id for one in bench.tick()] == ["p0"]
