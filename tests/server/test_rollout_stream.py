"""The SubmitRollout stream over a real channel: opening, draining, resuming, breaking, back-pressure."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rolloutd.scheduler.states import RolloutClass
from rolloutd.server.config import EngineSettings, ServerConfig
from rolloutd.server.outbox import PAUSE_ANSWERS, ItemRefused, Outbox
from rolloutd.server.rollout_stream import RolloutStream
from rolloutd.v1 import (
    ITEM_KIND_CANCELLATION,
    ITEM_KIND_UPDATE,
    ON_DISCONNECT_CANCEL,
    OUTCOME_CANCELLED,
    VERDICT_USED,
    Acknowledgement,
    ConfigureRunRequest,
    GetRolloutRequest,
    GetRunRequest,
    Hello,
    RolloutUpdate,
    RunConfig,
    RunRolloutRequest,
)
from tests.server.fake_door import FakeDoor
from tests.server.harness import WAIT_SECONDS, Stream, refused, running_server, submission, until


async def test_a_batch_goes_through_to_the_engine_and_back() -> None:
    async with running_server() as rig, rig.stream() as stream:
        assert stream.attached.server.limits.max_message_bytes == 64 << 20
        await stream.submit(*[submission(f"r{number}", max_new_tokens=3) for number in range(20)])
        results = await stream.finished(20)
        assert {result.rollout_id for result in results} == {f"r{number}" for number in range(20)}
        for result in results:
            assert result.complete
            assert len(result.token_bytes) == 12
            assert result.engine_id == "engine-0:1"
            assert result.run_id == "run"
            assert [(span.start, span.end) for span in result.spans] == [(0, 3)]


async def test_hello_is_required_first_and_only_once() -> None:
    async with running_server() as rig:
        missing = Stream(rig.rollouts, None)
        async with missing:
            await missing.send(cancel_rollout_ids=["x"])
            assert await missing.event() is None
            assert await missing.code() is grpc.StatusCode.INVALID_ARGUMENT
        silent = Stream(rig.rollouts, None)
        async with silent:
            await silent.close()
            assert await silent.event() is None
            assert await silent.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with rig.stream() as twice:
            await twice.send(hello=Hello(run_id="run", consumer_id="trainer"))
            assert await twice.event() is None
            assert await twice.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cursor_that_cannot_be_one_is_refused_and_the_consumer_goes_on() -> None:
    async with running_server() as rig:
        wrong = Stream(rig.rollouts, None)
        async with wrong:
            await wrong.send(hello=Hello(run_id="run", consumer_id="trainer", resume_cursor=2**64 - 1))
            assert await wrong.event() is None
            assert await wrong.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with rig.stream() as stream:
            await stream.submit(submission("r"))
            assert [result.rollout_id for result in await stream.finished(1)] == ["r"]


async def test_more_top_logprobs_than_a_message_holds_are_refused_before_any_engine() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r", top_logprobs=2**32 - 1))
        assert (await stream.next("rejected")).error.field_violations[0].field == "top_logprobs"


async def test_a_newer_stream_of_the_same_consumer_replaces_the_older() -> None:
    async with running_server(auto=False) as rig, rig.stream() as older:
        await older.submit(submission("r"))
        await older.next("accepted")
        async with rig.stream() as newer:
            assert newer.attached.unfinished_rollouts == 1
            assert await older.event() is None
            assert await older.code() is grpc.StatusCode.ABORTED
            (request,) = await rig.door.wait_running(1)
            rig.door.finish(request)
            assert (await newer.next("finished")).rollout_id == "r"
            assert rig.server.loop.connected_consumers("run") == 1


async def test_half_close_drains_and_ends_with_ok() -> None:
    async with running_server(auto=False, slots=4) as rig, rig.stream() as stream:
        await stream.submit(*[submission(f"r{number}") for number in range(12)])
        await stream.close()
        await rig.door.wait_running(4)
        rig.door.auto = True
        rig.door.finish_all()
        await stream.finished(12)
        assert await stream.event() is None
        assert await stream.code() is grpc.StatusCode.OK


async def test_half_close_with_nothing_pending_ends_at_once() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.close()
        assert await stream.event() is None
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_reconnect_with_its_cursor_gets_what_it_missed_once() -> None:
    async with running_server() as rig:
        async with rig.stream() as stream:
            await stream.submit(*[submission(f"r{number}") for number in range(6)])
            await stream.finished(3)
            seen = stream.cursor
            await stream.finished(3)
        async with rig.stream(resume_cursor=seen) as again:
            assert again.attached.pending_events == 3
            missed = await again.finished(3)
            assert len({result.rollout_id for result in missed}) == 3
            await again.send(acknowledge_through_cursor=again.cursor)
            await again.close()
            assert await again.event() is None
        async with rig.stream(resume_cursor=again.cursor) as third:
            assert third.attached.pending_events == 0
            await third.close()
            assert await third.event() is None


async def test_an_acknowledgement_with_a_verdict_counts_as_valid_sample() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        await stream.finished(1)
        await stream.send(acknowledgements=[Acknowledgement(rollout_id="r", verdict=VERDICT_USED)])
        await stream.close()
        assert await stream.event() is None
        run = (await rig.runs.GetRun(GetRunRequest(run_id="run"))).run
        assert run.state.used_results == 1
        assert run.state.undelivered_results == 0


async def test_one_bad_item_does_not_spoil_the_others_of_its_message() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.send(
            submissions=[submission("bad", max_new_tokens=0), submission("good")],
            updates=[RolloutUpdate(rollout_id="nobody", deadline_seconds=1.0)],
            cancel_rollout_ids=["stranger"],
        )
        rejected = {}
        finished = None
        while finished is None or len(rejected) < 3:
            event = await stream.event()
            assert event is not None
            if event.WhichOneof("event") == "rejected":
                rejected[event.rejected.rollout_id] = event.rejected
            elif event.WhichOneof("event") == "finished":
                finished = event.finished
        assert finished.rollout_id == "good"
        assert rejected["bad"].error.field_violations[0].field == "sampling.max_new_tokens"
        assert rejected["nobody"].kind == ITEM_KIND_UPDATE
        assert rejected["nobody"].error.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert rejected["stranger"].kind == ITEM_KIND_CANCELLATION


async def test_cancel_on_the_stream_reaches_the_engine() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(submission("r", max_new_tokens=100))
        (request,) = await rig.door.wait_running(1)
        await stream.send(cancel_rollout_ids=["r"])
        result = await stream.next("finished")
        assert result.outcome == OUTCOME_CANCELLED
        assert rig.door.aborted == [request.attempt_id]


async def test_progress_comes_only_when_asked_for() -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        await stream.submit(
            submission("loud", max_new_tokens=100, want_progress=True), submission("quiet", max_new_tokens=100)
        )
        for request in await rig.door.wait_running(2):
            rig.door.report(request, 40)
            rig.door.report(request, 80)
        seen = []
        for _ in range(10):
            event = await stream.event()
            assert event is not None
            seen.append(event)
            if event.WhichOneof("event") == "progress":
                rig.door.finish_all()
            if sum(each.WhichOneof("event") == "finished" for each in seen) == 2:
                break
        progress = [each.progress for each in seen if each.WhichOneof("event") == "progress"]
        assert progress and {each.rollout_id for each in progress} == {"loud"}
        assert progress[-1].generated_tokens == 80


CLIENT = """
import sys, time
import grpc
from rolloutd.v1 import Hello, RolloutServiceStub, RolloutSubmission, SamplingParams, SubmitRolloutRequest

