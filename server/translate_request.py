"""From the contract's messages to the core's dataclasses: what proto cannot express is checked here.

Invariants
- Every field that is accepted reaches the core or the engine; what has no effect is refused.
- All wrong fields of a message are reported together, each with its path from the item and what would be right.
- Token ids become little-endian uint32 bytes; `token_bytes` passes through untouched.

What this module does not know: queues, engines, and the limits the core enforces (vocabulary, context, ids known).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf import struct_pb2
from google.protobuf.message import Message

from rolloutd.scheduler.spec import TOKEN_BYTES, Acknowledgement, RolloutSpec, RolloutUpdate
from rolloutd.scheduler.states import OnPreempt, Origin, RolloutClass, TaskType
from rolloutd.server.errors import FieldErrors
from rolloutd.v1 import Acknowledgement as AcknowledgementMessage
from rolloutd.v1 import RolloutSubmission, SamplingParams
from rolloutd.v1 import RolloutUpdate as RolloutUpdateMessage

MAX_ID_CHARACTERS = 256
MAX_SECONDS = 315_360_000.0  # ten years: more is a mistake
MAX_TEXT_STOPS = 32  # SGLang's own bound per list
MAX_SAMPLES = 4096
# 4,096 positions of this many pairs (16 bytes each) fill the default message of 64 MiB.
MAX_TOP_LOGPROBS = 1024
MAX_DROP_REASON_CHARACTERS = 64
SEED_LIMIT = 1 << 63
# "Any age" for the core, which reads None as "the run's default": more versions than a run can publish.
ANY_VERSIONS = 1 << 62
_INTEGER_LIMIT = 1 << 63
DEFAULT_POOL = "policy"
# Sampling parameters remembered as read and found right, by their bytes on the wire: at most so many, of such a size.
_MAX_SEEN_SAMPLING = 256
_MAX_SEEN_SAMPLING_BYTES = 1024
_seen_sampling: dict[bytes, Mapping[str, Any]] = {}

# Request fields of SGLang that this service sets itself, or that would change how many answers come back and where.
RESERVED_ENGINE_PARAMS = frozenset(
    """rid input_ids text input_embeds sampling_params stream return_logprob logprob_start_len top_logprobs_num
    cache_salt extra_key return_prompt_token_ids background session_params session_id routed_dp_rank
    data_parallel_rank""".split()
)


class Checker:
    """Collects what is wrong with one message."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, str]] = []

    def wrong(self, field: str, problem: str) -> None:
        self.errors.append((field, problem))

    def seconds(self, field: str, value: float) -> float:
        if not 0.0 <= value <= MAX_SECONDS:
            self.wrong(field, f"must be between 0 and {MAX_SECONDS:.0f} seconds, got {value:g}")
            return 0.0
        return value

    def version(self, field: str, value: int) -> int:
        if value < 0:
            self.wrong(field, f"must be a policy version, at least 0, got {value}")
            return 0
        return value

    def age(self, field: str, value: int) -> int | None:
        """A number of policy versions; None for -1, which is any."""
        if value < -1:
            self.wrong(field, f"must be at least 0 versions, or -1 for any, got {value}")
        return None if value < 0 else value

    def within(self, field: str, value: float, low: float, high: float, low_excluded: bool = False) -> None:
        if not (low < value <= high if low_excluded else low <= value <= high):
            bound = f"above {low:g}" if low_excluded else f"at least {low:g}"
            upper = "" if high == math.inf else f" and at most {high:g}"
            self.wrong(field, f"must be {bound}{upper}, got {value:g}")

    def name(self, field: str, value: str, *, required: bool = False, slash: bool = True) -> str:
        if required and not value:
            self.wrong(field, "is required")
        if len(value) > MAX_ID_CHARACTERS:
            self.wrong(field, f"must have at most {MAX_ID_CHARACTERS} characters, has {len(value)}")
        if not slash and "/" in value:
            self.wrong(field, f"must not contain '/' (it names the samples of a submission), got {value!r}")
        return value

    def enum(self, field: str, value: int, kind: type[Any]) -> Any:
        """The core's member for a contract value (its number less one), None for unspecified."""
        if value == 0:
            return None
        try:
            return kind(value - 1)
        except ValueError:
            self.wrong(field, f"{value} is not a value of this enum")
            return None

    def done(self) -> None:
        if self.errors:
            raise FieldErrors(self.errors)


