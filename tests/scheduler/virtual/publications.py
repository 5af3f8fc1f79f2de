"""Asserts what must hold of policy versions and publications, from what engines really hold.

V1  an engine that the core counts on holds the weights that the core believes it holds
V2  work goes only to engines that hold what it requires, and never to one that changes, is in quarantine, or gave its memory away
V3  every accepted publication ends once, and says of each engine what became of it
V4  memory is released only where nothing of ours runs; an engine dies of it only when it still runs what it was told to stop
V5  a prefix hit never crosses weights, unless the publications between them kept the cache; an attempt that ran through a
    publication in place may stand on its own old KV
V6  a finished rollout keeps its requirements, or is marked stale

What this module does not know: tokens (`auditor`), and how many samples may be on their way (`windows`).
"""

from __future__ import annotations

from collections import Counter

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_control import RELEASED_AT_WORK
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.scheduler import versions
from rolloutd.scheduler.actions import Action, Control, Dispatch, PublishEnded, PublishProgress, Refuse
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.events import Event, JoinEngine, PublishPolicy
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.states import CacheHandling, Outcome, UpdateState, Verb
from rolloutd.scheduler.world import World

PUSHED_BEFORE_WORK = frozenset({UpdateState.WAITING, UpdateState.CLEARING})

Name = tuple[str, str, int]  # run, pool, version


def weights_of(run_id: str, version: int) -> str:
    """What engines hold after a run published a version above 0."""
    return f"{run_id}/{version}"


