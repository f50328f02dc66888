"""One request to a server with OpenAI's API, and when each piece of its answer came. Knows no load and no statistics.

    ask(body) -> connect, send, head          Failure "connection", "HTTP 429", "not a stream", "timeout"
      each piece of the body                  its time, before anything looks into it
        -> EventReader -> JSON -> Reading     Failure "malformed stream", "error in the stream"
      [DONE], end of the body                 Failure "cut off"
    -> Answer                                 Failure "no usage": tokens are the server's to count

http.client in the caller's thread: to wait in recv costs nothing, and there is nothing to install.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from urllib.parse import urlsplit

from mlx_serve.client.answer import Answer, Failure, Reading, error_message, parse_object
from mlx_serve.client.events import EventError, EventReader

_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 16
_MAX_LIST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is. ``url`` is the base to which ``/chat/completions`` is added."""

    scheme: str
    host: str
    port: int | None
    path: str
    api_key: str | None
    timeout_s: float

    @property
    def url(self) -> str:
        """As it was given, without the key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)

    def headers(self) -> dict[str, str]:
        """Of every request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, application/json", **key}


def server_at(url: str, api_key: str | None, timeout_s: float) -> Server:
    """The server of a base URL; one without a path gets ``/v1``. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r} has more than a host, a port and a path")
    return Server(parts.scheme, parts.hostname, parts.port, parts.path.rstrip("/") or "/v1", api_key, timeout_s)


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

    def __init__(self, server: Server, path: str, connections: Connections) -> None:
        self._server = server
        self._path = server.path + path
        self._connections = connections
        self._headers = server.headers()
        self._connection: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None

    def ask(
        self,
        body: bytes,
        clock: Callable[[], float] = time.perf_counter,
        heard: Callable[[float], None] = lambda now: None,
    ) -> Answer:
        """Send a request and read its stream to the end; ``heard`` is told when each text came. Raises Failure."""
        start = clock()
        try:
            with _faults():
                reading = Reading(start, heard)
                self._read(self._send(body), reading, clock)
                return reading.answer()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        if self._sock is not None:
            self._connections.drop(self._sock)
        self._connection = self._sock = None

    def _send(self, body: bytes) -> http.client.HTTPResponse:
        connection = self._open()
        connection.request("POST", self._path, body, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise refused(response)
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise Failure("not a stream", f"the reply to a request with stream: true is {kind}")
        return response

    def _open(self) -> http.client.HTTPConnection:
        # After a reply that closes, http.client has let its socket go.
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        self.close()
        self._connection = self._server.connect()
        self._connection.connect()
        self._sock = self._connection.sock
        self._connections.add(self._sock)
        return self._connection

    def _read(self, response: http.client.HTTPResponse, reading: Reading, clock: Callable[[], float]) -> None:
        events = EventReader()
        # To the very end of the body, as the connection can be used again only then.
        while piece := response.read1(_READ_BYTES):
            now = clock()
            for data in events.feed(piece):
                reading.take(data, now)
        response.read()  # nothing is left, but by read1 alone a body with a Content-Length does not end
        if not reading.done:
            raise Failure("cut off", "the stream ended before its [DONE]")


@contextmanager
def _faults() -> Iterator[None]:
    """What http.client and the socket raise, as Failures."""
    try:
        yield
    except EventError as error:
        raise Failure("malformed stream", str(error)) from error
    except TimeoutError as error:
        raise Failure("timeout", "nothing came for the time that --timeout gives") from error
    except http.client.IncompleteRead as error:
        raise Failure("cut off", "the connection ended inside the reply") from error
    except (http.client.HTTPException, OSError) as error:
        raise Failure("connection", f"{type(error).__name__}: {error}") from error


def refused(response: http.client.HTTPResponse) -> Failure:
    """A reply that is no 200."""
    raw = response.read(_MAX_ERROR_BYTES)
    try:
        message = error_message(parse_object(raw))
    except Failure:
        message = raw[:500].decode("utf-8", "replace")
    return Failure(f"HTTP {response.status}", message or response.reason, response.status)


def first_model(server: Server) -> str:
    """The id of the first model that the server lists. Raises Failure."""
    connection = server.connect()
    try:
        with _faults():
            connection.request("GET", f"{server.path}/models", headers=server.headers())
            response = connection.getresponse()
            if response.status != 200:
                raise refused(response)
            models = parse_object(response.read(_MAX_LIST_BYTES)).get("data")
    finally:
        connection.close()
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise Failure("no model", f"GET {server.url}/models lists no model; --model names one")
    return str(first["id"])