def to_spec(message: RolloutSubmission) -> RolloutSpec:
    """One submission. Raises FieldErrors."""
    check = Checker()
    # What is absent has the core's default, so only what the caller set is looked at: it is a handful of thirty fields. Each
    # is read once: reading a prompt copies it.
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    rollout_id = check.name("rollout_id", given.get("rollout_id", ""), required=True, slash=False)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _AS_THEY_ARE:
            values[name] = value
        elif name in _NAMES:
            values[name] = check.name(name, value)
        elif name in _SECONDS:
            values[name] = check.seconds(name, value)
        elif name in _ENUMS and (member := check.enum(name, value, _ENUMS[name])) is not None:
            values[name] = member
    samples = given.get("samples") or 1
    if samples > MAX_SAMPLES:
        check.wrong("samples", f"must be at most {MAX_SAMPLES}, got {samples}")
    if "seeds" in given:
        values["seeds"] = _seeds(given["seeds"], samples, check)
    token_bytes, text = _prompt(given, check)
    task_type = values.get("task_type", TaskType.GENERATION)
    if "turn" in given and "session_id" not in given:
        check.wrong("turn", "needs session_id")
    if "group_size" in given and "group_id" not in given and samples == 1:
        check.wrong("group_size", "needs group_id, or samples above 1")
    if task_type is TaskType.REPLAY and text is not None:
        check.wrong("text", "REPLAY scores given tokens; send token_bytes or token_ids")
    if "sampling" not in given and task_type is not TaskType.REPLAY:
        check.wrong("sampling", "is required (at least max_new_tokens)")
    said: SamplingParams = given["sampling"] if "sampling" in given else message.sampling
    max_new_tokens = said.max_new_tokens
    if task_type is TaskType.REPLAY:
        if max_new_tokens:
            check.wrong("sampling.max_new_tokens", "must be 0: REPLAY generates nothing")
    elif "sampling" in given and max_new_tokens == 0:
        check.wrong("sampling.max_new_tokens", "must be at least 1")
    if "top_logprobs" in given:
        if given["top_logprobs"] > MAX_TOP_LOGPROBS:
            check.wrong("top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}, got {given['top_logprobs']}")
        values["top_logprobs"], values["logprobs"] = given["top_logprobs"], True
    values.update(_versions(given, check))
    if "engine_params" in given:
        values["engine_params"] = _engine_params(message, check)
    if "engine_labels" in given:
        values["engine_labels"] = dict(message.engine_labels)
    if "pool" not in given:
        values["pool"] = DEFAULT_POOL
    sampling = _sampling(said, check)
    check.done()
    return RolloutSpec(
        rollout_id=rollout_id,
        token_bytes=token_bytes,
        text=text,
        samples=samples,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        **values,
    )


# Fields of a submission that the core has under the same name, by what is to be checked about them.
_AS_THEY_ARE = frozenset(
    (
        "group_size",
        "group_keep",
        "turn",
        "needed_by_step",
        "max_attempts",
        "fail_fast",
        "clip_max_new_tokens",
        "want_progress",
        "logprobs",
    )
)
_NAMES = frozenset(("pool", "group_id", "session_id", "parent_rollout_id", "stratum"))
_SECONDS = frozenset(("deadline_seconds", "queue_ttl_seconds", "progress_timeout_seconds"))
_ENUMS: Mapping[str, type[Any]] = {
    "rollout_class": RolloutClass,
    "task_type": TaskType,
    "origin": Origin,
    "on_preempt": OnPreempt,
}


