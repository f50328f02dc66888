"""A fake application and a raw client for the tests of the HTTP side. Everything waits on conditions, with a limit."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import ClassVar

from mlx_serve.values import ApiError, ClientGone, RawRequest, Response
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import ServerOptions, Target
from tests.waiting import until

PATIENCE_S = 10.0
HOST = b"Host: localhost\r\n"


class Pieces:
    """A stream in the test's hands: pieces are put in, None ends it; ``closed`` is set when the reply has ended."""

    def __init__(self, alive: Callable[[], bool] = lambda: True) -> None:
        self._alive = alive
        self._ready: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        self.closed = threading.Event()

    def put(self, *pieces: bytes | Exception | None) -> None:
        for piece in pieces:
            self._ready.put(piece)

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> bytes:
        while self._ready.empty():
            if not self._alive():
                raise ClientGone("asked while waiting")
            threading.Event().wait(0.01)
        piece = self._ready.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        self.closed.set()


class FakeApp:
    """Routes: see ``_answer``. What it saw is in ``requests``; streams, once begun, are in ``streams``."""

    ROUTES: ClassVar = {
        "/hello": frozenset({"GET"}),
        "/health": frozenset({"GET"}),
        "/echo": frozenset({"POST"}),
        "/both": frozenset({"GET", "POST"}),
        "/stream": frozenset({"POST"}),
        "/wait": frozenset({"POST"}),
        "/flood": frozenset({"POST"}),
        "/boom": frozenset({"POST"}),
        "/refuse": frozenset({"POST"}),
        "/bad-header": frozenset({"GET"}),
        "/cancel": frozenset({"POST"}),
    }

    def __init__(self) -> None:
        self.requests: list[RawRequest] = []
        self.streams: SimpleQueue[Pieces] = SimpleQueue()
        self.waiting = threading.Semaphore(0)
        self.release = threading.Event()
        self.gone = threading.Event()

    def find(self, path: str) -> Target:
        return Target(
            self.ROUTES.get(path, frozenset()),
            self.answer,
            self.error,
            bodiless=frozenset({"POST"} if path == "/cancel" else ()),
            is_open=path == "/health",
        )

    def error(self, err: ApiError, request_id: str) -> Response:
        content = {"message": err.message, "type": err.type, "param": err.param, "code": err.code}
        return Response(err.status, json.dumps({"error": content}).encode())

    def answer(self, request: RawRequest) -> Response:
        self.requests.append(request)
        return self._answer(request)

    def _answer(self, request: RawRequest) -> Response:
        match request.path:
            case "/echo" | "/both":
                request.notes["model"] = "tiny"
                return Response(200, request.body, "application/json", (("x-extra", "1"),))
            case "/stream":
                return self._stream(request)
            case "/flood":
                return Response(200, self._flood(), "text/event-stream")
            case "/wait":
                return self._wait(request)
            case "/boom":
                raise RuntimeError("secret of the inside")
            case "/refuse":
                raise ApiError(429, "later", type="rate_limit_error", headers=(("Retry-After", "1"),))
            case "/bad-header":
                return Response(200, b"{}", headers=(("x-bad", "a\r\nx-injected: b"),))
        return Response(200, b'{"hello": "world"}')

    def _stream(self, request: RawRequest) -> Response:
        pieces = Pieces(request.alive)
        self.streams.put(pieces)
        return Response(200, pieces, "text/event-stream")

    def _flood(self) -> Iterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
        finally:
            self.gone.set()

    def _wait(self, request: RawRequest) -> Response:
        self.waiting.release()
        while not self.release.wait(0.01):
            if not request.alive():
                self.gone.set()
                raise ClientGone("asked while waiting")
        return Response(200, b'{"waited": true}')


