"""A server's address: a base URL and a key, from the user's input. Opens no connection."""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

DEFAULT_URL = "http://127.0.0.1:8080/v1"
# Between two reads. This project's server never leaves a stream silent for longer than about 10 s.
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is. ``path`` is what stands before /chat/completions: /v1, or nothing.

    ``timeout_s``: the longest silence between two reads.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    key: str | None
    timeout_s: float

    def connection(self) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)

    def headers(self) -> dict[str, str]:
        """Header fields of every request."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, application/json", **key}

    def __str__(self) -> str:
        """The base URL, without the key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def place(url: str, key: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Place:
    """Parse a base URL; one without a path gets ``/v1``, one without a scheme http. Raises ValueError."""
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError("the API key is not printable ASCII")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"not a URL of a server: {url!r} is not like {DEFAULT_URL}")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"not a base URL: {url!r} has more than a host, a port and a path")
    return Place(parts.scheme, host, port, quote(parts.path.rstrip("/"), safe="/%") or "/v1", key or None, timeout_s)


def add_options(parser: argparse.ArgumentParser, *, has_default: bool = True) -> None:
    """--url and --api-key, the same in each command that asks a running server."""
    default = (os.environ.get("MLX_SERVE_URL") or DEFAULT_URL) if has_default else None
    note = f" (default: $MLX_SERVE_URL or {DEFAULT_URL})" if has_default else ""
    parser.add_argument("--url", default=default, help=f"base URL of the server, with or without /v1{note}")
    text = "key to send; better in $MLX_SERVE_API_KEY or $OPENAI_API_KEY, where other users do not see it"
    parser.add_argument("--api-key", default=None, metavar="KEY", help=text)


def given_place(given: argparse.Namespace) -> Place:
    """The place that ``add_options``' flags name, and the environment's key where none is given. Raises ValueError."""
    return place(given.url, given.api_key or os.environ.get("MLX_SERVE_API_KEY") or os.environ.get("OPENAI_API_KEY"))
