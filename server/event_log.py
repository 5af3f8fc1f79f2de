"""What callers and engines' registrations told the core, and how rollouts ended, in a file: what `rolloutd replay` starts from.

One line of JSON each: `{"at": seconds, "event": ...}` for an event of the core, `{"at": seconds, "ended": ...}` for an end.
Prompts are in it, as base64 of their token ids; outputs are not, only their lengths.

Invariants
- Lines are in the order in which the core handled things; `at` is its clock, seconds from any start.
- An end is written once, whether its consumer is connected or not.

What this module does not know: files (`JsonLines`), and what a replay does.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from rolloutd.scheduler import actions, config, events, spec, states
from rolloutd.scheduler.result import RolloutResult
from rolloutd.scheduler.rules import rule

# Told by callers, or by doors about engines. Engines' reports are not kept: another schedule gets others.
KEPT = frozenset(
    kind.__name__
    for kind in (
        events.ConfigureRun,
        events.Reconfigure,
        events.PauseRun,
        events.ResumeRun,
        events.EndRun,
        events.AttachConsumer,
        events.SubmitRollouts,
        events.UpdateRollouts,
        events.CancelRollouts,
        events.SetBudget,
        events.ReportStep,
        events.PublishPolicy,
        events.JoinEngine,
        events.DrainEngine,
        events.RemoveEngine,
    )
)


class EventLogError(ValueError):
    """A line that is not one of an event log."""


# Types of fields come with the values: a compiled dataclass no longer knows those of its own.
_CLASSES: dict[str, type[Any]] = {
    name: kind
    for module in (config, events, rule, spec)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
_ENUMS: dict[str, type[enum.Enum]] = {
    name: kind for name, kind in vars(states).items() if isinstance(kind, type) and issubclass(kind, enum.Enum)
}


def _packed(value: Any) -> Any:
    """A value as JSON: dataclasses, enums, bytes and mappings say what they are; lists are tuples."""
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if dataclasses.is_dataclass(value):
        given = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        defaults = {one.name: one.default for one in dataclasses.fields(value)}
        fields = {name: _packed(of) for name, of in given.items() if of is not defaults[name]}
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"map": [[_packed(key), _packed(of)] for key, of in value.items()]}
    if isinstance(value, tuple | list):
        return [_packed(one) for one in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(one) for one in value)
    if not isinstance(value, dict):
        return value
    if "class" in value:
        return _CLASSES[value["class"]](**{name: _unpacked(of) for name, of in value["fields"].items()})
    if "enum" in value:
        return _ENUMS[value["enum"]][value["name"]]
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    return {_unpacked(key): _unpacked(of) for key, of in value["map"]}


class End(msgspec.Struct, frozen=True):
    """How a rollout ended. Times are in seconds since acceptance; `kind` is its class, or `reward`."""

    run_id: str
    rollout_id: str
    kind: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_seconds: float
    total_seconds: float
    engine_id: str


class Line(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    at: float
    event: Any = None
    ended: End | None = None


Entry = tuple[float, Any]  # (seconds, an event of `KEPT`, or an End)


def end_of(result: RolloutResult) -> End:
    """What is kept of a result."""
    reward = result.task_type.name == "REWARD"
    return End(
        run_id=result.run_id,
        rollout_id=result.rollout_id,
        kind="reward" if reward else result.rollout_class.name.lower(),
        outcome=result.outcome.name.lower(),
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.generated_tokens,
        queued_seconds=round(result.queued_seconds, 6),
        total_seconds=round(result.total_seconds, 6),
        engine_id=result.engine_id,
    )


def line_of(entry: Entry) -> str:
    """One line, without its end."""
    at, what = entry
    if isinstance(what, End):
        return msgspec.json.encode(Line(round(at, 6), ended=what)).decode()
    return msgspec.json.encode(Line(round(at, 6), event=_packed(what))).decode()


def read_entries(lines: Iterable[str], name: str) -> Iterator[Entry]:
    """What a file says. `name` is for messages. Raises EventLogError for a line that makes no sense."""
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = decoder.decode(line)
            what = _unpacked(parsed.event) if parsed.ended is None else parsed.ended
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise EventLogError(f"{name}, line {number}: {error}") from None
        if not isinstance(what, End) and type(what).__name__ not in KEPT:
            raise EventLogError(f"{name}, line {number}: is neither an event of a log nor an end")
        yield parsed.at, what


class EventLog:
    """An observer of the run loop (or of a simulation) that hands entries to `put`."""

    def __init__(self, clock: Callable[[], float], put: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._put = put

    def observe(self, event: events.Event, result: list[actions.Action]) -> None:
        """One event and what the core made of it."""
        if type(event).__name__ in KEPT:
            self._put((self._clock(), event))
        if isinstance(event, events.AttachConsumer):
            return  # what is delivered again was written when it ended
        for action in result:
            ended = actions.ended(action)
            if ended is not None:
                self._put((self._clock(), end_of(ended)))
