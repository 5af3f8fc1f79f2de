"""The client: `connect` and what can be done with it.

Invariants: every rollout submitted here ends exactly once for the caller, in `results()` (or `drain()`) if it came by `submit`,
else in the return value or exception of `generate` or `generate_group`; a submission that the server refuses ends there too, as
results with outcome "refused". With auto_acknowledge the server forgets a result as soon as the caller has it in hand; without, it
keeps it until `acknowledge` says what became of it. Not thread-safe: use it from the event loop it was entered in.
What this does not know: gRPC (stream.py, connection.py).
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, Unpack

from rolloutd import v1
from rolloutd.client.access import Access, PathLike, access_of
from rolloutd.client.connection import Connection, claim_loop, logger, release_loop
from rolloutd.client.control import Control
from rolloutd.client.errors import ClientClosed, Refused
from rolloutd.client.ledger import Entry
from rolloutd.client.prompts import Prompt
from rolloutd.client.results import Notice, RolloutResult
from rolloutd.client.stream import RolloutStream, StreamSettings
from rolloutd.client.submissions import RolloutOptions, submission_of
from rolloutd.client.verbs import Verbs
from rolloutd.client.words import RolloutClass, number_of

RECONNECT_SECONDS = 120.0  # a restart of the server takes seconds, a rescheduled pod a minute or two
MAX_UNACCEPTED = 4096  # as the server's default queue per class
MAX_BUFFERED_RESULTS = 1024


def connect(
    target: str,
    *,
    run: str = "",
    consumer: str = "",
    epoch: int | None = None,
    take_over: Sequence[str] = (),
    auto_acknowledge: bool = True,
    reconnect_seconds: float = RECONNECT_SECONDS,
    max_unaccepted: int = MAX_UNACCEPTED,
    max_buffered_results: int = MAX_BUFFERED_RESULTS,
    on_notice: Callable[[Notice], None] | None = None,
    api_key: str | None = None,
    tls: bool = False,
    ca_file: PathLike | None = None,
    certificate_file: PathLike | None = None,
    private_key_file: PathLike | None = None,
    server_name: str = "",
) -> "Client":
    """A client for `async with`.

    target: gRPC address, e.g. "127.0.0.1:50051" or "dns:///rolloutd.svc:50051".
    run: the training job. May be left out for calls about the server only.
    consumer: name of this trainer rank within the run, the same after a restart of the rank: unacknowledged results of its
        earlier life come again in `results()`. Left out: no stream is opened, and only `run_rollout` and the control calls work.
    epoch: incarnation of the trainer; a higher one fences lower ones out. None: 0 on the stream, and unfenced control calls.
    take_over: consumers whose results and unfinished rollouts pass to this one.
    reconnect_seconds: how long a server may be away before everything that waits raises ServerUnavailable.
    max_unaccepted: submissions the server has not answered, above which `submit` waits.
    max_buffered_results: results waiting in `results()`, above which the stream is not read on (unless something else waits).
    on_notice: called with each notice, in the event loop; an exception of it ends the client.
    api_key: shown to the server with every call. None: what the environment variable ROLLOUTD_API_KEY says, if anything.
    tls: encrypted, the server's certificate checked against `ca_file` (PEM; None: the authorities gRPC comes with) and
        `server_name` ("": the host of the target). Any of the files switches it on.
    certificate_file, private_key_file: PEM files with which this client shows who it is, for servers that ask (mTLS).
    """
    access = access_of(
        api_key,
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        private_key_file=private_key_file,
        server_name=server_name,
    )
    return Client(
        target,
        access,
        run,
        consumer,
        epoch,
        take_over,
        auto_acknowledge,
        reconnect_seconds,
        max_unaccepted,
        max_buffered_results,
        on_notice,
    )


class Client(Verbs, Control):
    """One consumer of one run. Made by `connect`; open inside `async with`."""

    def __init__(
        self,
        target: str,
        access: Access,
        run: str,
        consumer: str,
        epoch: int | None,
        take_over: Sequence[str],
        auto_acknowledge: bool,
        reconnect_seconds: float,
        max_unaccepted: int,
        max_buffered_results: int,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        Control.__init__(self, target, run, epoch, reconnect_seconds)
        Verbs.__init__(self, auto_acknowledge, max_unaccepted, max_buffered_results, on_notice)
        if consumer and not run:
            raise ValueError("a consumer belongs to a run: connect(..., run=..., consumer=...)")
        self._access = access
        self._hello = v1.Hello(
            run_id=run, consumer_id=consumer, trainer_epoch=epoch or 0, take_over_consumer_ids=list(take_over)
        )
        self._started: RolloutStream | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise ClientClosed("a client is entered once; make another one with connect(...)")
        claim_loop()
        self._opened = Connection(self.target, self.reconnect_seconds, self._access)
        try:
            if self._hello.consumer_id:
                settings = StreamSettings(
                    self.target,
                    self._access,
                    self._hello,
                    self.reconnect_seconds,
                    self._max_unaccepted,
                    self._take_notice,
                )
                self._started = RolloutStream(settings, self._inbox)
                await self._started.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Sends what is pending and closes; unfinished rollouts go on or not by the run's on_disconnect. Once is enough."""
        if self._opened is None or self._closed:
            return
        self._closed = True
        try:
            if self._started is not None:
                await self._started.close()
        finally:
            await self._opened.close()
            release_loop()

    async def run_rollout(self, prompt: Prompt, **options: Unpack[RolloutOptions]) -> list[RolloutResult]:
        """As generate_group, by a call of its own that needs no consumer. For scripts."""
        request = v1.RunRolloutRequest(
            run_id=self._run_id(), trainer_epoch=self.epoch or 0, submission=submission_of(prompt, options)
        )
        response = await self._connection.call(self._rollouts.RunRollout, request, answer_seconds=None)
        return [RolloutResult.from_message(message) for message in response.results]

    async def cancel(self, *rollout_ids: str, group_ids: Sequence[str] = ()) -> v1.CancelRolloutsResponse:
        """Cancels rollouts, submissions (by their id) or groups, with everything below them in a tree search.

        Each rollout still ends with one result, of outcome "cancelled" unless it was faster.
        """
        remote, ended_here = list[str](), 0
        for rollout_id in rollout_ids:
            entry = self._started.entry(rollout_id) if self._started else None
            if entry is not None and await self._withdrawn(entry, whole=rollout_id == entry.rollout_id):
                ended_here += len(entry.rollout_ids)
            else:
                remote.append(rollout_id)
        if not remote and not group_ids:
            return v1.CancelRolloutsResponse(cancelled_rollouts=ended_here)
        request = v1.CancelRolloutsRequest(
            run_id=self._run_id(), trainer_epoch=self.epoch, rollout_ids=remote, group_ids=group_ids
        )
        response = await self._connection.call(self._rollouts.CancelRollouts, request)
        response.cancelled_rollouts += ended_here
        return response

    async def update(
        self,
        *rollout_ids: str,
        rollout_class: RolloutClass | None = None,
        deadline_seconds: float | None = None,
        needed_by_step: int | None = None,
    ) -> v1.UpdateRolloutsResponse:
        """Changes rollouts that have not ended; the answer's `rejected` names those that could not be changed."""
        for entry in filter(None, map(self._started.entry, rollout_ids) if self._started else ()):
            await self._answered(entry)
        number = None if rollout_class is None else number_of(v1.RolloutClass, rollout_class, "rollout_class")
        updates = [
            v1.RolloutUpdate(
                rollout_id=rollout_id,
                rollout_class=number,
                deadline_seconds=deadline_seconds,
                needed_by_step=needed_by_step,
            )
            for rollout_id in rollout_ids
        ]
        request = v1.UpdateRolloutsRequest(run_id=self._run_id(), trainer_epoch=self.epoch, updates=updates)
        return await self._connection.call(self._rollouts.UpdateRollouts, request)

    @property
    def _stream(self) -> RolloutStream:
        if self._started is None:
            wanted = (
                "enter it with `async with`"
                if self._hello.consumer_id
                else "name its consumer: connect(..., consumer=...)"
            )
            raise ClientClosed(f"this client has no stream; {wanted}")
        return self._started

    def _read_on(self) -> None:
        if self._started is not None:
            self._started.read_on()

    async def _answered(self, entry: Entry) -> None:
        try:
            await self._stream.acceptance(entry)
        except Refused as refusal:
            logger.debug("%s was refused before it could be changed: %s", entry.rollout_id, refusal)

    async def _withdrawn(self, entry: Entry, *, whole: bool) -> bool:
        if whole:
            self._stream.withdraw(entry)
        await self._answered(entry)
        return entry.problem is not None and entry.problem.code == "CANCELLED"
