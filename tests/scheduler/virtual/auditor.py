"""Watches a simulation and asserts, event by event, what must always hold.

P1  an accepted rollout ends once; what is delivered is, token by token, what the weights of the version that its span names
    write at that place, whatever was interrupted, resumed, retried or published meanwhile; a resumed attempt continues from
    exactly the tokens it was given
P2  `Scheduler.check()` every `check_every` events; everything is 0 at quiesce
P4  a prediction never exceeds what the engine's process has ever computed with weights whose cache counts, nor the prompt
    less one token
P5  scores are finite; the caller checks that everything ends within a bound
P6  attempt ids are fresh and 32 hex digits; an abort names an attempt that is live, on its engine
P7  outcomes have their cause: see `_check_outcome`

Ceilings of a budget are looked at by `ceilings`, floors by `floors`, policy versions by `publications`, how many samples are on
their way by `windows`, and what is kept back for a target mix by `holding`.

What this module does not know: how events come about.
"""

from __future__ import annotations

import math
from collections import Counter

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.tokens import Model, score
from rolloutd.scheduler.actions import Abort, Action, Deliver, Dispatch, Finished, GroupFinished, Refuse, Undelivered
from rolloutd.scheduler.config import SchedulerConfig
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
from rolloutd.scheduler.result import RolloutResult, Span
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import AbortReason, FaultKind, Outcome, RolloutState, TaskType
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.version_change import prefix_ttl_versions
from rolloutd.scheduler.versions import ANYTHING
from rolloutd.scheduler.world import World
from tests.scheduler.virtual.ceilings import Ceilings
from tests.scheduler.virtual.floors import Floors
from tests.scheduler.virtual.holding import Holding
from tests.scheduler.virtual.publications import Publications, gone, too_old, weights_of
from tests.scheduler.virtual.watched import Key, Watched
from tests.scheduler.virtual.windows import Windows
from tests.scheduler.virtual.written import Writing

