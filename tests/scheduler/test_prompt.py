"""What is remembered of the last prompt is never told of another one."""

from __future__ import annotations

import hashlib
import random

from rolloutd.scheduler.prompt import LastPrompt, hash_of
from tests.scheduler.kit import ids


def test_answers_are_those_for_the_bytes_given() -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(50_000) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    prompts.append([0])
    last = LastPrompt()
    for _ in range(300):
        tokens = rng.choice(prompts)
        content = ids(tokens)
        if rng.random() < 0.5:
            assert last.largest_id(content) == max(tokens)
        if rng.random() < 0.5:
            assert last.hash_of(content) == hash_of(content) == hashlib.sha256(content).hexdigest()
