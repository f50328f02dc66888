"""The log line of a request, as text or JSON. Never bodies, keys or queries; nothing in it can end the line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_serve.values import ACCESS_LOG

access_log = logging.getLogger(ACCESS_LOG)

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without blank, quote, equals sign and backslash
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class RequestLog:
    """``method`` and ``path`` are "-" if the bytes were not a request. ``route`` is for metrics and not written."""

    method: str
    path: str
    status: int
    bytes_in: int
    bytes_out: int
    ms: float
    id: str
    client: str
    notes: Mapping[str, str | int]
    route: str = "other"

    def fields(self) -> dict[str, str | int | float]:
        own: dict[str, str | int | float] = {
            "method": self.method[:_MAX_TEXT],
            "path": self.path[:_MAX_TEXT],
            "status": self.status,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "ms": round(self.ms, 1),
            "id": self.id,
            "client": self.client,
        }
        return own | {name: value for name, value in self.notes.items() if name not in own}


def log_request(entry: RequestLog, form: Literal["text", "json"], level: int = logging.INFO) -> None:
    if access_log.isEnabledFor(level):
        access_log.log(level, "%s", as_json(entry) if form == "json" else as_text(entry))


def as_text(entry: RequestLog) -> str:
    return " ".join(f"{_escaped(name)}={_escaped(str(value))}" for name, value in entry.fields().items())


def as_json(entry: RequestLog) -> str:
    return _json(entry.fields())


def _escaped(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _json(text)


def _json(value: object) -> str:
    """ASCII only; json.dumps leaves DEL as it is, which terminals act on."""
    return json.dumps(value).replace("\x7f", "\\u007f")
