"""The figures of one epoch, and their mean and spread over seeds.

Invariants
- A figure without data is None, never 0 and never NaN. Ratios are against the bound of the same workload on the same engines.
- Everything but `handle_us_per_rollout` is a function of (arm, workload, seed, epoch).

What this module does not know: how an epoch was served, how a table looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, stdev

from rolloutd.bench.bounds import EngineShape, bound, workload_bound
from rolloutd.bench.ceiling import workload_hit_ceiling, workload_lru_hit
from rolloutd.bench.metrics import RolloutRecord, percentile
from rolloutd.bench.simulated import EpochRecord
from rolloutd.bench.workload import Kind, Workload
from rolloutd.engines.sim.config import MachineConfig

REWARD_WARM_UP_SECONDS = 10.0  # reward queries that arrive earlier are not counted: the pool is only filling up
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of results; field names are the keys of its JSON.

    critical_over_bound: end of the last critical rollout that is no reward query, in bounds of the critical work alone.
    reward_p99_seconds: from submission to result, of queries submitted after the first `REWARD_WARM_UP_SECONDS`.
    prefix_hit_lru: what one cache as large as the pool's, that forgets the least recently used, would serve in order of arrival; None
    where that is no less than the ceiling. imbalance: most output tokens on one engine over their mean. reusable_over_bound,
    background_over_bound: end of the last of that class, in bounds of the whole. session_mean_seconds: from the start to the end
    of a session's last turn.
    session_over_alone: mean end of sessions over the mean of what each would take alone, with its cache. used: share of the
    pool's decode capacity that the output took. prefill_share: of engine time. moves: dispatches per rollout, less one.
    Of training loops: idle_ratio, share of time in which nothing trains, and its least by the bound; samples_per_second, those
    that were trained on. handle_us_per_rollout: CPU microseconds inside the scheduler.
    """

    arm: str
    workload: str
    seed: int
    epoch: int
    makespan_over_bound: float | None = None
    critical_over_bound: float | None = None
    reward_p99_seconds: float | None = None
    prefix_hit: float | None = None
    prefix_hit_ceiling: float | None = None
    prefix_hit_lru: float | None = None
    imbalance: float | None = None
    reusable_over_bound: float | None = None
    background_over_bound: float | None = None
    session_mean_seconds: float | None = None
    session_over_alone: float | None = None
    makespan_seconds: float | None = None
    bound_seconds: float | None = None
    used: float | None = None
    prefill_share: float | None = None
    moves: float | None = None
    idle_ratio: float | None = None
    idle_ratio_least: float | None = None
    samples_per_second: float | None = None
    failed: int = 0
    handle_us_per_rollout: float | None = None


NAMES = tuple(one.name for one in fields(Figures))[4:]


@dataclass(frozen=True, slots=True)
class Limit:
    """What no schedule can beat for one workload, worked out once for all arms."""

    whole_seconds: float
    decode_work_seconds: float
    critical_seconds: float | None
    hit_ceiling: float
    session_seconds: float | None  # mean over sessions, each alone
    hit_lru: float | None = None  # with the pool's memory, None where it does not bind

    @classmethod
    def of(cls, workload: Workload, machines: Sequence[MachineConfig]) -> Limit:
        """Bounds and hit ceiling on these engines."""
        shapes = [
            EngineShape(one.timing, one.slots, one.kv_tokens, one.page_size_tokens, stalls=True) for one in machines
        ]
        kinds = {item.kind for item in workload.items} | {session.kind for session in workload.sessions}
        has_critical = Kind.CRITICAL in kinds
        critical = workload_bound(workload, shapes, Kind.CRITICAL).seconds if has_critical else None
        page = min(shape.page_size_tokens for shape in shapes)
        whole = workload_bound(workload, shapes)
        ceiling = workload_hit_ceiling(workload, page)
        lru = workload_lru_hit(workload, page, sum(one.capacity_tokens for one in machines))
        alone = [bound((), shapes, [one]).longest_alone_seconds for one in workload.sessions]
        return cls(
            whole_seconds=whole.seconds,
            decode_work_seconds=whole.decode_work_seconds,
            critical_seconds=critical,
            hit_ceiling=ceiling,
            session_seconds=fmean(alone) if alone else None,
            hit_lru=lru if lru is not None and lru < ceiling else None,
        )


