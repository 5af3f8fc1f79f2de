"""GRPO against rolloutd: 64 prompts x 8 samples a step. Usage: python example_grpo.py [ADDRESS [STEPS]]"""

import asyncio
import sys
import time

import numpy as np

from rolloutd.client import RolloutResult, connect

PROMPTS, SAMPLES = 64, 8


def reward(result: RolloutResult) -> float:
    return float(np.mean(result.tokens % 2)) if result.complete else 0.0  # yours comes here


async def main(address: str = "127.0.0.1:50051", steps: str = "3") -> None:
    rng = np.random.default_rng(0)
    async with connect(address, run="grpo", consumer="rank0", epoch=int(time.time()), auto_acknowledge=False) as client:
        await client.set_budget(max_running_rollouts=128, lease_seconds=600)
        for step in range(int(steps)):
            await client.report_step(step, trainer_state="waiting", samples_needed=PROMPTS * SAMPLES)
            prompts = rng.integers(1000, 2000, (PROMPTS, 32))
            groups = await asyncio.gather(
                *(client.generate_group(p, samples=SAMPLES, max_new_tokens=64, needed_by_step=step) for p in prompts)
            )
            await client.report_step(step, trainer_state="training", samples_needed=0)
            for group in groups:
                rewards = np.array([reward(result) for result in group])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                for result, value, advantage in zip(group, rewards, advantages, strict=True):
                    # loss += -advantage * logprob(result.tokens)
                    client.acknowledge(result, used=bool(result.complete and advantage), reward=value)
            print(f"step {step}: {PROMPTS * SAMPLES} samples, the last group's mean reward {rewards.mean():.3f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
