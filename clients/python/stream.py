"""The SubmitRollout stream of one consumer, kept alive.

One task runs one session after the other: open a fresh channel, say hello with the cursor up to which everything is dealt
with, then read and write until the stream breaks; back off, and again. After a re-attach the missed events come first, then
everything not ended is submitted again (by id: the server attaches it, or runs it if it has lost it).

Invariants: one writer and one reader per session; the reader pauses (and HTTP/2 with it the server) while the inbox is full and
nobody waits for anything else; nobody waits for ever: when the server is gone for `reconnect_seconds`, or has fenced us, every
waiter gets the reason. Memory while the server is away is bounded by what is in flight; a retry leaves nothing behind.
What this does not know: what an event means (dispatch.py), what callers do with results.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import grpc

from rolloutd import v1
from rolloutd.client import connection
from rolloutd.client.access import Access
from rolloutd.client.connection import backoff_seconds, logger, unavailable
from rolloutd.client.dispatch import Dispatch
from rolloutd.client.errors import ClientClosed, Fenced, Problem, error_of_problem, problem_of_status
from rolloutd.client.inbox import Incoming
from rolloutd.client.ledger import Entry, Ledger
from rolloutd.client.outbox import Outbox
from rolloutd.client.results import Acceptance, Notice

# A busy writer waits this long after its last message, so that items gather; an idle one sends at once.
COALESCE_SECONDS = 0.002
REMINDER_SECONDS = 30.0  # an outage is logged this often
ATTACH_SECONDS = 20.0  # longest wait for the answer to hello
REPLAY_SECONDS = 10.0  # longest wait for missed events before unfinished work is submitted again
STABLE_SECONDS = 5.0  # a session that lasted this long ends an outage, even if nothing happened in it
CANCEL_SECONDS = 0.5  # after cancelling a stream: longest wait for what is pending on it to end by itself
CLOSE_SECONDS = 2.0  # at close: longest wait for the last acknowledgements to go out, and for the server's goodbye
UNFINISHED_CLOSE_SECONDS = 0.2  # the latter when rollouts are unfinished: the server would go on until they end
MAX_UNACCEPTED_BYTES = 64 * 1024 * 1024
# A stream that ends with one of these is opened again. The second set may be our own doing (a message the server chokes on), so
# a short session that ends so does not end an outage.
PASSING = frozenset({"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
DUBIOUS = frozenset({"INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "ABORTED"})

Call = grpc.aio.StreamStreamCall[v1.SubmitRolloutRequest, v1.SubmitRolloutResponse]


class _Ended(Exception):
    """The server ended the stream with OK."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream is told once."""

    target: str
    access: Access
    hello: v1.Hello
    reconnect_seconds: float
    max_unaccepted: int
    on_notice: Callable[[Notice], None]
    on_link: Callable[[bool], None] = lambda _: (
        None
    )  # called with True when attached, with False when that session ended


