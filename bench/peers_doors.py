"""The two ways to what is compared: plain HTTP through a router, and rolloutd's own client.

Invariants
- Both ask for the same rollouts: prompt, limits, seed; no log-probs, which would cost everybody CPU and change no schedule. A
  router gets one call per rollout, the whole answer at once, which is its cheapest form; rolloutd gets one submission per prompt.
- How long an output really is reaches the engine alone. rolloutd passes `custom_params` on unread. Routers drop them, so there it
  is `min_new_tokens`, on engines that end an output as soon as it may end (`--mean-output-tokens 1`); no policy reads that field.
- Every rollout handed over ends in exactly one `Answer`, or in an exception.

What this module does not know: time, workloads, what the answers mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import numpy as np
import orjson

from rolloutd.bench.workload import Item
from rolloutd.client import Client, RolloutOptions, RolloutResult

ROUTING_KEY = "X-SMG-Routing-Key"  # by which both routers recognise a session, where their policy looks at it
WEIGHTS_PATH = "weights-{}"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one rollout ended. output: token ids, uint32 little-endian. problem: why it is not complete, else empty."""

    rollout_id: str
    output: bytes = b""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attempts: int = 1
    problem: str = ""


class Door(Protocol):
    """Where a trainer's rollouts go. Use as `async with`."""

    answers: asyncio.Queue[Answer | BaseException]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def begin(self, step: int, items: Sequence[Item], rollouts: int) -> None:
        """A step begins, of so many rollouts. items: what is known of it before; may be got ready."""
        ...

    async def submit(self, items: Sequence[Item]) -> None:
        """Hand these over, all at once."""
        ...

    async def end(self, step: int) -> None:
        """All is back."""
        ...

    async def publish(self, version: int, engine_urls: Sequence[str]) -> None:
        """New weights on all engines, which drop their caches."""
        ...


class HttpDoor:
    """A router, or an engine, at `url`."""

    def __init__(self, url: str) -> None:
        self.answers: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        self._url = url
        self._bodies: dict[str, bytes] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._session.close()

    async def begin(self, step: int, items: Sequence[Item], rollouts: int) -> None:
        """Write the bodies before the clock starts."""
        self._bodies = dict(bodies(items))

    async def submit(self, items: Sequence[Item]) -> None:
        missing = [item for item in items if item.rollout_id not in self._bodies]
        self._bodies.update(bodies(missing))
        for item in items:
            call = asyncio.create_task(self._call(item))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def end(self, step: int) -> None:
        """A router is told nothing."""

    async def publish(self, version: int, engine_urls: Sequence[str]) -> None:
        """What a trainer does to idle engines behind a router; the router is told nothing."""
        for url in engine_urls:
            async with self._session.post(f"{url}/flush_cache") as response:
                if response.status != 200:
                    raise RuntimeError(f"{url} did not flush its cache: {await response.text()}")

    async def _call(self, item: Item) -> None:
        headers = {"Content-Type": "application/json"}
        if item.session_id:
            headers[ROUTING_KEY] = item.session_id
        try:
            async with self._session.post(
                f"{self._url}/generate", data=self._bodies.pop(item.rollout_id), headers=headers
            ) as response:
                page = await response.read()
                status = response.status
            self.answers.put_nowait(answer_of_page(item.rollout_id, status, page))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whoever waits for answers raises it
            self.answers.put_nowait(error)


def bodies(items: Iterable[Item]) -> Iterable[tuple[str, bytes]]:
    """(rollout id, JSON of the call); a prompt that follows itself is written once."""
    prompt, written = b"", b""
    for item in items:
        if item.prompt_bytes != prompt or not written:
            prompt = item.prompt_bytes
            written = orjson.dumps(np.frombuffer(prompt, "<u4"), option=orjson.OPT_SERIALIZE_NUMPY)
        rest: dict[str, Any] = {
            "rid": item.rollout_id,
            "sampling_params": {
                "max_new_tokens": item.max_new_tokens,
                "min_new_tokens": item.output_tokens - 1,
                "sampling_seed": item.sampling_seed,
                "temperature": 1.0,
            },
            "stream": False,
        }
        yield item.rollout_id, b'{"input_ids":' + written + b"," + orjson.dumps(rest)[1:]


