"""What `/metrics` says about engines' KV events, read at scrape.

Invariants
- Only engines that publish events have series; labels are registered engines.

What this module does not know: how events are followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolloutd.server.engine_manager import EngineManager
from rolloutd.server.loop import RunLoop


class KvEventsMetrics(Collector):
    def __init__(self, engines: EngineManager, loop: RunLoop) -> None:
        self._engines = engines
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to read before the first scrape

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"rolloutd_engine_kv_events_{name}", text, labels=["engine"])

        connected = GaugeMetricFamily(
            "rolloutd_engine_kv_events_connected", "1 while its KV events are read", labels=["engine"]
        )
        blocks = counter("blocks", "Blocks said to be stored or removed")
        messages = counter("messages", "Messages of KV events")
        gaps = counter("gaps", "Holes in the sequence of messages")
        replayed = counter("replayed_messages", "Messages that were asked for again")
        resets = counter("resets", "Times that everything believed of its cache was dropped")
        families = (connected, blocks, messages, gaps, replayed, resets)
        for engine in self._engines.engines():
            following = engine.kv_events
            if following is None:
                continue
            labels = [engine.engine_id]
            count = following.count
            connected.add_metric(labels, int(following.connected))
            blocks.add_metric(labels, following.blocks)
            messages.add_metric(labels, count.messages + count.replayed)
            gaps.add_metric(labels, count.gaps)
            replayed.add_metric(labels, count.replayed)
            resets.add_metric(labels, count.resets)
        yield from families
        yield from self._cached()

    def _cached(self) -> Iterator[Metric]:
        followed = {engine.engine_id for engine in self._engines.engines() if engine.kv_events is not None}
        known = GaugeMetricFamily("rolloutd_engine_kv_blocks", "Blocks it says it has cached", labels=["engine"])
        unplaced = CounterMetricFamily(
            "rolloutd_engine_kv_blocks_unplaced", "Blocks reported that could not be followed", labels=["engine"]
        )
        for view in self._loop.core.engine_views():
            if view.engine_id in followed:
                known.add_metric([view.engine_id], view.kv_blocks_reported)
                unplaced.add_metric([view.engine_id], view.kv_blocks_unplaced)
        yield known
        yield unplaced
