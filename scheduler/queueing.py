"""In and out of the queue: which entry a rollout joins, how an entry is keyed, when it is held and woken.

Invariants
- A QUEUED rollout is a member of exactly one entry; nobody else is.
- Ledger counters of queued rollouts and bytes change here and nowhere else.

What this module does not know: engines' room and what is chosen.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from rolloutd.scheduler import computing, staleness, turns, versions
from rolloutd.scheduler.dearness import dearness
from rolloutd.scheduler.entry import Entry, EntryKey
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.lanes import MAX_AFFINE_ENGINES, Backlog
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.rollout import Rollout
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.scoring import Facts, Weights, static_key
from rolloutd.scheduler.spec import label_key
from rolloutd.scheduler.states import Gate, Origin, RolloutClass
from rolloutd.scheduler.timers import TimerKind
from rolloutd.scheduler.versions import ANYTHING
from rolloutd.scheduler.world import World

HITS_FRESH_SECONDS: Final = 1.0  # an entry's prefix hits are looked up again after this
REKEY_FACTOR: Final = 1.1  # an expected length that moved by less since it was keyed does not change an entry's place


def put(world: World, rollout: Rollout) -> None:
    """Make a QUEUED rollout a member of an entry. Its prompt is the submitted one plus kept partial tokens."""
    run = rollout.run
    spec = rollout.spec
    continued = bool(rollout.pieces)
    entry = None if continued or rollout.group is None else _siblings(rollout, rollout.group)
    if entry is None:
        key = _key_of(rollout, continued)
        if continued:
            run.lengths.note_running(rollout.prompt_hash, rollout.kind, rollout.rollout_id, rollout.kept_tokens)
        entry = run.entries.get(key)
    if entry is None:
        token_bytes, text = full_prompt(rollout)
        entry = Entry(run, key, token_bytes, text, run.mix.name(spec.stratum), spec.engine_labels, rollout.submitted_at)
        entry.continuation = continued or spec.turn > 0
        entry.resumed = continued
        entry.deadline_at = rollout.deadline_at
        entry.arrival = world.next_sequence()
        entry.evaluation = spec.origin is Origin.EVALUATION
        entry.sample = staleness.bound(rollout)
        entry.particular = continued or rollout.requirement is not ANYTHING
        run.entries[key] = entry
        run.entries_by_prompt.setdefault(rollout.prompt_hash, {})[entry] = None
        world.evaluations += entry.evaluation
        if not run.waits_in(spec.pool):
            turns.rejoin(world, run, spec.pool)
        _backlog(world, run, spec.pool, rollout.rollout_class, entry.short).add(entry)
        entry.members.append(rollout)
        order(world, entry)
    else:
        entry.members.append(rollout)
        if run.window is not None:
            _reserve_too(run.window, rollout)
    rollout.entry = entry
    if rollout.group is not None and not continued:
        rollout.group.entry = entry
    if rollout.requirement is not ANYTHING and (continued or rollout.requirement.exact_version is not None):
        run.bound[rollout.rollout_id] = rollout
    run.ledger.enqueue(rollout.rollout_class, spec.task_type, 1)
    run.queued_bytes[rollout.rollout_class] += entry.size_bytes
    if entry.short:
        world.room(spec.pool).short_seen_at = world.now
    if entry.rollout_class is RolloutClass.CRITICAL:
        world.fruitless_at.pop(entry.pool, None)
    world.dirty = True


def _key_of(rollout: Rollout, continued: bool) -> EntryKey:
    spec = rollout.spec
    group_id = "" if rollout.group is None else rollout.group.group_id
    return EntryKey(
        spec.pool,
        rollout.rollout_class,
        spec.task_type,
        rollout.prompt_hash,
        group_id,
        rollout.rollout_id if continued or not group_id else "",
        label_key(spec.engine_labels),
        rollout.requirement,
        staleness.bound(rollout),
    )


def _siblings(rollout: Rollout, group: Group) -> Entry | None:
    """The entry that the group's last member joined, where this one has the same key."""
    entry = group.entry
    if (
        entry is None
        or not entry.members
        or entry.rollout_class is not rollout.rollout_class
        or entry.task_type is not rollout.task_type
        or entry.prompt_hash != rollout.prompt_hash
        or entry.sample is not staleness.bound(rollout)
    ):
        return None
    spec = rollout.spec
    same = (
        entry.pool == spec.pool and entry.labels == spec.engine_labels and entry.key.requirement == rollout.requirement
    )
    return entry if same else None


