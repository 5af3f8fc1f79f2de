"""The core's state in one place, and the few operations everything needs.

The modules `intake`, `consumers`, `lifecycle`, `attempts`, `budgeting`, `placement`, `preemption` are functions over a World;
`machine` routes events to them. A World is only touched inside `Scheduler.handle`.

Invariants
- `now` is the time of the event being handled; it never goes back.
- `actions` collects what the current event asks for and is handed out when it is done.

What this module does not know: what events mean.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rolloutd.scheduler.actions import Action, Deliver, EndStream, Notice, NoticeKind, Record, Undelivered
from rolloutd.scheduler.computing import Computing
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.considered import NOTHING, Considered
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.entry import Entry
from rolloutd.scheduler.index import PrefixIndex
from rolloutd.scheduler.kv_cache_mirror import KvCacheMirror
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.outbox import Consumer
from rolloutd.scheduler.promotion import Promotion
from rolloutd.scheduler.publication import EngineUpdate
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.rollout import Attempt, Rollout
from rolloutd.scheduler.room import Room
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import RunSettings, label_key
from rolloutd.scheduler.states import SHORT_TASKS, Code, Gate, RolloutClass, RolloutState, Verb
from rolloutd.scheduler.timers import Timer, Timers
from rolloutd.scheduler.views import Decision, DecisionKind

MIRROR_PART: Final = 4  # of the index's memory, at most one in so many bytes is for what engines report of their caches
NO_LIMIT: Final = 1 << 60  # tokens
MOST_POOLS: Final = 1024  # lists of engines remembered by run, pool and labels


def largest(limits: Iterable[int]) -> int:
    """The largest of several engines' limits, where 0 means that an engine has none or does not say."""
    known = list(limits)
    return max(known) if known and all(known) else 0


class PoolLimits:
    """What some engines take at most. 0: no limit, or one of them has none or does not say.

    context, prompt, capacity: tokens, of the one that takes most. vocabulary: of the smallest that is known; 0: none is.
    """

    __slots__ = ("capacity", "context", "page", "prompt", "vocabulary")

    def __init__(self, engines: list[Engine]) -> None:
        self.context = largest([engine.facts.context_tokens for engine in engines])
        self.prompt = largest([engine.facts.max_prompt_tokens for engine in engines])
        self.capacity = largest([engine.facts.kv_capacity_tokens for engine in engines])
        self.page = min([engine.facts.page_tokens for engine in engines], default=1)
        self.vocabulary = min([one.facts.vocabulary_size for one in engines if one.facts.vocabulary_size], default=0)


class PoolShape:
    """Some engines: their bits in the prefix index, and what each of them takes.

    least_prompt, least_whole: tokens of a prompt, and of a prompt with its output, that fit all of them.
    """

    __slots__ = ("engines", "least_prompt", "least_whole", "mask")

    def __init__(self, engines: list[Engine], index: PrefixIndex) -> None:
        self.engines = engines
        self.mask = 0
        self.least_prompt = self.least_whole = NO_LIMIT
        for engine in engines:
            facts = engine.facts
            self.mask |= index.flag(engine.cache_key)
            capacity = facts.kv_capacity_tokens // facts.page_tokens * facts.page_tokens
            self.least_prompt = min(self.least_prompt, facts.max_prompt_tokens or NO_LIMIT)
            self.least_whole = min(self.least_whole, facts.context_tokens or NO_LIMIT, capacity or NO_LIMIT)


