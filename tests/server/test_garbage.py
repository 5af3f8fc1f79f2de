"""Full collections wait for a quiet moment, and cyclic garbage is found there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rolloutd.server.garbage import BUSY_SECONDS, QUIET_SECONDS, WORTHWHILE, Garbage


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


class Bench:
    """A server whose quiet and clock are set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.quiet = False
        self.garbage = Garbage(lambda: self.quiet, lambda: self.now)
        self.keep: list[list[int]] = []

    def work(self) -> None:
        """Make enough that a collection is worthwhile."""
        self.keep = [[number] for number in range(2 * WORTHWHILE)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.garbage.start()
    yield made
    made.garbage.stop()


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def old_knot() -> weakref.ref[Knot]:
    """Garbage that has grown old: young collections do not look at it any more."""
    knot = Knot()
    seen = weakref.ref(knot)
    gc.collect(0)
    gc.collect(1)
    del knot
    return seen


def test_the_interpreter_runs_no_full_collection_by_itself(bench: Bench) -> None:
    before = full_collections()
    for _ in range(60):
        bench.work()
        gc.collect(1)
    assert full_collections() == before


def test_nothing_is_collected_while_work_goes_on(bench: Bench) -> None:
    seen = old_knot()
    bench.work()
    for _ in range(10):
        bench.now += 1.0
        assert not bench.garbage.look()
    assert seen() is not None


def test_a_quiet_moment_collects_once(bench: Bench) -> None:
    seen = old_knot()
    bench.work()
    bench.quiet = True
    assert not bench.garbage.look(), "quiet has to last"
    bench.now += QUIET_SECONDS
    assert bench.garbage.look()
    assert seen() is None
    bench.now += QUIET_SECONDS
    assert not bench.garbage.look(), "nothing was made since"


def test_quiet_counts_from_the_last_work(bench: Bench) -> None:
    bench.work()
    bench.quiet = True
    bench.garbage.look()
    bench.quiet = False
    bench.now += QUIET_SECONDS
    assert not bench.garbage.look()
    bench.quiet = True
    assert not bench.garbage.look()


def test_garbage_that_was_frozen_alive_is_found_at_the_next_quiet_moment(bench: Bench) -> None:
    knot = Knot()
    seen = weakref.ref(knot)
    bench.garbage.start()  # freezes it
    del knot
    bench.work()
    bench.quiet = True
    bench.garbage.look()
    bench.now += QUIET_SECONDS
    assert bench.garbage.look()
    assert seen() is None


def test_a_server_that_is_never_quiet_collects_in_the_end(bench: Bench) -> None:
    seen = old_knot()
    bench.now += BUSY_SECONDS - 1
    assert not bench.garbage.look()
    bench.now += 1
    assert bench.garbage.look()
    assert seen() is None


def test_stopping_gives_the_interpreter_its_ways_back() -> None:
    before = gc.get_threshold()
    garbage = Garbage(lambda: True)
    garbage.start()
    assert gc.get_threshold() != before and gc.get_freeze_count() > 0
    garbage.stop()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
