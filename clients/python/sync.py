"""The blocking client: the same verbs, for code without asyncio.

Example::

    with rolloutd.client.sync.Client("127.0.0.1:50051", run="eval", consumer="eval-0") as client:
        result = client.generate(prompt_ids, max_new_tokens=64)

All blocking clients of a process share one event loop in one daemon thread, because gRPC for asyncio works with one loop per
process; an asyncio client in another loop of the same process is therefore refused when it is opened (and the other way
round). Usable from several threads. Calls block the calling thread only; they are refused inside the shared loop itself (in
`on_notice` or `on_progress`), where they would wait for themselves. Interrupting a call (Ctrl-C) cancels it.

Invariants: coroutines of the asyncio client run in the shared loop and nowhere else; the loop is started once, and never stopped;
what is here keeps no state but the asyncio object it wraps. What this does not know: what the verbs do.
"""

import asyncio
import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from rolloutd.client import client as asyncio_client
from rolloutd.client import handles, publishing
from rolloutd.client.access import PathLike
from rolloutd.client.errors import RolloutdError
from rolloutd.client.prompts import Prompt
from rolloutd.client.results import Acceptance, Notice, Progress, RolloutResult
from rolloutd.client.submissions import RolloutOptions

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_shared: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop that all blocking clients share; started by the first of them."""
    global _shared
    with _lock:
        if _shared is None or _shared.is_closed():
            _shared = asyncio.new_event_loop()
            threading.Thread(target=_shared.run_forever, name="rolloutd-client", daemon=True).start()
        return _shared


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    loop = background_loop()
    try:
        inside = asyncio.get_running_loop() is loop
    except RuntimeError:
        inside = False
    if inside:
        coroutine.close()
        raise RolloutdError(
            "a blocking call inside the loop that would have to answer it waits for ever: from on_notice or on_progress, hand "
            "the work to another thread, or use rolloutd.client.connect with asyncio"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _next(iterator: AsyncIterator[T]) -> tuple[T] | None:
    try:
        return (await anext(iterator),)
    except StopAsyncIteration:
        return None


def _iterate(iterator: AsyncIterator[T]) -> Iterator[T]:
    while item := _run(_next(iterator)):
        yield item[0]


def _blocking(
    method: Callable[Concatenate[asyncio_client.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    @functools.wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[asyncio_client.Client, P], AsyncIterator[T]],
) -> Callable[Concatenate["Client", P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(method(self._client, *args, **kwargs))

    return call


class Submission:
    """A prompt that was submitted."""

    def __init__(self, submission: handles.Submission) -> None:
        self._submission = submission
        self.rollout_id = submission.rollout_id
        self.rollout_ids = submission.rollout_ids

    def accepted(self) -> Acceptance:
        """The server's answer; Refused when that is no."""
        return _run(self._submission.accepted())


class WeightPush:
    """See rolloutd.client.WeightPush."""

    def __init__(self, push: publishing.WeightPush) -> None:
        self._push = push
        self.version = push.version

    def engines(self) -> Iterator[publishing.EngineUpdate]:
        """Each engine as soon as it waits for the weights, once; ends when the publication does."""
        return _iterate(self._push.engines())

    def ready(self) -> list[publishing.EngineUpdate]:
        """The engines that wait, once all of them do whose turn it is; empty: nothing is left to push."""
        return _run(self._push.ready())

    def confirm(self, engine: publishing.EngineUpdate | str = "", *, error: str = "") -> None:
        """The weights are on this engine (""; on all that wait), complete; or, with `error`, they are not and why."""
        _run(self._push.confirm(engine, error=error))


