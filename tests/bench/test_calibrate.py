"""Calibration: curves are found again, from points and from an engine with a clock of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rolloutd.bench.calibrate import fit, main, measure, table_of
from rolloutd.bench.simulated_pool import read_fitted
from rolloutd.engines.base import AttemptRequest, EngineInfo, Progress, Slice
from rolloutd.engines.sim.timing import TimingModel

INFO = EngineInfo("0", "toy", "0.5.23", 16, 60_000, 16, 4_096, 4_090, 32_000, "default", True, 0)


class ToyEngine:
    """Decodes and prefills by a timing model, on a clock that only its own work moves."""

    def __init__(self, timing: TimingModel) -> None:
        self.now = 0.0
        self._timing = timing
        self._running: dict[str, tuple[AttemptRequest, Callable[[Progress], None], asyncio.Future[None]]] = {}
        self._written: dict[str, int] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def generate(self, request: AttemptRequest, on_progress: Callable[[Progress], None]) -> Slice:
        tokens = len(request.token_bytes) // 4
        self.now += tokens / self._timing.prefill_tokens_per_second
        done = asyncio.get_running_loop().create_future()
        self._running[request.attempt_id] = (request, on_progress, done)
        self._written[request.attempt_id] = 0
        if self._stepper is None:
            self._stepper = asyncio.create_task(self._step())
        await done
        return Slice(request.attempt_id, b"", "length")

    async def _step(self) -> None:
        await asyncio.sleep(0)  # all that were sent together have arrived
        while self._running:
            self.now += self._timing.decode_step_seconds(len(self._running))
            for attempt_id, (request, on_progress, done) in list(self._running.items()):
                self._written[attempt_id] += 1
                written = self._written[attempt_id]
                if written % 8 == 1:
                    on_progress(Progress(attempt_id, written, 1, 0))
                if written == request.max_new_tokens:
                    del self._running[attempt_id]
                    done.set_result(None)
        self._stepper = None


def _measured(timing: TimingModel) -> list[tuple[int, float]]:
    return [(size, timing.decode_step_seconds(size)) for size in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(("curve", "base", "growth"), [("flat", 0.007, 0.000045), ("steep", 0.006, 0.35)])
def test_a_curve_is_found_again(curve: Any, base: float, growth: float) -> None:
    found = fit(_measured(TimingModel(curve, base_seconds=base, growth=growth)))
    assert found == (curve, pytest.approx(base), pytest.approx(growth), pytest.approx(0.0, abs=1e-9))


def test_a_falling_curve_is_level_and_one_point_is_none() -> None:
    assert fit([(1, 0.02), (8, 0.01)])[1:3] == (pytest.approx(0.015), 0.0)
    with pytest.raises(ValueError, match="two"):
        fit([(1, 0.01)])


@pytest.mark.parametrize("curve", ["flat", "steep"])
async def test_an_engine_is_measured_and_its_file_read_again(curve: Any, tmp_path: Path) -> None:
    timing = TimingModel(curve, prefill_tokens_per_second=12_000.0)
    engine = ToyEngine(timing)
    fitted = await measure(engine, INFO, tokens=128, clock=lambda: engine.now)  # type: ignore[arg-type]
    assert fitted.curve == curve
    assert [size for size, _ in fitted.measured] == [1, 2, 4, 8, 16]
    for size, seconds in fitted.measured:
        assert seconds == pytest.approx(timing.decode_step_seconds(size), rel=1e-6)
    assert fitted.prefill_tokens_per_second == pytest.approx(12_000.0, rel=1e-6)
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(asdict(fitted)), encoding="utf-8")
    again = read_fitted(path)
    assert again.timing.decode_step_seconds(5) == pytest.approx(timing.decode_step_seconds(5), rel=1e-6)
    sizes = (again.slots, again.kv_tokens, again.page_size_tokens, again.context_tokens)
    assert sizes == (INFO.max_running_rollouts, INFO.kv_capacity_tokens, INFO.page_size_tokens, INFO.context_tokens)
    assert len(table_of(fitted).rows) == 5


def test_an_engine_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["http://127.0.0.1:9", "--tokens", "2"]) == 1
    assert "--tokens" in capsys.readouterr().err
