"""New policy versions: publishing one, watching how the engines get on, pushing weights to them.

Invariants: a publication goes on when nobody watches it, and publishing the same version again joins it, so a connection that
breaks is made again without the caller's notice. Every engine that takes part ends "updated" or "failed". Errors are those of
control.py, and PublishFailed for engines that did not get the version. What this does not know: how weights travel.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

import grpc

from rolloutd import v1
from rolloutd.client.connection import Connection, backoff_seconds, is_transient, logger, unavailable
from rolloutd.client.errors import PublishFailed, Refused, error_of_problem, problem_of_status
from rolloutd.client.words import CacheHandling, UpdateMode, UpdateState, number_of, word_of

if TYPE_CHECKING:
    from rolloutd.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

OVER: frozenset[UpdateState] = frozenset({"updated", "failed"})


class PublishOptions(TypedDict):
    """How a version is published; what is left out is the server's choice, see rolloutd.v1.PublishPolicyRequest."""

    mode: NotRequired[UpdateMode]
    cache: NotRequired[CacheHandling]
    engines_at_once: NotRequired[int]
    pool: NotRequired[str]


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Where one engine is on its way to the version."""

    engine_id: str
    url: str  # "": it was removed meanwhile
    state: UpdateState
    message: str  # for a person; "": nothing to say
    aborted_attempts: int  # of the run, interrupted there for it so far
    elapsed_seconds: float  # since the publication was accepted
    engine_count: int  # engines that have a state in it by now


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that every engine holds."""

    version: int
    updated: tuple[str, ...]  # engine ids
    elapsed_seconds: float


class WeightPush:
    """Pushing a version's weights: which engines wait for them, and what became of it. Made by `pushing_weights`."""

    def __init__(self, publishing: "Publishing", version: int, pool: str, updates: AsyncIterator[EngineUpdate]) -> None:
        self.version = version
        self._publishing = publishing
        self._pool = pool
        self._updates = updates
        self._known: dict[str, EngineUpdate] = {}

    async def engines(self) -> AsyncIterator[EngineUpdate]:
        """Each engine as soon as it waits for the weights, once; ends when the publication does. For weights sent one by one."""
        async for update in self._updates:
            before = self._known.get(update.engine_id)
            self._known[update.engine_id] = update
            if update.state == "pushing" and (before is None or before.state != "pushing"):
                yield update

    async def ready(self) -> list[EngineUpdate]:
        """The engines that wait for the weights, once all of them do whose turn it is; empty: nothing is left to push.

        For weights sent to all at once. With `engines_at_once`, call it again after `confirm`.
        """
        async for update in self._updates:
            self._known[update.engine_id] = update
            begun = [engine for engine in self._known.values() if engine.state != "waiting"]
            pushing = [engine for engine in begun if engine.state == "pushing"]
            settled = len(pushing) + sum(engine.state in OVER for engine in begun)
            if pushing and settled == len(begun) and len(self._known) >= update.engine_count:
                return pushing
        return []

    async def confirm(self, engine: EngineUpdate | str = "", *, error: str = "") -> None:
        """The weights are on this engine (""; on all that wait), complete; or, with `error`, they are not and why."""
        engine_id = engine if isinstance(engine, str) else engine.engine_id
        await self._publishing.confirm_weights(self.version, engine_id=engine_id, error=error, pool=self._pool)

    async def _fail(self, error: str) -> None:
        """See the publication to its end, without weights."""
        waiting = [engine.engine_id for engine in self._known.values() if engine.state == "pushing"]
        for engine_id in waiting:
            await self._fail_one(engine_id, error)
        async for engine in self.engines():
            await self._fail_one(engine.engine_id, error)

    async def _fail_one(self, engine_id: str, error: str) -> None:
        try:
            await self.confirm(engine_id, error=error)
        except Refused as refusal:  # confirmed before, or over
            logger.debug("engine %s does not wait for weights of version %d: %s", engine_id, self.version, refusal)


