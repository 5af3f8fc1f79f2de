"""Counters and histograms for the path that every rollout takes: adding to one costs a fraction of a microsecond.

Invariants
- What a scrape sees is what prometheus_client's own counters and histograms would show: cumulative buckets, `_total`.
- One thread adds and scrapes (the event loop's), so nothing is locked.
- A series exists from its first addition on; a counter without labels exists from the start.

What this module does not know: what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class CountTally(Collector):
    """A counter. `name` without `_total`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, labels: tuple[str, ...] = (), amount: float = 1.0) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def describe(self) -> Iterable[Metric]:
        return (CounterMetricFamily(self._name, self._text, labels=self._labels),)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class SpreadTally(Collector):
    """A histogram. `buckets`: upper bounds, rising; the last bucket, without a bound, comes by itself."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = [float(bound) for bound in buckets]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(self._name, self._text, labels=self._labels),)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            total, buckets = 0, []
            for name, count in zip(names, counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
