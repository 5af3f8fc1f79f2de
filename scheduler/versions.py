"""Which policy version wrote a token, and which versions a rollout accepts.

Invariants
- A token carries the version that its engine named for it, and only a version that this engine acknowledged or is being given;
  tokens of any other label are dropped and the engine is fenced.
- Requirements are asked of the oldest token: when it is submitted, whenever it is placed, and when it is delivered.

What this module does not know: how an engine comes to hold a version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rolloutd.scheduler.refusal import Refusal, invalid
from rolloutd.scheduler.spec import TOKEN_BYTES
from rolloutd.scheduler.states import Code

if TYPE_CHECKING:
    from rolloutd.scheduler.engine import Engine
    from rolloutd.scheduler.lineage import Lineage
    from rolloutd.scheduler.result import Piece
    from rolloutd.scheduler.rollout import Attempt, Rollout
    from rolloutd.scheduler.run import Run
    from rolloutd.scheduler.spec import RolloutSpec
    from rolloutd.scheduler.world import World

RETRY_AFTER_SECONDS: Final = 5.0


class Requirement(NamedTuple):
    """What a rollout accepts. `min_version` 0 and None elsewhere: anything."""

    min_version: int
    exact_version: int | None
    max_staleness: int | None
    max_partial_span: int | None

    @property
    def one_version(self) -> bool:
        """Whether all its tokens must be of one version."""
        return self.exact_version is not None or self.max_partial_span == 0


ANYTHING: Final = Requirement(0, None, None, None)


def requirement_of(run: Run, spec: RolloutSpec) -> Requirement:
    """What a submission asks for, with its run's defaults. A staleness or a minimum of the run does not bind an exact version."""
    settings = run.settings
    span = settings.max_partial_span if spec.max_partial_span is None else spec.max_partial_span
    if spec.exact_version is not None:
        return Requirement(spec.min_version or 0, spec.exact_version, spec.max_staleness, span)
    staleness = settings.max_staleness if spec.max_staleness is None else spec.max_staleness
    least = settings.min_version if spec.min_version is None else spec.min_version
    if staleness is None and span is None and not least:
        return ANYTHING
    return Requirement(least, None, staleness, span)


def check_fields(spec: RolloutSpec) -> Refusal | None:
    if spec.min_version is spec.exact_version is spec.max_staleness is spec.max_partial_span is None:
        return None
    for name in ("min_version", "exact_version", "max_staleness", "max_partial_span"):
        value = getattr(spec, name)
        if value is not None and value < 0:
            return invalid(name, f"is {value}; must be 0 or more")
    if spec.exact_version is not None and spec.exact_version < (spec.min_version or 0):
        return invalid("exact_version", f"is {spec.exact_version}, below min_version ({spec.min_version})")
    return None


