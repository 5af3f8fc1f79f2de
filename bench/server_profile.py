"""`make profile`: a flame graph of the server under the load of `make bench-overhead`, without the router.

The graph (SVG) is written into `FOLDER` of the working directory and its path printed; `--text` writes folded stacks, one
a line, for a tool to read.

What this module does not know: what the graph shows.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from rolloutd.bench.overhead_clients import StreamClient, prompts
from rolloutd.bench.overhead_stack import HOST, cpu_seconds, stack

FOLDER = Path("runs/profiles")
IN_FLIGHT = 64
SAMPLES_PER_SECOND = 250


async def record(tokens: int, seconds: float, per_second: float, text: bool) -> tuple[Path, str]:
    """The path of the graph, and what the load cost in words."""
    program = Path(sys.executable).parent / "py-spy"
    if not program.exists():
        raise SystemExit("py-spy is not installed in this environment: make setup")
    target = FOLDER / f"server-{time.strftime('%Y%m%d-%H%M%S')}.{'txt' if text else 'svg'}"
    async with stack() as running:
        await running.say_prompt_tokens(tokens)
        client = StreamClient(HOST, running.server_port, "profile", prompts(tokens, seed=1))
        await client.open()
        await client.closed(IN_FLIGHT, 1.0)
        command = [
            str(program), "record", "--pid", str(running.server_pid), "--duration", str(int(seconds)),
            "--rate", str(SAMPLES_PER_SECOND), "--format", "raw" if text else "flamegraph", "--output", str(target),
        ]  # fmt: skip
        # Not by the event loop: uvloop forks, which is not safe beside gRPC's threads; this one does not (vfork).
        spy = await asyncio.to_thread(
            subprocess.Popen, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        before = cpu_seconds(running.server_pid)
        if per_second:
            measured = await client.paced(per_second, seconds)
        else:
            measured = await client.closed(IN_FLIGHT, seconds)
        used = cpu_seconds(running.server_pid) - before
        _, errors = await asyncio.to_thread(spy.communicate)
        if spy.returncode:
            raise SystemExit(f"py-spy ended with status {spy.returncode}: {errors.strip()}")
        await client.close()
    cost = f"{measured.rollouts} rollouts of {tokens} tokens, {used * 1e6 / measured.rollouts:.0f} us of CPU each"
    return target.resolve(), cost


def main() -> None:
    parser = argparse.ArgumentParser(description="flame graph of the server under load")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per prompt")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--per-second", type=float, default=0.0, help="paced submissions; 0: 64 in flight")
    parser.add_argument("--text", action="store_true", help="folded stacks in place of a picture")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path, cost = uvloop.run(record(options.tokens, options.seconds, options.per_second, options.text))
    print(cost)
    print(path)


if __name__ == "__main__":
    main()
