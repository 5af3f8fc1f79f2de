"""Who wrote the token that SGLang's overlap scheduler computes while the weights are swapped in place: the old weights.

The engine counts it to the new ones (seen on a real server: log-probs of that token are the old weights').
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rolloutd.engines.base import AttemptRequest
from rolloutd.engines.collector import Collector
from rolloutd.engines.control import PauseMode
from rolloutd.engines.frames import decode_frame
from rolloutd.engines.sglang import SGLangEngine
from tests.engines.scripted_server import DONE, LENGTH, FakeServer, frame

REQUEST = AttemptRequest("a" * 32, 100, bytes(4), logprobs=True)
Spans = tuple[tuple[str, int, int], ...]


def as_engine_says(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ((("3", 0, 2), ("4", 2, 6)), (("3", 0, 3), ("4", 3, 6))),
        ((("3", 0, 5), ("4", 5, 6)), (("3", 0, 6),)),  # it was the last one
        ((("4", 0, 6),), (("4", 0, 6),)),  # began afterwards
        ((("2", 0, 1), ("3", 1, 4), ("4", 4, 6)), (("2", 0, 1), ("3", 1, 5), ("4", 5, 6))),
        ((("3", 0, 2), ("4", 2, 3), ("5", 3, 6)), (("3", 0, 3), ("5", 3, 6))),  # and the next came at once
        ((("3", 0, 2), ("5", 2, 6)), (("3", 0, 2), ("5", 2, 6))),  # in another mode
    ],
)
def test_one_token_of_a_span_that_began_in_place_is_the_one_before(said: Spans, meant: Spans) -> None:
    collector = Collector(REQUEST, incremental=True)
    collector.note_swap_in_place("4")
    data = frame([1, 2, 3, 4, 5, 6], 6, LENGTH, weight_versions=as_engine_says(*said))
    collector.add(decode_frame(data.removeprefix(b"data: ")))
    assert collector.slice("length").version_spans == meant


@pytest.mark.parametrize(
    ("mode", "overlap", "old_tokens"),
    [
        (PauseMode.IN_PLACE, True, 3),
        (PauseMode.IN_PLACE, False, 2),
        (PauseMode.RETRACT, True, 2),  # looks at that token before it stops
    ],
)
async def test_swap_under_a_running_attempt(
    fake: tuple[FakeServer, str], mode: PauseMode, overlap: bool, old_tokens: int
) -> None:
    server, url = fake
    server.server_info["disable_overlap_schedule"] = not overlap
    swapped = asyncio.Event()

    async def answer(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(frame([1, 2], 2))
        await swapped.wait()
        spans = as_engine_says(("default", 0, 2), ("1", 2, 5))
        await response.write(frame([3, 4, 5], 5, LENGTH, weight_versions=spans) + DONE)

    door = SGLangEngine(url, vocabulary_size=1024)
    await door.register()
    server.do(answer)
    begun = asyncio.Event()
    attempt = asyncio.create_task(door.generate(REQUEST, lambda _: begun.set()))
    await begun.wait()
    await door.pause(mode)
    await door.load_weights("somewhere", "1", flush=False)
    server.weight_version = "1"
    assert await door.weight_version() == "1"
    await door.resume()
    swapped.set()
    assert (await attempt).version_spans == (("default", 0, old_tokens), ("1", old_tokens, 5))
    await door.close()


async def test_a_version_that_did_not_change_in_the_pause_moves_nothing(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.server_info["disable_overlap_schedule"] = False
    over = asyncio.Event()

    async def answer(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(frame([1, 2], 2))
        await over.wait()
        spans = as_engine_says(("default", 0, 1), ("1", 1, 3))
        await response.write(frame([3], 3, LENGTH, weight_versions=spans) + DONE)

    door = SGLangEngine(url, vocabulary_size=1024)
    await door.register()
    server.do(answer)
    begun = asyncio.Event()
    attempt = asyncio.create_task(door.generate(REQUEST, lambda _: begun.set()))
    await begun.wait()
    await door.pause(PauseMode.RETRACT)
    server.weight_version = "1"
    await door.weight_version()
    await door.resume()
    await door.pause(PauseMode.IN_PLACE)  # and the load fails
    await door.weight_version()
    await door.resume()
    over.set()
    assert (await attempt).version_spans == (("default", 0, 1), ("1", 1, 3))
    await door.close()
