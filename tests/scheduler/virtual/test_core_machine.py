"""The whole core under hypothesis: every rule is one event, and a failure shrinks to a short list of events.

The bench of `tests.scheduler.kit` checks core and ceilings after each event, and that ends are single, ids fresh and aborts
aimed. Engines are played by the rules: reports come late, twice, partial, or not at all until the end.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolloutd.scheduler.events import (
    AttachConsumer,
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    CloseConsumer,
    DetachConsumer,
    DrainEngine,
    EngineReadiness,
    JoinEngine,
    LoseEngine,
    PauseRun,
    PublishPolicy,
    RemoveEngine,
    ResumeRun,
    UpdateRollouts,
    WeightsPushed,
)
from rolloutd.scheduler.publishing import SOUND_CACHES
from rolloutd.scheduler.spec import PolicyUpdate, Quota, RolloutUpdate
from rolloutd.scheduler.states import (
    CacheHandling,
    FaultKind,
    OnPreempt,
    Outcome,
    ReleaseMemory,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
    UpdateMode,
)
from rolloutd.server.core_build import core_is_compiled
from tests.scheduler.kit import CONSUMER, RUN, Bench, config, engine, prompt, spec

OTHER = "rank-1"
ENGINES = ("e0", "e1", "e2")
MAX_NEW_TOKENS = 16
SETTINGS = config(
    executor={"timeout_seconds": 5.0, "abort_seconds": 2.0, "breaker_faults": 2, "breaker_seconds": 3.0},
    preempt={"min_run_seconds": 0.0, "cool_down_seconds": 0.0},
    queue={"large_reserve_seconds": 1.0, "max_batch_size": 4},
)

classes = st.sampled_from(RolloutClass)
pick = st.integers(0, 1 << 16)  # an index, taken modulo what there is


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(engine("e0", slots=2, kv_capacity_tokens=256), engine("e1", slots=1), settings=SETTINGS)
        self.names: list[str] = []
        self.incarnations = dict.fromkeys(ENGINES, 1)

    def _rollouts(self) -> list[str]:
        """Names of all that is remembered of the run."""
        return sorted(self.bench.its_run().rollouts)

    # trainers ----------------------------------------------------------------------------------------------------------

    @rule(
        rollout_class=classes,
        task=st.sampled_from(TaskType),
        samples=st.sampled_from([1, 1, 2, 3]),
        stem=st.sampled_from(["alone", "shared"]),
        tokens=st.sampled_from([1, 8, 40, 120]),
        on_preempt=st.sampled_from(OnPreempt),
        step=st.sampled_from([None, 0, 2]),
        parent=st.booleans(),
        limits=st.sampled_from([{}, {"deadline_seconds": 3.0}, {"queue_ttl_seconds": 4.0}, {"max_attempts": 1}]),
        versions=st.sampled_from(
            [{}, {}, {"min_version": 1}, {"exact_version": 1}, {"max_staleness": 0}, {"max_partial_span": 0}]
        ),
        consumer=st.sampled_from([CONSUMER, OTHER]),
    )
    def submit(
        self,
        rollout_class: RolloutClass,
        task: TaskType,
        samples: int,
        stem: str,
        tokens: int,
        on_preempt: OnPreempt,
        step: int | None,
        parent: bool,
        limits: dict[str, Any],
        versions: dict[str, int],
        consumer: str,
    ) -> None:
        name = f"r{len(self.names)}"
        one = spec(
            name,
            rollout_class=rollout_class,
            task_type=task,
            samples=samples,
            token_bytes=prompt(name if stem == "alone" else stem, tokens),
            on_preempt=on_preempt,
            needed_by_step=step,
            parent_rollout_id=self.names[-1] if parent and self.names else "",
            **limits,
            **versions,
        )
        self.names.append(name)
        self.bench.submit(one, consumer=consumer)

    @precondition(lambda self: self.names)
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        self.bench.cancel(self.names[which % len(self.names)])

    @precondition(lambda self: self._rollouts())
    @rule(
        which=pick,
        rollout_class=st.none() | classes,
        step=st.none() | st.integers(0, 3),
        deadline=st.sampled_from([None, 0.0, 2.0]),
    )
    def update(self, which: int, rollout_class: RolloutClass | None, step: int | None, deadline: float | None) -> None:
        names = self._rollouts()
        update = RolloutUpdate(names[which % len(names)], rollout_class, deadline, step)
        self.bench.do(UpdateRollouts(RUN, (update,)))

    @rule(
        rollouts=st.sampled_from([None, 0, 1, 2]),
        kv_tokens=st.sampled_from([None, 0, 64, 200]),
        floor=st.sampled_from([None, *RolloutClass]),
        most=st.sampled_from([None, *RolloutClass]),
        lease=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def budget(
        self,
        rollouts: int | None,
        kv_tokens: int | None,
        floor: RolloutClass | None,
        most: RolloutClass | None,
        lease: float,
    ) -> None:
        quotas = {}
        if floor is not None:
            quotas[floor] = Quota(floor_rollouts=1)
        if most is not None and most is not floor:
            quotas[most] = Quota(max_rollouts=1)
        self.bench.budget(max_rollouts=rollouts, max_kv_tokens=kv_tokens, classes=quotas, lease_seconds=lease)

    @rule(advance=st.integers(0, 2), state=st.sampled_from(TrainerState))
    def report(self, advance: int, state: TrainerState) -> None:
        self.bench.step(self.bench.its_run().step + advance, state)

    @rule(pause=st.booleans())
    def pause(self, pause: bool) -> None:
        self.bench.do(PauseRun(RUN) if pause else ResumeRun(RUN))

    @rule(consumer=st.sampled_from([CONSUMER, OTHER]), close=st.booleans())
    def disconnect(self, consumer: str, close: bool) -> None:
        if close:
            self.bench.do(CloseConsumer(RUN, consumer))
        self.bench.do(DetachConsumer(RUN, consumer))

    @rule(consumer=st.sampled_from([CONSUMER, OTHER]), take_over=st.booleans())
    def connect(self, consumer: str, take_over: bool) -> None:
        other = OTHER if consumer == CONSUMER else CONSUMER
        self.bench.do(AttachConsumer(RUN, consumer, take_over=(other,) if take_over else ()))

    @precondition(lambda self: self.bench.ended)
    @rule(which=pick)
    def acknowledge(self, which: int) -> None:
        names = sorted(self.bench.ended)
        for consumer in (CONSUMER, OTHER):
            self.bench.acknowledge(names[which % len(names)], consumer=consumer)

    # versions ----------------------------------------------------------------------------------------------------------

    @rule(
        step=st.sampled_from([1, 1, 1, 0, -1]),
        way=st.sampled_from([(mode, cache) for mode, caches in SOUND_CACHES.items() for cache in caches]),
        pushed=st.booleans(),
        at_once=st.sampled_from([0, 1]),
    )
    def publish(self, step: int, way: tuple[UpdateMode, CacheHandling], pushed: bool, at_once: int) -> None:
        version = self.bench.its_run().newest_version("policy") + step
        path = "" if pushed else f"/weights/{version}"
        update = PolicyUpdate(version, path, way[0], way[1], engines_at_once=at_once)
        self.bench.do(PublishPolicy(RUN, update))

    @precondition(lambda self: self.bench.controls)
    @rule(which=pick, odd=st.booleans())
    def answer(self, which: int, odd: bool) -> None:
        """A control call succeeds; oddly: the cache is not flushed, the label is another one."""
        names = sorted(self.bench.controls)
        self.bench.answer(names[which % len(names)], **({"flushed": False, "label": "who knows"} if odd else {}))

    @precondition(lambda self: self.bench.controls)
    @rule()
    def answer_all(self) -> None:
        """Every call that is out, and those that follow, succeed."""
        self.bench.finish_updates()

    @precondition(lambda self: self.bench.controls)
    @rule(which=pick, fault=st.sampled_from(FaultKind))
    def refuse(self, which: int, fault: FaultKind) -> None:
        names = sorted(self.bench.controls)
        self.bench.call_fails(names[which % len(names)], fault)

    @rule(engine_id=st.sampled_from(["", *ENGINES]), error=st.sampled_from(["", "", "no route"]))
    def confirm(self, engine_id: str, error: str) -> None:
        version = self.bench.its_run().newest_version("policy")
        self.bench.do(WeightsPushed(RUN, "policy", version, engine_id, error))

    @rule(
        release=st.sampled_from(ReleaseMemory),
        slice_tokens=st.sampled_from([0, 4]),
        bound=st.sampled_from([(None, 0), (1, 2)]),
    )
    def configure(self, release: ReleaseMemory, slice_tokens: int, bound: tuple[int | None, int]) -> None:
        staleness, samples = bound
        self.bench.configure(
            release_memory=release, slice_tokens=slice_tokens, max_staleness=staleness, batch_samples=samples
        )

    # time --------------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.3, 1.1, 6.0, 21.0]))
    def tick(self, seconds: float) -> None:
        self.bench.tick(seconds)

    # engines -----------------------------------------------------------------------------------------------------------

    def _attempt(self, which: int) -> str:
        names = sorted(self.bench.live)
        return names[which % len(names)]

    @precondition(lambda self: self.bench.live)
    @rule(which=pick, tokens=st.integers(1, MAX_NEW_TOKENS))
    def write(self, which: int, tokens: int) -> None:
        one = self.bench.live[self._attempt(which)]
        if one.max_new_tokens:
            self.bench.write(one.rollout_id, min(tokens, one.max_new_tokens))

    @precondition(lambda self: self.bench.live)
    @rule(which=pick, tokens=st.integers(1, MAX_NEW_TOKENS))
    def finish(self, which: int, tokens: int) -> None:
        one = self.bench.live[self._attempt(which)]
        self.bench.finish(one.rollout_id, min(tokens, one.max_new_tokens))

    @precondition(lambda self: self.bench.leaving())
    @rule(which=pick, tokens=st.integers(0, MAX_NEW_TOKENS))
    def stop(self, which: int, tokens: int) -> None:
        """The engine does what an abort asked for."""
        names = sorted(self.bench.leaving())
        one = self.bench.live[names[which % len(names)]]
        self.bench.stopped(one.rollout_id, min(tokens, one.max_new_tokens))

    @precondition(lambda self: self.bench.live)
    @rule(which=pick, fault=st.sampled_from(FaultKind), tokens=st.integers(0, MAX_NEW_TOKENS))
    def fail(self, which: int, fault: FaultKind, tokens: int) -> None:
        one = self.bench.live[self._attempt(which)]
        kept = min(tokens, one.max_new_tokens) if fault is FaultKind.BROKEN else 0
        self.bench.fail(one.rollout_id, fault, kept)

    @precondition(lambda self: self.bench.dispatched)
    @rule(which=pick, kind=st.sampled_from(["progress", "end", "failure"]))
    def echo(self, which: int, kind: str) -> None:
        """A report about an attempt that has ended comes late."""
        one = self.bench.dispatched[which % len(self.bench.dispatched)]
        if one.attempt_id in self.bench.core._world.attempts:
            return
        before = self.bench.core.statistics()
        if kind == "progress":
            self.bench.do(AttemptProgress(one.attempt_id, 3, 8, 0))
        elif kind == "end":
            self.bench.do(AttemptEnded(one.attempt_id, self.bench.piece(one.rollout_id, 3, "stop", one)))
        else:
            self.bench.do(AttemptFailed(one.attempt_id, FaultKind.BROKEN, "late"))
        assert self.bench.core.statistics() == before, "a late report changed something"

    @rule(engine_id=st.sampled_from(ENGINES), anew=st.booleans(), slots=st.sampled_from([1, 2, 8]))
    def join(self, engine_id: str, anew: bool, slots: int) -> None:
        known = self.bench.core._world.engines.get(engine_id)
        if anew or known is None:
            self.incarnations[engine_id] += 1
            facts = engine(engine_id, slots, kv_capacity_tokens=256, incarnation=str(self.incarnations[engine_id]))
            self.bench.gone(engine_id)
        else:
            facts = known.facts
        self.bench.do(JoinEngine(facts))

    @rule(engine_id=st.sampled_from(ENGINES), kind=st.sampled_from(["lose", "unready", "ready", "drain", "remove"]))
    def leave(self, engine_id: str, kind: str) -> None:
        match kind:
            case "lose":
                self.bench.do(LoseEngine(engine_id, "no route"))
            case "unready" | "ready":
                self.bench.do(EngineReadiness(engine_id, kind == "ready"))
            case "drain":
                self.bench.do(DrainEngine(engine_id))
            case _:
                self.bench.do(RemoveEngine(engine_id))
                if engine_id not in self.bench.core._world.engines:
                    self.bench.gone(engine_id)

    # always ------------------------------------------------------------------------------------------------------------

    @invariant()
    def what_ended_is_whole(self) -> None:
        for name in self.bench.ended:
            withheld = self.bench.outcome(name) is Outcome.STALE
            assert withheld or self.bench.whole(name), f"{name}: {self.bench.result(name)}"

    def teardown(self) -> None:
        """Everything heals; all that was accepted ends, and nothing is left."""
        bench = self.bench
        if not bench.core._world.runs:
            return
        bench.budget()
        bench.do(ResumeRun(RUN))
        bench.step(bench.its_run().step, TrainerState.WAITING)
        for engine_id in ENGINES:
            self.incarnations[engine_id] += 1
            bench.gone(engine_id)
            bench.do(JoinEngine(engine(engine_id, slots=4, incarnation=str(self.incarnations[engine_id]))))
        for consumer in (CONSUMER, OTHER):
            bench.do(AttachConsumer(RUN, consumer))
        for _ in range(200):
            bench.tick(1.0)
            self._publish_all()
            for one in list(bench.live.values()):
                bench.finish(one.rollout_id, one.max_new_tokens)
            self._take_all()  # what is not taken keeps others from being let in
            at_rest = bench.its_run().lineage("policy").active is None
            if at_rest and all(bench.state(name) is RolloutState.FINISHED for name in self._rollouts()):
                break
        self._take_all()
        assert not self._rollouts(), f"never ended: {[bench.view(name) for name in self._rollouts()]}"
        bench.quiet()
        assert not bench.controls and bench.its_run().lineage("policy").active is None, "a publication never ended"
        assert all(bench.outcome(name) is not Outcome.INTERNAL for name in bench.ended)

    def _take_all(self) -> None:
        for consumer in (CONSUMER, OTHER):
            self.bench.acknowledge(*sorted(self.bench.ended), consumer=consumer)

    def _publish_all(self) -> None:
        """What is out succeeds, what is being pushed fails, and engines that do not hold the newest version get it."""
        bench = self.bench
        bench.finish_updates()
        lineage = bench.its_run().lineage("policy")
        if lineage.active is not None:
            if not lineage.active.update.path:
                bench.do(WeightsPushed(RUN, "policy", lineage.version, error="it is over"))
        elif any(one.quarantine for one in bench.core._world.engines.values()) or not lineage.version:
            bench.publish(max(1, lineage.version))
        bench.finish_updates()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=400 if core_is_compiled() else 150, stateful_step_count=50, deadline=None)