def answer_of_page(rollout_id: str, status: int, page: bytes) -> Answer:
    """What a call's answer says. A refusal or an aborted output is a problem, a page that is no JSON an exception."""
    if status != 200:
        return Answer(rollout_id, problem=f"HTTP {status}: {page[:200].decode(errors='replace')}")
    body = orjson.loads(page)
    meta = body["meta_info"]
    reason = (meta["finish_reason"] or {}).get("type")
    output = np.array(body["output_ids"], dtype="<u4")
    problem = "" if reason in ("stop", "length") else f"finish reason {meta['finish_reason']}"
    return Answer(rollout_id, output.tobytes(), meta["prompt_tokens"], meta["cached_tokens"], problem=problem)


class ClientDoor:
    """rolloutd, through its client, which must be open and of its own consumer, with auto_acknowledge off.

    A step is handed over while the trainer still reports SYNCING, as `rolloutd demo` does: so the service knows all of it before
    any of it starts. The clock runs meanwhile.
    """

    def __init__(self, client: Client) -> None:
        self.answers: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        self._client = client
        self._names: dict[str, str] = {}  # the client's name of a rollout that is out -> the workload's
        self._handing_over: int | None = None  # the step whose first rollouts are not all accepted yet
        self._reader: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def begin(self, step: int, items: Sequence[Item], rollouts: int) -> None:
        await self._client.report_step(step, trainer_state="syncing", samples_needed=rollouts)
        self._handing_over = step

    async def submit(self, items: Sequence[Item]) -> None:
        handed_over = []
        for _, members in groupby(items, key=lambda item: item.group_id or item.rollout_id):
            group = list(members)
            first = group[0]
            for sample, item in enumerate(group):
                self._names[f"{first.group_id}/{sample}" if len(group) > 1 else first.rollout_id] = item.rollout_id
            handed_over.append(await self._client.submit(first.prompt_bytes, **options(group)))
        step, self._handing_over = self._handing_over, None
        if step is not None:
            await asyncio.gather(*(submission.accepted() for submission in handed_over))
            await self._client.report_step(step, trainer_state="waiting")

    async def end(self, step: int) -> None:
        await self._client.report_step(step, trainer_state="training", samples_needed=0)

    async def publish(self, version: int, engine_urls: Sequence[str]) -> None:
        await self._client.publish_and_wait(version, path=WEIGHTS_PATH.format(version))

    async def _read(self) -> None:
        try:
            async for result in self._client.results():
                self.answers.put_nowait(answer_of_result(self._names.pop(result.rollout_id, result.rollout_id), result))
                self._client.acknowledge(result, used=result.complete)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whoever waits for answers raises it
            self.answers.put_nowait(error)


def options(group: Sequence[Item]) -> RolloutOptions:
    """How to submit the members of a group, or one item alone; a group goes by its id, its members as "ID/0", "ID/1", ..."""
    first = group[0]
    ends = {str(item.sampling_seed): item.prompt_tokens + item.output_tokens for item in group}
    words: RolloutOptions = {
        "rollout_id": first.group_id if len(group) > 1 else first.rollout_id,
        "samples": len(group),
        "seeds": [item.sampling_seed for item in group],
        "custom_params": {"end_at_tokens": ends},
        "max_new_tokens": first.max_new_tokens,
        "temperature": 1.0,
        "logprobs": False,
        "rollout_class": first.work_class.value,
        "task_type": first.task_type.value,
        "stratum": first.stratum,
    }
    if first.needed_by_step is not None:
        words["needed_by_step"] = first.needed_by_step
    if first.session_id:
        words["session_id"] = first.session_id
        words["turn"] = first.turn
    return words


def answer_of_result(rollout_id: str, result: RolloutResult) -> Answer:
    """What a result says. rollout_id: as the workload names it."""
    problem = "" if result.complete else f"{result.outcome}: {result.problem}"
    output = result.tokens.astype("<u4", copy=False).tobytes()
    return Answer(rollout_id, output, result.prompt_tokens, result.cached_tokens, max(1, result.attempts), problem)
