"""Policy versions on two real SGLang servers: 200 rollouts, a publication in each mode among them, and a proof of every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from rolloutd.client import Client, Publication, RolloutResult
from rolloutd.client.publishing import PublishOptions
from tests.e2e.published import PublishRig, checkpoint, load
from tests.e2e.redecode import LOGPROB_ERROR, Part, by_engine, check_greedy, parts_of
from tests.e2e.witness import LOAD, check_result, check_times, generations_by_rollout

ROLLOUTS, EVERY = 200, 40
IN_FLIGHT = 28
PROMPT_TOKENS = (24, 96)
OUTPUT_TOKENS = (60, 240)
HOT_PROMPT_TOKENS = 64
HOT_OUTPUT_TOKENS = 8
FEWEST_UNDER_WAY = 3
OWN = ("/pause_generation", "/flush_cache", LOAD, "/continue_generation")


@dataclass(frozen=True, slots=True)
class Step:
    """One publication of the scenario."""

    version: int
    options: PublishOptions


STEPS = (
    Step(1, {"mode": "drain", "cache": "namespace", "engines_at_once": 1}),
    Step(2, {"mode": "abort_and_resume", "cache": "flush"}),
    Step(3, {"mode": "retract", "cache": "flush"}),
    Step(4, {"mode": "in_place", "cache": "namespace"}),
)
KEEPS_KV = {0: False, **{step.version: step.options["mode"] == "in_place" for step in STEPS}}


@dataclass(frozen=True, slots=True)
class HotPrompt:
    """What happened to a shared prompt, sent twice behind a publication."""

    version: int
    cached_tokens: tuple[int, int]
    predicted_tokens: tuple[int, int]


class Scenario:
    """The trainer's side: submits, publishes, collects."""

    def __init__(self, client: Client, prober: Client, random: np.random.Generator) -> None:
        self.client = client
        self.prober = prober  # keeps its rollouts, so that they can be explained
        self.prompts: dict[str, list[int]] = {}
        self.output_tokens: dict[str, int] = {}
        self.results: dict[str, RolloutResult] = {}
        self.under_way: dict[int, int] = {}  # rollouts that had begun and not ended, by the version asked for then
        self.publish_seconds: dict[int, float] = {}
        self.hot: list[HotPrompt] = []
        self._running: set[str] = set()
        self._news = asyncio.Event()
        self._hot_prompt = random.integers(3, 1000, HOT_PROMPT_TOKENS).tolist()
        for index in range(ROLLOUTS):
            rollout_id = f"rollout-{index:03d}"
            self.prompts[rollout_id] = random.integers(3, 1000, int(random.integers(*PROMPT_TOKENS))).tolist()
            self.output_tokens[rollout_id] = int(random.integers(*OUTPUT_TOKENS))

    async def run(self) -> None:
        """All rollouts; a publication whenever another EVERY results have come."""
        waiting = list(self.prompts)
        steps = list(STEPS)
        publishing: list[asyncio.Task[None]] = []
        for _ in range(IN_FLIGHT):
            await self._submit(waiting.pop(0))
        await self._send_hot(0)
        async for result in self.client.results():
            assert result.rollout_id not in self.results, f"{result.rollout_id} was delivered twice"
            self.results[result.rollout_id] = result
            self._running.discard(result.rollout_id)
            self._news.set()
            if waiting:
                await self._submit(waiting.pop(0))
            if steps and len(self.results) >= EVERY * steps[0].version:
                publishing.append(asyncio.create_task(self._publish(steps.pop(0), publishing[-1:])))
            if len(self.results) == ROLLOUTS:
                break
        await asyncio.gather(*publishing)

    async def _submit(self, rollout_id: str) -> None:
        await self.client.submit(
            self.prompts[rollout_id],
            rollout_id=rollout_id,
            max_new_tokens=self.output_tokens[rollout_id],
            temperature=0,
            ignore_eos=True,
            logprobs=True,
            on_progress=lambda progress: self._begun(progress.rollout_id),
        )

    def _begun(self, rollout_id: str) -> None:
        self._running.add(rollout_id)
        self._news.set()

    async def _publish(self, step: Step, before: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*before)
        # Results that were read all at once leave a moment in which those that follow them have not begun.
        while len(self._running) < FEWEST_UNDER_WAY and len(self.results) < ROLLOUTS:
            self._news.clear()
            await self._news.wait()
        self.under_way[step.version] = len(self._running)
        began = time.monotonic()
        published = await self.client.publish_and_wait(step.version, path=str(checkpoint(step.version)), **step.options)
        assert isinstance(published, Publication) and len(published.updated) == 2, published
        self.publish_seconds[step.version] = time.monotonic() - began
        await self._send_hot(step.version)

    async def _send_hot(self, version: int) -> None:
        """The shared prompt twice, one behind the other."""
        cached, predicted = [], []
        for turn in range(2):
            rollout_id = f"hot-{version}-{turn}"
            result = await self.prober.generate(
                self._hot_prompt,
                rollout_id=rollout_id,
                max_new_tokens=HOT_OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
            )
            explained = await self.prober.explain(rollout_id)
            (hits,) = (
                [candidate.hit_tokens for candidate in decision.candidates if candidate.engine_id == decision.engine_id]
                for decision in explained.decisions
                if decision.batch_id
            )
            cached.append(result.cached_tokens)
            predicted.append(hits[0])
        self.hot.append(HotPrompt(version, (cached[0], cached[1]), (predicted[0], predicted[1])))


