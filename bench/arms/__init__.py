"""Control arms: other ways to schedule, on the same simulated engines, workloads and seeds.

    fifo           late binding: one queue, oldest first, to the emptiest engine with a free slot
    oracle         late binding, longest output first; it alone is told the hidden lengths
    round-robin, least-in-flight, sticky, prefix, cache-aware
                   routers: bound to an engine on arrival, the engine queues what it has no room for

To add one, add a class and a row here.
"""

from __future__ import annotations

from collections.abc import Callable

from rolloutd.bench.arms.late import LateBinding, longest_first, oldest_first
from rolloutd.bench.arms.routers import cache_aware, least_in_flight, prefix_first, round_robin, sticky
from rolloutd.bench.arms.routing import Router
from rolloutd.bench.virtual_core import Core

ARMS: dict[str, Callable[[], Core]] = {
    "fifo": lambda: LateBinding(oldest_first),
    "round-robin": lambda: Router(round_robin()),
    "least-in-flight": lambda: Router(least_in_flight),
    "sticky": lambda: Router(sticky()),
    "prefix": lambda: Router(prefix_first),
    "cache-aware": lambda: Router(cache_aware),
    "oracle": lambda: LateBinding(longest_first),
}
