"""Random faults of engines: crashing, hanging, lying, joining and leaving."""

from __future__ import annotations

import random
from collections import Counter

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.scheduler.events import DrainEngine, EngineReadiness, LoseEngine, RemoveEngine


class RandomFaults:
    def __init__(
        self, rng: random.Random, simulation: Simulation, engines: list[FaultyEngine], counts: Counter[str]
    ) -> None:
        self.rng = rng
        self.simulation = simulation
        self.engines = engines
        self.counts = counts

    def strike(self) -> None:
        """One fault of one engine; most are over some seconds later."""
        rng = self.rng
        engine = rng.choice(self.engines)
        engine_id = engine.facts.engine_id
        now = self.simulation.now
        later = now + rng.uniform(0.2, 6.0)
        kind = rng.choice(
            [
                "crash",
                "crash",
                "hang",
                "busy",
                "slow",
                "deaf",
                "lossy",
                "echo",
                "refuse",
                "drain",
                "remove",
                "lose",
                "unready",
            ]
        )
        self.counts[f"fault {kind}"] += 1
        heal = True
        match kind:
            case "crash":
                engine.crash(now, keep_partial=rng.random() < 0.5)
                heal = False
                if rng.random() < 0.5:
                    self.simulation.send(LoseEngine(engine_id, "connection refused"))
                self.simulation.at(later, lambda: self._restart(engine))
            case "hang":
                engine.hang(now)
            case "busy":
                engine.busy = True
            case "slow":
                engine.slow(now, rng.choice([3.0, 10.0]))
            case "deaf":
                engine.deaf = True
            case "lossy":
                engine.loss = rng.choice([0.5, 1.0])
            case "echo":
                engine.echo_seconds = rng.choice([0.01, 1.0])
            case "refuse":
                engine.refusing = True
            case "drain":
                self.simulation.send(DrainEngine(engine_id))
            case "remove":
                self.simulation.send(RemoveEngine(engine_id))
            case "lose":
                self.simulation.send(LoseEngine(engine_id, "no route"))
            case "unready":
                self.simulation.send(EngineReadiness(engine_id, False))
        self.simulation.touch(engine)
        if heal and rng.random() < 0.7:
            self.simulation.at(later, lambda: self._mend(engine))

    def _restart(self, engine: FaultyEngine) -> None:
        if engine.down:
            engine.restart(self.simulation.now)
            self.simulation.add_engine(engine)

    def _mend(self, engine: FaultyEngine) -> None:
        if not engine.down:
            self.bring_back(engine)

    def bring_back(self, engine: FaultyEngine) -> None:
        """Without faults; as a new process where the scheduler has forgotten what is wrong with its weights or its memory."""
        known = self.simulation.scheduler._world.engines.get(engine.facts.engine_id)
        lost = known is not None and known.memory is not None and bool(known.memory.lost)
        forgotten = engine.facts.engine_id not in self.simulation.scheduler._world.engines
        if (
            engine.down
            or lost
            or (
                forgotten
                and (engine.inner.controls.spoilt or engine.inner.controls.released or self.rng.random() < 0.5)
            )
        ):
            engine.restart(self.simulation.now)
        engine.heal(self.simulation.now)
        self.simulation.add_engine(engine)