@dataclass(frozen=True, slots=True)
class Proof:
    """What decoding again showed. `continued_apart`: by how much log-probs behind a swap in place differ from those after a prefill."""

    tokens: int
    near_ties: int
    logprob_error: float
    engine_tokens: int
    engine_near_ties: int
    continued_tokens: int
    continued_apart: float


async def prove(rig: PublishRig, results: Sequence[RolloutResult], parts: Sequence[Sequence[Part]]) -> Proof:
    """Every span again, by transformers and, where a prefill is all it takes, by an engine that holds its weights."""
    checkpoints = {version: checkpoint(version) for version in KEEPS_KV}
    references = await rig.transformers.decode(parts, checkpoints)
    near_ties = check_greedy(results, references)
    error = max(
        float(np.max(np.abs(result.logprobs - reference.logprobs)))
        for result, reference in zip(results, references, strict=True)
    )

    # Old KV makes a difference, so the proof of swaps in place can tell.
    mixed = [index for index, spans in enumerate(parts) if not all(part.fresh for part in spans)]
    apart: list[float] = []
    as_if_fresh = await rig.transformers.decode([parts[index] for index in mixed], checkpoints, all_fresh=True)
    for index, other in zip(mixed, as_if_fresh, strict=True):
        for part in parts[index]:
            if not part.fresh:
                span = slice(part.span.start, part.span.end)
                apart += np.abs(references[index].logprobs[span] - other.logprobs[span]).tolist()

    fresh = [part for spans in parts for part in spans if part.fresh]
    await load(rig.engines[0], 0, "even")
    await load(rig.engines[1], 1, "odd")
    ties = await asyncio.gather(
        *(
            by_engine(engine, [part for part in fresh if part.span.policy_version % 2 == parity])
            for parity, engine in enumerate(rig.engines)
        )
    )
    return Proof(
        sum(len(result.tokens) for result in results),
        near_ties,
        error,
        sum(len(part.own) for part in fresh),
        sum(ties),
        len(apart),
        float(np.median(apart)) if apart else 0.0,
    )


@pytest.mark.sglang
async def test_every_token_is_of_the_version_that_it_names(publishing: PublishRig, random: np.random.Generator) -> None:
    began = time.monotonic()
    async with publishing.client() as client, publishing.client("prober", auto_acknowledge=False) as prober:
        engine_urls = await publishing.engine_urls(client)
        scenario = Scenario(client, prober, random)
        await scenario.run()
    seconds = time.monotonic() - began
    results = list(scenario.results.values())

    # Nothing lost, nothing twice, and the version that the engine named.
    assert sorted(scenario.results) == sorted(scenario.prompts)
    assert all(result.ok and result.complete for result in results), [
        (result.rollout_id, result.problem) for result in results if not result.ok
    ]
    generations = generations_by_rollout(publishing.taps, scenario.prompts)
    overlap = not json.loads((await publishing.engines[0].get("/server_info"))[1])["disable_overlap_schedule"]
    in_place = {version for version, keeps in KEEPS_KV.items() if keeps and overlap}
    for result in results:
        assert len(result.tokens) == scenario.output_tokens[result.rollout_id]
        check_result(result, scenario.prompts[result.rollout_id], generations[result.rollout_id], engine_urls, in_place)
    bounded = sum(check_times(tap) for tap in publishing.taps)

    for tap in publishing.taps:
        assert [order.body["weight_version"] for order in tap.told(LOAD)] == [str(step.version) for step in STEPS]

    # Several rollouts were under way at each publication. Those of DRAIN ended on the version that they began with. (Work may
    # also go on elsewhere under the same version, when an engine had no memory left for it.)
    parts = [parts_of(result, scenario.prompts[result.rollout_id], KEEPS_KV) for result in results]
    crossed = Counter(
        (later.span.policy_version, later.span.attempt == earlier.span.attempt)
        for spans in parts
        for earlier, later in zip(spans, spans[1:], strict=False)
        if later.span.policy_version != earlier.span.policy_version
    )
    print(
        f"\n{seconds:.1f} s; rollouts under way when a version was asked for {scenario.under_way}, "
        f"that wrote on under it, (version, in the same attempt): {dict(crossed)}; tokens with a bound in time {bounded}"
    )
    for step in STEPS:
        print(f"{step}: published in {scenario.publish_seconds[step.version]:.2f} s")
    for tap in publishing.taps:
        print(*(f"{order.path} {order.answered_at - order.asked_at:.3f}" for order in tap.orders if order.path in OWN))
    assert min(scenario.under_way.values()) >= FEWEST_UNDER_WAY
    assert crossed.keys() == {(2, False), (3, True), (4, True)} and min(crossed.values()) >= FEWEST_UNDER_WAY, crossed

    # No credit for prefixes of an earlier version; the next time the prompt is cached again.
    print(scenario.hot)
    assert [hot.version for hot in scenario.hot] == [0, *(step.version for step in STEPS)]
    for hot in scenario.hot:
        assert hot.cached_tokens[0] == hot.predicted_tokens[0] == 0, hot
        assert hot.cached_tokens[1] > 0 and hot.predicted_tokens[1] > 0, hot

    # The weights that a token names are those that computed it.
    proof_began = time.monotonic()
    proof = await prove(publishing, results, parts)
    print(f"{proof}, {time.monotonic() - proof_began:.1f} s")
    assert proof.continued_tokens and proof.continued_apart > 10 * LOGPROB_ERROR
