"""EngineService: the engines, and this server itself.

What this module does not know: how engines are watched.
"""

from __future__ import annotations

from typing import Any

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.views import EngineView
from rolloutd.server.config import DEFAULT_POOL, EngineSettings, check_url
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.engine_manager import SupervisedEngine
from rolloutd.server.errors import SHUTTING_DOWN, field_error, not_found
from rolloutd.server.handler import Refused, check, handler
from rolloutd.server.paging import decode_token, encode_token, page_size
from rolloutd.server.state import ServerState
from rolloutd.server.translate_request import Checker
from rolloutd.v1 import (
    BREAKER_STATE_CLOSED,
    BREAKER_STATE_OPEN,
    ENGINE_STATE_DOWN,
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_HELD,
    ENGINE_STATE_PAUSED,
    ENGINE_STATE_READY,
    ENGINE_STATE_STARTING,
    DrainEngineRequest,
    DrainEngineResponse,
    Engine,
    EngineServiceServicer,
    GetServerInfoRequest,
    GetServerInfoResponse,
    ListEnginesRequest,
    ListEnginesResponse,
    RegisterEngineRequest,
    RegisterEngineResponse,
    RemoveEngineRequest,
    RemoveEngineResponse,
)

_STATES = {
    "ready": ENGINE_STATE_READY,
    "held": ENGINE_STATE_HELD,
    "not_ready": ENGINE_STATE_PAUSED,
    "lost": ENGINE_STATE_DOWN,
    "broken": ENGINE_STATE_DOWN,
    "draining": ENGINE_STATE_DRAINING,
}


class EngineService(EngineServiceServicer):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    @handler
    async def ListEngines(self, request: ListEnginesRequest, context: Any) -> ListEnginesResponse:
        size = page_size(request.page_size)
        after = decode_token(request.page_token, request.pool)
        views = self._views()
        rest = [
            engine
            for engine in self._state.engines.engines()
            if engine.engine_id > after and request.pool in ("", engine.settings.pool)
        ]
        response = ListEnginesResponse(engines=[self._engine(engine, views) for engine in rest[:size]])
        if len(rest) > size:
            response.next_page_token = encode_token(rest[size - 1].engine_id, request.pool)
        return response

    @handler
    async def RegisterEngine(self, request: RegisterEngineRequest, context: Any) -> RegisterEngineResponse:
        if self._state.draining:
            raise Refused(SHUTTING_DOWN)
        try:
            url = check_url("url", request.url)
        except ConfigError as error:
            raise field_error("url", str(error).removeprefix("url: ")) from error
        names = Checker()
        pool = names.name("pool", request.pool) or DEFAULT_POOL
        run_id = names.name("run_id", request.run_id)
        names.done()
        added = self._state.engines.add(
            EngineSettings(
                url=url,
                pool=pool,
                run_id=run_id,
                labels=dict(request.labels),
                vocabulary_size=request.vocabulary_size,
            )
        )
        if isinstance(added, Refusal):
            raise Refused(added)
        return RegisterEngineResponse(engine=self._engine(added, self._views()))

    @handler
    async def DrainEngine(self, request: DrainEngineRequest, context: Any) -> DrainEngineResponse:
        engine = self._find(request.engine_id)
        check(self._state.engines.drain(request.engine_id))
        return DrainEngineResponse(engine=self._engine(engine, self._views()))

    @handler
    async def RemoveEngine(self, request: RemoveEngineRequest, context: Any) -> RemoveEngineResponse:
        self._find(request.engine_id)
        stopped = self._state.engines.remove(request.engine_id)
        if isinstance(stopped, Refusal):
            raise Refused(stopped)
        return RemoveEngineResponse(stopped_rollouts=stopped)

    @handler
    async def GetServerInfo(self, request: GetServerInfoRequest, context: Any) -> GetServerInfoResponse:
        return GetServerInfoResponse(server=self._state.server_info())

    def _find(self, engine_id: str) -> SupervisedEngine:
        if not engine_id:
            raise field_error("engine_id", "is required")
        engine = self._state.engines.get(engine_id)
        if engine is None:
            raise Refused(not_found("engine", engine_id))
        return engine

    def _views(self) -> dict[str, EngineView]:
        return {view.engine_id: view for view in self._state.loop.core.engine_views()}

    def _engine(self, engine: SupervisedEngine, views: dict[str, EngineView]) -> Engine:
        settings = engine.settings
        message = Engine(
            engine_id=engine.engine_id,
            url=settings.url,
            pool=settings.pool,
            labels=settings.labels,
            run_id=settings.run_id,
            state=ENGINE_STATE_DRAINING if engine.draining else ENGINE_STATE_STARTING,
            last_error=engine.last_error,
            breaker=BREAKER_STATE_CLOSED,
        )
        if engine.info is not None:
            message.model = engine.info.model
            message.server_version = engine.info.server_version
            message.warnings.extend(engine.info.warnings)
        if engine.load is not None:
            message.reported_rollouts = engine.load.running_rollouts + engine.load.waiting_rollouts
            message.tokens_per_second = engine.load.generated_tokens_per_second
        view = views.get(engine.engine_id)
        if view is not None:
            _fill(message, view)
        if message.last_error and engine.last_error_at:
            message.last_error_age_seconds = self._state.loop.clock() - engine.last_error_at
        return message


def _fill(message: Engine, view: EngineView) -> None:
    """What the core knows of a registered engine."""
    message.state = _STATES[view.state]
    message.incarnation = view.incarnation
    message.engine_policy_version = view.engine_version
    message.policy_version = view.policy_version
    message.held_because = view.held_because
    message.slots = view.slots
    message.kv_capacity_tokens = view.kv_capacity_tokens
    message.kv_used_tokens = view.kv_used_tokens
    message.kv_committed_tokens = view.kv_claimed_tokens
    message.page_size_tokens = view.page_tokens
    message.context_tokens = view.context_tokens
    message.vocabulary_size = view.vocabulary_size
    message.in_flight_rollouts = view.in_flight
    message.prompt_tokens_total = view.prompt_tokens
    message.predicted_hit_tokens_total = view.predicted_cached_tokens
    message.actual_hit_tokens_total = view.cached_tokens
    message.breaker = BREAKER_STATE_OPEN if view.breaker_open else BREAKER_STATE_CLOSED
    message.last_error = message.last_error or view.last_error
