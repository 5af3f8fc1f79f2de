"""Groups that keep fewer members than they are made of, over the wire: outcomes, the group, the run's account, metrics."""

from __future__ import annotations

import pytest

from rolloutd.scheduler.views import GroupView
from rolloutd.server.translate_lineage import to_group
from rolloutd.v1 import (
    FINISH_REASON_ABORT,
    GROUP_STATE_COMPLETE,
    GROUP_STATE_PARTIAL,
    GROUP_STATE_PENDING,
    OUTCOME_COMPLETED,
    OUTCOME_SURPLUS,
    GetGroupRequest,
    GetRunRequest,
    Group,
    OverLaunch,
)
from tests.server.harness import running_server, submission
from tests.server.test_version_metrics import scrape


async def test_surplus_members_come_back_and_the_run_tells_of_them() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:

        async def group() -> Group:
            return (await rig.rollouts.GetGroup(GetGroupRequest(run_id="run", group_id="g"))).group

        async def told() -> OverLaunch | None:
            state = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run.state
            return state.over_launch if state.HasField("over_launch") else None

        await stream.submit(submission("g", samples=3, group_keep=2, max_new_tokens=8))
        first, second, third = await rig.door.wait_running(3)
        assert await told() is None
        rig.door.report(third, 3)
        rig.door.finish(first, 4)
        await stream.finished(1)
        assert ((await group()).state, (await group()).keep) == (GROUP_STATE_PENDING, 2)
        rig.door.finish(second, 6)
        results = {result.rollout_id: result for result in await stream.finished(2)}
        end = await stream.next("group_finished")
        (cut,) = (one for one in results.values() if one.outcome == OUTCOME_SURPLUS)
        assert rig.door.aborted == [third.attempt_id]
        assert (cut.complete, cut.finish_reason, cut.error.reason) == (False, FINISH_REASON_ABORT, "SURPLUS")
        assert sum(one.outcome == OUTCOME_COMPLETED for one in results.values()) == 1
        assert end.complete and not end.failed_rollout_ids and list(end.surplus_rollout_ids) == [cut.rollout_id]
        over = await group()
        assert (over.state, over.done, list(over.surplus_rollout_ids)) == (GROUP_STATE_COMPLETE, True, [cut.rollout_id])
        account = await told()
        assert account is not None
        assert (account.groups, account.launched_rollouts, account.kept_rollouts, account.surplus_rollouts) == (
            1,
            3,
            2,
            1,
        )
        assert (account.kept_mean_tokens, account.surplus_mean_tokens) == (5.0, float(cut.generated_tokens))
        assert len(account.kept_share_by_quintile) == 5
        values = scrape(rig.server.metrics.registry)
        fates = {fate: values[f'rolloutd_over_launch_rollouts_total{{fate="{fate}",run="run"}}']
                 for fate in ("kept", "surplus", "failed")}  # fmt: skip
        assert fates == {"kept": 2, "surplus": 1, "failed": 0}
        assert values['rolloutd_over_launch_groups_total{run="run"}'] == 1
        assert values['rolloutd_over_launch_tokens_total{fate="kept",run="run"}'] == 10
        assert values['rolloutd_over_launch_kept_share{quintile="1",run="run"}'] == account.kept_share_by_quintile[0]
        finished = 'rolloutd_rollouts_finished_total{outcome="surplus",rollout_class="critical",task_type="generation"}'
        assert values[finished] == 1 and values['rolloutd_aborts_total{reason="surplus"}'] == 1


async def test_what_a_group_cannot_keep_is_refused() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("g", samples=2, group_keep=3), submission("alone", group_keep=1))
        for name, problem in (("g", "more than the group has members (2)"), ("alone", "there is no group")):
            rejected = await stream.next("rejected")
            assert rejected.rollout_id == name and problem in rejected.error.message
            assert [one.field for one in rejected.error.field_violations] == ["group_keep"]


@pytest.mark.parametrize(
    ("completed", "failed", "surplus", "done", "state"),
    [
        (0, 0, 0, False, GROUP_STATE_PENDING),
        (7, 2, 0, False, GROUP_STATE_PENDING),
        (8, 0, 0, False, GROUP_STATE_COMPLETE),
        (8, 1, 1, True, GROUP_STATE_COMPLETE),
        (7, 3, 0, True, GROUP_STATE_PARTIAL),
        (0, 3, 0, False, GROUP_STATE_PARTIAL),
        (7, 1, 2, True, GROUP_STATE_PARTIAL),  # a kept one became too old after the others were ended
    ],
)
def test_the_state_of_a_group_of_ten_that_keeps_eight(
    completed: int, failed: int, surplus: int, done: bool, state: int
) -> None:
    names = tuple(f"g/{index}" for index in range(10))
    ended = completed + failed + surplus
    view = GroupView("g", 10, names, ended, names[:failed], done, 8, completed, names[failed : failed + surplus])
    assert to_group("run", view).state == state
