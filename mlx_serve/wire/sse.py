"""Server-sent events as bytes, with one line of data per event. Knows nothing of the data."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(data: str, name: str = "") -> bytes:
    """``name`` is for clients that distinguish events by it; without a name, the event has no such line."""
    # A line break would end the field and begin another one. The caller must prevent it, so this is not a client error.
    if _breaks(data) or _breaks(name):
        raise ValueError("the data of an event is one line, and so is its name")
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps the connection open."""
    if _breaks(text):
        raise ValueError("a comment is one line")
    return f": {text}\n\n".encode()


def _breaks(text: str) -> bool:
    return "\n" in text or "\r" in text
