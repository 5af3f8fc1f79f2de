"""Choosing an engine: spread, ties, prefixes against balance, what no engine can take."""

from __future__ import annotations

from collections import Counter

import pytest

from rolloutd.scheduler.actions import Dispatch
from rolloutd.scheduler.events import DrainEngine, EngineReadiness, LoseEngine, Reconfigure
from rolloutd.scheduler.scoring import TERMS
from rolloutd.scheduler.spec import Quota, Weights
from rolloutd.scheduler.states import Code, FaultKind, Gate, Outcome, TaskType
from rolloutd.scheduler.views import DecisionKind
from tests.scheduler.kit import BACKGROUND, RUN, Bench, config, engine, engines, ids, prompt, spec, specs

BIG_BATCHES = config(policy={"cold_start_batch_size": 64}, queue={"max_batch_size": 64})


def per_engine(started: list[Dispatch]) -> Counter[str]:
    return Counter(one.engine_id for one in started)


def test_100_unique_prompts_spread_evenly_and_the_load_is_counted_while_they_run() -> None:
    bench = Bench(*engines(2, 64))
    bench.submit(*specs("r", 100, tokens=40))
    counted = per_engine(bench.tick())
    assert sum(counted.values()) == 100 and all(40 <= count <= 60 for count in counted.values()), counted
    for view in bench.core.engine_views():
        assert view.in_flight == counted[view.engine_id] > 0 and view.kv_claimed_tokens > 0


@pytest.mark.parametrize("only", [term.weight for term in TERMS] + ["none"])
def test_load_is_counted_whatever_the_score_looks_at(only: str) -> None:
    bench = Bench(*engines(4, 32))
    weights = {term.weight: 0.0 for term in TERMS}
    if only != "none":
        weights[only] = 1.0
    bench.configure(weights=Weights(**weights))
    bench.submit(*specs("r", 80, tokens=40))
    counted = per_engine(bench.tick())
    assert {view.engine_id: view.in_flight for view in bench.core.engine_views()} == counted
    assert min(counted.values()) >= (20 if only == "cost" else 8), counted
    for rollout_id in list(bench.live):
        bench.finish(rollout_id)
    bench.quiet()


def test_64_at_one_tick_over_8_engines_go_8_to_each() -> None:
    for settings in (BIG_BATCHES, config()):
        bench = Bench(*engines(8, 32), settings=settings)
        bench.submit(*specs("r", 64))
        counted = per_engine(bench.tick())
        assert len(counted) == 8 and all(7 <= count <= 9 for count in counted.values()), counted


def test_one_at_a_time_on_4_idle_engines_uses_each_of_them() -> None:
    bench = Bench(*engines(4, 8))
    counted: Counter[str] = Counter()
    for index in range(200):
        (one,) = bench.run(spec(f"r{index}"))
        counted[one.engine_id] += 1
        bench.finish(one.rollout_id)
        bench.acknowledge(one.rollout_id)
    assert len(counted) == 4 and all(30 <= count <= 70 for count in counted.values()), counted


def test_load_counts_from_the_dispatch_until_the_end() -> None:
    bench = Bench(*engines(2, 64, kv_capacity_tokens=1 << 22, context_tokens=1 << 16))
    counted: Counter[str] = Counter()
    for index in range(50):  # 32k tokens in, one out, and no first token for a long time
        bench.submit(spec(f"r{index}", 32_000, max_new_tokens=1))
        counted += per_engine(bench.tick(0.01))
    assert all(20 <= count <= 30 for count in counted.values()), counted
    before = bench.engine("e0").slots_used
    for rollout_id in bench.running_on("e0"):
        bench.write(rollout_id, 1)
    assert bench.engine("e0").slots_used == before, "the first token ends nothing"
    for rollout_id in list(bench.live):
        bench.finish(rollout_id, 1)
    bench.quiet()


def test_all_idle_engines_and_zero_everything_still_decide() -> None:
    zero = engine("e0", kv_capacity_tokens=0, context_tokens=0, vocabulary_size=0)
    bench = Bench(zero, settings=config(queue={"aging_seconds": 0.0}))
    bench.configure(weights=Weights(prefix=0.0, critical=0.0, waiting=0.0, diversity=0.0, cost=0.0))
    bench.submit(spec("a", 1), spec("p", 1, task_type=TaskType.REPLAY))
    assert len(bench.tick()) == 2
    told = bench.core.explain(RUN, "a")
    assert told is not None
    for candidate in told[0][0].candidates:
        assert all(0.0 <= value <= 1.0 for value in candidate.terms.values())


