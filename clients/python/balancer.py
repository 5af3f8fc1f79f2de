"""One ledger over several servers: who runs what, and what moves when one of them goes away.

A submission goes whole to the server with the fewest unfinished rollouts, unless something it belongs to (its group, session
or parent) is somewhere already: then it goes there. A rollout that a server accepted exists only there; so when a server is
given up (member.py), refuses because it shuts down, or ends a rollout with outcome "shutdown", the submission is handed to
another one under the same ids. Should both come to results, the first counts and the other copy is cancelled.

Invariants: every rollout is delivered once, from whichever server; a submission that no server can take now waits for one, for
`reconnect_seconds` at most; a result is acknowledged at the server it came from, and one that does not count only once
another one has: should the submission come back to that server, it still answers for it. What this does not know: streams in
detail, DNS.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rolloutd import v1
from rolloutd.client.connection import logger, unavailable
from rolloutd.client.errors import ClientClosed, Problem, error_of_problem
from rolloutd.client.inbox import Inbox
from rolloutd.client.ledger import Entry, Ledger
from rolloutd.client.member import Member, MemberSettings
from rolloutd.client.results import Acceptance, Notice, RolloutResult
from rolloutd.client.stream import MAX_UNACCEPTED_BYTES

REMEMBERED_PLACES = 65_536  # ids of groups, sessions and rollouts whose server is remembered
DEADLINE_STEP_SECONDS = 1.0  # a deadline is shortened by the time that passed here once that is more than this
LEAST_DEADLINE_SECONDS = 0.001  # of a submission whose deadline passed while it moved: the next server ends it
WITHDRAWN = Problem("CANCELLED", "CANCELLED", "cancelled before a server had room for it")


class _Copy:
    """Sink of one submission at one server."""

    def __init__(self, balancer: "Balancer", member: Member, original: Entry) -> None:
        self._balancer = balancer
        self._member = member
        self._original = original

    def expect(self, rollouts: int) -> None:
        """The original expects them."""

    def deliver(self, result: RolloutResult) -> None:
        self._balancer.arrived(self._member, self._original, result)

    def refuse(self, problem: Problem, remaining: Iterable[RolloutResult]) -> None:
        self._balancer.refused(self._member, self._original, problem)

    def fail(self, error: Exception) -> None:
        """The stream tells the balancer as well."""


class _Strays:
    """Where a member's stream leaves results that it does not owe."""

    def __init__(self, balancer: "Balancer") -> None:
        self._balancer = balancer
        self.member: Member | None = None

    @property
    def full(self) -> bool:
        return self._balancer.full

    def put(self, result: RolloutResult) -> None:
        assert self.member is not None
        self._balancer.strayed(self.member, result)

    def fail(self, error: Exception) -> None:
        if self.member is not None:
            self._balancer.member_failed(self.member, error)