def take(world: World, rollout: Rollout) -> Entry:
    """Remove a rollout from its entry; an entry without members dies."""
    entry = rollout.entry
    if entry is None:
        raise AssertionError(f"{rollout.rollout_id} is in no entry; story: {rollout.tell()}")
    run = rollout.run
    if entry.members[0] is rollout:
        entry.members.popleft()
    else:
        entry.members.remove(rollout)
    rollout.entry = None
    if run.bound:
        run.bound.pop(rollout.rollout_id, None)
    run.ledger.enqueue(rollout.rollout_class, rollout.task_type, -1)
    run.queued_bytes[rollout.rollout_class] -= entry.size_bytes
    if not entry.members:
        backlog = entry.backlog
        if backlog is not None:
            backlog.remove(entry, world.next_sequence())
        del run.entries[entry.key]
        alike = run.entries_by_prompt[entry.prompt_hash]
        del alike[entry]
        if not alike:
            del run.entries_by_prompt[entry.prompt_hash]
        world.evaluations -= entry.evaluation
        world.timers.cancel(entry.hold_timer)
        entry.hold_timer = None
        if entry.particular:
            run.lineage(entry.pool).held.pop(entry, None)
        if run.window is not None and run.window.leave(entry):
            world.stirred[run] = None
            world.dirty = True
        release_reservations(world, entry)
    return entry


def release_reservations(world: World, entry: Entry) -> None:
    """The entry no longer waits for room that was kept for it; others may take what is left of it."""
    if entry.run.reserved_for is entry:
        entry.run.reserved_for = None
        world.dirty = True
    if not entry.keeps_room:
        return
    entry.keeps_room = False
    for engine in world.engines.values():
        if engine.reserved_for is entry:
            engine.reserved_for = None
            world.dirty = True


def full_prompt(rollout: Rollout) -> tuple[bytes, str | None]:
    """What to send: the prompt and the tokens kept so far. A text prompt becomes ids once an engine returned them."""
    spec = rollout.spec
    prompt = spec.token_bytes
    if spec.text is not None:
        if not rollout.pieces:
            return b"", spec.text
        prompt = rollout.pieces[0].prompt_token_bytes
    if not rollout.pieces:
        return prompt, None
    return prompt + b"".join(piece.token_bytes for piece in rollout.pieces), None


def order(world: World, entry: Entry, expected: bool = False) -> None:
    """Put an entry into its lane with a fresh key and fresh prefix hits. expected: `expect` was called just before."""
    run = entry.run
    backlog = entry.backlog
    if backlog is None:
        return
    world.timers.cancel(entry.hold_timer)
    entry.hold_timer = None
    entry.leader_id = None
    if hold_for_version(world, entry) or hold_for_staleness(world, entry):
        return
    refresh_hits(world, entry)
    if not expected:
        expect(entry)
    facts = entry_facts(world, entry)
    weights = weights_of(world, run)
    entry.keyed_tokens = entry.worst_tokens
    entry.static_key = static_key(facts, entry.queued_at, entry.deadline_at, weights)
    bonus = weights.prefix / max(1, entry.prompt_tokens)
    bonuses: list[tuple[str, float]] = []
    if entry.segments:
        for engine, hit in world.index.longest(entry.segments, MAX_AFFINE_ENGINES):
            bonuses.append((engine, hit * bonus))
        pace = world.room(entry.pool).paced_by
        if pace is not None and world.config.queue.spare_duplicates and not entry.resumed:
            # In its lane it stands as it counts on engines that have nothing of it.
            duplicate = entry.segments[0][1] * bonus * dearness(entry, pace)
            entry.static_key += duplicate
            bonuses = [(engine, one + duplicate) for engine, one in bonuses]
    backlog.order(entry, world.next_sequence(), entry.arrival, bonuses)
    world.dirty = True


def hold(world: World, entry: Entry, gate: Gate, until: float) -> None:
    """Keep an entry out of the lanes until that time (on the core's clock) at the latest."""
    backlog = entry.backlog
    if backlog is None:
        return
    backlog.hold(entry, world.next_sequence(), gate)
    world.timers.cancel(entry.hold_timer)
    entry.hold_timer = None if until == math.inf else world.timers.add(until, TimerKind.HOLD, entry)


