"""Two real SGLang servers on the CPU as the engines of a demonstration.

Invariants
- The engine's environment lives outside the checkout and is built once (`deploy/sglang-cpu/setup.sh`).
- Output is greedy. The reference of a prompt is what an engine generates for it alone, one request at a time. A first
  difference counts as equal only where the reference's two best log-probs are within `NEAR_TIE`; such ones are counted,
  and what follows cannot be compared.

What this module does not know: processes beyond their commands, who submits.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rolloutd.bench.bounds import EngineShape
from rolloutd.bench.demo_fleet import Say
from rolloutd.bench.demo_ledger import Tracked
from rolloutd.bench.demo_processes import Children
from rolloutd.bench.w1 import SMALL_DEMO, DemoShape
from rolloutd.bench.workload import Item, Kind, Limits
from rolloutd.client import RolloutOptions

RECIPE = Path(__file__).resolve().parents[1] / "deploy" / "sglang-cpu"
# The folder that the recipe itself uses when it is not told another.
CACHE_NAME = "sglang-cpu-0.5.23"
SETUP_SECONDS = 1800.0
NEAR_TIE = 1e-3
# Prompts whose outputs are held against a reference: each costs about a second of an idle engine.
REFERENCES = 16
REFERENCE_SECONDS = 60.0


def environment_folder() -> Path:
    """`${ROLLOUTD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rolloutd}/sglang-cpu-0.5.23`, as in the recipe."""
    cache = os.environ.get("ROLLOUTD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(str(Path.home()), ".cache"), "rolloutd"
    )
    return Path(cache) / CACHE_NAME


@dataclass(slots=True)
class SglangFleet:
    """Real engines, a small workload, real time."""

    engines: int = 2
    slots: int = 8
    time_scale: float = 1.0
    page_size_tokens: int = 16
    ready_seconds: float = 180.0
    limits: Limits = field(
        default_factory=lambda: Limits(vocabulary_size=1024, context_tokens=4096, max_output_tokens=256)
    )
    shape: DemoShape = SMALL_DEMO
    training_seconds: float = 5.0

    @property
    def title(self) -> str:
        return f"{self.engines} real SGLang servers on the CPU, {self.slots} slots each"

    @property
    def modelled(self) -> Sequence[EngineShape]:
        return ()

    async def prepare(self, children: Children, say: Say) -> None:
        """Build the engine's environment where it is not there yet. Raises ChildFailed with the log of a failed build."""
        setup = RECIPE / "setup.sh"
        if not setup.exists():
            raise FileNotFoundError(f"{setup} is missing: --engine sglang needs a checkout of the repository")
        folder = environment_folder()
        if not (folder / "complete").exists():
            say(f"building the SGLang environment in {folder}: once, about 3 minutes, 1.6 GB")
        child = await children.start("sglang setup", ["bash", str(setup), str(folder)])
        children.running.remove(child)  # its end is not a failure
        shown = 0

        async def done() -> bool:
            nonlocal shown
            lines = child.log.read_text(errors="replace").splitlines()
            for line in lines[shown:]:
                say(line)
            shown = len(lines)
            return child.process.returncode == 0

        try:
            await children.until_ready(child, done, SETUP_SECONDS)
        finally:
            if child.process.returncode is None:
                children.running.append(child)

    def command(self, port: int) -> list[str]:
        return [
            "bash",
            str(RECIPE / "serve.sh"),
            str(environment_folder()),
            str(port),
            "--max-running-requests",
            str(self.slots),
            "--context-length",
            str(self.limits.context_tokens),
            "--page-size",
            str(self.page_size_tokens),
        ]

    def options(self, items: Sequence[Item]) -> RolloutOptions:
        return {"max_new_tokens": items[0].max_new_tokens, "temperature": 0.0, "ignore_eos": True}

    async def check(self, rollouts: Iterable[Tracked], urls: Sequence[str], say: Say) -> list[str]:
        by_prompt: defaultdict[tuple[bytes, int], list[Tracked]] = defaultdict(list)
        for rollout in rollouts:
            if rollout.complete:
                rollout.record.wrong_tokens = abs(rollout.item.max_new_tokens - len(rollout.tokens))
            if len(rollout.tokens):
                by_prompt[rollout.item.prompt_bytes, rollout.item.max_new_tokens].append(rollout)
        chosen = _choose(by_prompt)
        say(f"asking an engine for the outputs of {len(chosen)} prompts alone, to compare with")
        near_ties = compared = 0
        timeout = aiohttp.ClientTimeout(total=REFERENCE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for prompt, max_new_tokens in chosen:
                reference = await _alone(session, urls[0], prompt, max_new_tokens)
                for rollout in by_prompt[prompt, max_new_tokens]:
                    wrong, near = reference.compare(rollout.tokens)
                    rollout.record.wrong_tokens += wrong
                    near_ties += near
                    compared += 1
        return [
            f"{compared} outputs compared with what an engine gives for their prompts alone; "
            f"{near_ties} first differences at a near tie (within {NEAR_TIE} in log-prob) counted as equal"
        ]


@dataclass(frozen=True, slots=True)
class Reference:
    """tokens: n ids. gaps: best minus second-best log-prob at each of them."""

    tokens: Sequence[int]
    gaps: Sequence[float]

    def compare(self, tokens: np.ndarray[Any, np.dtype[np.uint32]]) -> tuple[int, bool]:
        """(tokens that are wrong, whether the first difference was a near tie) for an output or the start of one."""
        common = min(len(tokens), len(self.tokens))
        differing = np.flatnonzero(np.asarray(self.tokens[:common]) != tokens[:common])
        if not len(differing):
            return 0, False
        if self.gaps[int(differing[0])] <= NEAR_TIE:
            return 0, True
        return len(differing), False


def _choose(by_prompt: dict[tuple[bytes, int], list[Tracked]]) -> list[tuple[bytes, int]]:
    """Up to `REFERENCES` prompts, every kind in turn, the same ones in every run."""
    of_kind: dict[Kind, list[tuple[bytes, int]]] = {kind: [] for kind in Kind}
    for key, rollouts in by_prompt.items():
        of_kind[rollouts[0].item.kind].append(key)
    for kind, keys in of_kind.items():
        keys.sort()
        random.Random(kind.value).shuffle(keys)
    turns = [keys[turn] for turn in range(REFERENCES) for keys in of_kind.values() if turn < len(keys)]
    return turns[:REFERENCES]


async def _alone(session: aiohttp.ClientSession, url: str, prompt: bytes, max_new_tokens: int) -> Reference:
    body = {
        "input_ids": np.frombuffer(prompt, "<u4").tolist(),
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 2,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    tops = answer["meta_info"]["output_top_logprobs"]
    return Reference(answer["output_ids"], [best[0] - second[0] for best, second in tops])
