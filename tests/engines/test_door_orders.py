"""What the SGLang door sends as control calls, what it makes of the answers, and the engine's memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rolloutd.engines.base import FaultKind
from rolloutd.engines.control import PauseMode, WeightsLoaded
from rolloutd.engines.sglang import SGLangEngine
from tests.engines.door_kit import (
    ABORT,
    IN_PLACE,
    LONG,
    RETRACT,
    VOCABULARY_SIZE,
    Attempt,
    are_its_own,
    begun,
    both,
    door_to,
    fault_of,
    versions,
)
from tests.engines.scripted_server import FakeServer

# ---- memory ---------------------------------------------------------------------------------------------------------


async def test_memory_follows_the_trainer() -> None:
    async with both() as (sim, door):
        attempt = await begun(door, 400)
        await door.pause(RETRACT)
        await door.release_memory(("weights", "kv_cache"))
        assert (await sim.state())["released_memory"] == ["kv_cache", "weights"]
        calls: list[tuple[Callable[[], Awaitable[Any]], FaultKind]] = [
            (lambda: door.load_weights("next", "7", flush=True), FaultKind.REFUSED),
            (door.begin_update, FaultKind.REFUSED),
            (door.end_update, FaultKind.REFUSED),
            (door.resume, FaultKind.REFUSED),
            (lambda: door.release_memory(("weights",)), FaultKind.REFUSED),
            (lambda: door.resume_memory(("weights", "cuda_graph")), FaultKind.REFUSED),
            (lambda: Attempt(door, 3).task, FaultKind.BUSY),
            (door.register, FaultKind.BUSY),
        ]
        for call, kind in calls:
            assert (await fault_of(call())).kind is kind
        await door.resume_memory(("weights",))
        assert await door.load_weights("next", "7", flush=True) == WeightsLoaded(flushed=True)
        assert await door.ready() is False
        await door.resume_memory(("kv_cache",))
        await door.resume()
        answer = await attempt.task
        assert versions(answer) == ["default", "7"] and are_its_own(answer)
        assert await door.ready() is True and sim.process.returncode is None


async def test_an_engine_without_memory_is_not_ready_though_it_says_so() -> None:
    async with both() as (sim, door):
        await door.release_memory(("kv_cache",))
        assert (await sim.call("GET", "/ready"))[0] == 200
        assert await door.ready() is False
        assert (await fault_of(door.register())).message.endswith("its memory is released")


@pytest.mark.parametrize("mode", [None, IN_PLACE])
async def test_memory_is_not_released_under_work(mode: PauseMode | None) -> None:
    async with both() as (sim, door):
        attempt = await begun(door, LONG)
        if mode is not None:
            await door.pause(mode)
        fault = await fault_of(door.release_memory(("kv_cache",)))
        assert fault.kind is FaultKind.REFUSED and "1 attempts are running" in fault.message
        assert not attempt.task.done() and (await sim.state())["released_memory"] == []
        attempt.task.cancel()


async def test_memory_is_not_released_under_the_work_of_others() -> None:
    async with both() as (sim, door), door_to(sim.url) as other:
        attempt = await begun(other, LONG)
        fault = await fault_of(door.release_memory(("kv_cache",)))
        assert fault.kind is FaultKind.BUSY and "still works" in fault.message
        assert await door.ready() is True and sim.process.returncode is None
        await door.pause(ABORT)
        await attempt.task
        await door.release_memory(("kv_cache",))


@pytest.mark.parametrize("tags", [(), ("kv",), ("weights", "weights")])
async def test_tags_are_named_each_once(tags: tuple[str, ...]) -> None:
    async with both() as (_, door):
        for call in (door.release_memory(tags), door.resume_memory(tags)):
            fault = await fault_of(call)
            assert fault.kind is FaultKind.REFUSED and "cuda_graph, kv_cache, weights" in fault.message


async def test_a_new_incarnation_is_neither_paused_nor_without_memory(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    async with door_to(url) as door:
        await door.pause(IN_PLACE)
        await door.release_memory(("kv_cache",))
        assert (await fault_of(door.register())).kind is FaultKind.BUSY
        server.server_info["startup_time"] = {"scheduler_e2e": 9.5}
        await door.register()
        assert await door.ready() is True
        await door.pause(ABORT)


# ---- what is sent ---------------------------------------------------------------------------------------------------


async def _all_calls(door: SGLangEngine) -> None:
    await door.pause(RETRACT)
    await door.flush(0)
    await door.load_weights("next", "7", flush=False)
    await door.begin_update()
    await door.end_update()
    await door.name_version("7")
    await door.release_memory(("kv_cache",))
    await door.resume_memory(("kv_cache",))
    await door.resume()


async def test_orders_are_given_with_the_admin_key(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    door = SGLangEngine(url, api_key="normal", admin_api_key="admin", vocabulary_size=VOCABULARY_SIZE)
    await door.register()
    await _all_calls(door)
    await door.weight_version()
    assert {path: key for path, key in server.headers.items() if path in server.orders} == dict.fromkeys(
        server.orders, "Bearer admin"
    )
    assert server.headers["/model_info"] == "Bearer normal"
    assert server.orders == {
        "/pause_generation": {"mode": "retract"},
        "/flush_cache": None,
        "/update_weights_from_disk": {
            "model_path": "next",
            "weight_version": "7",
            "flush_cache": False,
            "abort_all_requests": False,
        },
        "/begin_weight_update": {"selector": "all"},
        "/end_weight_update": {},
        "/update_weight_version": {"new_version": "7", "abort_all_requests": False},
        "/release_memory_occupation": {"tags": ["kv_cache"]},
        "/resume_memory_occupation": {"tags": ["kv_cache"]},
        "/continue_generation": {},
    }
    await door.close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, {"error": "Unauthorized"}, FaultKind.REFUSED, "set admin_api_key"),
        (503, {"message": "wait"}, FaultKind.BUSY, "wait"),
        (500, {"message": "bug"}, FaultKind.BROKEN, "bug"),
        (404, {"detail": "Not Found"}, FaultKind.BROKEN, "Not Found"),
        (400, {"error": {"message": "selector"}}, FaultKind.REFUSED, "selector"),
    ],
)
async def test_what_an_order_s_status_means(
    fake: tuple[FakeServer, str], status: int, body: dict[str, Any], kind: FaultKind, words: str
) -> None:
    server, url = fake
    async with door_to(url) as door:
        server.answer_orders(status, body)
        for call in (door.pause(RETRACT), door.begin_update(), door.name_version("7"), door.resume()):
            fault = await fault_of(call)
            assert fault.kind is kind and words in fault.message and url in fault.message
        fault = await fault_of(door.load_weights("next", "7", flush=True))
        assert fault.kind is kind and words in fault.message


@pytest.mark.parametrize(
    ("message", "loaded"),
    [
        ("Weights were updated, but the cache was not flushed because of work.", True),
        ("Succeeded to update model weights. | Weights were updated, but the cache was not flushed.", True),
        ("Failed to load. | Weights were updated, but the cache was not flushed.", False),
        ("Failed to load.", False),
    ],
)
async def test_every_rank_must_have_loaded(fake: tuple[FakeServer, str], message: str, loaded: bool) -> None:
    server, url = fake
    async with door_to(url) as door:
        server.answer_orders(400, {"success": False, "message": message})
        if loaded:
            assert await door.load_weights("next", "7", flush=True) == WeightsLoaded(flushed=False)
        else:
            assert (await fault_of(door.load_weights("next", "7", flush=True))).kind is FaultKind.REFUSED


async def test_every_wait_ends(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    limits = {"control_seconds": 0.1, "pause_seconds": 0.1, "weights_seconds": 0.1}
    calls: list[Callable[[SGLangEngine], Awaitable[Any]]] = [
        lambda door: door.pause(RETRACT),
        lambda door: door.resume(),
        lambda door: door.flush(0),
        lambda door: door.load_weights("next", "7", flush=True),
        lambda door: door.begin_update(),
        lambda door: door.end_update(),
        lambda door: door.name_version("7"),
        lambda door: door.release_memory(("kv_cache",)),
    ]
    for call in calls:
        server.orders_answered.set()
        async with door_to(url, **limits) as door:
            server.orders_answered.clear()
            assert (await fault_of(call(door))).kind is FaultKind.SILENT


async def test_a_load_that_was_rolled_back_leaves_weights_that_nobody_knows(fake: tuple[FakeServer, str]) -> None:
    """SGLang answers so, keeps its label, and may run the new weights (seen: the file was complete at the second reading)."""
    server, url = fake
    message = "Failed to update weights: file not fully covered.\nRolling back to original weights."
    async with door_to(url) as door:
        server.answer_orders(400, {"success": False, "message": message, "num_paused_requests": 0})
        fault = await fault_of(door.load_weights("next", "7", flush=False))
        assert fault.kind is FaultKind.BROKEN and "file not fully covered" in fault.message
