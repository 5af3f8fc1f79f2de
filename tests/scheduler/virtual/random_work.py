"""Random submissions: prompts that share beginnings with each other and with what has ended, of every kind and limit."""

from __future__ import annotations

import random

import numpy as np

from rolloutd.scheduler.spec import TOKEN_BYTES, RolloutSpec
from rolloutd.scheduler.states import OnPreempt, Origin, RolloutClass, TaskType
from tests.scheduler.virtual.random_fleet import LONGEST_OUTPUT, LONGEST_PROMPT, VOCABULARY
from tests.scheduler.virtual.random_publishing import RandomPublishing


class RandomWork:
    def __init__(self, rng: random.Random, publishing: RandomPublishing) -> None:
        self.rng = rng
        self.publishing = publishing
        self.submitted: list[tuple[str, str]] = []  # (run id, rollout id)
        self.stems = [self._tokens(rng.randint(8, 48)) for _ in range(3)]
        self.prompts: list[bytes] = []
        self.turns: list[bytes] = []  # prompts with their outputs

    def note_turn(self, text: bytes) -> None:
        """A prompt with its output has ended: a later prompt may begin with it."""
        if len(text) // TOKEN_BYTES <= LONGEST_PROMPT - 8:
            self.turns.append(text)

    def _tokens(self, count: int) -> bytes:
        return np.array([self.rng.randrange(3, VOCABULARY) for _ in range(count)], dtype="<u4").tobytes()

    def _prompt(self) -> bytes:
        rng = self.rng
        if self.prompts and rng.random() < 0.3:
            return rng.choice(self.prompts)
        if self.turns and rng.random() < 0.2:  # the next turn of something that has ended
            return rng.choice(self.turns) + self._tokens(rng.randint(1, 8))
        stem = rng.choice([*self.stems, b""])
        prompt = stem + self._tokens(rng.randint(1, LONGEST_PROMPT - len(stem) // 4))
        self.prompts.append(prompt)
        return prompt

    def spec(self, run_id: str) -> RolloutSpec:
        rng = self.rng
        samples = rng.choice([1, 1, 1, 2, 4])
        task = rng.choice([TaskType.GENERATION] * 4 + [TaskType.REWARD, TaskType.STATE_QUERY, TaskType.REPLAY])
        prompt = self._prompt()
        long = rng.randint(1, LONGEST_OUTPUT)
        output = {TaskType.REPLAY: 0, TaskType.GENERATION: long}.get(task, rng.randint(1, 10))
        sampling: dict[str, object] = {}
        if output and rng.random() < 0.5:
            sampling["custom_params"] = {"end_at_tokens": len(prompt) // 4 + rng.randint(1, output)}
        if output > 4 and rng.random() < 0.1:
            sampling["min_new_tokens"] = rng.randint(1, output)
        if output and rng.random() < 0.1:
            sampling["stop_token_ids"] = tuple(rng.randrange(3, VOCABULARY) for _ in range(40))
        if rng.random() < 0.05:
            sampling["frequency_penalty"] = 0.5  # not resumable; the simulated model does not look at it
        pool = rng.choice(["policy"] * 12 + ["reward", "nowhere"])
        mine = [name for run, name in self.submitted if run == run_id]
        group_id = rng.choice(["", "", "", "g1", "g2"])
        group_size = rng.choice([0, 0, 6]) if samples <= 4 else 0
        return RolloutSpec(
            rollout_id=f"r{len(self.submitted)}-{rng.getrandbits(24):06x}",
            token_bytes=prompt,
            samples=samples,
            seeds=tuple(rng.getrandbits(31) for _ in range(samples)) if rng.random() < 0.8 else (),
            rollout_class=rng.choice([None, *RolloutClass]),
            task_type=task,
            pool=pool,
            group_id=group_id,
            group_size=group_size,
            group_keep=self._kept(group_id, samples, group_size),
            turn=rng.choice([0, 0, 1]),
            parent_rollout_id=rng.choice(mine) if mine and rng.random() < 0.1 else "",
            stratum=rng.choice(["", "a", "b", "c"]),
            origin=rng.choice([Origin.CURRENT_POLICY, Origin.EVALUATION]),
            needed_by_step=rng.choice([None, None, 0, 1, 2, 5]),
            deadline_seconds=rng.choice([0.0] * 8 + [0.3, 2.0, 60.0]),
            queue_ttl_seconds=2.0 if pool != "policy" else rng.choice([0.0] * 8 + [1.0, 5.0]),
            max_attempts=rng.choice([0, 0, 1, 2]),
            on_preempt=rng.choice([None, *OnPreempt]),
            fail_fast=rng.random() < 0.05,
            want_progress=rng.random() < 0.1,
            max_new_tokens=output,
            sampling=sampling,
            logprobs=rng.random() < 0.3,
            **self._versions(run_id, pool),
        )

    def _kept(self, group_id: str, samples: int, group_size: int) -> int:
        """Of a group of its own often fewer than all; of a shared one sometimes what the others did not say: it is refused."""
        rng = self.rng
        size = group_size or samples
        if not group_id:
            return rng.randint(1, size) if samples > 1 and rng.random() < 0.5 else 0
        return rng.choice([0, 0, 0, min(2, size)])

    def _versions(self, run_id: str, pool: str) -> dict[str, int]:
        """What it asks of the versions that write it; mostly nothing."""
        rng = self.rng
        wanted: dict[str, int] = {}
        newest = self.publishing.newest.get((run_id, pool), 0)
        if rng.random() < 0.7:
            return wanted
        ahead = 1 if self.publishing.active else 0
        match rng.choice(["min", "exact", "staleness", "span", "span"]):
            case "min":
                wanted["min_version"] = max(0, newest + rng.choice([-1, 0, ahead]))
            case "exact":
                wanted["exact_version"] = max(0, newest + rng.choice([-1, 0, 0, ahead]))
            case "staleness":
                wanted["max_staleness"] = rng.choice([0, 1])
            case "span":
                wanted["max_partial_span"] = rng.choice([0, 0, 1])
        if pool == "policy":
            self.publishing.wanted[run_id] = max(self.publishing.wanted[run_id], *wanted.values())
        return wanted
