"""One random schedule in virtual time: a small world, a life of events, a healing, and then silence.

A seed decides everything: engines (1-4, 1-8 slots), settings, runs, prompts, and what happens when: submissions of every kind,
cancels, updates, budgets set, shrunk, leased and zeroed, trainer states, engines crashing, hanging, lying, joining and leaving,
consumers disconnecting and taking over. Then everything heals under a small but sufficient budget, and all that was accepted
must end within `_bound_seconds` (P5), be delivered, acknowledged, and leave nothing behind.

Replay one: `python -m tests.scheduler.virtual.random_world SEED` prints its events.

What this module does not know: what must hold (`auditor`).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Model
from rolloutd.scheduler.actions import Action, Deliver, Finished, GroupFinished
from rolloutd.scheduler.config import (
    BudgetSettings,
    ExecutorSettings,
    IndexSettings,
    PolicySettings,
    PreemptSettings,
    QueueSettings,
    SchedulerConfig,
)
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttachConsumer,
    CancelRollouts,
    CloseConsumer,
    ConfigureRun,
    DetachConsumer,
    DrainEngine,
    EndRun,
    EngineReadiness,
    Event,
    LoseEngine,
    PauseRun,
    RemoveEngine,
    ReportStep,
    ResumeRun,
    SetBudget,
    SubmitRollouts,
    UpdateRollouts,
)
from rolloutd.scheduler.machine import Scheduler
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import (
    TOKEN_BYTES,
    Acknowledgement,
    Budget,
    Quota,
    RolloutSpec,
    RolloutUpdate,
    RunSettings,
    StepReport,
    Weights,
)
from rolloutd.scheduler.states import OnPreempt, Origin, RolloutClass, TaskType, TrainerState
from tests.scheduler.virtual.auditor import Auditor

VOCABULARY = 1_000
CONTEXT_TOKENS = 256
LONGEST_PROMPT = 80
LONGEST_OUTPUT = 90  # prompt + output + 2 fit the smallest engine (192 tokens), so no engine clips
SMALLEST_KV = 192
LARGEST_PAGE = 16
MODEL = Model(vocabulary_size=VOCABULARY, mean_output_tokens=40)


class Consumer:
    """A stream's client: takes everything, acknowledges some time later."""

    def __init__(self, world: RandomWorld, run_id: str, consumer_id: str) -> None:
        self.world = world
        self.run_id = run_id
        self.consumer_id = consumer_id
        self.connected = False
        self.cursor = 0
        self.ack_delay_seconds = world.rng.choice([0.0, 0.0, 0.5, 5.0])
        self.pending: dict[int, str | None] = {}  # cursor -> rollout, None for a group's end

    def connect(self, take_over: tuple[str, ...] = ()) -> None:
        self.world.simulation.connect(self.run_id, self.consumer_id, self.receive)
        self.connected = True
        self.world.send(AttachConsumer(self.run_id, self.consumer_id, cursor=0, take_over=take_over))

    def disconnect(self) -> None:
        self.world.simulation.connect(self.run_id, self.consumer_id, None)
        self.connected = False
        self.world.send(DetachConsumer(self.run_id, self.consumer_id))

    def receive(self, delivery: Deliver) -> None:
        if not delivery.cursor:
            return
        event = delivery.event
        assert isinstance(event, Finished | GroupFinished)
        self.pending[delivery.cursor] = event.result.rollout_id if isinstance(event, Finished) else None
        if isinstance(event, Finished) and event.result.complete:
            self.world.note_turn(event.result)
        simulation = self.world.simulation
        simulation.at(simulation.now + self.ack_delay_seconds, self.acknowledge)

    def acknowledge(self) -> None:
        """All that has come, by cursor or by name."""
        if not self.pending or not self.connected:
            return
        rng = self.world.rng
        names = [name for name in self.pending.values() if name is not None]
        if rng.random() < 0.5 or len(names) < len(self.pending):  # the end of a group has no name but its cursor
            self.world.auditor.acknowledged.update((self.run_id, name) for name in names)
            event = AcknowledgeResults(self.run_id, self.consumer_id, through_cursor=max(self.pending))
        else:
            verdicts = tuple(Acknowledgement(name, used=rng.choice([None, True, False])) for name in names)
            event = AcknowledgeResults(self.run_id, self.consumer_id, verdicts)
        self.pending.clear()
        self.world.send(event)


