"""Control arms: whom each gives a request, and that all of them bring every rollout back with the engine's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rolloutd.bench.arms import ARMS
from rolloutd.bench.scenarios import AGENTS, Scenario
from rolloutd.bench.simulated import Epochs, spec_of
from rolloutd.bench.w1 import AGENT, MATH, REWARD
from rolloutd.bench.workload import Item, TaskType, WorkClass
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.actions import Action, Deliver, Dispatch, Finished
from rolloutd.scheduler.events import AttemptEnded, AttemptFailed, JoinEngine, SubmitRollouts
from rolloutd.scheduler.result import Piece
from rolloutd.scheduler.spec import EngineFacts
from rolloutd.scheduler.states import FaultKind

MACHINE = MachineConfig(slots=4, kv_tokens=60_000, write_tokens=False)
SMALL = Scenario(
    "small",
    "a bit of everything",
    (
        replace(MATH, groups=4, samples=4),
        replace(AGENT, groups=4, head_tokens=400),
        replace(REWARD, seconds=6.0),
        replace(AGENTS, tasks=2, head_tokens=300),
    ),
)


class Driven:
    """One arm over engines of `slots` slots, fed by hand."""

    def __init__(self, name: str, engines: int = 2, slots: int = 2) -> None:
        self.arm = ARMS[name]()
        self.count = 0
        for number in range(engines):
            self.arm.handle(JoinEngine(EngineFacts(f"e{number}", "0", page_tokens=16, slots=slots)), 0.0)

    def submit(self, *items: Item) -> list[Dispatch]:
        event = SubmitRollouts("run", "trainer", tuple(spec_of(item, 0) for item in items))
        return _dispatches(self.arm.handle(event, 0.0))

    def end(self, dispatch: Dispatch, tokens: int = 3) -> list[Action]:
        piece = Piece(b"\1\0\0\0" * tokens, "stop", prompt_tokens=40, cached_tokens=32)
        return self.arm.handle(AttemptEnded(dispatch.attempt_id, piece), 1.0)


def _dispatches(actions: list[Action]) -> list[Dispatch]:
    return [action for action in actions if isinstance(action, Dispatch)]


def item(name: str, output_tokens: int = 10, prompt: int = 0, session_id: str = "") -> Item:
    """A rollout with 64 prompt tokens; equal `prompt` means equal tokens."""
    tokens = (np.arange(64, dtype="<u4") + 100 * prompt).tobytes()
    return Item(
        name, WorkClass.CRITICAL, TaskType.GENERATION, tokens, output_tokens, 100, 0, "math", session_id=session_id
    )


def _where(dispatches: list[Dispatch]) -> list[tuple[str, str]]:
    return [(one.rollout_id, one.engine_id) for one in dispatches]


def test_fifo_binds_late_and_in_order() -> None:
    driven = Driven("fifo", engines=2, slots=1)
    sent = driven.submit(item("a"), item("b", 50), item("c", 90))
    assert _where(sent) == [("a", "e0"), ("b", "e1")]
    actions = driven.end(sent[1])
    assert _where(_dispatches(actions)) == [("c", "e1")]
    results = [one.event.result for one in actions if isinstance(one, Deliver) and isinstance(one.event, Finished)]
    assert [(one.rollout_id, one.generated_tokens, one.cached_tokens, one.complete) for one in results] == [
        ("b", 3, 32, True)
    ]


def test_the_oracle_starts_the_longest_first() -> None:
    driven = Driven("oracle", engines=1, slots=1)
    sent = driven.submit(item("a"), item("b", 50), item("c", 90))
    assert _where(sent) == [("c", "e0")]
    assert _where(_dispatches(driven.end(sent[0]))) == [("b", "e0")]


def test_routers_send_at_once_whatever_the_slots() -> None:
    for name in ("round-robin", "least-in-flight", "sticky", "cache-aware"):
        sent = Driven(name, engines=2, slots=1).submit(*(item(str(n), prompt=n) for n in range(6)))
        assert [one.engine_id for one in sent] == ["e0", "e1"] * 3, name


def test_least_in_flight_follows_what_ended() -> None:
    driven = Driven("least-in-flight")
    sent = driven.submit(item("a"), item("b"))
    driven.end(sent[1])
    assert _where(driven.submit(item("c"), item("d"))) == [("c", "e1"), ("d", "e0")]


def test_sticky_keeps_sessions_and_only_sessions() -> None:
    driven = Driven("sticky")
    first = driven.submit(item("a", session_id="s"), item("b", session_id="t"), item("c", session_id="s"))
    assert _where(first) == [("a", "e0"), ("b", "e1"), ("c", "e0")]
    assert _where(driven.submit(item("d"))) == [("d", "e1")]


def test_prefix_follows_the_longest_match_and_cache_aware_stops_where_loads_part() -> None:
    pure, aware = Driven("prefix"), Driven("cache-aware")
    for driven in (pure, aware):
        driven.submit(item("a", prompt=7))
        same = driven.submit(*(item(f"b{n}", prompt=7) for n in range(100)))
        here = sum(one.engine_id == "e0" for one in same)
        assert here == 100 if driven is pure else 64 <= here < 70


def test_a_failed_attempt_goes_through_the_arm_again() -> None:
    driven = Driven("round-robin")
    (sent,) = driven.submit(item("a"))
    again = driven.arm.handle(AttemptFailed(sent.attempt_id, FaultKind.BROKEN, "gone"), 1.0)
    assert _where(_dispatches(again)) == [("a", "e1")]


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_serves_a_closed_loop_the_same_way_twice(name: str) -> None:
    def run() -> list[tuple[str, float | None, int, int]]:
        workload = SMALL.draw(1, MACHINE.model.vocabulary_size)
        epochs = Epochs(ARMS[name](), [MACHINE] * 3)
        record = epochs.run(workload, 0)
        assert len(record.records) == workload.rollouts and not record.failed
        assert set(record.session_ends) == {session.session_id for session in workload.sessions}
        outputs = sum(one.output_tokens for one in workload.items)
        outputs += sum(turn.output_tokens for session in workload.sessions for turn in session.turns)
        assert sum(record.engine_tokens.values()) == outputs
        ends = [(one, of.delivered_seconds, of.prompt_tokens, of.cached_tokens) for one, of in record.records.items()]
        prompts = {session.session_id: session.lengths() for session in workload.sessions}
        for rollout_id, of in record.records.items():
            session_id, _, turn = rollout_id.partition("#")
            if turn:
                assert of.prompt_tokens == prompts[session_id][int(turn)][0]
        return ends

    assert run() == run()
