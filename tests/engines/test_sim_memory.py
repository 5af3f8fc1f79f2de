"""The simulated engine's machine in virtual time: prefix cache, KV memory, slots."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutd.engines.sim.tokens import Model, expected_output
from tests.engines.sim_machine_kit import pool, prompt_of

# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_siblings_of_one_prefill_batch_do_not_share_their_prefix() -> None:
    engine = pool()
    for i in range(4):
        engine.submit(f"r{i}", prompt_of(240), max_new_tokens=8)
    engine.run()
    assert [engine.last(f"r{i}").cached_tokens for i in range(4)] == [0, 0, 0, 0]
    assert engine.machine.load(engine.now).prefilled_tokens_total == 960


def test_staggered_siblings_share_all_whole_pages_but_one_token() -> None:
    engine = pool()
    engine.submit("leader", prompt_of(240), max_new_tokens=8)
    while "leader" not in engine.frames:
        engine.step()
    for i in range(3):
        engine.submit(f"r{i}", prompt_of(240), max_new_tokens=8)
    engine.run()
    assert [engine.last(f"r{i}").cached_tokens for i in range(3)] == [224, 224, 224]
    assert engine.tokens("r0") == engine.tokens("leader")


def test_siblings_of_a_batch_hold_the_prefix_once_after_prefill() -> None:
    engine = pool()
    for i in range(4):
        engine.submit(f"r{i}", prompt_of(320), max_new_tokens=40)
    engine.advance(4 * 320 / 20_000 - 0.001)
    assert engine.machine.load(engine.now).used_tokens == 4 * 320
    engine.advance(4 * 320 / 20_000 + 0.001)
    assert engine.machine.load(engine.now).used_tokens == 320 + 4 * 16


def test_lpm_runs_the_longest_prefix_first_and_one_of_equal_newcomers_before_the_rest() -> None:
    engine = pool(schedule_policy="lpm", max_prefill_tokens=256, slots=8)
    engine.submit("warm", prompt_of(128, 9), max_new_tokens=1)
    engine.run()
    for i in range(3):
        engine.submit(f"r{i}", prompt_of(240), max_new_tokens=1)
    engine.submit("hit", prompt_of(128, 9) + prompt_of(100, 8), max_new_tokens=1)
    engine.run()
    assert engine.last("hit").time_seconds < engine.last("r0").time_seconds
    assert [engine.last(f"r{i}").cached_tokens for i in range(3)] == [0, 224, 224]


def test_a_follow_up_turn_hits_prompt_and_output_of_the_turn_before() -> None:
    engine = pool()
    engine.submit("a", prompt_of(100), max_new_tokens=61)
    engine.run()
    engine.submit("b", prompt_of(100) + engine.tokens("a") + prompt_of(20, 5), max_new_tokens=1)
    engine.run()
    assert engine.last("b").cached_tokens == 160  # 160 of 161: the last token has no KV


def test_cache_namespaces_do_not_mix() -> None:
    engine = pool()
    for rid, namespace in (("a", ("", "")), ("b", ("1", "")), ("c", ("", "1")), ("d", ("1", ""))):
        engine.submit(rid, prompt_of(160), max_new_tokens=1, namespace=namespace)
        engine.run()
    assert [engine.last(rid).cached_tokens for rid in "abcd"] == [0, 0, 0, 144]


def test_prompt_logprobs_cap_prefix_reuse() -> None:
    engine = pool()
    for rid, start in (("a", -1), ("b", 0), ("c", 100), ("d", -1)):
        engine.submit(rid, prompt_of(160), max_new_tokens=0, logprob_start=start)
        engine.run()
    assert [engine.last(rid).cached_tokens for rid in "abcd"] == [0, 0, 96, 144]


def test_replay_generates_nothing_and_ends_by_length() -> None:
    engine = pool()
    engine.submit("a", prompt_of(160), max_new_tokens=0, logprob_start=0)
    engine.run()
    assert engine.tokens("a") == [] and engine.reason("a") == {"type": "length", "length": 0}
    assert engine.machine.load(engine.now).used_tokens == 0


def test_flush_is_refused_while_busy_and_empties_the_cache() -> None:
    engine = pool()
    engine.submit("a", prompt_of(160), max_new_tokens=50)
    assert not engine.machine.flush_cache(engine.now)
    engine.run()
    assert engine.machine.flush_cache(engine.now)
    engine.submit("b", prompt_of(160), max_new_tokens=1)
    engine.run()
    assert engine.last("b").cached_tokens == 0


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_retraction_goes_to_the_tail_and_loses_no_token() -> None:
    """Requests that come one by one are admitted on the expectation that each uses a tenth of its limit; all use more."""
    engine = pool(slots=16, kv_tokens=8_192)
    rids = [f"r{i:02}" for i in range(12)]
    for i, rid in enumerate(rids):
        engine.submit(rid, prompt_of(64, i), max_new_tokens=8_000, end_at_tokens=64 + 2_000)
        engine.advance(engine.now + (5.0 if i == 0 else 0.1))
    running, waiting = engine.machine.live_rids()
    assert running and waiting
    while not engine.machine.load(engine.now).retracted_total:
        engine.step()
    assert engine.machine.live_rids()[1] == [*waiting, running[-1]]  # the one with the shortest output, behind all
    engine.run()
    for i, rid in enumerate(rids):
        expected = expected_output(prompt_of(64, i), 8_000, end_at_tokens=2_064)
        assert (engine.tokens(rid), engine.logprobs(rid)) == (expected.tokens, expected.logprobs)
    assert engine.last(running[-1]).retractions >= 1
    assert engine.kv_peak > 0.95 * 8_192
    assert engine.machine.load(engine.now).used_tokens == 0


def test_the_last_request_may_fill_the_whole_memory() -> None:
    engine = pool(kv_tokens=1_024)
    engine.submit("a", prompt_of(200), max_new_tokens=5_000)
    engine.run()
    assert engine.reason("a") == {"type": "length", "length": 1_024 - 1 - 200 - 1}
    assert engine.tokens("a") == expected_output(prompt_of(200), 822, ignore_eos=True).tokens


def test_slots_bound_what_runs() -> None:
    engine = pool(slots=2)
    for i in range(5):
        engine.submit(f"r{i}", prompt_of(20, i), max_new_tokens=30)
    engine.advance(0.05)
    load = engine.machine.load(engine.now)
    assert (load.running, load.waiting) == (2, 3)
    engine.run()
    ends = [engine.last(f"r{i}").time_seconds for i in range(5)]
    assert ends == sorted(ends) and ends[1] < ends[2] and ends[3] < ends[4]


def test_prefill_batches_are_bounded_by_tokens_except_a_single_long_prompt() -> None:
    engine = pool(max_prefill_tokens=300)
    engine.submit("long", prompt_of(1_000), max_new_tokens=1)
    for i in range(3):
        engine.submit(f"r{i}", prompt_of(150, i + 1), max_new_tokens=1)
    engine.run()
    ends = [engine.last(rid).time_seconds for rid in ("long", "r0", "r1", "r2")]
    assert ends == pytest.approx([0.05, 0.065, 0.065, 0.0725])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["fcfs", "lpm"]), st.integers(1, 8), st.sampled_from([1, 4, 16]))
def test_random_schedules_keep_memory_bounded_and_every_token_right(
    seed: int, policy: Any, slots: int, page: int
) -> None:
    rng = random.Random(seed)
    model = Model(mean_output_tokens=60)
    engine = pool(
        slots=slots,
        kv_tokens=rng.randrange(256, 1_200),
        page_size_tokens=page,
        schedule_policy=policy,
        model=model,
        stream_interval=rng.choice([1, 7, 32]),
        max_prefill_tokens=rng.choice([64, 512, 16_384]),
    )
    requests: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for i in range(25):
        rid = f"r{i:02}"
        prompt = prompt_of(rng.choice([16, 40, 90]), rng.randrange(3)) + prompt_of(rng.randrange(1, 60), i)
        requests[rid] = (prompt, rng.randrange(0, 120))
        engine.submit(rid, prompt, max_new_tokens=requests[rid][1], ignore_eos=False)
        engine.advance(engine.now + rng.choice([0.0, 0.0, rng.random() * 0.3]))
        action = rng.random()
        if action < 0.15:
            victim = rng.choice(list(requests))
            aborted.add(victim)
            engine.machine.abort(engine.now, victim)
        elif action < 0.25:
            engine.machine.pause(engine.now, rng.choice(["retract", "in_place"]))
            engine.advance(engine.now + 0.05)
            engine.machine.resume(engine.now)
    engine.run()
    for rid, (prompt, max_new) in requests.items():
        expected = expected_output(prompt, max_new, model=model)
        if engine.reason(rid)["type"] == "abort":
            assert rid in aborted
            assert engine.tokens(rid) == expected.tokens[: len(engine.tokens(rid))]
        else:
            assert engine.tokens(rid) == expected.tokens
            assert engine.logprobs(rid) == expected.logprobs
            assert engine.reason(rid)["type"] == expected.finish.kind
    load = engine.machine.load(engine.now)
    assert load.used_tokens == 0 and load.finished_total == 25
    assert engine.machine.flush_cache(engine.now)
