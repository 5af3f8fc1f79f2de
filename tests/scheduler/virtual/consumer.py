"""A trainer's side of a stream of results in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

from rolloutd.bench.virtual import Simulation
from rolloutd.scheduler.actions import Deliver, Finished, GroupFinished
from rolloutd.scheduler.events import AcknowledgeResults, AttachConsumer, DetachConsumer
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import Acknowledgement
from tests.scheduler.virtual.auditor import Auditor


class Consumer:
    """A stream's client: takes everything, acknowledges some time later."""

    def __init__(
        self,
        rng: random.Random,
        simulation: Simulation,
        auditor: Auditor,
        run_id: str,
        consumer_id: str,
        on_complete: Callable[[RolloutResult], None],
    ) -> None:
        self.rng = rng
        self.simulation = simulation
        self.auditor = auditor
        self.on_complete = on_complete
        self.run_id = run_id
        self.consumer_id = consumer_id
        self.connected = False
        self.cursor = 0
        self.ack_delay_seconds = rng.choice([0.0, 0.0, 0.5, 5.0])
        self.pending: dict[int, str | None] = {}  # cursor -> rollout, None for a group's end

    def connect(self, take_over: tuple[str, ...] = ()) -> None:
        self.simulation.connect(self.run_id, self.consumer_id, self.receive)
        self.connected = True
        self.simulation.send(AttachConsumer(self.run_id, self.consumer_id, cursor=0, take_over=take_over))

    def disconnect(self) -> None:
        self.simulation.connect(self.run_id, self.consumer_id, None)
        self.connected = False
        self.simulation.send(DetachConsumer(self.run_id, self.consumer_id))

    def receive(self, delivery: Deliver) -> None:
        if not delivery.cursor:
            return
        event = delivery.event
        assert isinstance(event, Finished | GroupFinished)
        self.pending[delivery.cursor] = event.result.rollout_id if isinstance(event, Finished) else None
        if isinstance(event, Finished) and event.result.complete:
            self.on_complete(event.result)
        self.simulation.at(self.simulation.now + self.ack_delay_seconds, self.acknowledge)

    def acknowledge(self) -> None:
        """All that has come, by cursor or by name."""
        if not self.pending or not self.connected:
            return
        rng = self.rng
        names = [name for name in self.pending.values() if name is not None]
        if rng.random() < 0.5 or len(names) < len(self.pending):  # the end of a group has no name but its cursor
            self.auditor.acknowledged.update((self.run_id, name) for name in names)
            event = AcknowledgeResults(self.run_id, self.consumer_id, through_cursor=max(self.pending))
        else:
            verdicts = tuple(Acknowledgement(name, used=rng.choice([None, True, False])) for name in names)
            event = AcknowledgeResults(self.run_id, self.consumer_id, verdicts)
        self.pending.clear()
        self.simulation.send(event)
