"""What the engines' HTTP client buys: CPU per streamed POST /generate, ours and aiohttp's in turn, on the same engine.

Prints one line of JSON last: microseconds of this process per POST, by client and prompt tokens.

What this module does not know: the door above the client (frames are received here, not decoded).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import numpy as np
import orjson
import uvloop

from rolloutd.bench.demo_processes import Children, free_ports
from rolloutd.bench.overhead_stack import HOST, READY_SECONDS, answers
from rolloutd.engines.http_client import HttpClient

IN_FLIGHT = 64
Post = Callable[[bytes], Awaitable[int]]


async def _cost(post: Post, body: bytes, posts: int) -> float:
    """CPU microseconds of this process per POST."""
    left = posts

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            assert await post(body) > 1000

    before = time.process_time()
    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    return (time.process_time() - before) * 1e6 / posts


async def _main(posts: int, rounds: int) -> dict[str, dict[str, float]]:
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    figures: dict[str, dict[str, float]] = {"ours": {}, "aiohttp": {}}
    with TemporaryDirectory() as folder:
        async with (
            Children(Path(folder)) as children,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session,
        ):
            engine = await children.start(
                "engine", [sys.executable, "-m", "rolloutd.bench.mock_engine", "--port", str(port)]
            )
            await children.until_ready(engine, lambda: answers(port), READY_SECONDS)
            client = HttpClient(url, connect_seconds=5.0, keepalive_seconds=4.0)
            head = client.head("POST", "/generate", {"Content-Type": "application/json"})

            async def ours(body: bytes) -> int:
                _, answer = await client.call(head, body)
                return len(answer)

            async def theirs(body: bytes) -> int:
                size = 0
                async with session.post(url + "/generate", data=body) as response:
                    while piece := await response.content.readany():
                        size += len(piece)
                return size

            for tokens in (2048, 16384):
                ids = np.random.default_rng(tokens).integers(10, 150_000, tokens)
                body = orjson.dumps({"input_ids": ids, "stream": True}, option=orjson.OPT_SERIALIZE_NUMPY)
                seen: dict[str, list[float]] = {"ours": [], "aiohttp": []}
                for _ in range(rounds):
                    seen["ours"].append(await _cost(ours, body, posts))
                    seen["aiohttp"].append(await _cost(theirs, body, posts))
                for name, values in seen.items():
                    figures[name][str(tokens)] = round(statistics.median(values), 1)
            client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per POST of two HTTP clients")
    parser.add_argument("--posts", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(uvloop.run(_main(options.posts, options.rounds))))


if __name__ == "__main__":
    main()
