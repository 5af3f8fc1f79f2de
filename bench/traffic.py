"""Draws one kind of traffic: groups that share a prompt, or reward queries at random times.

Invariants
- Same traffic, seed, step and epoch: same items. Another epoch keeps the prompts and their difficulty, and renews the
  samples (lengths within the prompt, sampling seeds, ids). Another step has new prompts.
- A shared head depends on the seed and the traffic's name only, so it is the same in every step.
- prompt + max_new_tokens of every item fits the context.

What this module does not know: which traffics make up a workload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.workload import Item, Limits, TaskType, WorkClass, random_tokens, stream, token_bytes

SAMPLING_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """`groups` prompts with `samples` rollouts each, all there at the start.

    name: begins every id and names the random streams. prompt: tokens after the shared head of `head_tokens`.
    """

    name: str
    work_class: WorkClass
    stratum: str
    groups: int
    samples: int
    prompt: LogNormal
    output: LogNormal
    head_tokens: int = 0

    def draw(
        self, seed: int, limits: Limits, *, step: int, epoch: int = 0, needed_by_step: int | None = None
    ) -> list[Item]:
        """Items of one step, group by group. Raises ValueError when the shortest of them would not fit `limits`."""
        output = _capped_output(self.output, limits)
        own_room = limits.context_tokens - output.high_tokens - self.head_tokens
        if own_room < self.prompt.low_tokens:
            raise ValueError(
                f"traffic {self.name!r} does not fit: head {self.head_tokens} + prompt {self.prompt.low_tokens} + "
                f"output {output.high_tokens} tokens are over context_tokens {limits.context_tokens}; "
                "lower max_output_tokens or the head"
            )
        prompt_rng = stream(seed, self.name, "prompts", step)
        prompt_lengths = self.prompt.capped(own_room).draw(prompt_rng, self.groups)
        difficulty_rng = stream(seed, self.name, "difficulty", step)
        sample_rng = stream(seed, self.name, "samples", step, epoch)
        output_lengths = output.draw_groups(difficulty_rng, sample_rng, self.groups, self.samples)
        sampling_seeds = sample_rng.integers(0, SAMPLING_SEEDS, size=(self.groups, self.samples))
        head = random_tokens(stream(seed, self.name, "head"), self.head_tokens, limits)

        items: list[Item] = []
        for group in range(self.groups):
            own = random_tokens(prompt_rng, int(prompt_lengths[group]), limits)
            prompt_bytes = token_bytes(np.concatenate((head, own)))
            group_id = f"{self.name}-s{step}e{epoch}-g{group:04d}"
            for sample in range(self.samples):
                items.append(
                    Item(
                        rollout_id=f"{group_id}-{sample}",
                        work_class=self.work_class,
                        task_type=TaskType.GENERATION,
                        prompt_bytes=prompt_bytes,
                        output_tokens=int(output_lengths[group, sample]),
                        max_new_tokens=output.high_tokens,
                        sampling_seed=int(sampling_seeds[group, sample]),
                        stratum=self.stratum,
                        group_id=group_id,
                        sample=sample,
                        needed_by_step=needed_by_step,
                    )
                )
        return items


@dataclass(frozen=True, slots=True)
class RewardTraffic:
    """`queries` short queries that the trainer waits for, each at a uniformly random time within `seconds`: a Poisson process of
    which the number is given.

    Outputs are uniform in 1..max_output_tokens. No two queries share a prompt.
    """

    name: str
    stratum: str
    queries: int
    seconds: float
    prompt: LogNormal
    max_output_tokens: int

    def draw(
        self, seed: int, limits: Limits, *, step: int, epoch: int = 0, needed_by_step: int | None = None
    ) -> list[Item]:
        """Items of one step in arrival order. Raises ValueError when they cannot fit."""
        cap = min(self.max_output_tokens, limits.max_output_tokens or self.max_output_tokens)
        prompt = self.prompt.capped(limits.context_tokens - cap)
        rng = stream(seed, self.name, step, epoch)
        count = self.queries
        arrivals = np.sort(rng.uniform(0.0, self.seconds, count))
        prompt_lengths = prompt.draw(rng, count)
        output_lengths = rng.integers(1, cap + 1, size=count)
        sampling_seeds = rng.integers(0, SAMPLING_SEEDS, size=count)
        return [
            Item(
                rollout_id=f"{self.name}-s{step}e{epoch}-{query:05d}",
                work_class=WorkClass.CRITICAL,
                task_type=TaskType.REWARD,
                prompt_bytes=token_bytes(random_tokens(rng, int(prompt_lengths[query]), limits)),
                output_tokens=int(output_lengths[query]),
                max_new_tokens=cap,
                sampling_seed=int(sampling_seeds[query]),
                stratum=self.stratum,
                arrival_seconds=float(arrivals[query]),
                needed_by_step=needed_by_step,
            )
            for query in range(count)
        ]


def _capped_output(output: LogNormal, limits: Limits) -> LogNormal:
    return output if limits.max_output_tokens is None else output.capped(limits.max_output_tokens)
