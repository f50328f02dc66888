"""Requests to a server with OpenAI's API, over one connection. Knows no load and no statistics.

    get(path) -> a JSON object
    events(path, body) -> connect, send, head          Failure "connection", "HTTP 429", "not a stream", "timeout"
      each piece of the body                           its time, before anything looks into it
        -> EventReader                                 Failure "malformed stream"
      [DONE], end of the body                          Failure "cut off"

http.client in the caller's thread: to wait in recv costs nothing, and there is nothing to install.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock
from typing import Any

from mlx_serve.client.answer import Answer, Reading, error_message, parse_object
from mlx_serve.client.errors import Failure, faults
from mlx_serve.client.events import EventReader
from mlx_serve.client.place import Place

_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 1 << 24


class Connections:
    """The sockets in use, so that another thread can end all of them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sockets: set[socket.socket] = set()
        self.ended = False

    def add(self, sock: socket.socket) -> None:
        """From now on it can be ended."""
        with self._lock:
            self._sockets.add(sock)
            if self.ended:
                _shut(sock)

    def drop(self, sock: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._sockets.discard(sock)

    def end_all(self) -> None:
        """Every read and write fails from now on, at once."""
        with self._lock:
            self.ended = True
            for sock in self._sockets:
                _shut(sock)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # its owner was faster
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which pulls the TLS state from under a reader


class Client:
    """One connection, opened when needed and kept for the next request where the server allows it. For one thread."""

    def __init__(self, where: Place, connections: Connections | None = None) -> None:
        self.where = where
        self._connections = connections or Connections()
        self._connection: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one; a request that runs is cancelled by that."""
        if self._connection is not None:
            self._connection.close()
        if self._sock is not None:
            self._connections.drop(self._sock)
        self._connection = self._sock = None

    def get(self, path: str, ok: tuple[int, ...] = (200,)) -> dict[str, Any]:
        """The JSON object at a path below the base URL. Raises Failure."""
        with faults(self.where):
            response = self._send("GET", path, None, ok)
            return parse_object(response.read(_MAX_OBJECT_BYTES))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that answers a POST. Raises Failure."""
        with faults(self.where):
            response = self._send("POST", path, json.dumps(body).encode())
            return parse_object(response.read(_MAX_OBJECT_BYTES))

    def events(
        self, path: str, body: bytes, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[tuple[bytes, float]]:
        """The data of each event of a streamed POST, and when it came, to the end of the body. Raises Failure.

        A stream that has ended leaves the connection open for the next request.
        """
        done = False
        with faults(self.where):
            response = self._send("POST", path, body)
            kind = response.headers.get_content_type()
            if kind != "text/event-stream" and "Content-Type" in response.headers:
                raise Failure("not a stream", f"the reply to a request with stream: true is {kind}")
            events = EventReader()
            # To the very end of the body, as the connection can be used again only then.
            while piece := response.read1(_READ_BYTES):
                now = clock()
                for data in events.feed(piece):
                    done = data == b"[DONE]"
                    yield data, now
            response.read()  # nothing is left, but by read1 alone a body with a Content-Length does not end
        if not done:
            raise Failure("cut off", f"{self.where} ended the stream before its [DONE]")

    def ask(
        self,
        path: str,
        body: bytes,
        clock: Callable[[], float] = time.perf_counter,
        heard: Callable[[float], None] = lambda now: None,
    ) -> Answer:
        """Send a request and read its stream to the end; ``heard`` is told when each text came. Raises Failure."""
        reading = Reading(clock(), heard)
        try:
            for data, now in self.events(path, body, clock):
                reading.take(data, now)
            return reading.answer()
        except BaseException:
            self.close()
            raise

    def first_model(self) -> str:
        """The id of the first model that the server lists. Raises Failure."""
        for model in objects(self.get("/models").get("data")):
            if name := string(model.get("id")):
                return name
        raise Failure("no model", f"{self.where} lists no models; --model names one")

    def _send(
        self, method: str, path: str, body: bytes | None, ok: tuple[int, ...] = (200,)
    ) -> http.client.HTTPResponse:
        connection = self._open()
        connection.request(method, self.where.path + path, body, self.where.headers())
        response = connection.getresponse()
        if response.status not in ok:
            raise _refused(self.where, response)
        return response

    def _open(self) -> http.client.HTTPConnection:
        # After a reply that closes, http.client has let its socket go.
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        self.close()
        self._connection = self.where.connection()
        self._connection.connect()
        self._sock = self._connection.sock
        self._connections.add(self._sock)
        return self._connection


def _refused(where: Place, response: http.client.HTTPResponse) -> Failure:
    raw = response.read(_MAX_ERROR_BYTES)
    try:
        message = error_message(parse_object(raw))
    except Failure:
        message = raw[:500].decode("utf-8", "replace").strip()
    status = response.status
    return Failure(f"HTTP {status}", one_line(f"{where} answered {status}: {message or response.reason}"), status)


def one_line(text: str) -> str:
    """What a server wrote, as one line without characters that a terminal obeys."""
    return " ".join("".join(c if c.isprintable() else " " if c.isspace() else "" for c in text).split())


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of what should be a list of them: any server may answer, and anything."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str:
    """What should be a string; "" when it is none."""
    return value if isinstance(value, str) else ""
