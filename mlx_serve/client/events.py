"""A strict parser of server-sent events by the HTML standard, with a size limit. Reads no socket.

Only the data of events matters here: ``event``, ``id`` and ``retry`` are skipped, as comments are.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

# A chunk of a stream is some hundred bytes; log-probabilities make it longer.
MAX_EVENT_BYTES = 4 << 20


class EventError(ValueError):
    """The bytes are not a stream of events."""


class EventReader:
    """Feed it the pieces of a body as they come; it gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._n_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises EventError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._take(line.removesuffix(b"\r"), events)
        if self._n_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise EventError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._n_bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._n_bytes += len(value)
        elif name not in (b"", b"event", b"id", b"retry"):
            raise EventError(f"not a line of an event stream: {line[:80]!r}")
