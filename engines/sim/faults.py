"""Faults that a test can order from a simulated engine, and what is left of each.

Invariants
- One fault per kind; a later order replaces the earlier one. `take` counts, `active` only looks.
- `seconds` are wall seconds (what a test waits for), not simulated ones.

What this module does not know: how a fault is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import msgspec

FaultKind = Literal[
    "refuse_connections",
    "hang",
    "slow",
    "busy",
    "error_500",
    "cut_stream",
    "crash",
    "not_ready",
    "duplicate_frame",
    "garbage_frame",
    "stall",
    "load_fails",
    "load_hangs",
    "load_kills",
    "flush_refused",
    "drop_kv_events",
]
FAULT_KINDS: tuple[str, ...] = get_args(FaultKind)
_ONCE = ("duplicate_frame", "garbage_frame", "load_fails", "load_hangs", "load_kills", "flush_refused")


class FaultOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sim/fault`.

    kind: refuse_connections (close the listening socket and reset all connections; `seconds` is required), hang (accept
        and never answer), slow (`factor` on every pass), busy (503), error_500, cut_stream (reset the connection after
        `tokens` output tokens), crash (exit at once, status 1), not_ready (/ready 503), duplicate_frame (a frame twice),
        garbage_frame (a frame that is not JSON), stall (the engine stops working, streams fall silent), load_fails (a
        weight load changes nothing and is refused), load_hangs (it never ends, nor does anything behind it), load_kills
        (the new weights are in, then the scheduler dies), flush_refused (a flush finds the engine busy),
        drop_kv_events (the next `count` messages about its cache are not sent, though kept for replay).
    seconds: how long it lasts, in wall time; 0 until it is taken back.
    count: how many requests, frames or calls it hits; 0 without limit (duplicate_frame, garbage_frame,
        load_... and flush_refused: 1).
    """

    kind: FaultKind
    seconds: float = 0.0
    count: int = 0
    factor: float = 1.0
    tokens: int = 0

    def problem(self) -> str | None:
        """What is wrong with the order, or None."""
        if self.seconds < 0 or self.count < 0 or self.tokens < 0:
            return "seconds, count and tokens must not be negative"
        if self.kind == "refuse_connections" and self.seconds == 0:
            return "seconds: refuse_connections needs an end, nobody could take it back"
        if self.kind == "drop_kv_events" and self.count == 0:
            return "count: drop_kv_events needs a number of messages"
        if self.kind == "slow" and not self.factor > 0:
            return "factor: must be above 0"
        return None


class FaultBoard:
    """The faults in force. `clock` gives monotonic wall seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._orders: dict[str, tuple[FaultOrder, float, int]] = {}  # kind -> (order, end, hits left or -1)

    def set(self, order: FaultOrder) -> None:
        """Put a fault in force."""
        end = self._clock() + order.seconds if order.seconds else float("inf")
        count = order.count or (1 if order.kind in _ONCE else -1)
        self._orders[order.kind] = (order, end, count)

    def clear(self, kind: str | None = None) -> None:
        """Take back one kind, or all."""
        if kind is None:
            self._orders.clear()
        else:
            self._orders.pop(kind, None)

    def active(self, kind: FaultKind) -> FaultOrder | None:
        """The fault of a kind if it is in force."""
        entry = self._orders.get(kind)
        if entry is None:
            return None
        order, end, left = entry
        if self._clock() >= end or left == 0:
            del self._orders[kind]
            return None
        return order

    def take(self, kind: FaultKind) -> FaultOrder | None:
        """Like `active`, and counts one hit."""
        order = self.active(kind)
        if order is not None:
            _, end, left = self._orders[kind]
            self._orders[kind] = (order, end, left - 1 if left > 0 else left)
        return order

    def kinds(self) -> list[str]:
        """Kinds in force, sorted."""
        return [kind for kind in sorted(self._orders) if self.active(kind) is not None]  # type: ignore[arg-type]