class Client:
    """One consumer of one run. Arguments and methods are those of rolloutd.client.connect and its Client."""

    def __init__(
        self,
        target: str,
        *,
        run: str = "",
        consumer: str = "",
        epoch: int | None = None,
        take_over: Sequence[str] = (),
        auto_acknowledge: bool = True,
        reconnect_seconds: float = asyncio_client.RECONNECT_SECONDS,
        max_unaccepted: int = asyncio_client.MAX_UNACCEPTED,
        max_buffered_results: int = asyncio_client.MAX_BUFFERED_RESULTS,
        on_notice: Callable[[Notice], None] | None = None,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: PathLike | None = None,
        certificate_file: PathLike | None = None,
        private_key_file: PathLike | None = None,
        server_name: str = "",
    ) -> None:
        self._client = asyncio_client.connect(
            target,
            run=run,
            consumer=consumer,
            epoch=epoch,
            take_over=take_over,
            auto_acknowledge=auto_acknowledge,
            reconnect_seconds=reconnect_seconds,
            max_unaccepted=max_unaccepted,
            max_buffered_results=max_buffered_results,
            on_notice=on_notice,
            api_key=api_key,
            tls=tls,
            ca_file=ca_file,
            certificate_file=certificate_file,
            private_key_file=private_key_file,
            server_name=server_name,
        )

    def __enter__(self) -> Self:
        _run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The latest notices, oldest first."""
        return self._client.notices

    close = _blocking(asyncio_client.Client.close)

    def submit(
        self,
        prompt: Prompt,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Submission:
        """Hands a prompt over; results come in `results()`. See the asyncio client."""
        return Submission(_run(self._client.submit(prompt, on_progress=on_progress, **options)))

    def results(self) -> Iterator[RolloutResult]:
        """Every result of `submit`, without end; waits for the next one."""
        return _iterate(self._client.results())

    def drain(self) -> Iterator[RolloutResult]:
        """Results until everything submitted so far has come."""
        return _iterate(self._client.drain())

    def acknowledge(
        self,
        result: RolloutResult | str,
        *,
        used: bool | None = None,
        drop_reason: str = "",
        reward: float | None = None,
    ) -> None:
        """Says what became of a result. See the asyncio client."""

        async def acknowledge() -> None:
            self._client.acknowledge(result, used=used, drop_reason=drop_reason, reward=reward)

        _run(acknowledge())

    @contextmanager
    def pushing_weights(self, version: int, **options: Unpack[publishing.PublishOptions]) -> Iterator[WeightPush]:
        """Publishes a version whose weights are sent inside the block. See the asyncio client."""
        block = self._client.pushing_weights(version, **options)
        push = _run(block.__aenter__())
        try:
            yield WeightPush(push)
        except BaseException:
            _run(block.__aexit__(*sys.exc_info()))
            raise
        _run(block.__aexit__(None, None, None))

    generate = _blocking(asyncio_client.Client.generate)
    generate_group = _blocking(asyncio_client.Client.generate_group)
    run_rollout = _blocking(asyncio_client.Client.run_rollout)
    cancel = _blocking(asyncio_client.Client.cancel)
    update = _blocking(asyncio_client.Client.update)
    configure_run = _blocking(asyncio_client.Client.configure_run)
    get_run = _blocking(asyncio_client.Client.get_run)
    list_runs = _blocking(asyncio_client.Client.list_runs)
    pause_run = _blocking(asyncio_client.Client.pause_run)
    resume_run = _blocking(asyncio_client.Client.resume_run)
    end_run = _blocking(asyncio_client.Client.end_run)
    watch_run = _iterating(asyncio_client.Client.watch_run)
    set_budget = _blocking(asyncio_client.Client.set_budget)
    get_budget = _blocking(asyncio_client.Client.get_budget)
    report_step = _blocking(asyncio_client.Client.report_step)
    publish_policy = _iterating(asyncio_client.Client.publish_policy)
    publish_and_wait = _blocking(asyncio_client.Client.publish_and_wait)
    confirm_weights = _blocking(asyncio_client.Client.confirm_weights)
    get_rollout = _blocking(asyncio_client.Client.get_rollout)
    get_lineage = _blocking(asyncio_client.Client.get_lineage)
    get_group = _blocking(asyncio_client.Client.get_group)
    list_rollouts = _iterating(asyncio_client.Client.list_rollouts)
    explain = _blocking(asyncio_client.Client.explain)
    get_server_info = _blocking(asyncio_client.Client.get_server_info)
    list_engines = _blocking(asyncio_client.Client.list_engines)
    register_engine = _blocking(asyncio_client.Client.register_engine)
    drain_engine = _blocking(asyncio_client.Client.drain_engine)
    remove_engine = _blocking(asyncio_client.Client.remove_engine)
