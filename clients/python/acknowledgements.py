"""Which results the caller has dealt with, and what of that the server must still be told.

Durable events carry rising cursors. An event is *open* from its arrival until the caller has dealt with it. The *watermark*
is the newest cursor up to which nothing is open; one number acknowledges everything up to it. Results dealt with out of order
are acknowledged by id, and so are verdicts.

Invariants: the watermark never passes an open event; an acknowledgement that may have been lost with a broken stream is sent
again on the next one (unknown ids have no effect at the server), a verdict before anything makes the server forget what it is
about. Memory is bounded by the results the server keeps for us plus RESENT_VERDICTS. What this does not know: streams, time.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from rolloutd import v1

RESENT_VERDICTS = 4096  # newest verdicts sent again after a reconnect; older ones have long been applied


class _Told(NamedTuple):
    message: v1.Acknowledgement
    cursor: int  # 0: not known

    @property
    def has_verdict(self) -> bool:
        return bool(self.message.verdict) or self.message.HasField("reward")


class Acknowledgements:
    """Open events, the watermark, and what is to be sent."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()  # cursors above the watermark, rising
        self._open: dict[str, int] = {}  # rollout id to cursor
        self._dealt: dict[int, str] = {}  # cursor above the watermark to rollout id, "" for no result
        self._to_send: dict[str, _Told] = {}
        self._verdicts: deque[_Told] = deque(maxlen=RESENT_VERDICTS)  # sent on this stream
        self._watermark = 0
        self._sent_watermark = 0

    @property
    def resume_cursor(self) -> int:
        """Where a new stream resumes: the server may forget, without verdict, everything up to it."""
        verdicts = [
            told.cursor for told in (*self._verdicts, *self._to_send.values()) if told.has_verdict and told.cursor
        ]
        return min(self._watermark, min(verdicts, default=self._watermark + 1) - 1)

    @property
    def pending(self) -> bool:
        """Whether there is anything to tell the server."""
        return bool(self._to_send) or self._watermark > self._sent_watermark

    def arrived(self, cursor: int, rollout_id: str) -> None:
        """A result arrived and is open. Cursors must rise. The same result under a new cursor replaces the old event."""
        superseded = self._open.get(rollout_id)
        self._arrived.append(cursor)
        self._open[rollout_id] = cursor
        if superseded is not None:
            self._dealt[superseded] = ""
            self._advance()

    def is_open(self, rollout_id: str) -> bool:
        """Whether a result arrived and the caller has not dealt with it."""
        return rollout_id in self._open

    def passed(self, cursor: int) -> None:
        """A durable event that nobody has to deal with arrived (the end of a group)."""
        self._arrived.append(cursor)
        self._dealt[cursor] = ""
        self._advance()

    def acknowledge(self, message: v1.Acknowledgement) -> None:
        """The caller has dealt with a result. With a verdict it is told by id; without, the watermark may do."""
        rollout_id = message.rollout_id
        told = _Told(message, self._open.pop(rollout_id, 0))
        if told.cursor:
            self._dealt[told.cursor] = rollout_id
            self._advance()
        if told.has_verdict or not told.cursor or told.cursor > self._watermark:
            self._to_send[rollout_id] = told

    def take(self, limit: int) -> tuple[list[v1.Acknowledgement], int]:
        """At most `limit` acknowledgements to send now and the cursor to acknowledge through (0: no news)."""
        batch = list(islice(self._to_send.values(), max(0, limit)))
        for told in batch:
            del self._to_send[told.message.rollout_id]
            if told.has_verdict:
                self._verdicts.append(told)
        messages = [told.message for told in batch]
        if self._to_send or self._watermark == self._sent_watermark:
            return messages, 0  # a watermark ahead of its verdicts would make the server forget what they are about
        self._sent_watermark = self._watermark
        return messages, self._watermark

    def reattached(self, newest_cursor: int) -> None:
        """A new stream is open; `newest_cursor` is what the server says it has sent us at most.

        Queues again what the old stream may have lost. A cursor below ours means the server lost events: their cursors
        will name others, and what we still have of them is acknowledged by id.
        """
        again = {told.message.rollout_id: told for told in self._verdicts}
        for cursor, rollout_id in self._dealt.items():
            if rollout_id:
                again.setdefault(rollout_id, _Told(v1.Acknowledgement(rollout_id=rollout_id), cursor))
        self._verdicts.clear()
        self._to_send = {
            rollout_id: told if told.cursor <= newest_cursor else told._replace(cursor=0)
            for rollout_id, told in (again | self._to_send).items()
        }
        self._sent_watermark = 0
        self._watermark = min(self._watermark, newest_cursor)
        while self._arrived and self._arrived[-1] > newest_cursor:
            self._dealt.pop(self._arrived.pop(), None)
        self._open = {rollout_id: cursor for rollout_id, cursor in self._open.items() if cursor <= newest_cursor}

    def _advance(self) -> None:
        while self._arrived and self._arrived[0] in self._dealt:
            self._watermark = self._arrived.popleft()
            del self._dealt[self._watermark]
