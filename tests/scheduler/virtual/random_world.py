"""One random schedule in virtual time: a small world, a life of events, a healing, and then silence.

A seed decides everything: engines (1-4, 1-8 slots), settings, runs, prompts, and what happens when: submissions of every kind,
cancels, updates, budgets set, shrunk, leased and zeroed, trainer states, engines crashing, hanging, lying, joining and leaving,
consumers disconnecting and taking over. Then everything heals under a small but sufficient budget, and all that was accepted
must end within `_bound_seconds` (P5), be delivered, acknowledged, and leave nothing behind.

Most worlds also publish policy versions all the time (`random_publishing`), with rollouts that ask for some, and trainers that
want their engines' memory.

Replay one: `python -m tests.scheduler.virtual.random_world SEED` prints its events.

What this module does not know: what must hold (`auditor`), and what the drawn settings, work, budgets and faults look like
(`random_fleet`, `random_work`, `random_budgets`, `random_faults`).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.scheduler import consolidation, updating
from rolloutd.scheduler.actions import Action, Refuse
from rolloutd.scheduler.events import (
    CancelRollouts,
    CloseConsumer,
    ConfigureRun,
    ControlFailed,
    EndRun,
    EngineReadiness,
    Event,
    PauseRun,
    Reconfigure,
    ReportStep,
    ResumeRun,
    SetBudget,
    SubmitRollouts,
    UpdateRollouts,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import RolloutSpec, RolloutUpdate, RunSettings, StepReport, Weights
from rolloutd.scheduler.states import OnPreempt, OnStale, Origin, ReleaseMemory, RolloutClass, TrainerState
from tests.scheduler.virtual.auditor import Auditor
from tests.scheduler.virtual.consumer import Consumer
from tests.scheduler.virtual.random_budgets import random_budget, sufficient_budget
from tests.scheduler.virtual.random_faults import RandomFaults
from tests.scheduler.virtual.random_fleet import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    MODEL,
    SHRINK_SECONDS,
    SLOWEST_PREFILL,
    random_engine,
    random_settings,
)
from tests.scheduler.virtual.random_publishing import RandomPublishing
from tests.scheduler.virtual.random_rules import RandomRules, count_changes
from tests.scheduler.virtual.random_work import RandomWork

TARGET_MIX = {"a": 2.0, "b": 1.0, "c": 1.0}


class RandomWorld:
    def __init__(
        self, seed: int, *, check_every: int = 8, observe: Callable[[Event, list[Action]], None] | None = None
    ):
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.slowdown = rng.choice(list(SHRINK_SECONDS))
        self.runs = [f"run-{number}" for number in range(rng.choice([1, 1, 2]))]
        publishes = rng.random() < 0.7
        self.rules = RandomRules(seed)
        self._mixing = random.Random(f"{seed}: a target mix")
        self.mixes = self._mixing.random() < 0.25  # its runs keep results back, and most of its rollouts count for that
        self.config = self.rules.added(random_settings(rng, self.slowdown, shared=len(self.runs) > 1))
        scheduler = Scheduler(self.config, random.Random(seed + 1), 0.0)
        self.simulation = Simulation(
            scheduler,
            latency_seconds=rng.choice([0.0, 0.001, 0.02]),
            load_period_seconds=rng.choice([0.0, 1.0, 2.0]),
        )
        world = scheduler._world
        self.auditor = Auditor(self.simulation, world, self.config, MODEL, check_every)
        self.simulation.observers.append(self.auditor.observe)
        self.simulation.observers.append(partial(count_changes, self.auditor.counts))
        if observe is not None:
            self.simulation.observers.append(observe)
        count = rng.randint(1, 4)
        owned = rng.random() < 0.7 and count >= len(self.runs)
        self.engines = [
            random_engine(rng, number, self.slowdown, self.runs[number % len(self.runs)] if owned else "")
            for number in range(count)
        ]
        self.consumers = [
            Consumer(rng, self.simulation, self.auditor, run_id, f"trainer-{number}", self._note_turn)
            for run_id in self.runs
            for number in range(rng.choice([1, 1, 2]))
        ]
        self.horizon_seconds = rng.uniform(2.5, 9.0)
        self.rollouts = rng.randint(4, 18)
        self.steps = dict.fromkeys(self.runs, 0)
        self.publishing = RandomPublishing(
            rng, self.simulation, self.engines, self.runs, self.auditor.counts, publishes
        )
        # Who gives up weights has to publish them again.
        self._memory = list(ReleaseMemory) if publishes else [ReleaseMemory.NOTHING, ReleaseMemory.KV_CACHE]
        self.work = RandomWork(rng, self.publishing)
        self.bounds = {run_id: self._random_bounds() for run_id in self.runs}
        self.faults = RandomFaults(rng, self.simulation, self.engines, self.auditor.counts)
        self._healed = False
        self.simulation.observers.append(self._mind_memory)

    def send(self, event: Event) -> list[Action]:
        return self.simulation.send(event)

    # the life ----------------------------------------------------------------------------------------------------------

    def play(self) -> Counter[str]:
        """Live, heal, come to rest; returns what was counted on the way. AssertionError where something did not hold."""
        rng = self.rng
        for engine in self.engines:
            if rng.random() < 0.9:
                self.simulation.add_engine(engine)
        for consumer in self.consumers:
            consumer.connect()
        for run_id in self.runs:
            if rng.random() < 0.5 or self.mixes:
                self.send(ConfigureRun(run_id, self._settings(run_id)))
        moments = [rng.uniform(0.0, self.horizon_seconds) for _ in range(self.rollouts // 2)]
        moments += [0.0] * rng.randint(0, 4)  # a burst at the start
        for moment in moments:
            self.simulation.at(moment, self._submit)
        acts = [
            self._budget,
            self._budget,
            self._report,
            self._cancel,
            self._update,
            self._consumer,
            self._run,
            self.faults.strike,
        ]
        if self.publishing.active:
            acts += [self.publishing.publish] * 4 + [self.publishing.misdo] * 2
        for _ in range(rng.randint(2, 24)):
            self.simulation.at(rng.uniform(0.0, self.horizon_seconds), rng.choice(acts))
        for moment in self.rules.moments(self.horizon_seconds):
            self.simulation.at(moment, self._reconfigure)
        self.simulation.run(self.horizon_seconds)
        self._heal()
        deadline = self.simulation.now + self._bound_seconds()
        self.simulation.run(deadline, stop=self._settled)
        assert self._settled(), "\n".join(
            [f"still there {deadline - self.horizon_seconds:.0f} s after everything healed:"]
            + [
                f"{one.rollout.rollout_id}: {one.rollout.state.name}; {one.rollout.tell()}"
                for one in self.auditor.unfinished()
            ]
            + [
                f"undelivered bytes: {run.undelivered_bytes}, groups: {list(run.groups)}"
                for run in self.auditor.world.runs.values()
            ]
        )
        self.auditor.check_quiet()
        self.auditor.counts["schedules"] += 1
        self.auditor.counts["events"] += self.simulation.events_handled
        return self.auditor.counts

    def _settled(self) -> bool:
        world = self.auditor.world
        if not self.auditor.publications.at_rest() or any(
            engine.memory is not None for engine in world.engines.values()
        ):
            return False
        if world.attempts or any(run.unfinished or run.undelivered_bytes or run.groups for run in world.runs.values()):
            return False
        return not self.auditor.unfinished()

    def _bound_seconds(self) -> float:
        """After the healing, n rollouts one after the other, each as slow as the slowest engine and as often as its attempts
        and preemptions allow, each waiting once for a hold, a reservation and its retry; and every time-out that may still
        be running once."""
        config = self.config
        token_seconds = 0.04 * self.slowdown  # of either curve with 8 running
        once = LONGEST_OUTPUT * token_seconds + (LONGEST_PROMPT + LONGEST_OUTPUT) / SLOWEST_PREFILL * self.slowdown
        tries = config.executor.max_attempts + config.preempt.max_per_rollout + 1
        if config.preempt.time_slice_tokens:
            tries += LONGEST_OUTPUT // config.preempt.time_slice_tokens
        if config.preempt.consolidate:
            tries += consolidation.MOST_MOVES
        waits = (
            config.queue.large_reserve_seconds + config.queue.max_defer_seconds + config.queue.leader_timeout_seconds
        )
        pending = (
            config.executor.timeout_seconds + config.executor.abort_seconds + config.executor.breaker_seconds + 10.0
        )
        publish = config.publish
        calls = publish.flush_tries + updating.MOST_RESUMES + 4
        update = (
            publish.push_seconds
            + 2 * publish.clear_seconds
            + config.executor.abort_seconds
            + calls * publish.call_seconds
        )
        queued = sum(
            len(lineage.queue) + 2 for run in self.auditor.world.runs.values() for lineage in run.lineages.values()
        )
        pending += queued * len(self.engines) * update + config.queue.queue_ttl_seconds % 3600.0
        return pending + (len(self.auditor.unfinished()) + 1) * (tries * once + waits)

    def _heal(self) -> None:
        self._healed = True
        rng = self.rng
        for engine in self.engines:
            self.faults.bring_back(engine)
            self.send(EngineReadiness(engine.facts.engine_id, True))
        for consumer in self.consumers:
            consumer.ack_delay_seconds = min(consumer.ack_delay_seconds, 0.5)
            consumer.connect()
        for run_id in self.runs:
            if run_id not in self.auditor.world.runs:
                continue
            self.send(ResumeRun(run_id))
            states = [TrainerState.UNKNOWN, TrainerState.WAITING]
            run = self.auditor.world.runs[run_id]
            if run.settings.release_memory is ReleaseMemory.NOTHING:
                states.append(TrainerState.TRAINING)
            state = rng.choice(states)
            self.send(ReportStep(run_id, StepReport(self.steps[run_id], state)))
            self.send(SetBudget(run_id, sufficient_budget(rng)))
            if self.publishing.active:
                self.publishing.heal(run_id, "policy")
                self.publishing.heal(run_id, "reward")

    def _mind_memory(self, event: Event, actions: list[Action]) -> None:
        """An operator starts engines anew of which nobody knows whether they have their memory, and those that a call killed which
        was on its way when everything healed."""
        known = self.auditor.world.engines.get(event.engine_id) if isinstance(event, ControlFailed) else None
        if known is None or known.memory is None:
            return
        for engine in self.engines:
            if engine.facts.engine_id == known.engine_id and (known.memory.lost or (self._healed and engine.down)):
                later = self.simulation.now + self.rng.uniform(0.1, 5.0)
                was = engine.inner
                self.simulation.at(later, lambda one=engine, was=was: self._start_anew(one, was))  # type: ignore[misc]

    def _start_anew(self, engine: FaultyEngine, process: object) -> None:
        if engine.inner is process:  # nobody has meanwhile
            self.faults.bring_back(engine)

    def _note_turn(self, result: RolloutResult) -> None:
        prompt = self.auditor.watched[result.run_id, result.rollout_id].rollout.spec.token_bytes
        self.work.note_turn(prompt + result.token_bytes)

    # acts --------------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        rng = self.rng
        consumer = rng.choice(self.consumers)
        specs = tuple(self._mixed(self.work.spec(consumer.run_id)) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        self.send(SubmitRollouts(consumer.run_id, consumer.consumer_id, specs))
        for spec in specs:
            self.work.submitted.append((consumer.run_id, spec.rollout_id))

    def _mixed(self, spec: RolloutSpec) -> RolloutSpec:
        """Where the world mixes, mostly a sample to train on."""
        if not self.mixes or self._mixing.random() < 0.2:
            return spec
        stratum = self._mixing.choice(sorted(TARGET_MIX))
        return replace(spec, stratum=stratum, origin=Origin.CURRENT_POLICY, parent_rollout_id="", deadline_seconds=0.0)

    def _reconfigure(self) -> None:
        refused = [one for one in self.send(Reconfigure(self.rules.changed(self.config))) if isinstance(one, Refuse)]
        assert not refused, refused

    def _budget(self) -> None:
        budget = random_budget(self.rng)
        self.send(SetBudget(self.rng.choice(self.runs), budget))

    def _report(self) -> None:
        rng = self.rng
        run_id = rng.choice(self.runs)
        self.steps[run_id] += rng.choice([0, 0, 1, 1, 3])
        report = StepReport(
            step=self.steps[run_id],
            trainer_state=rng.choice([*TrainerState, TrainerState.TRAINING, TrainerState.TRAINING]),
            samples_needed=rng.choice([0, 8]),
            consume_samples_per_second=rng.choice([0.0, 2.0]),
            consume_tokens_per_second=rng.choice([0.0, 500.0]),
            policy_entropy=rng.choice([None, 0.5]),
            buffer_fill=rng.choice([None, 0.0, 1.0]),
        )
        self.send(ReportStep(run_id, report))

    def _cancel(self) -> None:
        rng = self.rng
        if not self.work.submitted:
            return
        run_id, rollout_id = rng.choice(self.work.submitted)
        groups = (rng.choice(["g1", "g2"]),) if rng.random() < 0.2 else ()
        self.send(CancelRollouts(run_id, (rollout_id,) if not groups or rng.random() < 0.5 else (), groups))

    def _update(self) -> None:
        rng = self.rng
        if not self.work.submitted:
            return
        run_id, rollout_id = rng.choice(self.work.submitted)
        update = RolloutUpdate(
            rollout_id,
            rollout_class=rng.choice([None, *RolloutClass]),
            deadline_seconds=rng.choice([None, None, 0.0, 0.2, 30.0]),
            needed_by_step=rng.choice([None, None, 0, 1, 9]),
        )
        self.send(UpdateRollouts(run_id, (update,)))

    def _consumer(self) -> None:
        rng = self.rng
        consumer = rng.choice(self.consumers)
        if consumer.connected and rng.random() < 0.7:
            if rng.random() < 0.2:
                self.send(CloseConsumer(consumer.run_id, consumer.consumer_id))
            consumer.disconnect()
            self.auditor.counts["detached"] += 1
            return
        others = [other for other in self.consumers if other.run_id == consumer.run_id and other is not consumer]
        taken = others[0] if others and rng.random() < 0.4 else None
        if (
            taken is not None
        ):  # its stream is ended by the server, and what it had not acknowledged is not its own any more
            self.simulation.connect(taken.run_id, taken.consumer_id, None)
            taken.connected = False
            taken.pending.clear()
        consumer.connect((taken.consumer_id,) if taken is not None else ())

    def _run(self) -> None:
        rng = self.rng
        run_id = rng.choice(self.runs)
        kind = rng.random()
        if kind < 0.3:
            self.send(PauseRun(run_id))
            self.simulation.at(self.simulation.now + rng.uniform(0.1, 3.0), lambda: self._ignore(ResumeRun(run_id)))
        elif kind < 0.9:
            self.send(ConfigureRun(run_id, self._settings(run_id)))
        else:
            self.send(EndRun(run_id))

    def _settings(self, run_id: str) -> RunSettings:
        rng = self.rng
        if rng.random() < 0.1:
            self.bounds[run_id] = self._random_bounds()
        max_staleness, batch_samples = self.bounds[run_id]
        return RunSettings(
            weights=Weights(
                prefix=rng.choice([None, 0.0, 2.0]), waiting=rng.choice([None, 0.0]), cost=rng.choice([None, 3.0])
            ),
            fairness_weight=rng.choice([0.5, 1.0, 4.0]),
            floor_rollouts=rng.choice([0, 1, 3]),
            default_class=rng.choice(list(RolloutClass)),
            on_preempt=rng.choice(list(OnPreempt)),
            target_mix=TARGET_MIX if self.mixes else rng.choice([{}, TARGET_MIX]),
            cancel_on_disconnect=rng.random() < 0.3,
            disconnect_grace_seconds=rng.choice([0.0, 1.0]),
            max_undelivered_bytes=rng.choice([0, 0, 2_000]),
            max_staleness=max_staleness,
            batch_samples=batch_samples,
            max_partial_span=rng.choice([None, None, 0, 1]),
            on_stale=rng.choice(list(OnStale)),
            slice_tokens=rng.choice([0, 0, 8, 40]),
            prefix_ttl_versions=rng.choice([None, 0, 2]),
            release_memory=rng.choice([*self._memory, *[ReleaseMemory.NOTHING] * 3]),
            mix_hold_seconds=self._mixing.choice([0.5, 4.0] if self.mixes else [0.0, 0.5, 4.0]),
        )

    def _random_bounds(self) -> tuple[int | None, int]:
        """max_staleness and batch_samples of a run."""
        return self.rng.choice([(None, 0), (None, 0), (2, 0), (0, 4), (1, 2), (1, 8)])

    def _ignore(self, event: Event) -> None:
        self.send(event)


def _main() -> None:
    seed = int(sys.argv[1])

    def show(event: Event, actions: list[Action]) -> None:
        print(f"{world.simulation.now:.4f} {event}")
        for action in actions:
            print(f"        -> {action}")

    world = RandomWorld(seed, check_every=1, observe=show)
    world.simulation.observers.reverse()  # show before the auditor may raise
    print(dict(world.play()))


if __name__ == "__main__":
    _main()