HEX_DIGITS = frozenset("0123456789abcdef")
ATTEMPT_ID_CHARS = 32


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
        self._ended_runs: set[str] = set()
        self._completed: set[Key] = set()  # whether they became too old since or not
        self._cancelling_runs: set[str] = set()  # cancel_on_disconnect at some time
        self._ceilings = Ceilings(simulation, world, config, self.counts)
        self._floors = Floors(world, self.watched, self.counts)
        self.publications = Publications(simulation, world, self.counts)
        self._windows = Windows(world, self.counts)
        self._holding = Holding(world, self.counts)

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
        for (
            action
        ) in actions:  # all first: of one event's results, kept back ones may come behind those they made surplus
            if isinstance(action, Deliver | Undelivered) and isinstance(action.event, Finished):
                if action.event.result.complete:
                    self._completed.add((action.run_id, action.event.result.rollout_id))
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
        self._ceilings.observe()
        self._floors.observe(event, dispatched)
        self.publications.observe(event, actions)
        self._windows.observe(event, actions)
        self._holding.observe(event, actions)
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
        before = watched.result
        if before is not None and before is not result:
            assert before.complete and result.stale, f"{key} ended twice: {before.outcome}, {result.outcome}"
            self.counts["stale since it ended"] += 1
        watched.result = result
        if before is result:
            self.counts["redelivered"] += 1
            return
        self.counts[result.outcome.name] += 1
        self._check_tokens(watched, result)
        self._check_outcome(watched, result)
        self.publications.check_result(watched.rollout, result)

    def _check_tokens(self, watched: Watched, result: RolloutResult) -> None:
        rollout = watched.rollout
        what = f"{result.rollout_id} ({result.outcome.name}; {rollout.tell()})"
        got = memoryview(result.token_bytes).cast("I").tolist()
        if result.outcome is Outcome.STALE:
            assert not got and not result.logprob_bytes and not result.prompt_logprob_bytes, f"{what}: has tokens"
            return
        assert result.generated_tokens == len(got), what
        position = 0
        replayed = result.task_type is TaskType.REPLAY
        for span in result.spans:
            assert span.start == position and (span.end > span.start or replayed), f"{what}: spans {result.spans}"
            named = not span.policy_version or span.engine_version == str(span.policy_version)
            assert named, f"{what}: version {span.policy_version} is called {span.engine_version}"
            position = span.end
        assert position == len(got), f"{what}: spans end at {position} of {len(got)}"
        written = Writing(self.model, rollout)
        written.write((self._wrote(span, rollout), span.end) for span in result.spans)
        assert got == written.tokens, f"{what}: {got}, expected {written.tokens}; {result.spans}"
        if result.outcome is Outcome.COMPLETED:
            full = len(got) == rollout.max_new_tokens  # then nobody can tell an end token from the limit
            assert full or result.finish_reason == written.finish_reason, (
                f"{what}: ended by {result.finish_reason}, expected {written.finish_reason}"
            )
        if result.logprob_bytes:
            logprobs = memoryview(result.logprob_bytes).cast("f").tolist()
            assert logprobs == written.logprobs, f"{what}: log-probs are not the tokens'"
        if replayed and result.outcome is Outcome.COMPLETED:
            (span,) = result.spans
            scores = score(self.model, rollout.spec.token_bytes, self._wrote(span, rollout)).tolist()
            assert memoryview(result.prompt_logprob_bytes).cast("f").tolist()[1:] == scores[1:], f"{what}: {span}"

    def _wrote(self, span: Span, rollout: Rollout) -> str:
        """The weights that a span names."""
        run_id = rollout.run.run_id
        if span.policy_version:
            return weights_of(run_id, span.policy_version)
        return self.publications.registered[run_id, rollout.rollout_id, span.attempt]

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
                if rollout.group is not None and rollout.group.keep:
                    self._check_kept(rollout)
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
            case Outcome.VERSION_UNMET:
                assert now >= rollout.ttl_at and (rollout.requirement is not ANYTHING or rollout.pieces), what
            case Outcome.VERSION_GONE:
                assert gone(rollout), what
            case Outcome.STALE:
                assert too_old(rollout), what
            case Outcome.SURPLUS:
                self._check_kept(rollout)
            case Outcome.ENGINE_FAILED:
                assert watched.faults >= limit, f"{what}: {watched.faults} faults of {limit}"
            case _:
                raise AssertionError(what)
        assert (result.outcome is Outcome.COMPLETED) == (result.error is None), what

    def _parent_cancelled(self, watched: Watched) -> bool:
        """A leaf that arrives after its subtree was cancelled goes with it, also where an engine is still to stop the parent."""
        rollout = watched.rollout
        parent = self.watched.get((rollout.run.run_id, rollout.spec.parent_rollout_id))
        return parent is not None and (parent.cancelled or self._parent_cancelled(parent))

    def _check_group(self, action: Deliver) -> None:
        event = action.event
        assert isinstance(event, GroupFinished)
        for rollout_id in event.rollout_ids:
            watched = self.watched[action.run_id, rollout_id]
            assert watched.rollout.state is RolloutState.FINISHED, f"group {event.group_id} ended before {rollout_id}"
        by_outcome = {one: self._outcome(action.run_id, one) for one in event.rollout_ids}
        surplus = {one for one, outcome in by_outcome.items() if outcome is Outcome.SURPLUS}
        completed = sum(outcome is Outcome.COMPLETED for outcome in by_outcome.values())
        failed = {one for one, outcome in by_outcome.items() if outcome is not Outcome.COMPLETED} - surplus
        group = self.watched[action.run_id, event.rollout_ids[0]].rollout.group
        assert group is not None
        complete = completed == group.keep if group.keep else not failed
        assert set(event.failed_rollout_ids) == failed and set(event.surplus_rollout_ids) == surplus
        assert event.complete is complete, f"{event}: {by_outcome}, keeps {group.keep}"
        self.counts["groups complete" if complete else "groups partial"] += 1

    def _check_kept(self, rollout: Rollout) -> None:
        """A member of a group that keeps some ended COMPLETED or SURPLUS: no more than those, and none cut before they are there."""
        group = rollout.group
        assert group is not None and group.keep, rollout.tell()
        keys = [(rollout.run.run_id, member) for member in group.members]
        results = [self.watched[key].rollout.result for key in keys]
        complete = sum(one is not None and one.outcome is Outcome.COMPLETED for one in results)
        assert complete <= group.keep, f"{group.group_id} has {complete} complete and keeps {group.keep}"
        if rollout.result is not None and rollout.result.outcome is Outcome.SURPLUS:
            kept_back = sum(self._is_kept_back(key) for key in keys)
            assert sum(key in self._completed for key in keys) + kept_back >= group.keep, rollout.tell()
            self.counts["surplus with tokens" if rollout.result.token_bytes else "surplus without tokens"] += 1

    def _is_kept_back(self, key: Key) -> bool:
        """Whether it is complete and to be delivered later."""
        rollout = self.watched[key].rollout
        return rollout.run.mix_hold is not None and rollout in rollout.run.mix_hold.held

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
            rollout = watched.rollout
            end = 0
            spans = []
            for piece, (engine_id, number) in zip(rollout.pieces, rollout.pieces_by, strict=True):
                for version, (label, _, upto) in zip(piece.versions, piece.version_spans, strict=True):
                    span = Span(version, label, end, end + upto, engine_id, number)
                    spans.append((self._wrote(span, rollout), span.end))
                end += len(piece.token_bytes) // TOKEN_BYTES
            written = Writing(self.model, rollout)
            written.write(spans)
            assert partial == written.tokens, (
                f"{key}: resumed from {partial}, expected {written.tokens}; {spans}; {rollout.tell()}"
            )
            rest = rollout.max_new_tokens - len(partial)
            sliced = rollout.run.settings.slice_tokens
            assert action.max_new_tokens in (rest, min(rest, sliced)), f"{key}: wrong rest"
        attempt = self.world.attempts[action.attempt_id]
        self._check_prediction(action, attempt)
        self._check_scores()

    def _check_prediction(self, action: Dispatch, attempt: Attempt) -> None:
        predicted = attempt.predicted_tokens
        what = f"{action.rollout_id}: {predicted} tokens predicted on {action.engine_id}"
        assert 0 <= predicted < max(1, len(action.token_bytes) // TOKEN_BYTES), what
        real = self.simulation.engines.get(action.engine_id)
        known = attempt.engine
        if predicted and isinstance(real, FaultyEngine) and real.facts.incarnation == known.facts.incarnation:
            ttl_versions = prefix_ttl_versions(self.world, attempt.rollout.run)
            oldest = max(known.cache_since, known.version - ttl_versions)
            held = max(
                real.inner.could_hold_tokens(weights, action.token_bytes)
                for weights in self.publications.cached_by(known, action.run_id, oldest)
            )
            assert predicted <= held, f"{what}, it computed {held} with versions {oldest} to {known.version}"
            self.counts["predicted hits"] += 1

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

    # the end -----------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[Watched]:
        return [watched for watched in self.watched.values() if watched.rollout.state is not RolloutState.FINISHED]

    def check_quiet(self) -> None:
        """Everything ended, was delivered and acknowledged: nothing is left of it."""
        self.check()
        for key, watched in self.watched.items():
            assert watched.result is not None, f"{key} was never delivered; {watched.rollout.tell()}"
        self.publications.check_quiet()
        self._holding.check_quiet()
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
        kinds = {timer.kind for timer in world.timers.live()}
        assert not kinds & {TimerKind.ROLLOUT, TimerKind.HOLD}, "a rollout's timer outlived it"
