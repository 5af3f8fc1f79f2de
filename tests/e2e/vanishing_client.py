"""A trainer that submits long rollouts and never takes anything back: `python -m tests.e2e.vanishing_client TARGET COUNT`.

Says "running" once every rollout has written a token; somebody kills it then.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from rolloutd.client import connect
from tests.e2e.rollouts import prompt, submit_running


async def main(target: str, count: int) -> None:
    random = np.random.default_rng(7)
    async with connect(target, run="run", consumer="vanishing") as client:
        await client.configure_run(on_disconnect="cancel", disconnect_grace_seconds=0)
        await submit_running(client, [prompt(random) for _ in range(count)], "vanishing")
        print("running", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
