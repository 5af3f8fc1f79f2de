"""The calls beside the stream: runs, budgets, steps, engines, questions about rollouts.

Answers are the contract's own messages (rolloutd.v1), whose field comments say units and what zero means; keyword arguments are
named as the fields they set, and one that is left out stays unset. Every method raises Refused (or Unauthorized, Fenced) for
the server's "no" and ServerUnavailable when nobody answers; all of them are safe to repeat.

Invariants: nothing is kept here between two calls but the open connection; a call that lacks one, or the name of the run that it is
about, raises before anything is sent (ClientClosed, ValueError); lists are whole, whatever the size of the server's pages.
What this does not know: the stream.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import grpc

from rolloutd import v1
from rolloutd.client.connection import Connection, backoff_seconds, is_transient, logger, unavailable
from rolloutd.client.errors import ClientClosed, error_of_problem, problem_of_status
from rolloutd.client.publishing import Publishing
from rolloutd.client.words import (
    OnDisconnect,
    OnPreempt,
    OnStale,
    ReleaseMemory,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
    number_of,
)

if TYPE_CHECKING:
    from rolloutd.v1.engine_service_pb2_grpc import EngineServiceAsyncStub
    from rolloutd.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from rolloutd.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from rolloutd.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

ScoreTerm = Literal["prefix", "critical", "waiting", "diversity", "cost"]


class Quota(TypedDict, total=False):
    """Limits of one class or task type within a budget."""

    max_running_rollouts: int
    share: float
    floor_rollouts: int


class Control(Publishing):
    """Calls about one run, and about the server."""

    def __init__(self, target: str, run: str, epoch: int | None, reconnect_seconds: float) -> None:
        self.target = target
        self.run_id = run
        self.epoch = epoch
        self.reconnect_seconds = reconnect_seconds
        self._opened: Connection | None = None

    async def configure_run(
        self,
        *,
        weights: Mapping[ScoreTerm, float] | None = None,
        fairness_weight: float | None = None,
        floor_rollouts: int | None = None,
        queue_ttl_seconds: float | None = None,
        max_attempts: int | None = None,
        on_preempt: OnPreempt | None = None,
        rollout_class: RolloutClass | None = None,
        target_mix: Mapping[str, float] | None = None,
        mix_hold_seconds: float | None = None,
        on_disconnect: OnDisconnect | None = None,
        disconnect_grace_seconds: float | None = None,
        max_undelivered_bytes: int | None = None,
        undelivered_ttl_seconds: float | None = None,
        min_version: int | None = None,
        max_staleness: int | None = None,
        max_partial_span: int | None = None,
        on_stale: OnStale | None = None,
        batch_samples: int | None = None,
        slice_tokens: int | None = None,
        prefix_ttl_versions: int | None = None,
        release_memory: ReleaseMemory | None = None,
    ) -> v1.Run:
        """Creates the run, or changes what is given.

        `queue_ttl_seconds` to `rollout_class` and `min_version` to `max_partial_span` are defaults for its rollouts; -1 takes
        a limit in versions away again. `mix_hold_seconds`: results of strata ahead of `target_mix` come so much later at most.
        """
        config = v1.RunConfig(
            fairness_weight=fairness_weight,
            floor_rollouts=floor_rollouts,
            target_mix=target_mix or {},
            mix_hold_seconds=mix_hold_seconds,
            on_disconnect=_optional(v1.OnDisconnect, on_disconnect, "on_disconnect"),
            disconnect_grace_seconds=disconnect_grace_seconds,
            max_undelivered_bytes=max_undelivered_bytes,
            undelivered_ttl_seconds=undelivered_ttl_seconds,
            on_stale=_optional(v1.OnStale, on_stale, "on_stale"),
            batch_samples=batch_samples,
            slice_tokens=slice_tokens,
            prefix_ttl_versions=prefix_ttl_versions,
            release_memory=_optional(v1.ReleaseMemory, release_memory, "release_memory"),
        )
        if weights:
            config.weights.CopyFrom(v1.ScoreWeights(**{str(term): weight for term, weight in weights.items()}))
        defaults = v1.RolloutDefaults(
            queue_ttl_seconds=queue_ttl_seconds,
            max_attempts=max_attempts,
            on_preempt=_optional(v1.OnPreempt, on_preempt, "on_preempt"),
            rollout_class=_optional(v1.RolloutClass, rollout_class, "rollout_class"),
            min_version=min_version,
            max_staleness=max_staleness,
            max_partial_span=max_partial_span,
        )
        if defaults.ByteSize():
            config.defaults.CopyFrom(defaults)
        request = v1.ConfigureRunRequest(run_id=self._run_id(), trainer_epoch=self.epoch, config=config)
        return (await self._connection.call(self._runs.ConfigureRun, request)).run

    async def get_run(self) -> v1.Run:
        """Settings and state of the run."""
        return (await self._connection.call(self._runs.GetRun, v1.GetRunRequest(run_id=self._run_id()))).run

    async def list_runs(self) -> list[v1.Run]:
        """All runs of the server."""
        runs: list[v1.Run] = []
        request = v1.ListRunsRequest()
        while True:
            page = await self._connection.call(self._runs.ListRuns, request)
            runs += page.runs
            if not page.next_page_token:
                return runs
            request.page_token = page.next_page_token

    async def pause_run(self) -> v1.RunState:
        """Nothing new starts; what runs goes on."""
        request = v1.PauseRunRequest(run_id=self._run_id(), trainer_epoch=self.epoch)
        return (await self._connection.call(self._runs.PauseRun, request)).state

    async def resume_run(self) -> v1.RunState:
        """Ends a pause."""
        request = v1.ResumeRunRequest(run_id=self._run_id(), trainer_epoch=self.epoch)
        return (await self._connection.call(self._runs.ResumeRun, request)).state

    async def end_run(self) -> v1.EndRunResponse:
        """Ends the run: unfinished rollouts end with outcome "run_ended"."""
        request = v1.EndRunRequest(run_id=self._run_id(), trainer_epoch=self.epoch)
        return await self._connection.call(self._runs.EndRun, request)

    async def watch_run(self, interval_seconds: float = 1.0) -> AsyncIterator[v1.RunState]:
        """The state of the run now, and whenever it changed; ends when the run is forgotten. Survives a restart of the server."""
        loop = asyncio.get_running_loop()
        delays, last_answer_at = backoff_seconds(), loop.time()
        while True:
            request = v1.WatchRunRequest(run_id=self._run_id(), interval_seconds=interval_seconds)
            call = self._runs.WatchRun(request, metadata=self._connection.metadata)
            try:
                async for response in call:
                    delays, last_answer_at = backoff_seconds(), loop.time()
                    yield response.state
                return
            except grpc.aio.AioRpcError as error:
                problem, delay, silence = problem_of_status(error), next(delays), loop.time() - last_answer_at
                if not is_transient(error.code(), problem):
                    raise error_of_problem(problem) from error
                if silence + delay > self.reconnect_seconds:
                    raise unavailable(self.target, silence, str(problem)) from error
                logger.warning("watch of %s broke (%s); trying again in %.1f s", self.run_id, problem, delay)
                await asyncio.sleep(delay)
            finally:
                call.cancel()

    async def set_budget(
        self,
        *,
        max_running_rollouts: int | None = None,
        max_kv_tokens: int | None = None,
        training_reserved_mb: int | None = None,
        max_inference_mb: int | None = None,
        classes: Mapping[RolloutClass, Quota] | None = None,
        tasks: Mapping[TaskType, Quota] | None = None,
        lease_seconds: float = 0.0,
    ) -> v1.SetBudgetResponse:
        """Replaces the whole budget: what is left out falls back to the server's default. In force when it returns."""
        budget = v1.Budget(
            max_running_rollouts=max_running_rollouts,
            max_kv_tokens=max_kv_tokens,
            training_reserved_mb=training_reserved_mb,
            max_inference_mb=max_inference_mb,
            lease_seconds=lease_seconds,
            classes=[
                v1.ClassQuota(rollout_class=number_of(v1.RolloutClass, word, "classes"), **quota)
                for word, quota in (classes or {}).items()
            ],
            tasks=[
                v1.TaskQuota(task_type=number_of(v1.TaskType, word, "tasks"), **quota)
                for word, quota in (tasks or {}).items()
            ],
        )
        request = v1.SetBudgetRequest(run_id=self._run_id(), trainer_epoch=self.epoch or 0, budget=budget)
        return await self._connection.call(self._trainer.SetBudget, request)

    async def get_budget(self) -> v1.GetBudgetResponse:
        """The budget in force and what uses it."""
        return await self._connection.call(self._trainer.GetBudget, v1.GetBudgetRequest(run_id=self._run_id()))

    async def report_step(
        self,
        step: int,
        *,
        trainer_state: TrainerState | None = None,
        samples_needed: int | None = None,
        consume_samples_per_second: float | None = None,
        consume_tokens_per_second: float | None = None,
        policy_entropy: float | None = None,
        buffer_fill: float | None = None,
        update_period_seconds: float | None = None,
        step_seconds: float | None = None,
    ) -> v1.ReportStepResponse:
        """Where training is and what it needs next. Rollouts needed by this step or an earlier one become critical."""
        request = v1.ReportStepRequest(
            run_id=self._run_id(),
            trainer_epoch=self.epoch or 0,
            step=step,
            trainer_state=_optional(v1.TrainerState, trainer_state, "trainer_state"),
            samples_needed=samples_needed,
            consume_samples_per_second=consume_samples_per_second,
            consume_tokens_per_second=consume_tokens_per_second,
            policy_entropy=policy_entropy,
            buffer_fill=buffer_fill,
            update_period_seconds=update_period_seconds,
            step_seconds=step_seconds,
        )
        return await self._connection.call(self._trainer.ReportStep, request)

    async def get_rollout(self, rollout_id: str) -> v1.Rollout:
        """One rollout, with its result (see RolloutResult.from_message) once it has ended and as long as it is kept."""
        request = v1.GetRolloutRequest(run_id=self._run_id(), rollout_id=rollout_id)
        return (await self._connection.call(self._rollouts.GetRollout, request)).rollout

    async def get_lineage(self, rollout_id: str) -> v1.Lineage | None:
        """Where its result comes from, as in the server's lineage file, as long as the result is kept. None: not ended."""
        request = v1.GetRolloutRequest(run_id=self._run_id(), rollout_id=rollout_id)
        response = await self._connection.call(self._rollouts.GetRollout, request)
        return response.lineage if response.HasField("lineage") else None

    async def get_group(self, group_id: str) -> v1.Group:
        """How far a group is: pending, complete or partial, and which members failed. Refused once all was acknowledged."""
        request = v1.GetGroupRequest(run_id=self._run_id(), group_id=group_id)
        return (await self._connection.call(self._rollouts.GetGroup, request)).group

    async def list_rollouts(
        self, *, states: Sequence[RolloutState] = (), rollout_classes: Sequence[RolloutClass] = ()
    ) -> AsyncIterator[v1.Rollout]:
        """Rollouts the server knows, oldest first, without results; pages are fetched as they are needed."""
        request = v1.ListRolloutsRequest(
            run_id=self._run_id(),
            states=[number_of(v1.RolloutState, word, "states") for word in states],
            rollout_classes=[number_of(v1.RolloutClass, word, "rollout_classes") for word in rollout_classes],
        )
        while True:
            page = await self._connection.call(self._rollouts.ListRollouts, request)
            for rollout in page.rollouts:
                yield rollout
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def explain(self, rollout_id: str) -> v1.ExplainRolloutResponse:
        """Why a rollout is where it is: decisions and story."""
        request = v1.ExplainRolloutRequest(run_id=self._run_id(), rollout_id=rollout_id)
        return await self._connection.call(self._rollouts.ExplainRollout, request)

    async def get_server_info(self) -> v1.ServerInfo:
        """Version, limits and features of the server."""
        return (await self._connection.call(self._engines.GetServerInfo, v1.GetServerInfoRequest())).server

    async def list_engines(self, pool: str = "") -> list[v1.Engine]:
        """All engines, or those of a pool."""
        engines: list[v1.Engine] = []
        request = v1.ListEnginesRequest(pool=pool)
        while True:
            page = await self._connection.call(self._engines.ListEngines, request)
            engines += page.engines
            if not page.next_page_token:
                return engines
            request.page_token = page.next_page_token

    async def register_engine(
        self,
        url: str,
        *,
        pool: str = "",
        labels: Mapping[str, str] | None = None,
        run_id: str = "",
        vocabulary_size: int = 0,
    ) -> v1.Engine:
        """Adds an engine; `run_id` makes it serve that run only."""
        request = v1.RegisterEngineRequest(
            url=url, pool=pool, labels=labels or {}, run_id=run_id, vocabulary_size=vocabulary_size
        )
        return (await self._connection.call(self._engines.RegisterEngine, request)).engine

    async def drain_engine(self, engine_id: str) -> v1.Engine:
        """Sends it nothing new."""
        request = v1.DrainEngineRequest(engine_id=engine_id)
        return (await self._connection.call(self._engines.DrainEngine, request)).engine

    async def remove_engine(self, engine_id: str) -> v1.RemoveEngineResponse:
        """Forgets it; what runs there runs again elsewhere."""
        return await self._connection.call(self._engines.RemoveEngine, v1.RemoveEngineRequest(engine_id=engine_id))

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise ClientClosed("the client is not open: use it inside `async with connect(...)`")
        return self._opened

    @property
    def _rollouts(self) -> "RolloutServiceAsyncStub":
        return v1.RolloutServiceStub(self._connection.channel)

    @property
    def _runs(self) -> "RunServiceAsyncStub":
        return v1.RunServiceStub(self._connection.channel)

    @property
    def _trainer(self) -> "TrainerServiceAsyncStub":
        return v1.TrainerServiceStub(self._connection.channel)

    @property
    def _engines(self) -> "EngineServiceAsyncStub":
        return v1.EngineServiceStub(self._connection.channel)

    def _run_id(self) -> str:
        if not self.run_id:
            raise ValueError("this call is about a run: name it in connect(..., run=...)")
        return self.run_id


def _optional(enum: Any, word: str | None, argument: str) -> Any:
    return None if word is None else number_of(enum, word, argument)
