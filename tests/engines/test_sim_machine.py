"""The simulated engine's machine in virtual time: time, tokens, load."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import expected_output
from tests.engines.sim_machine_kit import TAU, pool, prompt_of

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
