"""What a caller holds on to: a submission, an iteration over results.

Both are views: dropping one changes nothing. What this does not know: how results get here.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, Self

from rolloutd.client.ledger import Entry
from rolloutd.client.results import Acceptance, RolloutResult


class Answering(Protocol):
    """Who knows the server's answer to an entry."""

    async def acceptance(self, entry: Entry) -> Acceptance:
        """Refused when the answer is no."""


class Submission:
    """A prompt that was submitted."""

    def __init__(self, stream: Answering, entry: Entry) -> None:
        self._stream = stream
        self._entry = entry

    @property
    def rollout_id(self) -> str:
        """Id of the submission; with several samples it names all of them."""
        return self._entry.rollout_id

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Ids of its rollouts, by sample index."""
        return self._entry.rollout_ids

    async def accepted(self) -> Acceptance:
        """The server's answer; Refused when that is no. Waiting for it is never needed."""
        return await self._stream.acceptance(self._entry)


class Results:
    """Async iterator of results. Leaving a loop early loses nothing: the next loop goes on."""

    def __init__(self, take: Callable[[], Awaitable[RolloutResult | None]]) -> None:
        self._take = take

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RolloutResult:
        result = await self._take()
        if result is None:
            raise StopAsyncIteration
        return result