class RandomWorld:
    def __init__(
        self, seed: int, *, check_every: int = 8, observe: Callable[[Event, list[Action]], None] | None = None
    ):
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.config = self._settings()
        scheduler = Scheduler(self.config, random.Random(seed + 1), 0.0)
        self.simulation = Simulation(
            scheduler,
            latency_seconds=rng.choice([0.0, 0.001, 0.02]),
            load_period_seconds=rng.choice([0.0, 1.0, 2.0]),
        )
        world = scheduler._world
        self.auditor = Auditor(self.simulation, world, self.config, MODEL, check_every)
        self.simulation.observers.append(self.auditor.observe)
        if observe is not None:
            self.simulation.observers.append(observe)
        self.slowdown = rng.choice([1.0, 3.0, 10.0])
        self.engines = [self._engine(number) for number in range(rng.randint(1, 4))]
        self.runs = [f"run-{number}" for number in range(rng.choice([1, 1, 2]))]
        self.consumers = [
            Consumer(self, run_id, f"trainer-{number}")
            for run_id in self.runs
            for number in range(rng.choice([1, 1, 2]))
        ]
        self.horizon_seconds = rng.uniform(3.0, 12.0)
        self.rollouts = rng.randint(5, 32)
        self.submitted: list[tuple[str, str]] = []  # (run id, rollout id)
        self.steps = dict.fromkeys(self.runs, 0)
        self.stems = [self._tokens(rng.randint(8, 48)) for _ in range(3)]
        self.prompts: list[bytes] = []
        self.turns: list[bytes] = []  # prompts with their outputs
        self.ended_runs: set[str] = set()

    def send(self, event: Event) -> list[Action]:
        return self.simulation.send(event)

    # building ----------------------------------------------------------------------------------------------------------

    def _settings(self) -> SchedulerConfig:
        rng = self.rng
        return SchedulerConfig(
            queue=QueueSettings(
                max_batch_size=rng.choice([2, 8, 32]),
                aging_seconds=rng.choice([2.0, 60.0]),
                overdue_seconds=rng.choice([2.0, 300.0]),
                overdue_turn=rng.choice([2, 8]),
                reserved_short_slots=rng.choice([0, 1]),
                max_defer_seconds=rng.choice([0.2, 5.0]),
                leader_timeout_seconds=rng.choice([0.3, 20.0]),
                min_shared_tokens=rng.choice([1, 16, 32]),
                large_reserve_seconds=rng.choice([0.5, 10.0]),
                decision_ring=64,
                max_strata=rng.choice([2, 64]),
            ),
            preempt=PreemptSettings(
                enabled=rng.random() < 0.8,
                min_run_seconds=rng.choice([0.0, 0.5]),
                cool_down_seconds=rng.choice([0.0, 0.2]),
            ),
            policy=PolicySettings(
                cold_start_steps=rng.choice([0, 2, 200]),
                phase_ramp_steps=rng.choice([0, 3]),
                stable_lower_turn=rng.choice([2, 32]),
            ),
            budget=BudgetSettings(
                default=rng.choice([Budget(), Budget(), Budget(max_rollouts=6)]),
                shrink_seconds=5.0,
                growth_tokens=rng.choice([16, 256]),
                headroom_tokens=64,
            ),
            executor=ExecutorSettings(
                timeout_seconds=rng.choice([2.0, 6.0]),
                max_attempts=rng.choice([1, 3]),
                breaker_faults=rng.choice([1, 3]),
                breaker_seconds=rng.choice([0.5, 3.0]),
                busy_seconds=0.25,
                abort_seconds=rng.choice([1.0, 3.0]),
            ),
            index=IndexSettings(
                max_bytes=rng.choice([1 << 14, 1 << 20]),
                page_tokens=rng.choice([1, 4, 16]),
                max_cached_tokens=rng.choice([0, 128]),
            ),
        )

    def _engine(self, number: int) -> FaultyEngine:
        rng = self.rng
        config = MachineConfig(
            slots=rng.randint(1, 8),
            kv_tokens=rng.choice([SMALLEST_KV, 400, 2_000]),
            page_size_tokens=rng.choice([1, 4, LARGEST_PAGE]),
            context_tokens=CONTEXT_TOKENS,
            max_prefill_tokens=rng.choice([100, 16_384]),
            schedule_policy=rng.choice(["fcfs", "lpm"]),
            stream_interval=rng.choice([1, 8, 32]),
            max_queued=rng.choice([None, None, 2]),
            timing=TimingModel(
                curve=rng.choice(["flat", "steep"]),
                prefill_tokens_per_second=rng.choice([400.0, 20_000.0]),
                slowdown=self.slowdown,
            ),
            model=MODEL,
        )
        name = f"engine-{number}"
        weighs = rng.random() < 0.7
        pool = "reward" if number == 3 else "policy"

        def make(incarnation: str) -> SimEngine:
            return SimEngine(
                name,
                config,
                incarnation=incarnation,
                pool=pool,
                kv_cache_bytes=config.capacity_tokens << 12 if weighs else 0,
                remember_prefixes=True,
            )

        return FaultyEngine(make, random.Random(rng.getrandbits(32)))

    def _tokens(self, count: int) -> bytes:
        return np.array([self.rng.randrange(3, VOCABULARY) for _ in range(count)], dtype="<u4").tobytes()

    # the life ----------------------------------------------------------------------------------------------------------

    def play(self) -> Counter[str]:
        """Live, heal, come to rest; returns what was counted on the way. AssertionError where something did not hold."""
        rng = self.rng
        for engine in self.engines:
            if rng.random() < 0.9:
                self.simulation.add_engine(engine)
        for consumer in self.consumers:
            consumer.connect()
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
            self._engine_fault,
        ]
        for _ in range(rng.randint(2, 24)):
            self.simulation.at(rng.uniform(0.0, self.horizon_seconds), rng.choice(acts))
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
        if world.attempts or any(run.unfinished or run.undelivered_bytes or run.groups for run in world.runs.values()):
            return False
        return not self.auditor.unfinished()

    def _bound_seconds(self) -> float:
        """After the healing, n rollouts one after the other, each as slow as the slowest engine and as often as its attempts
        and preemptions allow, each waiting once for a hold, a reservation and its retry; and every time-out that may still
        be running once."""
        config = self.config
        token_seconds = 0.04 * self.slowdown  # of either curve with 8 running
        once = LONGEST_OUTPUT * token_seconds + (LONGEST_PROMPT + LONGEST_OUTPUT) / 400.0 * self.slowdown
        tries = config.executor.max_attempts + config.preempt.max_per_rollout + 1
        waits = (
            config.queue.large_reserve_seconds + config.queue.max_defer_seconds + config.queue.leader_timeout_seconds
        )
        pending = (
            config.executor.timeout_seconds + config.executor.abort_seconds + config.executor.breaker_seconds + 10.0
        )
        return pending + (len(self.auditor.unfinished()) + 1) * (tries * once + waits)

    def _heal(self) -> None:
        rng = self.rng
        for engine in self.engines:
            if engine.down:
                engine.restart(self.simulation.now)
            engine.heal(self.simulation.now)
            self.simulation.add_engine(engine)
            self.send(EngineReadiness(engine.facts.engine_id, True))
        for consumer in self.consumers:
            consumer.ack_delay_seconds = min(consumer.ack_delay_seconds, 0.5)
            consumer.connect()
        for run_id in self.runs:
            if run_id not in self.auditor.world.runs:
                continue
            self.send(ResumeRun(run_id))
            state = rng.choice([TrainerState.UNKNOWN, TrainerState.TRAINING, TrainerState.WAITING])
            self.send(ReportStep(run_id, StepReport(self.steps[run_id], state)))
            self.send(SetBudget(run_id, self._sufficient_budget()))

    def _sufficient_budget(self) -> Budget:
        """Small, yet everything that was accepted fits it one at a time."""
        enough = -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // LARGEST_PAGE) * LARGEST_PAGE
        floors = {self.rng.choice(list(RolloutClass)): Quota(floor_rollouts=self.rng.choice([1, 2]))}
        return self.rng.choice(
            [
                Budget(),
                Budget(max_rollouts=2, classes=floors),
                Budget(max_rollouts=1),
                Budget(max_rollouts=2, max_kv_tokens=enough),
                Budget(max_kv_tokens=enough),
            ]
        )

    def note_turn(self, result: RolloutResult) -> None:
        """Something ended: a later prompt may begin with it."""
        text = self.auditor.watched[result.run_id, result.rollout_id].rollout.spec.token_bytes + result.token_bytes
        if len(text) // TOKEN_BYTES <= LONGEST_PROMPT - 8:
            self.turns.append(text)

    # acts --------------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        rng = self.rng
        consumer = rng.choice(self.consumers)
        specs = tuple(self._spec(consumer.run_id) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        self.send(SubmitRollouts(consumer.run_id, consumer.consumer_id, specs))
        for spec in specs:
            self.submitted.append((consumer.run_id, spec.rollout_id))

    def _prompt(self) -> bytes:
        rng = self.rng
        if self.prompts and rng.random() < 0.3:
            return rng.choice(self.prompts)
        if self.turns and rng.random() < 0.2:  # the next turn of something that has ended
            return rng.choice(self.turns) + self._tokens(rng.randint(1, 8))
        stem = rng.choice([*self.stems, b""])
        prompt = stem + self._tokens(rng.randint(1, LONGEST_PROMPT - len(stem) // 4))
        self.prompts.append(prompt)
        return prompt

    def _spec(self, run_id: str) -> RolloutSpec:
        rng = self.rng
        samples = rng.choice([1, 1, 1, 2, 4])
        task = rng.choice([TaskType.GENERATION] * 4 + [TaskType.REWARD, TaskType.STATE_QUERY, TaskType.REPLAY])
        prompt = self._prompt()
        long = rng.randint(1, LONGEST_OUTPUT)
        output = {TaskType.REPLAY: 0, TaskType.GENERATION: long}.get(task, rng.randint(1, 10))
        sampling: dict[str, object] = {}
        if output and rng.random() < 0.5:
            sampling["custom_params"] = {"end_at_tokens": len(prompt) // 4 + rng.randint(1, output)}
        if output > 4 and rng.random() < 0.1:
            sampling["min_new_tokens"] = rng.randint(1, output)
        if output and rng.random() < 0.1:
            sampling["stop_token_ids"] = tuple(rng.randrange(3, VOCABULARY) for _ in range(40))
        if rng.random() < 0.05:
            sampling["frequency_penalty"] = 0.5  # not resumable; the simulated model does not look at it
        pool = rng.choice(["policy"] * 12 + ["reward", "nowhere"])
        mine = [name for run, name in self.submitted if run == run_id]
        return RolloutSpec(
            rollout_id=f"r{len(self.submitted)}-{rng.getrandbits(24):06x}",
            token_bytes=prompt,
            samples=samples,
            seeds=tuple(rng.getrandbits(31) for _ in range(samples)) if rng.random() < 0.8 else (),
            rollout_class=rng.choice([None, *RolloutClass]),
            task_type=task,
            pool=pool,
            group_id=rng.choice(["", "", "", "g1", "g2"]),
            group_size=rng.choice([0, 0, 6]) if samples <= 4 else 0,
            turn=rng.choice([0, 0, 1]),
            parent_rollout_id=rng.choice(mine) if mine and rng.random() < 0.1 else "",
            stratum=rng.choice(["", "a", "b", "c"]),
            origin=rng.choice([Origin.CURRENT_POLICY, Origin.EVALUATION]),
            needed_by_step=rng.choice([None, None, 0, 1, 2, 5]),
            deadline_seconds=rng.choice([0.0] * 8 + [0.3, 2.0, 60.0]),
            queue_ttl_seconds=2.0 if pool != "policy" else rng.choice([0.0] * 8 + [1.0, 5.0]),
            max_attempts=rng.choice([0, 0, 1, 2]),
            on_preempt=rng.choice([None, *OnPreempt]),
            fail_fast=rng.random() < 0.05,
            want_progress=rng.random() < 0.1,
            max_new_tokens=output,
            sampling=sampling,
            logprobs=rng.random() < 0.3,
        )

    def _budget(self) -> None:
        rng = self.rng
        if rng.random() < 0.15:
            budget = Budget(max_rollouts=0)
        else:
            budget = Budget(
                max_rollouts=rng.choice([None, 1, 2, 4, 8]),
                max_kv_tokens=rng.choice([None, None, 0, 192, 300, 800]),
                training_reserved_mb=rng.choice([None] * 6 + [0.2, 0.5]),
                max_inference_mb=rng.choice([None] * 6 + [0.5, 1.0]),
                classes={one: self._quota() for one in RolloutClass if rng.random() < 0.4},
                tasks={one: self._quota() for one in TaskType if rng.random() < 0.15},
                lease_seconds=rng.choice([0.0, 0.0, 0.5, 3.0]),
            )
        self.send(SetBudget(rng.choice(self.runs), budget))

    def _quota(self) -> Quota:
        rng = self.rng
        floor = rng.choice([0, 0, 1, 2, 3])
        return Quota(
            max_rollouts=rng.choice([None, None, max(floor, 1), max(floor, 3)]),
            share=rng.choice([0.0, 0.0, 0.3, 1.0]),
            floor_rollouts=floor,
        )

    def _report(self) -> None:
        rng = self.rng
        run_id = rng.choice(self.runs)
        self.steps[run_id] += rng.choice([0, 0, 1, 1, 3])
        report = StepReport(
            step=self.steps[run_id],
            trainer_state=rng.choice(list(TrainerState)),
            samples_needed=rng.choice([0, 8]),
            consume_samples_per_second=rng.choice([0.0, 2.0]),
            consume_tokens_per_second=rng.choice([0.0, 500.0]),
            policy_entropy=rng.choice([None, 0.5]),
            buffer_fill=rng.choice([None, 0.0, 1.0]),
        )
        self.send(ReportStep(run_id, report))

    def _cancel(self) -> None:
        rng = self.rng
        if not self.submitted:
            return
        run_id, rollout_id = rng.choice(self.submitted)
        groups = (rng.choice(["g1", "g2"]),) if rng.random() < 0.2 else ()
        self.send(CancelRollouts(run_id, (rollout_id,) if not groups or rng.random() < 0.5 else (), groups))

    def _update(self) -> None:
        rng = self.rng
        if not self.submitted:
            return
        run_id, rollout_id = rng.choice(self.submitted)
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
            settings = RunSettings(
                weights=Weights(
                    prefix=rng.choice([None, 0.0, 2.0]), waiting=rng.choice([None, 0.0]), cost=rng.choice([None, 3.0])
                ),
                fairness_weight=rng.choice([0.5, 1.0, 4.0]),
                floor_rollouts=rng.choice([0, 1, 3]),
                default_class=rng.choice(list(RolloutClass)),
                on_preempt=rng.choice(list(OnPreempt)),
                target_mix=rng.choice([{}, {"a": 3.0, "b": 1.0}]),
                cancel_on_disconnect=rng.random() < 0.3,
                disconnect_grace_seconds=rng.choice([0.0, 1.0]),
                max_undelivered_bytes=rng.choice([0, 0, 2_000]),
            )
            self.send(ConfigureRun(run_id, settings))
        else:
            self.send(EndRun(run_id))

    def _ignore(self, event: Event) -> None:
        self.send(event)

    def _engine_fault(self) -> None:
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
        self.auditor.counts[f"fault {kind}"] += 1
        heal = True
        match kind:
            case "crash":
                engine.crash(now, keep_partial=rng.random() < 0.5)
                heal = False
                if rng.random() < 0.5:
                    self.send(LoseEngine(engine_id, "connection refused"))
                self.simulation.at(later, lambda: self._restart(engine))
            case "hang":
                engine.hang(now)
            case "busy":
                engine.busy = True
            case "slow":
                engine.slow(now, rng.choice([3.0, 10.0]) * self.slowdown)
            case "deaf":
                engine.deaf = True
            case "lossy":
                engine.loss = rng.choice([0.5, 1.0])
            case "echo":
                engine.echo_seconds = rng.choice([0.01, 1.0])
            case "refuse":
                engine.refusing = True
            case "drain":
                self.send(DrainEngine(engine_id))
            case "remove":
                self.send(RemoveEngine(engine_id))
            case "lose":
                self.send(LoseEngine(engine_id, "no route"))
            case "unready":
                self.send(EngineReadiness(engine_id, False))
        self.simulation.touch(engine)
        if heal and rng.random() < 0.7:
            self.simulation.at(later, lambda: self._mend(engine))

    def _restart(self, engine: FaultyEngine) -> None:
        if engine.down:
            engine.restart(self.simulation.now)
            self.simulation.add_engine(engine)

    def _mend(self, engine: FaultyEngine) -> None:
        if not engine.down:
            engine.heal(self.simulation.now)
            self.simulation.add_engine(engine)


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
