"""The door: what is refused, naming which field and which limit, and what a known id means."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolloutd.scheduler.actions import Accepted, Finished, Rejected
from rolloutd.scheduler.events import BeginShutdown, CancelRollouts, EndRun, LoseEngine, SubmitRollouts
from rolloutd.scheduler.intake import MAX_SAMPLES, RETRY_AFTER_SECONDS
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.spec import RolloutSpec
from rolloutd.scheduler.states import Code, Outcome, RolloutState, TaskType
from tests.scheduler.kit import (
    BACKGROUND,
    CONSUMER,
    CRITICAL,
    REUSABLE,
    RUN,
    Bench,
    config,
    engine,
    ids,
    prompt,
    spec,
    specs,
)


def only_dispatched(bench: Bench) -> list[str]:
    return [one.rollout_id for one in bench.tick()]


# fields

BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("no id", {"rollout_id": ""}, "rollout_id", "is empty"),
    ("long id", {"rollout_id": "x" * 257}, "rollout_id", "257 characters; the limit is 256"),
    ("no prompt", {"token_bytes": b""}, "prompt", "is empty"),
    ("ragged prompt", {"token_bytes": b"12345"}, "prompt.token_bytes", "5 bytes, not a multiple of 4"),
    ("no text", {"text": "", "token_bytes": b""}, "prompt.text", "is empty"),
    ("no samples", {"samples": 0}, "samples", "is 0; must be 1 to 4096"),
    ("too many samples", {"samples": MAX_SAMPLES + 1}, "samples", "is 4097; must be 1 to 4096"),
    ("seeds", {"samples": 3, "seeds": (1, 2)}, "seeds", "2 entries for 3 samples"),
    ("replay writes", {"task_type": TaskType.REPLAY, "max_new_tokens": 4}, "sampling.max_new_tokens", "is 4; a REPLAY"),
    ("writes nothing", {"max_new_tokens": 0}, "sampling.max_new_tokens", "is 0; must be at least 1"),
    ("deadline", {"deadline_seconds": -1.0}, "deadline_seconds", "is -1.0; must be a finite number"),
    ("deadline nan", {"deadline_seconds": math.nan}, "deadline_seconds", "is nan"),
    ("ttl", {"queue_ttl_seconds": math.inf}, "queue_ttl_seconds", "is inf"),
    ("progress", {"progress_timeout_seconds": -2.0}, "progress_timeout_seconds", "is -2.0"),
    ("group size", {"samples": 4, "group_size": 3}, "group_size", "is 3, smaller than samples (4)"),
    ("own parent", {"parent_rollout_id": "a"}, "parent_rollout_id", "names the rollout itself"),
    ("unknown parent", {"parent_rollout_id": "p"}, "parent_rollout_id", "'p' is not known in run 'run'"),
    (
        "token id",
        {"token_bytes": ids([1, 2, 100_000])},
        "prompt",
        "100000 at position 2 is outside the vocabulary of 100000",
    ),
    ("stop id", {"sampling": {"stop_token_ids": [5, 100_000]}}, "sampling.stop_token_ids", "100000 is outside"),
    ("negative stop id", {"sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids", "-1 is outside"),
    ("bias", {"sampling": {"logit_bias": {"100000": 1.0}}}, "sampling.logit_bias", "100000 is outside"),
    ("top log-probs", {"top_logprobs": 100_001}, "top_logprobs", "more than the vocabulary of 100000"),
]


@pytest.mark.parametrize(
    ("fields", "field", "problem"), [row[1:] for row in BAD_FIELDS], ids=[row[0] for row in BAD_FIELDS]
)
def test_a_bad_field_is_named_with_its_limit(fields: dict[str, Any], field: str, problem: str) -> None:
    bench = Bench(engine())
    wanted = spec(**{"rollout_id": "a", **fields})
    error = bench.rejected(wanted)
    assert error.code is Code.INVALID_ARGUMENT and error.reason == "INVALID_ARGUMENT"
    assert [name for name, _ in error.fields] == [field]
    assert error.message.startswith(f"{field}: ") and problem in error.message
    assert not error.retry_after_seconds and not bench.tick()


def test_the_largest_values_that_are_allowed_pass() -> None:
    bench = Bench(engine())
    answers = bench.submit(
        spec("x" * 256),
        spec("a", token_bytes=ids([99_999])),
        spec("b", samples=4, seeds=(1, 2, 3, 4), group_size=4),
        spec("c", sampling={"stop_token_ids": [0, 99_999], "logit_bias": {"99999": 1.0}}),
        spec("d", task_type=TaskType.REPLAY),
        spec("e", text="?"),
    )
    assert [type(answer) for answer in answers] == [Accepted] * 9


def test_one_empty_prompt_in_a_batch_of_eight_harms_nobody_else() -> None:
    bench = Bench(engine(slots=8))
    batch = specs("r", 8)
    batch[3] = spec("r3", token_bytes=b"")
    answers = bench.submit(*batch)
    assert [answer.rollout_id for answer in answers if isinstance(answer, Rejected)] == ["r3"]
    assert sorted(only_dispatched(bench)) == ["r0", "r1", "r2", "r4", "r5", "r6", "r7"]
    assert "r3" not in bench.its_run().rollouts


# context

CONTEXT = 1024
ROOMY = engine(context_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "accepted"),
    [
        (CONTEXT - 1, 1, True),
        (CONTEXT, 1, False),
        (CONTEXT + 1, 1, False),
        (CONTEXT - 16, 16, True),
        (CONTEXT - 16, 17, False),
        (1, CONTEXT - 1, True),
        (1, CONTEXT, False),
    ],
)
def test_an_over_long_request_is_answered_at_once(prompt_tokens: int, max_new_tokens: int, accepted: bool) -> None:
    bench = Bench(ROOMY)
    (answer,) = bench.submit(spec("a", prompt_tokens, max_new_tokens=max_new_tokens))
    if accepted:
        assert isinstance(answer, Accepted) and only_dispatched(bench) == ["a"]
    else:
        assert isinstance(answer, Rejected) and answer.error.code is Code.INVALID_ARGUMENT
        assert str(CONTEXT) in answer.error.message and not bench.tick()


def test_the_engines_own_prompt_limit_counts() -> None:
    bench = Bench(engine(context_tokens=CONTEXT, max_prompt_tokens=CONTEXT - 6))
    assert "at most 1018" in bench.rejected(spec("a", CONTEXT - 5, max_new_tokens=1)).message
    assert isinstance(bench.submit(spec("b", CONTEXT - 6, max_new_tokens=1))[0], Accepted)


def test_clip_is_the_callers_choice_and_shows_in_the_result() -> None:
    bench = Bench(ROOMY)
    error = bench.rejected(spec("strict", 1000, max_new_tokens=200))
    assert error.fields[0][0] == "sampling.max_new_tokens" and "clip_max_new_tokens" in error.message
    bench.submit(spec("a", 1000, max_new_tokens=200, clip_max_new_tokens=True), spec("b", 1000, max_new_tokens=24))
    assert [one.max_new_tokens for one in bench.tick()] == [24, 24]
    bench.finish("a", 24, "length")
    bench.finish("b", 24, "length")
    assert bench.result("a").clipped and not bench.result("b").clipped


def test_a_prompt_that_fills_the_context_cannot_be_clipped() -> None:
    bench = Bench(ROOMY)
    assert bench.rejected(spec("a", CONTEXT, clip_max_new_tokens=True)).fields[0][0] == "prompt"


def test_the_largest_context_of_the_pool_decides_what_is_accepted() -> None:
    bench = Bench(
        engine("small", context_tokens=64), engine("large", context_tokens=CONTEXT), engine("other", pool="reward")
    )
    assert isinstance(bench.submit(spec("a", 100))[0], Accepted)
    assert [one.engine_id for one in bench.tick()] == ["large"]
    assert isinstance(bench.submit(spec("b", CONTEXT))[0], Rejected)


def test_an_engine_that_does_not_say_its_context_is_not_taken_for_small() -> None:
    bench = Bench(engine("small", context_tokens=64), engine("silent", context_tokens=0))
    assert isinstance(bench.submit(spec("a", 100))[0], Accepted)
    assert [one.engine_id for one in bench.tick()] == ["silent"]


# what an id means


def test_the_same_payload_attaches_and_runs_once() -> None:
    bench = Bench(engine())
    bench.submit(spec("a", deadline_seconds=50.0))
    assert only_dispatched(bench) == ["a"]
    bench.now += 5.0
    (again,) = bench.submit(spec("a", deadline_seconds=45.0))  # the time that is left differs, the request does not
    assert isinstance(again, Accepted) and again.attached and again.state is RolloutState.DISPATCHED
    assert not bench.tick()
    bench.finish("a")
    (late,) = bench.submit(spec("a"))
    assert isinstance(late, Accepted) and late.attached and late.state is RolloutState.FINISHED
    bench.acknowledge("a")
    assert bench.rejected(spec("a")).reason == "ALREADY_DELIVERED"
    bench.quiet()


@pytest.mark.parametrize(
    "change",
    [
        {"token_bytes": prompt("other")},
        {"max_new_tokens": 17},
        {"sampling": {"temperature": 0.5}},
        {"rollout_class": BACKGROUND},
        {"samples": 2},
    ],
)
def test_a_different_payload_under_a_known_id_is_a_conflict(change: dict[str, Any]) -> None:
    bench = Bench(engine())
    bench.submit(spec("a"), spec("many", samples=2))
    for rollout_id in ("a", "many"):
        if change == {"samples": 2} and rollout_id == "many":
            continue
        error = bench.rejected(spec(rollout_id, **{"samples": 2 if rollout_id == "many" else 1, **change}))
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "ALREADY_EXISTS")
        assert rollout_id in error.message
    assert len(bench.its_run().rollouts) == 3


def test_the_same_id_twice_in_one_message_is_one_rollout() -> None:
    bench = Bench(engine())
    first, second = bench.submit(spec("a"), spec("a"))
    assert isinstance(first, Accepted) and isinstance(second, Accepted) and second.attached
    assert only_dispatched(bench) == ["a"]


@pytest.mark.parametrize("order", ["own id first", "samples first"])
def test_members_of_a_sampled_submission_never_shadow_an_id_of_the_user(order: str) -> None:
    bench = Bench(engine(slots=8))
    own, sampled = spec("x/0"), spec("x", samples=3)
    first, second = (own, sampled) if order == "own id first" else (sampled, own)
    bench.submit(first)
    assert bench.rejected(second).reason == "ALREADY_EXISTS"
    assert len(bench.its_run().rollouts) == first.samples


def test_samples_become_a_group_with_a_seed_each() -> None:
    bench = Bench(engine(slots=4))
    bench.submit(spec("x", samples=3, seeds=(7, 8, 9)))
    started = bench.tick()
    assert {one.rollout_id: one.sampling["sampling_seed"] for one in started} == {"x/0": 7, "x/1": 8, "x/2": 9}
    assert bench.view("x/1").group_id == "x" and bench.view("x/2").sample_index == 2


def test_another_consumer_that_repeats_a_finished_rollout_gets_its_result_too() -> None:
    bench = Bench(engine())
    bench.run(spec("a"))
    bench.finish("a")
    bench.do(attach := attach_of("rank-1"))
    bench.submit(spec("a"), consumer=attach.consumer_id)
    assert [event.result.rollout_id for event in bench.heard(Finished, "rank-1")] == ["a"]


def attach_of(consumer: str) -> Any:
    from rolloutd.scheduler.events import AttachConsumer

    return AttachConsumer(RUN, consumer)


# room


def test_queue_full_by_items_says_when_to_retry_and_leaves_other_classes_alone() -> None:
    bench = Bench(engine(), settings=config(queue={"queue_capacity": 4}))
    bench.budget(max_rollouts=0)
    bench.submit(*specs("r", 3))
    error = bench.rejected(spec("x", samples=2))
    assert (error.code, error.reason, error.retry_after_seconds) == (
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        RETRY_AFTER_SECONDS,
    )
    assert "holds 3 rollouts" in error.message and "limits are 4" in error.message
    assert isinstance(bench.submit(spec("r3"))[0], Accepted)
    assert bench.rejected(spec("r4")).reason == "QUEUE_FULL"
    assert isinstance(bench.submit(spec("b0", rollout_class=BACKGROUND))[0], Accepted)
    bench.cancel("r0")
    assert isinstance(bench.submit(spec("r4"))[0], Accepted)


@pytest.mark.parametrize("form", ["tokens", "text"])
def test_queue_full_by_bytes(form: str) -> None:
    bench = Bench(engine(), settings=config(queue={"queue_capacity_bytes": 1000}))
    bench.budget(max_rollouts=0)

    def of_400_bytes(name: str) -> RolloutSpec:
        return spec(name, 100) if form == "tokens" else spec(name, text="t" * 400)

    bench.submit(of_400_bytes("a"), of_400_bytes("b"))
    error = bench.rejected(of_400_bytes("c"))
    assert error.reason == "QUEUE_FULL" and "800 bytes" in error.message and "1000" in error.message
    bench.cancel("a")
    assert isinstance(bench.submit(of_400_bytes("c"))[0], Accepted)
    bench.cancel("b", "c")
    bench.quiet()


def test_the_run_decides_the_class_where_the_rollout_does_not() -> None:
    bench = Bench(engine())
    bench.configure(default_class=REUSABLE)
    bench.submit(spec("a", rollout_class=None), spec("b", rollout_class=CRITICAL))
    assert (bench.view("a").rollout_class, bench.view("b").rollout_class) == (REUSABLE, CRITICAL)


# levels and shortages


def test_what_can_never_fit_is_refused_and_a_passing_shortage_waits() -> None:
    bench = Bench(engine(slots=4, kv_capacity_tokens=4096))
    bench.budget(max_kv_tokens=100)
    error = bench.rejected(spec("a", 85))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "BUDGET_TOO_SMALL")
    assert "need 101 KV tokens" in error.message and "100" in error.message
    assert isinstance(bench.submit(spec("b", 84))[0], Accepted)
    bench.budget(max_kv_tokens=0)  # a pause
    assert isinstance(bench.submit(spec("c", 85))[0], Accepted)
    bench.budget(max_kv_tokens=100, lease_seconds=30.0)  # a lease that will lift
    assert isinstance(bench.submit(spec("d", 85))[0], Accepted)
    assert sorted(only_dispatched(bench)) == ["b"]
    bench.tick(31.0)
    assert sorted(bench.live) == ["b", "c", "d"]


def test_what_is_larger_than_every_engines_memory_is_refused() -> None:
    bench = Bench(engine("e0", kv_capacity_tokens=512), engine("e1", kv_capacity_tokens=1024))
    error = bench.rejected(spec("a", 1009))
    assert error.reason == "BUDGET_TOO_SMALL" and "need 1025 KV tokens" in error.message and "1024" in error.message
    assert isinstance(bench.submit(spec("b", 1008))[0], Accepted)
    assert [one.engine_id for one in bench.tick()] == ["e1"]


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_a_level_counts_whole_pages_so_what_is_accepted_can_start(page_tokens: int) -> None:
    bench = Bench(engine(page_tokens=page_tokens))
    bench.budget(max_kv_tokens=100)
    answers = bench.submit(*[spec(f"a{size}", size, max_new_tokens=8) for size in (40, 56, 72, 88, 92)])
    accepted = [answer.rollout_id for answer in answers if isinstance(answer, Accepted)]
    assert accepted and (page_tokens > 1) == (len(accepted) < 5)
    for _ in accepted:
        bench.tick()
        for running in list(bench.live):
            bench.finish(running, 8)
    assert bench.ended == set(accepted)


def test_a_memory_budget_that_no_engine_can_serve_within_is_too_small() -> None:
    bench = Bench(engine(kv_capacity_tokens=1024, kv_cache_bytes=1024 << 20))  # a token is a MiB
    bench.budget(max_inference_mb=100)
    error = bench.rejected(spec("a", 85))
    assert error.reason == "BUDGET_TOO_SMALL" and "100" in error.message
    assert isinstance(bench.submit(spec("b", 84))[0], Accepted)
    bench.budget(max_inference_mb=0)
    assert isinstance(bench.submit(spec("c", 85))[0], Accepted)


# no engine


def test_without_an_engine_it_waits_and_with_fail_fast_it_is_told_at_once() -> None:
    bench = Bench()
    error = bench.rejected(spec("a", fail_fast=True))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_ENGINE") and error.retry_after_seconds > 0.0
    bench.submit(spec("b", queue_ttl_seconds=30.0))
    bench.pass_time(31.0)
    assert bench.outcome("b") is Outcome.NO_ENGINE


def test_fail_fast_looks_at_pool_labels_and_readiness() -> None:
    bench = Bench(engine(labels={"gpu": "h100"}))
    assert bench.rejected(spec("a", pool="reward", fail_fast=True)).reason == "NO_ENGINE"
    assert bench.rejected(spec("b", engine_labels={"gpu": "a100"}, fail_fast=True)).reason == "NO_ENGINE"
    assert isinstance(bench.submit(spec("c", engine_labels={"gpu": "h100"}, fail_fast=True))[0], Accepted)
    bench.do(LoseEngine("e0", "gone"))
    assert "ready" in bench.rejected(spec("d", fail_fast=True)).message


def test_nothing_is_accepted_by_a_run_that_ended_or_a_server_that_shuts_down() -> None:
    bench = Bench(engine())
    bench.submit(spec("a"))
    bench.do(EndRun(RUN))
    assert bench.outcome("a") is Outcome.RUN_ENDED
    assert bench.rejected(spec("b")).reason == "RUN_ENDED"
    bench.do(BeginShutdown(5.0))
    bench.do(attach_to_other := SubmitRollouts("other", CONSUMER, (spec("c"),)))
    assert not attach_to_other.epoch and not bench.its_run("other").rollouts


def test_a_refused_event_leaves_no_run_behind() -> None:
    bench = Bench(engine())
    refusals: list[Refusal] = []
    from rolloutd.scheduler.events import ConfigureRun, ReportStep, SetBudget
    from rolloutd.scheduler.spec import Budget, RunSettings, StepReport
    from rolloutd.scheduler.states import TrainerState

    refusals.append(bench.refused(ConfigureRun("new", RunSettings(fairness_weight=0.0))))
    refusals.append(bench.refused(SetBudget("new", Budget(max_rollouts=-1))))
    refusals.append(bench.refused(ReportStep("new", StepReport(-1, TrainerState.TRAINING))))
    assert all(refusal.message for refusal in refusals)
    assert bench.core.run_view("new", bench.now) is None
    assert bench.refused(CancelRollouts("new", ("a",))).reason == "RUN_NOT_FOUND"
    assert bench.refused(ConfigureRun("", RunSettings())).fields == (("run_id", "is empty"),)


# trees


def tree(bench: Bench) -> None:
    """root -> two nodes -> two leaves each; everything runs."""
    bench.run(spec("root"))
    bench.run(*[spec(f"n{index}", parent_rollout_id="root") for index in range(2)])
    bench.run(*[spec(f"n{node}l{leaf}", parent_rollout_id=f"n{node}") for node in range(2) for leaf in range(2)])


def test_cancelling_a_parent_cancels_its_subtree() -> None:
    bench = Bench(engine(slots=8))
    tree(bench)
    bench.cancel("n0")
    assert bench.leaving() == {"n0", "n0l0", "n0l1"}
    bench.cancel("root")
    assert bench.leaving() == {"root", "n0", "n0l0", "n0l1", "n1", "n1l0", "n1l1"}
    bench.stop_aborted()
    bench.quiet()


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_subtree_can_be_cancelled_after_its_root_and_nodes_were_delivered(acknowledged: bool) -> None:
    bench = Bench(engine(slots=8))
    tree(bench)
    for rollout_id in ("n0", "root", "n1"):
        bench.finish(rollout_id)
        if acknowledged:
            bench.acknowledge(rollout_id)
    bench.cancel("root")
    assert bench.leaving() == {"n0l0", "n0l1", "n1l0", "n1l1"}
    bench.stop_aborted()
    bench.acknowledge(*bench.ended)
    assert not bench.its_run().rollouts


def test_a_leaf_that_arrives_after_its_subtree_was_cancelled_is_cancelled_too() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("root"))
    bench.cancel("root")
    bench.stop_aborted()
    (answer,) = bench.submit(spec("leaf", parent_rollout_id="root"))
    assert isinstance(answer, Accepted)
    assert bench.outcome("leaf") is Outcome.CANCELLED and not bench.tick()


def test_a_leaf_is_cancelled_at_once_while_an_engine_still_stops_its_cancelled_parent() -> None:
    bench = Bench(engine(slots=8))
    bench.run(spec("root"))
    bench.cancel("root")
    bench.submit(spec("leaf", parent_rollout_id="root"))
    assert bench.state("root") is RolloutState.ABORTING and bench.outcome("leaf") is Outcome.CANCELLED
    bench.stop_aborted()
    bench.quiet()


# cancelling by name


@pytest.mark.parametrize("group_id", ["", "mine"])
def test_a_sampled_submission_is_cancelled_under_its_own_id(group_id: str) -> None:
    bench = Bench(engine(slots=8))
    bench.submit(spec("x", samples=3, group_id=group_id), spec("y", group_id=group_id))
    bench.cancel("x")
    assert bench.ended == {"x/0", "x/1", "x/2"}


def test_a_group_is_cancelled_as_a_whole_and_unknown_names_are_ignored() -> None:
    bench = Bench(engine(slots=8))
    bench.submit(spec("a", group_id="g"), spec("b", group_id="g"), spec("c"))
    bench.cancel("nobody", groups=("g", "no-group"))
    assert bench.ended == {"a", "b"}


def test_ids_of_a_tree_are_forgotten_with_its_last_leaf() -> None:
    bench = Bench(engine(slots=8))
    tree(bench)
    for rollout_id in ("root", "n0", "n1", "n0l0", "n0l1", "n1l0"):
        bench.finish(rollout_id)
        bench.acknowledge(rollout_id)
        assert len(bench.its_run().family)
    bench.finish("n1l1")
    bench.acknowledge("n1l1")
    assert not len(bench.its_run().family)
