"""Publications between the contract and the core.

Invariants
- Everything is checked that can be wrong without knowing the run; what depends on the run is the core's to refuse.

What this module does not know: who watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.spec import PolicyUpdate
from rolloutd.scheduler.states import CacheHandling, UpdateMode
from rolloutd.server.publications import End, Step
from rolloutd.server.translate_request import DEFAULT_POOL, Checker
from rolloutd.v1 import (
    UPDATE_STATE_FAILED,
    ConfirmWeightsRequest,
    EngineUpdate,
    PublishPolicyRequest,
    PublishPolicyResponse,
    PublishSummary,
)

MAX_PATH_CHARACTERS = 4096  # PATH_MAX of Linux
MAX_ERROR_CHARACTERS = 4096

UrlOf = Callable[[str], str]


def to_publish(message: PublishPolicyRequest) -> events.PublishPolicy:
    """Raises FieldErrors."""
    check = Checker()
    run_id = check.name("run_id", message.run_id, required=True)
    pool = check.name("pool", message.pool) or DEFAULT_POOL
    source = message.WhichOneof("weights")
    path = message.disk_path
    if source is None:
        check.wrong("weights", "is required: disk_path, or pushed")
    elif source == "disk_path" and not path:
        check.wrong("disk_path", "is empty; name a checkpoint folder, or use pushed")
    if len(path) > MAX_PATH_CHARACTERS:
        check.wrong("disk_path", f"must have at most {MAX_PATH_CHARACTERS} characters, has {len(path)}")
    mode = check.enum("mode", message.mode, UpdateMode)
    mode = UpdateMode.RETRACT if mode is None else mode
    cache = check.enum("cache", message.cache, CacheHandling)
    if cache is None:
        cache = CacheHandling.NAMESPACE if mode is UpdateMode.IN_PLACE else CacheHandling.FLUSH
    check.done()
    update = PolicyUpdate(message.version, path, mode, cache, pool, message.engines_at_once)
    return events.PublishPolicy(run_id, update, message.trainer_epoch)


def to_weights_pushed(message: ConfirmWeightsRequest) -> events.WeightsPushed:
    """Raises FieldErrors."""
    check = Checker()
    run_id = check.name("run_id", message.run_id, required=True)
    pool = check.name("pool", message.pool) or DEFAULT_POOL
    if len(message.error) > MAX_ERROR_CHARACTERS:
        check.wrong("error", f"must have at most {MAX_ERROR_CHARACTERS} characters, has {len(message.error)}")
    check.done()
    return events.WeightsPushed(run_id, pool, message.version, message.engine_id, message.error, message.trainer_epoch)


def to_publish_response(version: int, news: Step | End, url_of: UrlOf) -> PublishPolicyResponse:
    """One message to a watcher. `url_of`: the base URL of an engine, "" where it is gone."""
    message = PublishPolicyResponse(
        policy_version=version, elapsed_seconds=news.elapsed_seconds, engine_count=news.engine_count
    )
    if isinstance(news, Step):
        message.engine.CopyFrom(_engine_update(news.progress, url_of))
    else:
        failed = [
            _engine_update(news.failures[engine_id], url_of)
            if engine_id in news.failures
            else EngineUpdate(engine_id=engine_id, url=url_of(engine_id), state=UPDATE_STATE_FAILED)
            for engine_id in news.ended.failed
        ]
        message.summary.CopyFrom(PublishSummary(updated_engine_ids=news.ended.updated, failed=failed))
    return message


def _engine_update(progress: actions.PublishProgress, url_of: UrlOf) -> EngineUpdate:
    state: Any = progress.state + 1
    return EngineUpdate(
        engine_id=progress.engine_id,
        url=url_of(progress.engine_id),
        state=state,
        message=progress.message,
        aborted_attempts=progress.aborted,
    )
