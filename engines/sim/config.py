"""Size and behaviour of a simulated engine, and the ends it can give a request.

Invariants
- A config that exists is valid. Words follow SGLang's flags; finish reasons are SGLang 0.5.23's, word for word.

What this module does not know: anything at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Model

# SGLang: DEFAULT_FORCE_STREAM_INTERVAL, how often a request that does not stream reports to the front process.
UNSTREAMED_INTERVAL_TOKENS = 50
# SGLang: --decode-log-interval, how often a batch that only decodes publishes what its cache did.
CACHE_EVENTS_INTERVAL_STEPS = 40
# SGLang refuses prompts within this many tokens of the context or of the KV capacity.
PROMPT_RESERVE_TOKENS = 5

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL: dict[str, Any] = {
    "type": "abort",
    "message": "The request queue is full.",
    "status_code": 503,
    "err_type": None,
}
OUT_OF_MEMORY: dict[str, Any] = {
    "type": "abort",
    "message": "Out of memory even after retracting all other requests in the decode batch.",
    "status_code": 500,
    "err_type": "InternalServerError",
}
PauseMode = Literal["retract", "in_place"]


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Size and behaviour of one engine; words as in SGLang's flags.

    log_cache: keep what the prefix cache does for `SimMachine.take_cache_events`.
    write_tokens: False fills outputs from a table instead of writing what the weights say, for large virtual pools; needs
        requests whose length is known.
    """

    slots: int = 32
    kv_tokens: int = 200_000
    page_size_tokens: int = 16
    context_tokens: int = 32_768
    max_prefill_tokens: int = 16_384
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    stream_interval: int = 32
    max_queued: int | None = None
    timing: TimingModel = field(default_factory=TimingModel)
    model: Model = field(default_factory=Model)
    weight_version: str = "default"
    write_tokens: bool = True
    log_cache: bool = False

    def __post_init__(self) -> None:
        for name in (
            "slots",
            "kv_tokens",
            "page_size_tokens",
            "context_tokens",
            "max_prefill_tokens",
            "stream_interval",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.kv_tokens < self.page_size_tokens * 2:
            raise ValueError(f"kv_tokens: {self.kv_tokens} must be at least two pages of {self.page_size_tokens}")
        if self.schedule_policy not in ("fcfs", "lpm"):
            raise ValueError(f"schedule_policy: {self.schedule_policy!r} must be fcfs or lpm")
        if self.max_queued is not None and self.max_queued < 0:
            raise ValueError(f"max_queued: {self.max_queued} must not be negative")

    @property
    def capacity_tokens(self) -> int:
        """KV capacity in whole pages."""
        return self.kv_tokens // self.page_size_tokens * self.page_size_tokens

    @property
    def max_request_tokens(self) -> int:
        """Prompt + output of one request, as the engine clips it."""
        return min(self.context_tokens - 1, self.capacity_tokens - 1)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that is not refused."""
        return self.max_request_tokens - PROMPT_RESERVE_TOKENS


def prompt_too_long(prompt_tokens: int, limit_tokens: int) -> dict[str, Any]:
    """Finish reason of a prompt that the scheduler refuses."""
    return {
        "type": "abort",
        "message": f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length "
        f"({limit_tokens} tokens). Use a shorter input or enable --allow-auto-truncate.",
        "status_code": 400,
        "err_type": "BadRequestError",
    }
