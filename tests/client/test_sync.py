"""The blocking client. Its server runs in the same loop, because gRPC for asyncio has one loop per process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

import rolloutd.client
from rolloutd import v1
from rolloutd.client import sync
from tests.client.fake_server import FakeServer

T = TypeVar("T")


def in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, sync.background_loop()).result(30)


def call_in_loop(function: Callable[[], T]) -> T:
    async def call() -> T:
        return function()

    return in_loop(call())


@pytest.fixture
def blocking_server() -> Iterator[FakeServer]:
    fake = call_in_loop(FakeServer)
    in_loop(fake.start())
    yield fake
    in_loop(fake.stop())


def test_the_same_verbs_block(blocking_server: FakeServer) -> None:
    with sync.Client(blocking_server.address, run="r", consumer="c", auto_acknowledge=False) as client:
        assert client.generate([1, 2], max_new_tokens=1).tokens.tolist() == [2, 1, 0]
        assert [result.sample_index for result in client.generate_group([3], samples=3, max_new_tokens=1)] == [0, 1, 2]
        assert len(client.run_rollout([3], samples=2, max_new_tokens=1)) == 2
        handle = client.submit([4], samples=2, max_new_tokens=1, rollout_id="s")
        assert handle.rollout_ids == ("s/0", "s/1") and handle.accepted().rollout_id == "s"
        results = list(client.drain())
        assert len(results) == 2
        client.acknowledge(results[0], used=True, reward=1.0)
        client.submit([5], max_new_tokens=1)
        assert next(client.results()).tokens.tolist() == [5, 0]
        assert client.cancel("nobody").unknown_ids == ["nobody"]
        assert client.update("s", rollout_class="critical").updated_rollouts == 1
        client.set_budget(max_running_rollouts=4)
        assert client.report_step(1, trainer_state="waiting").promoted_rollouts == 2
        assert [rollout.rollout_id for rollout in client.list_rollouts()] == ["x0", "x1", "x2"]
        assert next(iter(client.watch_run())).run_id == "r"
        updated = v1.EngineUpdate(engine_id="e0", state=v1.UPDATE_STATE_UPDATED)
        summary = v1.PublishPolicyResponse(policy_version=5, summary=v1.PublishSummary(updated_engine_ids=["e0"]))
        blocking_server.publications = [
            [v1.PublishPolicyResponse(policy_version=5, engine=updated), summary],
            [summary],
        ]
        assert [update.state for update in client.publish_policy(5, path="/weights/5")] == ["updated"]
        assert client.publish_and_wait(5, path="/weights/5").updated == ("e0",)
        assert client.confirm_weights(5).policy_version == 5
    with pytest.raises(rolloutd.client.ClientClosed):
        client.generate([1], max_new_tokens=1)


def test_weights_are_pushed_inside_a_block(blocking_server: FakeServer) -> None:
    waiting = v1.EngineUpdate(engine_id="e0", url="http://e0:1", state=v1.UPDATE_STATE_PUSHING)
    step = v1.PublishPolicyResponse(policy_version=5, engine_count=1, engine=waiting)
    end = v1.PublishPolicyResponse(policy_version=5, summary=v1.PublishSummary(updated_engine_ids=["e0"]))
    blocking_server.publications = [[step, end], [step, end], [step, end]]
    with sync.Client(blocking_server.address, run="r") as client:
        with client.pushing_weights(5) as push:
            assert [engine.url for engine in push.ready()] == ["http://e0:1"]
            push.confirm()
        with client.pushing_weights(5) as push:
            for engine in push.engines():
                push.confirm(engine)
        with pytest.raises(RuntimeError, match="no memory"), client.pushing_weights(5) as push:
            push.ready()
            raise RuntimeError("no memory")
    confirmed = [call for call in blocking_server.calls if isinstance(call, v1.ConfirmWeightsRequest)]
    assert [call.engine_id for call in confirmed] == ["", "e0", "e0"]
    assert "no memory" in confirmed[-1].error


def test_every_verb_of_the_asyncio_client_is_here() -> None:
    public = {name for name in dir(rolloutd.client.Client) if not name.startswith("_")}
    assert public <= {name for name in dir(sync.Client) if not name.startswith("_")}


def test_several_threads_may_share_a_client(blocking_server: FakeServer) -> None:
    done: queue.Queue[int] = queue.Queue()
    with sync.Client(blocking_server.address, run="r", consumer="c") as client:

        def work(number: int) -> None:
            for _ in range(5):
                done.put(int(client.generate([number], max_new_tokens=1).tokens[0]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(done.queue) == sorted([1, 2, 3, 4] * 5)


def test_a_call_that_would_wait_for_itself_is_refused(blocking_server: FakeServer) -> None:
    outcome: queue.Queue[Exception] = queue.Queue()

    def on_notice(notice: rolloutd.client.Notice) -> None:
        try:
            client.get_run()
        except rolloutd.client.RolloutdError as error:
            outcome.put(error)

    with sync.Client(blocking_server.address, run="r", consumer="c", on_notice=on_notice) as client:
        call_in_loop(lambda: blocking_server.notice(v1.NOTICE_KIND_DRAINING, "bye", 1.0))
        assert "waits for ever" in str(outcome.get(timeout=10))


async def test_another_running_loop_is_no_obstacle(blocking_server: FakeServer) -> None:
    with sync.Client(blocking_server.address, run="r", consumer="c") as client:  # as in a notebook: it blocks, no more
        assert client.generate([1], max_new_tokens=1).ok


async def test_a_second_loop_is_refused_with_the_reason(blocking_server: FakeServer) -> None:
    with sync.Client(blocking_server.address, run="r", consumer="c") as client:
        with pytest.raises(rolloutd.client.RolloutdError, match="one loop per process"):
            async with rolloutd.client.connect(blocking_server.address, run="r"):
                pytest.fail("a client in a second loop was opened")
        assert client.generate([1], max_new_tokens=1).ok
    async with rolloutd.client.connect(blocking_server.address, run="r"):
        with pytest.raises(rolloutd.client.RolloutdError, match="one loop per process"):
            sync.Client(blocking_server.address, run="r").__enter__()


def test_errors_arrive_as_themselves(blocking_server: FakeServer) -> None:
    with sync.Client(blocking_server.address, run="r", consumer="c") as client:
        with pytest.raises(rolloutd.client.Refused, match="at least one token"):
            client.generate([], max_new_tokens=1)
        with pytest.raises(TypeError, match="did you mean 'temperature'"):
            client.generate([1], max_new_tokens=1, temprature=1.0)  # type: ignore[call-arg]
