"""What the server process tells its parent: lines of JSON, each an object with a ``kind``.

    serving                              it accepts connections
    ready                                the first model is loaded
    beat    overdue_s, work              every second; for how long the MLX thread has been at work that is overdue
    memory  (figures)                    every few seconds
    begin   id, (sizes), fingerprint     a request was queued
    end     id                           it ended
    log     line                         a line of the log
    again                                messages were lost; what holds now follows, and other requests have ended

Kinds that a parent does not know are ignored: after an upgrade in place, the two may be of different versions.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

# The longest message. What is longer, a log line, is cut.
MAX_BYTES = 16 * 1024
_MAX_TEXT_CHARS = 2000


def encode(kind: str, **fields: Any) -> bytes:
    """One message with its line end. Texts in it are cut to a length that always fits."""
    short = {name: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value for name, value in fields.items()}
    return json.dumps({"kind": kind, **short}).encode() + b"\n"


class LineBuffer:
    """Cuts what was read from the socket into lines. Holds no more than one message."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        *lines, rest = (self._rest + raw).split(b"\n")
        self._rest = rest[-MAX_BYTES:]
        return lines


def decode(line: bytes) -> Message:
    """A message; ``{"kind": ""}`` for what is none, such as the rest of a line that was cut by a death."""
    try:
        message = json.loads(line)
    except ValueError:
        return {"kind": ""}
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else {"kind": ""}
