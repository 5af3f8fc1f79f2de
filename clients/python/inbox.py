"""Results on their way to the caller: the shared buffer behind `results()`, and collectors behind `generate_group()`.

Invariants: a result leaves the buffer only into the hands of a caller (taking one is atomic: a cancelled wait loses nothing);
after a failure the buffered results can still be taken, then every take raises it. What this does not know: acknowledgement.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from rolloutd.client.errors import Problem, error_of_problem
from rolloutd.client.results import RolloutResult


class Incoming(Protocol):
    """Where a stream leaves what no submission of this client waits for."""

    @property
    def full(self) -> bool:
        """Whether the stream should not be read on."""

    def put(self, result: RolloutResult) -> None:
        """A result that no entry of the stream is owed."""

    def fail(self, error: Exception) -> None:
        """The stream ended for good."""


class Inbox:
    """Buffer of results for whoever iterates `results()` or `drain()`. Also the sink of plain submissions."""

    def __init__(self, capacity: int, on_taken: Callable[[], None]) -> None:
        self._capacity = capacity
        self._on_taken = on_taken
        self._results: deque[RolloutResult] = deque()
        self._ready = asyncio.Event()
        self._failure: Exception | None = None
        self._owed = 0

    @property
    def full(self) -> bool:
        """Whether it holds as much as it should. It takes more when somebody waits for other events of the stream."""
        return len(self._results) >= self._capacity

    def expect(self, rollouts: int) -> None:
        """So many rollouts will end here."""
        self._owed += rollouts

    def put(self, result: RolloutResult) -> None:
        """A result that nobody here submitted: of an earlier incarnation, or taken over."""
        self._results.append(result)
        self._ready.set()

    def deliver(self, result: RolloutResult) -> None:
        """A result that was expected."""
        self._owed -= 1
        self.put(result)

    def refuse(self, problem: Problem, remaining: Iterable[RolloutResult]) -> None:
        """Refused rollouts are results too, so that the caller's count comes out right."""
        for result in remaining:
            self.deliver(result)

    def fail(self, error: Exception) -> None:
        """No further result will come."""
        self._failure = error
        self._ready.set()

    async def take(self, *, until_idle: bool) -> RolloutResult | None:
        """The next result, as soon as there is one. With `until_idle`, None once nothing is expected any more."""
        while not self._results:
            if until_idle and self._owed == 0:
                return None
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._ready.clear()
            await self._ready.wait()
        result = self._results.popleft()
        if not self._results and self._owed == 0:
            self._ready.set()  # another drain may wait for a result that is not coming
        self._on_taken()
        return result


class Collector:
    """The results of one submission, in sample order, for the one caller that waits for them."""

    def __init__(self) -> None:
        self._missing = 0
        self._results: list[RolloutResult] = []
        self._done: asyncio.Future[list[RolloutResult]] = asyncio.get_running_loop().create_future()

    @property
    def arrived(self) -> tuple[RolloutResult, ...]:
        """What has come so far."""
        return tuple(self._results)

    def expect(self, rollouts: int) -> None:
        """So many results make it complete."""
        self._missing = rollouts

    def deliver(self, result: RolloutResult) -> None:
        """One of the results."""
        self._results.append(result)
        self._missing -= 1
        if self._missing == 0 and not self._done.done():
            self._done.set_result(sorted(self._results, key=lambda result: result.sample_index))

    def refuse(self, problem: Problem, remaining: Iterable[RolloutResult]) -> None:
        """Nothing ran: the caller gets an exception, unless the caller itself cancelled."""
        if problem.code != "CANCELLED":
            self.fail(error_of_problem(problem))
            return
        for result in remaining:
            self.deliver(result)

    def fail(self, error: Exception) -> None:
        """No further result will come."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> list[RolloutResult]:
        """All results. Refused, ServerUnavailable, Fenced or ClientClosed when they cannot come."""
        return await self._done


class Discard:
    """For results whose caller has gone away: `on_result` acknowledges them, so that the server forgets them."""

    def __init__(self, on_result: Callable[[RolloutResult], None]) -> None:
        self._on_result = on_result

    def expect(self, rollouts: int) -> None:
        """Nobody waits."""

    def deliver(self, result: RolloutResult) -> None:
        """Nobody wants it."""
        self._on_result(result)

    def refuse(self, problem: Problem, remaining: Iterable[RolloutResult]) -> None:
        """Nothing to do: there is nothing at the server."""

    def fail(self, error: Exception) -> None:
        """Nobody to tell."""
