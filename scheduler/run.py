"""One training job: what it owns and what the core remembers of it.

Invariants
- `rollouts` holds every rollout from acceptance until its result was acknowledged or expired; `unfinished` of them have not
  ended. `delivered` remembers ids of acknowledged ones (bounded), so a late resubmission is not run again.
- `virtual_tokens` per pool grows by expected tokens / fairness weight, put right when the true cost is known: whoever has
  the least goes next (weighted deficit round robin in its virtual-time form).

What this module does not know: how its work is placed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.scheduler.family import Family
from rolloutd.scheduler.group import Group
from rolloutd.scheduler.ledger import Ledger
from rolloutd.scheduler.lengths import LengthModel
from rolloutd.scheduler.lineage import Lineage
from rolloutd.scheduler.meter import Meter
from rolloutd.scheduler.mix import Mix
from rolloutd.scheduler.mix_hold import MixHold
from rolloutd.scheduler.outbox import Consumer
from rolloutd.scheduler.over_launch import OverLaunch
from rolloutd.scheduler.phase import PhaseState
from rolloutd.scheduler.prompt import LastPrompt
from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.rules.book import RuleBook
from rolloutd.scheduler.rules.counted import NOTHING_COUNTED
from rolloutd.scheduler.spec import RunSettings, StepReport
from rolloutd.scheduler.staleness import Window
from rolloutd.scheduler.states import RolloutClass, TaskType, TrainerState
from rolloutd.scheduler.views import Decision

if TYPE_CHECKING:
    from rolloutd.scheduler.entry import Entry, EntryKey
    from rolloutd.scheduler.lanes import Backlog
    from rolloutd.scheduler.rollout import Rollout
    from rolloutd.scheduler.tail import Tail
    from rolloutd.scheduler.timers import Timer

REMEMBERED_IDS: Final = 65_536
MOST_POOLS: Final = 64  # that one run may name
KEPT_CHANGES: Final = 64  # of its rules, the newest


class Run:
    __slots__ = (
        "backlogs",
        "bound",
        "by_step",
        "cached_tokens",
        "consumers",
        "counted",
        "delivered",
        "dropped_samples",
        "dispatches",
        "ended",
        "entries",
        "entries_by_prompt",
        "epoch",
        "family",
        "finished_by_class",
        "finished_by_task",
        "finished_samples",
        "groups",
        "idle_groups",
        "kind_streak",
        "lease_timer",
        "led",
        "ledger",
        "last_prompt",
        "lengths",
        "lineages",
        "mix",
        "mix_hold",
        "no_capacity_since",
        "no_capacity_told_at",
        "over_launch",
        "paused",
        "phase",
        "preemptions",
        "prompt_tokens",
        "published",
        "queued_bytes",
        "ready",
        "report",
        "reserved_for",
        "reviewed",
        "rollouts",
        "rule_decisions",
        "rules",
        "run_id",
        "sampled",
        "settings",
        "slots",
        "slots_mark",
        "stale_results",
        "state_since",
        "supply",
        "tail",
        "together",
        "undelivered_bytes",
        "undelivered_results",
        "unfinished",
        "mean_reward",
        "valid_samples",
        "virtual_tokens",
        "window",
    )

    def __init__(self, run_id: str, settings: RunSettings, config: SchedulerConfig, now: float) -> None:
        self.run_id = run_id
        self.settings = settings
        self.lineages: dict[str, Lineage] = {}  # pool -> policy versions there
        self.bound: dict[str, Rollout] = {}  # queued ones that a change of version may concern
        self.published: set[str] = set()  # pools
        self.window: Window | None = None  # samples that may be on their way, where staleness bounds them
        self.stale_results = 0
        self.paused = False
        self.ended = False
        self.epoch = 0
        self.report = StepReport(step=0, trainer_state=TrainerState.UNKNOWN)
        self.ledger = Ledger(config.budget.default)
        self.lease_timer: Timer | None = None
        self.rules = RuleBook(config.rules)
        self.rule_decisions: deque[Decision] = deque(maxlen=KEPT_CHANGES)
        self.counted = NOTHING_COUNTED  # as it was when rules last looked
        self.state_since = now  # when the trainer came into the state that it reports
        self.phase = PhaseState(config.policy)
        self.last_prompt = LastPrompt()
        self.lengths = LengthModel(config.queue.learn_lengths)
        self.mix = Mix(settings.target_mix, config.queue.max_strata)
        self.mix_hold: MixHold | None = None  # results that are kept back for the mix, where it asks for that
        self.supply = Meter(now)
        self.together: dict[str, dict[str, int]] = {}  # prompt hash -> engine -> attempts there: `grouping.py`
        self.tail: Tail | None = None  # what is left of its critical rollouts, as last looked at
        self.consumers: dict[str, Consumer] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.sampled: dict[str, dict[str, None]] = {}  # id submitted with samples > 1 -> its members that are records
        self.unfinished = 0
        self.groups: dict[str, Group] = {}
        self.over_launch = OverLaunch()
        self.idle_groups: dict[
            str, None
        ] = {}  # that may have no member left that is not acknowledged; looked at each second
        self.family = Family()
        self.delivered: OrderedDict[str, None] = OrderedDict()
        self.led: list[Entry] = []  # critical entries whose leader computes their prompt; some may have gone on
        self.entries: dict[EntryKey, Entry] = {}
        self.reviewed: list[Entry] = []  # what waits and is still to be looked at with new priors of length, last first
        self.entries_by_prompt: dict[str, dict[Entry, None]] = {}  # by prompt hash
        self.by_step: dict[int, set[str]] = {}  # needed_by_step -> unfinished rollouts that are not CRITICAL yet
        self.backlogs: dict[tuple[str, RolloutClass, bool], Backlog] = {}  # (pool, class, short)
        # Of these, by pool, the ones with an entry that may be dispatched: (class, short) -> backlog.
        self.ready: dict[str, dict[tuple[RolloutClass, bool], Backlog]] = {}
        self.queued_bytes = [0] * len(RolloutClass)
        self.virtual_tokens: dict[str, float] = {}
        self.dispatches = 0
        self.kind_streak = 0  # > 0: short dispatches in a row, < 0: long ones
        self.slots = 0  # of the engines that may serve it, as of `slots_mark` (`World.run_slots`)
        self.slots_mark = -1
        self.no_capacity_since: float | None = None
        self.no_capacity_told_at: float | None = None
        self.reserved_for: Entry | None = None  # too large for the budget's gaps: keep what frees up for it
        self.undelivered_bytes = 0
        self.undelivered_results = 0
        self.prompt_tokens = 0  # computed or found by engines; of these, found in a prefix cache
        self.cached_tokens = 0
        self.preemptions = 0
        self.finished_samples = 0
        self.valid_samples = 0
        self.dropped_samples = 0
        self.mean_reward: float | None = None
        self.finished_by_class = [0] * len(RolloutClass)
        self.finished_by_task = [0] * len(TaskType)

    @property
    def step(self) -> int:
        return self.report.step

    def lineage(self, pool: str) -> Lineage:
        """Its policy versions in a pool, made on first use."""
        lineage = self.lineages.get(pool)
        if lineage is None:
            lineage = self.lineages[pool] = Lineage(self.run_id, pool)
        return lineage

    def refuse_pool(self, pool: str) -> Refusal | None:
        """Refuses one pool more than a run may name; its versions, queues and metrics are kept per pool."""
        if pool in self.lineages or len(self.lineages) < MOST_POOLS:
            return None
        return invalid(
            "pool", f"is {pool!r}; run {self.run_id!r} uses {MOST_POOLS} pools already, the most there may be"
        )

    def newest_version(self, pool: str) -> int:
        lineage = self.lineages.get(pool)
        return 0 if lineage is None else lineage.version

    def has_published(self, pool: str) -> bool:
        """Whether its work needs engines that acknowledged one of its versions."""
        return pool in self.published

    def waits_in(self, pool: str) -> bool:
        """Whether anything of this run is queued in a pool, held or not."""
        return any(backlog.count for (its_pool, _, _), backlog in self.backlogs.items() if its_pool == pool)

    def remember_delivered(self, rollout_id: str) -> None:
        self.delivered[rollout_id] = None
        if len(self.delivered) > REMEMBERED_IDS:
            self.delivered.popitem(last=False)

    def demand_tokens_per_second(self) -> float:
        """What the trainer eats, in tokens: as reported, else samples times their mean length."""
        report = self.report
        if report.consume_tokens_per_second:
            return report.consume_tokens_per_second
        if not report.consume_samples_per_second:
            return 0.0
        return report.consume_samples_per_second * self.lengths.mean(TaskType.GENERATION)

    def pressure(self, now: float) -> float:
        """How much the trainer waits for us, in [0,1]: 1 when it says so, else demand over supply."""
        report = self.report
        if report.trainer_state is TrainerState.WAITING:
            return 1.0
        demand = self.demand_tokens_per_second()
        if demand <= 0.0:
            return 0.5
        supply = self.supply.per_second(now)
        pressure = 1.0 if supply <= 0.0 else min(1.0, demand / supply)
        if report.buffer_fill is not None:
            pressure *= 1.0 - min(1.0, max(0.0, report.buffer_fill))
        return pressure
