"""What fits by our count is let in by SGLang's own rule, as the simulated engine applies it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import SimRequest
from rolloutd.engines.sim.tokens import Sampling
from rolloutd.scheduler.config import BudgetSettings
from rolloutd.scheduler.promises import Promise, Promises
from rolloutd.scheduler.states import TaskType
from tests.scheduler.kit import Bench, engine, specs

CAPACITY_TOKENS, PAGE_TOKENS = 16_384, 16
MOST_TOKENS = 3000
UNREPORTED_TOKENS = BudgetSettings().headroom_tokens
ARRIVAL_SECONDS = 0.1  # longer than any prefill here


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_by_our_count_never_waits_in_the_engine(seed: int) -> None:
    dice = random.Random(seed)
    machine = SimMachine(
        MachineConfig(slots=256, kv_tokens=CAPACITY_TOKENS, page_size_tokens=PAGE_TOKENS, context_tokens=8192)
    )
    promises, made = Promises(), dict[str, Promise]()
    now, refused = 0.0, 0
    for number in range(150):
        prompt_tokens, output_tokens = dice.randint(1, 400), dice.choice((4, 64, 500, MOST_TOKENS))
        in_full, ends_after = dice.random() < 0.3, dice.randint(1, output_tokens)
        if promises.fits(prompt_tokens, output_tokens, CAPACITY_TOKENS, PAGE_TOKENS, UNREPORTED_TOKENS):
            prompt = np.array([dice.randint(3, 30_000) for _ in range(prompt_tokens)], "<u4").tobytes()
            end = None if in_full else prompt_tokens + ends_after
            machine.submit(
                now, SimRequest(str(number), prompt, Sampling(output_tokens, ignore_eos=in_full, end_at_tokens=end))
            )
            made[str(number)] = Promise(prompt_tokens, output_tokens, in_full)
            promises.make(made[str(number)])
        else:
            refused += 1
        now += ARRIVAL_SECONDS
        for frame in machine.advance(now):
            if frame.finish_reason is not None:
                promises.release(made.pop(frame.rid))
            elif frame.completion_tokens:
                promises.note_written(made[frame.rid], frame.completion_tokens)
        assert machine.load(now).waiting == 0
    assert refused, "the engine was never full"


def test_what_was_not_reported_yet_is_as_much_as_the_settings_say() -> None:
    """Of one that may write 1,000 more the engine counts 700 as yet: 0.3 of what it may have written meanwhile is missing."""
    promises = Promises()
    promises.make(Promise(100, 1_000, in_full=False))
    room = promises.room_tokens(CAPACITY_TOKENS, PAGE_TOKENS, 0)
    assert room == pytest.approx(CAPACITY_TOKENS - 100 - 700 - PAGE_TOKENS)
    assert promises.room_tokens(CAPACITY_TOKENS, PAGE_TOKENS, 200) == pytest.approx(room - 60)
    assert promises.room_tokens(CAPACITY_TOKENS, PAGE_TOKENS, 5_000) == pytest.approx(room - 300), "no more than it may"


def test_long_generations_leave_room_for_a_reward_query() -> None:
    bench = Bench(engine(slots=32, kv_capacity_tokens=CAPACITY_TOKENS, page_tokens=PAGE_TOKENS))
    started = bench.run(*specs("long", 30, tokens=16, max_new_tokens=MOST_TOKENS, sampling={"ignore_eos": True}))
    assert len(started) == 5  # 5 x (16 + 3,000) of 16,384
    assert len(bench.run(*specs("q", 3, tokens=200, task_type=TaskType.REWARD, max_new_tokens=4))) == 3


def test_a_rollout_that_ignores_no_end_is_promised_less_as_time_goes_by() -> None:
    bench = Bench(engine(slots=64, kv_capacity_tokens=CAPACITY_TOKENS, page_tokens=PAGE_TOKENS))
    started = bench.run(*specs("long", 30, tokens=16, max_new_tokens=MOST_TOKENS))
    for one in started:
        bench.write(one.rollout_id, 600)
    assert len(bench.tick(1.0)) > 0
