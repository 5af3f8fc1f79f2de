"""Replay: a recorded simulation comes out as it was, and another configuration changes it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.bench.replay import figures_of, main, recorded, replay
from rolloutd.bench.simulated import Epochs
from rolloutd.bench.virtual import Simulation
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.scheduler import events
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.spec import (
    Budget,
    EngineFacts,
    PolicyUpdate,
    Quota,
    RolloutSpec,
    RolloutUpdate,
    RunSettings,
    StepReport,
)
from rolloutd.scheduler.states import OnPreempt, RolloutClass, TaskType, TrainerState
from rolloutd.server.event_log import Entry, EventLog, EventLogError, line_of, read_entries
from tests.bench.test_arms import MACHINE, SMALL

SPEC = RolloutSpec(
    "a",
    b"\1\0\0\0\2\0\0\0",
    samples=2,
    seeds=(1, 2),
    rollout_class=RolloutClass.BACKGROUND,
    on_preempt=OnPreempt.RESTART,
    sampling={"temperature": 0.5, "stop": ["a", "b"], "custom_params": {"end_at_tokens": 5}},
    max_new_tokens=9,
)


@pytest.mark.parametrize(
    "event",
    [
        events.SubmitRollouts("r", "c", (SPEC, RolloutSpec("b", text="words")), epoch=3),
        events.SetBudget(
            "r", Budget(classes={RolloutClass.CRITICAL: Quota(5, 0.2)}, tasks={TaskType.REWARD: Quota(1)})
        ),
        events.ReportStep("r", StepReport(3, TrainerState.WAITING, policy_entropy=0.5)),
        events.ConfigureRun("r", RunSettings(target_mix={"maths": 1.0})),
        events.PublishPolicy("r", PolicyUpdate(3, path="weights")),
        events.JoinEngine(EngineFacts("e", "0", slots=3, labels={"zone": "a"})),
        events.CancelRollouts("r", ("a",), epoch=2),
        events.UpdateRollouts("r", (RolloutUpdate("a", RolloutClass.CRITICAL, 3.0, None),)),
        events.AttachConsumer("r", "c", 2, 0, ("x",)),
        events.RemoveEngine("e"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_is_read_as_it_was_written(event: events.Event) -> None:
    ((at, read),) = read_entries([line_of((1.5, event))], "log")
    if isinstance(event, events.SubmitRollouts):  # JSON has one kind of list
        wanted = {**SPEC.sampling, "stop": ("a", "b")}
        event = replace(event, specs=(replace(SPEC, sampling=wanted), event.specs[1]))
    assert (at, read) == (1.5, event)


@pytest.mark.parametrize("line", ["{", "[]", '{"at": 1}', '{"at": 1, "event": {"class": "Tick", "fields": {}}}'])
def test_a_line_that_makes_no_sense_is_named(line: str) -> None:
    with pytest.raises(EventLogError, match="log, line 2"):
        list(read_entries(["", line], "log"))


def _record() -> list[Entry]:
    entries: list[Entry] = []
    scheduler = Scheduler(SchedulerConfig(), random.Random(0), 0.0)
    workload = SMALL.draw(4, MACHINE.model.vocabulary_size)
    simulation: list[Simulation] = []
    log = EventLog(lambda: simulation[0].now if simulation else 0.0, entries.append)

    class Watched(Epochs):
        def _watch(self, event: events.Event, actions: list[object]) -> None:  # type: ignore[override]
            log.observe(event, actions)  # type: ignore[arg-type]
            super()._watch(event, actions)  # type: ignore[arg-type]

    epochs = Watched(scheduler, [MACHINE] * 3)
    simulation.append(epochs.simulation)
    epochs.run(workload, 0)
    return entries


def test_a_record_replayed_with_its_own_settings_is_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = _record()
    again = replay(entries, SchedulerConfig(), TimingModel(), 0)
    assert {end.rollout_id: (at, end) for at, end in again} == {
        end.rollout_id: (pytest.approx(at, abs=1e-6), end) for at, end in recorded(entries)
    }
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(line_of, entries)), encoding="utf-8")
    settings = tmp_path / "new.yaml"
    settings.write_text(
        "scheduler:\n  reserved_short_slots: 0\n  short_quantum: 1\n  long_quantum: 64\n", encoding="utf-8"
    )
    assert main([str(path), "--config", str(settings), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["run"] for one in lines} == {"recorded", "replayed"}
    of = {(one["run"], one["kind"]): one for one in lines}
    assert of["recorded", "reward"]["rollouts"] == of["replayed", "reward"]["completed"] > 0
    assert of["recorded", "reward"] != {**of["replayed", "reward"], "run": "recorded"}
    assert [one.kind for one in figures_of("recorded", recorded(entries))] == ["critical", "reward", "reusable"]


def test_what_cannot_be_replayed_is_said() -> None:
    text = events.SubmitRollouts("r", "c", (RolloutSpec("b", text="words", max_new_tokens=3),))
    join = events.JoinEngine(EngineFacts("e", "0", slots=3, kv_capacity_tokens=1_000, context_tokens=500))
    with pytest.raises(EventLogError, match="text"):
        replay([(0.0, join), (0.0, text)], SchedulerConfig(), TimingModel(), 0)
    with pytest.raises(EventLogError, match="engine"):
        replay([(0.0, text)], SchedulerConfig(), TimingModel(), 0)
