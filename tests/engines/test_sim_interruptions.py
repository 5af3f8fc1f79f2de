"""The simulated engine's machine in virtual time: aborts, refusals, pauses, new weights."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.engines.sim.tokens import expected_output, verify
from tests.engines.sim_machine_kit import TAU, pool, prompt_of

# ---- abort ----------------------------------------------------------------------------------------------------------


def test_abort_matches_by_prefix() -> None:
    engine = pool(slots=2)
    for rid in ("job-1", "job-10", "job-2", "job-11"):
        engine.submit(rid, prompt_of(20, len(rid)), max_new_tokens=500)
    engine.advance(0.1)
    engine.machine.abort(engine.now, "")
    engine.machine.abort(engine.now, "job-1")
    engine.run()
    assert engine.reason("job-1")["message"] == "Aborted"
    assert engine.reason("job-10")["message"] == "Aborted"
    assert engine.reason("job-11") == {"type": "abort", "message": "Abort in waiting queue"}
    assert engine.reason("job-2") == {"type": "length", "length": 500}


def test_a_running_abort_runs_the_step_in_flight_and_caches_what_it_has() -> None:
    engine = pool()
    engine.submit("a", prompt_of(100), max_new_tokens=500)
    engine.advance(0.1)
    produced = 1 + int((0.1 - TAU(1)) / TAU(1))
    engine.machine.abort(engine.now, "a")
    engine.run()
    assert len(engine.tokens("a")) == produced + 1
    assert engine.tokens("a") == expected_output(prompt_of(100), produced + 1, ignore_eos=True).tokens
    engine.submit("b", prompt_of(100) + engine.tokens("a"), max_new_tokens=5)
    engine.run()
    assert engine.last("b").cached_tokens == (100 + produced) // 16 * 16
    whole = expected_output(prompt_of(100), produced + 6, ignore_eos=True).tokens
    assert engine.tokens("a") + engine.tokens("b") == whole


def test_an_abort_after_retraction_loses_what_was_not_sent() -> None:
    engine = pool(stream_interval=100)
    engine.submit("a", prompt_of(50), max_new_tokens=500)
    engine.submit("never", prompt_of(50, 1), max_new_tokens=500)
    engine.advance(0.5)
    engine.machine.pause(engine.now, "retract")
    engine.advance(0.6)
    engine.machine.abort(engine.now, "a")
    engine.advance(0.6)
    last = engine.last("a")
    assert last.queued and last.tokens == [] and last.completion_tokens == 1 == len(engine.tokens("a"))
    assert last.finish_reason == {"type": "abort", "message": "Abort in waiting queue"}


def test_an_over_long_prompt_ends_with_a_bogus_token() -> None:
    engine = pool(context_tokens=4_096)
    engine.submit("a", prompt_of(4_090), max_new_tokens=2)
    engine.submit("b", prompt_of(4_089), max_new_tokens=2)
    engine.run()
    assert engine.reason("a")["status_code"] == 400
    assert (engine.last("a").prompt_tokens, len(engine.tokens("a")), engine.logprobs("a")) == (1, 1, [])
    assert engine.reason("b") == {"type": "length", "length": 2}


def test_a_full_queue_refuses_with_503_and_so_does_a_retraction_into_it() -> None:
    engine = pool(slots=1, max_queued=1)
    engine.submit("a", prompt_of(20), max_new_tokens=100)
    engine.advance(0.05)
    engine.submit("b", prompt_of(20), max_new_tokens=1)
    engine.submit("c", prompt_of(20), max_new_tokens=1)
    engine.advance(0.05)
    assert engine.reason("c")["status_code"] == 503
    engine.machine.pause(engine.now, "retract")
    engine.advance(0.1)
    assert engine.reason("a")["status_code"] == 503 and engine.last("a").queued
    engine.machine.resume(engine.now)
    engine.run()
    assert engine.reason("b") == {"type": "length", "length": 1}


# ---- pause and weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_stops_the_engine_and_resume_loses_nothing(mode: Any) -> None:
    engine = pool(stream_interval=1)
    engine.submit("a", prompt_of(100), max_new_tokens=200)
    engine.advance(0.3)
    before = engine.machine.load(engine.now)
    engine.machine.pause(engine.now, mode)
    engine.advance(0.4)
    assert engine.machine.next_event_seconds() is None
    count = len(engine.tokens("a"))
    engine.advance(9.0)
    assert len(engine.tokens("a")) == count
    assert engine.machine.load(engine.now).running == before.running == 1  # frozen, as SGLang's page is
    assert engine.machine.flush_cache(engine.now) == (mode == "retract")
    engine.machine.resume(engine.now)
    engine.run()
    assert engine.tokens("a") == expected_output(prompt_of(100), 200, ignore_eos=True).tokens
    assert engine.last("a").retractions == (1 if mode == "retract" else 0)


def test_an_abort_in_an_in_place_pause_waits_for_resume() -> None:
    engine = pool(slots=1)
    engine.submit("run", prompt_of(100), max_new_tokens=200)
    engine.submit("wait", prompt_of(100, 1), max_new_tokens=200)
    engine.advance(0.3)
    engine.machine.pause(engine.now, "in_place")
    engine.advance(0.4)
    engine.machine.abort(engine.now, "run")
    engine.machine.abort(engine.now, "wait")
    engine.advance(1.0)
    assert engine.reason("wait")["type"] == "abort"
    assert engine.last("run").finish_reason is None
    engine.machine.resume(engine.now)
    engine.run()
    assert engine.reason("run")["type"] == "abort"


def test_a_weight_update_in_place_splits_the_spans_at_the_token_where_it_happened() -> None:
    engine = pool()
    engine.submit("a", prompt_of(100), max_new_tokens=200)
    engine.advance(0.3)
    engine.machine.pause(engine.now, "in_place")
    engine.advance(0.4)
    engine.machine.set_weight_version(engine.now, "2")
    engine.machine.resume(engine.now)
    engine.run()
    spans = engine.last("a").spans
    assert [version for version, _, _ in spans] == ["default", "2"]
    assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 200
    assert engine.last("a").weight_version == "2"
    words: dict[str, Any] = {"ignore_eos": True}
    assert verify(prompt_of(100), engine.tokens("a"), engine.logprobs("a"), spans=spans, **words) is None
    assert verify(prompt_of(100), engine.tokens("a"), **words) == spans[1][1]


def test_requests_that_waited_are_computed_under_the_new_weights() -> None:
    engine = pool(slots=1)
    engine.submit("a", prompt_of(20), max_new_tokens=50)
    engine.submit("b", prompt_of(20, 1), max_new_tokens=50)
    engine.advance(0.1)
    engine.machine.set_weight_version(engine.now, "2")
    engine.run()
    assert engine.last("b").spans == (("2", 0, 50),) and engine.last("b").prompt_version == "2"
    assert engine.tokens("b") == expected_output(prompt_of(20, 1), 50, weight_version="2", ignore_eos=True).tokens