def test_no_engine_all_full_and_all_unhealthy_are_three_answers() -> None:
    nobody = Bench()
    nobody.submit(spec("a", queue_ttl_seconds=5.0))
    nobody.pass_time(6.0)
    assert nobody.outcome("a") is Outcome.NO_ENGINE

    full = Bench(engine(slots=1))
    full.run(spec("first"))
    full.submit(spec("a", queue_ttl_seconds=5.0))
    full.tick()
    assert full.gates()[Gate.ENGINE_SLOTS] and Gate.NO_ENGINE not in full.gates()
    full.pass_time(6.0)
    assert full.outcome("a") is Outcome.QUEUE_TIMEOUT

    broken = Bench(*engines(2))
    for name in ("e0", "e1"):
        broken.do(LoseEngine(name, "connection refused"))
    broken.submit(spec("a", queue_ttl_seconds=5.0))
    broken.tick()
    assert broken.gates()[Gate.NO_ENGINE]
    broken.pass_time(6.0)
    assert broken.outcome("a") is Outcome.NO_ENGINE
    for bench in (nobody, full, broken):
        error = bench.result("a").error
        assert error is not None and error.code is Code.UNAVAILABLE and error.retry_after_seconds > 0.0
        assert error.reason == bench.outcome("a").name


@pytest.mark.parametrize("event", [DrainEngine("e0"), LoseEngine("e0", "gone"), EngineReadiness("e0", False)])
def test_nothing_goes_to_an_engine_that_drains_is_lost_or_not_ready(event: object) -> None:
    bench = Bench(*engines(2, 4))
    bench.do(event)  # type: ignore[arg-type]
    bench.submit(*specs("r", 8))
    assert per_engine(bench.tick()) == {"e1": 4}


def test_slots_are_never_overbooked() -> None:
    bench = Bench(*engines(3, 5))
    bench.submit(*specs("r", 100))
    assert per_engine(bench.tick()) == {"e0": 5, "e1": 5, "e2": 5}
    assert bench.gates()[Gate.ENGINE_SLOTS]


def test_an_aborted_attempt_keeps_its_slot_until_the_engine_let_go() -> None:
    bench = Bench(engine(slots=1))
    bench.run(spec("a"))
    bench.cancel("a")
    bench.submit(spec("b"))
    assert not bench.pass_time(5.0)
    bench.stopped("a")
    assert [one.rollout_id for one in bench.tick()] == ["b"]


# memory


def test_an_engines_memory_is_not_overbooked_and_pressure_holds_new_sessions() -> None:
    bench = Bench(engine(slots=32, kv_capacity_tokens=1000), settings=config(budget={"headroom_tokens": 16}))
    bench.submit(*specs("r", 20, tokens=64))  # 80 each
    assert len(bench.tick()) == 11 and bench.gates()[Gate.PRESSURE]
    bench.submit(*[spec(f"turn{index}", 64, turn=1) for index in range(3)])
    assert len(bench.tick()) == 1, "continuations may use what is above the watermark, to the last page"
    assert bench.engine("e0").kv_claimed_tokens == 960


@pytest.mark.parametrize(("watermark", "holds"), [(0.5, True), (0.9, True), (1.0, False)])
def test_a_watermark_of_one_holds_no_new_session(watermark: float, holds: bool) -> None:
    """What a lower one held is dispatched as soon as that is in force."""
    full = engine(slots=128, kv_capacity_tokens=10_000, page_tokens=1)
    bench = Bench(full, settings=config(budget={"kv_watermark": watermark}))
    bench.submit(*specs("new", 120, tokens=80, max_new_tokens=8))  # 88 each
    first = len(bench.tick())
    assert first < 120 and bool(bench.gates().get(Gate.PRESSURE)) is holds
    assert not holds or first == int(watermark * 10_000 / 88)
    bench.do(Reconfigure(config(budget={"kv_watermark": 1.0})))
    assert bool(bench.tick()) is holds


