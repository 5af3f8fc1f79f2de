"""Random schedules in virtual time: budgets and floors hold, nothing starves, nothing is lost, and every token is of the policy
version that it names, through publications, crashes and calls that go wrong. `make schedules` runs the first 10,000.

What is asserted stands in `auditor`, `ceilings`, `floors`, `publications` and `windows`; what happens, in `random_world`. All of
it is looked at with every event but the full `check()` of core, index and engines: with every 32nd, and always at the end. A
failure names its seed; `python -m tests.scheduler.virtual.random_world SEED` replays it with a full check at every event.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from rolloutd.bench.virtual_faults import Misdeed
from tests.scheduler.virtual.random_world import RandomWorld

SCHEDULES = int(os.environ.get("ROLLOUTD_SCHEDULES", "1000"))
CHUNK = 250
ENOUGH = 1_000  # to meet everything in `WANTED`
CHECK_EVERY = 32

# What random schedules must have met, or they are not the test they claim to be.
WANTED = (
    "COMPLETED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "QUEUE_TIMEOUT",
    "NO_ENGINE",
    "ENGINE_REFUSED",
    "ENGINE_FAILED",
    "RUN_ENDED",
    "aborts PREEMPT",
    "aborts BUDGET",
    "aborts CANCEL",
    "aborts NO_PROGRESS",
    "resumed",
    "redelivered",
    "attempts given up",
    "reports of attempts that are gone",
    "floors looked at",
    "predicted hits",
    "published DRAIN",
    "published ABORT_AND_RESUME",
    "published RETRACT",
    "published IN_PLACE",
    "publish refused VERSION_BACKWARDS",
    "publish refused ENGINES_OWNED",
    "catch-ups ended",
    "engines failed",
    "aborts PUBLISH",
    "aborts MEMORY",
    "aborts SLICE",
    "aborts SURPLUS",
    "surplus with tokens",
    "surplus without tokens",
    "memory released",
    "mixed versions",
    "hits on kept caches",
    "samples let in",
    "kept back for the mix",
    "stale since it ended",
    "VERSION_UNMET",
    "VERSION_GONE",
    "STALE",
    "rules fired",
    "rules ended",
    *(f"misdeed {misdeed.value}" for misdeed in Misdeed),
)

_met: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            _met.update(RandomWorld(seed, check_every=CHECK_EVERY).play())
        except Exception as error:
            raise AssertionError(
                f"schedule {seed} failed: {error}\nreplay: python -m tests.scheduler.virtual.random_world {seed}"
            ) from error


def test_the_schedules_met_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    if not _met:
        pytest.skip("no schedule ran before this in the same process")
    with capsys.disabled():
        print(
            f"\n{_met['schedules']} schedules: " + ", ".join(f"{count} {name}" for name, count in sorted(_met.items()))
        )
    if _met["schedules"] >= ENOUGH:
        missing = [name for name in WANTED if not _met[name]]
        assert not missing, f"{_met['schedules']} schedules never met {missing}"
