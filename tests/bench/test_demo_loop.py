"""The trainer's loop, its ledger and the check of tokens, against a service that is only a few lines long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutd.bench import demo_trainer
from rolloutd.bench.demo_clock import SimClock
from rolloutd.bench.demo_fleet import SimFleet
from rolloutd.bench.demo_ledger import Ledger, Tracked
from rolloutd.bench.demo_trainer import Stuck, Trainer
from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.metrics import Summary, summarise
from rolloutd.bench.w1 import FULL_DEMO, DemoShape
from rolloutd.bench.workload import Item, Kind, Limits, TaskType
from rolloutd.client import RolloutResult, Span, Times
from rolloutd.engines.sim.tokens import Model, expected_output

LIMITS = Limits(vocabulary_size=1000, context_tokens=4096)
SHORT = LogNormal(2.5, 0.8, 2, 40)
TINY = DemoShape(
    critical=replace(FULL_DEMO.critical, groups=3, samples=4, output=SHORT),
    reusable=replace(FULL_DEMO.reusable, groups=2, head_tokens=64, output=SHORT),
    background=replace(FULL_DEMO.background, groups=2, output=SHORT),
    reward=replace(FULL_DEMO.reward, queries=10, seconds=5.0),
)
FLEET = SimFleet(engines=2, slots=4, time_scale=1000.0, limits=LIMITS, shape=TINY, training_seconds=20.0)
STEPS = 2

Result = dict[str, Any]


@dataclass
class Call:
    name: str
    what: dict[str, Any]


class FakeService:
    """Answers every submission with what the simulated model would write, unless `spoil` makes something else of it."""

    def __init__(self, spoil: Callable[[Result], list[Result]] = lambda result: [result], running: int = 0) -> None:
        self.calls: list[Call] = []
        self.acknowledged: dict[str, tuple[bool | None, str, float | None]] = {}
        self._spoil = spoil
        self._running = running
        self._results: asyncio.Queue[RolloutResult] = asyncio.Queue()

    async def submit(self, prompt: Any, **options: Any) -> FakeService:
        self.calls.append(Call("submit", options))
        samples = options["samples"]
        for sample, seed in enumerate(options["seeds"]):
            name = f"{options['rollout_id']}/{sample}" if samples > 1 else options["rollout_id"]
            tokens = expected_output(
                prompt,
                options["max_new_tokens"],
                sampling_seed=seed,
                end_at_tokens=options["custom_params"]["end_at_tokens"][str(seed)],
                model=Model(vocabulary_size=LIMITS.vocabulary_size),
            ).tokens
            result = {"rollout_id": name, "outcome": "completed", "complete": True, "tokens": tokens, "prompt": prompt}
            for one in self._spoil(result):
                self._put(one)
        return self

    async def accepted(self) -> None:
        """At once."""

    def _put(self, one: Result) -> None:
        tokens = np.array(one["tokens"], np.uint32)
        self._results.put_nowait(
            RolloutResult(
                one["rollout_id"],
                "demo",
                one["outcome"],
                complete=one["complete"],
                tokens=tokens,
                spans=(Span(0, "default", 0, len(tokens), "engine", 1),),
                attempts=1,
                prompt_tokens=len(one["prompt"]) // 4,
                times=Times(queued_seconds=0.0, total_seconds=0.0),
            )
        )

    async def results(self) -> AsyncIterator[RolloutResult]:
        while True:
            yield await self._results.get()

    def acknowledge(
        self, result: RolloutResult, *, used: bool | None = None, drop_reason: str = "", reward: float | None = None
    ) -> None:
        assert result.rollout_id not in self.acknowledged
        self.acknowledged[result.rollout_id] = (used, drop_reason, reward)

    async def cancel(self, *rollout_ids: str) -> None:
        self.calls.append(Call("cancel", {"rollout_ids": rollout_ids}))
        for rollout_id in rollout_ids:
            self._put(
                {"rollout_id": rollout_id, "outcome": "cancelled", "complete": False, "tokens": [], "prompt": b""}
            )

    async def report_step(self, step: int, **what: Any) -> None:
        self.calls.append(Call("report_step", {"step": step, **what}))

    async def set_budget(self, **what: Any) -> Any:
        self.calls.append(Call("set_budget", what))
        return SimpleNamespace(shrink_seconds=0.0)

    async def get_budget(self) -> Any:
        return SimpleNamespace(running_rollouts=self._running)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call.what for call in self.calls if call.name == name]


async def run(service: FakeService) -> tuple[Trainer, Ledger, Summary]:
    clock = SimClock(FLEET.time_scale)
    ledger = Ledger(clock)
    trainer = Trainer(service, FLEET, clock, ledger, STEPS, seed=1)
    try:
        await trainer.run()
    finally:
        await FLEET.check(ledger, (), lambda line: None)
    return trainer, ledger, summarise([rollout.record for rollout in ledger], trainer.steps, None)


def only(prefix: str, change: Callable[[Result], list[Result]]) -> Callable[[Result], list[Result]]:
    """Spoil the first result whose id begins so."""
    spent: list[str] = []

    def spoil(result: Result) -> list[Result]:
        if spent or not result["rollout_id"].startswith(prefix):
            return [result]
        spent.append(result["rollout_id"])
        return change(result)

    return spoil


async def test_all_is_delivered_once_and_right() -> None:
    service = FakeService()
    trainer, ledger, summary = await run(service)
    assert summary.rollouts == summary.delivered == len(list(ledger)) == len(service.acknowledged)
    assert summary.rollouts >= STEPS * (12 + 4 + 4)
    assert (summary.lost, summary.duplicated, summary.wrong_tokens) == (0, 0, 0)
    assert trainer.problems == [] and ledger.strangers == []
    assert len(trainer.steps) == STEPS
    assert all(step.training_ended_seconds - step.training_started_seconds >= 20.0 for step in trainer.steps)


async def test_the_service_is_told_no_length_but_the_largest_allowed() -> None:
    service = FakeService()
    _, ledger, _ = await run(service)
    lengths = {tracked.item.output_tokens for tracked in ledger if tracked.item.kind is Kind.CRITICAL}
    assert len(lengths) > 5
    critical = [call for call in service.named("submit") if call["rollout_class"] == "critical"]
    assert {call["max_new_tokens"] for call in critical if call["task_type"] == "generation"} == {40}
    assert all(set(call) & {"min_new_tokens", "stop_token_ids", "deadline_seconds"} == set() for call in critical)


async def test_groups_travel_as_one_submission_and_the_trainer_reports_each_phase() -> None:
    service = FakeService()
    await run(service)
    groups = [call for call in service.named("submit") if call["stratum"] == "math"]
    assert [call["samples"] for call in groups] == [4] * 3 * STEPS
    assert [call["needed_by_step"] for call in groups] == [0] * 3 + [1] * 3
    states = [(call["step"], call["trainer_state"]) for call in service.named("report_step")]
    assert states == [
        *((0, state) for state in ("syncing", "waiting", "training")),
        *((1, state) for state in ("syncing", "waiting", "training", "paused")),
    ]
    budgets = service.named("set_budget")
    assert [call["max_running_rollouts"] for call in budgets] == [8, 6, 8, 6, 8]
    assert all(call["lease_seconds"] > 0 for call in budgets)


async def test_a_group_is_judged_as_a_whole() -> None:
    service = FakeService()
    _, ledger, _ = await run(service)
    by_group: dict[str, set[tuple[bool | None, str]]] = {}
    for rollout_id, (used, reason, reward) in service.acknowledged.items():
        tracked = ledger[rollout_id]
        if tracked.item.kind is Kind.CRITICAL:
            assert reward in (0.0, 1.0)
            by_group.setdefault(tracked.item.group_id, set()).add((used, reason))
        elif tracked.item.kind is Kind.REWARD:
            assert used is None
        else:
            assert used is True
    assert all(len(verdicts) == 1 for verdicts in by_group.values())
    assert {next(iter(verdicts)) for verdicts in by_group.values()} <= {(True, ""), (False, "no_spread")}


def swap(result: Result) -> list[Result]:
    tokens = list(result["tokens"])
    tokens[0], tokens[1] = tokens[1], tokens[0]
    return [{**result, "tokens": tokens}]


@pytest.mark.parametrize(
    ("change", "wrong_tokens"),
    [
        (lambda result: [{**result, "tokens": result["tokens"][:-2]}], 2),
        (lambda result: [{**result, "tokens": [*result["tokens"], 7]}], 1),
        (swap, 2),
    ],
    ids=["two missing", "one too many", "two swapped"],
)
async def test_wrong_tokens_are_counted(change: Callable[[Result], list[Result]], wrong_tokens: int) -> None:
    _, _, summary = await run(FakeService(only("essay", change)))
    assert (summary.wrong_tokens, summary.lost, summary.duplicated) == (wrong_tokens, 0, 0)


@pytest.mark.parametrize(
    "again", [lambda result: result, lambda result: {**result, "outcome": "cancelled", "complete": False}]
)
async def test_a_second_end_is_a_duplicate(again: Callable[[Result], Result]) -> None:
    service = FakeService(only("agent", lambda result: [result, again(result)]))
    _, _, summary = await run(service)
    assert (summary.duplicated, summary.lost) == (1, 0)
    assert len(service.acknowledged) == summary.rollouts


async def test_a_failed_rollout_is_lost() -> None:
    failed = only("agent", lambda result: [{**result, "outcome": "engine_failed", "complete": False, "tokens": []}])
    service = FakeService(failed)
    _, ledger, summary = await run(service)
    assert (summary.lost, summary.delivered) == (1, summary.rollouts - 1)
    assert [tracked.outcome for tracked in ledger if not tracked.complete] == ["engine_failed"]


async def test_results_of_rollouts_nobody_submitted_are_kept_apart() -> None:
    stray = only("agent", lambda result: [result, {**result, "rollout_id": "who?"}])
    _, ledger, summary = await run(FakeService(stray))
    assert ledger.strangers == ["who?"]
    assert summary.lost == 0


async def test_background_left_at_the_end_is_withdrawn_and_not_lost() -> None:
    service = FakeService(lambda result: [] if result["rollout_id"].startswith("essay-s1") else [result])
    _, ledger, summary = await run(service)
    (call,) = service.named("cancel")
    assert len(call["rollout_ids"]) == 4
    assert all(ledger[rollout_id].record.withdrawn for rollout_id in call["rollout_ids"])
    assert summary.rollouts == len(list(ledger)) - 4
    assert summary.lost == 0


async def test_partial_tokens_of_a_withdrawn_rollout_are_checked() -> None:
    item = Item(**{**ITEM, "output_tokens": 30})
    tokens = expected_output(
        item.prompt_bytes, 40, sampling_seed=5, end_at_tokens=31, model=Model(vocabulary_size=1000)
    ).tokens[:10]
    for tail, wrong_tokens in (([], 0), ([3], 1)):
        clock = SimClock(1.0)
        ledger = Ledger(clock)
        tracked = ledger.expect("r", item, 0, 0.0)
        tracked.withdrawing = True
        given = np.array([*tokens[: 10 - len(tail)], *tail], np.uint32)
        spans = (Span(0, "default", 0, 10, "engine", 1),)
        ledger.end(RolloutResult("r", "demo", "cancelled", tokens=given, spans=spans))
        await FLEET.check(ledger, (), lambda line: None)
        assert tracked.record.withdrawn
        assert tracked.record.wrong_tokens == wrong_tokens


async def test_a_critical_rollout_that_never_comes_ends_the_loop_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_trainer, "PATIENCE_SECONDS", 0.2)
    service = FakeService(only("math", lambda result: []))
    with pytest.raises(Stuck, match=r"step 0: .* critical rollouts; 1 rollouts have not ended, .*math-s0e0-g0000/0"):
        await run(service)


async def test_a_budget_that_does_not_hold_is_a_problem() -> None:
    trainer, _, _ = await run(FakeService(running=7))
    assert trainer.problems[0] == (
        "step 0: 7 rollouts ran under a budget of 6 after the 0 s that the service had asked for"
    )


async def test_a_client_that_fails_ends_the_loop() -> None:
    class Failing(FakeService):
        async def results(self) -> AsyncIterator[RolloutResult]:
            raise ConnectionError("gone")
            yield

    with pytest.raises(ConnectionError, match="gone"):
        await run(Failing())


ITEM: dict[str, Any] = {
    "rollout_id": "r",
    "work_class": FULL_DEMO.background.work_class,
    "task_type": TaskType.GENERATION,
    "prompt_bytes": b"\x05\0\0\0",
    "output_tokens": 5,
    "max_new_tokens": 40,
    "sampling_seed": 5,
    "stratum": "essay",
}


@pytest.mark.parametrize(
    ("attempts", "queued", "first_token", "total", "wait"),
    [(1, 2.0, 3.0, 5.0, 2.0), (2, 4.0, 3.0, 5.0, 3.0), (2, 1.0, 3.0, 5.0, 1.0)],
    ids=["once", "queued again after its first token", "queued again before it"],
)
def test_wait_is_what_lies_before_the_first_dispatch(
    attempts: int, queued: float, first_token: float, total: float, wait: float
) -> None:
    class Clock(SimClock):
        def now(self) -> float:
            return total * self.time_scale

    ledger = Ledger(Clock(10.0))
    tracked: Tracked = ledger.expect("r", Item(**ITEM), 0, 0.0)
    times = Times(queued_seconds=queued, first_token_seconds=first_token, total_seconds=total)
    ledger.end(RolloutResult("r", "demo", "completed", complete=True, attempts=attempts, times=times))
    assert tracked.record.wait_seconds == pytest.approx(wait * 10.0)
