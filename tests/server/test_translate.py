"""Between the contract and the core: every field arrives, nothing changes on the way."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.scheduler import actions
from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import AttemptRecord, RolloutResult, Span
from rolloutd.scheduler.spec import Budget, Quota, RunSettings, StepReport
from rolloutd.scheduler.states import (
    Code,
    Gate,
    OnPreempt,
    OnStale,
    Origin,
    Outcome,
    ReleaseMemory,
    RolloutClass,
    RolloutState,
    TaskType,
    TrainerState,
)
from rolloutd.scheduler.views import DecisionKind
from rolloutd.server.errors import FieldErrors
from rolloutd.server.translate_event import _DECISIONS, _NOTICES, to_event, to_result, to_state, to_struct
from rolloutd.server.translate_request import ANY_VERSIONS, from_struct, to_acknowledgement, to_spec, to_update
from rolloutd.server.translate_run import (
    fill_budget,
    from_budget,
    merge_report,
    merge_settings,
    to_budget,
    to_run_config,
)
from rolloutd.v1 import (
    ROLLOUT_CLASS_UNSPECIFIED,
    Acknowledgement,
    NoticeKind,
    ReportStepRequest,
    RolloutDefaults,
    RolloutSubmission,
    RolloutUpdate,
    RunConfig,
    SamplingParams,
    ServerInfo,
)
from rolloutd.v1 import (
    DecisionKind as DecisionKindMessage,
)
from rolloutd.v1 import (
    OnPreempt as OnPreemptMessage,
)
from rolloutd.v1 import (
    OnStale as OnStaleMessage,
)
from rolloutd.v1 import (
    Origin as OriginMessage,
)
from rolloutd.v1 import (
    Outcome as OutcomeMessage,
)
from rolloutd.v1 import (
    ReleaseMemory as ReleaseMemoryMessage,
)
from rolloutd.v1 import (
    RolloutClass as RolloutClassMessage,
)
from rolloutd.v1 import (
    RolloutState as RolloutStateMessage,
)
from rolloutd.v1 import (
    TaskType as TaskTypeMessage,
)
from rolloutd.v1 import (
    TrainerState as TrainerStateMessage,
)
from tests.server.harness import submission

PLAIN = submission("r", group_id="g", session_id="s", samples=2)

# One other value for each field that a submission may carry.
SUBMISSION_VALUES: dict[str, Any] = {
    "rollout_id": "other",
    "token_bytes": struct.pack("<2I", 5, 6),
    "text": "hello",
    "samples": 3,
    "seeds": [4, 5],
    "rollout_class": 2,
    "task_type": 3,
    "pool": "reward",
    "engine_labels": {"zone": "a"},
    "group_id": "h",
    "group_size": 9,
    "group_keep": 1,
    "session_id": "t",
    "turn": 3,
    "parent_rollout_id": "p",
    "stratum": "math",
    "origin": 4,
    "needed_by_step": 0,
    "deadline_seconds": 1.5,
    "queue_ttl_seconds": 2.5,
    "progress_timeout_seconds": 3.5,
    "max_attempts": 7,
    "on_preempt": 2,
    "fail_fast": True,
    "clip_max_new_tokens": True,
    "want_progress": True,
    "logprobs": True,
    "top_logprobs": 4,
    "min_version": 0,
    "exact_version": 0,
    "max_staleness": 0,
    "max_partial_span": 0,
}
SAMPLING_VALUES: dict[str, Any] = {
    "max_new_tokens": 9,
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.3,
    "repetition_penalty": 1.1,
    "stop": ["a"],
    "stop_token_ids": [3],
    "stop_regex": ["b+"],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "logit_bias": {5: 1.0},
    "json_schema": "{}",
    "regex": "a*",
    "ebnf": "root ::= x",
    "structural_tag": "{}",
}


def _changed(message: Any, field: str, value: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    copy.ClearField(field)
    if isinstance(value, list):
        getattr(copy, field).extend(value)
    elif isinstance(value, dict):
        getattr(copy, field).update(value)
    else:
        setattr(copy, field, value)
    return copy


@pytest.mark.parametrize("field", [field.name for field in RolloutSubmission.DESCRIPTOR.fields])
def test_every_field_of_a_submission_has_an_effect(field: str) -> None:
    before = to_spec(PLAIN)
    if field == "sampling":
        after = to_spec(submission("r", group_id="g", session_id="s", samples=2, max_new_tokens=99))
    elif field == "token_ids":
        changed = _changed(PLAIN, "token_bytes", b"")
        changed.token_ids.ids.extend([7, 8, 9])
        after = to_spec(changed)
        assert after.token_bytes == struct.pack("<3I", 7, 8, 9)
    elif field == "engine_params":
        changed = _changed(PLAIN, "samples", 2)
        changed.engine_params.update({"priority": 3})
        after = to_spec(changed)
        assert after.engine_params == {"priority": 3}
    else:
        after = to_spec(_changed(PLAIN, field, SUBMISSION_VALUES[field]))
    assert after != before


@pytest.mark.parametrize("field", [field.name for field in SamplingParams.DESCRIPTOR.fields])
def test_every_sampling_field_reaches_the_engine_in_its_own_words(field: str) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    if field == "custom_params":
        sampling.custom_params.update({"a": 1})
        expected: Any = {"a": 1}
    else:
        value = SAMPLING_VALUES[field]
        sampling = _changed(sampling, field, value)
        expected = {"5": 1.0} if field == "logit_bias" else value
    spec = to_spec(submission("r", sampling=sampling))
    if field == "max_new_tokens":
        assert spec.max_new_tokens == 9
        assert spec.sampling == {}
    else:
        assert spec.sampling == {field: expected}


@pytest.mark.parametrize(
    ("ours", "theirs", "offset"),
    [
        (RolloutClass, RolloutClassMessage, 1),
        (TaskType, TaskTypeMessage, 1),
        (Origin, OriginMessage, 1),
        (OnPreempt, OnPreemptMessage, 1),
        (OnStale, OnStaleMessage, 1),
        (Outcome, OutcomeMessage, 1),
        (ReleaseMemory, ReleaseMemoryMessage, 1),
        (TrainerState, TrainerStateMessage, 0),
    ],
)
def test_enums_agree_by_name(ours: Any, theirs: Any, offset: int) -> None:
    names = {value: name for name, value in theirs.items()}
    for member in ours:
        assert names[member + offset].endswith(member.name) or member.name == "UNKNOWN"
    assert len(names) == len(ours) + offset


def test_states_notices_and_decisions_have_a_value_each() -> None:
    states = {to_state(state, gate) for state in RolloutState for gate in Gate}
    assert states == set(RolloutStateMessage.values()) - {0}
    for kind in actions.NoticeKind:
        assert NoticeKind.Name(_NOTICES[kind]).endswith(kind.name)  # type: ignore[arg-type]
    assert {_DECISIONS[kind] for kind in DecisionKind} == set(DecisionKindMessage.values()) - {0}


def _result(**changes: Any) -> RolloutResult:
    values = RolloutResult(
        run_id="run", rollout_id="r/1", group_id="g", sample_index=1, session_id="s", turn=2, step=3,
        rollout_class=RolloutClass.REUSABLE, task_type=TaskType.GENERATION, stratum="math", outcome=Outcome.COMPLETED,
        error=None, token_bytes=b"\1\0\0\0", logprob_bytes=b"\0\0\0\0", top_logprobs=(((-0.1, 5), (-2.0, 6)),),
        text="t", prompt_token_bytes=b"\2\0\0\0", prompt_logprob_bytes=b"\0\0\0\0", finish_reason="stop",
        matched_stop="x", spans=(Span(0, "default", 0, 1, "e", 1),), engine_id="e", batch_id=4, attempts=2,
        preemptions=1, prompt_tokens=9, cached_tokens=8, predicted_cached_tokens=7, generated_tokens=1,
        queued_seconds=0.1, first_token_seconds=0.2, running_seconds=0.3, total_seconds=0.4, prompt_hash="h",
        complete=True, clipped=True, extras={"a": [1, 2.5, None, "x", True], "b": b"\1"}, policy_version=6, stale=True,
        history=(
            AttemptRecord(1, "d", 3, 4, 0.1, 0.2, 0, "publish"), AttemptRecord(2, "e", 4, 5, 0.3, 0.4, 1, "stop"),
        ),
    )  # fmt: skip
    return dataclasses.replace(values, **changes)


def test_a_result_arrives_whole() -> None:
    message = to_result(_result())
    assert (
        not {field.name for field in message.DESCRIPTOR.fields}
        - {field.name for field, _ in message.ListFields()}
        - {"error", "matched_token_id"}
    )
    assert message.times.queued_seconds == 0.1
    attempt = message.history[0]
    assert (attempt.number, attempt.engine_id, attempt.batch_id, attempt.policy_version) == (1, "d", "3", 4)
    assert (attempt.started_seconds, attempt.ended_seconds, attempt.end) == (0.1, 0.2, "publish")
    assert message.history[1].generated_tokens == 1
    assert from_struct(message.extras) == {"a": [1, 2.5, None, "x", True], "b": "AQ=="}
    assert [list(row.token_ids) for row in message.top_logprobs] == [[5, 6]]
    failed = to_result(
        _result(
            outcome=Outcome.ENGINE_FAILED,
            error=Refusal(Code.UNAVAILABLE, "ENGINE_FAILED", "no", (("f", "p"),), 2.0),
            matched_stop=17,
            step=None,
        )
    )
    assert failed.error.field_violations[0].field == "f"
    assert failed.error.retry_after_seconds == 2.0
    assert failed.matched_token_id == 17
    assert not failed.HasField("step")


def test_every_event_of_the_core_has_its_message() -> None:
    every: list[Any] = [
        actions.Accepted("r", RolloutState.QUEUED, 3, 4, 0.5, True),
        actions.Rejected("r", Refusal(Code.NOT_FOUND, "NOT_FOUND", "no")),
        actions.Progressed("r", 5, "e"),
        actions.Finished(_result()),
        actions.GroupFinished("g", False, ("a", "b"), ("b",)),
        actions.Notice(actions.NoticeKind.DRAINING, "bye", 3.0),
        actions.Attached(7, 2, 1),
    ]
    kinds = set()
    for event in every:
        message = to_event(actions.Deliver("run", "c", 9, event), ServerInfo(version="1"), 0)
        kinds.add(message.WhichOneof("event"))
    assert kinds == {"accepted", "rejected", "progress", "finished", "group_finished", "notice", "attached"}


_SHARE = st.sampled_from([0.0, 0.125, 0.25])
_CEILING = st.none() | st.integers(0, 1 << 40)


@st.composite
def _budgets(draw: st.DrawFn) -> Budget:
    def quota() -> Quota:
        ceiling = draw(st.none() | st.integers(5, 100))
        return Quota(ceiling, draw(_SHARE), draw(st.integers(0, 5)))

    classes = {kind: quota() for kind in draw(st.sets(st.sampled_from(RolloutClass)))}
    tasks = {task: quota() for task in draw(st.sets(st.sampled_from(TaskType)))}
    megabytes = draw(st.none() | st.integers(0, 1 << 20))
    return Budget(
        max_rollouts=draw(st.none() | st.integers(100, 10_000)),
        max_kv_tokens=draw(_CEILING),
        training_reserved_mb=None if megabytes is None else float(megabytes),
        max_inference_mb=draw(st.none() | st.just(4096.0)),
        classes=classes,
        tasks=tasks,
        lease_seconds=draw(st.floats(0, 1e6)),
    )


@given(_budgets())
def test_a_budget_survives_the_round_trip(budget: Budget) -> None:
    assert from_budget(to_budget(budget, budget.lease_seconds)) == budget


def test_absent_ceilings_fall_back_and_zero_stays_zero() -> None:
    default = Budget(max_rollouts=5, max_kv_tokens=6)
    assert fill_budget(Budget(max_rollouts=0), default) == Budget(max_rollouts=0, max_kv_tokens=6)


def test_settings_survive_the_round_trip() -> None:
    settings = RunSettings(
        fairness_weight=2.0,
        floor_rollouts=3,
        default_class=RolloutClass.BACKGROUND,
        queue_ttl_seconds=9.0,
        max_attempts=4,
        on_preempt=OnPreempt.NEVER,
        target_mix={"a": 1.0},
        mix_hold_seconds=30.0,
        cancel_on_disconnect=True,
        disconnect_grace_seconds=5.0,
        max_undelivered_bytes=1 << 20,
        undelivered_ttl_seconds=60.0,
        min_version=3,
        max_staleness=0,
        max_partial_span=1,
        on_stale=OnStale.FLAG,
        batch_samples=64,
        slice_tokens=512,
        prefix_ttl_versions=0,
        release_memory=ReleaseMemory.KV_CACHE_AND_WEIGHTS,
    )
    again = merge_settings(RunSettings(), to_run_config(settings, SchedulerConfig()))
    assert dataclasses.replace(again, weights=settings.weights) == settings
    assert again.weights.prefix == 0.4
    assert merge_settings(settings, RunConfig()) == settings
    bare = to_run_config(RunSettings(), SchedulerConfig())
    assert (bare.defaults.max_staleness, bare.defaults.max_partial_span, bare.prefix_ttl_versions) == (-1, -1, -1)
    lifted = merge_settings(settings, RunConfig(defaults=bare.defaults, prefix_ttl_versions=-1))
    assert (lifted.min_version, lifted.max_staleness, lifted.max_partial_span) == (0, None, None)
    assert lifted.prefix_ttl_versions is None
    no_limit = RunConfig()
    no_limit.defaults.queue_ttl_seconds = 0.0
    shown = to_run_config(merge_settings(settings, no_limit), SchedulerConfig())
    assert shown.defaults.queue_ttl_seconds == 0.0


def test_a_report_keeps_what_is_absent_but_not_the_step_time() -> None:
    first = merge_report(
        None,
        ReportStepRequest(run_id="r", step=1, samples_needed=4, policy_entropy=0.5, buffer_fill=0.2, step_seconds=3.0),
    )
    second = merge_report(first, ReportStepRequest(run_id="r", step=2, buffer_fill=0.0))
    assert second == StepReport(
        step=2, trainer_state=TrainerState.UNKNOWN, samples_needed=4, policy_entropy=0.5, buffer_fill=0.0
    )
    with pytest.raises(FieldErrors) as refused:
        merge_report(None, ReportStepRequest(run_id="r", buffer_fill=1.5, policy_entropy=float("nan")))
    assert [field for field, _ in refused.value.fields] == ["policy_entropy", "buffer_fill"]


@pytest.mark.parametrize(
    ("message", "translate", "field"),
    [
        (RolloutUpdate(rollout_id="r"), to_update, "rollout_class"),
        (RolloutUpdate(rollout_id="r", rollout_class=ROLLOUT_CLASS_UNSPECIFIED), to_update, "rollout_class"),
        (RolloutUpdate(deadline_seconds=1.0), to_update, "rollout_id"),
        (RolloutUpdate(rollout_id="r", deadline_seconds=-1.0), to_update, "deadline_seconds"),
        (Acknowledgement(rollout_id="r", drop_reason="stale"), to_acknowledgement, "drop_reason"),
        (Acknowledgement(rollout_id="r", reward=float("inf")), to_acknowledgement, "reward"),
        (Acknowledgement(), to_acknowledgement, "rollout_id"),
    ],
)
def test_a_bad_item_names_its_field(message: Message, translate: Any, field: str) -> None:
    with pytest.raises(FieldErrors) as refused:
        translate(message)
    assert field in [name for name, _ in refused.value.fields]


@pytest.mark.parametrize(
    ("fields", "wrong", "problem"),
    [
        ({"min_version": -1}, "min_version", "at least 0, got -1"),
        ({"exact_version": -5}, "exact_version", "at least 0, got -5"),
        ({"min_version": 4, "exact_version": 3}, "min_version", r"at most exact_version \(3\), got 4"),
        ({"max_staleness": -2}, "max_staleness", "at least 0 versions, or -1 for any, got -2"),
        ({"max_partial_span": -2}, "max_partial_span", "or -1 for any, got -2"),
    ],
)
def test_a_version_that_cannot_be_is_refused(fields: dict[str, int], wrong: str, problem: str) -> None:
    with pytest.raises(FieldErrors, match=f"{wrong}: .*{problem}"):
        to_spec(submission("r", **fields))


def test_a_rollout_may_lift_its_runs_limits() -> None:
    spec = to_spec(submission("r", max_staleness=-1, max_partial_span=-1, min_version=3, exact_version=3))
    assert spec.max_staleness == spec.max_partial_span == ANY_VERSIONS
    bare = to_spec(submission("r"))
    assert (bare.min_version, bare.exact_version, bare.max_staleness, bare.max_partial_span) == (None,) * 4


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (RunConfig(defaults=RolloutDefaults(min_version=-1)), "config.defaults.min_version"),
        (RunConfig(defaults=RolloutDefaults(max_staleness=-2)), "config.defaults.max_staleness"),
        (RunConfig(defaults=RolloutDefaults(max_partial_span=-2)), "config.defaults.max_partial_span"),
        (RunConfig(prefix_ttl_versions=-2), "config.prefix_ttl_versions"),
        (RunConfig(batch_samples=8), "config.batch_samples"),
        (RunConfig(batch_samples=8, defaults=RolloutDefaults(max_staleness=-1)), "config.batch_samples"),
        (RunConfig(on_stale=7), "config.on_stale"),  # type: ignore[arg-type]
        (RunConfig(release_memory=7), "config.release_memory"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_that_cannot_be_or_has_no_effect_is_refused(config: RunConfig, wrong: str) -> None:
    with pytest.raises(FieldErrors) as refused:
        merge_settings(RunSettings(), config)
    assert [field for field, _ in refused.value.fields] == [wrong]


def test_structs_keep_whole_numbers_whole_and_say_what_json_cannot() -> None:
    message = to_struct({"count": 8, "rate": 0.5, "none": None, "nan": float("nan"), "deep": {"list": [1, "x"]}})
    assert from_struct(message) == {"count": 8, "rate": 0.5, "none": None, "nan": "nan", "deep": {"list": [1, "x"]}}
    assert isinstance(from_struct(message)["count"], int)
    message.update({"large": 1e30})  # beyond the integers that JSON writers take
    assert isinstance(from_struct(message)["large"], float)
