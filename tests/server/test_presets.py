"""Presets: files that load, say what they set, and whose every rule fires and ends in a simulated workload of their kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Action, Deliver, Finished, Refuse, Rejected
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.spec import Acknowledgement, PolicyUpdate, RolloutSpec, RunSettings, StepReport
from rolloutd.scheduler.states import OnStale, Outcome, RolloutClass, TrainerState, UpdateMode
from rolloutd.scheduler.views import DecisionKind
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.preset import PRESETS, preset_text
from tests.scheduler.kit import Bench, config, engine, engines, prompt, spec

CRITICAL, REUSABLE, BACKGROUND = RolloutClass.CRITICAL, RolloutClass.REUSABLE, RolloutClass.BACKGROUND
TRAINING, WAITING = TrainerState.TRAINING, TrainerState.WAITING
RUN, CONSUMER = "run", "trainer"
SLOTS = 4
MINUTES = 60.0
TOKENS_A_SECOND = 130  # that one sequence writes beside three others, by the simulated engine's default timing


class Stage:
    """One engine, one trainer, a preset; rollouts are as long as they are told to be."""

    def __init__(self, preset: str, *, rules: bool = True, **machine: Any) -> None:
        settings = settings_of(preset)
        self.scheduler = Scheduler(settings if rules else replace(settings, rules=()), random.Random(0), 0.0)
        self.simulation = Simulation(self.scheduler)
        sizes = {"slots": SLOTS, "kv_tokens": 1_000_000, "context_tokens": 500_000, "write_tokens": False, **machine}
        self.simulation.connect(RUN, CONSUMER, self._receive)
        self.simulation.send(events.AttachConsumer(RUN, CONSUMER))
        self.simulation.add_engine(SimEngine("engine", MachineConfig(**sizes)))
        self.outcomes: dict[str, Outcome] = {}
        self.ends: dict[str, float] = {}  # when each result was here
        self._rng = random.Random(1)
        self._step = 0
        self._tell(events.ReportStep(RUN, StepReport(0, TRAINING)))

    def submit(
        self, name: str, rollout_class: RolloutClass, seconds: float, prompt: bytes = b"", **fields: Any
    ) -> None:
        """One rollout that writes for about so long."""
        prompt = prompt or self.prompt()
        whole = len(prompt) // 4 + max(2, int(seconds * TOKENS_A_SECOND))
        spec = RolloutSpec(
            name,
            token_bytes=prompt,
            rollout_class=rollout_class,
            max_new_tokens=whole - len(prompt) // 4,
            sampling={"custom_params": {"end_at_tokens": whole}},
            **fields,
        )
        self._tell(events.SubmitRollouts(RUN, CONSUMER, (spec,)))

    def prompt(self, tokens: int = 128) -> bytes:
        """One that shares nothing with others."""
        return b"".join(self._rng.randrange(1, 1_000).to_bytes(4, "little") for _ in range(tokens))

    def report(self, state: TrainerState = TRAINING, **fields: Any) -> None:
        self._tell(events.ReportStep(RUN, StepReport(self._step, state, **fields)))

    def configure(self, **fields: Any) -> None:
        self._tell(events.ConfigureRun(RUN, RunSettings(**fields)))

    def publish(self, version: int) -> None:
        self._step += 1
        self._tell(events.PublishPolicy(RUN, PolicyUpdate(version, path="weights", mode=UpdateMode.DRAIN)))

    def go_on(self, seconds: float) -> None:
        self.simulation.run(self.simulation.now + seconds)

    def active(self) -> set[str]:
        return {rule.name for rule in self._view().rules if rule.active}

    def changes(self) -> Counter[tuple[str, DecisionKind]]:
        """How often each rule fired and ended."""
        return Counter((one.message.split("'")[1], one.kind) for one in self._view().rule_decisions)

    def finish(self) -> None:
        """Everything that was submitted comes back, and no counter is off."""
        self.simulation.run(self.simulation.now + 60 * MINUTES, stop=lambda: not self._view().running_rollouts)
        assert set(self.outcomes.values()) <= {Outcome.COMPLETED}, self.outcomes
        self.scheduler.check()

    def _view(self) -> Any:
        return self.scheduler.run_view(RUN, self.simulation.now)

    def _tell(self, event: events.Event) -> list[Action]:
        actions = self.simulation.send(event)
        wrong = [one for one in actions if isinstance(one, Refuse)]
        wrong += [one for one in actions if isinstance(one, Deliver) and isinstance(one.event, Rejected)]  # type: ignore[misc]
        assert not wrong, wrong
        return actions

    def _receive(self, delivery: Deliver) -> None:
        if not isinstance(delivery.event, Finished):
            return
        result = delivery.event.result
        self.outcomes[result.rollout_id] = result.outcome
        self.ends[result.rollout_id] = self.simulation.now
        used = events.AcknowledgeResults(RUN, CONSUMER, (Acknowledgement(result.rollout_id, used=True),))
        self.simulation.at(self.simulation.now, lambda: self._ignore(self._tell(used)))

    @staticmethod
    def _ignore(_: object) -> None:
        return None


def settings_of(preset: str) -> SchedulerConfig:
    return load_config(flags={"preset": preset}).scheduler


# what makes each rule fire and end


def buffer_runs_dry(stage: Stage) -> None:
    for number in range(3 * SLOTS):
        stage.submit(f"background-{number}", BACKGROUND, 60.0)
        stage.submit(f"sample-{number}", REUSABLE, 20.0)
    stage.report(buffer_fill=0.1)
    stage.go_on(25.0)
    assert "buffer-low" in stage.active()
    stage.report(buffer_fill=0.5)
    stage.go_on(25.0)
    assert "buffer-low" in stage.active(), "between the thresholds nothing changes"
    stage.report(buffer_fill=0.8)
    stage.go_on(25.0)


def buffer_is_full(stage: Stage) -> None:
    for number in range(2 * SLOTS):
        stage.submit(f"full-{number}", CRITICAL, 30.0)
    stage.report(buffer_fill=1.0)
    stage.go_on(45.0)
    assert "buffer-full" in stage.active()
    assert stage._view().running_rollouts == SLOTS // 2
    stage.report(buffer_fill=0.72)
    stage.go_on(25.0)


def training_is_queued(stage: Stage) -> None:
    """Critical work that fills the engine for more than five minutes, and some that waits behind it."""
    for number in range(SLOTS):
        stage.submit(f"long-{number}", CRITICAL, 400.0)
    stage.go_on(5.0)
    for number in range(SLOTS):
        stage.submit(f"queued-{number}", CRITICAL, 5.0)
    stage.go_on(290.0)
    assert "training-queued" not in stage.active()
    stage.go_on(30.0)
    assert "training-queued" in stage.active()
    stage.go_on(15 * MINUTES)


def training_is_queued_behind_background(stage: Stage) -> None:
    """Where nothing is preempted otherwise, five minutes are the longest that training waits for background work."""
    for number in range(SLOTS):
        stage.submit(f"background-{number}", BACKGROUND, 15 * MINUTES)
    stage.go_on(5.0)
    stage.submit("queued", CRITICAL, 5.0)
    stage.go_on(295.0)
    assert "queued" not in stage.outcomes
    stage.go_on(60.0)
    assert "queued" in stage.outcomes
    stage.go_on(30.0)


def trainer_starves(stage: Stage) -> None:
    stage.report(WAITING)
    before = stage._view().desired_engines
    stage.go_on(11 * MINUTES)
    assert "trainer-starves" in stage.active() and stage._view().desired_engines > before
    stage.report(TRAINING)
    stage.go_on(1 * MINUTES)
    assert stage._view().desired_engines == before


def samples_get_stale(stage: Stage) -> None:
    """Versions are published faster than samples get done."""
    stage.configure(max_staleness=0, on_stale=OnStale.FLAG)
    for second in range(180):
        stage.submit(f"sample-{second}", CRITICAL, 8.0)
        if second < 90 and second % 12 == 6:
            stage.publish(second // 12 + 1)
        stage.go_on(1.0)
        if second == 89:
            assert "samples-stale" in stage.active()
    stage.go_on(5 * MINUTES)


def memory_is_full(stage: Stage) -> None:
    """Turns of sessions pass the gate that holds new sessions, until nothing is left."""
    for number in range(SLOTS):
        stage.submit(f"turn-{number}", CRITICAL, 36.0, stage.prompt(44_800), session_id=f"s{number}", turn=1)
    stage.go_on(2 * MINUTES)


def caches_are_missed(stage: Stage) -> None:
    for second in range(50):
        stage.submit(f"cold-{second}", CRITICAL, 0.5)
        stage.go_on(1.0)
    assert "cache-missed" in stage.active()
    prompt = stage.prompt(1_024)
    for second in range(50):
        stage.submit(f"warm-{second}", CRITICAL, 0.5, prompt)
        stage.go_on(1.0)


Scenario = tuple[str, str, dict[str, Any], Callable[[Stage], None]]

SCENARIOS: list[Scenario] = [
    ("grpo-sync", "training-queued", {}, training_is_queued),
    ("grpo-sync", "trainer-starves", {}, trainer_starves),
    ("async-rl", "buffer-low", {}, buffer_runs_dry),
    ("async-rl", "samples-stale", {}, samples_get_stale),
    ("async-rl", "training-queued", {}, training_is_queued_behind_background),
    ("agentic", "memory-full", {"kv_tokens": 200_000}, memory_is_full),
    ("agentic", "cache-missed", {}, caches_are_missed),
    ("agentic", "training-queued", {}, training_is_queued),
    ("colocated", "buffer-low", {}, buffer_runs_dry),
    ("colocated", "buffer-full", {}, buffer_is_full),
    ("colocated", "training-queued", {}, training_is_queued),
]


@pytest.mark.parametrize(("preset", "rule", "machine", "scenario"), SCENARIOS, ids=lambda one: str(one))
def test_every_rule_of_a_preset_fires_and_ends(
    preset: str, rule: str, machine: dict[str, Any], scenario: Callable[[Stage], None]
) -> None:
    stage = Stage(preset, **machine)
    assert stage.active() == set()
    scenario(stage)
    changes = stage.changes()
    assert changes[rule, DecisionKind.RULE_FIRED] == changes[rule, DecisionKind.RULE_ENDED] >= 1, changes
    stage.finish()
    assert stage.active() == set()


def test_no_rule_of_a_preset_is_left_out_here() -> None:
    shipped = {(preset, rule.name) for preset in PRESETS for rule in settings_of(preset).rules}
    assert shipped == {(preset, rule) for preset, rule, _, _ in SCENARIOS}


def test_the_two_rules_of_the_design_are_what_it_says() -> None:
    rules = {rule.name: rule for rule in settings_of("colocated").rules}
    low, queued = rules["buffer-low"], rules["training-queued"]
    assert (low.metric, low.above, low.threshold, low.end_threshold) == ("buffer_fill", False, 0.3, 0.7)
    assert low.effects.share_factors == {CRITICAL: 1.5, REUSABLE: 1.5}
    assert (queued.metric, queued.above, queued.threshold) == ("training_queued_seconds", True, 300.0)
    assert set(queued.effects.preempt) == {REUSABLE, BACKGROUND}


# what rules buy, with everything else the same


def queued_until(*, rules: bool) -> float:
    """When critical work is back that found the engine full of background work which nothing else preempts."""
    stage = Stage("async-rl", rules=rules)
    for number in range(SLOTS):
        stage.submit(f"background-{number}", BACKGROUND, 15 * MINUTES)
    stage.go_on(5.0)
    stage.submit("queued", CRITICAL, 5.0)
    stage.finish()
    return stage.ends["queued"]


def samples_waited(*, rules: bool) -> float:
    """Mean time from submission to result of samples for a low buffer, a few every 12 seconds, beside long background work."""
    stage = Stage("async-rl", rules=rules, slots=12)
    stage.report(buffer_fill=0.1)
    stage.submit("first", REUSABLE, 12.0)
    stage.go_on(11.0)
    submitted = {}
    for wave in range(30):
        for number, seconds in enumerate((4.0, 6.0, 10.0, 16.0)):
            stage.submit(f"background-{wave}-{number}", BACKGROUND, 60.0)
            name = f"sample-{wave}-{number}"
            submitted[name] = stage.simulation.now
            stage.submit(name, REUSABLE, seconds)
        stage.go_on(12.0)
    stage.finish()
    return fmean(stage.ends[name] - at for name, at in submitted.items())


def test_training_that_is_queued_waits_half_as_long_with_its_rule() -> None:
    assert queued_until(rules=True) < queued_until(rules=False) / 2


def test_samples_for_a_low_buffer_come_sooner_with_its_rule() -> None:
    assert samples_waited(rules=True) < 0.9 * samples_waited(rules=False)


# simple


def test_simple_is_first_come_first_served() -> None:
    stage = Stage("simple", slots=1)
    order: list[str] = []
    stage.simulation.observers.append(
        lambda _, actions: order.extend(
            one.rollout_id for one in actions if hasattr(one, "attempt_id") and hasattr(one, "batch_id")
        )
    )
    prompt = stage.prompt(512)
    rng = random.Random(2)
    names = []
    for number in range(20):
        name = f"r{number}"
        names.append(name)
        same = rng.random() < 0.5
        stage.submit(name, CRITICAL, rng.choice([1.0, 20.0]), prompt if same else b"", stratum=rng.choice(["a", "b"]))
        stage.go_on(0.5)
    stage.finish()
    assert order == names
    assert not stage._view().rules


def speeds(bench: Bench, prefill_tokens_per_second: float) -> None:
    """What the engines have shown so far; a token takes each sequence 10 ms."""
    for one in bench.core._world.engines.values():
        one.prefill_tokens_per_second, one.decode_seconds_per_token = prefill_tokens_per_second, 0.01
        assert one.room is not None
        one.room.note_pace(one)


def turn_goes_away_from_its_context(settings: SchedulerConfig) -> bool:
    """The engine with a session's context is taken, the other one is free: does the next turn go there at once?"""
    bench = Bench(*engines(2, 1), settings=settings)
    (first,) = bench.run(spec("s0", 256, session_id="s", turn=0))
    bench.run(spec("other"))
    bench.finish("s0")
    (taker,) = bench.run(spec("taker"))
    assert taker.engine_id == first.engine_id
    bench.finish("other")
    bench.submit(spec("s1", token_bytes=prompt("s0", 256) + prompt("answer", 64), session_id="s", turn=1))
    return [one.engine_id != first.engine_id for one in bench.tick()] == [True]


