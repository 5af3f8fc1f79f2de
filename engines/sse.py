"""Cut a byte stream into server-sent events and hand out their data.

Invariants
- Pieces may end anywhere: inside a UTF-8 character, a line, or between CR and LF. Nothing is decoded here, so nothing
  breaks.
- An event is handed out when its empty line has arrived; what is left in the buffer at the end is an unfinished event.
- An event never grows beyond `MAX_EVENT_BYTES`.

What this module does not know: JSON, engines, `[DONE]`. Lines that end in a lone CR are not recognised (no engine sends
them).
"""

from __future__ import annotations

# One answer with base64 routed experts of a long sequence is tens of megabytes; far more than that is a broken peer.
MAX_EVENT_BYTES = 256 << 20


class EventTooLarge(ValueError):
    """An event passed `MAX_EVENT_BYTES` without ending."""


class EventReader:
    """Feed bytes, get the data of each finished event."""

    __slots__ = ("_buffer", "_data", "_scanned")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []  # data lines of the event being read
        self._scanned = 0  # bytes of the buffer known to hold no line end

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._buffer) or bool(self._data)

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that this piece completes, in order; data lines of one event are joined by a newline."""
        buffer = self._buffer
        if not buffer and not self._data and (whole := whole_events(piece)) is not None:
            return whole
        events: list[bytes] = []
        buffer += piece
        begin = 0
        while (end := buffer.find(b"\n", max(begin, self._scanned))) >= 0:
            line = bytes(buffer[begin : end - 1 if end > begin and buffer[end - 1] == 0x0D else end])
            begin = end + 1
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        del buffer[:begin]
        self._scanned = len(buffer)
        if len(buffer) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of the stream is larger than {MAX_EVENT_BYTES} bytes")
        return events


def whole_events(piece: bytes) -> list[bytes] | None:
    """The events of a piece that holds nothing but whole ones of one `data: ` line each, as engines write them; else
    None."""
    if not piece.endswith(b"\n\n"):
        return None
    events: list[bytes] = []
    begin = 0
    while begin < len(piece):
        end = piece.find(b"\n", begin)
        if not piece.startswith(b"data: ", begin) or piece[end - 1] == 0x0D or piece[end + 1 : end + 2] != b"\n":
            return None
        events.append(piece[begin + 6 : end])
        begin = end + 2
    return events
