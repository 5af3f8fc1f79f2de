"""The simulated engine's machine in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Model, Sampling, expected_output, verify

TAU = TimingModel().decode_step_seconds


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (salt * 7919 + i * 31) % 30_000 for i in range(length)]


@dataclass
class Pool:
    """A machine with its frames sorted by request; checks the machine after every step."""

    machine: SimMachine
    now: float = 0.0
    frames: dict[str, list[Frame]] = field(default_factory=dict)
    kv_peak: int = 0

    def submit(self, rid: str, prompt: list[int], **words: Any) -> None:
        namespace = words.pop("namespace", ("", ""))
        outer = {k: words.pop(k) for k in ("stream", "stream_interval", "logprob_start") if k in words}
        words.setdefault("ignore_eos", "end_at_tokens" not in words)
        self.machine.submit(self.now, SimRequest(rid, pack(prompt), Sampling(**words), namespace=namespace, **outer))

    def advance(self, now: float) -> list[Frame]:
        self.now = now
        frames = self.machine.advance(now)
        for frame in frames:
            self.frames.setdefault(frame.rid, []).append(frame)
        self.machine.check()
        load = self.machine.load(now)
        self.kv_peak = max(self.kv_peak, load.used_tokens)
        assert load.used_tokens <= load.capacity_tokens
        return frames

    def step(self) -> list[Frame] | None:
        event = self.machine.next_event_seconds()
        return None if event is None else self.advance(max(event, self.now))

    def run(self) -> None:
        while self.step() is not None:
            pass

    def tokens(self, rid: str) -> list[int]:
        return [token for frame in self.frames.get(rid, []) for token in frame.tokens]

    def logprobs(self, rid: str) -> list[float]:
        return [logprob for frame in self.frames.get(rid, []) for logprob in frame.logprobs]

    def last(self, rid: str) -> Frame:
        return self.frames[rid][-1]

    def reason(self, rid: str) -> dict[str, Any]:
        reason = self.last(rid).finish_reason
        assert reason is not None
        return reason


def pool(**words: Any) -> Pool:
    return Pool(SimMachine(MachineConfig(**words)))


# ---- time and tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("curve", "tau_8"), [("flat", 0.00736), ("steep", 0.006 * (1 + 0.35 * 8**0.5))])
def test_eight_sequences_take_a_prefill_and_steps_of_tau_8(curve: Any, tau_8: float) -> None:
    engine = pool(timing=TimingModel(curve))
    for i in range(8):
        engine.submit(f"r{i}", prompt_of(240, i), max_new_tokens=64)
    engine.run()
    expected = 8 * 240 / 20_000 + 63 * tau_8
    for i in range(8):
        assert engine.last(f"r{i}").time_seconds == pytest.approx(expected, abs=1e-6)
        assert engine.tokens(f"r{i}") == expected_output(prompt_of(240, i), 64, ignore_eos=True).tokens


def test_prefill_stalls_decode() -> None:
    engine = pool(stream_interval=1)
    engine.submit("a", prompt_of(16), max_new_tokens=100)
    engine.advance(0.1)
    engine.submit("b", prompt_of(10_000, 1), max_new_tokens=1)
    engine.run()
    times = [frame.time_seconds for frame in engine.frames["a"]]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert max(gaps) == pytest.approx(0.5 + TAU(1), abs=1e-6)
    assert sorted(gaps)[-2] == pytest.approx(TAU(1), abs=1e-6)


def test_a_short_prefill_is_no_faster_than_a_decode_step() -> None:
    engine = pool()
    engine.submit("a", prompt_of(2), max_new_tokens=1)
    engine.run()
    assert engine.last("a").time_seconds == pytest.approx(TAU(1))


def test_slowdown_stretches_time() -> None:
    engine = pool()
    engine.machine.set_slowdown(0.0, 10.0)
    engine.submit("a", prompt_of(20), max_new_tokens=11)
    engine.run()
    assert engine.last("a").time_seconds == pytest.approx(11 * 10 * TAU(1))


def test_first_token_at_once_then_every_interval_and_non_streams_every_fifty() -> None:
    engine = pool(stream_interval=32)
    engine.submit("s", prompt_of(20), max_new_tokens=100)
    engine.submit("own", prompt_of(20, 1), max_new_tokens=100, stream_interval=10)
    engine.submit("plain", prompt_of(20, 2), max_new_tokens=120, stream=False)
    engine.run()
    assert [f.completion_tokens for f in engine.frames["s"]] == [1, 33, 65, 97, 100]
    assert [f.completion_tokens for f in engine.frames["own"]] == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert [f.completion_tokens for f in engine.frames["plain"]] == [50, 100, 120]


def test_advance_in_any_slices_gives_the_same_frames() -> None:
    def run(slice_seconds: float | None) -> list[tuple[str, float, tuple[int, ...]]]:
        engine = pool(slots=3, kv_tokens=2_048)
        said = []
        for i in range(9):
            engine.submit(f"r{i}", prompt_of(100 + i, i % 3), max_new_tokens=50 + i)
        while engine.machine.next_event_seconds() is not None:
            frames = engine.step() if slice_seconds is None else engine.advance(engine.now + slice_seconds)
            said += [(f.rid, f.time_seconds, tuple(f.tokens)) for f in frames or []]
        return said

    assert run(None) == run(0.003) == run(5.0)


def test_lengths_only_gives_the_same_times_without_tokens() -> None:
    def run(write: bool) -> list[tuple[str, float, int, Any]]:
        engine = pool(slots=4, kv_tokens=4_096, write_tokens=write)
        for i in range(12):
            engine.submit(f"r{i}", prompt_of(100, i), max_new_tokens=300, end_at_tokens=150 + 20 * i)
        engine.run()
        return [
            (rid, f.time_seconds, f.completion_tokens, f.finish_reason)
            for rid, frames in sorted(engine.frames.items())
            for f in frames
        ]

    assert run(True) == run(False)


def test_time_does_not_go_backwards_and_live_rids_are_unique() -> None:
    engine = pool()
    engine.submit("a", prompt_of(5))
    with pytest.raises(ValueError, match="duplicate"):
        engine.submit("a", prompt_of(5))
    engine.advance(1.0)
    with pytest.raises(ValueError, match="backwards"):
        engine.machine.advance(0.5)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.submit("b", [32_000])


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


# ---- load -----------------------------------------------------------------------------------------------------------


def test_load_counts_pages_of_running_work_and_leaves_the_cache_out() -> None:
    engine = pool()
    engine.submit("a", prompt_of(100), max_new_tokens=64)
    engine.advance(TAU(1) * 1.5)
    assert engine.machine.load(engine.now).used_tokens == 112
    engine.advance(TAU(1) * 12.5)
    assert engine.machine.load(engine.now).used_tokens == 112  # 100 + 11 tokens, one more in the step under way
    engine.advance(TAU(1) * 13.5)
    assert engine.machine.load(engine.now).used_tokens == 128
    engine.run()
    load = engine.machine.load(engine.now)
    assert load.used_tokens == 0 and load.generated_tokens_total == 64 and load.prefilled_tokens_total == 100
    assert load.generated_tokens_per_second == pytest.approx(1 / TAU(1), rel=0.1)
    assert load.prefill_busy_seconds_total == pytest.approx(TAU(1))


@pytest.mark.parametrize(
    "words", [{"slots": 0}, {"kv_tokens": 16}, {"page_size_tokens": 0}, {"schedule_policy": "lof"}, {"max_queued": -1}]
)
def test_a_senseless_size_is_refused_by_name(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(words))):
        MachineConfig(**words)