def siblings_go_away_from_their_prompt(settings: SchedulerConfig) -> bool:
    """A prompt takes a second to compute, and its one engine is taken: does the second sibling go to the free one at once?"""
    bench = Bench(*engines(2, 1), settings=settings)
    speeds(bench, prefill_tokens_per_second=100.0)
    bench.run(spec("g", 100, samples=2, max_new_tokens=64))
    bench.tick(0.01)
    return len({one.engine_id for one in bench.live.values()}) == 2


def siblings_count_as_a_crowd(settings: SchedulerConfig) -> bool:
    """One engine is emptier by two slots: does the second sibling leave it because the first one runs there?"""
    bench = Bench(engine("fuller", 8), settings=settings)
    bench.run(spec("a"), spec("b"))
    bench.do(events.JoinEngine(engine("emptier", 8)))
    speeds(bench, prefill_tokens_per_second=20_000.0)
    first, second = bench.run(spec("g", samples=2, max_new_tokens=2_000))
    assert first.engine_id == "emptier"
    return second.engine_id == "fuller"


def order_of(settings: SchedulerConfig, *waiting: RolloutSpec, **run: Any) -> list[str]:
    """The order in which they are dispatched that came a second apart, where one rollout may run at a time."""
    bench = Bench(engine(slots=8, kv_capacity_tokens=8_192), settings=settings)
    bench.configure(**run)
    bench.budget(max_rollouts=1)
    bench.run(spec("first"))
    for one in waiting:
        bench.tick(1.0)
        bench.submit(one)
    order = []
    running = "first"
    for _ in waiting:
        bench.finish(running)
        bench.acknowledge(running)
        (sent,) = bench.tick(0.01)
        running = sent.rollout_id
        order.append(running)
    return order


