"""The same seed gives the same actions at the same times, in this process and in one whose hashes differ."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from rolloutd.scheduler.actions import Action
from rolloutd.scheduler.events import Event
from tests.scheduler.virtual.random_world import RandomWorld

SEEDS = (3, 61, 196)


def fingerprint(seed: int) -> str:
    """Of every event and action of one schedule, with their times."""
    digest = hashlib.blake2b(digest_size=16)

    def note(event: Event, actions: list[Action]) -> None:
        digest.update(f"{world.simulation.now!r} {event!r} {actions!r}\n".encode())

    world = RandomWorld(seed, check_every=1_000_000, observe=note)
    world.play()
    return digest.hexdigest()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_repeats_itself(seed: int) -> None:
    assert fingerprint(seed) == fingerprint(seed)


def test_seeds_differ() -> None:
    assert len({fingerprint(seed) for seed in SEEDS}) == len(SEEDS)


def test_other_hash_seeds_change_nothing() -> None:
    """Sets and hashes of bytes vary between processes; decisions must not."""
    program = (
        "from tests.scheduler.virtual.test_determinism import SEEDS, fingerprint\n"
        "print(*[fingerprint(seed) for seed in SEEDS])"
    )
    expected = [fingerprint(seed) for seed in SEEDS]
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == expected, f"PYTHONHASHSEED={hash_seed}"
