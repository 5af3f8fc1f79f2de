"""Many that wait when versions change: one event looks at a bounded number of them, and nobody is forgotten."""

from __future__ import annotations

from rolloutd.scheduler import version_change
from rolloutd.scheduler.actions import Action
from rolloutd.scheduler.events import Event, Tick
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import Gate, Outcome, UpdateMode
from tests.scheduler.kit import Bench, config, engine, prompt, spec

COUNT = 2 * version_change.MOST_AT_ONCE + 50


class Watching(Bench):
    """Knows how many rollouts one event let go at most."""

    most_woken = 0
    most_ended = 0

    def do(self, event: Event) -> list[Action]:
        waiting, ended = self.waiting(), len(self.ended)
        actions = super().do(event)
        self.most_woken = max(self.most_woken, waiting - self.waiting())
        self.most_ended = max(self.most_ended, len(self.ended) - ended)
        return actions

    def waiting(self) -> int:
        run = self.core._world.runs.get("run")
        return 0 if run is None else sum(one.held_gate is Gate.POLICY_VERSION for one in run.entries.values())


def many(bench: Bench, **fields: int) -> None:
    wanted: list[RolloutSpec] = [spec(f"r{index}", **fields) for index in range(COUNT)]
    for start in range(0, COUNT, 100):
        bench.submit(*wanted[start : start + 100])


def test_those_that_wait_for_a_version_are_woken_in_slices() -> None:
    bench = Watching(engine(slots=4), settings=config(queue={"max_batch_size": 1}))
    many(bench, min_version=1)
    assert bench.tick() == [] and bench.waiting() == COUNT
    bench.published(1)
    assert bench.waiting(), "the first slice was all"
    assert bench.core.wants_tick
    assert bench.tick()
    assert bench.waiting() == 0
    assert 0 < bench.most_woken <= version_change.MOST_AT_ONCE


def test_those_whose_exact_version_is_gone_end_in_slices() -> None:
    bench = Watching(engine(slots=1))
    bench.published(1)
    bench.run(spec("busy", max_new_tokens=1000))
    many(bench, exact_version=1)
    bench.published(2, mode=UpdateMode.ABORT_AND_RESUME)
    while bench.core.wants_tick:
        bench.do(Tick())
    gone = [name for name in bench.ended if name != "busy" and bench.outcome(name) is Outcome.VERSION_GONE]
    assert len(gone) == COUNT
    assert bench.most_ended <= version_change.MOST_AT_ONCE


def test_what_was_not_looked_at_yet_does_not_start() -> None:
    """It may be of an exact version that is gone, or have tokens that are too old."""
    bench = Bench(engine(slots=4))
    many(bench, min_version=1)
    bench.submit(spec("plain", token_bytes=prompt("plain")))
    bench.published(1)
    started: list[str] = []
    while bench.core._world.unseen:
        started += [one.rollout_id for one in bench.dispatched[len(started) :]]
        assert all(name == "plain" for name in started)
        bench.do(Tick())
    bench.tick()
    assert len(bench.dispatched) == 4


def test_another_change_meanwhile_forgets_nobody() -> None:
    bench = Watching(engine(slots=4))
    many(bench, min_version=2)
    for version in (1, 2):
        bench.published(version)
    bench.tick()
    assert bench.waiting() == 0