def test_under_simple_nobody_waits_for_a_cache() -> None:
    simple, default = settings_of("simple"), config()
    assert turn_goes_away_from_its_context(simple) and not turn_goes_away_from_its_context(default)
    assert siblings_go_away_from_their_prompt(simple) and not siblings_go_away_from_their_prompt(default)


def test_under_simple_the_emptiest_engine_is_the_one_with_siblings_too() -> None:
    assert not siblings_count_as_a_crowd(settings_of("simple")) and siblings_count_as_a_crowd(config())


def test_under_simple_age_alone_orders_a_class() -> None:
    simple = settings_of("simple")
    large_first = spec("large", 3_000, stratum="a"), spec("small", stratum="b")
    assert order_of(simple, *large_first) == ["large", "small"]
    strata = [spec(f"{stratum}{n}", stratum=stratum) for stratum in "ab" for n in range(4)]
    names = [one.rollout_id for one in strata]
    mix = {"a": 0.5, "b": 0.5}
    assert order_of(simple, *strata, target_mix=mix) == names
    assert order_of(config(), *strata, target_mix=mix) != names


# files


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_begins_with_what_it_is_for_and_sets_only_known_keys(preset: str) -> None:
    text = preset_text(preset)
    assert text.startswith(f"# {preset}: ")
    config = load_config(flags={"preset": preset})
    given = {key for key, origin in config.origins.items() if origin == "preset"}
    assert given >= {
        f"{section}.{key}" for section, table in yaml.safe_load(text).items() if section != "rules" for key in table
    }
    assert config.values["preset"] == preset


