"""One supervisor per engine: register it, watch it, tell the core, and start again when it comes back.

Invariants
- An engine that cannot be reached is tried for ever, with growing pauses and jitter; only RemoveEngine forgets it.
- "Busy" and "not ready" are never a loss: an engine is lost after `lose_failures` failed polls over `lose_seconds`.
- A load report is passed on only while the engine is ready: in a pause it is frozen, and would tell of work that is not
  running.
- Readiness carries its age, so that an answer from before a pause or a resume is not taken for news.
- The core hears of an engine only after it was registered; after any interruption it is registered anew, so that a
  restarted process is a new incarnation.

What this module does not know: HTTP, and what the core does with an engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rolloutd.engines.base import Engine, EngineFault, EngineInfo, EngineLoad, FaultKind
from rolloutd.scheduler import events
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import EngineFacts
from rolloutd.scheduler.states import Code
from rolloutd.server.config import EngineManagerSettings, EngineSettings
from rolloutd.server.errors import not_found
from rolloutd.server.kv_following import KvFollower
from rolloutd.server.logging import get_logger
from rolloutd.server.loop import RunLoop, refusal_of

MakeDoor = Callable[[EngineSettings], Engine]


@dataclass(slots=True)
class SupervisedEngine:
    """One engine as the manager knows it. `info` None: never registered."""

    settings: EngineSettings
    door: Engine
    info: EngineInfo | None = None
    joined: bool = False  # the core knows it
    lost: bool = False  # the core was told that it is gone
    draining: bool = False
    paused_by_us: bool = False  # it is not ready because the core holds it
    last_error: str = ""
    last_error_at: float = 0.0
    load: EngineLoad | None = None
    kv_events: KvFollower | None = None
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def engine_id(self) -> str:
        return self.settings.engine_id


class EngineManager:
    """All engines of this process."""

    def __init__(
        self,
        loop: RunLoop,
        settings: EngineManagerSettings,
        make_door: MakeDoor,
        rng: random.Random,
        register_timeout_seconds: float,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._make_door = make_door
        self._rng = rng
        self._register_timeout_seconds = register_timeout_seconds
        self._engines: dict[str, SupervisedEngine] = {}
        self._log = get_logger("engines")

    def engines(self) -> list[SupervisedEngine]:
        """All engines, by id."""
        return [self._engines[engine_id] for engine_id in sorted(self._engines)]

    def get(self, engine_id: str) -> SupervisedEngine | None:
        return self._engines.get(engine_id)

    def add(self, settings: EngineSettings) -> SupervisedEngine | Refusal:
        """Start supervising. The same settings again return the engine that exists; others are ALREADY_EXISTS."""
        existing = self._engines.get(settings.engine_id)
        if existing is not None:
            if existing.settings == settings:
                return existing
            return Refusal(
                Code.ALREADY_EXISTS,
                "ALREADY_EXISTS",
                f"engine {settings.engine_id} is registered with other settings ({existing.settings}); remove it first",
            )
        engine = SupervisedEngine(settings, self._make_door(settings))
        self._engines[engine.engine_id] = engine
        self._loop.add_door(engine.engine_id, engine.door)
        engine.task = asyncio.create_task(self._supervise(engine), name=f"engine {engine.engine_id}")
        return engine

    def drain(self, engine_id: str) -> Refusal | None:
        """Send nothing new there."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return not_found("engine", engine_id)
        engine.draining = True
        if not engine.joined:
            return None  # told to the core when it joins
        return self._loop.refusal(events.DrainEngine(engine_id))

    def remove(self, engine_id: str) -> int | Refusal:
        """Forget an engine. Returns how many of its rollouts were stopped."""
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return not_found("engine", engine_id)
        if engine.task is not None:
            engine.task.cancel()
        if engine.kv_events is not None:
            engine.kv_events.cancel()
        stopped = self._loop.attempts_on(engine_id)
        refusal = refusal_of(self._loop.post(events.RemoveEngine(engine_id))) if engine.joined else None
        self._loop.remove_door(engine_id)
        self._log.info("engine_removed", engine_id=engine_id, stopped_rollouts=stopped)
        return refusal if refusal is not None else stopped

    async def close(self) -> None:
        """Stop every supervisor, then hang up every door. Last of all: what runs there ends with it."""
        engines, self._engines = list(self._engines.values()), {}
        tasks = [engine.task for engine in engines if engine.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            if engine.kv_events is not None:
                await engine.kv_events.stop()
            await engine.door.close()

    # -- supervision -------------------------------------------------------------------------------------------------

    async def _supervise(self, engine: SupervisedEngine) -> None:
        while True:
            try:
                await self._register(engine)
                await self._watch(engine)
            except Exception as error:  # a bug here must not leave the engine without a supervisor
                self._log.error("supervisor_failed", engine_id=engine.engine_id, exc_info=True)
                self._note_error(engine, f"unexpected {type(error).__name__}: {error}")
                await asyncio.sleep(self._settings.register_backoff_max_seconds)

    async def _register(self, engine: SupervisedEngine) -> None:
        """Try until the engine is registered and the core took it."""
        attempt = 0
        while True:
            alive = False
            asked_at = self._loop.clock()
            try:
                async with asyncio.timeout(self._register_timeout_seconds):
                    info = await engine.door.register()
                problem = self._join(engine, info)
            except EngineFault as fault:
                problem = fault.message
                alive = fault.kind is FaultKind.BUSY
            except TimeoutError:
                problem = f"did not register within {self._register_timeout_seconds:g} s"
            if problem is None:
                return
            self._note_error(engine, problem)
            if engine.joined and alive:
                self._loop.post(events.EngineReadiness(engine.engine_id, False, self._loop.clock() - asked_at))
            elif engine.joined:  # its door knows nothing of it any more, so nothing can be sent
                self._lose(engine, problem)
            ceiling = min(
                self._settings.register_backoff_max_seconds,
                self._settings.register_backoff_seconds * 2 ** min(attempt, 16),
            )
            attempt += 1
            await asyncio.sleep(ceiling * self._rng.uniform(0.5, 1.0))

    def _join(self, engine: SupervisedEngine, info: EngineInfo) -> str | None:
        settings = engine.settings
        facts = EngineFacts(
            engine_id=engine.engine_id,
            incarnation=info.incarnation,
            pool=settings.pool,
            run_id=settings.run_id,
            labels=settings.labels,
            model=info.model,
            page_tokens=info.page_size_tokens,
            kv_capacity_tokens=info.kv_capacity_tokens,
            # More than the engine runs at a time would only queue there.
            slots=min(settings.slots, info.max_running_rollouts) if settings.slots else info.max_running_rollouts,
            context_tokens=info.context_tokens,
            max_prompt_tokens=info.max_prompt_tokens,
            vocabulary_size=info.vocabulary_size,
            engine_version=info.weight_version,
            kv_cache_bytes=info.kv_cache_bytes,
        )
        refusal = self._loop.refusal(events.JoinEngine(facts))
        if refusal is not None:
            return refusal.message
        if engine.draining:
            self._loop.post(events.DrainEngine(engine.engine_id))
        first = engine.info is None or engine.info.incarnation != info.incarnation
        engine.info = info
        engine.joined = True
        engine.lost = False
        engine.last_error = ""
        engine.registered.set()
        self._follow_kv_events(engine, info)
        if first:
            self._log.info(
                "engine_registered",
                engine_id=engine.engine_id,
                pool=settings.pool,
                model=info.model,
                slots=facts.slots,
                kv_capacity_tokens=facts.kv_capacity_tokens,
                page_tokens=facts.page_tokens,
            )
            for warning in info.warnings:
                self._log.warning("engine_setting", engine_id=engine.engine_id, message=warning)
        return None

    def _follow_kv_events(self, engine: SupervisedEngine, info: EngineInfo) -> None:
        """Subscribe where this process publishes; a subscription to the same one goes on."""
        following = engine.kv_events
        if following is not None:
            if (following.incarnation, following.address) == (info.incarnation, info.kv_events):
                return
            following.cancel()
            engine.kv_events = None
        if info.kv_events is not None:
            engine.kv_events = KvFollower(self._loop, engine.engine_id, info.incarnation, info.kv_events)

    async def _watch(self, engine: SupervisedEngine) -> None:
        """Poll until the engine has to be registered again."""
        clock = self._loop.clock
        failures = 0
        failing_since = 0.0
        ready = True
        prefilled_tokens_total = 0
        while True:
            await asyncio.sleep(self._settings.poll_seconds)
            asked_at = clock()
            try:
                load = await engine.door.load()
                asked_at = clock()
                now_ready = await engine.door.ready()
            except EngineFault as fault:
                if fault.kind is FaultKind.BUSY:  # alive: not a failure, and no recovery to check either
                    ready = self._set_ready(engine, ready, False, asked_at)
                    continue
                failures += 1
                failing_since = failing_since or clock()
                self._note_error(engine, fault.message)
                if failures >= self._settings.lose_failures and clock() - failing_since >= self._settings.lose_seconds:
                    self._lose(engine, fault.message)
                    return
                continue
            if failures or load.prefilled_tokens_total < prefilled_tokens_total:
                return  # it was away, or counts from zero: it may be another process
            prefilled_tokens_total = load.prefilled_tokens_total
            if now_ready:
                self._report(engine, load)
            ready = self._set_ready(engine, ready, now_ready, asked_at)

    def _report(self, engine: SupervisedEngine, load: EngineLoad) -> None:
        engine.load = load
        self._loop.post(
            events.EngineLoad(
                engine_id=engine.engine_id,
                running_rollouts=load.running_rollouts,
                waiting_rollouts=load.waiting_rollouts,
                kv_used_tokens=load.kv_used_tokens,
                kv_capacity_tokens=load.kv_capacity_tokens,
                generated_tokens_per_second=load.generated_tokens_per_second,
                prefilled_tokens_total=load.prefilled_tokens_total,
                prefill_busy_seconds_total=load.prefill_busy_seconds_total,
            )
        )

    def _lose(self, engine: SupervisedEngine, message: str) -> None:
        """Tell the core, once, until it joins again."""
        if not engine.lost:
            engine.lost = True
            self._loop.post(events.LoseEngine(engine.engine_id, message))
            self._log.warning("engine_lost", engine_id=engine.engine_id, message=message)

    def _set_ready(self, engine: SupervisedEngine, before: bool, ready: bool, asked_at: float) -> bool:
        if ready is not before:
            # A publication pauses every engine once: that is said there, and would be noise here.
            by_us = not ready and self._is_held(engine)
            if not (by_us or engine.paused_by_us):
                self._log.info("engine_readiness", engine_id=engine.engine_id, ready=ready)
            engine.paused_by_us = by_us
            self._loop.post(events.EngineReadiness(engine.engine_id, ready, self._loop.clock() - asked_at))
        return ready

    def _is_held(self, engine: SupervisedEngine) -> bool:
        return any(view.held_because for view in self._loop.core.engine_views() if view.engine_id == engine.engine_id)

    def _note_error(self, engine: SupervisedEngine, message: str) -> None:
        if message != engine.last_error:
            self._log.warning("engine_unavailable", engine_id=engine.engine_id, message=message)
        engine.last_error = message
        engine.last_error_at = self._loop.clock()