def _versions(given: Mapping[str, Any], check: Checker) -> dict[str, int]:
    """Which policies may write its tokens, as the core's fields of the same names."""
    versions = {name: check.version(name, given[name]) for name in ("min_version", "exact_version") if name in given}
    low, exact = versions.get("min_version", 0), versions.get("exact_version")
    if exact is not None and low > exact:
        check.wrong("min_version", f"must be at most exact_version ({exact}), got {low}")
    for name in ("max_staleness", "max_partial_span"):
        if name in given:
            versions[name] = ANY_VERSIONS if (limit := check.age(name, given[name])) is None else limit
    return versions


def _seeds(said: Iterable[int], samples: int, check: Checker) -> tuple[int, ...]:
    seeds = tuple(said)
    if len(seeds) != samples:
        check.wrong("seeds", f"must be empty or one per sample ({samples}), got {len(seeds)}")
    if any(seed >= SEED_LIMIT for seed in seeds):
        check.wrong("seeds", "must be below 2^63")
    return seeds


def to_update(message: RolloutUpdateMessage) -> RolloutUpdate:
    """One update. Raises FieldErrors."""
    check = Checker()
    check.name("rollout_id", message.rollout_id, required=True)
    rollout_class = None
    if message.HasField("rollout_class"):
        rollout_class = check.enum("rollout_class", message.rollout_class, RolloutClass)
        if message.rollout_class == 0:
            check.wrong("rollout_class", "must not be UNSPECIFIED; leave the field out to keep the class")
    deadline = None
    if message.HasField("deadline_seconds"):
        deadline = check.seconds("deadline_seconds", message.deadline_seconds)
    step = message.needed_by_step if message.HasField("needed_by_step") else None
    present = [name for name in ("rollout_class", "deadline_seconds", "needed_by_step") if _has(message, name)]
    if not present:
        check.wrong("rollout_class", "give at least one of rollout_class, deadline_seconds, needed_by_step")
    check.done()
    return RolloutUpdate(message.rollout_id, rollout_class, deadline, step)


def to_acknowledgement(message: AcknowledgementMessage) -> Acknowledgement:
    """One acknowledgement. Raises FieldErrors."""
    check = Checker()
    check.name("rollout_id", message.rollout_id, required=True)
    used = {0: None, 1: True, 2: False}.get(message.verdict)
    if message.verdict not in (0, 1, 2):
        check.wrong("verdict", f"{message.verdict} is not a value of this enum")
    if message.drop_reason and used is not False:
        check.wrong("drop_reason", "goes with verdict DROPPED only")
    if len(message.drop_reason) > MAX_DROP_REASON_CHARACTERS:
        check.wrong("drop_reason", f"must have at most {MAX_DROP_REASON_CHARACTERS} characters")
    reward = message.reward if message.HasField("reward") else None
    if reward is not None and not math.isfinite(reward):
        check.wrong("reward", f"must be finite, got {reward}")
    check.done()
    return Acknowledgement(message.rollout_id, used, message.drop_reason, reward)


def _prompt(given: Mapping[str, Any], check: Checker) -> tuple[bytes, str | None]:
    """`given`: a submission's fields that are set, by name."""
    if "token_bytes" in given:
        token_bytes: bytes = given["token_bytes"]
        if len(token_bytes) % TOKEN_BYTES:
            size = len(token_bytes)
            check.wrong("token_bytes", f"must be whole little-endian uint32 ids (4 bytes each), got {size} bytes")
        elif not token_bytes:
            check.wrong("token_bytes", "the prompt is empty; give at least one token")
        return token_bytes, None
    if "token_ids" in given:
        ids = given["token_ids"].ids
        if not ids:
            check.wrong("token_ids", "the prompt is empty; give at least one token")
        return np.array(ids, dtype="<u4").tobytes(), None
    if "text" in given:
        text: str = given["text"]
        if not text:
            check.wrong("text", "the prompt is empty; give at least one character")
        return b"", text
    check.wrong("prompt", "is required: token_bytes, token_ids or text")
    return b"", None


_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 2.0, True),
}


