"""TrainerService: what a trainer allows and what it needs.

Invariants
- A budget given replaces the one before; what is absent in it is the server's default.
- A step report is merged with the last one of its run here; the core always gets a whole report.
- A publication goes on whether or not anybody watches it.

What this module does not know: how budgets are enforced, and how an engine gets its weights.
"""

from __future__ import annotations

from typing import Any

from rolloutd.scheduler import events
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import Budget, StepReport
from rolloutd.scheduler.states import RolloutClass
from rolloutd.scheduler.views import RunView
from rolloutd.server.errors import SHUTTING_DOWN, field_error, not_found
from rolloutd.server.handler import Refused, check, handler
from rolloutd.server.publications import End
from rolloutd.server.state import ServerState
from rolloutd.server.translate_publish import to_publish, to_publish_response, to_weights_pushed
from rolloutd.server.translate_run import fill_budget, from_budget, merge_report, to_budget
from rolloutd.v1 import (
    ConfirmWeightsRequest,
    ConfirmWeightsResponse,
    GetBudgetRequest,
    GetBudgetResponse,
    PublishPolicyRequest,
    ReportStepRequest,
    ReportStepResponse,
    SetBudgetRequest,
    SetBudgetResponse,
    TrainerServiceServicer,
)


class TrainerService(TrainerServiceServicer):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._loop = state.loop
        self._reports: dict[str, tuple[int, StepReport]] = {}  # run -> (epoch, last report); bounded by the core's runs

    @handler
    async def SetBudget(self, request: SetBudgetRequest, context: Any) -> SetBudgetResponse:
        _require_run(request.run_id)
        if not request.HasField("budget"):
            raise field_error("budget", "is required; an empty one gives back the server's default")
        default = self._state.config.scheduler.budget.default
        budget = fill_budget(from_budget(request.budget), default)
        check(self._loop.refusal(events.SetBudget(request.run_id, budget, request.trainer_epoch)))
        view = self._view(request.run_id)
        return SetBudgetResponse(
            budget=to_budget(view.budget, view.budget_lease_remaining_seconds),
            shrink_seconds=self._state.config.scheduler.budget.shrink_seconds if _over(view, budget) else 0.0,
            policy_version=view.policy_version,
        )

    @handler
    async def GetBudget(self, request: GetBudgetRequest, context: Any) -> GetBudgetResponse:
        view = self._view(request.run_id)
        return GetBudgetResponse(
            budget=to_budget(view.budget, view.budget_lease_remaining_seconds),
            is_default=view.budget_is_default,
            running_rollouts=view.running_rollouts,
            kv_tokens_committed=view.kv_claimed_tokens,
            policy_version=view.policy_version,
        )

    @handler
    async def ReportStep(self, request: ReportStepRequest, context: Any) -> ReportStepResponse:
        _require_run(request.run_id)
        previous = self._reports.get(request.run_id)
        same_trainer = previous is not None and previous[0] == request.trainer_epoch
        report = merge_report(previous[1] if previous is not None and same_trainer else None, request)
        before = self._state.run_view(request.run_id)
        critical_before = _unfinished_critical(before) if before is not None else 0
        check(self._loop.refusal(events.ReportStep(request.run_id, report, request.trainer_epoch)))
        self._remember(request.run_id, request.trainer_epoch, report)
        view = self._view(request.run_id)
        phase: Any = view.phase + 1
        critical = _unfinished_critical(view)
        return ReportStepResponse(
            promoted_rollouts=max(0, critical - critical_before),
            phase=phase,
            desired_engines=view.desired_engines,
            demand_tokens_per_second=view.demand_tokens_per_second,
            supply_tokens_per_second=view.supply_tokens_per_second,
            critical_unfinished=critical,
            policy_version=view.policy_version,
        )

    @handler
    async def PublishPolicy(self, request: PublishPolicyRequest, context: Any) -> None:  # type: ignore[override]
        if self._state.draining:
            raise Refused(SHUTTING_DOWN)
        publish = to_publish(request)
        update = publish.update
        with self._state.publications.watch(publish.run_id, update.pool, update.version) as watcher:
            check(self._loop.refusal(publish))
            while True:
                news = await watcher.next()
                if isinstance(news, Refusal):
                    raise Refused(news)
                await context.write(to_publish_response(update.version, news, self._url_of))
                if isinstance(news, End):
                    return

    @handler
    async def ConfirmWeights(self, request: ConfirmWeightsRequest, context: Any) -> ConfirmWeightsResponse:
        check(self._loop.refusal(to_weights_pushed(request)))
        return ConfirmWeightsResponse(policy_version=self._state.policy_version(request.run_id))

    def _url_of(self, engine_id: str) -> str:
        engine = self._state.engines.get(engine_id)
        return engine.settings.url if engine is not None else ""

    def _remember(self, run_id: str, epoch: int, report: StepReport) -> None:
        if run_id not in self._reports and len(self._reports) >= self._state.config.scheduler.delivery.max_runs:
            live = {view.run_id for view in self._loop.core.run_views(self._loop.clock())}
            self._reports = {known: kept for known, kept in self._reports.items() if known in live}
        self._reports[run_id] = (epoch, report)

    def _view(self, run_id: str) -> RunView:
        _require_run(run_id)
        view = self._state.run_view(run_id)
        if view is None:
            raise Refused(not_found("run", run_id))
        return view


def _over(view: RunView, budget: Budget) -> bool:
    """Whether what runs exceeds the budget now. Memory ceilings are per engine: any running work may exceed them."""
    if budget.max_rollouts is not None and view.running_rollouts > budget.max_rollouts:
        return True
    if budget.max_kv_tokens is not None and view.kv_claimed_tokens > budget.max_kv_tokens:
        return True
    for kind, quota in budget.classes.items():
        if quota.max_rollouts is not None and view.classes[kind].running > quota.max_rollouts:
            return True
    for task, quota in budget.tasks.items():
        if quota.max_rollouts is not None and view.tasks[task].running > quota.max_rollouts:
            return True
    by_memory = budget.training_reserved_mb is not None or budget.max_inference_mb is not None
    return by_memory and view.running_rollouts > 0


def _unfinished_critical(view: RunView) -> int:
    """Nothing else can make rollouts CRITICAL while one event is handled, so the difference counts promotions."""
    counts = view.classes.get(RolloutClass.CRITICAL)
    return counts.queued + counts.running if counts is not None else 0


def _require_run(run_id: str) -> None:
    if not run_id:
        raise field_error("run_id", "is required")
