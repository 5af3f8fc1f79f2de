"""A simulated engine's machine in virtual time, with its frames sorted by request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.machine import SimMachine
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.timing import TimingModel
from rolloutd.engines.sim.tokens import Sampling

TAU = TimingModel().decode_step_seconds


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (salt * 7919 + i * 31) % 30_000 for i in range(length)]


@dataclass
class Pool:
    """A machine with its frames sorted by request; checks the machine after every step."""

    machine: SimMachine
    now: float = 0.0
    frames: dict[str, list[Frame]] = field(default_factory=dict)
    kv_peak: int = 0

    def submit(self, rid: str, prompt: list[int], **words: Any) -> None:
        namespace = words.pop("namespace", ("", ""))
        outer = {k: words.pop(k) for k in ("stream", "stream_interval", "logprob_start") if k in words}
        words.setdefault("ignore_eos", "end_at_tokens" not in words)
        self.machine.submit(self.now, SimRequest(rid, pack(prompt), Sampling(**words), namespace=namespace, **outer))

    def advance(self, now: float) -> list[Frame]:
        self.now = now
        frames = self.machine.advance(now)
        for frame in frames:
            self.frames.setdefault(frame.rid, []).append(frame)
        self.machine.check()
        load = self.machine.load(now)
        self.kv_peak = max(self.kv_peak, load.used_tokens)
        assert load.used_tokens <= load.capacity_tokens
        return frames

    def step(self) -> list[Frame] | None:
        event = self.machine.next_event_seconds()
        return None if event is None else self.advance(max(event, self.now))

    def run(self) -> None:
        while self.step() is not None:
            pass

    def tokens(self, rid: str) -> list[int]:
        return [token for frame in self.frames.get(rid, []) for token in frame.tokens]

    def logprobs(self, rid: str) -> list[float]:
        return [logprob for frame in self.frames.get(rid, []) for logprob in frame.logprobs]

    def last(self, rid: str) -> Frame:
        return self.frames[rid][-1]

    def reason(self, rid: str) -> dict[str, Any]:
        reason = self.last(rid).finish_reason
        assert reason is not None
        return reason


def pool(**words: Any) -> Pool:
    return Pool(SimMachine(MachineConfig(**words)))
