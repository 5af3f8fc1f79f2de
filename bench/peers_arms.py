"""Who is compared: rolloutd, and the two routers under the policies that could suit a workload.

Which policy is a router's best is left to the figures: every one that is run is printed. To add one, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolloutd.bench.scenarios import SCENARIOS
from rolloutd.bench.sessions import SessionTraffic

PRODUCT = "rolloutd"


@dataclass(frozen=True, slots=True)
class Arm:
    """One who is compared.

    package: whose program. rule: what we call it, where the policy has several. flags: of the router. sessions: whether it is for
    workloads with sessions, None for all. twin: the simulation's arm of the same rule, None where it has none. standard: whether
    it runs when nobody asks for it.
    """

    package: str
    policy: str = ""
    flags: tuple[str, ...] = ()
    rule: str = ""
    twin: str | None = None
    sessions: bool | None = None
    standard: bool = True

    @property
    def name(self) -> str:
        return f"{self.package}:{self.rule or self.policy}" if self.policy else self.package

    def suits(self, workload: str) -> bool:
        """Whether its rule has anything to work with there."""
        has_sessions = any(isinstance(traffic, SessionTraffic) for traffic in SCENARIOS[workload].traffic)
        return self.sessions is None or self.sessions == has_sessions


# A new session goes to the worker with the fewest requests, and its turns stay there.
_STICKY = ("--assignment-mode", "min_load")
# smg's word for the worker with the fewest requests, of all.
_LEAST = ("--power-of-two-load-metric", "least_requests")
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(PRODUCT, twin=PRODUCT),
        Arm("sglang-router", "round_robin", twin="round-robin", sessions=False),
        Arm("sglang-router", "cache_aware", twin="cache-aware"),
        Arm("sglang-router", "power_of_two"),
        Arm("sglang-router", "manual", _STICKY, twin="sticky", sessions=True),
        Arm("smg", "round_robin", twin="round-robin", sessions=False),
        Arm("smg", "cache_aware"),
        Arm("smg", "power_of_two", _LEAST, rule="least_requests", twin="least-in-flight"),
        Arm("smg", "power_of_two", standard=False),
        # By loads that it asks for every few seconds: what arrives at once goes to one engine.
        Arm("smg", "least_load", standard=False),
        Arm("smg", "manual", _STICKY, twin="sticky", sessions=True),
    )
}


def arms_for(workload: str, asked: tuple[str, ...] = ()) -> list[Arm]:
    """Those to run, rolloutd first: of the `asked` ones, or of the standard ones, all that suit the workload."""
    chosen = [arm for arm in ARMS.values() if (arm.name in asked if asked else arm.standard)]
    return [arm for arm in chosen if arm.suits(workload)]
