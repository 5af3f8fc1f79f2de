"""Asserts that a simulation never runs or holds more than a budget allows.

Ceilings, with G = `budget.shrink_seconds`, at every event, from what the engines really run and hold:
    running rollouts and KV tokens of a run <= the largest of the limits in force during the last G seconds
    a class or task ceiling is not exceeded for longer than G without a break (a promotion may put a class over its limit)
  Not counted: engines that left an abort unheard or were made slow within the last G (as real ones do while they are paused in
  place or load weights), and attempts that the core gave up on
  after such silence (an engine that does not answer can not be made to obey); and, for KV, engines that lose progress
  reports (an attempt whose tokens nobody reports can not be accounted for). A KV limit may be exceeded by one page per running
  attempt: claims are whole pages, and a shared page counts for each.

What this module does not know: which rollouts should run instead (`floors`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import Budget, Quota
from rolloutd.scheduler.states import RolloutClass, TaskType
from rolloutd.scheduler.world import World

MIB = 1 << 20

# (run id, RolloutClass or TaskType, its member): members of the two are equal as numbers
Kind = tuple[str, type[RolloutClass] | type[TaskType], RolloutClass | TaskType]


class Ceilings:
    def __init__(self, simulation: Simulation, world: World, config: SchedulerConfig, counts: Counter[str]) -> None:
        self.simulation = simulation
        self.world = world
        self.config = config
        self.counts = counts
        self._budgets: dict[str, list[tuple[float, Budget]]] = {}  # run id -> (in force since, budget), newest last
        self._over_since: dict[Kind, float] = {}

    def observe(self) -> None:
        """After every event."""
        self._note_budgets()
        self._check_ceilings()

    def _note_budgets(self) -> None:
        for run in self.world.runs.values():
            known = self._budgets.setdefault(run.run_id, [])
            if not known or known[-1][1] is not run.ledger.budget:
                known.append((self.simulation.now, run.ledger.budget))
                self.counts["budgets"] += 1

    def _in_force(self, run: Run) -> list[Budget]:
        """Budgets of the last `shrink_seconds`."""
        known = self._budgets[run.run_id]
        since = self.simulation.now - self.config.budget.shrink_seconds
        while len(known) > 1 and known[1][0] < since:
            known.pop(0)
        return [budget for _, budget in known]

    def _check_ceilings(self) -> None:
        if not any(_limits_anything(run.ledger.budget) for run in self.world.runs.values()):
            return
        grace = self.config.budget.shrink_seconds
        now = self.simulation.now
        running: Counter[str] = Counter()
        kv_tokens: Counter[str] = Counter()
        kinds: Counter[Kind] = Counter()
        kv_by_engine: Counter[tuple[str, str]] = Counter()
        for engine_id, engine in self.simulation.engines.items():
            if isinstance(engine, FaultyEngine) and not engine.answers(now, grace):
                continue
            held = engine.held_tokens(now)
            if not held:
                continue
            lossy = isinstance(engine, FaultyEngine) and engine.loss > 0.0
            page = engine.facts.page_tokens
            for attempt_id, tokens in held.items():
                attempt = self.world.attempts.get(attempt_id)
                if attempt is None:
                    continue
                run = attempt.rollout.run
                run_id = run.run_id
                running[run_id] += 1
                if run.ledger.budget.classes or run.ledger.budget.tasks:
                    kinds[run_id, RolloutClass, attempt.rollout.rollout_class] += 1
                    kinds[run_id, TaskType, attempt.rollout.task_type] += 1
                if not lossy:
                    kv_tokens[run_id] += max(0, tokens - page)
                    kv_by_engine[run_id, engine_id] += max(0, tokens - page)
        for run_id, count in running.items():
            run = self.world.runs[run_id]
            budgets = self._in_force(run)
            limit = _largest([budget.max_rollouts for budget in budgets])
            assert count <= limit, f"{now}: {count} rollouts of {run_id} run, {limit} may"
            limit = _largest([budget.max_kv_tokens for budget in budgets])
            assert kv_tokens[run_id] <= limit, f"{now}: {run_id} holds {kv_tokens[run_id]} KV tokens of {limit}"
        for (run_id, engine_id), tokens in kv_by_engine.items():
            budgets = self._in_force(self.world.runs[run_id])
            limit = _largest([self._engine_limit(engine_id, budget) for budget in budgets])
            assert tokens <= limit, f"{now}: {run_id} holds {tokens} KV tokens on {engine_id}, {limit} may"
        self._check_kinds(kinds)

    def _engine_limit(self, engine_id: str, budget: Budget) -> int | None:
        facts = self.simulation.engines[engine_id].facts
        if not facts.kv_cache_bytes:
            return None
        tokens_per_mb = facts.kv_capacity_tokens / (facts.kv_cache_bytes / MIB)
        limits = []
        if budget.training_reserved_mb is not None:
            limits.append(max(0, int(facts.kv_capacity_tokens - budget.training_reserved_mb * tokens_per_mb)))
        if budget.max_inference_mb is not None:
            limits.append(int(budget.max_inference_mb * tokens_per_mb))
        return min(limits, default=None)

    def _check_kinds(self, kinds: Counter[Kind]) -> None:
        now = self.simulation.now
        over = {}
        for kind, count in kinds.items():
            run_id, vocabulary, member = kind
            budget = self.world.runs[run_id].ledger.budget
            quotas: Mapping[int, Quota] = budget.classes if vocabulary is RolloutClass else budget.tasks
            limit = quotas.get(member, NO_QUOTA).max_rollouts
            if limit is not None and count > limit:
                over[kind] = self._over_since.get(kind, now)
                assert now - over[kind] <= self.config.budget.shrink_seconds, (
                    f"{now}: {count} rollouts of {run_id} {member!r} run since {over[kind]}, {limit} may"
                )
        self._over_since = over


def _largest(limits: list[int | None]) -> float:
    """The weakest of these limits; None is no limit."""
    return max(math.inf if limit is None else limit for limit in limits)


def _limits_anything(budget: Budget) -> bool:
    """Whether there is a ceiling that could be exceeded."""
    limits = (budget.max_rollouts, budget.max_kv_tokens, budget.training_reserved_mb, budget.max_inference_mb)
    return any(limit is not None for limit in limits) or bool(budget.classes) or bool(budget.tasks)
