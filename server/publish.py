"""`rolloutd publish`: give a pool's engines a policy version from a disk path, and watch them get it.

What this module does not know: the contract (the client does).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rolloutd.client import PublishFailed, Refused, RolloutdError, connect
from rolloutd.client.publishing import PublishOptions
from rolloutd.server.translate_request import DEFAULT_POOL


def publish(
    server: str, access: Mapping[str, Any], run_id: str, version: int, path: str, options: PublishOptions, out: TextIO
) -> int:
    """Returns 0 when every engine holds the version, 1 when not. `access`: the arguments of `connect` that say who we are."""
    try:
        asyncio.run(_publish(server, access, run_id, version, path, options, out))
    except RolloutdError as error:
        print(f"rolloutd: {error}", file=sys.stderr)
        if isinstance(error, PublishFailed):
            print("rolloutd: run the same command again to try those engines again", file=sys.stderr)
        return 1
    return 0


async def _publish(
    server: str, access: Mapping[str, Any], run_id: str, version: int, path: str, options: PublishOptions, out: TextIO
) -> None:
    async with connect(server, run=run_id, epoch=await _epoch(server, access, run_id), **access) as client:
        updated = 0
        async for update in client.publish_policy(version, path=path, **options):
            updated += update.state == "updated"
            note = f"  {update.message}" if update.message else ""
            print(f"{update.elapsed_seconds:8.2f} s  {update.engine_id}  {update.state}{note}", file=out, flush=True)
        pool = options.get("pool", DEFAULT_POOL)
        engines = sum(engine.pool == pool for engine in await client.list_engines())
        if not engines:
            print(f"version {version}: no engine is in pool {pool!r} yet; those that come get it", file=out)
        elif not updated:
            print(f"version {version}: every engine held it already", file=out)
        else:
            print(f"version {version}: {updated} engine{'' if updated == 1 else 's'} updated", file=out)


async def _epoch(server: str, access: Mapping[str, Any], run_id: str) -> int:
    """The run's own: a person publishes on behalf of its trainer."""
    async with connect(server, run=run_id, **access) as client:
        try:
            return (await client.get_run()).state.trainer_epoch
        except Refused as refusal:
            if refusal.code != "NOT_FOUND":
                raise
            return 0  # publishing makes the run
