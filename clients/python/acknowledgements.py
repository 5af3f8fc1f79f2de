"""Which results the caller has dealt with, and what of that the server must still be told.

Durable events carry rising cursors. An event is *open* from its arrival until the caller has dealt with it. The *watermark*
is the newest cursor below which nothing is open; one number acknowledges everything up to it. Results dealt with out of order
are acknowledged by id, and so are verdicts.

Invariants: the watermark never passes an open event; an acknowledgement that may have been lost with a broken stream is sent
again on the next one (unknown ids have no effect at the server). Memory is bounded by the results the server keeps for us
plus RESENT_VERDICTS. What this does not know: streams, time, results' contents.
"""

from collections import deque
from itertools import islice

from rolloutd import v1

RESENT_VERDICTS = 4096  # newest verdicts sent again after a reconnect; older ones have long been applied


class Acknowledgements:
    """Open events, the watermark, and what is to be sent."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()  # cursors above the watermark, rising
        self._open: dict[str, int] = {}  # rollout id to cursor
        self._dealt: dict[int, str] = {}  # cursor above the watermark to rollout id, "" for no result
        self._to_send: dict[str, v1.Acknowledgement] = {}
        self._verdicts: deque[v1.Acknowledgement] = deque(maxlen=RESENT_VERDICTS)
        self._watermark = 0
        self._sent_watermark = 0

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

    def acknowledge(self, acknowledgement: v1.Acknowledgement) -> None:
        """The caller has dealt with a result. With a verdict it is sent by id; without, the watermark may do."""
        rollout_id = acknowledgement.rollout_id
        cursor = self._open.pop(rollout_id, None)
        has_verdict = _has_verdict(acknowledgement)
        if has_verdict or cursor is None:
            self._to_send[rollout_id] = acknowledgement
        if cursor is not None:
            self._dealt[cursor] = rollout_id
            self._advance()
            if cursor > self._watermark and not has_verdict:
                self._to_send[rollout_id] = acknowledgement

    def take(self, limit: int) -> tuple[list[v1.Acknowledgement], int]:
        """At most `limit` acknowledgements to send now and the cursor to acknowledge through (0: no news)."""
        batch = list(islice(self._to_send.values(), max(0, limit)))
        for acknowledgement in batch:
            del self._to_send[acknowledgement.rollout_id]
            if _has_verdict(acknowledgement):
                self._verdicts.append(acknowledgement)
        if self._to_send or self._watermark == self._sent_watermark:
            return batch, 0  # a watermark ahead of its verdicts would make the server forget what they are about
        self._sent_watermark = self._watermark
        return batch, self._watermark

    def reattached(self, newest_cursor: int) -> None:
        """A new stream is open; `newest_cursor` is what the server says it has sent us at most.

        Queues again what the old stream may have lost. A cursor below ours means the server lost events: their
        cursors will name others, and what we still have of them is acknowledged by id.
        """
        again = {acknowledgement.rollout_id: acknowledgement for acknowledgement in self._verdicts}
        again.update((rollout_id, v1.Acknowledgement(rollout_id=rollout_id)) for rollout_id in self._unsettled(again))
        self._verdicts.clear()
        self._to_send = again | self._to_send
        self._sent_watermark = 0
        self._watermark = min(self._watermark, newest_cursor)
        while self._arrived and self._arrived[-1] > newest_cursor:
            self._dealt.pop(self._arrived.pop(), None)
        self._open = {rollout_id: cursor for rollout_id, cursor in self._open.items() if cursor <= newest_cursor}

    def _unsettled(self, known: dict[str, v1.Acknowledgement]) -> list[str]:
        return [rollout_id for rollout_id in self._dealt.values() if rollout_id and rollout_id not in known]

    def _advance(self) -> None:
        while self._arrived and self._arrived[0] in self._dealt:
            self._watermark = self._arrived.popleft()
            del self._dealt[self._watermark]


def _has_verdict(acknowledgement: v1.Acknowledgement) -> bool:
    return bool(acknowledgement.verdict) or acknowledgement.HasField("reward")
