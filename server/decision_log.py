"""Decisions in a file, for those who want to know tomorrow why something was placed today.

Invariants
- Each decision about a rollout is written once, and so is each firing and end of a run's rules.

What this module does not know: files, and why something was decided.
"""

from __future__ import annotations

import time

import orjson

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.views import Decision
from rolloutd.server.json_lines import JsonLines
from rolloutd.server.loop import RunLoop


class DecisionLog:
    """Hangs on the run loop and hands lines to `lines`."""

    def __init__(self, loop: RunLoop, lines: JsonLines[str]) -> None:
        self._loop = loop
        self._lines = lines
        self._written_until: dict[tuple[str, str], float] = {}
        self._epoch_offset = time.time() - loop.clock()
        loop.observers.append(self.observe)

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """Keep the decisions behind every dispatch and every end."""
        redelivery = isinstance(event, events.AttachConsumer)
        for action in result:
            if isinstance(action, actions.Decided):
                self._lines.put(self._line(action.decision))
            elif isinstance(action, actions.Dispatch):
                self._keep(action.run_id, action.rollout_id)
            elif isinstance(action, actions.Deliver | actions.Undelivered) and not redelivery:
                if isinstance(action.event, actions.Finished):
                    rollout = action.event.result
                    self._keep(rollout.run_id, rollout.rollout_id)
                    self._written_until.pop((rollout.run_id, rollout.rollout_id), None)

    def _keep(self, run_id: str, rollout_id: str) -> None:
        explained = self._loop.core.explain(run_id, rollout_id)
        if explained is None:
            return
        key = (run_id, rollout_id)
        after = self._written_until.get(key, -1.0)
        for decision in explained[0]:
            if decision.at_seconds > after:
                self._written_until[key] = decision.at_seconds
                self._lines.put(self._line(decision))

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
