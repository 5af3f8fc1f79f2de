"""Control calls in virtual time: what a real engine does with each, also with those that it does not survive."""

from __future__ import annotations

from typing import Any

from rolloutd.bench.virtual_control import RELEASED_AT_WORK, Controls, ControlTiming
from rolloutd.bench.virtual_machine import MeteredMachine
from rolloutd.engines.sim.config import MachineConfig
from rolloutd.engines.sim.request import Frame, SimRequest
from rolloutd.engines.sim.tokens import Model, Sampling, expected_output
from rolloutd.scheduler.actions import Control
from rolloutd.scheduler.events import ControlEnded, ControlFailed
from rolloutd.scheduler.states import FaultKind, PauseMode, Verb

MODEL = Model(vocabulary_size=1_000)
MACHINE = MachineConfig(
    slots=4, kv_tokens=2_000, page_size_tokens=4, context_tokens=512, stream_interval=4, model=MODEL
)
TIMING = ControlTiming(call_seconds=0.01, load_seconds=0.5, memory_seconds=0.1, pause_poll_seconds=1.0)
PROMPT = b"".join(token.to_bytes(4, "little") for token in range(3, 23))
LONG = 100_000.0


class Rig:
    """One machine with its front; `frames` and `answers` are all there were."""

    def __init__(self) -> None:
        self.machine = MeteredMachine(MACHINE, mark_pages=True)
        self.front = Controls(self.machine, TIMING, "e0")
        self.now = 0.0
        self.frames: list[Frame] = []
        self.answers: list[ControlEnded | ControlFailed] = []
        self._calls = 0

    def submit(self, rid: str, tokens: int = 60) -> None:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        self.front.submit(self.now, SimRequest(rid, PROMPT, sampling))

    def call(self, verb: Verb, **fields: Any) -> int:
        """Make a call; returns its id."""
        self._calls += 1
        self.front.control(self.now, Control(self._calls, "e0", verb, **fields))
        return self._calls

    def run(self, seconds: float) -> None:
        """Let time pass, from one thing that is due to the next."""
        end = self.now + seconds
        while True:
            machine = self.machine.next_event_seconds()
            due = min(LONG if machine is None else machine, self.front.next_event_seconds())
            if due > end:
                break
            self.now = max(self.now, due)
            for frame in self.machine.advance(self.now):
                self.frames.append(frame)
                if frame.finish_reason is not None:
                    self.front.ended(frame.rid)
            self.answers += self.front.advance(self.now)
        self.now = end

    def made(self, verb: Verb, seconds: float = 0.02, **fields: Any) -> ControlEnded | ControlFailed:
        """Make a call and have its answer within so many seconds."""
        number = self.call(verb, **fields)
        self.run(seconds)
        (answer,) = (one for one in self.answers if one.control_id == number)
        return answer

    def paused(self, mode: PauseMode) -> None:
        assert isinstance(self.made(Verb.PAUSE, mode=mode), ControlEnded)

    def loaded(self, version: str) -> None:
        assert isinstance(self.made(Verb.LOAD, 0.6, path=f"/weights/{version}", label=version), ControlEnded)

    def tokens(self, rid: str) -> list[int]:
        return [token for frame in self.frames if frame.rid == rid for token in frame.tokens]

    def end(self, rid: str) -> Frame | None:
        return next((one for one in self.frames if one.rid == rid and one.finish_reason is not None), None)


def test_a_pause_holds_work_and_new_requests_wait_at_the_gate() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    rig.paused(PauseMode.RETRACT)
    rig.run(0.2)
    written = len(rig.tokens("a"))
    rig.submit("b")
    rig.run(5.0)
    assert len(rig.tokens("a")) == written and "b" not in rig.machine.live_rids()[1]
    rig.made(Verb.RESUME)
    rig.run(10.0)
    assert len(rig.tokens("a")) == len(rig.tokens("b")) == 60


def test_each_token_is_of_the_weights_that_its_span_names() -> None:
    for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
        rig = Rig()
        rig.submit("a")
        rig.run(0.2)
        rig.paused(mode)
        rig.loaded("1")
        rig.made(Verb.RESUME)
        rig.run(10.0)
        end = rig.end("a")
        assert end is not None and [label for label, _, _ in end.spans] == ["default", "1"]
        cut = end.spans[0][2]
        old = expected_output(PROMPT, 60, ignore_eos=True, model=MODEL).tokens[:cut]
        prompt = PROMPT + b"".join(token.to_bytes(4, "little") for token in old)
        new = expected_output(prompt, 60 - cut, ignore_eos=True, weight_version="/weights/1", model=MODEL).tokens
        assert rig.tokens("a") == old + new, "what a path holds writes, and its label names it"


def test_a_load_comes_after_the_pass_in_flight() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    before = rig.machine.next_event_seconds()
    rig.call(Verb.PAUSE, mode=PauseMode.IN_PLACE)
    rig.call(Verb.LOAD, path="/weights/1", label="1")
    assert before is not None and rig.machine.pause_pending
    rig.run(TIMING.call_seconds + 0.001)
    assert rig.machine.weights == "default"
    rig.run(1.0)
    assert rig.machine.weights == "/weights/1"


