"""What is to be sent, cut into messages.

Invariants: one message holds at most what the server's limits and ours allow, except that a single submission may exceed
ours; within a message and between messages a submission goes before its cancellation. Nothing is dropped: what a
broken stream may have lost is put back by `reattached`. What this does not know: the stream.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from rolloutd import v1
from rolloutd.client.acknowledgements import Acknowledgements
from rolloutd.client.errors import Problem
from rolloutd.client.ledger import Entry

MAX_ITEMS_PER_MESSAGE = 512  # past some hundred items a message gains nothing and delays what is behind it
MAX_MESSAGE_BYTES = 1024 * 1024  # several messages fit an HTTP/2 window, so that the peer works while we send
FRAME_BYTES = 16  # tag and length of one item, generously


class Outbox:
    """Submissions, cancellations and acknowledgements on their way out."""

    def __init__(self) -> None:
        self.acknowledgements = Acknowledgements()
        self._entries: deque[Entry] = deque()
        self._cancelled: deque[Entry] = deque()
        self._something = asyncio.Event()
        self._max_items = MAX_ITEMS_PER_MESSAGE
        self._server_max_bytes = 0
        self._closed = False

    @property
    def empty(self) -> bool:
        """Whether nothing is to be sent."""
        return not (self._entries or self._cancelled or self.acknowledgements.pending)

    @property
    def full_message(self) -> bool:
        """Whether waiting for more would not make the next message any bigger."""
        return len(self._entries) >= self._max_items

    async def wait(self) -> bool:
        """True once there is something to send; False once closed and everything was sent."""
        while self.empty:
            if self._closed:
                return False
            self._something.clear()
            await self._something.wait()
        return True

    def close(self) -> None:
        """Nothing will be added."""
        self._closed = True
        self._something.set()

    def submit(self, entry: Entry) -> None:
        """Send it."""
        self._entries.append(entry)
        self._something.set()

    def cancel(self, entry: Entry) -> None:
        """Send the cancellation of all its rollouts, after its submission."""
        entry.cancelled = True
        self._cancelled.append(entry)
        self._something.set()

    def acknowledge(self, acknowledgement: v1.Acknowledgement) -> None:
        """The caller has dealt with a result."""
        self.acknowledgements.acknowledge(acknowledgement)
        self._something.set()

    def passed(self, cursor: int) -> None:
        """A durable event that needs nobody arrived."""
        self.acknowledgements.passed(cursor)
        self._something.set()

    def reattached(self, attached: v1.Attached) -> None:
        """A new stream is open: send acknowledgements again that the old one may have lost. Submissions follow by `resubmit`."""
        limits = attached.server.limits
        self._max_items = min(MAX_ITEMS_PER_MESSAGE, limits.max_items_per_message or MAX_ITEMS_PER_MESSAGE)
        self._server_max_bytes = limits.max_message_bytes
        self.acknowledgements.reattached(attached.cursor)
        self._entries.clear()
        self._cancelled.clear()
        self._something.set()

    def resubmit(self, entries: Sequence[Entry]) -> None:
        """Send all of these, before what was submitted since, and the cancellations of those that were cancelled."""
        self._entries.extendleft(reversed(entries))
        self._cancelled.extend(entry for entry in entries if entry.cancelled)
        self._something.set()

    def _oversized(self, entry: Entry) -> Problem | None:
        """Why the server could not read this submission at all, if so."""
        limit = self._server_max_bytes
        if not limit or entry.size_bytes + FRAME_BYTES <= limit:
            return None
        message = f"a submission of {entry.size_bytes} bytes does not fit the server's max_message_bytes of {limit}"
        return Problem(
            "INVALID_ARGUMENT", "INVALID_ARGUMENT", message, (("prompt", "shorten it, or raise the server's limit"),)
        )

    def next_message(self) -> tuple[v1.SubmitRolloutRequest, list[tuple[Entry, Problem]]]:
        """The next message, and entries that cannot be sent with the reason. The message may turn out empty."""
        message = v1.SubmitRolloutRequest()
        unsendable: list[tuple[Entry, Problem]] = []
        max_bytes = min(MAX_MESSAGE_BYTES, self._server_max_bytes or MAX_MESSAGE_BYTES)
        size_bytes = 0
        while self._entries and len(message.submissions) < self._max_items:
            entry = self._entries[0]
            if message.submissions and size_bytes + entry.size_bytes + FRAME_BYTES > max_bytes:
                return message, unsendable
            self._entries.popleft()
            if entry.state != "waiting":
                continue
            if problem := self._oversized(entry):
                unsendable.append((entry, problem))
                continue
            entry.state = "sent"
            message.submissions.append(entry.message)
            size_bytes += entry.size_bytes + FRAME_BYTES
        room = self._max_items - len(message.submissions)
        while self._cancelled and room > 0 and not self._entries:
            entry = self._cancelled.popleft()
            if entry.state != "ended":
                message.cancel_rollout_ids.append(entry.rollout_id)
                room -= 1
        acknowledgements, through = self.acknowledgements.take(room)
        message.acknowledgements.extend(acknowledgements)
        message.acknowledge_through_cursor = through
        return message, unsendable
