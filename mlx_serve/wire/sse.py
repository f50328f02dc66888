"""Server-sent events as bytes. One line of data per event; knows nothing of what is in it."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(data: str) -> bytes:
    # A line break would end the field and begin another one: such data is the caller's fault, not the client's.
    if "\n" in data or "\r" in data:
        raise ValueError("the data of an event is one line")
    return f"data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps the connection open."""
    if "\n" in text or "\r" in text:
        raise ValueError("a comment is one line")
    return f": {text}\n\n".encode()
