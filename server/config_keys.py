"""Every configuration key: its type, its bounds, and what its value may be.

Invariants
- Keys of the core's sections are read off the core's own dataclasses, so a setting of the core cannot be missing here.
- A value that passes `KeySpec.parse` has the Python type that the frozen tree wants.

What this module does not know: files, the environment, flags, and how values become the tree (`config.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.scheduler.config import SchedulerConfig
from rolloutd.server.preset import PRESETS

# Section name in a file -> field of SchedulerConfig. A file says "scheduler" for the queue.
CORE_SECTIONS: Mapping[str, str] = {
    "scheduler": "queue",
    "weights": "weights",
    "preempt": "preempt",
    "policy": "policy",
    "budget": "budget",
    "executor": "executor",
    "publish": "publish",
    "delivery": "delivery",
    "index": "index",
}

_UNBOUNDED = math.inf

# (smallest, largest, whether the smallest itself is refused). Integers default to >= 0, numbers to finite and >= 0.
_BOUNDS: Mapping[str, tuple[float, float, bool]] = {
    "scheduler.max_batch_size": (1, 4096, False),
    "scheduler.scheduling_interval_ms": (0, 10_000, True),
    "scheduler.queue_capacity": (1, 10_000_000, False),
    "scheduler.queue_capacity_bytes": (1024, _UNBOUNDED, False),
    "scheduler.queue_ttl_seconds": (0, _UNBOUNDED, True),
    "scheduler.aging_seconds": (0, _UNBOUNDED, True),
    "scheduler.overdue_seconds": (0, _UNBOUNDED, True),
    "scheduler.overdue_turn": (2, _UNBOUNDED, False),
    "scheduler.short_quantum": (1, _UNBOUNDED, False),
    "scheduler.long_quantum": (1, _UNBOUNDED, False),
    "scheduler.decision_ring": (1, 10_000_000, False),
    "scheduler.max_strata": (1, 4096, False),
    "scheduler.rule_period_seconds": (0, 86_400, True),
    "policy.entropy_band": (0, 10, False),
    "policy.cold_start_batch_size": (1, 4096, False),
    "policy.cold_start_tail_slowdown": (0, 10, False),
    "policy.stable_tail_slowdown": (0, 10, False),
    "policy.tail_next_slowdown": (0, 10, False),
    "policy.cold_start_tail_fill": (0, 1, False),
    "policy.stable_tail_fill": (0, 1, False),
    "policy.stable_lower_turn": (2, _UNBOUNDED, False),
    "budget.shrink_seconds": (0, _UNBOUNDED, True),
    "budget.kv_watermark": (0, 1, True),
    "budget.growth_tokens": (1, _UNBOUNDED, False),
    "executor.timeout_seconds": (0, _UNBOUNDED, True),
    "executor.lost_seconds": (0, _UNBOUNDED, True),
    "executor.max_attempts": (1, 100, False),
    "executor.breaker_faults": (1, _UNBOUNDED, False),
    "executor.breaker_seconds": (0, _UNBOUNDED, True),
    "executor.busy_seconds": (0, _UNBOUNDED, True),
    "executor.abort_seconds": (0, _UNBOUNDED, True),
    "publish.call_seconds": (0, _UNBOUNDED, True),
    "publish.push_seconds": (0, _UNBOUNDED, True),
    "publish.retry_seconds": (0, _UNBOUNDED, True),
    "publish.flush_tries": (1, _UNBOUNDED, False),
    "delivery.max_undelivered_bytes": (1024, _UNBOUNDED, False),
    "delivery.undelivered_ttl_seconds": (0, _UNBOUNDED, True),
    "delivery.max_runs": (1, 1_000_000, False),
    "delivery.max_consumers_per_run": (1, 1_000_000, False),
    "index.max_bytes": (0, _UNBOUNDED, False),
    "index.page_tokens": (1, 4096, False),
    "server.port": (0, 65_535, False),
    "server.prometheus_port": (0, 65_535, False),
    "server.max_message_bytes": (65_536, 1 << 30, False),
    "server.keepalive_min_ping_seconds": (0, 3600, True),
    "server.shutdown_grace_seconds": (0, 86_400, False),
    "decision_log.max_bytes": (65_536, _UNBOUNDED, False),
    "decision_log.files": (1, 1000, False),
    "lineage.max_bytes": (65_536, _UNBOUNDED, False),
    "lineage.files": (1, 1000, False),
    "event_log.max_bytes": (65_536, _UNBOUNDED, False),
    "event_log.files": (1, 1000, False),
    "engine.poll_seconds": (0, 60, True),
    "engine.register_backoff_seconds": (0, 60, True),
    "engine.register_backoff_max_seconds": (0, 3600, True),
    "engine.lose_failures": (1, 1000, False),
    "engine.lose_seconds": (0, 3600, False),
}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, what is wrong with it and what would be right."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One key. `kind` is the type after parsing; `nullable` keys take `null` for "not set"."""

    key: str
    kind: type
    default: Any
    nullable: bool = False
    choices: tuple[str, ...] = ()

    def parse(self, value: Any, origin: str) -> Any:
        """`value` as `kind`, or ConfigError. `origin` says where the value came from, for the message."""
        if value is None:
            if self.nullable:
                return None
            raise ConfigError(f"{self.key} ({origin}): must be {self.describe()}, not empty")
        if self.kind is bool:
            if not isinstance(value, bool):
                raise self._wrong(value, origin)
            return value
        if self.kind is str:
            if not isinstance(value, str):
                raise self._wrong(value, origin)
            if self.choices and value not in self.choices:
                raise self._wrong(value, origin)
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(value, origin)
        if self.kind is int and isinstance(value, float):
            if not value.is_integer():
                raise self._wrong(value, origin)
            value = int(value)
        low, high, low_excluded = self.bounds
        if not math.isfinite(value) or value < low or value > high or (low_excluded and value == low):
            raise self._wrong(value, origin)
        return self.kind(value)

    @property
    def bounds(self) -> tuple[float, float, bool]:
        return _BOUNDS.get(self.key, (0, _UNBOUNDED, False))

    def describe(self) -> str:
        """What the value may be, in words."""
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "one of " + ", ".join(self.choices) if self.choices else "a text"
        low, high, low_excluded = self.bounds
        noun = "a whole number" if self.kind is int else "a number"
        lower = f"above {low:g}" if low_excluded else f"at least {low:g}"
        return f"{noun} {lower}" + ("" if high == _UNBOUNDED else f" and at most {high:g}")

    def _wrong(self, value: Any, origin: str) -> ConfigError:
        return ConfigError(f"{self.key} ({origin}): must be {self.describe()}, got {value!r}")