def wake(world: World, entry: Entry) -> None:
    """End a hold; no effect on entries that are not held (any more)."""
    if entry.backlog is not None and entry.held:
        order(world, entry)


def hold_for_version(world: World, entry: Entry) -> bool:
    """Hold work that no engine may run with the version that it holds; true when it is held now."""
    if not entry.particular:
        return False
    run = entry.run
    lineage = run.lineage(entry.pool)
    rollout = entry.members[0] if entry.members else None
    engines = world.pool_engines(run, entry.pool, entry.labels)
    if rollout is None or not engines or any(versions.fits(lineage, rollout, engine) for engine in engines):
        lineage.held.pop(entry, None)
        return False
    if entry.held_gate is not Gate.POLICY_VERSION:
        hold(world, entry, Gate.POLICY_VERSION, math.inf)
        lineage.held[entry] = None
    return True


def hold_for_staleness(world: World, entry: Entry) -> bool:
    """Hold work of a group that is not let in yet; true when it is held now."""
    window = entry.run.window
    if window is None or not entry.members or not entry.members[0].in_window or not staleness.bound(entry.members[0]):
        return False
    key, samples = staleness.key_of(entry.members[0])
    if not window.passes(entry, key) and window.admit(key, samples):
        for one in window.leave_together(key):
            if one is not entry:
                wake(world, one)
        return False
    if entry.held_gate is not Gate.STALENESS:
        hold(world, entry, Gate.STALENESS, math.inf)
    if entry not in window.waiting:
        window.wait(entry, key)
    return True


def _reserve_too(window: staleness.Window, rollout: Rollout) -> None:
    """Who joins an entry of a group that was let in is on its way with it, and more than the group was reserved, maybe."""
    if rollout.in_window and staleness.bound(rollout):
        key, samples = staleness.key_of(rollout)
        if key in window.left:
            window.admit(key, samples)


def hold_for_prefix(world: World, entry: Entry) -> bool:
    """Hold REUSABLE work whose prefix somebody else is computing, within its patience; true when it is held now."""
    settings = world.config.queue
    until = entry.queued_at + settings.max_defer_seconds
    if entry.rollout_class is not RolloutClass.REUSABLE or until <= world.now or entry.text is not None:
        return False
    if not len(world.computing):
        return False
    stems = entry_stems(entry)
    place = world.computing.longest(stems)
    longest = entry.segments[0][1] if entry.segments else 0
    if place is None or computing.stem_tokens(place) < longest + settings.min_shared_tokens:
        return False
    hold(world, entry, Gate.HELD_FOR_PREFIX, until)
    world.computing.wait(stems[place], entry)
    return True


def entry_stems(entry: Entry) -> tuple[computing.Stem, ...]:
    """The stems of an entry's prompt, computed once."""
    if entry.stems is None:
        entry.stems = computing.stems_of(entry.run.run_id, entry.token_bytes)
    return entry.stems


def refresh_hits(world: World, entry: Entry) -> None:
    """Look the entry's prompt up in the index, unless that was just done."""
    if entry.text is not None:
        return
    lineage = entry.run.lineage(entry.pool)
    mark = hits_mark(world, lineage)
    if world.now - entry.hits_at >= HITS_FRESH_SECONDS or entry.hits_mark != mark:
        entry.segments = _segments(world, lineage, entry.token_bytes)
        entry.hits_at = world.now
        entry.hits_mark = mark


def hits_mark(world: World, lineage: Lineage) -> int:
    """Changes when prefix hits that were looked up before may not count any more, or name other engines: both only grow."""
    return lineage.mark + world.index.unseated


def _segments(world: World, lineage: Lineage, tokens: bytes) -> list[tuple[int, int]]:
    """Of a prompt, what is in the engines' caches and may be used by their present weights: (engines' bits, tokens), longest
    first; an engine has what the first that has its bit says.
    """
    index = world.index
    namespace, only = lineage.lookups[0]
    if only is None:
        return index.segments(namespace, tokens)
    found: list[tuple[int, int]] = []
    for namespace, only in lineage.lookups:
        segments = index.segments(namespace, tokens)
        if segments and only is not None:
            allowed = 0
            for engine in only:
                allowed |= index.flag(engine)
            segments = [(mask & allowed, held) for mask, held in segments if mask & allowed]
        found += segments
    if len(lineage.lookups) > 1:
        found.sort(key=lambda segment: -segment[1])
    return found


