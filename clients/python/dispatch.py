"""What each event of the stream means for what is in flight.

Invariants: a durable event is taken once, by cursor (within one memory of the server) and by rollout id (across restarts);
a repeated result is acknowledged again without reaching the caller; a refusal that says "later" is tried again after the time
it names, unless the submission's own time is up. Everything here is synchronous. What this does not know: the stream.
"""

import asyncio
import random
from collections.abc import Callable

from rolloutd import v1
from rolloutd.client.connection import logger
from rolloutd.client.errors import Problem, RolloutdError, problem_of_message
from rolloutd.client.inbox import Incoming
from rolloutd.client.ledger import Entry, Ledger
from rolloutd.client.outbox import Outbox
from rolloutd.client.results import (
    Acceptance,
    Notice,
    Progress,
    RolloutResult,
    acceptance_of_message,
    notice_of_message,
)

LATER_SECONDS = 0.05  # least wait after a refusal that says "later"
WARNING_NOTICES = frozenset({"no_capacity", "budget_lease_expired", "draining", "results_expired"})

WITHDRAWN = Problem("CANCELLED", "CANCELLED", "cancelled before the server had room for it")


class Dispatch:
    """Applies events to ledger, outbox and inbox."""

    def __init__(
        self, run_id: str, ledger: Ledger, outbox: Outbox, inbox: Incoming, on_notice: Callable[[Notice], None]
    ) -> None:
        self._run_id = run_id
        self._ledger = ledger
        self._outbox = outbox
        self._inbox = inbox
        self._on_notice = on_notice
        self._loop = asyncio.get_running_loop()
        self._missed_events = 0  # still to come of those the server sends again
        self.cursor = 0  # newest durable event taken
        self.attached_at = 0.0  # loop time
        self.progressed = False  # an event came since the owner reset this
        self.replayed = asyncio.Event()  # the missed events have all come
        self.room = asyncio.Event()  # set whenever something was accepted
        self.unfinished_at_attach: list[Entry] = []  # to be submitted again after the replay

    def attach(self, response: v1.SubmitRolloutResponse) -> None:
        """The first response of a session."""
        if not response.events or response.events[0].WhichOneof("event") != "attached":
            raise RolloutdError(
                "the server did not answer hello with attached: is this a rolloutd server of this release?"
            )
        attached = response.events[0].attached
        self.attached_at = self._loop.time()
        self.cursor = min(self.cursor, attached.cursor)  # lower: the server lost its memory and counts anew
        self._missed_events = attached.pending_events
        self.replayed = asyncio.Event()
        self._outbox.reattached(attached)
        self.unfinished_at_attach = self._ledger.entries()
        for entry in self.unfinished_at_attach:
            self._ledger.unaccept(entry)
            _stop_retry(entry)
        if not self._missed_events:
            self.replayed.set()
        for event in response.events[1:]:
            self._on_event(event)

    def take(self, response: v1.SubmitRolloutResponse) -> None:
        """Any later response."""
        for event in response.events:
            self._on_event(event)

    def withdraw(self, entry: Entry) -> None:
        """Does not try an entry again. One that only waits for its next try ends here and now."""
        entry.cancelled = True
        if entry.retry is not None:
            self.refuse(entry, WITHDRAWN)

    def cancel(self, entry: Entry) -> None:
        """Cancels all rollouts of an entry."""
        self.withdraw(entry)
        if entry.state != "ended":
            self._outbox.cancel(entry)

    def refuse(self, entry: Entry, problem: Problem) -> None:
        """It will not run: its rollouts end here."""
        entry.problem = problem
        results = entry.refused_results(self._run_id, problem)
        self._ledger.end(entry)
        entry.sink.refuse(problem, results)
        entry.settle()
        self.room.set()

    def release(self, entry: Entry) -> None:
        """Owes nobody its results any more; what still comes of it is foreign. Tells the server nothing."""
        _stop_retry(entry)
        self._ledger.end(entry)
        entry.settle()
        self.room.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come: everybody who waits is told."""
        for entry in self._ledger.entries():
            _stop_retry(entry)
            entry.sink.fail(error)
            entry.settle()
        self._inbox.fail(error)
        self.room.set()

    def _on_event(self, event: v1.Event) -> None:
        self.progressed = True
        if event.cursor:
            self._missed_events -= 1
            if self._missed_events <= 0:
                self.replayed.set()
            if event.cursor <= self.cursor:
                return
            self.cursor = event.cursor
        match event.WhichOneof("event"):
            case "finished":
                self._on_finished(event.cursor, event.finished)
            case "accepted":
                self._on_accepted(event.accepted)
            case "rejected":
                self._on_rejected(event.rejected)
            case "progress":
                self._on_progress(event.progress)
            case "group_finished":
                self._outbox.passed(event.cursor)
            case "notice":
                self._on_news(event.notice)
            case other:
                logger.debug("event of a kind this client does not know: %s", other)
                if event.cursor:
                    self._outbox.passed(event.cursor)

    def _on_finished(self, cursor: int, message: v1.RolloutResult) -> None:
        rollout_id = message.rollout_id
        arrival, entry = self._ledger.arrive(rollout_id)
        # Without a cursor: an answer to a repeated submission. Whether it is open is as it was.
        if arrival == "repeated" and not self._outbox.acknowledgements.is_open(rollout_id):
            if cursor:
                self._outbox.passed(cursor)
            self._outbox.acknowledge(v1.Acknowledgement(rollout_id=rollout_id))
            return
        if cursor:
            self._outbox.acknowledgements.arrived(cursor, rollout_id)
        if arrival == "repeated":
            return
        result = RolloutResult.from_message(message)
        if entry is None:
            self._ledger.remember(rollout_id)
            self._inbox.put(result)
            return
        if entry.acceptance is None:  # it was accepted on a stream that broke
            entry.accepted(Acceptance(entry.rollout_id, "finished", 0, 0, 0.0, attached=True))
        entry.sink.deliver(result)
        self.room.set()

    def _on_accepted(self, message: v1.Accepted) -> None:
        entry = self._ledger.get(message.rollout_id)
        if entry is None or entry.retry is not None:
            return  # its results came first, or another of its samples was refused for now
        self._ledger.accept(entry)
        entry.accepted(acceptance_of_message(message))
        self.room.set()

    def _on_rejected(self, message: v1.Rejected) -> None:
        problem = problem_of_message(message.error)
        if message.kind != v1.ITEM_KIND_SUBMISSION:
            kind = v1.ItemKind.Name(message.kind).removeprefix("ITEM_KIND_").lower()
            logger.warning("%s of %s was refused: %s", kind, message.rollout_id, problem)
            return
        entry = self._ledger.get(message.rollout_id)
        if entry is None or entry.retry is not None:
            return  # ended, or tried again already, because another of its samples was refused
        if problem.code != "RESOURCE_EXHAUSTED":
            self.refuse(entry, problem)
            return
        delay = max(problem.retry_after_seconds, LATER_SECONDS) * random.uniform(1.0, 1.25)
        if entry.cancelled:
            self.refuse(entry, WITHDRAWN)
        elif self._loop.time() + delay > entry.give_up_at:
            self.refuse(entry, problem)
        else:
            self._ledger.unaccept(entry)
            entry.retry = self._loop.call_later(delay, self._retry, entry)

    def _retry(self, entry: Entry) -> None:
        entry.retry = None
        self._outbox.submit(entry)

    def _on_progress(self, message: v1.Progress) -> None:
        entry = self._ledger.get(message.rollout_id)
        if entry is not None and entry.on_progress is not None:
            entry.on_progress(Progress(message.rollout_id, message.generated_tokens, message.engine_id))

    def _on_news(self, message: v1.Notice) -> None:
        notice = notice_of_message(message)
        log = logger.warning if notice.kind in WARNING_NOTICES else logger.info
        log("rolloutd says %s: %s (%.1f s)", notice.kind, notice.message, notice.seconds)
        self._on_notice(notice)


def _stop_retry(entry: Entry) -> None:
    if entry.retry is not None:
        entry.retry.cancel()
        entry.retry = None
