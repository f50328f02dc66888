"""Asking a running server, for the sub-commands: standard library only. Knows OpenAI's API from the client's side."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from mlx_serve.commands.terminal import printable

DEFAULT_URL = "http://127.0.0.1:8080/v1"
# Between two reads. A stream of ours is never silent for longer than about 10 s.
_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 24


class CallError(Exception):
    """The server did not answer as hoped; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is. ``path`` is what stands before /chat/completions: /v1, or nothing."""

    scheme: str
    host: str
    port: int | None
    path: str
    key: str | None

    def connection(self) -> http.client.HTTPConnection:
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=_TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)

    def headers(self) -> dict[str, str]:
        plain = {"Content-Type": "application/json"}
        return plain | {"Authorization": f"Bearer {self.key}"} if self.key else plain

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{host}{port}{self.path}"


def add_options(parser: argparse.ArgumentParser, *, has_default: bool = True) -> None:
    """--url and --api-key, the same in each command."""
    default = (os.environ.get("MLX_SERVE_URL") or DEFAULT_URL) if has_default else None
    note = f" (default: $MLX_SERVE_URL or {DEFAULT_URL})" if has_default else ""
    parser.add_argument("--url", default=default, help=f"base URL of the server, with or without /v1{note}")
    text = "key to send; better in $MLX_SERVE_API_KEY or $OPENAI_API_KEY, where other users do not see it"
    parser.add_argument("--api-key", default=None, metavar="KEY", help=text)


def place(url: str, key: str | None) -> Place:
    """Parse a base URL. Raises CallError."""
    key = key or os.environ.get("MLX_SERVE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise CallError("the API key is not printable ASCII")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        path = quote(parts.path.rstrip("/"), safe="/%") or "/v1"
    except ValueError as error:
        raise CallError(f"not a URL: {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise CallError(f"not a URL of a server: {url!r} (write {DEFAULT_URL})")
    return Place(parts.scheme, host, port, path, key)


def get(where: Place, path: str) -> dict[str, Any]:
    """The JSON of a GET below the base. Raises CallError, also for what is no JSON object."""
    with _asked(where, "GET", where.path + path, None) as response:
        return _object(where, response)


def health(where: Place) -> dict[str, Any]:
    """What /health says, whatever its status. Raises CallError when nothing that looks like mlx-serve answers."""
    with _asked(where, "GET", where.path + "/health", None, ok=(200, 503)) as response:
        return _object(where, response)


@contextmanager
def events(where: Place, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a streamed POST; leaving the block hangs up, which cancels it. Raises CallError."""
    with _asked(where, "POST", where.path + path, body) as response:
        yield _data_lines(where, response)


def _data_lines(where: Place, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := _line(where, response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise CallError(f"{where} sent an event that is no JSON") from None
        if isinstance(event, dict) and "error" in event:
            raise CallError(_message(event) or "the server failed")
        if isinstance(event, dict):
            yield event
    raise CallError(f"{where} ended the stream before its end")


def _line(where: Place, response: http.client.HTTPResponse) -> bytes:
    try:
        line = response.readline(_MAX_LINE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise CallError(f"{where} hung up: {error}") from None
    if len(line) == _MAX_LINE_BYTES:
        raise CallError(f"{where} sent a line that is too long")
    return line


@contextmanager
def _asked(
    where: Place, method: str, path: str, body: dict[str, Any] | None, ok: tuple[int, ...] = (200,)
) -> Iterator[http.client.HTTPResponse]:
    connection = where.connection()
    try:
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, where.headers())
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CallError(f"no answer from {where}: {reason}. Is the server running?") from None
        if response.status not in ok:
            raise CallError(_refusal(where, response))
        yield response
    finally:
        connection.close()


def _object(where: Place, response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        answer = json.loads(response.read(_MAX_LINE_BYTES))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        raise CallError(f"{where} did not answer with JSON") from None
    if not isinstance(answer, dict):
        raise CallError(f"{where} did not answer with a JSON object")
    return answer


def _refusal(where: Place, response: http.client.HTTPResponse) -> str:
    try:
        answer = json.loads(response.read(_MAX_ERROR_BYTES))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        answer = None
    text = _message(answer) or printable(response.reason)
    return f"{where} answered {response.status}: {text}"


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = string(error.get("message") if isinstance(error, dict) else error)
    return " ".join(printable(message).split())


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of what should be a list of them: any server may answer, and anything."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str:
    """What should be a string; "" when it is none."""
    return value if isinstance(value, str) else ""
