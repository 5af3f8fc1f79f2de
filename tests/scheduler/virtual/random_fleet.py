"""What a random world is made of: the settings of its scheduler, its engines, and their sizes."""

from __future__ import annotations

import random

from rolloutd.bench.virtual_control import ControlTiming
from rolloutd.bench.virtual_engine import SimEngine
from rolloutd.bench.virtual_faults import FaultyEngine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Model
from rolloutd.scheduler.config import (
    BudgetSettings,
    ExecutorSettings,
    IndexSettings,
    PolicySettings,
    PreemptSettings,
    PublishSettings,
    QueueSettings,
    SchedulerConfig,
)
from rolloutd.scheduler.spec import Budget

VOCABULARY = 1_000
CONTEXT_TOKENS = 256
LONGEST_PROMPT = 80
LONGEST_OUTPUT = 90  # prompt + output + 2 fit the smallest engine (192 tokens), so no engine clips
SMALLEST_KV = 192
LARGEST_PAGE = 16
SLOWEST_PREFILL = 2_000.0  # tokens per second, before the slowdown
# How slow the engines of a world are -> `budget.shrink_seconds`. A pass cannot be interrupted, and the longest prefill is 8
# prompts at once: 0.32 s before the slowdown. A longest rollout takes twice as long, so that a shrink has something to do.
SHRINK_SECONDS = {1.0: 0.4, 3.0: 1.0, 10.0: 3.3}
MODEL = Model(vocabulary_size=VOCABULARY, mean_output_tokens=40)


def random_settings(rng: random.Random, slowdown: float, shared: bool) -> SchedulerConfig:
    """slowdown: how slow the engines are; a key of `SHRINK_SECONDS`. shared: one run may take all engines from the other."""
    return SchedulerConfig(
        queue=QueueSettings(
            max_batch_size=rng.choice([2, 8, 32]),
            queue_ttl_seconds=20.0 if shared else 3600.0,
            aging_seconds=rng.choice([2.0, 60.0]),
            overdue_seconds=rng.choice([2.0, 300.0]),
            overdue_turn=rng.choice([2, 8]),
            reserved_short_slots=rng.choice([0, 1]),
            max_defer_seconds=rng.choice([0.2, 5.0]),
            leader_timeout_seconds=rng.choice([0.3, 20.0]),
            min_shared_tokens=rng.choice([1, 16, 32]),
            large_reserve_seconds=rng.choice([0.5, 10.0]),
            decision_ring=64,
            max_strata=rng.choice([2, 64]),
        ),
        preempt=PreemptSettings(
            enabled=rng.random() < 0.8,
            min_run_seconds=rng.choice([0.0, 0.5]),
            cool_down_seconds=rng.choice([0.0, 0.2]),
            time_slice_tokens=rng.choice([0, 4, 16]),
        ),
        policy=PolicySettings(
            cold_start_steps=rng.choice([0, 2, 200]),
            phase_ramp_steps=rng.choice([0, 3]),
            stable_lower_turn=rng.choice([2, 32]),
        ),
        budget=BudgetSettings(
            default=rng.choice([Budget(), Budget(), Budget(max_rollouts=6)]),
            shrink_seconds=SHRINK_SECONDS[slowdown],
            growth_tokens=rng.choice([16, 256]),
            headroom_tokens=64,
        ),
        executor=ExecutorSettings(
            # Longer than the longest silence between two progress reports: 32 steps.
            timeout_seconds=rng.choice([2.0, 6.0]) if slowdown < 10.0 else 6.0,
            max_attempts=rng.choice([1, 3]),
            breaker_faults=rng.choice([1, 3]),
            breaker_seconds=rng.choice([0.5, 3.0]),
            busy_seconds=0.25,
            abort_seconds=rng.choice([1.0, 3.0]),
        ),
        publish=PublishSettings(
            clear_seconds=rng.choice([0.5, 3.0]),
            call_seconds=rng.choice([1.5, 4.0]),
            push_seconds=2.0,
            retry_seconds=0.1,
            flush_tries=rng.choice([2, 10]),
        ),
        index=IndexSettings(
            max_bytes=rng.choice([1 << 14, 1 << 20]),
            page_tokens=rng.choice([1, 4, 16]),
            max_cached_tokens=rng.choice([0, 128]),
        ),
    )


def random_engine(rng: random.Random, number: int, slowdown: float, run_id: str = "") -> FaultyEngine:
    """run_id: whose it is; empty: the first's that publishes to it."""
    config = MachineConfig(
        slots=rng.randint(1, 8),
        kv_tokens=rng.choice([SMALLEST_KV, 400, 2_000]),
        page_size_tokens=rng.choice([1, 4, LARGEST_PAGE]),
        context_tokens=CONTEXT_TOKENS,
        max_prefill_tokens=rng.choice([100, 16_384]),
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        stream_interval=rng.choice([4, 16, 32]),
        max_queued=rng.choice([None, None, 2]),
        timing=TimingModel(
            curve=rng.choice(["flat", "steep"]),
            prefill_tokens_per_second=rng.choice([SLOWEST_PREFILL, 20_000.0]),
            slowdown=slowdown,
        ),
        model=MODEL,
    )
    name = f"engine-{number}"
    weighs = rng.random() < 0.7
    pool = "reward" if number == 3 else "policy"
    control = ControlTiming(
        call_seconds=rng.choice([0.0, 0.001, 0.05]),
        load_seconds=rng.choice([0.02, 0.3, 1.0]),
        pause_poll_seconds=rng.choice([0.1, 1.0]),
    )
    hang_up_seconds = rng.choice([0.7, 2.0])

    def make(incarnation: str) -> SimEngine:
        return SimEngine(
            name,
            config,
            incarnation=incarnation,
            pool=pool,
            run_id=run_id,
            control=control,
            hang_up_seconds=hang_up_seconds,
            kv_cache_bytes=config.capacity_tokens << 12 if weighs else 0,
            remember_prefixes=True,
        )

    return FaultyEngine(make, random.Random(rng.getrandbits(32)))