def test_an_abort_pause_returns_when_nothing_is_in_flight() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    number = rig.call(Verb.PAUSE, mode=PauseMode.ABORT)
    rig.run(0.9)
    assert not rig.answers and rig.end("a") is not None
    rig.run(0.2)
    assert [one.control_id for one in rig.answers] == [number]


def test_an_abort_pause_after_one_in_place_never_returns() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    rig.paused(PauseMode.IN_PLACE)
    rig.call(Verb.PAUSE, mode=PauseMode.ABORT)
    rig.call(Verb.RESUME)
    rig.run(100.0)
    assert len(rig.answers) == 1, "the real one holds its lock, too"
    rig.front.hang_up(rig.now, "a")
    rig.run(2.0)
    assert len(rig.answers) == 3


def test_a_load_without_a_pause_has_the_engine_for_itself() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    rig.call(Verb.LOAD, path="/weights/1", label="1")
    rig.submit("b")
    rig.run(0.3)
    assert rig.machine.weights == "default" and "b" not in rig.machine.live_rids()[0]
    rig.run(20.0)
    first, second = rig.end("a"), rig.end("b")
    assert first is not None and [label for label, _, _ in first.spans] == ["default"]
    assert second is not None and [label for label, _, _ in second.spans] == ["1"]


def test_a_flush_is_refused_while_work_runs_and_done_behind_a_retract() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    assert rig.made(Verb.FLUSH) == ControlEnded("e0", 1, flushed=False)
    rig.paused(PauseMode.RETRACT)
    rig.run(0.2)
    assert rig.made(Verb.FLUSH) == ControlEnded("e0", 3, flushed=True)


def test_aborts_are_not_heard_during_a_load() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run(0.2)
    rig.paused(PauseMode.RETRACT)
    rig.run(0.2)
    rig.call(Verb.LOAD, path="/weights/1", label="1")
    rig.front.abort(rig.now, "a")
    assert not rig.front.hears
    rig.run(0.4)
    assert rig.end("a") is None
    rig.run(0.2)
    assert rig.end("a") is not None


def test_a_load_that_breaks_off_leaves_weights_that_nobody_published_under_the_old_label() -> None:
    rig = Rig()
    rig.front.breaks_load = True
    failed = rig.made(Verb.LOAD, 1.0, path="/weights/1", label="1")
    assert isinstance(failed, ControlFailed) and failed.fault is FaultKind.BROKEN
    assert rig.front.spoilt and rig.made(Verb.VERIFY) == ControlEnded("e0", 2, label="default")
    rig.submit("a", 10)
    rig.run(5.0)
    assert rig.tokens("a") != expected_output(PROMPT, 10, ignore_eos=True, model=MODEL).tokens


def test_weights_are_pushed_between_begin_and_end_only() -> None:
    rig = Rig()
    assert not rig.front.push(rig.now, "1", "/weights/1")
    assert isinstance(rig.made(Verb.END), ControlFailed)
    rig.made(Verb.BEGIN)
    again = rig.made(Verb.BEGIN)
    assert isinstance(again, ControlFailed) and again.fault is FaultKind.REFUSED
    assert rig.front.push(rig.now, None, "/weights/1")
    rig.made(Verb.END)
    assert rig.made(Verb.VERIFY) == ControlEnded("e0", 5, label="default")
    rig.made(Verb.NAME, label="1")
    assert rig.made(Verb.VERIFY) == ControlEnded("e0", 7, label="1")
    assert rig.machine.weights == "/weights/1"


def test_memory_is_released_when_idle_and_weights_do_not_survive_it() -> None:
    rig = Rig()
    rig.made(Verb.RELEASE_MEMORY, 0.2, tags=("kv_cache", "weights"))
    rig.made(Verb.RESUME_MEMORY, 0.2, tags=("kv_cache", "weights"))
    assert not rig.front.death and rig.front.spoilt


def test_what_kills_a_real_engine_is_told() -> None:
    at_work = Rig()
    at_work.submit("a")
    at_work.run(0.2)
    at_work.made(Verb.RELEASE_MEMORY, 0.2, tags=("kv_cache",))
    assert at_work.front.death == RELEASED_AT_WORK
    never = Rig()
    never.made(Verb.RESUME_MEMORY, 0.2, tags=("kv_cache",))
    assert "not released" in never.front.death
    without = Rig()
    without.made(Verb.RELEASE_MEMORY, 0.2, tags=("kv_cache",))
    without.submit("a")
    assert "memory is released" in without.front.death


def test_a_hit_on_kv_of_other_weights_is_told() -> None:
    rig = Rig()
    rig.submit("a", 10)
    rig.run(5.0)
    rig.loaded("1")
    rig.submit("b", 10)
    rig.run(5.0)
    assert ("default", "/weights/1", "") in rig.machine.crossings
    rig.machine.check()


def test_a_call_that_is_out_when_the_process_dies_is_cut() -> None:
    rig = Rig()
    rig.call(Verb.LOAD, path="/weights/1", label="1")
    (cut,) = rig.front.cut()
    assert isinstance(cut, ControlFailed) and cut.fault is FaultKind.BROKEN
    rig.run(5.0)
    assert not rig.answers
