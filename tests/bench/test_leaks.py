"""A short `make bench-leaks`: memory needs the long one, everything else shows here."""

from __future__ import annotations

from rolloutd.bench.leaks import Leaks, measure


async def test_cancels_and_streams_leave_nothing_behind() -> None:
    leaks = await measure(cancels=2000, streams=300)
    assert leaks == Leaks(
        cancelled=2000,
        streams_closed=300,
        bytes_per_cancel=None,
        bytes_per_stream=None,
        tasks=0,
        streams=0,
        engine_requests=0,
        counters=0,
    )