def test_presets_are_all_the_files_there_are() -> None:
    folder = Path(load_config.__code__.co_filename).parent / "presets"
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(PRESETS)


def test_what_the_user_gives_takes_the_presets_place(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    file.write_text("preset: grpo-sync\nweights: {waiting: 0.9}\nrules: []\n")
    config = load_config(file, {"ROLLOUTD_POLICY__COLD_START_STEPS": "7"})
    assert config.scheduler.weights.waiting == 0.9 and config.scheduler.weights.critical == 0.5
    assert config.scheduler.policy.cold_start_steps == 7 and config.scheduler.rules == ()
    assert config.origins["weights.critical"] == "preset" and config.origins["weights.waiting"] == "file"


def test_the_strongest_layer_names_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "rolloutd.yaml"
    file.write_text("preset: async-rl\n")
    assert not load_config(file).scheduler.preempt.enabled
    assert load_config(file, {"ROLLOUTD_PRESET": "grpo-sync"}).scheduler.policy.cold_start_steps == 20
    flagged = load_config(file, {"ROLLOUTD_PRESET": "grpo-sync"}, {"preset": "simple"})
    assert flagged.scheduler.weights.waiting == 1.0 and not flagged.scheduler.rules
    assert load_config(file, {"ROLLOUTD_PRESET": ""}).scheduler == SchedulerConfig()


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"preset \(flag\): must be one of grpo-sync, async-rl.*got 'grpo'"):
        load_config(flags={"preset": "grpo"})