def check_admission(world: World, run: Run, spec: RolloutSpec) -> Refusal | None:
    """Refuses what no engine will ever hold again; with fail_fast also what none holds yet."""
    wanted = requirement_of(run, spec)
    if wanted is ANYTHING:
        return None
    lineage = run.lineage(spec.pool)
    exact = wanted.exact_version
    if exact is not None and exact < lineage.version and not held_somewhere(world, lineage, exact):
        return Refusal(
            Code.FAILED_PRECONDITION,
            "POLICY_VERSION_GONE",
            f"exact_version: every engine of pool {spec.pool!r} has left version {exact}; the newest is {lineage.version}",
            (("exact_version", "is gone"),),
        )
    if exact is not None and wanted.max_staleness is not None and exact < lineage.version - wanted.max_staleness:
        return invalid(
            "exact_version",
            f"is {exact}, {lineage.version - exact} behind version {lineage.version}; max_staleness is {wanted.max_staleness}",
        )
    if spec.fail_fast and not any(fits_engine(lineage, wanted, one) for one in world.pool_engines(run, spec.pool, {})):
        return Refusal(
            Code.UNAVAILABLE,
            "POLICY_VERSION_UNMET",
            f"no engine of pool {spec.pool!r} holds a version that it accepts; the newest is {lineage.version}: retry later",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    return None


def held_somewhere(world: World, lineage: Lineage, version: int) -> bool:
    run = world.runs.get(lineage.run_id)
    if run is None:
        return False
    engines = world.pool_engines(run, lineage.pool, {})
    return any(one.version == version and one.keeps_version for one in engines)


# placing ---------------------------------------------------------------------------------------------------------------


def fits_engine(lineage: Lineage, wanted: Requirement, engine: Engine) -> bool:
    """Whether tokens of the version that this engine holds are accepted."""
    version = engine.version
    if engine.quarantine or version < wanted.min_version:
        return False
    if wanted.exact_version is not None and version != wanted.exact_version:
        return False
    return wanted.max_staleness is None or lineage.version - version <= wanted.max_staleness


def may_continue_on(rollout: Rollout, version: int) -> bool:
    """Whether a version may write on behind the tokens that a rollout has."""
    newest = rollout.newest_version
    oldest = rollout.oldest_version
    if newest is None or oldest is None:
        return True
    if version < newest:  # a policy never follows a newer one
        return False
    if rollout.requirement.exact_version is not None:
        return version == oldest
    span = rollout.requirement.max_partial_span
    return span is None or version - oldest <= span


def fits(lineage: Lineage, rollout: Rollout, engine: Engine) -> bool:
    """Whether the engine may run this rollout with the version that it holds."""
    return fits_engine(lineage, rollout.requirement, engine) and may_continue_on(rollout, engine.version)


def may_cross(attempt: Attempt, version: int, newest: int) -> bool:
    """Whether a running attempt may go on under the weights of `version`, when `newest` is the newest version of its run."""
    wanted = attempt.rollout.requirement
    if wanted.one_version:
        return False
    oldest = attempt.rollout.oldest_version
    oldest = attempt.version if oldest is None else oldest
    if wanted.max_partial_span is not None and version - oldest > wanted.max_partial_span:
        return False
    return wanted.max_staleness is None or newest - oldest <= wanted.max_staleness


def must_restart(world: World, rollout: Rollout) -> bool:
    """Whether tokens that a rollout kept are of no use any more: too old, or nobody may write on behind them."""
    oldest = rollout.oldest_version
    if oldest is None:
        return False
    wanted = rollout.requirement
    lineage = rollout.run.lineage(rollout.spec.pool)
    if too_old(lineage, rollout):
        return True
    if oldest == lineage.version or (wanted.max_partial_span is None and wanted.exact_version is None):
        return False
    if may_continue_on(rollout, lineage.version):
        return False
    engines = world.pool_engines(rollout.run, rollout.spec.pool, rollout.spec.engine_labels)
    return not any(may_continue_on(rollout, one.version) for one in engines if one.keeps_version)


# what came back --------------------------------------------------------------------------------------------------------


class Origins:
    """Versions of the leading spans of a piece, how many tokens they cover, and what is wrong with the rest."""

    __slots__ = ("problem", "tokens", "versions")

    def __init__(self, versions: tuple[int, ...], tokens: int, problem: str) -> None:
        self.versions = versions
        self.tokens = tokens
        self.problem = problem


def origins(attempt: Attempt, piece: Piece) -> Origins:
    """Which policy versions wrote a piece, as far as the engine says it and may be believed."""
    engine = attempt.engine
    total = len(piece.token_bytes) // TOKEN_BYTES
    if not piece.version_spans:
        if attempt.version == engine.version and (engine.update is None or not engine.update.changing):
            return Origins((), total, "")
        return Origins((), 0, "it does not say which weights wrote its tokens, and they changed meanwhile")
    versions: list[int] = []
    covered = 0
    for label, start, end in piece.version_spans:
        if start != covered or end < start:
            return Origins(tuple(versions), covered, f"its version spans leave a gap at token {covered}")
        version = engine.version_of(label)
        if version is None:
            return Origins(
                tuple(versions),
                covered,
                f"its tokens are of weights {label!r}, which nobody published here: publish them with PublishPolicy",
            )
        if version < attempt.version:
            return Origins(
                tuple(versions), covered, f"it wrote with version {version} after it had acknowledged {attempt.version}"
            )
        versions.append(version)
        covered = end
    if covered < total:
        return Origins(tuple(versions), covered, f"its version spans end at token {covered} of {total}")
    return Origins(tuple(versions), total, "")


def staleness(lineage: Lineage, rollout: Rollout) -> int:
    """Versions that the oldest token is behind the newest policy."""
    oldest = rollout.oldest_version
    return 0 if oldest is None else max(0, lineage.version - oldest)


def stale_error(lineage: Lineage, rollout: Rollout) -> Refusal:
    return Refusal(
        Code.FAILED_PRECONDITION,
        "STALE",
        f"rollout {rollout.rollout_id!r}: its oldest token is of version {rollout.oldest_version}, the newest policy is "
        f"{lineage.version}, and max_staleness is {rollout.requirement.max_staleness}; its tokens are withheld",
    )


def too_old(lineage: Lineage, rollout: Rollout) -> bool:
    limit = rollout.requirement.max_staleness
    return limit is not None and staleness(lineage, rollout) > limit
