"""Decisions as rotating JSON lines, for those who want to know tomorrow why something was placed today.

Invariants
- Writing never holds the loop: lines gather in memory and a thread writes them.
- Memory is bounded: above `MAX_BUFFERED` lines the newest are dropped and counted, never silently.
- Each decision about a rollout is written once.

What this module does not know: why something was decided.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import time

import orjson

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.views import Decision
from rolloutd.server.config import DecisionLogSettings
from rolloutd.server.logging import get_logger
from rolloutd.server.loop import RunLoop

MAX_BUFFERED = 65_536
_FLUSH_SECONDS = 0.5


class DecisionLog:
    """Hangs on the run loop; `run()` is its writer."""

    def __init__(self, loop: RunLoop, settings: DecisionLogSettings) -> None:
        assert settings.path is not None
        self._loop = loop
        self._file = logging.handlers.RotatingFileHandler(
            settings.path, maxBytes=settings.max_bytes, backupCount=settings.files, encoding="utf-8"
        )
        self._lines: list[str] = []
        self._written_until: dict[tuple[str, str], float] = {}
        self._epoch_offset = time.time() - loop.clock()
        self.dropped_lines = 0
        self._log = get_logger("decision_log")
        loop.observers.append(self.observe)

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """Keep the decisions behind every dispatch and every end."""
        redelivery = isinstance(event, events.AttachConsumer)
        for action in result:
            if isinstance(action, actions.Dispatch):
                self._keep(action.run_id, action.rollout_id)
            elif isinstance(action, actions.Deliver) and isinstance(action.event, actions.Finished) and not redelivery:
                rollout = action.event.result
                self._keep(rollout.run_id, rollout.rollout_id)
                self._written_until.pop((rollout.run_id, rollout.rollout_id), None)

    async def run(self) -> None:
        """Write what gathered, twice a second, until cancelled; then write the rest."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_SECONDS)
                await self._flush()
        finally:
            await asyncio.shield(self._flush())
            self._file.close()

    def _keep(self, run_id: str, rollout_id: str) -> None:
        explained = self._loop.core.explain(run_id, rollout_id)
        if explained is None:
            return
        key = (run_id, rollout_id)
        after = self._written_until.get(key, -1.0)
        for decision in explained[0]:
            if decision.at_seconds > after:
                self._written_until[key] = decision.at_seconds
                if len(self._lines) >= MAX_BUFFERED:
                    self.dropped_lines += 1
                else:
                    self._lines.append(self._line(decision))

    def _line(self, decision: Decision) -> str:
        return orjson.dumps(
            {
                "time": round(self._epoch_offset + decision.at_seconds, 6),
                "kind": decision.kind.name.lower(),
                "run_id": decision.run_id,
                "rollout_id": decision.rollout_id,
                "batch_id": decision.batch_id,
                "engine_id": decision.engine_id,
                "gate": decision.gate.name.lower(),
                "candidates": [
                    {
                        "engine_id": candidate.engine_id,
                        "hit_tokens": candidate.hit_tokens,
                        "terms": dict(candidate.terms),
                        "score": candidate.score,
                    }
                    for candidate in decision.candidates
                ],
                "message": decision.message,
            }
        ).decode()

    async def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self.dropped_lines:
            self._log.warning("decisions_dropped", lines=self.dropped_lines)
            self.dropped_lines = 0
        if lines:
            await asyncio.to_thread(self._write, lines)

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            self._file.emit(logging.LogRecord("decision", logging.INFO, "", 0, line, None, None))
