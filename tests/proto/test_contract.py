"""The contract as Python sees it: what is on the wire, what is absent, what the services offer."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rolloutd import v1
from rolloutd.v1 import engine_service_pb2, rollout_service_pb2, run_service_pb2, trainer_service_pb2

SERVICE_FILES = [rollout_service_pb2, run_service_pb2, trainer_service_pb2, engine_service_pb2]

RPCS = {
    "RolloutService": {
        "SubmitRollout",
        "RunRollout",
        "UpdateRollouts",
        "CancelRollouts",
        "GetRollout",
        "GetGroup",
        "ListRollouts",
        "ExplainRollout",
    },
    "RunService": {"ConfigureRun", "GetRun", "ListRuns", "PauseRun", "ResumeRun", "EndRun", "WatchRun"},
    "TrainerService": {"SetBudget", "GetBudget", "ReportStep", "PublishPolicy", "ConfirmWeights"},
    "EngineService": {"ListEngines", "RegisterEngine", "DrainEngine", "RemoveEngine", "GetServerInfo"},
}


def test_services_offer_these_calls_and_no_others() -> None:
    offered = {
        service.name: {method.name for method in service.methods}
        for file in SERVICE_FILES
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    assert offered == RPCS


def test_everything_is_reachable_from_the_package() -> None:
    for name in v1.__all__:
        assert hasattr(v1, name)
    for service in RPCS:
        assert {f"{service}Stub", f"{service}Servicer", f"add_{service}Servicer_to_server"} <= set(v1.__all__)


@hypothesis.given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_both_token_forms_carry_the_same_ids(ids: list[int]) -> None:
    numbers = v1.RolloutSubmission(token_ids=v1.TokenIds(ids=ids))
    raw = v1.RolloutSubmission(token_bytes=np.asarray(ids, dtype="<u4").tobytes())

    read_numbers = v1.RolloutSubmission.FromString(numbers.SerializeToString())
    read_raw = v1.RolloutSubmission.FromString(raw.SerializeToString())

    assert read_numbers.WhichOneof("prompt") == "token_ids"
    assert read_raw.WhichOneof("prompt") == "token_bytes"
    assert list(read_numbers.token_ids.ids) == ids == np.frombuffer(read_raw.token_bytes, dtype="<u4").tolist()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (v1.RolloutSubmission(), "needed_by_step"),
        (v1.RolloutSubmission(), "min_version"),
        (v1.RolloutSubmission(), "exact_version"),
        (v1.RolloutSubmission(), "max_staleness"),
        (v1.RolloutSubmission(), "max_partial_span"),
        (v1.RolloutDefaults(), "max_staleness"),
        (v1.RunConfig(), "batch_samples"),
        (v1.RunState(), "samples_allowed"),
        (v1.Lineage(), "seed"),
        (v1.Lineage(), "step"),
        (v1.SamplingParams(), "temperature"),
        (v1.SamplingParams(), "top_k"),
        (v1.RolloutUpdate(rollout_id="r"), "deadline_seconds"),
        (v1.Acknowledgement(rollout_id="r"), "reward"),
        (v1.Budget(), "max_running_rollouts"),
        (v1.Budget(), "max_kv_tokens"),
        (v1.ClassQuota(), "max_running_rollouts"),
        (v1.ReportStepRequest(), "samples_needed"),
        (v1.ReportStepRequest(), "policy_entropy"),
        (v1.EndRunRequest(), "trainer_epoch"),
    ],
)
def test_zero_and_absent_differ_where_zero_means_something(message: Message, field: str) -> None:
    assert not message.HasField(field)
    setattr(message, field, 0)
    read = type(message).FromString(message.SerializeToString())
    assert read.HasField(field)


def reachable(descriptor: Descriptor, seen: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """`seen` plus every message reachable from `descriptor`, by full name."""
    if descriptor.full_name not in seen:
        seen[descriptor.full_name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def test_every_answer_about_a_run_says_which_policy_it_reflects() -> None:
    """Exempt are the answers about no run, and the counts and ids of a change that policy has no part in."""
    exempt = {
        "SubmitRolloutResponse",  # its events carry it
        "UpdateRolloutsResponse",
        "CancelRolloutsResponse",
        "GetRolloutResponse",
        "RemoveEngineResponse",
        "GetServerInfoResponse",
    }
    missing = [
        method.output_type.name
        for file in SERVICE_FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.output_type.name not in exempt
        and not any("policy_version" in seen.fields_by_name for seen in reachable(method.output_type, {}).values())
    ]
    assert not missing


def test_fields_that_carry_a_quantity_name_its_unit() -> None:
    """A float is a time, a share, a rate or a score by its name; nothing is left to guess."""
    unitless = {
        # scores, weights and shares
        "score", "share", "kept_share_by_quintile", "diversity_score", "buffer_fill", "reward", "mean_reward", "policy_entropy",
        "fairness_weight",
        "prefix", "critical", "waiting", "diversity", "cost",
        # sampling, whose names are the field's own
        "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "logprobs", "value",
        # Notice: its kind says what the seconds are of
        "seconds",
    }  # fmt: skip
    messages: dict[str, Descriptor] = {}
    for file in SERVICE_FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            reachable(message, messages)
    floats = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
    bare = [
        f"{message.name}.{field.name}"
        for message in messages.values()
        if message.full_name.startswith("rolloutd.")
        for field in message.fields
        if field.type in floats
        and field.name not in unitless
        and not field.name.endswith(("_seconds", "_per_second", "_tokens"))
    ]
    assert not bare
