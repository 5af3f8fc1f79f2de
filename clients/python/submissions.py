"""From keyword arguments to the contract's RolloutSubmission.

Invariants: an argument that is left out stays unset on the wire, so the run's or the engine's default applies; every keyword
is accepted by name and type or refused here with a message that names it. What this does not know: limits that only the
server knows (vocabulary, context, queue); those come back as refusals of the one submission.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast
from uuid import uuid4

from rolloutd import v1
from rolloutd.client.prompts import Prompt, set_prompt
from rolloutd.client.words import OnPreempt, Origin, RolloutClass, TaskType, number_of


class GenerateOptions(TypedDict, total=False):
    """What may be said about a rollout. Units, limits and defaults are those of the fields of the same names in the contract
    (RolloutSubmission and SamplingParams); `max_new_tokens` is required except for task type "replay"."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    stop_regex: Sequence[str]
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    logit_bias: Mapping[int, float]
    json_schema: str | Mapping[str, Any]
    regex: str
    ebnf: str
    structural_tag: str | Mapping[str, Any]
    custom_params: Mapping[str, Any]
    rollout_id: str
    rollout_class: RolloutClass
    task_type: TaskType
    pool: str
    engine_labels: Mapping[str, str]
    group_id: str
    group_size: int
    group_keep: int
    session_id: str
    turn: int
    parent_rollout_id: str
    stratum: str
    origin: Origin
    needed_by_step: int
    deadline_seconds: float
    queue_ttl_seconds: float
    progress_timeout_seconds: float
    max_attempts: int
    on_preempt: OnPreempt
    fail_fast: bool
    clip_max_new_tokens: bool
    logprobs: bool
    top_logprobs: int
    seeds: Sequence[int]
    engine_params: Mapping[str, Any]
    min_version: int
    exact_version: int
    max_staleness: int
    max_partial_span: int


class RolloutOptions(GenerateOptions, total=False):
    """GenerateOptions and how many rollouts of the prompt."""

    samples: int


SAMPLING_NAMES = frozenset(v1.SamplingParams.DESCRIPTOR.fields_by_name)
OPTION_NAMES = frozenset(RolloutOptions.__annotations__)
ENUMS: dict[str, Any] = {
    "rollout_class": v1.RolloutClass,
    "task_type": v1.TaskType,
    "origin": v1.Origin,
    "on_preempt": v1.OnPreempt,
}
JSON_TEXT = frozenset({"json_schema", "structural_tag"})  # a mapping is written as JSON text
STRUCTS = frozenset({"custom_params", "engine_params"})  # google.protobuf.Struct
COLLECTIONS = frozenset({"stop", "stop_token_ids", "stop_regex", "logit_bias", "engine_labels", "seeds"})


def submission_of(prompt: Prompt, options: GenerateOptions) -> v1.RolloutSubmission:
    """The submission for a prompt; without `rollout_id` it gets a fresh one.

    TypeError for an unknown keyword or a wrong type, ValueError for a word or id that cannot be sent.
    """
    submission = v1.RolloutSubmission(rollout_id=options.get("rollout_id") or uuid4().hex)
    set_prompt(submission, prompt)
    if options.get("task_type") != "replay":
        submission.sampling.SetInParent()
    for name, value in cast(dict[str, Any], options).items():
        if name not in OPTION_NAMES:
            raise TypeError(_unknown(name))
        if value is not None and name != "rollout_id":
            _set(submission.sampling if name in SAMPLING_NAMES else submission, name, value)
    return submission


def member_ids(submission: v1.RolloutSubmission) -> tuple[str, ...]:
    """Ids of the rollouts of a submission, by sample index."""
    if submission.samples <= 1:
        return (submission.rollout_id,)
    return tuple(f"{submission.rollout_id}/{index}" for index in range(submission.samples))


def _set(message: Any, name: str, value: Any) -> None:
    try:
        if name in ENUMS:
            setattr(message, name, number_of(ENUMS[name], value, name))
        elif name in JSON_TEXT and not isinstance(value, str):
            setattr(message, name, json.dumps(value))
        elif name in STRUCTS:
            target = getattr(message, name)
            target.SetInParent()
            target.update(value)
        elif name in COLLECTIONS:
            if isinstance(value, str):
                raise TypeError("one string where a collection of strings is expected")
            target = getattr(message, name)
            target.update(value) if isinstance(value, Mapping) else target.extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, AttributeError) as error:
        raise TypeError(f"{name}={value!r}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, OPTION_NAMES, n=1)
    return f"unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
