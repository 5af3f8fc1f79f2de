"""One engine as the core sees it: capacity, what is booked on it, its speed, its breaker.

Invariants
- `slots_used`, `short_used`, `critical_used` and `kv_claimed_tokens` are sums over the permits of `attempts`; `check()` of the
  core re-derives them.
- The breaker counts broken and silent attempts only. Busy and refused ones neither open nor close it (property P7).
- Nothing is placed on an engine that is lost, not ready, draining, behind an open breaker, asked to wait, on its way to another
  version or in quarantine.

What this module does not know: rollouts' classes beyond the counters, budgets, prefixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rolloutd.scheduler.config import ExecutorSettings
from rolloutd.scheduler.decode_curve import DecodeCurve
from rolloutd.scheduler.promises import Promises
from rolloutd.scheduler.spec import EngineFacts

if TYPE_CHECKING:
    from rolloutd.scheduler.colocation import Memory
    from rolloutd.scheduler.entry import Entry
    from rolloutd.scheduler.events import EngineLoad
    from rolloutd.scheduler.publication import EngineUpdate
    from rolloutd.scheduler.rollout import Attempt
    from rolloutd.scheduler.room import Room
    from rolloutd.scheduler.timers import Timer

MIB: Final = 1 << 20
CURVE_SECONDS: Final = 0.1  # between two looks at how long a decode step takes
SPEED_SMOOTHING: Final = 0.2  # weight of the newest sample in the speed averages
REMEMBERED_LABELS: Final = 16  # of earlier weights: more than any attempt outlives
MIN_SLOTS_FOR_RESERVE: Final = 8  # an engine smaller than this keeps nothing back


class Engine:
    __slots__ = (
        "attempts",
        "breaker_until",
        "batch_since",
        "busy_until",
        "cache_key",
        "cache_since",
        "cached_tokens",
        "control_id",
        "critical_used",
        "curve",
        "curve_at",
        "decode_seconds_per_token",
        "draining",
        "engine_id",
        "facts",
        "faults",
        "faults_in_a_row",
        "generated_tokens",
        "ghosts",
        "held_because",
        "kv_by_run",
        "kv_claimed_tokens",
        "kv_used_peak_tokens",
        "kv_used_tokens",
        "label",
        "labels",
        "last_error",
        "last_prefilled",
        "limit",
        "lost",
        "memory",
        "owner",
        "predicted_cached_tokens",
        "prefill_tokens_per_second",
        "probing",
        "promises",
        "prompt_tokens",
        "quarantine",
        "queue_prefilled_tokens",
        "queue_since",
        "raise_at",
        "raise_seconds",
        "most_slots",
        "ready",
        "removed",
        "reported_rollouts",
        "reserved_for",
        "resumed_at",
        "room",
        "salt",
        "short_used",
        "slots_used",
        "tokens_per_second",
        "update",
        "version",
        "wake_timer",
    )

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.engine_id = facts.engine_id
        # Its name in the prefix index: its cache lives as long as its process.
        self.cache_key = f"{facts.engine_id}/{facts.incarnation}"
        self.room: Room | None = None  # of its pool, while it is a member
        self.attempts: dict[str, Attempt] = {}
        self.slots_used = 0
        self.short_used = 0
        self.critical_used = 0
        self.kv_claimed_tokens = 0
        self.kv_by_run: dict[str, int] = {}
        self.kv_used_tokens = 0
        self.kv_used_peak_tokens = 0
        self.most_slots = facts.slots  # that can be used: more than `facts.slots` after it joined again with fewer
        self.ready = True
        self.lost = False
        self.draining = False
        self.removed = False
        self.busy_until = 0.0
        self.breaker_until = 0.0
        self.wake_timer: Timer | None = None  # when the longer of the two ends
        self.probing = False  # the breaker lets one attempt through to see
        self.faults_in_a_row = 0
        self.faults = 0
        self.last_error = ""
        self.promises = Promises()
        self.limit: int | None = None  # rollouts it runs at a time, where it lets more than that wait
        self.raise_at = 0.0
        self.raise_seconds = 1.0  # pause before the limit is raised
        self.queue_since: float | None = None  # it has let work wait since then, without prefilling any
        self.queue_prefilled_tokens = 0
        self.reserved_for: Entry | None = None  # an entry too large for any gap: keep this engine's room for it
        self.prefill_tokens_per_second = 0.0  # 0: not measured yet
        self.decode_seconds_per_token = 0.0
        self.curve = DecodeCurve()
        self.curve_at = 0.0  # when it may learn again
        self.batch_since = 0.0  # nothing was sent there, had its first token or ended since then
        self.last_prefilled = (0, 0.0)
        self.predicted_cached_tokens = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.ghosts = 0
        self.reported_rollouts = 0
        self.tokens_per_second = 0.0
        self.owner = facts.run_id  # the run whose versions it holds; empty: nobody's yet, it serves any run
        self.version = 0  # policy version that it acknowledged; 0: as registered
        self.label = facts.engine_version  # of the weights that it holds, in its own words
        self.labels = {facts.engine_version: 0}  # of the weights that it held -> their version
        self.salt = ""  # what new work is sent under: only KV of the same salt matches
        self.cache_since = 0  # version from which on its cache was kept
        self.update: EngineUpdate | None = None  # on its way to another version
        self.quarantine = ""  # why its weights cannot be relied on
        self.memory: Memory | None = None  # given to the trainer, or on its way there or back
        self.held_because = ""  # why it gets no work although it is there
        self.control_id = 0  # the control call that is out; 0: none
        self.resumed_at = -math.inf

    # versions ----------------------------------------------------------------------------------------------------------

    def version_of(self, label: str) -> int | None:
        """Policy version of weights that this engine held or is being given, by its own word for them."""
        update = self.update
        if update is not None and update.changing and label == update.publication.label:
            return update.publication.update.version
        return self.labels.get(label)

    @property
    def keeps_version(self) -> bool:
        """Whether it serves the version that it holds, and goes on to for now."""
        return not self.quarantine and (self.update is None or self.update.waiting)

    def change_owner(self, run_id: str) -> None:
        """It serves another run's versions from now on: what it holds is to that run what it came with."""
        self.owner = run_id
        self.version = self.cache_since = 0
        self.labels = {self.label: 0}

    def acknowledge(self, version: int, label: str) -> None:
        """It holds this version now, as it said itself."""
        self.version = version
        self.label = label
        self.labels.pop(label, None)
        self.labels[label] = version
        if len(self.labels) > REMEMBERED_LABELS:
            del self.labels[next(iter(self.labels))]
        self.quarantine = ""

    def note_held(self) -> None:
        """Call after a reason to give it no work came or went."""
        match self.held_kind:
            case "updating":
                assert self.update is not None
                self.held_because = f"updating to version {self.update.publication.update.version}"
            case "memory":
                self.held_because = "its memory is the trainer's"
            case _:
                self.held_because = (self.memory.lost if self.memory is not None else "") or self.quarantine

    @property
    def held_kind(self) -> str:
        """Why it gets no work although it is there, in one word; "": it is not held."""
        if self.update is not None and not self.update.waiting:
            return "updating"
        if self.memory is not None:
            return "quarantined" if self.memory.lost else "memory"
        return "quarantined" if self.quarantine else ""

    @property
    def stands_still(self) -> bool:
        """Whether it generates nothing because it gets other weights."""
        return self.update is not None and self.update.paused

    def note_room(self) -> None:
        """Call after slots, their use or the limit changed."""
        if self.room is not None:
            self.room.note(self)

    def state(self, now: float) -> str:
        if self.lost:
            return "lost"
        if self.draining:
            return "draining"
        if self.held_because:
            return "held"
        if not self.ready:
            return "not_ready"
        if self.breaker_until > now:
            return "broken"
        return "ready"

    def is_open(self, now: float) -> bool:
        """Whether anything may be placed here now."""
        return (
            self.ready
            and not self.held_because
            and not self.lost
            and not self.draining
            and self.busy_until <= now
            and self.breaker_until <= now
            and not (self.faults_in_a_row and self.probing)
        )

    def free_slots(self, short: bool, reserved_short: int) -> int:
        """Slots that work of this kind may take; long work leaves `reserved_short` of them alone."""
        free = self.facts.slots - self.slots_used
        if short:
            return free
        if reserved_short > self.short_used and self.facts.slots >= MIN_SLOTS_FOR_RESERVE:
            free -= reserved_short - self.short_used
        return free if self.limit is None else min(free, self.limit - self.slots_used)

    def fill(self) -> float:
        """How full the engine is in [0,1]: the fuller of slots and KV."""
        slots = self.slots_used / self.facts.slots
        kv = self.kv_claimed_tokens / self.facts.kv_capacity_tokens if self.facts.kv_capacity_tokens else 0.0
        return min(1.0, max(slots, kv))

    def tokens_per_mb(self) -> float:
        """KV tokens in one MiB by the engine's own figures; 0 when it does not say."""
        if not self.facts.kv_cache_bytes:
            return 0.0
        return self.facts.kv_capacity_tokens / (self.facts.kv_cache_bytes / MIB)

    # breaker -----------------------------------------------------------------------------------------------------------

    def note_fault(self, now: float, message: str, settings: ExecutorSettings) -> None:
        """An attempt was cut, refused to connect, answered 5xx or fell silent."""
        self.faults += 1
        self.faults_in_a_row += 1
        self.last_error = message
        self.probing = False
        if self.faults_in_a_row >= settings.breaker_faults:
            self.breaker_until = now + settings.breaker_seconds

    def note_success(self) -> None:
        self.faults_in_a_row = 0
        self.probing = False

    def note_dispatch(self, settings: ExecutorSettings) -> None:
        """After an open breaker ran out, the next attempt is a probe: one at a time until one succeeds."""
        if self.faults_in_a_row >= settings.breaker_faults:
            self.probing = True

    # speeds ------------------------------------------------------------------------------------------------------------

    def note_load(self, load: EngineLoad) -> None:
        self.kv_used_tokens = load.kv_used_tokens
        self.kv_used_peak_tokens = max(self.kv_used_peak_tokens, load.kv_used_tokens)
        self.reported_rollouts = load.running_rollouts + load.waiting_rollouts
        self.tokens_per_second = load.generated_tokens_per_second
        self.ghosts = max(0, self.reported_rollouts - len(self.attempts))
        tokens, seconds = self.last_prefilled
        new_tokens = load.prefilled_tokens_total - tokens
        new_seconds = load.prefill_busy_seconds_total - seconds
        if new_tokens < 0 or new_seconds < 0:  # the engine restarted between two reports
            self.last_prefilled = (load.prefilled_tokens_total, load.prefill_busy_seconds_total)
        elif new_tokens >= 256 and new_seconds > 0:  # enough for a rate
            self.prefill_tokens_per_second = _smooth(self.prefill_tokens_per_second, new_tokens / new_seconds)
            self.last_prefilled = (load.prefilled_tokens_total, load.prefill_busy_seconds_total)

    def note_step(self, now: float, seconds_per_token: float) -> None:
        """A rollout here wrote at that pace since its last report, while nothing came or went."""
        self.curve.note(self.slots_used, seconds_per_token)
        self.curve_at = now + CURVE_SECONDS

    def note_decode(self, seconds_per_token: float) -> None:
        self.decode_seconds_per_token = _smooth(self.decode_seconds_per_token, seconds_per_token)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SPEED_SMOOTHING * (new - old)
