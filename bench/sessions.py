"""Agents: sessions of turns with tools between them, in a closed loop.

Invariants
- A turn's prompt is everything before it (prompts, outputs, tool answers) and its own new tokens; it exists once the turn before
  it has ended and its tool has answered.
- Lengths, gaps and seeds are drawn beforehand, so every scheduler gets the same session whatever order it serves it in.
- The sessions of one task start with the same prompt; all start with the same head.
- The context of a session with its last output fits the engines.

What this module does not know: engines and time. The trainer of a simulation releases turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolloutd.bench.lengths import LogNormal
from rolloutd.bench.workload import (
    TOKEN_BYTES,
    Item,
    Limits,
    Session,
    TaskType,
    Turn,
    WorkClass,
    random_tokens,
    stream,
    token_bytes,
)

SAMPLING_SEEDS = 2**31

# As measured on software agents (AgentCgroup): shares of calls, seconds of each as logs of log-normals.
BASH_SHARE = 0.504
BASH_QUICK_SHARE = 0.42
BASH_QUICK = (-2.887, 1.170)
BASH_SLOW = (2.166, 0.398)
OTHER_TOOLS = (-3.872, 0.783)
RARE_SHARE = 0.005  # a build or a test suite
RARE_SECONDS = (40.0, 300.0)


def tool_gaps_seconds(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds between the end of a turn and the arrival of the next, shape (count,)."""
    kind = rng.uniform(size=count)
    quick = rng.uniform(size=count) < BASH_QUICK_SHARE
    normal = rng.standard_normal(count)
    rare = rng.uniform(*RARE_SECONDS, size=count)
    logs = np.where(
        kind >= BASH_SHARE,
        OTHER_TOOLS[0] + OTHER_TOOLS[1] * normal,
        np.where(quick, BASH_QUICK[0] + BASH_QUICK[1] * normal, BASH_SLOW[0] + BASH_SLOW[1] * normal),
    )
    gaps = np.exp(logs)
    return np.where(rng.uniform(size=count) < RARE_SHARE, rare, gaps)


@dataclass(frozen=True, slots=True)
class SessionTraffic:
    """`tasks` prompts with `samples` sessions each, all there at the start.

    turns: per session; its spread is split between tasks and sessions as outputs' is. first_prompt: after the head, of a task.
    new_tokens: what a tool's answer adds before each further turn. output: of one turn.
    """

    name: str
    work_class: WorkClass
    stratum: str
    tasks: int
    samples: int
    turns: LogNormal
    head_tokens: int
    first_prompt: LogNormal
    new_tokens: LogNormal
    output: LogNormal

    def draw(
        self, seed: int, limits: Limits, *, step: int = 0, epoch: int = 0, needed_by_step: int | None = None
    ) -> list[Session]:
        """Sessions of one step, task by task; a session that would outgrow the context ends before that.

        Another epoch keeps prompts and the difficulty of tasks, and renews everything else.
        """
        output = self.output if limits.max_output_tokens is None else self.output.capped(limits.max_output_tokens)
        prompts = stream(seed, self.name, "prompts", step)
        difficulty = stream(seed, self.name, "difficulty", step)
        fresh = stream(seed, self.name, "samples", step, epoch)
        head = random_tokens(stream(seed, self.name, "head"), self.head_tokens, limits)
        firsts = self.first_prompt.draw(prompts, self.tasks)
        counts = self.turns.draw_groups(difficulty, fresh, self.tasks, self.samples)
        sessions = []
        for task in range(self.tasks):
            own = random_tokens(prompts, int(firsts[task]), limits)
            first = token_bytes(np.concatenate((head, own)))
            for sample in range(self.samples):
                turns = self._turns(fresh, first, int(counts[task, sample]), output, limits)
                session_id = f"{self.name}-s{step}e{epoch}-t{task:04d}-{sample}"
                sessions.append(
                    Session(
                        session_id=session_id,
                        work_class=self.work_class,
                        task_type=TaskType.GENERATION,
                        stratum=self.stratum,
                        max_new_tokens=output.high_tokens,
                        turns=turns,
                        needed_by_step=needed_by_step,
                    )
                )
        return sessions

    def _turns(
        self, rng: np.random.Generator, first: bytes, count: int, output: LogNormal, limits: Limits
    ) -> tuple[Turn, ...]:
        outputs = output.draw(rng, count)
        news = self.new_tokens.draw(rng, count - 1)
        gaps = tool_gaps_seconds(rng, count - 1)
        seeds = rng.integers(0, SAMPLING_SEEDS, size=count)
        turns = [Turn(first, int(outputs[0]), int(seeds[0]), 0.0)]
        context = len(first) // TOKEN_BYTES + int(outputs[0])
        for turn in range(1, count):
            own = random_tokens(rng, int(news[turn - 1]), limits)  # drawn even if unused: turns stay what they are
            context += len(own) + int(outputs[turn])
            if context - int(outputs[turn]) + output.high_tokens > limits.context_tokens:
                break
            turns.append(Turn(token_bytes(own), int(outputs[turn]), int(seeds[turn]), float(gaps[turn - 1])))
        return tuple(turns)


def log_normal_of_mean(mean: float, sigma: float, low: int, high: int) -> LogNormal:
    """The log-normal of that mean (before clipping)."""
    return LogNormal(math.log(mean) - sigma * sigma / 2.0, sigma, low, high)


def turn_item(session: Session, turn: int, context_bytes: bytes, arrival_seconds: float) -> Item:
    """One turn as a rollout; `context_bytes` is its whole prompt."""
    of = session.turns[turn]
    return Item(
        rollout_id=f"{session.session_id}#{turn:03d}",
        work_class=session.work_class,
        task_type=session.task_type,
        prompt_bytes=context_bytes,
        output_tokens=of.output_tokens,
        max_new_tokens=session.max_new_tokens,
        sampling_seed=of.sampling_seed,
        stratum=session.stratum,
        arrival_seconds=arrival_seconds,
        session_id=session.session_id,
        turn=turn,
        needed_by_step=session.needed_by_step,
    )


class SessionsUnderWay:
    """Turn after turn of a workload's sessions: each prompt as long as what came before makes it."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = {session.session_id: session for session in sessions}
        self._contexts: dict[str, bytes] = {}  # session -> prompt of the turn that is out

    def first(self, session: Session) -> Item:
        """Its first turn, at the session's arrival."""
        context = self._contexts[session.session_id] = session.turns[0].new_bytes
        return turn_item(session, 0, context, session.arrival_seconds)

    def after(self, session_id: str, turn: int, output: bytes, now_seconds: float) -> Item | None:
        """The turn that follows one that is back, when its tool has answered; None after the last one."""
        session = self._sessions[session_id]
        if turn + 1 == len(session.turns):
            del self._contexts[session_id]
            return None
        following = session.turns[turn + 1]
        context = self._contexts[session_id] = self._contexts[session_id] + output + following.new_bytes
        return turn_item(session, turn + 1, context, now_seconds + following.gap_seconds)

    def give_up(self, session_id: str, turn: int) -> int:
        """A turn failed: the session is over. Returns how many turns never come."""
        del self._contexts[session_id]
        return len(self._sessions[session_id].turns) - turn - 1
