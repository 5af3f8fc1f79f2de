"""Watches a simulation and asserts, event by event, what must always hold.

P1  an accepted rollout ends once; what is delivered is the engine's deterministic function of its prompt and seed, token by
    token, whatever was interrupted, resumed or retried; a resumed attempt continues from exactly the tokens it was given
P2  `Scheduler.check()` every `check_every` events; everything is 0 at quiesce
P4  a prediction never exceeds what the engine's process has ever computed, nor the prompt less one token
P5  scores are finite; the caller checks that everything ends within a bound
P6  attempt ids are fresh and 32 hex digits; an abort names an attempt that is live, on its engine
P7  outcomes have their cause: see `_check_outcome`

Ceilings of a budget are looked at by `ceilings`, floors by `floors`.

What this module does not know: how events come about.
"""

from __future__ import annotations

import math
from collections import Counter

from rolloutd.bench.virtual import Simulation
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.tokens import Expected, Model, expected_output, score
from rolloutd.scheduler.actions import Abort, Action, Deliver, Dispatch, Finished, GroupFinished, Refuse
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
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import AbortReason, FaultKind, Outcome, RolloutState, TaskType
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.world import World
from tests.scheduler.virtual.ceilings import Ceilings
from tests.scheduler.virtual.floors import Floors
from tests.scheduler.virtual.watched import Key, Watched

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
        self._cancelling_runs: set[str] = set()  # cancel_on_disconnect at some time
        self._ceilings = Ceilings(simulation, world, config, self.counts)
        self._floors = Floors(world, self.watched, self.counts)

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
        self._ceilings.observe()
        self._floors.observe(event, dispatched)
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
        if parent is None or parent.rollout.state is not RolloutState.FINISHED:
            return False
        return parent.cancelled or self._parent_cancelled(parent)

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
        kinds = {timer.kind for timer in world.timers.live()}
        assert not kinds & {TimerKind.ROLLOUT, TimerKind.HOLD}, "a rollout's timer outlived it"