class Publications:
    def __init__(self, simulation: Simulation, world: World, counts: Counter[str]) -> None:
        self.simulation = simulation
        self.world = world
        self.counts = counts
        self.unfinished: dict[Name, float] = {}  # accepted and not over -> since when
        # (run, rollout, attempt's number) -> version 0 of its engine then: an engine that changes its owner may hold others.
        self.registered: dict[tuple[str, str, int], str] = {}
        self._came_with: dict[Engine, str] = {}  # weights that its owner finds there, its version 0
        self._owners: dict[Engine, str] = {}
        self._caches: dict[Name, CacheHandling] = {}
        self._switches: dict[Engine, list[tuple[str, CacheHandling]]] = {}  # (weights, cache) in order

    def observe(self, event: Event, actions: list[Action]) -> None:
        """After every event."""
        if isinstance(event, PublishPolicy):
            self._note_publish(event, actions)
        elif isinstance(event, JoinEngine):
            self._note_joined(event)
        for action in actions:
            match action:
                case Dispatch():
                    self._check_dispatch(action)
                case PublishProgress():
                    self._note_progress(action)
                case PublishEnded():
                    self._note_ended(action)
                case Control(verb=Verb.RELEASE_MEMORY):
                    assert not self.world.engines[action.engine_id].attempts, f"{action.engine_id} still runs our work"
                    self.counts["memory released"] += 1
        self._check_engines()

    # publications ------------------------------------------------------------------------------------------------------

    def _note_publish(self, event: PublishPolicy, actions: list[Action]) -> None:
        update = event.update
        if actions and isinstance(actions[0], Refuse):
            self.counts[f"publish refused {actions[0].error.reason}"] += 1
            return
        self.unfinished.setdefault((event.run_id, update.pool, update.version), self.simulation.now)
        self.counts[f"published {update.mode.name}"] += 1

    def _note_progress(self, action: PublishProgress) -> None:
        name = (action.run_id, action.pool, action.version)
        active = self.world.runs[action.run_id].lineages[action.pool].active
        if active is not None and active.update.version == action.version:
            self._caches[name] = active.update.cache
        if action.state is UpdateState.UPDATED:
            engine = self.world.engines[action.engine_id]
            self._switches.setdefault(engine, []).append(
                (weights_of(action.run_id, action.version), self._caches[name])
            )

    def _note_ended(self, action: PublishEnded) -> None:
        started = self.unfinished.pop((action.run_id, action.pool, action.version), None)
        self.counts["publications ended" if started is not None else "catch-ups ended"] += 1
        self.counts["engines updated"] += len(action.updated)
        self.counts["engines failed"] += len(action.failed)
        assert not set(action.updated) & set(action.failed)

    # engines -----------------------------------------------------------------------------------------------------------

    def _real(self, engine: Engine) -> FaultyEngine | None:
        """The engine itself, while its process is the one that the core knows."""
        real = self.simulation.engines.get(engine.engine_id)
        if isinstance(real, FaultyEngine) and real.facts.incarnation == engine.facts.incarnation:
            return real
        return None

    def _note_joined(self, event: JoinEngine) -> None:
        engine = self.world.engines.get(event.facts.engine_id)
        real = self.simulation.engines.get(event.facts.engine_id)
        if engine is not None and isinstance(real, FaultyEngine) and engine not in self._came_with:
            self._came_with[engine] = real.inner.weights

    def believed(self, engine: Engine, run_id: str) -> str:
        """Weights that the core takes an engine to hold."""
        return weights_of(run_id, engine.version) if engine.version else self._came_with[engine]

    def cached_by(self, engine: Engine, run_id: str, oldest: int) -> list[str]:
        """Weights of the versions from `oldest` on, up to what the engine holds."""
        names = [weights_of(run_id, version) for version in range(max(1, oldest), engine.version + 1)]
        return names if oldest else [self._came_with[engine], *names]

    def _check_engines(self) -> None:
        for engine in self.world.engines.values():
            real = self._real(engine)
            if real is None:
                continue
            if self._owners.setdefault(engine, engine.owner) != engine.owner:
                self._owners[engine] = engine.owner
                self._came_with[engine] = real.inner.weights
            if not engine.quarantine and (engine.update is None or engine.update.state in PUSHED_BEFORE_WORK):
                believed = self.believed(engine, engine.owner)
                lent = engine.memory is not None and "weights" in engine.memory.tags
                assert lent or real.inner.weights == believed, (
                    f"{engine.engine_id} holds {real.inner.weights}, the core believes {believed}"
                )
            for crossing in real.inner.take_crossings():
                self._check_crossing(engine, *crossing)
            if real.deaths:
                self._check_death(real)

    def _check_crossing(self, engine: Engine, computed_by: str, used_by: str, salt: str) -> None:
        if salt != engine.salt:
            self.counts["hits in a namespace of the past"] += 1
            return
        log = self._switches.get(engine, [])
        names = [self._came_with[engine], *(weights for weights, _ in log)]
        what = f"{engine.engine_id}: {used_by} used KV of {computed_by}; {log}"
        assert computed_by in names, what
        first = names.index(computed_by)
        if used_by in names:
            last = len(names) - 1 - names[::-1].index(used_by)
            between = [cache for _, cache in log[first:last]]
        else:  # they are in place and not acknowledged yet
            between = [cache for _, cache in log[first:]]
        assert all(cache is CacheHandling.KEEP for cache in between), what
        self.counts["hits on kept caches"] += 1

    def _check_death(self, real: FaultyEngine) -> None:
        """The core can not know of what an engine runs on although it was told to stop."""
        for death in real.deaths:
            assert death == RELEASED_AT_WORK, f"{real.facts.engine_id} died: {death}"
            self.counts["deaths by a release"] += 1
        real.deaths.clear()

    # work --------------------------------------------------------------------------------------------------------------

    def _check_dispatch(self, action: Dispatch) -> None:
        attempt = self.world.attempts[action.attempt_id]
        engine = attempt.engine
        what = f"{action.rollout_id} went to {engine.engine_id}"
        assert engine.update is None or engine.update.waiting, f"{what}, which is being updated"
        assert not engine.quarantine, f"{what}, which is in quarantine: {engine.quarantine}"
        assert engine.memory is None, f"{what}, whose memory is the trainer's"
        assert engine.owner in ("", action.run_id), f"{what}, which belongs to {engine.owner}"
        rollout = attempt.rollout
        self.registered[action.run_id, action.rollout_id, attempt.number] = self._came_with[engine]
        written = [version for piece in rollout.pieces for version in piece.versions]
        self._check_span(rollout, [*written, engine.version], what)
        wanted = rollout.requirement.max_staleness
        if wanted is not None:
            newest = rollout.run.newest_version(rollout.spec.pool)
            assert newest - min([*written, engine.version]) <= wanted, (
                f"{what} with version {engine.version} of {newest}"
            )
        real = self._real(engine)
        if real is not None:
            believed = self.believed(engine, action.run_id)
            assert real.inner.weights == believed, f"{what}, which holds {real.inner.weights} instead of {believed}"

    def check_result(self, rollout: Rollout, result: RolloutResult) -> None:
        """V6; at the moment of delivery."""
        if result.outcome is not Outcome.COMPLETED:
            return
        written = [span.policy_version for span in result.spans]
        what = f"{result.rollout_id} was delivered with versions {written}; {rollout.tell()}"
        assert written == sorted(written), f"{what}: a policy follows a newer one"
        self._check_span(rollout, written, what)
        wanted = rollout.requirement.max_staleness
        newest = rollout.run.newest_version(rollout.spec.pool)
        if wanted is not None and written:
            assert result.stale is (newest - written[0] > wanted), f"{what}: newest {newest}, stale {result.stale}"
        if len(set(written)) > 1:
            self.counts["mixed versions"] += 1
        if written and written[-1]:
            self.counts["of a published version"] += 1

    @staticmethod
    def _check_span(rollout: Rollout, written: list[int], what: str) -> None:
        wanted = rollout.requirement
        if not written:
            return
        assert min(written) >= wanted.min_version, f"{what}: min_version {wanted.min_version}"
        assert wanted.exact_version is None or set(written) == {wanted.exact_version}, f"{what}: {wanted}"
        span = wanted.max_partial_span
        assert span is None or max(written) - min(written) <= span, f"{what}: max_partial_span {span}"

    # the end -----------------------------------------------------------------------------------------------------------

    def at_rest(self) -> bool:
        """Whether nothing is being published."""
        return not self.unfinished and not any(
            lineage.active is not None or lineage.queue
            for run in self.world.runs.values()
            for lineage in run.lineages.values()
        )

    def check_quiet(self) -> None:
        world = self.world
        assert not self.unfinished, f"publications that never ended: {self.unfinished}"
        assert not world.controls and not world.clearing and not world.releasing, "control calls are left over"
        for engine in world.engines.values():
            assert engine.update is None and not engine.control_id, f"{engine.engine_id} is still being updated"
        for run in world.runs.values():
            for lineage in run.lineages.values():
                assert not lineage.held, f"{run.run_id} still holds work for a version"
            assert not run.bound, f"{run.run_id} still remembers rollouts bound to versions"


def gone(rollout: Rollout) -> bool:
    """Whether the one version that it accepts cannot come any more."""
    exact = rollout.requirement.exact_version
    return exact is not None and exact < rollout.run.newest_version(rollout.spec.pool)


def too_old(rollout: Rollout) -> bool:
    """Whether its oldest token is older than it accepts."""
    return versions.too_old(rollout.run.lineage(rollout.spec.pool), rollout)