def _sampling(message: SamplingParams, check: Checker) -> Mapping[str, Any]:
    """The engine's own sampling words; what is absent is left to the engine.

    A trainer says the same words with every rollout: those that were right once are not looked at again.
    """
    said = message.SerializeToString()
    words = _seen_sampling.get(said)
    if words is None:
        before = len(check.errors)
        words = _sampling_words(message, check)
        if len(check.errors) == before and len(said) <= _MAX_SEEN_SAMPLING_BYTES:
            if len(_seen_sampling) >= _MAX_SEEN_SAMPLING:
                del _seen_sampling[next(iter(_seen_sampling))]
            _seen_sampling[said] = words
    return words


def _sampling_words(message: SamplingParams, check: Checker) -> Mapping[str, Any]:
    words: dict[str, Any] = {}
    for name, (low, high, low_excluded) in _RANGES.items():
        if message.HasField(name):  # type: ignore[arg-type]
            value = getattr(message, name)
            path = f"sampling.{name}"
            if not math.isfinite(value):
                check.wrong(path, f"must be finite, got {value}")
            else:
                check.within(path, value, low, high, low_excluded)
            words[name] = value
    if message.HasField("min_new_tokens"):
        if message.min_new_tokens > message.max_new_tokens:
            problem = f"must be at most max_new_tokens ({message.max_new_tokens}), got {message.min_new_tokens}"
            check.wrong("sampling.min_new_tokens", problem)
        words["min_new_tokens"] = message.min_new_tokens
    if message.HasField("top_k"):
        if message.top_k != -1 and message.top_k < 1:
            check.wrong("sampling.top_k", f"must be at least 1, or -1 for all, got {message.top_k}")
        words["top_k"] = message.top_k
    for name in ("stop", "stop_regex"):
        values = list(getattr(message, name))
        if len(values) > MAX_TEXT_STOPS:
            check.wrong(f"sampling.{name}", f"must have at most {MAX_TEXT_STOPS} entries, has {len(values)}")
        for position, value in enumerate(values):
            if not value:
                check.wrong(f"sampling.{name}[{position}]", "must not be empty")
        if values:
            words[name] = values
    if len(message.stop_token_ids) > MAX_TEXT_STOPS:
        count = len(message.stop_token_ids)
        check.wrong("sampling.stop_token_ids", f"must have at most {MAX_TEXT_STOPS} entries, has {count}")
    if message.stop_token_ids:
        words["stop_token_ids"] = list(message.stop_token_ids)
    for name in ("ignore_eos", "no_stop_trim"):
        if getattr(message, name):
            words[name] = True
    for name in ("skip_special_tokens", "spaces_between_special_tokens"):
        if _has(message, name):
            words[name] = getattr(message, name)
    if message.logit_bias:
        for token, bias in message.logit_bias.items():
            if not math.isfinite(bias):
                check.wrong(f"sampling.logit_bias[{token}]", f"must be finite, got {bias}")
        words["logit_bias"] = {str(token): bias for token, bias in sorted(message.logit_bias.items())}
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        value = getattr(message, constraint)
        if not value:
            check.wrong(f"sampling.{constraint}", "must not be empty")
        elif constraint in ("json_schema", "structural_tag") and not _is_json(value):
            check.wrong(f"sampling.{constraint}", "must be JSON text")
        words[constraint] = value
    if message.HasField("custom_params"):
        words["custom_params"] = from_struct(message.custom_params)
    return words


def _engine_params(message: RolloutSubmission, check: Checker) -> dict[str, Any]:
    params = from_struct(message.engine_params)
    for name in sorted(RESERVED_ENGINE_PARAMS.intersection(params)):
        check.wrong(f"engine_params.{name}", "is set by the scheduler itself; remove it")
    return params


def from_struct(message: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as plain values; whole numbers become int, because engines refuse 8.0 where they want 8."""
    return {key: _from_value(value) for key, value in message.fields.items()}


def _from_value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        # JSON writers take integers of 64 bits; a larger one stays what the contract carries, a double.
        return int(number) if number.is_integer() and abs(number) < _INTEGER_LIMIT else number
    if kind == "struct_value":
        return from_struct(value.struct_value)
    if kind == "list_value":
        return [_from_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _has(message: Message, field: str) -> bool:
    return message.HasField(field)