class Publishing:
    """The calls of a run that publish. Mixed into Control."""

    target: str
    epoch: int | None
    reconnect_seconds: float

    async def publish_policy(
        self, version: int, *, path: str | None = None, **options: Unpack[PublishOptions]
    ) -> AsyncGenerator[EngineUpdate, None]:
        """Publishes a version and tells how each engine gets on; ends when all hold it, PublishFailed when some do not.

        path: a checkpoint folder as the engines' hosts see it; None: the weights are pushed (see `pushing_weights`).
        Leaving the iteration does not stop the publication. The same version again joins it, or tries the engines again
        that failed.
        """
        async with aclosing(self._watch(version, path, options)) as watch:
            async for news in watch:
                if isinstance(news, EngineUpdate):
                    yield news

    async def publish_and_wait(
        self, version: int, *, path: str | None = None, **options: Unpack[PublishOptions]
    ) -> Publication:
        """As publish_policy, until every engine holds the version. PublishFailed says which do not, and why."""
        async with aclosing(self._watch(version, path, options)) as watch:
            async for news in watch:
                if isinstance(news, Publication):
                    return news
        raise AssertionError("_watch() ends with a Publication or raises")

    async def confirm_weights(
        self, version: int, *, engine_id: str = "", error: str = "", pool: str = ""
    ) -> v1.ConfirmWeightsResponse:
        """Weights that the trainer pushed are on an engine (""; on all that wait), or `error` says why they are not."""
        request = v1.ConfirmWeightsRequest(
            run_id=self._run_id(),
            trainer_epoch=self.epoch or 0,
            version=version,
            pool=pool,
            engine_id=engine_id,
            error=error,
        )
        return await self._connection.call(self._trainer.ConfirmWeights, request)

    @asynccontextmanager
    async def pushing_weights(self, version: int, **options: Unpack[PublishOptions]) -> AsyncIterator[WeightPush]:
        """Publishes a version whose weights are sent inside the block; leaving it waits until the engines serve again.

        PublishFailed when some engines do not hold the version. An exception inside the block fails the engines that still
        wait for weights, and goes on from here once they are running again.
        """
        async with aclosing(self.publish_policy(version, **options)) as updates:
            push = WeightPush(self, version, options.get("pool", ""), updates)
            try:
                yield push
            except Exception as error:
                try:
                    await push._fail(f"the trainer failed while it pushed them: {type(error).__name__}: {error}")
                except PublishFailed as failure:
                    logger.warning("%s", failure)
                raise
            async for _ in updates:
                pass

    async def _watch(
        self, version: int, path: str | None, options: PublishOptions
    ) -> AsyncGenerator[EngineUpdate | Publication, None]:
        """Progress, then a Publication; PublishFailed in its place when an engine failed."""
        request = self._publish_request(version, path, options)
        loop = asyncio.get_running_loop()
        delays, last_answer_at = backoff_seconds(), loop.time()
        told: dict[str, tuple[object, ...]] = {}
        while True:
            call = self._trainer.PublishPolicy(request, metadata=self._connection.metadata)
            try:
                async for response in call:
                    delays, last_answer_at = backoff_seconds(), loop.time()
                    if response.WhichOneof("update") == "summary":
                        yield _publication(response)
                        return
                    update = _engine_update(response, response.engine)
                    said = (update.state, update.message, update.aborted_attempts)
                    if told.get(update.engine_id) != said:  # a call that is made again begins with what is known
                        told[update.engine_id] = said
                        yield update
                silence, last = 0.0, "the stream ended without a summary"
            except grpc.aio.AioRpcError as error:
                problem, silence = problem_of_status(error), loop.time() - last_answer_at
                if not is_transient(error.code(), problem):
                    raise error_of_problem(problem) from error
                last = str(problem)
                if silence > self.reconnect_seconds:
                    raise unavailable(self.target, silence, last) from error
            finally:
                call.cancel()
            delay = next(delays)
            logger.warning("watch of version %d broke (%s); trying again in %.1f s", version, last, delay)
            await asyncio.sleep(delay)

    def _publish_request(self, version: int, path: str | None, options: PublishOptions) -> v1.PublishPolicyRequest:
        if not 1 <= version < 1 << 63:
            raise ValueError(f"version is {version}; must be from 1 to 2**63 - 1")
        request = v1.PublishPolicyRequest(
            run_id=self._run_id(),
            trainer_epoch=self.epoch or 0,
            version=version,
            pool=options.get("pool", ""),
            engines_at_once=options.get("engines_at_once", 0),
        )
        if (mode := options.get("mode")) is not None:
            request.mode = number_of(v1.UpdateMode, mode, "mode")
        if (cache := options.get("cache")) is not None:
            request.cache = number_of(v1.CacheHandling, cache, "cache")
        if path is None:
            request.pushed.SetInParent()
        elif path:
            request.disk_path = path
        else:  # an unset variable must not hold every engine for weights that nobody sends
            raise ValueError("path is empty; name a checkpoint folder, or leave it out and push the weights")
        return request

    @property
    def _connection(self) -> Connection:
        raise NotImplementedError

    @property
    def _trainer(self) -> "TrainerServiceAsyncStub":
        raise NotImplementedError

    def _run_id(self) -> str:
        raise NotImplementedError


def _engine_update(response: v1.PublishPolicyResponse, engine: v1.EngineUpdate) -> EngineUpdate:
    return EngineUpdate(
        engine_id=engine.engine_id,
        url=engine.url,
        state=word_of(v1.UpdateState, engine.state),
        message=engine.message,
        aborted_attempts=engine.aborted_attempts,
        elapsed_seconds=response.elapsed_seconds,
        engine_count=response.engine_count,
    )


def _publication(response: v1.PublishPolicyResponse) -> Publication:
    summary = response.summary
    updated = tuple(summary.updated_engine_ids)
    if summary.failed:
        failed = tuple(_engine_update(response, engine) for engine in summary.failed)
        raise PublishFailed(response.policy_version, updated, failed)
    return Publication(response.policy_version, updated, response.elapsed_seconds)