def requests():
    yield SubmitRolloutRequest(
        hello=Hello(run_id="run", consumer_id="trainer"),
        submissions=[
            RolloutSubmission(rollout_id=f"r{n}", token_bytes=bytes(16), sampling=SamplingParams(max_new_tokens=64))
            for n in range(2)
        ],
    )
    time.sleep(60)

channel = grpc.insecure_channel(sys.argv[1])
for response in RolloutServiceStub(channel).SubmitRollout(requests()):
    print("message", flush=True)
"""


async def test_a_killed_client_frees_its_engine_slot() -> None:
    async with running_server(auto=False, slots=1) as rig:
        config = RunConfig(on_disconnect=ON_DISCONNECT_CANCEL, disconnect_grace_seconds=0.0)
        await rig.runs.ConfigureRun(ConfigureRunRequest(run_id="run", config=config))
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(CLIENT),
            f"127.0.0.1:{rig.server.port}",
            stdout=asyncio.subprocess.PIPE,
        )
        (request,) = await rig.door.wait_running(1)  # one at token 10, the other queued
        rig.door.report(request, 10)
        os.kill(client.pid, signal.SIGKILL)
        await client.wait()
        async with asyncio.timeout(0.5):
            await rig.server.loop.wait_idle()
        assert rig.door.aborted == [request.attempt_id]
        assert len(rig.door.requests) == 1  # the queued one never started
        view = rig.server.state.run_view("run")
        assert view is not None
        assert view.running_rollouts == 0 and view.kv_claimed_tokens == 0
        assert view.classes[RolloutClass.CRITICAL].queued == 0


async def test_a_cancelled_stream_keeps_its_work_by_default() -> None:
    async with running_server(auto=False) as rig:
        async with rig.stream() as stream:
            await stream.submit(submission("r"))
            (request,) = await rig.door.wait_running(1)
        await until(lambda: rig.server.loop.connected_consumers("run") == 0)
        rig.door.finish(request)
        async with rig.stream() as again:
            assert (await again.next("finished")).rollout_id == "r"


@pytest.mark.parametrize("method", ["SubmitRollout", "RunRollout"])
async def test_cancelling_the_handlers_task_does_not_hang_the_client(method: str) -> None:
    async with running_server(auto=False) as rig, rig.stream() as stream:
        unary = rig.rollouts.RunRollout(RunRolloutRequest(run_id="run", submission=submission("u")))
        await rig.door.wait_running(1)
        handlers = [task for task in asyncio.all_tasks() if f"/{method}]" in task.get_name()]
        assert len(handlers) == 1
        handlers[0].cancel()
        if method == "SubmitRollout":
            assert await stream.event() is None
            assert await stream.code() is grpc.StatusCode.ABORTED
            assert rig.server.loop.connected_consumers("run") == 1  # the unary call
        else:
            assert (await refused(unary)).code is grpc.StatusCode.ABORTED


async def test_messages_above_4_mb_pass_both_ways_and_too_large_ones_are_refused() -> None:
    def door_of(settings: EngineSettings) -> FakeDoor:
        return FakeDoor(settings.url, context_tokens=2_000_000)

    async with running_server(make_door=door_of) as rig, rig.stream() as stream:
        rig.door.extras_bytes = 6 << 20
        await stream.submit(submission("big", token_bytes=bytes(5 << 20)))
        result = await stream.next("finished")
        assert result.complete and result.ByteSize() > 4 << 20
        huge = submission("huge", text="z" * (65 << 20))
        await stream.submit(huge)
        assert await stream.event() is None
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (await stream.call.details())


async def test_a_result_larger_than_a_message_loses_its_bulk_and_says_so() -> None:
    async with running_server(max_message_bytes=1 << 20) as rig, rig.stream() as stream:
        rig.door.extras_bytes = 2 << 20
        await stream.submit(submission("big"))
        result = await stream.next("finished")
        assert result.error.reason == "RESULT_TOO_LARGE"
        assert not result.complete and len(result.token_bytes) == 8


async def test_quiet_streams_survive_frequent_pings() -> None:
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_sent_ping_interval_without_data_ms", 100),
    ]
    async with (
        running_server(auto=False, keepalive_min_ping_seconds=0.05, channel_options=options) as rig,
        rig.stream() as stream,
    ):
        await stream.submit(submission("r"))
        await stream.next("accepted")
        (request,) = await rig.door.wait_running(1)
        # Two strikes are allowed; this is a dozen pings. Nothing to wait for but time itself.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.call.read(), 1.5)
    del request


async def test_reading_pauses_while_the_client_does_not_take_its_answers() -> None:
    from rolloutd.scheduler.refusal import Refusal
    from rolloutd.scheduler.states import Code

    outbox = Outbox("run", "trainer", ttl_seconds=60.0)
    refusal = Refusal(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "no")
    for number in range(PAUSE_ANSWERS):
        outbox.put(ItemRefused(f"r{number}", 1, refusal), now=0.0)
    waiting = asyncio.ensure_future(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(list(outbox.take())) == 256
    await asyncio.wait_for(waiting, WAIT_SECONDS)


async def test_queues_are_looked_at_when_they_may_have_filled_up_not_at_every_message() -> None:
    now, looks = 100.0, 0

    def run_view(_: str) -> None:
        nonlocal looks
        looks += 1

    loop = SimpleNamespace(clock=lambda: now)
    stream = RolloutStream(SimpleNamespace(loop=loop, config=ServerConfig(), run_view=run_view), None)  # type: ignore[arg-type]
    stream._outbox = Outbox("run", "trainer", ttl_seconds=60.0)
    stream._classes.add(RolloutClass.CRITICAL)
    for _ in range(20):
        stream._unseen_rollouts += 1
        await stream._pause()
    assert looks == 1
    stream._unseen_rollouts += ServerConfig().scheduler.queue.queue_capacity // 10
    await stream._pause()
    assert looks == 2, "a tenth of the queue at once"
    now += 1.0
    await stream._pause()
    assert looks == 3, "others may have filled it"


async def test_a_fenced_trainer_is_turned_away_everywhere() -> None:
    async with running_server(auto=False) as rig, rig.stream(trainer_epoch=1) as old:
        async with rig.stream("other", trainer_epoch=2) as new:
            assert await old.event() is None
            assert await old.code() is grpc.StatusCode.ABORTED
            late = Stream(rig.rollouts, None)
            async with late:
                await late.send(hello=Hello(run_id="run", consumer_id="third", trainer_epoch=1))
                assert await late.event() is None
                assert await late.code() is grpc.StatusCode.ABORTED
            await new.submit(submission("r"))
            await new.next("accepted")


async def test_text_prompts_pass_to_the_engine_where_no_tokenizer_is_configured() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("t", text="hello there"))
        assert (await stream.next("finished")).complete
        assert rig.door.requests[0].text == "hello there"
        assert rig.door.requests[0].token_bytes == b""


async def test_get_rollout_knows_it_until_it_is_acknowledged() -> None:
    async with running_server() as rig, rig.stream() as stream:
        await stream.submit(submission("r"))
        await stream.finished(1)
        found = await rig.rollouts.GetRollout(GetRolloutRequest(run_id="run", rollout_id="r"))
        assert found.rollout.result.complete
        await stream.send(acknowledge_through_cursor=stream.cursor)
        await stream.close()
        assert await stream.event() is None
        gone = await refused(rig.rollouts.GetRollout(GetRolloutRequest(run_id="run", rollout_id="r")))
        assert gone.code is grpc.StatusCode.NOT_FOUND


async def test_text_prompts_are_tokenised_here_where_a_tokenizer_is_configured(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"hello": 5, "there": 6, "?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    pools = {"policy": {"tokenizer": str(tmp_path / "tokenizer.json")}}
    async with running_server(flags={"pools": pools}) as rig, rig.stream() as stream:
        assert "text_prompts.policy" in stream.attached.server.features
        await stream.submit(submission("t", text="hello there"))
        result = await stream.next("finished")
        assert result.prompt_tokens == 2
        assert rig.door.requests[0].text is None
        assert rig.door.requests[0].token_bytes == struct.pack("<2I", 5, 6)
        unary = RunRolloutRequest(run_id="run", submission=submission("u", text="there hello"))
        assert (await rig.rollouts.RunRollout(unary)).results[0].prompt_tokens == 2
