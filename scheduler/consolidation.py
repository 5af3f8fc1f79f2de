"""The last rollouts of a step move to where it ends sooner: interrupted, tokens kept, gone on with on another engine.

When no critical work waits any more, engines empty at random, and where they are not equally quick, the step ends with a slow one
beside others that are free. So once a second, with what is expected to be left of each rollout and the line that each engine's
reports show (`decode_curve.py`: a step of b sequences takes base + growth x b seconds), the end of an engine's last awaited rollout is

    base x its left + growth x sum over all there of min(their left, its left)

and a rollout that comes adds its price, since what it has so far is computed again while the others there stand still:

    price = pause + (prompt + output so far) / prefill speed          (what is cached there of its prompt is not counted)

A rollout leaves an engine that the step may end with, where the later end of the two engines comes sooner by more than `PRICE_TIMES`
its price. Engines that are alike and that hardly feel one sequence more are left as they are: nothing pays there.

Invariants
- Only while the trainer waits, for work that could go on later as if nothing had happened (`time_slice.may_wait`), and to an engine
  that holds the same version.
- A rollout moves at most `MOST_MOVES` times, and nobody moves while another one of its run is on its way.
- Only into slots that a whole pass of scheduling left free.
- Asking books nothing. Where the room is gone when a rollout comes, it goes anywhere.

What this module does not know: scores, prefixes, and who gets the room that is left behind.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from rolloutd.scheduler import lifecycle, tail, time_slice
from rolloutd.scheduler.engine import Engine
from rolloutd.scheduler.rollout import Attempt
from rolloutd.scheduler.run import Run
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import SHORT_TASKS, AbortReason, RolloutClass
from rolloutd.scheduler.world import World

MOVE_END: Final = AbortReason.MOVE.name.lower()  # how such an attempt stands in a rollout's history
MOST_MOVES: Final = 2  # of one rollout
MOST_AT_ONCE: Final = 8  # that leave in one look for the step to end sooner
TARGETS: Final = 4  # engines that they may go to: those that end first
PRICE_TIMES: Final = 2.0  # what is left of rollouts is a guess, what a move costs is not
DOUBT: Final = 2.0  # the step may end with an engine that is expected to end in 1 / DOUBT of the time
PAUSE_SECONDS: Final = 0.1  # abort, answer and dispatch
LEAST_TOKENS: Final = 64  # written here: it has only just come


class Last:
    """An attempt that the step waits for. left_tokens: expected."""

    __slots__ = ("attempt", "context_tokens", "left_tokens", "may_move")

    def __init__(self, world: World, attempt: Attempt) -> None:
        self.attempt = attempt
        self.left_tokens = max(tail.LEAST_LEFT_TOKENS, attempt.expected_left_tokens())
        self.context_tokens = len(attempt.token_bytes) // TOKEN_BYTES + attempt.generated_tokens
        moves = sum([record.end == MOVE_END for record in attempt.rollout.history])
        self.may_move = (
            attempt.generated_tokens >= LEAST_TOKENS and moves < MOST_MOVES and time_slice.may_wait(world, attempt)
        )


class Place:
    """An engine of a known line, and what it runs."""

    __slots__ = (
        "_base",
        "_growth",
        "_headroom_tokens",
        "_left_tokens",
        "_others",
        "_others_sums",
        "_stall_seconds",
        "engine",
        "free_kv_tokens",
        "free_slots",
        "lasts",
    )

    def __init__(self, world: World, run: Run, engine: Engine, line: tuple[float, float], free_slots: int) -> None:
        self.engine = engine
        self.free_slots = free_slots
        self.free_kv_tokens = engine.facts.kv_capacity_tokens - engine.kv_claimed_tokens
        self.lasts: list[Last] = []  # most left first
        self._left_tokens = 0.0  # sum of theirs
        self._base, self._growth = line
        self._headroom_tokens = world.config.budget.headroom_tokens
        self._others: list[float] = []  # what is left of the others, least first
        self._stall_seconds = 0.0  # by those who come
        for attempt in engine.attempts.values():
            rollout = attempt.rollout
            if rollout.task_type in SHORT_TASKS:
                continue
            if rollout.run is run and rollout.rollout_class is RolloutClass.CRITICAL:
                self._add(Last(world, attempt))
            else:
                self._others.append(max(tail.LEAST_LEFT_TOKENS, attempt.expected_left_tokens()))
        self.lasts.sort(key=_most_left_first)
        self._others.sort()
        self._others_sums = [0.0]  # of the first of them
        for left in self._others:
            self._others_sums.append(self._others_sums[-1] + left)

    def end_seconds(self, without: Last | None = None, and_also: Last | None = None) -> float:
        """Until the last awaited one here is done, with the price of one more; 0 where there is none."""
        lasts = self.lasts
        first = 1 if lasts and lasts[0] is without else 0
        longest = lasts[first].left_tokens if len(lasts) > first else 0.0
        tokens = self._left_tokens
        seconds = self._stall_seconds
        if without is not None:
            tokens -= without.left_tokens
        if and_also is not None:
            longest = max(longest, and_also.left_tokens)
            tokens += and_also.left_tokens
            seconds += self.price_seconds(and_also)
        if not longest:
            return 0.0
        shorter = bisect_right(self._others, longest)
        tokens += self._others_sums[shorter] + (len(self._others) - shorter) * longest
        return seconds + self._base * longest + self._growth * tokens

    def price_seconds(self, last: Last) -> float:
        """Of its coming here."""
        return PAUSE_SECONDS + last.context_tokens / self.engine.prefill_tokens_per_second

    def takes(self, last: Last) -> bool:
        """Whether it could go on here now."""
        engine, attempt = self.engine, last.attempt
        facts, rollout = engine.facts, attempt.rollout
        if self.free_slots <= 0 or engine.version != attempt.engine.version or engine.engine_id in rollout.excluded:
            return False
        left = rollout.remaining_tokens - attempt.generated_tokens
        if facts.context_tokens and last.context_tokens + left > facts.context_tokens:
            return False
        if facts.max_prompt_tokens and last.context_tokens > facts.max_prompt_tokens:
            return False
        capacity = facts.kv_capacity_tokens
        if capacity and (
            self.free_kv_tokens < attempt.permit.kv_tokens
            or not engine.promises.fits(last.context_tokens, left, capacity, facts.page_tokens, self._headroom_tokens)
        ):
            return False
        return all(facts.labels.get(name) == value for name, value in rollout.spec.engine_labels.items())

    def come(self, last: Last) -> None:
        """It is to go on here: from now on it counts as running here."""
        self._stall_seconds += self.price_seconds(last)
        self.free_slots -= 1
        self.free_kv_tokens -= last.attempt.permit.kv_tokens
        self._add(last)
        self.lasts.sort(key=_most_left_first)

    def leave(self, last: Last) -> None:
        """It goes on elsewhere; the slot is free when its engine has ended it."""
        self.lasts.remove(last)
        self._left_tokens -= last.left_tokens

    def _add(self, last: Last) -> None:
        self.lasts.append(last)
        self._left_tokens += last.left_tokens


def _most_left_first(last: Last) -> float:
    return -last.left_tokens


def go_on(world: World) -> None:
    """After a pass that left nothing out (a slot that is free now is wanted by nobody): look at each run, once a second."""
    kept, world.kept = world.kept, {}
    for run in kept:
        if world.runs.get(run.run_id) is run:
            consider(world, run)


def consider(world: World, run: Run) -> None:
    """Interrupt those of a run who should go on elsewhere, and note where."""
    settings = world.config.preempt
    ledger = run.ledger
    if not settings.enabled or not settings.consolidate:
        return
    if not 0 < ledger.class_running[RolloutClass.CRITICAL] <= ledger.running <= tail.MOST_LOOKED_AT:
        return
    if run.pressure(world.now) < 1.0 or not tail.is_on(world, run):
        return
    for attempt in world.aborting.values():
        if attempt.run is run and attempt.abort_reason is AbortReason.MOVE:
            return
    for pool, room in world.rooms.items():
        places = []
        for engine in room.members.values():
            line = engine.curve.line()
            if (
                line is not None
                and engine.prefill_tokens_per_second
                and engine.is_open(world.now)
                and world.serves(engine, run, pool, {})
            ):
                places.append(Place(world, run, engine, line, engine.free_slots(False, room.reserved_short)))
        if len(places) > 1:
            _spread(world, places)


def _spread(world: World, places: list[Place]) -> None:
    """Let rollouts leave the engines that the step may end with."""
    for _ in range(MOST_AT_ONCE):
        places.sort(key=Place.end_seconds)
        end = places[-1].end_seconds()
        targets = [place for place in places if place.free_slots > 0][:TARGETS]
        if not any(
            place.end_seconds() * DOUBT >= end and _relieve(world, place, targets) for place in reversed(places)
        ):
            return


def _relieve(world: World, place: Place, targets: list[Place]) -> bool:
    """Move the rollout of one engine whose leaving gains most, if that pays; returns whether one goes."""
    before = place.end_seconds()
    best: Last | None = None
    to: Place | None = None
    most = 0.0
    for last in place.lasts:
        if not last.may_move:
            continue
        rest = place.end_seconds(last)
        for target in targets:
            if target is place or not target.takes(last):
                continue
            gain = before - max(rest, target.end_seconds(None, last)) - PRICE_TIMES * target.price_seconds(last)
            if gain > most:
                most, best, to = gain, last, target
    if best is None or to is None:
        return False
    place.leave(best)
    to.come(best)
    _move(world, best, to, "its step ends sooner")
    return True


def _move(world: World, last: Last, to: Place, why: str) -> None:
    rollout = last.attempt.rollout
    last.may_move = False
    rollout.destination = to.engine
    lifecycle.abort(world, rollout, AbortReason.MOVE, f"goes to {to.engine.engine_id}: {why}")
