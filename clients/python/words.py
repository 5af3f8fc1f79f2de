"""The words of the contract's enums: short lower-case strings in place of `ROLLOUT_CLASS_CRITICAL`.

Invariants: each Literal below lists exactly the values of its enum without `_UNSPECIFIED` (a test compares them).
A word that is not in the list raises ValueError with the list. What this does not know: defaults; leaving an
argument out leaves the choice to the run's configuration, as the contract describes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

RolloutClass = Literal["critical", "reusable", "background"]
TaskType = Literal["generation", "reward", "state_query", "replay"]
Origin = Literal["current_policy", "replay", "exploration", "evaluation"]
OnPreempt = Literal["keep_partial", "restart", "never"]
OnDisconnect = Literal["keep", "cancel"]
OnStale = Literal["withhold", "flag"]
ReleaseMemory = Literal["nothing", "kv_cache", "kv_cache_and_weights"]
TrainerState = Literal["training", "waiting", "syncing", "paused"]
RolloutState = Literal["queued", "held", "dispatched", "running", "stopping", "finished"]
NoticeKind = Literal[
    "no_capacity", "budget_changed", "budget_lease_expired", "draining", "results_expired", "version_published"
]
UpdateMode = Literal["drain", "abort_and_resume", "retract", "in_place"]
CacheHandling = Literal["flush", "namespace", "keep"]
UpdateState = Literal[
    "waiting",
    "clearing",
    "pausing",
    "flushing",
    "loading",
    "pushing",
    "naming",
    "verifying",
    "resuming",
    "updated",
    "failed",
]
FinishReason = Literal["stop", "length", "abort"]
# "refused" is the client's own: the server refused the submission, so there is no rollout that could have ended.
Outcome = Literal[
    "completed",
    "cancelled",
    "deadline_exceeded",
    "queue_timeout",
    "no_engine",
    "engine_refused",
    "engine_failed",
    "run_ended",
    "shutdown",
    "internal",
    "version_unmet",
    "version_gone",
    "stale",
    "surplus",
    "refused",
]


@cache
def _tables(enum: Any) -> tuple[Mapping[str, int], Mapping[int, str]]:
    names = dict(enum.items())
    zero = next(name for name, number in names.items() if number == 0)
    prefix = zero.removesuffix("UNSPECIFIED")
    to_number = {name.removeprefix(prefix).lower(): number for name, number in names.items() if number}
    return to_number, {number: word for word, number in to_number.items()}


def number_of(enum: Any, word: str, argument: str) -> Any:
    """The enum's number for `word`. ValueError, naming `argument` and the choices, when there is none."""
    to_number, _ = _tables(enum)
    try:
        return to_number[word]
    except (KeyError, TypeError):
        choices = ", ".join(repr(choice) for choice in to_number)
        raise ValueError(f"{argument} must be one of {choices}, not {word!r}") from None


def word_of(enum: Any, number: int) -> Any:
    """The word for an enum's number; "" for unspecified and for a value that a newer server added."""
    return _tables(enum)[1].get(number, "")