def note_lengths(world: World, rollout: Rollout) -> None:
    """A rollout wrote or finished: put those that wait with its prompt where what is expected of them now belongs."""
    for entry in list(rollout.run.entries_by_prompt.get(rollout.prompt_hash, ())):
        _expect_again(world, entry)


def review_lengths(world: World, run: Run, most: int) -> None:
    """Go on looking at what waits with new priors of length: the next `most` entries."""
    for _ in range(min(most, len(run.reviewed))):
        _expect_again(world, run.reviewed.pop())


def _expect_again(world: World, entry: Entry) -> None:
    if entry.held or not entry.members:
        return
    expect(entry)
    if not 1.0 / REKEY_FACTOR < entry.worst_tokens / entry.keyed_tokens < REKEY_FACTOR:
        order(world, entry, expected=True)


def expect(entry: Entry) -> None:
    """What is expected of the entry's first member: the mean of its remaining output, and what that may be at worst."""
    first = entry.members[0]
    kept = first.kept_tokens
    kind = (entry.task_type, entry.stratum)
    whole, worst = entry.run.lengths.outlook(entry.prompt_hash, kind, first.max_new_tokens, kept)
    entry.expected_tokens = max(1.0, whole - kept)
    entry.worst_tokens = worst


def entry_facts(world: World, entry: Entry) -> Facts:
    """The entry side of the score's facts, as of now."""
    run = entry.run
    facts = Facts()
    facts.rollout_class = entry.rollout_class
    facts.aging_seconds = world.config.queue.aging_seconds
    facts.token_seconds = pool_token_seconds(world, run, entry.pool)
    facts.prompt_tokens = entry.prompt_tokens
    facts.expected_tokens = entry.expected_tokens
    facts.worst_tokens = entry.worst_tokens
    facts.expected_seconds = entry.expected_tokens * facts.token_seconds
    facts.waited_seconds = world.now - entry.queued_at
    facts.slack_seconds = None if entry.deadline_at is None else entry.deadline_at - world.now - facts.expected_seconds
    step = entry.members[0].needed_by_step
    facts.steps_away = None if step is None else step - run.step
    facts.stratum_share, facts.target_share = run.mix.shares(entry.stratum)
    return facts


def pool_token_seconds(world: World, run: Run, pool: str) -> float:
    """Seconds one sequence needs per token in this pool, as measured; 0 before anything was."""
    engine = world.room(pool).paced_by
    return 0.0 if engine is None else engine.decode_seconds_per_token


def weights_of(world: World, run: Run) -> Weights:
    """Weights in force: the run's own, else the phase's (prefix, diversity), else the configured ones; as its rules turn them."""
    own = run.settings.weights
    policy = world.config.policy
    default = world.config.weights
    phase = run.phase
    prefix = own.prefix
    if prefix is None:
        prefix = phase.between(policy.cold_start_prefix_weight, policy.stable_prefix_weight)
    diversity = own.diversity
    if diversity is None:
        diversity = phase.between(policy.cold_start_diversity_weight, policy.stable_diversity_weight)
    critical = default.critical if own.critical is None else own.critical
    waiting = default.waiting if own.waiting is None else own.waiting
    cost = default.cost if own.cost is None else own.cost
    knobs = run.rules.knobs
    if knobs.neutral:
        return Weights(prefix, critical, waiting, diversity, cost)
    return Weights(
        knobs.weight("prefix", prefix),
        knobs.weight("critical", critical),
        knobs.weight("waiting", waiting),
        knobs.weight("diversity", diversity),
        knobs.weight("cost", cost),
    )


def _backlog(world: World, run: Run, pool: str, rollout_class: RolloutClass, short: bool) -> Backlog:
    key = (pool, rollout_class, short)
    backlog = run.backlogs.get(key)
    if backlog is None:
        backlog = run.backlogs[key] = Backlog(partial(_note_ready, world, run, key))
    return backlog


def _note_ready(world: World, run: Run, key: tuple[str, RolloutClass, bool], backlog: Backlog) -> None:
    """A backlog has its first entry that may be dispatched, or lost its last one."""
    pool, rollout_class, short = key
    ready = run.ready.setdefault(pool, {})
    if backlog.ready:
        ready[rollout_class, short] = backlog
        world.waiting.setdefault(pool, {})[run] = None
        return
    ready.pop((rollout_class, short), None)
    if not ready:
        world.waiting.get(pool, {}).pop(run, None)