def test_an_empty_engine_takes_what_passed_admission() -> None:
    bench = Bench(engine(kv_capacity_tokens=1000))
    bench.submit(spec("a", 900, max_new_tokens=100))
    assert len(bench.tick()) == 1


def test_a_rollout_too_large_for_any_gap_gets_an_engine_kept_free() -> None:
    bench = Bench(engine("e0", 8, kv_capacity_tokens=1000), engine("e1", 8, kv_capacity_tokens=1000))
    bench.run(*specs("r", 8, tokens=184))  # 200 each, 4 on each engine
    bench.submit(spec("large", 800, max_new_tokens=100, deadline_seconds=500.0))
    for index in range(60):
        bench.submit(spec(f"s{index}", 184))
        bench.tick(1.0)
        if "large" in bench.live:
            break
        bench.finish(next(name for name in bench.live))
    assert "large" in bench.live and index < 40
    assert sum(name.startswith("s") for name in bench.live) >= 1, "only one engine is kept free"


def test_a_reservation_of_a_run_that_may_not_start_keeps_nobody_else_out() -> None:
    from rolloutd.scheduler.events import PauseRun

    bench = Bench(engine("e0", 8, kv_capacity_tokens=1000))
    bench.run(*specs("r", 2, tokens=350, max_new_tokens=64))
    bench.submit(spec("large", 800, max_new_tokens=100, deadline_seconds=500.0))
    bench.pass_time(15.0)
    assert bench.engine("e0").reserved_for is not None
    bench.do(PauseRun(RUN))
    bench.submit(spec("other"), run="other")
    bench.pass_time(2.0)
    assert "other" in bench.live


def test_a_reservation_gives_way_to_a_floor_of_its_run() -> None:
    bench = Bench(engine("e0", 8, kv_capacity_tokens=1000))
    bench.run(*specs("r", 2, tokens=350, max_new_tokens=64))
    bench.submit(spec("large", 800, max_new_tokens=100, deadline_seconds=500.0))
    bench.pass_time(15.0)
    bench.submit(spec("small"), spec("owed", rollout_class=BACKGROUND))
    assert not bench.pass_time(2.0), "kept for the large one"
    bench.budget(classes={BACKGROUND: Quota(floor_rollouts=1)})
    assert [one.rollout_id for one in bench.tick()] == ["owed"]


def test_a_reservation_moves_when_its_engine_is_lost() -> None:
    bench = Bench(engine("e0", 8, kv_capacity_tokens=1000), engine("e1", 8, kv_capacity_tokens=1000))
    bench.run(*specs("r", 4, tokens=384, max_new_tokens=64))
    bench.submit(spec("large", 800, max_new_tokens=100, deadline_seconds=500.0))
    bench.pass_time(15.0)
    (kept,) = [name for name in ("e0", "e1") if bench.engine(name).reserved_for is not None]
    (other,) = {"e0", "e1"} - {kept}
    bench.do(LoseEngine(kept, "gone"))
    bench.pass_time(2.0)
    assert bench.engine(other).reserved_for is not None


# prefixes against balance


def test_a_prefix_draws_its_rollout_and_a_common_prefix_draws_nobody() -> None:
    bench = Bench(*engines(4, 16))
    (one,) = bench.run(spec("first", token_bytes=prompt("stem", 64)))
    bench.finish("first")
    for index in range(10):
        bench.submit(spec(f"r{index}", token_bytes=prompt("stem", 64) + ids([index + 1] * 8)))
        (other,) = bench.tick(0.5)
        assert other.engine_id == one.engine_id
        bench.finish(other.rollout_id)
    everywhere: set[str] = set()
    for index in range(4):  # now every engine has it
        bench.do(EngineReadiness(one.engine_id, index % 2 == 0))
    for name in ("e0", "e1", "e2", "e3"):
        for other_name in ("e0", "e1", "e2", "e3"):
            bench.do(EngineReadiness(other_name, other_name == name))
        bench.run(spec(f"on-{name}", token_bytes=prompt("stem", 64)))
        bench.finish(f"on-{name}")
    for name in ("e0", "e1", "e2", "e3"):
        bench.do(EngineReadiness(name, True))
    for index in range(40):
        bench.submit(spec(f"c{index}", token_bytes=prompt("stem", 64)))
        (other,) = bench.tick(0.5)
        everywhere.add(other.engine_id)
        bench.finish(other.rollout_id)
    assert len(everywhere) == 4