class Balancer:
    """Entries in; results into each entry's sink, and those of nobody here into the inbox."""

    def __init__(
        self,
        settings: MemberSettings,
        inbox: Inbox,
        on_notice: Callable[[Notice], None],
        on_up: Callable[[Member], None],
    ) -> None:
        self.members: dict[str, Member] = {}
        self._settings = settings
        self._inbox = inbox
        self._on_notice = on_notice
        self._told_up = on_up
        self._ledger = Ledger()
        self._copies: dict[Entry, dict[Member, Entry]] = {}
        self._homeless: OrderedDict[Entry, None] = OrderedDict()  # no server could be given them
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._spared: dict[str, set[Member]] = {}  # who has a result of a rollout that is still owed and did not count
        self._keepers: dict[str, Member] = {}  # of results that the caller has not acknowledged
        self._room = asyncio.Event()
        self._changed = asyncio.Event()  # a server came up, or all of it failed
        self._waiters = 0
        self._failure: Exception | None = None
        self._closing = False
        self._alone: asyncio.TimerHandle | None = None  # runs while no server is attached
        self._loop = asyncio.get_running_loop()
        self._leaving: set[asyncio.Task[None]] = set()
        self._lonely_since = self._loop.time()
        self._be_alone()

    # ---- servers

    def add_server(self, target: str) -> asyncio.Task[None] | None:
        """Begins to use a server. The task ends once it is attached; None when it is in use already."""
        if (known := self.members.get(target)) is not None:
            known.leaving = False
            return None
        strays = _Strays(self)
        member = Member(target, self._settings, strays, self._up, self._given_up, self._on_notice)
        strays.member = self.members[target] = member
        return member.start()

    async def attached(self) -> None:
        """Returns while at least one server is attached. Raises what ended all of it, or ServerUnavailable in time."""
        while not any(member.attached for member in self.members.values()):
            self.raise_failure()
            self._changed.clear()
            await self._changed.wait()
        self.raise_failure()

    def remove_server(self, target: str) -> None:
        """Its address is gone. What it runs may come to an end; it is closed once it is given up."""
        member = self.members[target]
        member.leaving = True
        if member.given_up:
            self._leave(member)

    def member_failed(self, member: Member, error: Exception) -> None:
        """The stream of a member ended for good: it was fenced, refused or closed."""
        if self.members.get(member.target) is member:
            self._fail(error)

    def _up(self, member: Member) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self._changed.set()
        for entry in list(self._homeless):
            self._place(entry)
        self._told_up(member)

    def _given_up(self, member: Member) -> None:
        moving = [entry for entry, copies in self._copies.items() if member in copies]
        if moving:
            logger.warning("giving up on %s: its %d unfinished submissions go elsewhere", member.target, len(moving))
        for entry in moving:
            member.stream.release(self._copies[entry].pop(member))
        for entry in moving:  # after all of them were counted off, so that load is compared as it is
            if all(other.draining for other in self._copies[entry]):
                self._place(entry)
        if not any(other.attached for other in self.members.values()):
            self._be_alone()
        if member.leaving:
            self._leave(member)

    def _leave(self, member: Member) -> None:
        del self.members[member.target]
        task = self._loop.create_task(member.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _be_alone(self) -> None:
        if self._alone is None and self._failure is None and not self._closing:
            self._lonely_since = self._loop.time()
            self._alone = self._loop.call_later(self._settings.reconnect_seconds, self._stay_alone)

    def _stay_alone(self) -> None:
        targets = ", ".join(self.members) or "any address"
        self._fail(unavailable(targets, self._loop.time() - self._lonely_since, "none of them can be reached"))

    # ---- the verbs of a stream

    @property
    def full(self) -> bool:
        """Whether streams should not be read on."""
        return self._inbox.full and not self._waiters

    def read_on(self) -> None:
        """The inbox may have room again."""
        for member in self.members.values():
            member.stream.read_on()

    def raise_failure(self) -> None:
        """Raises what ended all of it for good, if anything did."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, streams are read even if nobody empties the inbox."""
        self._waiters += 1
        self.read_on()
        try:
            yield
        finally:
            self._waiters -= 1

    async def submit(self, entry: Entry) -> None:
        """Takes an entry, at once or as soon as enough others are accepted."""
        self.raise_failure()
        if self._crowded(entry):
            with self.waiting():
                while self._crowded(entry):
                    self._room.clear()
                    await self._room.wait()
                    self.raise_failure()
        self._ledger.add(entry)
        self._copies[entry] = {}
        self._place(entry)

    async def acceptance(self, entry: Entry) -> Acceptance:
        """The answer of a server to a submission. Refused when that is no."""
        with self.waiting():
            while entry.acceptance is None and entry.problem is None:
                self.raise_failure()
                entry.settled = entry.settled or asyncio.Event()
                await entry.settled.wait()
        if entry.acceptance is not None:
            return entry.acceptance
        assert entry.problem is not None
        raise error_of_problem(entry.problem)

    def entry(self, any_id: str) -> Entry | None:
        """The unfinished entry of a submission or rollout."""
        return self._ledger.get(any_id)

    def cancel(self, entry: Entry) -> None:
        """Cancels all its rollouts."""
        self.withdraw(entry)
        for member, copy in list(self._copies.get(entry, {}).items()):
            member.stream.cancel(copy)

    def withdraw(self, entry: Entry) -> None:
        """As cancel, for an entry that no server has taken yet; it does not move any more. Tells the servers nothing."""
        if entry.state == "ended":
            return
        entry.cancelled = True
        if entry in self._homeless:
            self._refuse(entry, WITHDRAWN)
            return
        for member, copy in list(self._copies[entry].items()):
            member.stream.withdraw(copy)

    def acknowledge(self, acknowledgement: v1.Acknowledgement) -> None:
        """The caller has dealt with a result."""
        keeper = self._keepers.pop(acknowledgement.rollout_id, None)
        for member in self.members.values() if keeper is None else (keeper,):  # an unknown id has no effect
            member.stream.acknowledge(acknowledgement)

    async def close(self) -> None:
        """Sends what is pending, says goodbye, and ends every wait with ClientClosed."""
        self._closing = True
        if self._alone is not None:
            self._alone.cancel()
        members, self.members = list(self.members.values()), {}
        await asyncio.gather(*(member.close() for member in members), *self._leaving)
        self._fail(ClientClosed("the client was closed"))

    # ---- what becomes of a submission

    def arrived(self, member: Member, entry: Entry, result: RolloutResult) -> None:
        """A rollout has ended at a server."""
        if result.outcome == "shutdown" and not entry.cancelled and result.rollout_id in entry.remaining:
            self._spared.setdefault(result.rollout_id, set()).add(member)
            self._copy_over(member, entry)
            return
        arrival, owner = self._ledger.arrive(result.rollout_id)
        if arrival != "owed" or owner is None:
            _drop(member, result.rollout_id)
            return
        self._keepers[result.rollout_id] = member
        self._drop_spared(result.rollout_id, but=member)
        for other in self._copies[owner]:
            if other is not member:
                other.cancel_soon(result.rollout_id)
        if not owner.remaining:
            del self._copies[owner]
            self._homeless.pop(owner, None)
        owner.accepted(Acceptance(owner.rollout_id, "finished", 0, 0, 0.0, attached=True))
        owner.sink.deliver(result)
        self._room.set()

    def strayed(self, member: Member, result: RolloutResult) -> None:
        """A result that the member's stream owes nobody: of work that moved away from it, or of an earlier life of the caller."""
        entry = self._ledger.get(result.rollout_id)
        if entry is not None:
            if result.ok:
                self.arrived(member, entry, result)
            else:  # the copy that it moved to decides; this one is kept there, in case it moves back
                self._spared.setdefault(result.rollout_id, set()).add(member)
            return
        arrival, _ = self._ledger.arrive(result.rollout_id)
        if arrival == "repeated":
            if self._keepers.get(result.rollout_id) is not member:
                _drop(member, result.rollout_id)
            return
        self._ledger.remember(result.rollout_id)
        self._keepers[result.rollout_id] = member
        self._inbox.put(result)

    def refused(self, member: Member, entry: Entry, problem: Problem) -> None:
        """A server refused a submission."""
        if entry.state == "ended" or member not in self._copies[entry]:
            return
        copies = self._copies[entry]
        del copies[member]
        moved = entry.acceptance is not None or bool(copies)
        if problem.reason == "SHUTDOWN":
            member.draining = True
        # A server that had it before and delivered part of it does not take it a second time; another one may.
        elif not (moved and problem.code == "ALREADY_EXISTS" and self._choose(entry, member)):
            if not copies:
                self._refuse(entry, problem)
            return
        if not copies:
            self._place(entry, but=member)

    def _copy_over(self, member: Member, entry: Entry) -> None:
        """A server that shuts down ended a rollout of it; others of the same submission may still run there."""
        member.draining = True
        if all(other.draining for other in self._copies[entry]):
            self._place(entry, but=member)

    def _place(self, entry: Entry, but: Member | None = None) -> None:
        """Gives an entry to a server, or has it wait for one."""
        self._homeless.pop(entry, None)
        if entry.state == "ended":
            return
        if entry.cancelled:
            self._refuse(entry, WITHDRAWN)
            return
        member = self._choose(entry, but)
        if member is None:
            self._homeless[entry] = None
            if math.isfinite(entry.give_up_at):
                self._loop.call_at(entry.give_up_at, self._expire, entry)
            return
        copy = Entry(self._message(entry, member), _Copy(self, member, entry), self._loop.time(), entry.on_progress)
        copy.on_accepted = lambda acceptance: self._accepted(entry, acceptance)
        self._copies[entry][member] = copy
        for key in _keys(entry.message):
            self._homes[key] = member
            self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED_PLACES:
            self._homes.popitem(last=False)
        member.stream.add(copy)

    def _choose(self, entry: Entry, but: Member | None) -> Member | None:
        ready = [
            member
            for member in self.members.values()
            if member.ready and member is not but and member not in self._copies[entry]
        ]
        if not ready:
            return None
        for key in _keys(entry.message):
            if (home := self._homes.get(key)) in ready:
                return home
        return min(ready, key=lambda member: member.stream.unfinished_rollouts)

    def _expire(self, entry: Entry) -> None:
        if entry in self._homeless:
            self._refuse(
                entry, Problem("UNAVAILABLE", "SHUTDOWN", "no server could take it before its own time was up")
            )

    def _message(self, entry: Entry, member: Member) -> v1.RolloutSubmission:
        """The entry's submission as it is to be sent now."""
        message = entry.message
        waited = self._loop.time() - entry.submitted_at
        late = message.deadline_seconds > 0 and waited > DEADLINE_STEP_SECONDS
        parent_home = self._homes.get(f"rollout {message.parent_rollout_id}", member)
        if not late and parent_home is member:
            return message
        changed = v1.RolloutSubmission()
        changed.CopyFrom(message)
        if parent_home is not member:  # this server has not heard of the parent
            changed.parent_rollout_id = ""
        if late:
            changed.deadline_seconds = max(LEAST_DEADLINE_SECONDS, message.deadline_seconds - waited)
        return changed

    def _accepted(self, entry: Entry, acceptance: Acceptance) -> None:
        if entry.state == "ended":
            return
        self._ledger.accept(entry)
        entry.accepted(acceptance)
        self._room.set()
        for rollout_id in entry.rollout_ids:  # of a submission that moved: delivered by another server before
            if rollout_id not in entry.remaining:
                for member in self._copies[entry]:
                    member.cancel_soon(rollout_id)

    def _refuse(self, entry: Entry, problem: Problem) -> None:
        self._homeless.pop(entry, None)
        del self._copies[entry]
        entry.problem = problem
        results = entry.refused_results(self._settings.hello.run_id, problem)
        for rollout_id in entry.remaining:
            self._drop_spared(rollout_id)
        self._ledger.end(entry)
        entry.sink.refuse(problem, results)
        entry.settle()
        self._room.set()

    def _drop_spared(self, rollout_id: str, but: Member | None = None) -> None:
        for member in self._spared.pop(rollout_id, set()) - {but}:
            _drop(member, rollout_id)

    def _crowded(self, entry: Entry) -> bool:
        others = self._ledger.unaccepted
        if others >= self._settings.max_unaccepted:
            return True
        return others > 0 and self._ledger.unaccepted_bytes + entry.size_bytes > MAX_UNACCEPTED_BYTES

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            for entry in self._ledger.entries():
                entry.sink.fail(error)
                entry.settle()
            self._inbox.fail(error)
            self._room.set()
            self._changed.set()


def _drop(member: Member, rollout_id: str) -> None:
    """The member may forget a result that nobody wants from it."""
    member.stream.acknowledge(v1.Acknowledgement(rollout_id=rollout_id))


def _keys(message: v1.RolloutSubmission) -> list[str]:
    """What ties submissions to one server, strongest first."""
    parents = [f"rollout {message.parent_rollout_id}"] if message.parent_rollout_id else []
    groups = [f"group {message.group_id}"] if message.group_id else []
    sessions = [f"session {message.session_id}"] if message.session_id else []
    return [*parents, *groups, *sessions, f"rollout {message.rollout_id}"]