def _core_keys() -> list[KeySpec]:
    tree = SchedulerConfig()
    specs = []
    for section, attribute in CORE_SECTIONS.items():
        settings = getattr(tree, attribute)
        for field in dataclasses.fields(settings):
            default = getattr(settings, field.name)
            if not isinstance(default, bool | int | float | str):
                continue  # budget.default: made from budget.* keys below
            choices = ("lru",) if (section, field.name) == ("index", "eviction") else ()
            specs.append(KeySpec(f"{section}.{field.name}", type(default), default, choices=choices))
    return specs


# Not fields of the core's tree: see `config.py` for what each becomes.
_SERVER_KEYS = [
    KeySpec("preset", str, None, nullable=True, choices=PRESETS),
    KeySpec("budget.max_gpu_memory_mb", float, None, nullable=True),
    KeySpec("budget.training_reserved_mb", float, None, nullable=True),
    KeySpec("budget.max_inference_mb", float, None, nullable=True),
    KeySpec("budget.max_running_rollouts", int, None, nullable=True),
    KeySpec("budget.max_kv_tokens", int, None, nullable=True),
    KeySpec("index.max_cache_gpu_mb", float, None, nullable=True),
    KeySpec("policy.prefix_ttl_steps", int, None, nullable=True),
    KeySpec("executor.engine", str, "sglang", choices=("sglang",)),
    KeySpec("server.host", str, "127.0.0.1"),
    KeySpec("server.port", int, 50051),
    KeySpec("server.prometheus_port", int, None, nullable=True),
    KeySpec("server.seed", int, 0),
    KeySpec("server.max_message_bytes", int, 64 << 20),
    KeySpec("server.keepalive_min_ping_seconds", float, 5.0),
    KeySpec("server.shutdown_grace_seconds", float, 30.0),
    KeySpec("server.api_keys_file", str, None, nullable=True),
    KeySpec("server.allow_unauthenticated", bool, False),
    KeySpec("tls.certificate_file", str, None, nullable=True),
    KeySpec("tls.private_key_file", str, None, nullable=True),
    KeySpec("tls.client_ca_file", str, None, nullable=True),
    KeySpec("log.json", bool, False),
    KeySpec("log.level", str, "info", choices=("debug", "info", "warning", "error")),
    KeySpec("decision_log.path", str, None, nullable=True),
    KeySpec("decision_log.max_bytes", int, 64 << 20),
    KeySpec("decision_log.files", int, 4),
    KeySpec("lineage.path", str, None, nullable=True),
    KeySpec("lineage.max_bytes", int, 256 << 20),
    KeySpec("lineage.files", int, 4),
    KeySpec("event_log.path", str, None, nullable=True),
    KeySpec("event_log.max_bytes", int, 1 << 30),
    KeySpec("event_log.files", int, 4),
    KeySpec("engine.poll_seconds", float, 1.0),
    KeySpec("engine.register_backoff_seconds", float, 0.5),
    KeySpec("engine.register_backoff_max_seconds", float, 10.0),
    KeySpec("engine.lose_failures", int, 3),
    KeySpec("engine.lose_seconds", float, 3.0),
    KeySpec("engine.vocabulary_size", int, 0),
]

KEYS: Mapping[str, KeySpec] = {spec.key: spec for spec in [*_core_keys(), *_SERVER_KEYS]}

# Keys whose value is a list or a table, each with its own reader in `config.py`.
STRUCTURED_KEYS = ("engines", "pools", "rules")
