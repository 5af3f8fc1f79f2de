"""RunService: training jobs and their settings.

What this module does not know: what the settings do.
"""

from __future__ import annotations

from typing import Any

from rolloutd.scheduler import events
from rolloutd.scheduler.actions import Record
from rolloutd.scheduler.spec import RunSettings
from rolloutd.scheduler.trainer import RUN_ENDED
from rolloutd.scheduler.views import RunView
from rolloutd.server.errors import SHUTTING_DOWN, field_error, not_found
from rolloutd.server.handler import Refused, check, handler
from rolloutd.server.loop import refusal_of
from rolloutd.server.paging import decode_token, encode_token, page_size
from rolloutd.server.state import ServerState, fenced
from rolloutd.server.translate_request import MAX_ID_CHARACTERS
from rolloutd.server.translate_run import merge_settings, to_run, to_run_state
from rolloutd.v1 import (
    ConfigureRunRequest,
    ConfigureRunResponse,
    EndRunRequest,
    EndRunResponse,
    GetRunRequest,
    GetRunResponse,
    ListRunsRequest,
    ListRunsResponse,
    PauseRunRequest,
    PauseRunResponse,
    ResumeRunRequest,
    ResumeRunResponse,
    Run,
    RunServiceServicer,
    RunState,
    WatchRunRequest,
    WatchRunResponse,
)

_MIN_WATCH_SECONDS = 0.1
_DEFAULT_WATCH_SECONDS = 1.0
_MAX_WATCH_SECONDS = 86_400.0


class RunService(RunServiceServicer):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._loop = state.loop

    @handler
    async def ConfigureRun(self, request: ConfigureRunRequest, context: Any) -> ConfigureRunResponse:
        if not request.run_id or len(request.run_id) > MAX_ID_CHARACTERS:
            raise field_error("run_id", f"must have 1 to {MAX_ID_CHARACTERS} characters")
        view = self._state.run_view(request.run_id)
        if view is not None and request.HasField("trainer_epoch"):
            check(fenced(request.trainer_epoch, view.epoch))
        current = view.settings if view is not None else RunSettings()
        settings = merge_settings(current, request.config)
        if view is None or view.ended or settings != current:
            check(self._loop.refusal(events.ConfigureRun(request.run_id, settings)))
        return ConfigureRunResponse(run=self._run(self._view(request.run_id)))

    @handler
    async def GetRun(self, request: GetRunRequest, context: Any) -> GetRunResponse:
        return GetRunResponse(run=self._run(self._view(request.run_id)))

    @handler
    async def ListRuns(self, request: ListRunsRequest, context: Any) -> ListRunsResponse:
        size = page_size(request.page_size)
        after = decode_token(request.page_token, ())
        views = sorted(self._loop.core.run_views(self._loop.clock()), key=lambda view: view.run_id)
        rest = [view for view in views if view.run_id > after]
        response = ListRunsResponse(runs=[self._run(view) for view in rest[:size]])
        if len(rest) > size:
            response.next_page_token = encode_token(rest[size - 1].run_id, ())
        return response

    @handler
    async def PauseRun(self, request: PauseRunRequest, context: Any) -> PauseRunResponse:
        self._fence(request)
        check(self._loop.refusal(events.PauseRun(request.run_id)))
        return PauseRunResponse(state=self._state_of(self._view(request.run_id)))

    @handler
    async def ResumeRun(self, request: ResumeRunRequest, context: Any) -> ResumeRunResponse:
        self._fence(request)
        check(self._loop.refusal(events.ResumeRun(request.run_id)))
        return ResumeRunResponse(state=self._state_of(self._view(request.run_id)))

    @handler
    async def EndRun(self, request: EndRunRequest, context: Any) -> EndRunResponse:
        self._fence(request)
        before = self._view(request.run_id)
        result = self._loop.post(events.EndRun(request.run_id))
        check(refusal_of(result))
        records = [action for action in result if isinstance(action, Record) and action.event == RUN_ENDED]
        ended = sum(record.fields["rollouts"] for record in records)
        after = self._state.run_view(request.run_id) or before  # an ended run without results is forgotten at once
        return EndRunResponse(ended_rollouts=ended, state=self._state_of(after))

    @handler
    async def WatchRun(self, request: WatchRunRequest, context: Any) -> None:  # type: ignore[override]
        view: RunView | None = self._view(request.run_id)
        if not 0.0 <= request.interval_seconds <= _MAX_WATCH_SECONDS:
            limit = f"{_MAX_WATCH_SECONDS:.0f}"
            raise field_error("interval_seconds", f"must be 0 to {limit}, got {request.interval_seconds:g}")
        interval = max(_MIN_WATCH_SECONDS, request.interval_seconds or _DEFAULT_WATCH_SECONDS)
        sent: RunState | None = None
        while view is not None:
            state = self._state_of(view)
            if state != sent:
                await context.write(WatchRunResponse(state=state))
                sent = state
            if await self._state.wait_draining(interval):
                raise Refused(SHUTTING_DOWN)
            view = self._state.run_view(request.run_id)

    def _fence(self, request: PauseRunRequest | ResumeRunRequest | EndRunRequest) -> None:
        if request.HasField("trainer_epoch"):
            check(fenced(request.trainer_epoch, self._view(request.run_id).epoch))

    def _view(self, run_id: str) -> RunView:
        if not run_id:
            raise field_error("run_id", "is required")
        view = self._state.run_view(run_id)
        if view is None:
            raise Refused(not_found("run", run_id))
        return view

    def _run(self, view: RunView) -> Run:
        connected = self._loop.connected_consumers(view.run_id)
        return to_run(view, self._state.config.scheduler, connected, self._loop.clock())

    def _state_of(self, view: RunView) -> RunState:
        return to_run_state(view, self._loop.connected_consumers(view.run_id))