@dataclass
class Reply:
    status: int
    version: str
    headers: dict[str, str]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)

    def error(self) -> dict[str, object]:
        assert self.headers["content-type"] == "application/json"
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """Bytes out, parsed replies in."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE_S)
        self._raw = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, raw: bytes) -> Client:
        self.sock.sendall(raw)
        return self

    def peek(self, n_bytes: int) -> bytes:
        """The beginning of what the server sends next; it stays to be read."""
        while len(self._raw) < n_bytes:
            self._fill()
        return self._raw[:n_bytes]

    def half_close(self) -> Client:
        self.sock.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Closes so that the server gets a reset and not an orderly end."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def reply(self, *, head: bool = False) -> Reply:
        interim: list[int] = []
        while (reply := self._reply_head()).status == 100:
            interim.append(100)
        body = b"" if head or reply.status in (204, 304) else self._body(reply)
        return replace(reply, body=body, interim=interim)

    def interim(self) -> int:
        return self._reply_head().status

    def begun(self) -> Reply:
        """The head of a reply; its chunks can be read one by one."""
        return self._reply_head()

    def chunk(self) -> bytes:
        size = int(self._until(b"\r\n"), 16)
        data = self._exactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    def at_end(self) -> bool:
        """Whether the server has ended the connection, with nothing more in it. Waits for one or the other."""
        return not self._raw and self.sock.recv(1) == b""

    def cut(self) -> bool:
        """Whether the server is gone, with a reset or without."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def _reply_head(self) -> Reply:
        first, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, status, _ = first.split(" ", 2)
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        return Reply(int(status), version, headers)

    def _body(self, reply: Reply) -> bytes:
        if reply.headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := self.chunk():
                pieces.append(piece)
            return b"".join(pieces)
        if "content-length" in reply.headers:
            return self._exactly(int(reply.headers["content-length"]))
        while raw := self.sock.recv(65536):
            self._raw += raw
        return self._exactly(len(self._raw))

    def _until(self, end: bytes) -> bytes:
        while end not in self._raw:
            self._fill()
        before, _, self._raw = self._raw.partition(end)
        return before

    def _exactly(self, n_bytes: int) -> bytes:
        while len(self._raw) < n_bytes:
            self._fill()
        taken, self._raw = self._raw[:n_bytes], self._raw[n_bytes:]
        return taken

    def _fill(self) -> None:
        raw = self.sock.recv(65536)
        if not raw:
            raise EOFError(f"the server ended the connection after {self._raw!r}")
        self._raw += raw


@dataclass
class Running:
    server: Server
    app: FakeApp

    def connect(self) -> Client:
        address = self.server.address
        if isinstance(address, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address)
        else:
            sock = socket.create_connection(address, PATIENCE_S)
        return Client(sock)

    def ask(self, raw: bytes, *, head: bool = False) -> Reply:
        with self.connect() as client:
            return client.send(raw).reply(head=head)

    def empty(self) -> None:
        """Waits until no connection is left."""
        until(lambda: self.server.n_connections == 0, "the end of all connections")


@contextmanager
def serving(**options: object) -> Iterator[Running]:
    """A server on a free port. Nothing of it may be left afterwards."""
    before = set(threading.enumerate())
    app = FakeApp()
    defaults: dict[str, object] = {"address": ("127.0.0.1", 0), "linger_silence_s": 0.5}
    server = Server(app, ServerOptions(**(defaults | options)))  # type: ignore[arg-type]
    loop = threading.Thread(target=server.serve_forever)
    loop.start()
    try:
        yield Running(server, app)
    finally:
        app.release.set()
        server.close()
        loop.join(PATIENCE_S)
        assert server.n_connections == 0
        assert set(threading.enumerate()) <= before


def get(path: bytes = b"/hello", *fields: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return method + b" " + path + b" HTTP/" + version + b"\r\n" + HOST + lines(fields) + b"\r\n"


def post(path: bytes, body: bytes = b"{}", *fields: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST " + path + b" HTTP/" + version + b"\r\n" + HOST + b"Content-Type: application/json\r\n"
    return head + lines(fields) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def post_head(path: bytes, *fields: bytes) -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + lines(fields) + b"\r\n"


def chunked(path: bytes, *pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return post_head(path, b"Transfer-Encoding: chunked") + body


def lines(fields: tuple[bytes, ...]) -> bytes:
    return b"".join(each + b"\r\n" for each in fields)
