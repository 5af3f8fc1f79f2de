"""Each fault of the faulty engine, seen by the production core: what it costs, and that everything still comes out right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.tokens import Model, expected_output
from rolloutd.scheduler.actions import Deliver, Finished
from rolloutd.scheduler.config import ExecutorSettings, SchedulerConfig
from rolloutd.scheduler.events import (
    AttachConsumer,
    AttemptFailed,
    AttemptProgress,
    CancelRollouts,
    Event,
    SubmitRollouts,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import FaultKind, Outcome

MODEL = Model(vocabulary_size=1_000)
MACHINE = MachineConfig(slots=4, kv_tokens=4_000, context_tokens=1_024, stream_interval=4, model=MODEL)
PROMPT = b"".join(token.to_bytes(4, "little") for token in range(3, 43))
OUTPUT_TOKENS = 60
EXECUTOR = ExecutorSettings(timeout_seconds=2.0, abort_seconds=1.0, max_attempts=5, breaker_seconds=0.5)


class Rig:
    """Two faulty engines; `a` runs on one of them, which is `self.home`."""

    def __init__(self) -> None:
        scheduler = Scheduler(SchedulerConfig(executor=EXECUTOR), random.Random(0), 0.0)
        self.simulation = Simulation(scheduler, load_period_seconds=0.0)
        self.engines = {name: self._engine(name) for name in ("e0", "e1")}
        self.events: list[Event] = []
        self.result: RolloutResult | None = None
        self.simulation.observers.append(lambda event, actions: self.events.append(event))
        self.simulation.connect("run", "trainer", self._receive)
        for engine in self.engines.values():
            self.simulation.add_engine(engine)
        self.simulation.send(AttachConsumer("run", "trainer"))
        sampling = {"custom_params": {"end_at_tokens": 40 + OUTPUT_TOKENS}}
        spec = RolloutSpec("a", PROMPT, max_new_tokens=100, sampling=sampling)
        self.simulation.send(SubmitRollouts("run", "trainer", (spec,)))
        self.simulation.run(0.2)
        (self.home,) = (engine for engine in self.engines.values() if engine.held_tokens(self.simulation.now))

    @staticmethod
    def _engine(name: str) -> FaultyEngine:
        return FaultyEngine(lambda incarnation: SimEngine(name, MACHINE, incarnation=incarnation), random.Random(1))

    def _receive(self, delivery: Deliver) -> None:
        if isinstance(delivery.event, Finished):
            assert self.result is None, "ended twice"
            self.result = delivery.event.result

    def end(self) -> RolloutResult:
        """Run until `a` has ended; its tokens are checked where it completed."""
        for engine in self.engines.values():
            self.simulation.touch(engine)
        self.simulation.run(60.0, stop=lambda: self.result is not None)
        assert self.result is not None, "a never ended"
        if self.result.outcome is Outcome.COMPLETED:
            expected = expected_output(PROMPT, 100, end_at_tokens=40 + OUTPUT_TOKENS, model=MODEL)
            assert memoryview(self.result.token_bytes).cast("I").tolist() == expected.tokens
        return self.result

    def faults(self) -> list[FaultKind]:
        return [event.fault for event in self.events if isinstance(event, AttemptFailed)]


@pytest.mark.parametrize("keep_partial", [True, False])
def test_a_crash_moves_the_rollout_with_or_without_its_tokens(keep_partial: bool) -> None:
    rig = Rig()
    rig.home.crash(rig.simulation.now, keep_partial)
    result = rig.end()
    assert result.outcome is Outcome.COMPLETED and result.attempts == 2
    assert (result.spans[0].attempt == 1) is keep_partial
    assert rig.faults() == [FaultKind.BROKEN]


def test_a_restart_is_another_incarnation_and_remembers_nothing() -> None:
    rig = Rig()
    rig.home.crash(rig.simulation.now, keep_partial=False)
    rig.simulation.touch(rig.home)
    rig.simulation.run(0.3)
    rig.home.restart(rig.simulation.now)
    rig.simulation.add_engine(rig.home)
    assert rig.home.facts.incarnation == "1" and rig.home.held_tokens(rig.simulation.now) == {}
    assert rig.end().outcome is Outcome.COMPLETED


def test_a_hang_is_noticed_by_silence_and_the_late_answer_is_ignored() -> None:
    rig = Rig()
    rig.home.hang(rig.simulation.now)
    result = rig.end()
    assert result.outcome is Outcome.COMPLETED and result.attempts == 2
    assert rig.simulation.now > 3.0, "progress time-out and abort time-out"
    rig.home.unhang(rig.simulation.now)
    rig.simulation.touch(rig.home)
    rig.simulation.run(rig.simulation.now + 5.0)
    assert rig.home.held_tokens(rig.simulation.now) == {}, "it went on and heard the abort"


def test_a_short_hang_costs_its_time_and_nothing_else() -> None:
    rig = Rig()
    before = rig.simulation.now
    rig.home.hang(before)
    rig.simulation.run(before + 1.0)
    rig.home.unhang(rig.simulation.now)
    assert rig.end().attempts == 1
    assert rig.simulation.now == pytest.approx(1.0 + 0.002 + OUTPUT_TOKENS * MACHINE.timing.decode_step_seconds(1))


@pytest.mark.parametrize(
    ("set_fault", "kind", "outcome"),
    [
        (lambda engine: setattr(engine, "busy", True), FaultKind.BUSY, Outcome.COMPLETED),
        (lambda engine: setattr(engine, "refusing", True), FaultKind.REFUSED, Outcome.ENGINE_REFUSED),
    ],
    ids=["busy", "refuse"],
)
def test_new_attempts_are_turned_away(
    set_fault: Callable[[FaultyEngine], None], kind: FaultKind, outcome: Outcome
) -> None:
    rig = Rig()
    for engine in rig.engines.values():
        set_fault(engine)
    rig.home.crash(rig.simulation.now, keep_partial=False)
    rig.home.restart(rig.simulation.now)
    set_fault(rig.home)
    rig.simulation.add_engine(rig.home)
    rig.simulation.at(2.0, lambda: [engine.heal(2.0) for engine in rig.engines.values()] and None)
    assert rig.end().outcome is outcome
    assert kind in rig.faults()


def test_a_deaf_engine_goes_on_to_its_end() -> None:
    rig = Rig()
    rig.home.deaf = True
    rig.simulation.send(CancelRollouts("run", ("a",)))
    result = rig.end()
    assert result.outcome is Outcome.CANCELLED and result.generated_tokens == OUTPUT_TOKENS
    assert not rig.home.answers(rig.simulation.now, 1.0)


def test_slow_is_a_factor() -> None:
    rig = Rig()
    rig.home.slow(rig.simulation.now, 10.0)
    assert rig.end().outcome is Outcome.COMPLETED
    assert rig.simulation.now > 5 * OUTPUT_TOKENS * MACHINE.timing.decode_step_seconds(1)


def test_lost_progress_loses_no_token() -> None:
    rig = Rig()
    rig.home.loss = 1.0
    before = sum(isinstance(event, AttemptProgress) for event in rig.events)
    assert rig.end().outcome is Outcome.COMPLETED
    assert sum(isinstance(event, AttemptProgress) for event in rig.events) <= before + 1  # one was under way


def test_an_echo_repeats_every_report_and_changes_nothing() -> None:
    rig = Rig()
    rig.home.echo_seconds = 0.5
    assert rig.end().attempts == 1
    seen = len(rig.events)
    rig.simulation.run(rig.simulation.now + 2.0)
    late = [event for event in rig.events[seen:] if isinstance(event, AttemptProgress)]
    assert late, "progress came after the end"
    rig.simulation.scheduler.check()
