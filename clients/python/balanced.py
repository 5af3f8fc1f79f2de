"""A client over several servers: sidecars beside inference pods, each with engines of its own.

Invariants: those of client.py, and balancer.py: a submission runs at one server, whole; a server that goes away loses nothing
that was submitted here. What a run is told (budget, step, settings) it is told at every server; one that comes later, or comes
back, is told the newest of each. What this does not know: who runs what.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from rolloutd import v1
from rolloutd.client.access import PathLike, access_of
from rolloutd.client.addresses import look_up, split_target
from rolloutd.client.balancer import Balancer
from rolloutd.client.client import MAX_BUFFERED_RESULTS, MAX_UNACCEPTED, RECONNECT_SECONDS
from rolloutd.client.connection import claim_loop, logger, release_loop
from rolloutd.client.control import Control
from rolloutd.client.errors import ClientClosed, Refused, RolloutdError, ServerUnavailable
from rolloutd.client.member import Member, MemberSettings
from rolloutd.client.results import Notice
from rolloutd.client.verbs import Verbs
from rolloutd.client.words import RolloutClass, number_of

FAILOVER_SECONDS = 5.0  # a container restarts in a second or two and then runs its work again itself
LOOK_UP_SECONDS = 5.0  # between looks at a DNS name; cluster DNS answers are valid that long or longer
OTHERS_SECONDS = (
    2.0  # at the start, once one server is attached: how long to wait for the others before work is given out
)

P = ParamSpec("P")
T = TypeVar("T")


def connect_all(
    targets: Sequence[str] | str,
    *,
    run: str,
    consumer: str,
    epoch: int | None = None,
    take_over: Sequence[str] = (),
    auto_acknowledge: bool = True,
    failover_seconds: float = FAILOVER_SECONDS,
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
) -> "BalancedClient":
    """A client over several servers, for `async with`.

    targets: a list of addresses, each of one server; or one "dns:///NAME:PORT" (or "NAME:PORT"), every address of which is a
        server: a headless Service. The name is looked up again all the time.
    failover_seconds: how long a server may be away before what it had is given to the others.
    reconnect_seconds: how long all of them may be away before everything that waits raises ServerUnavailable.
    server_name: for TLS; "": the host of the target, which for a DNS name is that name.

    The other arguments are those of `connect`; max_unaccepted and max_buffered_results hold for all servers together.
    """
    access = access_of(
        api_key,
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        private_key_file=private_key_file,
        server_name=server_name,
    )
    if not (run and consumer):
        raise ValueError("a client over several servers needs the names of its run and consumer")
    name = split_target(targets) if isinstance(targets, str) else None
    addresses = () if isinstance(targets, str) else tuple(targets)
    if name is None and not addresses:
        raise ValueError("targets is empty: give at least one address")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"targets names a server twice: {', '.join(addresses)}")
    hello = v1.Hello(run_id=run, consumer_id=consumer, trainer_epoch=epoch or 0, take_over_consumer_ids=list(take_over))
    settings = MemberSettings(
        access if name is None else access.for_server(name[0]),
        hello,
        epoch,
        failover_seconds,
        reconnect_seconds,
        max_unaccepted,
    )
    return BalancedClient(addresses, name, settings, auto_acknowledge, max_buffered_results, on_notice)


def _everywhere(
    method: Callable[Concatenate[Control, P], Coroutine[object, object, T]],
) -> Callable[Concatenate["BalancedClient", P], Coroutine[object, object, dict[str, T]]]:
    async def call(self: "BalancedClient", /, *args: P.args, **kwargs: P.kwargs) -> dict[str, T]:
        return await self._tell(method.__name__, lambda server: method(server, *args, **kwargs))

    call.__doc__ = f"`{method.__name__}` at every attached server, and at each that comes later. Answers by target."
    return call


class BalancedClient(Verbs):
    """One consumer of one run at several servers. Made by `connect_all`; open inside `async with`."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        name: tuple[str, int] | None,
        settings: MemberSettings,
        auto_acknowledge: bool,
        max_buffered_results: int,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        super().__init__(auto_acknowledge, settings.max_unaccepted, max_buffered_results, on_notice)
        self._addresses = addresses
        self._name = name
        self._settings = settings
        self._balancer: Balancer | None = None
        self._told: dict[str, Callable[[Control], Awaitable[object]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._balancer is not None:
            raise ClientClosed("a client is entered once; make another one with connect_all(...)")
        claim_loop()
        self._balancer = Balancer(self._settings, self._inbox, self._take_notice, self._tell_again)
        try:
            await self._start(self._balancer)
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
        if self._balancer is None or self._closed:
            return
        self._closed = True
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._balancer.close()
        finally:
            release_loop()

    @property
    def servers(self) -> Mapping[str, Control]:
        """The calls to each single server, by target: `client.servers[target].list_engines()`."""
        members = self._stream.members
        return MappingProxyType({target: member.server for target, member in members.items()})

    @property
    def attached_targets(self) -> frozenset[str]:
        """The servers that can be reached now."""
        return frozenset(target for target, member in self._stream.members.items() if member.attached)

    configure_run = _everywhere(Control.configure_run)
    set_budget = _everywhere(Control.set_budget)
    report_step = _everywhere(Control.report_step)
    publish_and_wait = _everywhere(Control.publish_and_wait)
    pause_run = _everywhere(Control.pause_run)
    resume_run = _everywhere(Control.resume_run)
    end_run = _everywhere(Control.end_run)

    async def cancel(self, *rollout_ids: str, group_ids: Sequence[str] = ()) -> v1.CancelRolloutsResponse:
        """Cancels rollouts, submissions (by their id) or groups, wherever they are. See Client.cancel."""
        ended_here = 0
        for rollout_id in rollout_ids:
            entry = self._stream.entry(rollout_id)
            if entry is not None and rollout_id == entry.rollout_id:
                self._stream.withdraw(entry)
                if entry.problem is not None:
                    ended_here += len(entry.rollout_ids)
                    continue
            if entry is not None:
                await self._answered(rollout_id)
        request = v1.CancelRolloutsRequest(
            run_id=self._settings.hello.run_id,
            trainer_epoch=self._settings.epoch,
            rollout_ids=rollout_ids,
            group_ids=group_ids,
        )
        answers = await self._at_attached(lambda member: member.server.cancel_rollouts(request))
        unknown = [set(answer.unknown_ids) for answer in answers.values()]
        return v1.CancelRolloutsResponse(
            cancelled_rollouts=ended_here + sum(answer.cancelled_rollouts for answer in answers.values()),
            unknown_ids=sorted(set.intersection(*unknown)) if unknown else [],
        )

    async def update(
        self,
        *rollout_ids: str,
        rollout_class: RolloutClass | None = None,
        deadline_seconds: float | None = None,
        needed_by_step: int | None = None,
    ) -> dict[str, v1.UpdateRolloutsResponse]:
        """Changes rollouts that have not ended. Answers by target; a server rejects those that it does not have."""
        for rollout_id in rollout_ids:
            await self._answered(rollout_id)
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
        request = v1.UpdateRolloutsRequest(
            run_id=self._settings.hello.run_id, trainer_epoch=self._settings.epoch, updates=updates
        )
        return await self._at_attached(lambda member: member.server.update_rollouts(request))

    @property
    def _stream(self) -> Balancer:
        if self._balancer is None:
            raise ClientClosed("this client is not open; enter it with `async with`")
        return self._balancer

    def _read_on(self) -> None:
        if self._balancer is not None:
            self._balancer.read_on()

    async def _start(self, balancer: Balancer) -> None:
        addresses: Sequence[str] = self._addresses
        if self._name is not None:
            addresses = await look_up(*self._name) or ()
            self._spawn(self._follow_name(balancer, *self._name))
        starts = [task for address in addresses if (task := balancer.add_server(address)) is not None]
        await balancer.attached()
        if starts:  # so that what is submitted first is shared by all
            done, _ = await asyncio.wait(starts, timeout=OTHERS_SECONDS)
            for task in done:
                task.result()

    async def _follow_name(self, balancer: Balancer, host: str, port: int) -> None:
        while True:
            await asyncio.sleep(LOOK_UP_SECONDS)
            targets = await look_up(host, port)
            if targets is not None:
                for target in targets:
                    if balancer.add_server(target) is not None:
                        logger.info("%s has a server at %s", host, target)
                for target in balancer.members.keys() - set(targets):
                    balancer.remove_server(target)

    async def _tell(self, name: str, call: Callable[[Control], Coroutine[object, object, T]]) -> dict[str, T]:
        self._told.pop(name, None)
        self._told[name] = call
        if name in ("pause_run", "resume_run", "end_run"):  # the last of them is what holds
            for other in {"pause_run", "resume_run", "end_run"} - {name}:
                self._told.pop(other, None)
        return await self._at_attached(lambda member: call(member.server))

    def _tell_again(self, member: Member) -> None:
        if self._told and not self._closed:
            self._spawn(self._repeat(member))

    async def _repeat(self, member: Member) -> None:
        for name, call in list(self._told.items()):
            try:
                await call(member.server)
            except RolloutdError as error:
                logger.warning("%s did not take %s, which the others have: %s", member.target, name, error)

    async def _at_attached(self, call: Callable[[Member], Coroutine[object, object, T]]) -> dict[str, T]:
        """Answers by target. A server that goes away meanwhile has none; ServerUnavailable when all of them do."""
        await self._stream.attached()
        members = [member for member in self._stream.members.values() if member.attached]
        answers = await asyncio.gather(*(self._one(member, call) for member in members))
        found = {member.target: answer[0] for member, answer in zip(members, answers, strict=True) if answer}
        if not found:
            raise ServerUnavailable("no server answered; all of them went away during the call")
        return found

    async def _one(self, member: Member, call: Callable[[Member], Coroutine[object, object, T]]) -> tuple[T] | None:
        answer = asyncio.ensure_future(call(member))
        gone = asyncio.ensure_future(member.gone.wait())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                logger.warning("%s went away before it answered", member.target)
                return None
            return (answer.result(),)
        finally:
            for task in (answer, gone):
                task.cancel()

    async def _answered(self, any_id: str) -> None:
        entry = self._stream.entry(any_id)
        if entry is not None:
            try:
                await self._stream.acceptance(entry)
            except Refused as refusal:
                logger.debug("%s was refused before it could be changed: %s", any_id, refusal)

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a client's background task failed", exc_info=error)
