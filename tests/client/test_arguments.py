"""Prompts, options and words: what can be said reaches the contract, what cannot is named."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import numpy as np
import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import words
from rolloutd.client.prompts import token_bytes
from rolloutd.client.results import RolloutResult
from rolloutd.client.submissions import OPTION_NAMES, RolloutOptions, member_ids, submission_of

OPTIONS: dict[str, tuple[Any, Any]] = {  # option: value given, value on the wire
    "max_new_tokens": (7, 7),
    "min_new_tokens": (0, 0),
    "temperature": (0.0, 0.0),
    "top_p": (0.5, 0.5),
    "top_k": (-1, -1),
    "min_p": (0.25, 0.25),
    "frequency_penalty": (1.0, 1.0),
    "presence_penalty": (-1.0, -1.0),
    "repetition_penalty": (1.5, 1.5),
    "stop": (["a"], ["a"]),
    "stop_token_ids": ((1, 2), [1, 2]),
    "stop_regex": (["x+"], ["x+"]),
    "ignore_eos": (True, True),
    "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False),
    "no_stop_trim": (True, True),
    "logit_bias": ({5: 1.0}, {5: 1.0}),
    "json_schema": ({"type": "object"}, '{"type": "object"}'),
    "regex": ("a*", "a*"),
    "ebnf": ("root ::= x", "root ::= x"),
    "structural_tag": ('{"a": 1}', '{"a": 1}'),
    "custom_params": ({"k": 1}, {"k": 1.0}),
    "rollout_id": ("id", "id"),
    "rollout_class": ("background", v1.ROLLOUT_CLASS_BACKGROUND),
    "task_type": ("state_query", v1.TASK_TYPE_STATE_QUERY),
    "pool": ("reward", "reward"),
    "engine_labels": ({"gpu": "h100"}, {"gpu": "h100"}),
    "group_id": ("g", "g"),
    "group_size": (3, 3),
    "group_keep": (2, 2),
    "session_id": ("s", "s"),
    "turn": (2, 2),
    "parent_rollout_id": ("p", "p"),
    "stratum": ("math", "math"),
    "origin": ("evaluation", v1.ORIGIN_EVALUATION),
    "needed_by_step": (0, 0),
    "deadline_seconds": (1.5, 1.5),
    "queue_ttl_seconds": (2.5, 2.5),
    "progress_timeout_seconds": (3.5, 3.5),
    "max_attempts": (4, 4),
    "on_preempt": ("restart", v1.ON_PREEMPT_RESTART),
    "fail_fast": (True, True),
    "clip_max_new_tokens": (True, True),
    "logprobs": (True, True),
    "top_logprobs": (5, 5),
    "seeds": ([1, 2**63 - 1], [1, 2**63 - 1]),
    "engine_params": ({"return_hidden_states": True}, {"return_hidden_states": True}),
    "samples": (2, 2),
    "min_version": (0, 0),
    "exact_version": (0, 0),
    "max_staleness": (-1, -1),
    "max_partial_span": (0, 0),
}


def plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else list(value) if hasattr(value, "extend") else value


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_reaches_its_field(name: str) -> None:
    given, sent = OPTIONS[name]
    submission = submission_of([1], {name: given})  # type: ignore[misc]
    message: Any = submission.sampling if name in v1.SamplingParams.DESCRIPTOR.fields_by_name else submission
    assert plain(getattr(message, name)) == sent
    if message.DESCRIPTOR.fields_by_name[name].has_presence:
        assert message.HasField(name)


def test_every_field_of_the_contract_has_its_option() -> None:
    fields = set(v1.RolloutSubmission.DESCRIPTOR.fields_by_name) | set(v1.SamplingParams.DESCRIPTOR.fields_by_name)
    said_otherwise = {"token_ids", "token_bytes", "text", "want_progress", "sampling"}
    assert OPTION_NAMES == fields - said_otherwise == OPTIONS.keys()


def test_what_is_left_out_is_not_sent() -> None:
    submission = submission_of([1], {"max_new_tokens": 4, "temperature": None})  # type: ignore[typeddict-item]
    assert submission.sampling == v1.SamplingParams(max_new_tokens=4)
    assert {field.name for field, _ in submission.ListFields()} == {"rollout_id", "token_bytes", "sampling"}
    assert submission_of([1], {}).rollout_id != submission_of([1], {}).rollout_id
    assert not submission_of([1], {"task_type": "replay"}).HasField("sampling")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 4}, TypeError, "unknown argument 'max_tokens'"),
        ({"temprature": 1.0}, TypeError, "did you mean 'temperature'"),
        ({"max_new_tokens": "4"}, TypeError, "max_new_tokens='4'"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens=-1"),
        ({"stop": "END"}, TypeError, "stop='END'"),
        ({"rollout_class": "urgent"}, ValueError, "must be one of 'critical', 'reusable', 'background'"),
        ({"engine_params": {"x": object()}}, ValueError, "engine_params="),
    ],
)
def test_what_cannot_be_sent_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        submission_of([1], options)  # type: ignore[arg-type]


def test_members_are_named_by_sample() -> None:
    assert member_ids(submission_of([1], {"rollout_id": "a"})) == ("a",)
    assert member_ids(submission_of([1], RolloutOptions(rollout_id="a", samples=1))) == ("a",)
    assert member_ids(submission_of([1], RolloutOptions(rollout_id="a", samples=3))) == ("a/0", "a/1", "a/2")


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2**32 - 1],
        (1, 2**32 - 1),
        np.array([1, 2**32 - 1]),
        np.array([1, 2**32 - 1], ">u4"),
        b"\1\0\0\0\xff\xff\xff\xff",
    ],
)
def test_prompts_in_any_form(prompt: Any) -> None:
    assert token_bytes(prompt) == b"\1\0\0\0\xff\xff\xff\xff"
    assert submission_of(prompt, {}).WhichOneof("prompt") == "token_bytes"


def test_text_prompts_and_strided_arrays() -> None:
    assert submission_of("hello", {}).text == "hello"
    assert token_bytes(np.arange(6, dtype=np.uint32)[::2]) == np.array([0, 2, 4], "<u4").tobytes()
    assert submission_of([], {}).WhichOneof("prompt") == "token_bytes"  # the server says what is wrong with it


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, -1], ValueError, r"prompt\[1\] is -1"),
        ([1, 2**32], ValueError, r"prompt\[1\] is 4294967296"),
        (np.array([1, -5]), ValueError, r"prompt\[1\] is -5"),
        (np.zeros((2, 2), np.uint32), TypeError, "one-dimensional"),
        (np.zeros(2, np.float32), TypeError, "integer type"),
        ([1.5], TypeError, "sequence of token ids"),
        (7, TypeError, "sequence of token ids"),
        (b"\1\2\3", ValueError, "4 bytes a token"),
    ],
)
def test_prompts_that_cannot_be_sent(prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        token_bytes(prompt)


@pytest.mark.parametrize(
    ("enum", "literal"),
    [
        (v1.RolloutClass, words.RolloutClass),
        (v1.TaskType, words.TaskType),
        (v1.Origin, words.Origin),
        (v1.OnPreempt, words.OnPreempt),
        (v1.OnDisconnect, words.OnDisconnect),
        (v1.OnStale, words.OnStale),
        (v1.ReleaseMemory, words.ReleaseMemory),
        (v1.TrainerState, words.TrainerState),
        (v1.RolloutState, words.RolloutState),
        (v1.NoticeKind, words.NoticeKind),
        (v1.FinishReason, words.FinishReason),
        (v1.Outcome, words.Outcome),
        (v1.UpdateMode, words.UpdateMode),
        (v1.CacheHandling, words.CacheHandling),
        (v1.UpdateState, words.UpdateState),
    ],
)
def test_words_are_those_of_the_contract(enum: Any, literal: Any) -> None:
    given = {words.word_of(enum, number) for number in enum.values() if number}
    assert given == set(get_args(literal)) - {"refused"}
    assert words.word_of(enum, 0) == "" and words.word_of(enum, 99) == ""
    for word in given:
        assert words.word_of(enum, words.number_of(enum, word, "argument")) == word


def test_a_result_is_a_view_of_what_arrived() -> None:
    message = v1.RolloutResult(
        rollout_id="x",
        run_id="r",
        outcome=v1.OUTCOME_COMPLETED,
        complete=True,
        token_bytes=np.array([5, 6], "<u4").tobytes(),
        logprob_bytes=np.array([-0.5, -1.5], "<f4").tobytes(),
        top_logprobs=[v1.TopLogprobs(token_ids=[5, 9], logprobs=[-0.5, -2.0])],
        finish_reason=v1.FINISH_REASON_STOP,
        matched_token_id=0,
        spans=[v1.Span(policy_version=3, engine_version="3", start=0, end=2, engine_id="e", attempt=1)],
        step=0,
        task_type=v1.TASK_TYPE_GENERATION,
        rollout_class=v1.ROLLOUT_CLASS_CRITICAL,
        prompt_logprob_bytes=np.array([np.nan, -1.0], "<f4").tobytes(),
        times=v1.Times(queued_seconds=1.0, total_seconds=2.0),
        policy_version=5,
        stale=True,
        history=[
            v1.Attempt(number=1, engine_id="e", batch_id="4", policy_version=3, ended_seconds=2.0, end="stop"),
        ],
    )
    message.extras.update({"routed_experts": [1, 2]})
    result = RolloutResult.from_message(message)
    assert result.tokens.tolist() == [5, 6] and not result.tokens.flags.writeable and not result.tokens.flags.owndata
    assert result.logprobs.dtype == np.float32 and result.logprobs.tolist() == [-0.5, -1.5]
    assert result.top_logprobs[0][0].tolist() == [5, 9]
    assert (result.step, result.matched_stop, result.finish_reason) == (0, 0, "stop")
    assert result.spans == (rolloutd.client.Span(3, "3", 0, 2, "e", 1),)
    assert np.isnan(result.prompt_logprobs[0]) and result.extras == {"routed_experts": [1.0, 2.0]}
    assert result.times == rolloutd.client.Times(queued_seconds=1.0, total_seconds=2.0)
    assert (result.policy_version, result.staleness, result.stale) == (5, 2, True)
    assert result.history == (rolloutd.client.Attempt(1, "e", "4", 3, 0.0, 2.0, 0, "stop"),)
    bare = RolloutResult.from_message(
        v1.RolloutResult(outcome=v1.OUTCOME_CANCELLED, error=v1.Error(code=1, reason="CANCELLED"))
    )
    assert bare.staleness == 0 and bare.history == ()
    assert (bare.step, bare.matched_stop, bare.finish_reason, bare.extras, len(bare.tokens)) == (
        None,
        None,
        None,
        None,
        0,
    )
    with pytest.raises(rolloutd.client.RolloutFailed, match="cancelled"):
        bare.raise_for_outcome()


def test_the_public_names() -> None:
    imported = {
        name
        for name, value in vars(rolloutd.client).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(rolloutd.client.__all__)
    for error in (rolloutd.client.ServerUnavailable, rolloutd.client.Fenced, rolloutd.client.Refused):
        assert issubclass(error, rolloutd.client.RolloutdError)
