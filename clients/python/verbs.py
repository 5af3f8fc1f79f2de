"""What is done with a stream of rollouts, whether one server is behind it or several.

Invariants: those of client.py, for everything that is submitted or acknowledged here. What this does not know: how many
servers there are, and the calls beside the stream.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, Unpack

from rolloutd import v1
from rolloutd.client.handles import Results, Submission
from rolloutd.client.inbox import Collector, Discard, Inbox
from rolloutd.client.ledger import Entry, Sink
from rolloutd.client.prompts import Prompt
from rolloutd.client.results import Acceptance, Notice, Progress, RolloutResult
from rolloutd.client.submissions import GenerateOptions, RolloutOptions, submission_of

KEPT_NOTICES = 256


class Stream(Protocol):
    """Entries in, results out. See RolloutStream."""

    def raise_failure(self) -> None:
        """Raises what ended it for good, if anything did."""

    def waiting(self) -> AbstractContextManager[None]:
        """While inside, results are read even if nobody empties the inbox."""

    async def submit(self, entry: Entry) -> None:
        """Takes an entry, at once or as soon as enough others are accepted."""

    async def acceptance(self, entry: Entry) -> Acceptance:
        """The answer to a submission. Refused when that is no."""

    def cancel(self, entry: Entry) -> None:
        """Cancels all its rollouts."""

    def acknowledge(self, acknowledgement: v1.Acknowledgement) -> None:
        """The caller has dealt with a result."""


class Verbs:
    """Submitting, taking and acknowledging."""

    def __init__(
        self,
        auto_acknowledge: bool,
        max_unaccepted: int,
        max_buffered_results: int,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        if min(max_unaccepted, max_buffered_results) < 1:
            raise ValueError("max_unaccepted and max_buffered_results are at least 1")
        self._auto_acknowledge = auto_acknowledge
        self._max_unaccepted = max_unaccepted
        self._inbox = Inbox(max_buffered_results, self._read_on)
        self._notices: deque[Notice] = deque(maxlen=KEPT_NOTICES)
        self._on_notice = on_notice

    @property
    def _stream(self) -> Stream:
        raise NotImplementedError

    def _read_on(self) -> None:
        raise NotImplementedError

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The latest notices, oldest first."""
        return tuple(self._notices)

    async def submit(
        self,
        prompt: Prompt,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Submission:
        """Hands a prompt over; results come in `results()`.

        Returns at once, without waiting for the server, unless `max_unaccepted` submissions (or 64 MiB of them) are
        unanswered; then it waits, which is the back-pressure of a full queue. Raises TypeError or ValueError for arguments
        that cannot be sent, and what ended the client, if anything did.
        """
        entry = await self._submit(prompt, self._inbox, on_progress, options)
        return Submission(self._stream, entry)

    async def generate(
        self,
        prompt: Prompt,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RolloutResult:
        """One rollout from prompt to result. RolloutFailed when it ends without completing, Refused when it never ran.

        Cancelling the call cancels the rollout.
        """
        (result,) = await self._generate(prompt, on_progress, options)
        result.raise_for_outcome()
        return result

    async def generate_group(
        self,
        prompt: Prompt,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> list[RolloutResult]:
        """All samples of a prompt, by sample index, whatever their outcomes (look at `ok`). Refused when none ever ran.

        With `samples=10, group_keep=8` the first eight to complete are kept; the other two come back with outcome "surplus".
        Cancelling the call cancels the rollouts.
        """
        return await self._generate(prompt, on_progress, options)

    def results(self) -> Results:
        """Every result of `submit`, as it comes, without end; also those of this consumer's earlier life and of taken-over ones."""
        return Results(lambda: self._take(until_idle=False))

    def drain(self) -> Results:
        """As results(), but ends once everything submitted so far by `submit` has come."""
        return Results(lambda: self._take(until_idle=True))

    def acknowledge(
        self,
        result: RolloutResult | str,
        *,
        used: bool | None = None,
        drop_reason: str = "",
        reward: float | None = None,
    ) -> None:
        """Says what became of a result (or rollout id), so that the server forgets it. Sent with the next message.

        used: True counts it as a valid sample, False as dropped, for which `drop_reason` is a short stable word.
        ValueError with auto_acknowledge, where the server has forgotten the result already.
        """
        if self._auto_acknowledge:
            raise ValueError(
                "results are acknowledged automatically here; for verdicts connect(..., auto_acknowledge=False)"
            )
        if drop_reason and used is not False:
            raise ValueError("drop_reason goes with used=False")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward must be finite, not {reward}")
        self._stream.raise_failure()
        verdict = {None: v1.VERDICT_UNSPECIFIED, True: v1.VERDICT_USED, False: v1.VERDICT_DROPPED}[used]
        rollout_id = result if isinstance(result, str) else result.rollout_id
        self._stream.acknowledge(
            v1.Acknowledgement(rollout_id=rollout_id, verdict=verdict, drop_reason=drop_reason, reward=reward)
        )

    async def _submit(
        self,
        prompt: Prompt,
        sink: Sink,
        on_progress: Callable[[Progress], None] | None,
        options: GenerateOptions,
    ) -> Entry:
        message = submission_of(prompt, options)
        message.want_progress = on_progress is not None
        entry = Entry(message, sink, asyncio.get_running_loop().time(), on_progress)
        await self._stream.submit(entry)
        return entry

    async def _generate(
        self, prompt: Prompt, on_progress: Callable[[Progress], None] | None, options: GenerateOptions
    ) -> list[RolloutResult]:
        collector = Collector()
        entry = await self._submit(prompt, collector, on_progress, options)
        try:
            with self._stream.waiting():
                results = await collector.wait()
        except BaseException:
            entry.sink = Discard(self._forget)
            for result in collector.arrived:
                self._forget(result)
            self._stream.cancel(entry)
            raise
        if self._auto_acknowledge:
            for result in results:
                self._forget(result)
        return results

    async def _take(self, *, until_idle: bool) -> RolloutResult | None:
        _ = self._stream  # raises where there is none: nothing would ever come
        result = await self._inbox.take(until_idle=until_idle)
        if result is not None and self._auto_acknowledge:
            self._forget(result)
        return result

    def _forget(self, result: RolloutResult) -> None:
        if result.outcome != "refused":  # the server has no result of those
            self._stream.acknowledge(v1.Acknowledgement(rollout_id=result.rollout_id))

    def _take_notice(self, notice: Notice) -> None:
        self._notices.append(notice)
        if self._on_notice is not None:
            self._on_notice(notice)
