"""What it costs the core that a policy version expires: a million cached pages, work queued, running and bound to versions.

How the figures are taken
- The index holds shape A of `index_shapes` under version 1, on all its engines; 1,000 rollouts run and as many wait. Version 2
  is published: every control call is answered at once, so that each event's time is the core's own.
- `declare_ms`: the longest event that has an engine acknowledge the version, which is where prefixes of the old one expire, queued
  work is looked at and hits are looked up again. `event_max_ms`: of all events of the publication.
- `slices_ms`: every sweep of the core's own size, until nothing is left of the version.
- Garbage is frozen, as in the server. A repeat is a core of its own; the caller takes the best of several.

What this module does not know: engines, time between events.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from rolloutd.bench.index_shapes import ENGINE_CACHE_TOKENS, ENGINES, PAGE_TOKENS, Shape, shapes
from rolloutd.scheduler.actions import Action, Control, Dispatch
from rolloutd.scheduler.clock import SWEEP_NODES
from rolloutd.scheduler.config import IndexSettings, SchedulerConfig
from rolloutd.scheduler.events import (
    AttachConsumer,
    AttemptProgress,
    ControlEnded,
    Event,
    JoinEngine,
    PublishPolicy,
    SubmitRollouts,
    Tick,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.spec import EngineFacts, PolicyUpdate, RolloutSpec
from rolloutd.scheduler.states import CacheHandling, UpdateMode, Verb

RUN = "run"
RUNNING = 1_000
SLOTS = -(-RUNNING // ENGINES) + 1  # one is kept for short work
WAITING = 1_000
OUTPUT_TOKENS = 1_000
# In place keeps all that runs, so the events are as large as they get; what is cached stays in the engine, out of reach.
MODE, CACHE = UpdateMode.IN_PLACE, CacheHandling.NAMESPACE


@dataclass(frozen=True, slots=True)
class Expiry:
    """Milliseconds of one repeat."""

    pages: int
    declare_ms: float
    event_max_ms: float
    slices_ms: list[float]


class _Core:
    """A scheduler whose engines answer every control call at once."""

    def __init__(self) -> None:
        config = SchedulerConfig(index=IndexSettings(max_bytes=1 << 40, page_tokens=PAGE_TOKENS))
        self.scheduler = Scheduler(config, random.Random(0), 0.0)
        self.now = 0.0
        self.acknowledged_ms: list[float] = []
        self.events_ms: list[float] = []

    def handle(self, event: Event) -> list[Action]:
        started = time.perf_counter()
        actions = self.scheduler.handle(event, self.now)
        self.events_ms.append((time.perf_counter() - started) * 1e3)
        return actions

    def publish(self, version: int) -> None:
        """Until it is over."""
        self.acknowledged_ms.clear()
        self.events_ms.clear()
        update = PolicyUpdate(version, f"/weights/{version}", MODE, CACHE)
        out = [one for one in self.handle(PublishPolicy(RUN, update)) if isinstance(one, Control)]
        while out:
            call = out.pop(0)
            self.now += 0.001
            answered = self.handle(ControlEnded(call.engine_id, call.control_id, label=str(version)))
            if call.verb is Verb.VERIFY:
                self.acknowledged_ms.append(self.events_ms[-1])
            out += [one for one in answered if isinstance(one, Control)]

    def fill_slots(self) -> None:
        """Every slot runs something that has its first token."""
        while self.scheduler.wants_tick:
            for action in self.scheduler.handle(Tick(), self.now):
                if isinstance(action, Dispatch):
                    tokens = len(action.token_bytes) // 4
                    self.scheduler.handle(AttemptProgress(action.attempt_id, 1, tokens, 0), self.now)


def measure(shape: Shape) -> Expiry:
    """One repeat."""
    core = _Core()
    scheduler = core.scheduler
    for number in range(ENGINES):
        facts = EngineFacts(
            f"engine-{number}",
            "0",
            page_tokens=PAGE_TOKENS,
            kv_capacity_tokens=ENGINE_CACHE_TOKENS,
            slots=SLOTS,
            context_tokens=1 << 20,
        )
        scheduler.handle(JoinEngine(facts), core.now)
    scheduler.handle(AttachConsumer(RUN, "trainer"), core.now)
    core.publish(1)
    specs = [_spec(shape, number) for number in range(RUNNING + WAITING)]
    for start in range(0, len(specs), 100):
        scheduler.handle(SubmitRollouts(RUN, "trainer", tuple(specs[start : start + 100])), core.now)
    core.fill_slots()
    world = scheduler._world
    if len(world.attempts) < RUNNING:
        raise AssertionError(f"{len(world.attempts)} rollouts run, {RUNNING} were to")
    namespace = world.runs[RUN].lineages["policy"].namespace(1)
    for number in range(shape.families):
        for path in shape.family(number):
            world.index.insert(namespace, path.tokens, path.engine)
    pages = world.index.statistics().pages
    gc.collect()
    gc.freeze()
    core.publish(2)
    slices = _sweep(core)
    gc.unfreeze()
    if world.index.match(namespace, specs[0].token_bytes):
        raise AssertionError("the old version still matches")
    return Expiry(pages, max(core.acknowledged_ms), max(core.events_ms), slices)


def _spec(shape: Shape, number: int) -> RolloutSpec:
    """A known prompt; of some, the kept tokens or the version itself tie them to versions."""
    tokens = shape.query(number % shape.families).tokens
    return RolloutSpec(
        f"r{number}",
        tokens,
        max_new_tokens=OUTPUT_TOKENS,
        min_version=1 if number % 4 == 0 else None,
        max_staleness=2 if number % 4 == 1 else None,
    )


def _sweep(core: _Core) -> list[float]:
    index = core.scheduler._world.index
    taken = []
    steps = 1
    while steps:
        started = time.perf_counter()
        steps = index.sweep(SWEEP_NODES)
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def best(scale: float, repeats: int) -> Expiry:
    """The same work several times: the machine is shared, so each figure's lowest counts, per slice."""
    shape, _ = shapes(scale)
    taken = [measure(shape) for _ in range(repeats)]
    slices = [min(same) for same in zip(*(one.slices_ms for one in taken), strict=True)]
    return Expiry(
        taken[0].pages,
        min(one.declare_ms for one in taken),
        min(one.event_max_ms for one in taken),
        slices,
    )