class World:
    def __init__(self, config: SchedulerConfig, rng: random.Random, now: float) -> None:
        self.config = config
        self.rng = rng
        self.now = now
        self.actions: list[Action] = []
        self.runs: dict[str, Run] = {}
        self.engines: dict[str, Engine] = {}
        self.yielding: dict[str, Attempt] = {}  # long work below CRITICAL that runs: what may be interrupted for others
        self.aborting: dict[str, Attempt] = {}
        self.rooms: dict[str, Room] = {}  # pool -> its engines and which have a slot free
        self.waiting: dict[str, dict[Run, None]] = {}  # pool -> runs with something that may be dispatched there
        self.attempts: dict[str, Attempt] = {}
        self.index = PrefixIndex(config.index.max_bytes, config.index.page_tokens, config.index.eviction)
        self.mirror = KvCacheMirror(self.index, config.index.max_bytes // MIRROR_PART)
        self.computing = Computing()
        self.timers = Timers()
        self.decisions: deque[Decision] = deque(maxlen=config.queue.decision_ring)
        self.gates: Counter[Gate] = Counter()
        self.fleet_mark = 0  # grows when an engine joins (again), drains, is lost or found, is removed or forgotten
        self._pools: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[Engine]] = {}  # as of `_pools_mark`
        self._limits: dict[tuple[str, str, tuple[tuple[str, str], ...]], PoolLimits] = {}  # of the same
        self._pools_mark = -1
        self._shapes: dict[tuple[str, str, tuple[tuple[str, str], ...]], PoolShape] = {}  # as of `_shapes_mark`
        self._shapes_mark = -1
        self.closing: dict[tuple[str, str], tuple[Run, Consumer]] = {}  # half-closed streams that still owe results
        self.clearing: dict[str, EngineUpdate] = {}  # updates that wait for work to leave their engine
        self.ended_updates: list[EngineUpdate] = []  # since the event that is being handled began
        self.releasing: dict[str, Engine] = {}  # about to give their memory to the trainer
        self.returned: list[Engine] = []  # that have it back, since the event that is being handled began
        self.controls: dict[int, Verb] = {}  # control calls that are out
        self.control_ids = 0
        self.unseen: dict[Lineage, Run] = {}  # where waiting work is still to be looked at after a change of version
        self.stirred: dict[Run, None] = {}  # where somebody else may be let in now: see `letting_in`
        self.place_at = -math.inf  # of the newest PLACE timer
        self.promoting: dict[Run, Promotion] = {}  # runs with work that their step needs and that is not CRITICAL yet
        self.ending: dict[Run, list[Rollout]] = {}  # runs that have ended: what is still to be cancelled
        self.reordering: dict[Entry, None] = {}  # entries whose key is by weights that hold no longer
        self.kept: dict[Run, None] = {}  # had their housekeeping since the last whole pass: see `consolidation`
        self.rules_timer: Timer | None = None  # when rules are looked at; None: there are none
        self.last_calls_since = -math.inf  # when engines began to be let go after an update: see `updating`
        self.leaving: dict[str, Engine] = {}  # removed and not forgotten yet: attempts still run there
        self.dirty = False  # something changed that scheduling could use
        self.shutting_down = False
        self.batches = 0
        self.sequence = 0
        self.dispatched_total = 0
        self.preempted_total = 0
        self.retried_total = 0
        self.evaluations = 0  # entries in queues whose data are for evaluation
        self.fruitless_at: dict[
            str, float
        ] = {}  # pool -> when nobody could be interrupted for critical work that waits
        self.last_preemption: dict[str, float] = {}  # pool -> time of the last round

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def note_attempt(self, attempt: Attempt) -> None:
        """Call after an attempt started, changed its class or was asked to stop."""
        rollout = attempt.rollout
        attempt_id = attempt.attempt_id
        if rollout.state is RolloutState.ABORTING:
            self.aborting[attempt_id] = attempt
            self.yielding.pop(attempt_id, None)
        elif rollout.rollout_class is RolloutClass.CRITICAL or attempt.permit.task_type in SHORT_TASKS:
            self.yielding.pop(attempt_id, None)
        else:
            self.yielding[attempt_id] = attempt

    def forget_attempt(self, attempt: Attempt) -> None:
        """Call when an attempt is over."""
        attempt_id = attempt.attempt_id
        del self.attempts[attempt_id]
        self.aborting.pop(attempt_id, None)
        self.yielding.pop(attempt_id, None)

    def fresh_attempt_id(self) -> str:
        """32 hex digits: fixed length, because engines match abort ids by prefix (property P6)."""
        return self.rng.getrandbits(128).to_bytes(16, "big").hex()

    def undelivered_limit_bytes(self, run: Run) -> int:
        """Of results that nobody acknowledged: the run's own limit, else the configured one."""
        return self.config.delivery.limit_bytes(run.settings)

    def draw_below(self, limit: int) -> int:
        """A number of 0 to `limit - 1`, all equally likely: what `Random.randrange` draws, without its checks."""
        bits = limit.bit_length()
        drawn = self.rng.getrandbits(bits)
        while drawn >= limit:
            drawn = self.rng.getrandbits(bits)
        return drawn

    def fresh_salt(self, label: str) -> str:
        """Names KV that no earlier work on any engine can match, whichever run, process or life of ours it was for."""
        return f"{label}-{self.rng.getrandbits(64):016x}"

    def next_control(self) -> int:
        self.control_ids += 1
        return self.control_ids

    # actions -----------------------------------------------------------------------------------------------------------

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def record(self, level: str, event: str, **fields: Any) -> None:
        self.actions.append(Record(level, event, fields))

    def deliver(self, run: Run, consumer_id: str, cursor: int, event: Any) -> None:
        consumer = run.consumers.get(consumer_id)
        if consumer is not None and consumer.attached:
            self.actions.append(Deliver(run.run_id, consumer_id, cursor, event))
        elif cursor:
            self.actions.append(Undelivered(run.run_id, event))

    def notify(self, run: Run, kind: NoticeKind, message: str, seconds: float = 0.0) -> None:
        """Tell every attached consumer of a run."""
        for consumer_id in run.consumers:
            self.deliver(run, consumer_id, 0, Notice(kind, message, seconds))

    def end_stream(self, run: Run, consumer_id: str, error: Refusal | None) -> None:
        self.actions.append(EndStream(run.run_id, consumer_id, error))

    # decisions ---------------------------------------------------------------------------------------------------------

    def decide(
        self,
        kind: DecisionKind,
        rollout: Rollout,
        message: str,
        *,
        batch_id: int = 0,
        engine_id: str = "",
        gate: Gate = Gate.OPEN,
        considered: Considered = NOTHING,
    ) -> None:
        self.decisions.append(
            Decision(
                self.now,
                kind,
                rollout.run.run_id,
                rollout.rollout_id,
                batch_id,
                engine_id,
                gate,
                considered,
                message,
            )
        )

    # engines -----------------------------------------------------------------------------------------------------------

    def serves(self, engine: Engine, run: Run, pool: str, labels: Mapping[str, str]) -> bool:
        """Whether this engine may ever run work of this run, pool and labels."""
        facts = engine.facts
        return (
            facts.pool == pool
            and not engine.removed
            and (engine.owner == run.run_id or not (engine.owner or pool in run.published))
            and (not labels or all(facts.labels.get(name) == value for name, value in labels.items()))
        )

    def why_none(self, run: Run, pool: str) -> str:
        """Why no engine of a pool may run work of this run, for a person."""
        others = {
            one.owner for one in self.engines.values() if one.facts.pool == pool and one.owner not in ("", run.run_id)
        }
        if not others:
            return f"no engine of pool {pool!r} was there"
        names = ", ".join(repr(name) for name in sorted(others))
        return f"the engines of pool {pool!r} hold the weights of another run ({names})"

    def pool_engines(self, run: Run, pool: str, labels: Mapping[str, str]) -> list[Engine]:
        """Engines that may ever run such work; looked up again when engines came or went."""
        if self._pools_mark != self.fleet_mark:
            self._pools.clear()
            self._limits.clear()
            self._pools_mark = self.fleet_mark
        key = (run.run_id, pool, label_key(labels))
        found = self._pools.get(key)
        if found is None:
            if len(self._pools) >= MOST_POOLS:
                self._pools.clear()
                self._limits.clear()
            found = [engine for engine in self.engines.values() if self.serves(engine, run, pool, labels)]
            self._pools[key] = found
        return found

    def pool_shape(self, run: Run, pool: str, labels: tuple[tuple[str, str], ...]) -> PoolShape:
        """What the live engines among `pool_engines` have in common; worked out again when engines or their bits changed."""
        mark = self.fleet_mark + self.index.unseated  # both only grow
        if self._shapes_mark != mark:
            self._shapes.clear()
            self._shapes_mark = mark
        key = (run.run_id, pool, labels)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= MOST_POOLS:
                self._shapes.clear()
            live = [one for one in self.pool_engines(run, pool, dict(labels)) if not one.lost and not one.draining]
            shape = self._shapes[key] = PoolShape(live, self.index)
        return shape

    def pool_limits(self, run: Run, pool: str, labels: Mapping[str, str]) -> PoolLimits:
        """Of `pool_engines`; looked up again with them."""
        engines = self.pool_engines(run, pool, labels)
        key = (run.run_id, pool, label_key(labels))
        limits = self._limits.get(key)
        if limits is None:
            limits = self._limits[key] = PoolLimits(engines)
        return limits

    def longest_prompt(self, run: Run, pool: str, labels: Mapping[str, str]) -> int:
        """Tokens of the longest prompt that some engine of the pool takes; 0 where one has no limit or does not say."""
        return self.pool_limits(run, pool, labels).prompt

    def room(self, pool: str) -> Room:
        room = self.rooms.get(pool)
        if room is None:
            room = self.rooms[pool] = Room()
        return room

    def run_slots(self, run: Run) -> int:
        """Slots of all engines that may serve this run: what shares and ceilings are measured against."""
        if run.slots_mark != self.fleet_mark:
            run.slots_mark, run.slots = self.fleet_mark, self._count_slots(run)
        return run.slots

    def _count_slots(self, run: Run) -> int:
        return sum(
            engine.facts.slots
            for engine in self.engines.values()
            if not engine.lost and not engine.draining and (not engine.owner or engine.owner == run.run_id)
        )

    # runs --------------------------------------------------------------------------------------------------------------

    def ensure_run(self, run_id: str) -> Run | Refusal:
        """The run of this name, made on first use."""
        run = self.runs.get(run_id)
        if run is not None:
            return run
        if len(self.runs) >= self.config.delivery.max_runs:
            return Refusal(
                Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_RUNS",
                f"run_id: {run_id!r} would be run number {len(self.runs) + 1}; end runs or raise delivery.max_runs",
            )
        run = Run(run_id, RunSettings(), self.config, self.now)
        self.runs[run_id] = run
        return run
