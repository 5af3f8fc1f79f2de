"""Lineage: GetRollout and the file say the same of every end, and groups say how complete they are."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.json_format import Parse

from rolloutd.engines.base import AttemptRequest, FaultKind, Slice
from rolloutd.scheduler.actions import Undelivered
from rolloutd.scheduler.refusal import Refusal
from rolloutd.scheduler.result import AttemptRecord, Span
from rolloutd.scheduler.states import Code, Gate, Origin, Outcome, RolloutClass, RolloutState, TaskType
from rolloutd.scheduler.views import GroupView, RolloutView
from rolloutd.server.cli import main
from rolloutd.server.config import JsonLinesSettings
from rolloutd.server.config_keys import ConfigError
from rolloutd.server.lineage_log import line_of
from rolloutd.server.lineage_report import report
from rolloutd.server.translate_lineage import to_group, to_lineage
from rolloutd.v1 import (
    GROUP_STATE_COMPLETE,
    GROUP_STATE_PARTIAL,
    GROUP_STATE_PENDING,
    NOTICE_KIND_VERSION_PUBLISHED,
    ON_STALE_FLAG,
    ON_STALE_WITHHOLD,
    ORIGIN_EXPLORATION,
    OUTCOME_CANCELLED,
    OUTCOME_COMPLETED,
    OUTCOME_ENGINE_REFUSED,
    OUTCOME_STALE,
    OUTCOME_VERSION_UNMET,
    UPDATE_MODE_DRAIN,
    UPDATE_MODE_IN_PLACE,
    UPDATE_STATE_CLEARING,
    Acknowledgement,
    CancelRolloutsRequest,
    ConfigureRunRequest,
    GetGroupRequest,
    GetRolloutRequest,
    GetRunRequest,
    Group,
    Lineage,
    LineageRecord,
    RolloutDefaults,
    RunConfig,
)
from tests.server.fake_door import FakeDoor
from tests.server.harness import Rig, refused, running_server, submission, until
from tests.server.test_publish import Watch, disk
from tests.server.test_translate import _result


def _records(path: Path) -> tuple[dict[str, Lineage], dict[str, Group]]:
    """Rollouts and groups of a file by id; none is there twice."""
    rollouts: dict[str, Lineage] = {}
    groups: dict[str, Group] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = Parse(line, LineageRecord())
        if record.HasField("rollout"):
            assert record.rollout.rollout_id not in rollouts
            rollouts[record.rollout.rollout_id] = record.rollout
        else:
            assert record.group.group_id not in groups
            groups[record.group.group_id] = record.group
    return rollouts, groups


def _logging(path: Path, **changes: Any) -> Any:
    return running_server(lineage=JsonLinesSettings(path=str(path)), **changes)


async def _asked(rig: Rig, rollout_id: str) -> Lineage:
    answer = await rig.rollouts.GetRollout(GetRolloutRequest(run_id="run", rollout_id=rollout_id))
    assert answer.HasField("lineage")
    return answer.lineage


def _without_group(lineage: Lineage) -> Lineage:
    copy = Lineage()
    copy.CopyFrom(lineage)
    copy.ClearField("group")
    return copy


async def test_get_rollout_and_the_file_say_the_same_of_every_end(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    async with _logging(path, auto=False) as rig, rig.stream() as stream:
        await stream.submit(
            submission("whole", samples=2, seeds=[5, 6], needed_by_step=0, stratum="math", origin=ORIGIN_EXPLORATION),
            submission("broken", max_new_tokens=7, group_id="pair", group_size=2, session_id="talk", turn=3),
            submission("cut", max_new_tokens=9),
        )
        requests = {request.max_new_tokens: request for request in await rig.door.wait_running(3)}
        assert not (await rig.rollouts.GetRollout(GetRolloutRequest(run_id="run", rollout_id="cut"))).HasField(
            "lineage"
        )
        await rig.rollouts.CancelRollouts(CancelRolloutsRequest(run_id="run", rollout_ids=["cut"]))
        rig.door.fail(requests[7], FaultKind.REFUSED)
        rig.door.finish_all()
        rig.door.auto = True
        ended = {result.rollout_id: result for result in await stream.finished(4)}
        asked = {rollout_id: await _asked(rig, rollout_id) for rollout_id in ended}
        await rig.server.stop()
    written, groups = _records(path)
    assert written.keys() == asked.keys() == {"whole/0", "whole/1", "broken", "cut"}
    for rollout_id, lineage in asked.items():
        assert _without_group(written[rollout_id]) == _without_group(lineage)
        result = ended[rollout_id]
        for field in {*result.DESCRIPTOR.fields_by_name} & {*lineage.DESCRIPTOR.fields_by_name}:
            assert getattr(lineage, field) == getattr(result, field), field
    whole = asked["whole/1"]
    assert (whole.seed, whole.stratum, whole.origin, whole.step) == (6, "math", ORIGIN_EXPLORATION, 0)
    assert whole.group.state == GROUP_STATE_COMPLETE and not whole.group.rollout_ids
    assert (list(whole.engine_ids), whole.HasField("step")) == (["engine-0:1"], True)
    assert abs(whole.accepted_unix_seconds - path.stat().st_mtime) < 60.0
    assert [written[name].outcome for name in ("whole/0", "broken", "cut")] == [
        OUTCOME_COMPLETED,
        OUTCOME_ENGINE_REFUSED,
        OUTCOME_CANCELLED,
    ]
    assert written["broken"].error.reason == ended["broken"].error.reason
    assert written["broken"].group.state == GROUP_STATE_PARTIAL and not written["broken"].group.done
    assert not written["cut"].HasField("group") and not written["cut"].HasField("seed")
    assert list(groups) == ["whole"]  # one member of the other was never submitted
    assert groups["whole"].done and list(groups["whole"].rollout_ids) == ["whole/0", "whole/1"]


async def test_every_attempt_is_in_the_history(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    async with _logging(path, auto=False, engines=["http://a:1", "http://b:1"]) as rig, rig.stream() as stream:
        await stream.submit(submission("r", max_new_tokens=8))
        await until(lambda: any(door.running for door in rig.doors.values()))
        first, second = sorted(rig.doors.values(), key=lambda door: not door.running)
        (request,) = await first.wait_running(1)
        first.report(request, 3)
        first.fail(request, FaultKind.UNREACHED)
        (request,) = await second.wait_running(1)
        second.finish(request)
        (result,) = await stream.finished(1)
        asked = await _asked(rig, "r")
        await rig.server.stop()
    written, _ = _records(path)
    assert written["r"] == asked
    engines = [door.url.removeprefix("http://") for door in (first, second)]
    assert [(one.number, one.engine_id, one.end) for one in result.history] == [
        (1, engines[0], "unreached"),
        (2, engines[1], "length"),
    ]
    assert (result.history[1].generated_tokens, result.attempts) == (8, 2)
    assert 0.0 <= result.history[0].started_seconds <= result.history[0].ended_seconds <= result.times.total_seconds
    assert (list(asked.engine_ids), list(asked.batch_ids)) == (engines, ["1", "2"])
    assert list(asked.history) == list(result.history)


async def test_a_version_that_nobody_holds_is_waited_for_or_refused() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("now", min_version=1, fail_fast=True))
        rejected = await stream.next("rejected")
        assert (rejected.error.reason, rejected.error.code) == ("POLICY_VERSION_UNMET", Code.UNAVAILABLE)
        assert rejected.error.retry_after_seconds > 0
        await stream.submit(submission("later", exact_version=1, queue_ttl_seconds=0.05), submission("any"))
        ended = {result.rollout_id: result for result in await stream.finished(2)}
        assert [ended[name].outcome for name in ("any", "later")] == [OUTCOME_COMPLETED, OUTCOME_VERSION_UNMET]
        (span,) = ended["any"].spans
        assert (span.policy_version, span.engine_version, span.start, span.end) == (0, "default", 0, 2)


class MixedDoor(FakeDoor):
    """The first three tokens are of the weights as registered, the others of those that it holds at the end."""

    def slice_of(self, request: AttemptRequest, count: int | None = None) -> Slice:
        written = super().slice_of(request, count)
        spans = (("default", 0, 3), (self.version, 3, len(written.token_bytes) // 4))
        return msgspec.structs.replace(written, version_spans=spans)


async def test_a_result_of_two_policies_names_both(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    async with (
        _logging(path, make_door=lambda settings: MixedDoor(settings.url, auto=False)) as rig,
        rig.stream() as stream,
    ):
        await stream.submit(submission("r", max_new_tokens=8))
        (request,) = await rig.door.wait_running(1)
        rig.door.report(request, 3)
        await Watch(rig, disk(4, mode=UPDATE_MODE_IN_PLACE)).end()
        assert (await stream.next("notice")).kind == NOTICE_KIND_VERSION_PUBLISHED
        rig.door.finish(request)
        (result,) = await stream.finished(1)
        asked = await _asked(rig, "r")
        await rig.server.stop()
    written, _ = _records(path)
    assert written["r"] == asked
    assert [(span.policy_version, span.engine_version, span.start, span.end) for span in result.spans] == [
        (0, "default", 0, 3),
        (4, "4", 3, 8),
    ]
    assert (result.policy_version, asked.staleness_versions, result.stale) == (4, 4, False)
    assert result.history[0].policy_version == 0


async def test_versions_may_be_as_far_apart_as_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    newest = 2**63 - 1
    async with (
        _logging(path, make_door=lambda settings: MixedDoor(settings.url, auto=False)) as rig,
        rig.stream() as stream,
    ):
        await stream.submit(submission("r", max_new_tokens=8))
        (request,) = await rig.door.wait_running(1)
        rig.door.report(request, 3)
        await Watch(rig, disk(newest, mode=UPDATE_MODE_IN_PLACE)).end()
        assert (await stream.next("notice")).kind == NOTICE_KIND_VERSION_PUBLISHED
        rig.door.finish(request)
        (result,) = await stream.finished(1)
        asked = await _asked(rig, "r")
        await rig.server.stop()
    written, _ = _records(path)
    assert written["r"] == asked
    assert [span.policy_version for span in result.spans] == [0, newest]
    assert (result.policy_version, asked.staleness_versions) == (newest, newest)


@pytest.mark.parametrize("on_stale", [ON_STALE_WITHHOLD, ON_STALE_FLAG])
async def test_what_is_too_old_when_it_is_done_is_withheld_or_flagged(on_stale: Any) -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        config = RunConfig(on_stale=on_stale, defaults=RolloutDefaults(max_staleness=0))
        await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=config))
        await stream.submit(submission("r", max_new_tokens=8, logprobs=True))
        (request,) = await rig.door.wait_running(1)
        watch = Watch(rig, disk(1, mode=UPDATE_MODE_DRAIN))
        await watch.until(UPDATE_STATE_CLEARING)
        rig.door.finish(request)
        (result,) = await stream.finished(1)
        asked = await _asked(rig, "r")
        await watch.end()
        run = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run
    flagged = on_stale == ON_STALE_FLAG
    assert result.outcome == (OUTCOME_COMPLETED if flagged else OUTCOME_STALE)
    assert (result.stale, result.complete, len(result.token_bytes)) == (True, flagged, 32 if flagged else 0)
    assert (asked.stale, asked.staleness_versions, asked.generated_tokens) == (True, 1, 8)
    assert [(span.policy_version, span.end) for span in asked.spans] == [(0, 8)]
    assert (asked.error.reason, run.state.stale_results) == ("" if flagged else "STALE", 1)
    assert dict(run.state.policy_versions) == {"policy": 1}


async def test_an_end_without_anybody_connected_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    seen: list[object] = []
    async with _logging(path, auto=False) as rig:
        async with rig.stream() as stream:
            await stream.submit(submission("late", samples=2))
            await stream.next("accepted")
            await rig.door.wait_running(1)
        await until(lambda: not rig.server.loop.outboxes())
        rig.server.loop.observers.append(lambda _, result: seen.extend(result))
        rig.door.auto = True
        rig.door.finish_all()
        await until(lambda: sum(isinstance(action, Undelivered) for action in seen) == 3)  # two results and their group
        async with rig.stream() as stream:
            await stream.finished(2)  # delivered now
        labels = {"outcome": "completed", "rollout_class": "critical", "task_type": "generation"}
        assert rig.server.metrics.registry.get_sample_value("rolloutd_rollouts_finished_total", labels) == 2.0
        await rig.server.stop()
    rollouts, groups = _records(path)
    assert rollouts.keys() == {"late/0", "late/1"}
    assert groups["late"].state == GROUP_STATE_COMPLETE


async def test_get_group_follows_a_group_to_its_end() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:

        async def group() -> Group:
            return (await rig.rollouts.GetGroup(GetGroupRequest(run_id="run", group_id="g"))).group

        await stream.submit(submission("a", group_id="g", group_size=3), submission("b", group_id="g"))
        first, _ = await rig.door.wait_running(2)
        pending = await group()
        assert (pending.state, pending.size, pending.finished_rollouts) == (GROUP_STATE_PENDING, 3, 0)
        assert list(pending.rollout_ids) == ["a", "b"]
        rig.door.finish(first)
        await stream.finished(1)
        assert (await group()).finished_rollouts == 1
        await rig.rollouts.CancelRollouts(CancelRolloutsRequest(run_id="run", rollout_ids=["b"]))
        await stream.finished(1)
        partial = await group()
        assert (partial.state, partial.done, list(partial.failed_rollout_ids)) == (GROUP_STATE_PARTIAL, False, ["b"])
        rig.door.auto = True
        await stream.submit(submission("c", group_id="g"))
        await stream.finished(1)
        whole = await group()
        assert (whole.state, whole.done, whole.finished_rollouts) == (GROUP_STATE_PARTIAL, True, 3)
        await stream.send(acknowledgements=[Acknowledgement(rollout_id=name) for name in ("a", "b", "c")])
        await until(lambda: rig.server.loop.core.group_view("run", "g") is None)
        gone = await refused(rig.rollouts.GetGroup(GetGroupRequest(run_id="run", group_id="g")))
        assert gone.code is grpc.StatusCode.NOT_FOUND and "'g'" in gone.message
        unnamed = await refused(rig.rollouts.GetGroup(GetGroupRequest(run_id="run")))
        assert unnamed.fields == ["group_id"]


def _view(**changes: Any) -> RolloutView:
    result = _result(**changes)
    return RolloutView(
        run_id="run", rollout_id="r/1", group_id="g", state=RolloutState.FINISHED, rollout_class=RolloutClass.REUSABLE,
        task_type=TaskType.GENERATION, pool="policy", sample_index=1, session_id="s", turn=2, parent_rollout_id="p",
        stratum="math", origin=Origin.REPLAY, needed_by_step=3, max_new_tokens=8, batch_id=4, consumer_id="c",
        engine_id="", attempts=2, preemptions=1, prompt_tokens=9, generated_tokens=1, waited_seconds=0.0,
        gate=Gate.OPEN, result=result, seed=11, accepted_at_seconds=100.0,
    )  # fmt: skip


_GROUP = GroupView("g", 4, ("r/0", "r/1"), 1, ("r/0",), False)


def test_a_lineage_says_everything_and_survives_its_line() -> None:
    refusal = Refusal(Code.FAILED_PRECONDITION, "STALE", "too old")
    spans = (Span(4, "4", 0, 1, "d", 1), Span(6, "6", 1, 2, "e", 2))
    lineage = to_lineage(_view(spans=spans, outcome=Outcome.STALE, error=refusal), _GROUP, 1000.0)
    assert lineage is not None
    assert {field.name for field in lineage.DESCRIPTOR.fields} == {field.name for field, _ in lineage.ListFields()}
    assert (lineage.staleness_versions, lineage.policy_version, lineage.accepted_unix_seconds) == (2, 6, 1100.0)
    assert (list(lineage.engine_ids), list(lineage.batch_ids)) == (["d", "e"], ["3", "4"])
    assert [(span.policy_version, span.start, span.end) for span in lineage.spans] == [(4, 0, 1), (6, 1, 2)]
    record = LineageRecord(rollout=lineage)
    assert "\n" not in line_of(record)
    assert Parse(line_of(record), LineageRecord()) == record


def test_a_history_that_was_cut_does_not_hide_an_engine_whose_tokens_are_there() -> None:
    spans = (Span(0, "0", 0, 1, "first", 1),)
    cut = (AttemptRecord(9, "last", 7, 0, 0.0, 1.0, 0, "length"),)
    lineage = to_lineage(_view(spans=spans, history=cut, engine_id="last", batch_id=7), None, 0.0)
    assert lineage is not None
    assert (list(lineage.engine_ids), list(lineage.batch_ids)) == (["first", "last"], ["7"])
    assert not lineage.HasField("group")


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (GroupView("g", 2, ("a",), 0, (), False), GROUP_STATE_PENDING),
        (GroupView("g", 2, ("a",), 1, (), False), GROUP_STATE_PENDING),
        (GroupView("g", 2, ("a", "b"), 1, ("a",), False), GROUP_STATE_PARTIAL),
        (GroupView("g", 2, ("a", "b"), 2, ("a",), True), GROUP_STATE_PARTIAL),
        (GroupView("g", 2, ("a", "b"), 2, (), True), GROUP_STATE_COMPLETE),
    ],
)
def test_the_states_of_a_group(view: GroupView, state: int) -> None:
    group = to_group("run", view)
    assert (group.state, group.done) == (state, view.done)
    assert tuple(group.rollout_ids) == view.members


def test_the_command_sums_a_file_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lineage.jsonl"
    two = (Span(4, "4", 0, 1, "d", 1), Span(6, "6", 1, 2, "e", 2))
    lineages = [
        to_lineage(_view(spans=two), _GROUP, 0.0),
        to_lineage(_view(stale=False), _GROUP, 0.0),
        to_lineage(_view(spans=(), stale=False, complete=False, outcome=Outcome.CANCELLED), _GROUP, 0.0),
    ]
    records = [LineageRecord(rollout=lineage) for lineage in lineages]
    records.append(LineageRecord(group=to_group("run", _GROUP)))
    path.write_text("".join(line_of(record) + "\n" for record in records))
    assert main(["lineage", str(path)]) == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    sums = {name.strip(): int(value) for name, value in rows}
    assert sums == {
        "rollouts": 3, "completed": 2, "cancelled": 1, "complete": 2, "stale": 1, "generated tokens": 3,
        "with tokens": 2, "of 1 version": 1, "of 2 versions": 1, "oldest 2 behind": 1, "oldest 6 behind": 1,
        "groups": 1, "partial": 1, "failed members": 1,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["not JSON\n", '{"other": 1}\n', "[]\n", '{"rollout": {"spans": [{}]}}\n'])
def test_the_command_names_a_line_that_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lineage.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        report([path], io.StringIO())
    with pytest.raises(ConfigError, match="cannot read"):
        report([tmp_path / "missing"], io.StringIO())
