"""What the services share: the run loop, the engines, and what this server says about itself.

Invariants
- Draining is never taken back.
- `instance_id`, `version` and the offset to Unix time are those of this process from its start to its end.
- Nothing here changes the core: it is asked for views, and each is of the moment it is asked for.

What this module does not know: any single RPC.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.states import Code
from rolloutd.scheduler.views import RunView
from rolloutd.server.config import ServerConfig
from rolloutd.server.core_build import core_is_compiled, release
from rolloutd.server.engine_manager import EngineManager
from rolloutd.server.errors import not_found
from rolloutd.server.loop import RunLoop
from rolloutd.server.publications import Publications
from rolloutd.server.tokenizing import Tokenizers
from rolloutd.server.translate_lineage import to_lineage
from rolloutd.server.translate_request import MAX_SAMPLES
from rolloutd.v1 import Limits, Lineage, ServerInfo

MAX_ITEMS_PER_MESSAGE = 16_384
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100


@dataclass(slots=True)
class ServerState:
    """One running server."""

    config: ServerConfig
    loop: RunLoop
    engines: EngineManager
    tokenizers: Tokenizers
    publications: Publications
    started_at: float
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    version: str = field(default_factory=release)
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    unix_offset_seconds: float = 0.0  # from the core's clock to that of Unix, read once: the system's may be set

    def __post_init__(self) -> None:
        self.unix_offset_seconds = time.time() - self.loop.clock()

    @property
    def draining(self) -> bool:
        """It finishes what it has and accepts nothing new."""
        return self._draining.is_set()

    def drain(self) -> None:
        self._draining.set()

    async def wait_draining(self, timeout_seconds: float) -> bool:
        """Wait until it drains, at most so long; whether it does."""
        try:
            await asyncio.wait_for(self._draining.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    def server_info(self) -> ServerInfo:
        scheduler = self.config.scheduler
        features = ["text_prompts.engine"]
        features += ["core.compiled"] if core_is_compiled() else []
        features += [f"text_prompts.{name}" for name, pool in self.config.pools.items() if pool.tokenizer]
        return ServerInfo(
            version=self.version,
            instance_id=self.instance_id,
            uptime_seconds=self.loop.clock() - self.started_at,
            draining=self.draining,
            limits=Limits(
                max_message_bytes=self.config.max_message_bytes,
                max_items_per_message=MAX_ITEMS_PER_MESSAGE,
                max_samples=MAX_SAMPLES,
                queue_capacity_rollouts=scheduler.queue.queue_capacity,
                queue_capacity_bytes=scheduler.queue.queue_capacity_bytes,
                max_consumers_per_run=scheduler.delivery.max_consumers_per_run,
                max_runs=scheduler.delivery.max_runs,
                max_page_size=MAX_PAGE_SIZE,
            ),
            features=sorted(features),
        )

    def run_view(self, run_id: str) -> RunView | None:
        return self.loop.core.run_view(run_id, self.loop.clock())

    def policy_version(self, run_id: str) -> int:
        view = self.run_view(run_id)
        return view.policy_version if view is not None else 0

    def lineage(self, run_id: str, rollout_id: str) -> Lineage | None:
        """Where a result comes from; None while there is none, or no more."""
        view = self.loop.core.rollout_view(run_id, rollout_id, self.loop.clock())
        if view is None:
            return None
        group = self.loop.core.group_view(run_id, view.group_id) if view.group_id else None
        return to_lineage(view, group, self.unix_offset_seconds)

    def fence(self, run_id: str, epoch: int | None) -> Refusal | int:
        """The epoch to act with: the caller's own, or the run's for an operator's call (None). Refuses an old one."""
        view = self.run_view(run_id)
        if view is None:
            return not_found("run", run_id)
        if epoch is None:
            return view.epoch
        return fenced(epoch, view.epoch) or epoch


def fenced(epoch: int, current: int) -> Refusal | None:
    """The refusal of a trainer that is older than the newest the run has seen."""
    if epoch >= current:
        return None
    return Refusal(
        Code.ABORTED,
        "FENCED",
        f"trainer_epoch {epoch} is fenced: the run has seen {current}; a newer trainer owns it, stop this one",
    )
