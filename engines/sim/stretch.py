"""The stretch of decode steps under way in a simulated engine, and the flushes and ends that fall into it.

Invariants
- All steps of a stretch have one length: it ends wherever the set of sequences, or their speed, may change.
- Steps are numbered from the engine's start and go on from stretch to stretch, so an event keeps its step.
- An event counts only while its step is the sequence's `event_step`; entries of a sequence that left, or was scheduled
  anew, are passed over.

What this module does not know: what is due at an event, memory, the queue.
"""

from __future__ import annotations

import heapq

from rolloutd.engines.sim.request import Sequence


class Stretch:
    """Consecutive decode steps of equal length. Times are integer nanoseconds.

    anchor: when it began. anchor_step: decode steps completed before it. tau: length of one step; 0 while not decoding.
    memory_step: the step that can not be launched for lack of KV.
    """

    __slots__ = ("_events", "_ties", "anchor", "anchor_step", "memory_step", "tau")

    def __init__(self) -> None:
        self.anchor = 0
        self.anchor_step = 0
        self.tau = 0
        self.memory_step = 0
        self._events: list[tuple[int, int, Sequence]] = []  # (step, tie-break, sequence)
        self._ties = 0

    def begin(self, now: int, tau: int, steps_that_fit: int) -> None:
        """Decode from `now` on, for at most `steps_that_fit` steps."""
        self.anchor = now
        self.tau = tau
        self.memory_step = self.anchor_step + steps_that_fit

    def end(self, now: int, step: int) -> None:
        """Stop at `now`, with `step` decode steps completed."""
        self.tau = 0
        self.anchor_step = step
        self.anchor = now

    def steps_done(self, now: int) -> int:
        """Decode steps completed at `now`, of this stretch and all before."""
        return self.anchor_step + ((now - self.anchor) // self.tau if self.tau else 0)

    def steps_launched(self, now: int) -> int:
        """Decode steps of this stretch completed or in flight at `now`. Only while decoding."""
        return min(self.steps_done(now) + 1, self.memory_step) - self.anchor_step

    def schedule(self, sequence: Sequence, step: int) -> None:
        """The sequence's next flush or end is at `step`, in place of what was scheduled before."""
        sequence.event_step = step
        self._ties += 1
        heapq.heappush(self._events, (step, self._ties, sequence))

    def next_event(self, attend: int | None) -> int:
        """When something is due next: an event, the end of memory, or the first boundary from `attend` on."""
        step = self.memory_step
        while self._events:
            head, _, sequence = self._events[0]
            if sequence.event_step == head:
                step = min(step, head)
                break
            heapq.heappop(self._events)  # left, or scheduled anew
        if attend is not None:
            step = min(step, self.anchor_step - (self.anchor - attend) // self.tau)  # rounds up
        return self.anchor + (step - self.anchor_step) * self.tau

    def take_due(self, step: int) -> list[Sequence]:
        """Take out the sequences whose event is at `step` or before, earliest first."""
        due: list[Sequence] = []
        while self._events and self._events[0][0] <= step:
            head, _, sequence = heapq.heappop(self._events)
            if sequence.event_step == head:
                sequence.event_step = -1  # a second entry for the same step is stale
                due.append(sequence)
        return due