def figures(
    arm: str,
    workload: Workload,
    seed: int,
    epoch: int,
    record: EpochRecord,
    limit: Limit,
    machines: Sequence[MachineConfig],
) -> Figures:
    """Of one epoch."""
    records = list(record.records.values())
    prompt_tokens = sum(one.prompt_tokens for one in records)
    cached_tokens = sum(one.cached_tokens for one in records)
    whole = limit.whole_seconds
    ends = {kind: _last_end(records, kind) for kind in Kind}
    rewards = [
        one.delivered_seconds - one.submitted_seconds
        for one in records
        if one.kind is Kind.REWARD
        and one.delivered_seconds is not None
        and one.submitted_seconds >= REWARD_WARM_UP_SECONDS
    ]
    critical = ends[Kind.CRITICAL]
    tokens = list(record.engine_tokens.values())
    sessions = list(record.session_ends.values())
    return Figures(
        arm=arm,
        workload=workload.name,
        seed=seed,
        epoch=epoch,
        makespan_over_bound=_rounded(record.seconds / whole),
        critical_over_bound=_ratio(critical, limit.critical_seconds),
        reward_p99_seconds=_rounded(percentile(rewards, 99)),
        prefix_hit=_ratio(cached_tokens, prompt_tokens),
        prefix_hit_ceiling=_rounded(limit.hit_ceiling),
        prefix_hit_lru=_rounded(limit.hit_lru),
        imbalance=_ratio(max(tokens) * len(machines), sum(tokens)) if tokens else None,
        reusable_over_bound=_ratio(ends[Kind.REUSABLE], whole),
        background_over_bound=_ratio(ends[Kind.BACKGROUND], whole),
        session_mean_seconds=_rounded(fmean(sessions)) if sessions else None,
        session_over_alone=_ratio(fmean(sessions), limit.session_seconds) if sessions else None,
        makespan_seconds=_rounded(record.seconds),
        bound_seconds=_rounded(whole),
        used=_rounded(limit.decode_work_seconds / record.seconds),
        prefill_share=_rounded(record.prefill_seconds / (len(machines) * record.seconds)),
        moves=_rounded(record.dispatches / len(records) - 1.0),
        failed=len(record.failed),
        handle_us_per_rollout=round(record.handle_seconds * 1e6 / len(records), 1),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds: mean and standard deviation (None of one seed)."""

    mean: float
    deviation: float | None


def over_seeds(lines: Iterable[Figures]) -> dict[tuple[str, str, int], dict[str, Spread]]:
    """(workload, arm, epoch) -> figure -> spread; figures without data are left out."""
    grouped: dict[tuple[str, str, int], list[Figures]] = {}
    for line in lines:
        grouped.setdefault((line.workload, line.arm, line.epoch), []).append(line)
    spreads: dict[tuple[str, str, int], dict[str, Spread]] = {}
    for key, of_key in grouped.items():
        spreads[key] = {}
        for name in NAMES:
            values = [value for line in of_key if (value := asdict(line)[name]) is not None]
            if values:
                spreads[key][name] = Spread(fmean(values), stdev(values) if len(values) > 1 else None)
    return spreads


def gap_closed(lines: Sequence[Figures], arm: str, workload: str, epoch: int) -> Spread | None:
    """Share of the gap between FIFO with late binding and oracle longest-first that an arm closes, over seeds.

    By makespan, all three in the same epoch. None where a seed lacks one of them. A seed with a gap of less than `LEAST_GAP`
    bounds says nothing and is left out.
    """
    by_arm = {
        (line.arm, line.seed, line.epoch): line.makespan_over_bound for line in lines if line.workload == workload
    }
    shares = []
    for (of_arm, seed, of_epoch), mine in by_arm.items():
        if of_arm != arm or of_epoch != epoch:
            continue
        fifo, best = by_arm.get(("fifo", seed, epoch)), by_arm.get(("oracle", seed, epoch))
        if fifo is None or best is None or mine is None:
            return None
        if fifo - best >= LEAST_GAP:
            shares.append((fifo - mine) / (fifo - best))
    return Spread(fmean(shares), stdev(shares) if len(shares) > 1 else None) if shares else None


LEAST_GAP = 0.01


def _last_end(records: Iterable[RolloutRecord], kind: Kind) -> float | None:
    return max(
        (one.delivered_seconds for one in records if one.kind is kind and one.delivered_seconds is not None),
        default=None,
    )


def _ratio(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else round(value / by, DIGITS)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