def test_a_prefix_is_not_worth_an_engine_that_is_full() -> None:
    bench = Bench(engine("e0", 2), engine("e1", 2))
    (one,) = bench.run(spec("first", token_bytes=prompt("stem", 64)))
    bench.run(*[spec(f"r{index}", token_bytes=prompt("stem", 64)) for index in range(3)])
    assert len(bench.live) == 4 and bench.running_on("e0") and bench.running_on("e1")
    assert one.rollout_id in bench.live


def test_a_prefix_in_another_pool_or_of_another_run_is_no_hit() -> None:
    bench = Bench(engine("p0", 8), engine("r0", 8, pool="reward"))
    bench.run(spec("first", token_bytes=prompt("stem", 64)))
    bench.finish("first")
    bench.submit(spec("w", pool="reward", token_bytes=prompt("stem", 64), task_type=TaskType.REWARD))
    (one,) = bench.tick()
    assert one.engine_id == "r0"
    bench.finish("w", 2)
    assert bench.result("w").predicted_cached_tokens == 0
    bench.submit(spec("x", token_bytes=prompt("stem", 64)), run="other")
    bench.tick()
    assert bench.its_run("other").rollouts["x"].predicted_cached_tokens == 0


# decisions


def test_a_decision_names_candidates_terms_and_the_winner() -> None:
    bench = Bench(*engines(3, 4))
    (one,) = bench.run(spec("a"))
    told = bench.core.explain(RUN, "a")
    assert told is not None
    (decision,) = told[0]
    assert decision.kind is DecisionKind.DISPATCHED and decision.engine_id == one.engine_id
    assert decision.batch_id == one.batch_id > 0
    assert {candidate.engine_id for candidate in decision.candidates} == {"e0", "e1", "e2"}
    assert all(set(candidate.terms) == {term.name for term in TERMS} for candidate in decision.candidates)
    best = max(candidate.score for candidate in decision.candidates)
    assert next(c.score for c in decision.candidates if c.engine_id == one.engine_id) == best


def test_a_batch_has_one_id_and_is_bounded_and_the_next_pass_goes_on() -> None:
    bench = Bench(engine(slots=64), settings=config(queue={"max_batch_size": 10}, policy={"cold_start_batch_size": 4}))
    bench.submit(*specs("r", 30))
    batches = Counter(one.batch_id for one in bench.tick())
    assert sum(batches.values()) == 30 and max(batches.values()) == 4 and sorted(batches) == list(range(1, 9))
    assert bench.gates()[Gate.BATCH_LIMIT]


def test_what_is_sent_is_what_was_asked_for() -> None:
    bench = Bench(engine())
    sampling = {"temperature": 0.7, "top_p": 0.9}
    bench.submit(
        spec("a", sampling=sampling, logprobs=True, top_logprobs=3, seeds=(11,), engine_params={"lora_path": "x"}),
        spec("p", task_type=TaskType.REPLAY, logprobs=True),
    )
    sent = {one.rollout_id: one for one in bench.tick()}
    a, p = sent["a"], sent["p"]
    assert a.sampling == {**sampling, "sampling_seed": 11} and (a.logprobs, a.top_logprobs) == (True, 3)
    assert a.engine_params == {"lora_path": "x"} and a.prompt_logprobs_from is None and a.max_new_tokens == 16
    assert p.prompt_logprobs_from == 0 and p.max_new_tokens == 0
    assert sampling == {"temperature": 0.7, "top_p": 0.9}, "the caller's own mapping is not touched"


def test_every_gate_that_a_decision_can_name_is_reached_by_some_path() -> None:
    """A gate nobody can close is a word without a meaning; the other files close the rest."""
    from pathlib import Path

    import rolloutd.scheduler

    source = "\n".join(
        path.read_text() for path in Path(rolloutd.scheduler.__path__[0]).glob("*.py") if path.name != "states.py"
    )
    unused = [gate.name for gate in Gate if gate is not Gate.OPEN and f"Gate.{gate.name}" not in source]
    assert not unused and FaultKind.BUSY
