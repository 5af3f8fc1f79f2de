"""The auditor of random schedules in worlds of one engine: what it must let pass, and what it must not."""

from __future__ import annotations

import random

import pytest

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.actions import Action, Deliver, Finished, PublishProgress
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.events import (
    AttachConsumer,
    CancelRollouts,
    EndRun,
    Event,
    PublishPolicy,
    SubmitRollouts,
    WeightsPushed,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import Outcome, UpdateMode, UpdateState
from tests.scheduler.kit import spec
from tests.scheduler.virtual.auditor import Auditor
from tests.scheduler.virtual.publications import weights_of
from tests.scheduler.virtual.random_fleet import MODEL

CONSUMER = "rank-0"


class Audited:
    """One engine, two runs, each with a consumer, and the auditor that watches them."""

    def __init__(self) -> None:
        scheduler = Scheduler(SchedulerConfig(), random.Random(0), 0.0)
        self.simulation = Simulation(scheduler)
        self.auditor = Auditor(self.simulation, scheduler._world, SchedulerConfig(), MODEL, check_every=1)
        self.simulation.observers.append(self.auditor.observe)
        self.results: dict[str, RolloutResult] = {}
        machine = MachineConfig(slots=4, kv_tokens=2_000, context_tokens=256, stream_interval=4, model=MODEL)
        self.engine = FaultyEngine(lambda _: SimEngine("engine-0", machine), random.Random(0))
        self.simulation.add_engine(self.engine)
        for run_id in ("run-0", "run-1"):
            self.simulation.connect(run_id, CONSUMER, self._receive)
            self.simulation.send(AttachConsumer(run_id, CONSUMER))

    def submit(self, rollout_id: str, **fields: object) -> None:
        tokens = b"".join(one.to_bytes(4, "little") for one in range(1, 9))
        wanted = spec(rollout_id, token_bytes=tokens, max_new_tokens=80, sampling={"min_new_tokens": 80}, **fields)
        self.simulation.send(SubmitRollouts("run-0", CONSUMER, (wanted,)))

    def run_for(self, seconds: float) -> None:
        self.simulation.run(self.simulation.now + seconds)

    def _receive(self, delivery: Deliver) -> None:
        if isinstance(delivery.event, Finished):
            self.results[delivery.event.result.rollout_id] = delivery.event.result


def test_a_leaf_may_end_while_its_cancelled_parent_is_still_being_stopped() -> None:
    audited = Audited()
    audited.submit("root")
    audited.run_for(0.2)
    audited.simulation.send(CancelRollouts("run-0", ("root",)))
    audited.submit("leaf", parent_rollout_id="root")
    assert audited.results["leaf"].outcome is Outcome.CANCELLED and "root" not in audited.results


def test_a_leaf_that_nobody_cancelled_must_not_end_so() -> None:
    audited = Audited()
    audited.submit("root")
    audited.submit("leaf", parent_rollout_id="root")
    audited.run_for(0.2)
    # Behind the auditor's back.
    audited.simulation.scheduler.handle(CancelRollouts("run-0", ("leaf",)), audited.simulation.now)
    with pytest.raises(AssertionError, match="ended with CANCELLED"):
        audited.run_for(5.0)


def test_what_an_engine_wrote_is_not_of_the_weights_that_another_owner_left_there() -> None:
    """Version 0 writes for one run; another takes the engine, breaks its weights and ends; the first goes on with its own."""
    audited = Audited()
    simulation = audited.simulation

    def break_off() -> None:
        audited.engine.inner.controls.push_in_part(simulation.now)
        simulation.send(WeightsPushed("run-1", "policy", 1, "engine-0", "connection lost"))

    def watch(event: Event, actions: list[Action]) -> None:
        for one in actions:
            if isinstance(one, PublishProgress) and one.state is UpdateState.PUSHING and one.message:
                simulation.at(simulation.now + 0.01, break_off)

    simulation.observers.append(watch)
    audited.submit("a")
    audited.run_for(0.3)
    simulation.send(PublishPolicy("run-1", PolicyUpdate(1, mode=UpdateMode.RETRACT)))
    audited.run_for(2.0)
    simulation.send(EndRun("run-1"))
    audited.run_for(2.0)
    simulation.send(PublishPolicy("run-0", PolicyUpdate(1, path=weights_of("run-0", 1), mode=UpdateMode.RETRACT)))
    audited.run_for(10.0)
    result = audited.results["a"]
    assert result.outcome is Outcome.COMPLETED and [span.policy_version for span in result.spans] == [0, 1]
    assert audited.auditor.counts["resumed"] == 1