class RolloutStream:
    """Entries in; results into each entry's sink, and those of nobody here into `inbox`."""

    def __init__(self, settings: StreamSettings, inbox: Incoming) -> None:
        self._settings = settings
        self._ledger = Ledger()
        self._outbox = Outbox()
        self._inbox = inbox
        self._dispatch = Dispatch(settings.hello.run_id, self._ledger, self._outbox, inbox, settings.on_notice)
        self._read_on = asyncio.Event()
        self._waiters = 0  # callers that wait for something else than the inbox
        self._failure: Exception | None = None
        self._attached = asyncio.Event()  # set by the first attach, or by failure
        self._closing = False
        self._writer: asyncio.Task[None] | None = None  # of the attached session
        self._reading = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once attached. ServerUnavailable, Fenced or Refused when that does not come about."""
        self._task = asyncio.create_task(self._run(), name="rolloutd-stream")
        await self._attached.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what ended the stream for good, if anything did."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, the stream is read even if nobody empties the inbox."""
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
                    self._dispatch.room.clear()
                    await self._dispatch.room.wait()
                    self.raise_failure()
        self.add(entry)

    def add(self, entry: Entry) -> None:
        """Takes an entry at once, however many others are not accepted yet."""
        self._ledger.add(entry)
        self._outbox.submit(entry)

    def release(self, entry: Entry) -> None:
        """Gives an entry up: it is neither sent nor delivered any more. Tells the server nothing."""
        if entry.state != "ended":
            self._dispatch.release(entry)

    @property
    def unfinished_rollouts(self) -> int:
        """Rollouts of the entries it holds."""
        return self._ledger.rollouts

    async def acceptance(self, entry: Entry) -> Acceptance:
        """The server's answer to a submission. Refused when that is no."""
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
        self._dispatch.cancel(entry)

    def withdraw(self, entry: Entry) -> None:
        """As cancel, for an entry that the server has not taken yet: it is not tried again. Tells the server nothing."""
        self._dispatch.withdraw(entry)

    def acknowledge(self, acknowledgement: v1.Acknowledgement) -> None:
        """The caller has dealt with a result."""
        self._outbox.acknowledge(acknowledgement)

    async def close(self) -> None:
        """Sends what is pending, says goodbye, and ends every wait with ClientClosed."""
        self._closing = True
        self._outbox.close()
        task = self._task
        if task is not None:
            if self._writer is not None:
                with self.waiting():
                    await asyncio.wait([task, self._writer], timeout=CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    patience = UNFINISHED_CLOSE_SECONDS if len(self._ledger) else CLOSE_SECONDS
                    await asyncio.wait([task], timeout=patience)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail(ClientClosed("the client was closed"))

    async def _run(self) -> None:
        try:
            await self._sessions()
        except Exception as error:  # of whatever kind: those who wait get it
            self._fail(error)

    async def _sessions(self) -> None:
        loop = asyncio.get_running_loop()
        outage_since: float | None = None
        delays = backoff_seconds()
        quiet_until = 0.0
        while True:
            started = loop.time()
            self._dispatch.progressed = False
            problem = await self._session()
            if self._closing:
                return
            now = loop.time()
            attached_and_useful = self._dispatch.progressed and problem.code in PASSING
            if attached_and_useful or now - started > STABLE_SECONDS and self._dispatch.attached_at > started:
                outage_since, delays = now, backoff_seconds()
            elif outage_since is None:
                outage_since = started
            left = outage_since + self._settings.reconnect_seconds - now
            if left < 0:
                raise unavailable(self._settings.target, now - outage_since, str(problem))
            delay = min(max(next(delays), problem.retry_after_seconds), left + 0.01)
            if now >= quiet_until or outage_since == now:
                quiet_until = now + REMINDER_SECONDS
                patience = f" for {left:.0f} s more" if math.isfinite(left) else ""
                logger.warning("stream to %s is down: %s; trying%s", self._settings.target, problem, patience)
            await asyncio.sleep(delay)

    async def _session(self) -> Problem:
        """One stream from hello to its end: why it ended. Raises what ends all sessions."""
        channel = connection.open_channel(self._settings.target, self._settings.access)
        call = v1.RolloutServiceStub(channel).SubmitRollout(metadata=self._settings.access.metadata)
        tasks = [asyncio.create_task(self._hello(call))]
        reader: asyncio.Task[None] | None = None
        try:
            await asyncio.wait(tasks, timeout=ATTACH_SECONDS)
            if not tasks[0].done():
                return Problem("DEADLINE_EXCEEDED", "", f"no answer to hello within {ATTACH_SECONDS:.0f} s")
            await tasks[0]
            self._writer = asyncio.create_task(self._write(call))
            reader = asyncio.create_task(self._read(call))
            tasks += [self._writer, reader, asyncio.create_task(self._resubmit())]
            self._attached.set()
            self._settings.on_link(True)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                await task
            raise AssertionError("the reader ends by raising")
        except grpc.aio.AioRpcError as error:
            problem = problem_of_status(error)
            failure = error_of_problem(problem)
            if isinstance(failure, Fenced) or problem.code not in PASSING | DUBIOUS:
                raise failure from error
            return problem
        except _Ended:
            return Problem("OK", "", "the server ended the stream")
        finally:
            if self._writer is not None:
                self._writer = None
                self._settings.on_link(False)
            call.cancel()  # ends a pending read by itself; cancelling the task that reads would leak native memory
            for task in tasks[1:]:
                if task is not reader or not self._reading:
                    task.cancel()
            _, stuck = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
            for task in stuck:  # a write on a connection that never came about does not end by itself
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()

    async def _hello(self, call: Call) -> None:
        hello = v1.Hello()
        hello.CopyFrom(self._settings.hello)
        hello.resume_cursor = self._outbox.acknowledgements.resume_cursor
        if self._attached.is_set():
            del hello.take_over_consumer_ids[:]  # once; whoever came back since is to keep its stream
        await call.write(v1.SubmitRolloutRequest(hello=hello))
        response = await call.read()
        if response is grpc.aio.EOF:
            raise _Ended
        self._dispatch.attach(cast(v1.SubmitRolloutResponse, response))

    async def _read(self, call: Call) -> None:
        while True:
            while self._inbox.full and not self._waiters:
                self._read_on.clear()
                await self._read_on.wait()
            self._reading = True
            try:
                response = await call.read()
            finally:
                self._reading = False
            if response is grpc.aio.EOF:
                raise _Ended
            self._dispatch.take(cast(v1.SubmitRolloutResponse, response))

    async def _write(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        last_sent_at = 0.0
        try:
            while await self._outbox.wait():
                since_last = loop.time() - last_sent_at
                await asyncio.sleep(0 if self._outbox.full_message else max(0.0, COALESCE_SECONDS - since_last))
                message, unsendable = self._outbox.next_message()
                for entry, problem in unsendable:
                    self._dispatch.refuse(entry, problem)
                if message.ByteSize():
                    await call.write(message)
                    last_sent_at = loop.time()
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("write to a broken stream: %s", error)  # the reader gets the status and says why

    async def _resubmit(self) -> None:
        try:
            await asyncio.wait_for(self._dispatch.replayed.wait(), REPLAY_SECONDS)
        except TimeoutError:
            logger.warning(
                "missed events did not all come within %.0f s; submitting unfinished work again", REPLAY_SECONDS
            )
        self._outbox.resubmit(self._dispatch.unfinished_at_attach)
        self._dispatch.unfinished_at_attach = []

    def _crowded(self, entry: Entry) -> bool:
        others = self._ledger.unaccepted
        if others >= self._settings.max_unaccepted:
            return True
        return others > 0 and self._ledger.unaccepted_bytes + entry.size_bytes > MAX_UNACCEPTED_BYTES

    def read_on(self) -> None:
        """The inbox may have room again."""
        self._read_on.set()

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._dispatch.fail(error)
            self._attached.set()
            self.read_on()
