"""Counters and histograms for the path that every rollout takes: adding to one costs a fraction of a microsecond.

Invariants
- What a scrape sees is what prometheus_client's own counters and histograms would show: cumulative buckets, `_total`.
- One thread adds and scrapes (the event loop's), so nothing is locked.
- A histogram's series exists from its first addition on, a counter's from when it is asked for; a counter without labels
  exists from the start.

What this module does not know: what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Spread:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class CountTally(Collector):
    """A counter. `name` without `_total`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._series: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.series(())
        registry.register(self)

    def series(self, labels: tuple[str, ...] = ()) -> Count:
        """The series of these label values, to be kept by who adds to it often."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Count()
        return found

    def add(self, labels: tuple[str, ...] = (), amount: float = 1.0) -> None:
        self.series(labels).add(amount)

    def describe(self) -> Iterable[Metric]:
        return (CounterMetricFamily(self._name, self._text, labels=self._labels),)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric(labels, series.value)
        yield family


class SpreadTally(Collector):
    """A histogram. `buckets`: upper bounds, rising; the last bucket, without a bound, comes by itself."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = [float(bound) for bound in buckets]
        self._series: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def series(self, labels: tuple[str, ...]) -> Spread:
        """The series of these label values, to be kept by who adds to it often."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Spread(self._bounds)
        return found

    def add(self, labels: tuple[str, ...], value: float) -> None:
        self.series(labels).add(value)

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(self._name, self._text, labels=self._labels),)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, series in self._series.items():
            total, buckets = 0, []
            for name, count in zip(names, series.counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            if total:
                family.add_metric(labels, buckets, series.total)
        yield family
