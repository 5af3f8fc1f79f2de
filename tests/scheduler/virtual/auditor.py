"""Watches a simulation and asserts, event by event, what must always hold.

P1  an accepted rollout ends once; what is delivered is the engine's deterministic function of its prompt and seed, token by
    token, whatever was interrupted, resumed or retried; a resumed attempt continues from exactly the tokens it was given
P2  `Scheduler.check()` every `check_every` events; everything is 0 at quiesce
P4  a prediction never exceeds what the engine's process has ever computed, nor the prompt less one token
P5  scores are finite; the caller checks that everything ends within a bound
P6  attempt ids are fresh and 32 hex digits; an abort names an attempt that is live, on its engine
P7  outcomes have their cause: see `_check_outcome`

Ceilings, with G = `budget.shrink_seconds`, at every event, from what the engines really run and hold:
    running rollouts and KV tokens of a run <= the largest of the limits in force during the last G seconds
    a class or task ceiling is not exceeded for longer than G without a break (a promotion may put a class over its limit)
  Not counted: engines that left an abort unheard or were made slow within the last G, and attempts that the core gave up on
  after such silence (an engine that does not answer can not be made to obey); and, for KV, engines that lose progress
  reports (an attempt whose tokens nobody reports can not be accounted for). A KV limit may be exceeded by one page per running
  attempt: claims are whole pages, and a shared page counts for each.

Floors, after every Tick. A class with `floor_rollouts` f is owed d = min(f - running, queued and not held) rollouts. "Within one
rollout" means: d >= 2 never goes together with
    (F1) room: the class's oldest entry, not held, has every gate open on an open engine with a free slot, at rest
    (F2) a dispatch in this Tick, of the same run and pool, of a class that is not owed, to an engine that would still take the
         owed class's oldest entry after it (short work in a slot reserved for it, and a rollout too large for any gap in the
         room kept for it, are nobody else's loss)

What this module does not know: how events come about.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.tokens import Expected, Model, expected_output, score
from rolloutd.scheduler import budgeting, gates
from rolloutd.scheduler.actions import Abort, Action, Deliver, Dispatch, Finished, GroupFinished, Refuse
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.events import (
    AcknowledgeResults,
    AttemptEnded,
    AttemptFailed,
    CancelRollouts,
    ConfigureRun,
    EndRun,
    Event,
    JoinEngine,
    SubmitRollouts,
    Tick,
)
from rolloutd.scheduler.intake import member_ids
from rolloutd.scheduler.ledger import NO_QUOTA
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import TOKEN_BYTES, Budget, Quota
from rolloutd.scheduler.states import (
    SHORT_TASKS,
    AbortReason,
    FaultKind,
    Gate,
    Outcome,
    RolloutClass,
    RolloutState,
    TaskType,
)
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World

HEX_DIGITS = frozenset("0123456789abcdef")
ATTEMPT_ID_CHARS = 32
MIB = 1 << 20

Key = tuple[str, str]  # (run id, rollout id)
# (run id, RolloutClass or TaskType, its member): members of the two are equal as numbers
Kind = tuple[str, type[RolloutClass] | type[TaskType], RolloutClass | TaskType]


class Watched:
    """One accepted rollout and what happened to it."""

    __slots__ = (
        "accepted_at",
        "busy",
        "cancelled",
        "deadline_abort",
        "expected",
        "faults",
        "refused",
        "result",
        "rollout",
    )

    def __init__(self, rollout: Rollout, accepted_at: float) -> None:
        self.rollout = rollout
        self.accepted_at = accepted_at
        self.expected: Expected | None = None
        self.result: RolloutResult | None = None
        self.faults = 0  # attempts that an engine broke, left silent or aborted by itself
        self.busy = 0
        self.refused = False
        self.cancelled = False
        self.deadline_abort = False


class Auditor:
    """Attach with `simulation.observers.append(auditor.observe)` before the first event."""

    def __init__(
        self, simulation: Simulation, world: World, config: SchedulerConfig, model: Model, check_every: int
    ) -> None:
        self.simulation = simulation
        self.world = world
        self.config = config
        self.model = model
        self.check_every = check_every
        self.watched: dict[Key, Watched] = {}
        self.acknowledged: set[Key] = set()
        self.counts: Counter[str] = Counter()
        self.attempts: dict[str, tuple[Key, str]] = {}  # live as the core sees it: attempt id -> (rollout, engine)
        self.used_ids: set[str] = set()
        self._budgets: dict[str, list[tuple[float, Budget]]] = {}  # run id -> (in force since, budget), newest last
        self._reserved: set[Rollout] = set()  # for whom room was kept before the event
        self._ended_runs: set[str] = set()
        self._cancelling_runs: set[str] = set()  # cancel_on_disconnect at some time
        self._over_since: dict[Kind, float] = {}

    def observe(self, event: Event, actions: list[Action]) -> None:
        """After every event."""
        match event:
            case SubmitRollouts():
                self._note_accepted(event)
            case CancelRollouts():
                self._note_cancelled(event)
            case AttemptEnded() | AttemptFailed():
                self._note_end(event)
            case JoinEngine() | Tick():
                self._note_lost_attempts()
            case ConfigureRun():
                if event.settings.cancel_on_disconnect:
                    self._cancelling_runs.add(event.run_id)
            case EndRun():
                self._ended_runs.add(event.run_id)
            case AcknowledgeResults():
                self.acknowledged.update((event.run_id, one.rollout_id) for one in event.acknowledgements)
        dispatched = []
        for action in actions:
            match action:
                case Dispatch():
                    self._check_dispatch(action)
                    dispatched.append(action)
                case Abort():
                    self._check_abort(action)
                case Deliver(event=Finished(result)):
                    self._check_delivery(result)
                case Deliver(event=GroupFinished()):
                    self._check_group(action)
                case Refuse():
                    assert len(actions) == 1, "a refused event did something else too"
        self._note_budgets()
        self._check_ceilings()
        if isinstance(event, Tick):
            self._check_floors(dispatched)
        self._note_reservations()
        if self.simulation.events_handled % self.check_every == 0:
            self.check()

    def check(self) -> None:
        """The full check of core and engines."""
        self.simulation.scheduler.check()
        for engine in self.simulation.engines.values():
            if isinstance(engine, FaultyEngine) and not engine.down:
                engine.inner.check()
        self.counts["checks"] += 1

    # P1 and P7 ---------------------------------------------------------------------------------------------------------

    def _note_accepted(self, event: SubmitRollouts) -> None:
        run = self.world.runs.get(event.run_id)
        for spec in event.specs:
            for rollout_id in member_ids(spec):
                rollout = None if run is None else run.rollouts.get(rollout_id)
                key = (event.run_id, rollout_id)
                if rollout is not None and key not in self.watched:
                    self.watched[key] = Watched(rollout, self.simulation.now)
                    self.counts["accepted"] += 1

    def _note_cancelled(self, event: CancelRollouts) -> None:
        """Those that were named, by id, as samples or as a group, and everything below them."""
        named = {*event.rollout_ids, *event.group_ids}
        for (run_id, rollout_id), watched in self.watched.items():
            rollout = watched.rollout
            spec = rollout.spec
            group_id = "" if rollout.group is None else rollout.group.group_id
            above = self.watched.get((run_id, spec.parent_rollout_id))
            if run_id == event.run_id and (
                not named.isdisjoint((rollout_id, spec.rollout_id, group_id, spec.parent_rollout_id))
                or (above is not None and above.cancelled)
            ):
                watched.cancelled = True

    def _note_end(self, event: AttemptEnded | AttemptFailed) -> None:
        known = self.attempts.pop(event.attempt_id, None)
        if known is None:
            self.counts["reports of attempts that are gone"] += 1
            return
        watched = self.watched[known[0]]
        if isinstance(event, AttemptEnded):
            if event.piece.finish_reason == "abort":
                watched.faults += 1  # perhaps asked for: an upper bound is enough for P7
        elif event.fault is FaultKind.REFUSED:
            watched.refused = True
        elif event.fault is FaultKind.BUSY:
            watched.busy += 1
        else:
            watched.faults += 1
        assert event.attempt_id not in self.world.attempts, "an attempt outlived its end"

    def _note_lost_attempts(self) -> None:
        """Attempts that the core closed without a report: a restarted engine's, and those whose abort went unanswered."""
        if self.attempts.keys() <= self.world.attempts.keys():
            return
        for attempt_id in [one for one in self.attempts if one not in self.world.attempts]:
            key, _ = self.attempts.pop(attempt_id)
            self.watched[key].faults += 1
            self.counts["attempts given up"] += 1

    def _check_delivery(self, result: RolloutResult) -> None:
        key = (result.run_id, result.rollout_id)
        watched = self.watched.get(key)
        assert watched is not None, f"{key} was delivered and never accepted"
        assert key not in self.acknowledged, f"{key} was delivered after its acknowledgement"
        if watched.result is not None:
            assert watched.result is result, f"{key} ended twice: {watched.result.outcome}, {result.outcome}"
            self.counts["redelivered"] += 1
            return
        watched.result = result
        self.counts[result.outcome.name] += 1
        self._check_tokens(watched, result)
        self._check_outcome(watched, result)

    def _check_tokens(self, watched: Watched, result: RolloutResult) -> None:
        what = f"{result.rollout_id} ({result.outcome.name}; {watched.rollout.tell()})"
        expected = self._expected(watched)
        got = memoryview(result.token_bytes).cast("I").tolist()
        if result.outcome is Outcome.COMPLETED:
            assert got == expected.tokens, f"{what}: {got}, expected {expected.tokens}"
            full = len(got) == watched.rollout.max_new_tokens  # then nobody can tell an end token from the limit
            assert full or result.finish_reason == expected.finish.kind, f"{what}: ended by {result.finish_reason}"
        else:
            assert got == expected.tokens[: len(got)], f"{what}: {got} is no part of {expected.tokens}"
        assert result.generated_tokens == len(got), what
        if result.logprob_bytes:
            logprobs = memoryview(result.logprob_bytes).cast("f").tolist()
            assert logprobs == expected.logprobs[: len(got)], f"{what}: log-probs are not the tokens'"
        position = 0
        for span in result.spans:
            assert span.start == position and span.end > span.start, f"{what}: spans {result.spans}"
            position = span.end
        assert position == len(got), f"{what}: spans end at {position} of {len(got)}"
        if result.task_type is TaskType.REPLAY and result.outcome is Outcome.COMPLETED:
            scores = score(self.model, watched.rollout.spec.token_bytes).tolist()
            assert memoryview(result.prompt_logprob_bytes).cast("f").tolist()[1:] == scores[1:], what

    def _expected(self, watched: Watched) -> Expected:
        if watched.expected is None:
            rollout = watched.rollout
            spec = rollout.spec
            words = spec.sampling
            watched.expected = expected_output(
                spec.token_bytes,
                rollout.max_new_tokens if spec.task_type is not TaskType.REPLAY else 0,
                sampling_seed=spec.seeds[rollout.sample_index] if spec.seeds else None,
                min_new_tokens=words.get("min_new_tokens", 0),
                end_at_tokens=words.get("custom_params", {}).get("end_at_tokens"),
                stop_token_ids=words.get("stop_token_ids", ()),
                model=self.model,
            )
        return watched.expected

    def _check_outcome(self, watched: Watched, result: RolloutResult) -> None:
        """P7: no outcome without its cause."""
        rollout = watched.rollout
        spec = rollout.spec
        now = self.simulation.now
        what = f"{result.rollout_id} ended with {result.outcome.name}; {rollout.tell()}"
        limit = spec.max_attempts or rollout.run.settings.max_attempts or self.config.executor.max_attempts
        match result.outcome:
            case Outcome.COMPLETED:
                assert result.error is None and result.complete, what
            case Outcome.CANCELLED:
                asked = watched.cancelled or self._parent_cancelled(watched)
                assert asked or rollout.run.run_id in self._cancelling_runs, what
            case Outcome.RUN_ENDED:
                assert rollout.run.run_id in self._ended_runs, what
            case Outcome.DEADLINE_EXCEEDED:
                passed = rollout.deadline_at is not None and now >= rollout.deadline_at
                assert passed or watched.deadline_abort, what  # a later deadline does not call back an abort
            case Outcome.QUEUE_TIMEOUT | Outcome.NO_ENGINE:
                assert now >= rollout.ttl_at, what
            case Outcome.ENGINE_REFUSED:
                assert watched.refused, what
            case Outcome.ENGINE_FAILED:
                assert watched.faults >= limit, f"{what}: {watched.faults} faults of {limit}"
            case _:
                raise AssertionError(what)
        assert (result.outcome is Outcome.COMPLETED) == (result.error is None), what

    def _parent_cancelled(self, watched: Watched) -> bool:
        """A leaf that arrives after its subtree was cancelled goes with it."""
        rollout = watched.rollout
        parent = self.watched.get((rollout.run.run_id, rollout.spec.parent_rollout_id))
        return parent is not None and parent.rollout.state is RolloutState.FINISHED and parent.cancelled

    def _check_group(self, action: Deliver) -> None:
        event = action.event
        assert isinstance(event, GroupFinished)
        for rollout_id in event.rollout_ids:
            watched = self.watched[action.run_id, rollout_id]
            assert watched.rollout.state is RolloutState.FINISHED, f"group {event.group_id} ended before {rollout_id}"
        failed = {one for one in event.rollout_ids if self._outcome(action.run_id, one) is not Outcome.COMPLETED}
        assert set(event.failed_rollout_ids) == failed and event.complete is (not failed)

    def _outcome(self, run_id: str, rollout_id: str) -> Outcome:
        result = self.watched[run_id, rollout_id].rollout.result
        assert result is not None
        return result.outcome

    # P4, P5, P6 --------------------------------------------------------------------------------------------------------

    def _check_dispatch(self, action: Dispatch) -> None:
        self.counts["dispatches"] += 1
        assert len(action.attempt_id) == ATTEMPT_ID_CHARS and set(action.attempt_id) <= HEX_DIGITS
        assert action.attempt_id not in self.used_ids, "an attempt id came twice"
        self.used_ids.add(action.attempt_id)
        key = (action.run_id, action.rollout_id)
        watched = self.watched[key]
        live = [one for one, (other, _) in self.attempts.items() if other == key and one in self.world.attempts]
        assert not live, f"{key} was dispatched with a live attempt"
        self.attempts[action.attempt_id] = (key, action.engine_id)
        prompt = watched.rollout.spec.token_bytes
        assert action.token_bytes.startswith(prompt), f"{key}: a resumed attempt lost its prompt"
        partial = memoryview(action.token_bytes[len(prompt) :]).cast("I").tolist()
        if partial:
            self.counts["resumed"] += 1
            expected = self._expected(watched).tokens
            assert partial == expected[: len(partial)], (
                f"{key}: resumed from {partial}, expected {expected}; {watched.rollout.tell()}"
            )
            assert action.max_new_tokens == watched.rollout.max_new_tokens - len(partial), f"{key}: wrong rest"
        attempt = self.world.attempts[action.attempt_id]
        predicted = attempt.predicted_tokens
        assert 0 <= predicted < max(1, len(action.token_bytes) // TOKEN_BYTES), f"{key}: predicted {predicted}"
        engine = self.simulation.engines.get(action.engine_id)
        if (
            predicted
            and isinstance(engine, FaultyEngine)
            and engine.facts.incarnation == attempt.engine.facts.incarnation
        ):
            held = engine.inner.could_hold_tokens(action.token_bytes)
            assert predicted <= held, f"{key}: {predicted} tokens predicted, {action.engine_id} computed {held}"
            self.counts["predicted hits"] += 1
        self._check_scores()

    def _check_scores(self) -> None:
        decision = self.world.decisions[-1]
        for candidate in decision.candidates:
            assert math.isfinite(candidate.score), candidate
            assert all(0.0 <= term <= 1.0 for term in candidate.terms.values()), candidate

    def _check_abort(self, action: Abort) -> None:
        self.counts[f"aborts {action.reason.name}"] += 1
        known = self.attempts.get(action.attempt_id)
        if known is not None and action.reason is AbortReason.DEADLINE:
            self.watched[known[0]].deadline_abort = True
        assert known is not None, f"abort of {action.attempt_id}, which is not live"
        assert known[1] == action.engine_id, f"abort sent to {action.engine_id}, the attempt is on {known[1]}"

    # ceilings ----------------------------------------------------------------------------------------------------------

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
                run_id = attempt.rollout.run.run_id
                running[run_id] += 1
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

    # floors ------------------------------------------------------------------------------------------------------------

    def _check_floors(self, dispatched: list[Dispatch]) -> None:
        world = self.world
        if world.shutting_down:
            return
        for run in world.runs.values():
            if not any(quota.floor_rollouts for quota in run.ledger.budget.classes.values()):
                continue
            for rollout_class, quota in run.ledger.budget.classes.items():
                owed = min(
                    quota.floor_rollouts - run.ledger.class_running[rollout_class], self._ready(run, rollout_class)
                )
                if owed < 2:
                    continue
                for entry in self._oldest_entries(run, rollout_class):
                    self._check_owed(run, entry, owed, dispatched)

    @staticmethod
    def _ready(run: Run, rollout_class: RolloutClass) -> int:
        return sum(
            len(entry.members)
            for entry in run.entries.values()
            if entry.rollout_class is rollout_class and not entry.held
        )

    @staticmethod
    def _oldest_entries(run: Run, rollout_class: RolloutClass) -> list[Entry]:
        found = []
        for (_, its_class, _), backlog in run.backlogs.items():
            if its_class is rollout_class and backlog.count:
                oldest = backlog.oldest()
                if oldest is not None and not oldest.held:
                    found.append(oldest)
        return found

    def _note_reservations(self) -> None:
        """Whom room is kept for; a Tick may use it up."""
        keepers = [engine.reserved_for for engine in self.world.engines.values()]
        keepers += [run.reserved_for for run in self.world.runs.values()]
        self._reserved = {member for keeper in keepers if keeper is not None for member in keeper.members}

    def _check_owed(self, run: Run, entry: Entry, owed: int, dispatched: list[Dispatch]) -> None:
        world = self.world
        ledger = run.ledger
        if budgeting.run_gate(world, run, entry.rollout_class) is not Gate.OPEN:
            return
        keep_short = gates.reserved_short(world)
        what = f"{world.now}: {run.run_id} {entry.rollout_class.name} is owed {owed}"
        self.counts["floors looked at"] += 1
        at_rest = (
            not world.dirty and ledger.gate(entry.rollout_class, entry.task_type, world.run_slots(run)) is Gate.OPEN
        )
        above = self._above_floors(run, dispatched)
        for engine in world.engines.values():
            if not engine.is_open(world.now) or gates.engine_gate(world, entry, engine)[0] is not Gate.OPEN:
                continue
            if at_rest:
                assert engine.free_slots(entry.short, keep_short) <= 0, f"{what} and {engine.engine_id} has room (F1)"
            for action in dispatched:
                if action.run_id != run.run_id or action.engine_id != engine.engine_id:
                    continue
                other = self.watched[run.run_id, action.rollout_id].rollout
                if other in self._reserved or (other.task_type in SHORT_TASKS and not entry.short):
                    continue
                fits = ledger.budget.classes.get(entry.rollout_class, NO_QUOTA).max_rollouts
                task = ledger.budget.tasks.get(entry.task_type, NO_QUOTA).max_rollouts
                blocked = (fits is not None and ledger.class_running[entry.rollout_class] >= fits) or (
                    task is not None and ledger.task_running[entry.task_type] >= task
                )
                assert action.attempt_id not in above or blocked, (
                    f"{what} and {action.rollout_id} went to {engine.engine_id} (F2)"
                )

    def _above_floors(self, run: Run, dispatched: list[Dispatch]) -> set[str]:
        """Attempts of this Tick whose class and task type were at their floors already when they were dispatched."""
        mine = [action for action in dispatched if action.run_id == run.run_id]
        rollouts = [self.watched[run.run_id, action.rollout_id].rollout for action in mine]
        classes = [one - sum(r.rollout_class == c for r in rollouts) for c, one in enumerate(run.ledger.class_running)]
        tasks = [one - sum(r.task_type == t for r in rollouts) for t, one in enumerate(run.ledger.task_running)]
        budget = run.ledger.budget
        above = set()
        for action, rollout in zip(mine, rollouts, strict=True):
            of_class = budget.classes.get(rollout.rollout_class, NO_QUOTA).floor_rollouts
            of_task = budget.tasks.get(rollout.task_type, NO_QUOTA).floor_rollouts
            if classes[rollout.rollout_class] >= of_class and tasks[rollout.task_type] >= of_task:
                above.add(action.attempt_id)
            classes[rollout.rollout_class] += 1
            tasks[rollout.task_type] += 1
        return above

    # the end -----------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[Watched]:
        return [watched for watched in self.watched.values() if watched.rollout.state is not RolloutState.FINISHED]

    def check_quiet(self) -> None:
        """Everything ended, was delivered and acknowledged: nothing is left of it."""
        self.check()
        for key, watched in self.watched.items():
            assert watched.result is not None, f"{key} was never delivered; {watched.rollout.tell()}"
        world = self.world
        figures = self.simulation.scheduler.statistics()
        assert not world.attempts and not figures.running and not figures.held and not figures.queued, figures
        assert not figures.undelivered_bytes and not figures.undelivered_results, figures
        assert not len(world.computing), "prefixes are still marked as being computed"
        for engine in world.engines.values():
            assert not engine.slots_used and not engine.kv_claimed_tokens and not engine.kv_by_run, engine.engine_id
            assert not engine.short_used and not engine.critical_used, engine.engine_id
            assert engine.reserved_for is None, f"{engine.engine_id} is reserved for nobody"
        for run in world.runs.values():
            assert not run.rollouts and not run.entries and not run.groups and not run.by_step, run.run_id
            assert not run.unfinished and not run.undelivered_results and run.reserved_for is None, run.run_id
            assert not any(run.queued_bytes) and not run.ledger.kv_tokens and not run.ledger.running, run.run_id
            assert not any(backlog.count or backlog.ready or backlog.held for backlog in run.backlogs.values())
        kinds = {timer.kind for _, _, timer in world.timers._heap if timer.subject is not None}
        assert not kinds & {TimerKind.ROLLOUT, TimerKind.HOLD}, "a rollout's timer outlived it"


def _largest(limits: list[int | None]) -> float:
    """The weakest of these limits; None is no limit."""
    return max(math.inf if limit is None else limit for limit in limits)


def _limits_anything(budget: Budget) -> bool:
    """Whether there is a ceiling that could be exceeded."""
    limits = (budget.max_rollouts, budget.max_kv_tokens, budget.training_reserved_mb, budget.max_inference_mb)
    return any(limit is not None for limit in limits) or bool(budget.classes) or bool(budget.tasks)
