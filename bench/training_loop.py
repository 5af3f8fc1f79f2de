"""Q5: a training loop of Q1 steps in virtual time, synchronous and one step off-policy.

    synchronous    submit step k, wait for all of it, train, publish, go on with step k + 1
    one step off   step k + 1 is submitted as REUSABLE when version k is out, so it fills what step k leaves idle and goes on while
                   step k trains; its tokens are then at most one version behind the weights that they train

Every tenth step repeats an earlier one's prompts; in every second step Q3's background runs beside it. Entropy falls.

Invariants
- A step trains once all its rollouts are back, for `TRAIN_SECONDS`; then its version is published, and the loop waits for that.
- Background belongs to no step: what is unfinished goes on.
- The same loop, prompts and lengths for every arm.

What this module does not know: how anything is scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from rolloutd.bench.bounds import EngineShape, workload_bound
from rolloutd.bench.ceiling import workload_hit_ceiling
from rolloutd.bench.figures import Figures
from rolloutd.bench.scenarios import Q1, Scenario
from rolloutd.bench.simulated import UPDATE_SECONDS, Epochs, Served
from rolloutd.bench.w1 import ESSAY
from rolloutd.bench.workload import WorkClass, Workload
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.scheduler.states import TrainerState

STEPS = 50
TRAIN_SECONDS = 20.0
REPEAT_EVERY = 10  # such a step has the prompts of the first of its ten
FIRST_ENTROPY, LAST_ENTROPY, ENTROPY_STEPS = 1.0, 0.3, 20.0  # falls towards the last with this time constant
BACKGROUND = Scenario("background", "Q3's background", (ESSAY,))
DIGITS = 4

LOOPS = ("Q5", "Q5-off")  # synchronous, one step off


class TrainingLoop:
    """One loop over one scheduler. `off`: one step off-policy. `says_steps`: such a trainer says which step needs its work of the next
    one, so that it becomes critical with that step; else it stays REUSABLE."""

    def __init__(
        self,
        epochs: Epochs,
        seed: int,
        vocabulary_size: int,
        *,
        steps: int,
        off: bool,
        scale: int = 1,
        says_steps: bool = True,
    ) -> None:
        self.waits: list[float] = []  # of the trainer for each step's rollouts, seconds
        self.taken: list[float] = []  # from submission to the last rollout, seconds
        self.steps: list[Served] = []
        self.background: list[Served] = []
        self.seconds = 0.0
        self._epochs = epochs
        self._seed = seed
        self._vocabulary_size = vocabulary_size
        self._count = steps
        self._off = off
        self._scale = scale
        self._says_steps = says_steps

    def run(self, note: Callable[[int], None] | None = None) -> None:
        """The whole loop; `note` is called with the number of steps done."""
        epochs = self._epochs
        started = epochs.simulation.now
        for step in range(self._count):
            asked = epochs.simulation.now
            self._report(step, TrainerState.WAITING)
            self._begin(step)
            if self._off:
                self._begin(step + 1)
            if step % 2:
                drawn = BACKGROUND.draw(self._seed, self._vocabulary_size, step=step, scale=self._scale)
                self.background.append(epochs.begin(drawn))
            served = self.steps[step]
            epochs.until(lambda of=served: of.over)  # type: ignore[misc]
            self.waits.append(epochs.simulation.now - asked)
            self.taken.append(epochs.simulation.now - served.started)
            self._report(step, TrainerState.TRAINING)
            epochs.rest(TRAIN_SECONDS)
            self._report(step, TrainerState.SYNCING)
            epochs.publish()
            if note is not None:
                note(step + 1)
        self.seconds = epochs.simulation.now - started

    def workload(self, step: int) -> Workload:
        """The rollouts of a step, as Q1 draws them."""
        repeats = step % REPEAT_EVERY == REPEAT_EVERY - 1
        source = step - step % REPEAT_EVERY if repeats else step
        drawn = Q1.draw(
            self._seed,
            self._vocabulary_size,
            step=source,
            epoch=int(repeats),
            scale=self._scale,
            needed_by_step=step,
        )
        if not self._off or step == 0:
            return drawn
        needed = step if self._says_steps else None
        ahead = (replace(item, work_class=WorkClass.REUSABLE, needed_by_step=needed) for item in drawn.items)
        return Workload.of(drawn.name, ahead)

    def _begin(self, step: int) -> None:
        if step == len(self.steps) and step < self._count:
            self.steps.append(self._epochs.begin(self.workload(step)))

    def _report(self, step: int, state: TrainerState) -> None:
        entropy = LAST_ENTROPY + (FIRST_ENTROPY - LAST_ENTROPY) * math.exp(-step / ENTROPY_STEPS)
        served = self.steps[step] if step < len(self.steps) else None
        needed = 512 * self._scale if served is None else served.left
        waiting = state is TrainerState.WAITING
        self._epochs.report(step, state, samples_needed=needed if waiting else 0, policy_entropy=entropy)


def loop_bound_seconds(workloads: Sequence[Workload], engines: Sequence[EngineShape], off: bool) -> float:
    """Below which no loop over these steps ends.

    Synchronous: each step's bound, its training and its update, one after the other. One step off: the longer of all the work at
    full batches, and of a chain: a step is submitted when the one before it begins, so it is back no earlier than its own bound
    after that, and what follows begins when it has been trained.
    """
    bounds = [workload_bound(workload, engines) for workload in workloads]
    rest = TRAIN_SECONDS + UPDATE_SECONDS
    if not off:
        return sum(one.seconds for one in bounds) + rest * len(workloads)
    work = sum(max(one.decode_work_seconds, one.both_works_seconds) for one in bounds)
    submitted = begun = 0.0
    for one in bounds:
        submitted, begun = begun, max(begun, submitted + one.seconds) + rest
    return max(work + rest, begun)


def loop_hit_ceiling(workloads: Sequence[Workload], page_size_tokens: int) -> float:
    """Share of the steps' prompt tokens that an endless cache would serve which a policy version empties, in [0, 1).

    What a step shares with an earlier one counts as computed anew: between the two that have common prompts weights were published.
    """
    tokens = [sum(item.prompt_tokens for item in workload.items) for workload in workloads]
    hits = [workload_hit_ceiling(workload, page_size_tokens) for workload in workloads]
    return sum(hit * count for hit, count in zip(hits, tokens, strict=True)) / sum(tokens)


def loop_figures(arm: str, name: str, seed: int, loop: TrainingLoop, machines: Sequence[MachineConfig]) -> Figures:
    """Of a loop that has run; `makespan_over_bound` is that of the whole loop, `critical_over_bound` the mean over its steps."""
    shapes = [EngineShape(one.timing, one.slots, one.kv_tokens, one.page_size_tokens, stalls=True) for one in machines]
    workloads = [loop.workload(step) for step in range(len(loop.steps))]
    off = name == LOOPS[1]
    bound_seconds = loop_bound_seconds(workloads, shapes, off)
    records = [record for served in loop.steps for record in served.record.records.values()]
    tokens: dict[str, int] = {}
    for served in (*loop.steps, *loop.background):
        for engine, count in served.record.engine_tokens.items():
            tokens[engine] = tokens.get(engine, 0) + count
    over = [
        took / workload_bound(workload, shapes).seconds for took, workload in zip(loop.taken, workloads, strict=True)
    ]
    return Figures(
        arm=arm,
        workload=name,
        seed=seed,
        epoch=0,
        makespan_over_bound=round(loop.seconds / bound_seconds, DIGITS),
        critical_over_bound=None if off else round(fmean(over), DIGITS),
        prefix_hit=round(sum(one.cached_tokens for one in records) / sum(one.prompt_tokens for one in records), DIGITS),
        prefix_hit_ceiling=round(loop_hit_ceiling(workloads, min(one.page_size_tokens for one in machines)), DIGITS),
        imbalance=round(max(tokens.values()) * len(machines) / sum(tokens.values()), DIGITS),
        makespan_seconds=round(loop.seconds, DIGITS),
        bound_seconds=round(bound_seconds, DIGITS),
        idle_ratio=round(1.0 - TRAIN_SECONDS * len(loop.steps) / loop.seconds, DIGITS),
        idle_ratio_least=round(1.0 - TRAIN_SECONDS * len(loop.steps) / bound_seconds, DIGITS),
        samples_per_second=round(len(records) / loop.seconds, DIGITS),
        failed=sum(len(served.record.failed) for served in loop.steps),
    )
