"""One of several servers behind a client: its stream, its unary calls, and whether it can be given work.

Life: away (never attached yet) -> up <-> away -> given up, when it stays away for longer than the client's patience or said
that it shuts down; from there it can come back up at any time. Its stream tries for ever.

Invariants: `on_up` and `on_given_up` alternate, whatever the stream does in between. What this does not know: the other
servers, and what becomes of the work of one that is given up.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from rolloutd import v1
from rolloutd.client.access import Access
from rolloutd.client.connection import Connection, logger
from rolloutd.client.control import Control
from rolloutd.client.errors import RolloutdError
from rolloutd.client.inbox import Incoming
from rolloutd.client.results import Notice
from rolloutd.client.stream import RolloutStream, StreamSettings

CANCEL_BATCH = 1000


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What every member of a client is told."""

    access: Access
    hello: v1.Hello
    epoch: int | None
    failover_seconds: float
    reconnect_seconds: float  # of its unary calls
    max_unaccepted: int


class Server(Control):
    """The unary calls to one server."""

    def __init__(self, target: str, settings: MemberSettings) -> None:
        super().__init__(target, settings.hello.run_id, settings.epoch, settings.reconnect_seconds)
        self._opened = Connection(target, settings.reconnect_seconds, settings.access)

    async def cancel_rollouts(self, request: v1.CancelRolloutsRequest) -> v1.CancelRolloutsResponse:
        """As the contract says."""
        return await self._connection.call(self._rollouts.CancelRollouts, request)

    async def update_rollouts(self, request: v1.UpdateRolloutsRequest) -> v1.UpdateRolloutsResponse:
        """As the contract says."""
        return await self._connection.call(self._rollouts.UpdateRollouts, request)

    async def close(self) -> None:
        """Ends calls in flight."""
        await self._connection.close()


class Member:
    """See the module."""

    def __init__(
        self,
        target: str,
        settings: MemberSettings,
        inbox: Incoming,
        on_up: Callable[["Member"], None],
        on_given_up: Callable[["Member"], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self.target = target
        self.server = Server(target, settings)
        self.attached = False
        self.draining = False
        self.given_up = False
        self.gone = asyncio.Event()  # set while it is not attached
        self.gone.set()
        self.leaving = False  # its address is gone: it is closed once it is given up
        self._settings = settings
        self._on_up, self._on_given_up, self._notify = on_up, on_given_up, on_notice
        self._patience: asyncio.TimerHandle | None = None
        self._unwanted: dict[str, None] = {}
        self._cancelling: asyncio.Task[None] | None = None
        stream_settings = StreamSettings(
            target,
            settings.access,
            settings.hello,
            math.inf,
            settings.max_unaccepted,
            self._on_notice,
            self._on_link,
        )
        self.stream = RolloutStream(stream_settings, inbox)
        self._starting: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether it should be given new work."""
        return self.attached and not self.draining

    def start(self) -> asyncio.Task[None]:
        """The task that ends once it is attached for the first time, or raises what ended its stream."""
        self._starting = asyncio.create_task(self.stream.start())
        self._lose_patience_in(self._settings.failover_seconds)
        return self._starting

    async def close(self) -> None:
        """Sends what is pending and closes."""
        self._keep_patience()
        tasks = [task for task in (self._starting, self._cancelling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stream.close()
        self._keep_patience()
        await self.server.close()

    def cancel_soon(self, rollout_id: str) -> None:
        """A copy that runs here is not wanted any more. Nobody waits for the answer; a server that is away is not told."""
        if not self.attached:
            return
        self._unwanted[rollout_id] = None
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel_unwanted())

    async def _cancel_unwanted(self) -> None:
        while self._unwanted:
            ids = list(self._unwanted)[:CANCEL_BATCH]
            for rollout_id in ids:
                del self._unwanted[rollout_id]
            request = v1.CancelRolloutsRequest(
                run_id=self._settings.hello.run_id, trainer_epoch=self._settings.epoch, rollout_ids=ids
            )
            try:
                await self.server.cancel_rollouts(request)
            except RolloutdError as error:  # the copies run to their end and their results are dropped
                logger.warning("%s did not take the cancellation of %d copies: %s", self.target, len(ids), error)

    def _on_link(self, attached: bool) -> None:
        self.attached = attached
        if attached:
            self.gone.clear()
            self.draining = self.given_up = False
            self._keep_patience()
            self._on_up(self)
        else:
            self.gone.set()
            self._lose_patience_in(0.0 if self.draining else self._settings.failover_seconds)

    def _on_notice(self, notice: Notice) -> None:
        if notice.kind == "draining":
            self.draining = True
        self._notify(notice)

    def _lose_patience_in(self, seconds: float) -> None:
        self._keep_patience()
        self._patience = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def _keep_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self.given_up:
            self.given_up = True
            self._on_given_up(self)
