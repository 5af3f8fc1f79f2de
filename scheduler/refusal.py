"""How the core says no: one small record that a person and a program can act on.

What this module does not know: gRPC status objects (the server builds them).
"""

from __future__ import annotations

from dataclasses import dataclass

from rolloutd.scheduler.states import Code


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not accepted, or the reason an accepted rollout did not complete.

    reason: UPPER_SNAKE, stable, for programs. message: what was wrong, which field, what to do, for people.
    fields: (field path, what is wrong with it). retry_after_seconds: 0 when a retry would not help.
    """

    code: Code
    reason: str
    message: str
    fields: tuple[tuple[str, str], ...] = ()
    retry_after_seconds: float = 0.0


def invalid(field: str, problem: str) -> Refusal:
    """INVALID_ARGUMENT about one field."""
    return Refusal(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", f"{field}: {problem}", ((field, problem),))
