"""The lineage of every result in a file: one record when a rollout ends, one when its group does.

Invariants
- Every end is written once, whether its consumer is connected or not; what is delivered again is not written again.
- A line is the protobuf JSON of a LineageRecord, whose `rollout` is what GetRollout says of the same rollout.

What this module does not know: files, and what a record holds.
"""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson

from rolloutd.scheduler import actions, events
from rolloutd.scheduler.result import RolloutResult
from rolloutd.server.json_lines import JsonLines
from rolloutd.server.state import ServerState
from rolloutd.server.translate_lineage import to_group
from rolloutd.v1 import LineageRecord


def line_of(record: LineageRecord) -> str:
    """Protobuf JSON on one line, with the field names of the contract."""
    return MessageToJson(record, preserving_proto_field_name=True, indent=None, ensure_ascii=False)


class LineageLog:
    """Hangs on the run loop and hands records to `lines`."""

    def __init__(self, state: ServerState, lines: JsonLines[LineageRecord]) -> None:
        self._state = state
        self._core = state.loop.core
        self._lines = lines
        state.loop.observers.append(self.observe)

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """One event and what the core made of it."""
        if isinstance(event, events.AttachConsumer):
            return  # what is delivered again was written when it ended
        for action in result:
            ended = actions.ended(action)
            if ended is not None:
                self._write_rollout(ended)
            elif isinstance(action, actions.Deliver | actions.Undelivered):
                if isinstance(action.event, actions.GroupFinished):
                    self._write_group(action.run_id, action.event.group_id)

    def _write_rollout(self, result: RolloutResult) -> None:
        lineage = self._state.lineage(result.run_id, result.rollout_id)
        if lineage is None:
            raise AssertionError(f"{result.rollout_id} ended without a record of its end")
        self._lines.put(LineageRecord(rollout=lineage))

    def _write_group(self, run_id: str, group_id: str) -> None:
        view = self._core.group_view(run_id, group_id)
        if view is None:
            raise AssertionError(f"group {group_id} ended without a record of it")
        self._lines.put(LineageRecord(group=to_group(run_id, view)))
