"""Virtual time: order within an instant, latency, engines that come and go, and a workload from submission to records."""

from __future__ import annotations

import math
import random

import pytest

from rolloutd.bench.simulated import EpochRecord, Epochs
from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.w1 import SMALL_DEMO, demo_step
from rolloutd.bench.workload import Kind, Limits, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.tokens import Model, expected_output
from rolloutd.scheduler.actions import Action, Deliver, Dispatch, Finished
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import (
    AttachConsumer,
    AttemptEnded,
    AttemptProgress,
    CancelRollouts,
    EngineLoad,
    Event,
    SubmitRollouts,
    Tick,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import Outcome, TaskType

MACHINE = MachineConfig(slots=4, kv_tokens=4_000, context_tokens=1_024, model=Model(vocabulary_size=1_000))
PROMPT = b"".join(token.to_bytes(4, "little") for token in range(3, 43))


class Watched:
    """A simulation with one engine and one consumer, and all that happened in it."""

    def __init__(self, *, latency_seconds: float = 0.001, load_period_seconds: float = 0.0) -> None:
        scheduler = Scheduler(SchedulerConfig(), random.Random(0), 0.0)
        self.simulation = Simulation(
            scheduler, latency_seconds=latency_seconds, load_period_seconds=load_period_seconds
        )
        self.events: list[tuple[float, Event, list[Action]]] = []
        self.results: dict[str, RolloutResult] = {}
        self.simulation.observers.append(
            lambda event, actions: self.events.append((self.simulation.now, event, actions))
        )
        self.simulation.connect("run", "trainer", self._receive)
        self.engine = SimEngine("e0", MACHINE)
        self.simulation.add_engine(self.engine)
        self.simulation.send(AttachConsumer("run", "trainer"))

    def submit(self, rollout_id: str, output_tokens: int = 20) -> None:
        sampling = {"custom_params": {"end_at_tokens": 40 + output_tokens}}
        spec = RolloutSpec(rollout_id, PROMPT, max_new_tokens=100, sampling=sampling)
        self.simulation.send(SubmitRollouts("run", "trainer", (spec,)))

    def times_of(self, kind: type[Event]) -> list[float]:
        return [at for at, event, _ in self.events if isinstance(event, kind)]

    def _receive(self, delivery: Deliver) -> None:
        if isinstance(delivery.event, Finished):
            self.results[delivery.event.result.rollout_id] = delivery.event.result


def test_a_rollout_takes_prefill_decode_and_two_latencies_each_way() -> None:
    watched = Watched()
    watched.submit("a")
    watched.simulation.run(stop=lambda: bool(watched.results))
    step = MACHINE.timing.decode_step_seconds(1)
    first = 0.001 + max(40 / MACHINE.timing.prefill_tokens_per_second, step) + 0.001
    assert watched.times_of(AttemptProgress)[0] == pytest.approx(first)
    assert watched.times_of(AttemptEnded) == [pytest.approx(first + 19 * step)]
    assert watched.results["a"].outcome is Outcome.COMPLETED and watched.results["a"].generated_tokens == 20


def test_one_tick_follows_everything_of_an_instant() -> None:
    watched = Watched(latency_seconds=0.0)
    watched.simulation.at(1.0, lambda: watched.submit("a"))
    watched.simulation.at(1.0, lambda: watched.submit("b"))
    watched.simulation.run(1.0)
    at_one = [event for at, event, _ in watched.events if at == 1.0]
    assert [type(event) for event in at_one[:3]] == [SubmitRollouts, SubmitRollouts, Tick]
    dispatched = [action for _, _, actions in watched.events for action in actions if isinstance(action, Dispatch)]
    assert {action.rollout_id for action in dispatched} == {"a", "b"} and dispatched[0].batch_id == 1


def test_time_jumps_and_stands_where_it_was_told_to() -> None:
    watched = Watched()
    watched.simulation.run(5.25)
    assert watched.simulation.now == 5.25
    assert watched.times_of(Tick)[-1] == 5.0  # housekeeping, once a second


def test_load_reports_come_with_their_period_and_end_with_the_door() -> None:
    watched = Watched(load_period_seconds=2.0)
    watched.simulation.run(7.0)
    assert watched.times_of(EngineLoad) == [2.0, 4.0, 6.0]
    watched.simulation.drop_engine("e0")
    watched.simulation.run(20.0)
    assert watched.times_of(EngineLoad) == [2.0, 4.0, 6.0]


def test_a_cancel_crosses_the_wire() -> None:
    watched = Watched(latency_seconds=0.05)
    watched.submit("a", 90)
    watched.simulation.at(0.5, lambda: watched.simulation.send(CancelRollouts("run", ("a",))) and None)
    watched.simulation.run(stop=lambda: bool(watched.results))
    assert watched.results["a"].outcome is Outcome.CANCELLED
    assert 0.6 <= watched.simulation.now <= 0.6 + 2 * MACHINE.timing.decode_step_seconds(1)
    assert 0 < watched.results["a"].generated_tokens < 90
    assert watched.engine.held_tokens(watched.simulation.now) == {}


def test_a_dispatch_to_a_door_that_is_gone_fails() -> None:
    watched = Watched()
    watched.simulation.drop_engine("e0")
    watched.submit("a")
    watched.simulation.run(30.0, stop=lambda: bool(watched.results))
    error = watched.results["a"].error
    assert (
        watched.results["a"].outcome is Outcome.ENGINE_FAILED and error is not None and "no door to e0" in error.message
    )


def test_a_core_that_never_rests_is_caught() -> None:
    watched = Watched()
    world = watched.simulation.scheduler._world
    watched.simulation.observers.append(lambda event, actions: setattr(world, "dirty", True))
    with pytest.raises(AssertionError, match="never comes to rest"):
        watched.simulation.run(1.0)


def test_a_replay_brings_log_probs_and_no_tokens() -> None:
    watched = Watched()
    spec = RolloutSpec("a", PROMPT, task_type=TaskType.REPLAY)
    watched.simulation.send(SubmitRollouts("run", "trainer", (spec,)))
    watched.simulation.run(stop=lambda: bool(watched.results))
    logprobs = memoryview(watched.results["a"].prompt_logprob_bytes).cast("f").tolist()
    assert len(logprobs) == 40 and math.isnan(logprobs[0]) and all(-4.0 <= one < 0.0 for one in logprobs[1:])


# workloads -------------------------------------------------------------------------------------------------------------


def serve_small(seed: int) -> tuple[Workload, EpochRecord, list[RolloutResult]]:
    limits = Limits(vocabulary_size=1_000, context_tokens=1_000, max_output_tokens=64)
    workload = demo_step(seed, limits, shape=SMALL_DEMO)
    epochs = Epochs(Scheduler(SchedulerConfig(), random.Random(seed), 0.0), [MACHINE, MACHINE])
    results: list[RolloutResult] = []

    def watch(event: Event, actions: list[Action]) -> None:
        results.extend(
            one.event.result for one in actions if isinstance(one, Deliver) and isinstance(one.event, Finished)
        )

    epochs.simulation.observers.append(watch)
    return workload, epochs.run(workload, 0), results


def test_a_workload_is_delivered_once_and_whole() -> None:
    workload, record, results = serve_small(1)
    assert not record.failed and record.events > workload.rollouts
    items = {item.rollout_id: item for item in workload.items}
    assert sorted(one.rollout_id for one in results) == sorted(items)
    for result in results:
        item = items[result.rollout_id]
        expected = expected_output(
            item.prompt_bytes,
            item.max_new_tokens,
            sampling_seed=item.sampling_seed,
            end_at_tokens=item.prompt_tokens + item.output_tokens,
            model=MACHINE.model,
        )
        assert memoryview(result.token_bytes).cast("I").tolist() == list(expected.tokens)
    assert {one.kind for one in record.records.values()} == set(Kind)
    for one in record.records.values():
        assert one.started_seconds is not None and one.delivered_seconds is not None
        assert one.submitted_seconds <= one.started_seconds < one.delivered_seconds
    assert sum(one.cached_tokens for one in record.records.values()) > 0


def test_the_same_seed_gives_the_same_records() -> None:
    assert serve_small(1)[1].records == serve_small(1)[1].records != serve_small(2)[1].records
