"""nginx in front of the whole server, set up by the example configuration itself, on the fake backend."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.clientkit import (
    ANSWER,
    CHAT,
    Served,
    chat,
    content_of,
    deltas,
    error_of,
    held,
    program,
    served,
    started,
)
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx" / "mlx-serve.conf"
# What a distribution's nginx.conf does, with everything in one folder. One process: a kill leaves none behind.
AROUND = """
daemon off;
master_process off;
pid nginx.pid;
events {}
http {
    access_log off;
    client_body_temp_path temp_body;
    proxy_temp_path temp_proxy;
    fastcgi_temp_path temp_fastcgi;
    uwsgi_temp_path temp_uwsgi;
    scgi_temp_path temp_scgi;
    include mlx-serve.conf;
}
"""
UPSTREAM = "server 127.0.0.1:8080;"
HTTP_1_1 = "proxy_http_version 1.1;"
KEPT = 'proxy_set_header Connection "";'
UNBUFFERED = "proxy_request_buffering off;"
# A body that is whole when nginx has read the head is passed on with its length, however it came.
MORE_THAN_A_HEAD = 20_000


class Proxy:
    def __init__(self, port: int) -> None:
        self.port = port

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def posted(self, body, path: str = CHAT, **kwargs) -> Iterator[http.client.HTTPResponse]:
        with self.connection() as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"}, **kwargs)
            with connection.getresponse() as response:
                yield response

    def post(self, body, path: str = CHAT):
        """Status, headers and JSON of a request on a connection of its own."""
        with self.posted(body, path) as response:
            return response.status, response.headers, json.load(response)


@contextmanager
def nginx(folder: Path, server: Served, *edits: tuple[str, str]) -> Iterator[Proxy]:
    """The example, listening on a free port, in front of ``server``; each edit replaces what is there once."""
    address = server.server.address
    upstream = f"unix:{address}" if isinstance(address, str) else f"127.0.0.1:{address[1]}"
    port = free_port()
    text = EXAMPLE.read_text()
    for old, new in [("listen 8000;", f"listen 127.0.0.1:{port};"), (UPSTREAM, f"server {upstream};"), *edits]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "mlx-serve.conf").write_text(text)
    (folder / "nginx.conf").write_text(AROUND)
    errors = folder / "error.log"
    # Not on every user's path.
    command = [program("nginx", "/usr/sbin", "/usr/local/sbin"), "-p", f"{folder}/", "-c", "nginx.conf", "-e", errors]
    with started(*command) as process:
        until(lambda: process.poll() is not None or listening(port), "nginx")
        assert process.poll() is None, errors.read_text()
        yield Proxy(port)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def pair(tmp_path):
    """A server and the example in front of it."""
    with served() as server, nginx(tmp_path, server) as proxy:
        yield server, proxy


def chunks(text: str, n_bytes: int = 100) -> Iterator[bytes]:
    raw = text.encode()
    return (raw[i : i + n_bytes] for i in range(0, len(raw), n_bytes))


def framing(server: Served) -> tuple[str | None, bool]:
    """How the last request's body came: its coding, and whether its length was given."""
    headers = server.requests[-1].headers
    return headers.get("transfer-encoding"), "content-length" in headers


# Bodies


def test_a_chunked_body_arrives_chunked(pair):
    server, proxy = pair
    assert content_of(proxy.post(chunks(chat("né 🐉", MORE_THAN_A_HEAD)))[2]) == "user: né 🐉\n"
    assert framing(server) == ("chunked", False)


def test_a_body_with_a_length_keeps_it(pair):
    server, proxy = pair
    assert content_of(proxy.post(chat(n_padding=3_000_000))[2]) == ANSWER
    assert framing(server) == (None, True)


def test_a_body_is_passed_on_as_it_comes(pair):
    server, proxy = pair
    with proxy.connection() as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        first, *rest = chunks(chat(), n_bytes=10)
        connection.send(b"%x\r\n%b\r\n" % (len(first), first))
        until(lambda: server.server.n_connections == 1, "the upload's beginning")
        connection.send(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in rest) + b"0\r\n\r\n")
        assert content_of(json.load(connection.getresponse())) == ANSWER


@pytest.mark.parametrize(
    "edits",
    [
        [(UNBUFFERED, "")],
        # Unbuffered or not, HTTP/1.0 knows no chunks.
        [(HTTP_1_1, "proxy_http_version 1.0;")],
    ],
    ids=["buffered", "HTTP/1.0"],
)
def test_a_chunked_body_that_nginx_buffers_arrives_with_a_length(tmp_path, edits):
    with served() as server, nginx(tmp_path, server, *edits) as proxy:
        assert content_of(proxy.post(chunks(chat()))[2]) == ANSWER
        assert framing(server) == (None, True)


# Streams

OLD = [(HTTP_1_1, "proxy_http_version 1.0;"), (KEPT, "")]


@pytest.mark.parametrize("edits", [[], OLD], ids=["example", "HTTP/1.0"])
def test_events_come_as_they_are_made(tmp_path, edits):
    """No step is let before the event of the one before it has come through. nginx's proxy_buffering is on: without
    our X-Accel-Buffering it keeps events back, at least those that come over HTTP/1.0.
    """
    with held() as (server, gate), nginx(tmp_path, server, *edits) as proxy:
        check_events_come_as_they_are_made(proxy, gate)


def check_events_come_as_they_are_made(proxy, gate):
    gate.let(1)
    with proxy.posted(chat(stream=True)) as response:
        received = deltas(response)
        assert next(received) == ANSWER[0]
        for character in ANSWER[1:]:
            gate.let(1)
            assert next(received) == character
        gate.let(1)
        assert list(received) == []


def test_a_silent_stream_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_serve.api.generation.BEAT_EVERY_S", 0.05)
    with held() as (server, gate), nginx(tmp_path, server) as proxy, proxy.posted(chat(stream=True)) as response:
        assert b": keep-alive\n" in response
        gate.open()
        assert "".join(deltas(response)) == ANSWER


# Connections


def test_connections_to_the_server_are_kept(pair):
    """One for ten clients, through answers, streams and refusals."""
    server, proxy = pair
    for _ in range(2):
        assert proxy.post(chat())[0] == 200
        assert proxy.post("no json")[0] == 400
        assert proxy.post(chunks(chat()))[0] == 200
        assert proxy.post("{}", "/nope")[0] == 404
        with proxy.posted(chat(stream=True)) as response:
            assert "".join(deltas(response)) == ANSWER
    assert server.server.n_connections == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("edits", [[], OLD], ids=["example", "HTTP/1.0"])
def test_a_client_that_leaves_nginx_frees_its_place(tmp_path, edits, stream):
    with held(endless=True) as (server, gate), nginx(tmp_path, server, *edits) as proxy:
        with proxy.connection() as connection:
            connection.request("POST", CHAT, chat(stream=stream, max_tokens=10**9))
            until(lambda: server.n_running() == 1, "a running request")
            if stream:
                gate.let(1)
                with connection.getresponse() as response:
                    assert next(deltas(response)) == "x"
        server.frees_its_place(gate)


def test_a_client_that_leaves_nginx_in_its_upload_is_forgotten(pair):
    server, proxy = pair
    with proxy.connection() as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")
        until(lambda: server.server.n_connections == 1, "the upload's beginning")
    until(lambda: server.server.n_connections == 0, "the upload's end")
    assert proxy.post(chat())[0] == 200


def test_the_server_may_listen_on_a_unix_socket(tmp_path):
    with served(uds=str(tmp_path / "s")) as server, nginx(tmp_path, server) as proxy:
        assert content_of(proxy.post(chunks(chat(n_padding=MORE_THAN_A_HEAD)))[2]) == ANSWER
        assert framing(server) == ("chunked", False)
        with proxy.posted(chat(stream=True)) as response:
            assert "".join(deltas(response)) == ANSWER


# Refusals


@pytest.mark.parametrize("cut", [str, chunks], ids=["length", "chunked"])
def test_a_body_that_is_too_large_gets_our_413(tmp_path, cut):
    with served(max_body_bytes=100_000) as server, nginx(tmp_path, server) as proxy:
        status, headers, answer = proxy.post(cut(chat(n_padding=150_000)))
        assert (status, headers["Content-Type"]) == (413, "application/json")
        assert error_of(answer)["code"] == "request_too_large"


def test_a_body_without_end_gets_our_413(tmp_path):
    """Nginx that waited for the end of it would wait for ever."""
    with served(max_body_bytes=1000) as server, nginx(tmp_path, server) as proxy, proxy.connection() as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders(b"400\r\n" + b"x" * 1024 + b"\r\n")
        with connection.getresponse() as response:
            assert response.status == 413
            error_of(json.load(response))


def test_a_full_queue_gets_our_429(tmp_path):
    with held(endless=True, capacity=1, max_queue=1) as (server, gate), nginx(tmp_path, server) as proxy:
        with proxy.connection() as first, proxy.connection() as second:
            first.request("POST", CHAT, chat(max_tokens=10**9))
            until(lambda: server.n_running() == 1, "a running request")
            second.request("POST", CHAT, chat(max_tokens=10**9))
            until(lambda: server.n_waiting() == 1, "a waiting request")
            status, headers, answer = proxy.post(chat())
            assert (status, int(headers["Retry-After"]) > 0) == (429, True)
            assert error_of(answer)["code"] == "rate_limit_exceeded"
        server.frees_its_place(gate)


def test_other_host_names_do_not_reach_a_server_on_loopback(tmp_path):
    """Which is why the example sets the host."""
    edits = [("proxy_set_header Host localhost;", "proxy_set_header Host $host;")]
    with served() as server, nginx(tmp_path, server, *edits) as proxy, proxy.connection() as connection:
        connection.request("GET", "/v1/models", headers={"Host": "llm.example.com"})
        with connection.getresponse() as response:
            assert response.status == 403
            assert error_of(json.load(response))["code"] == "host_not_allowed"


# The page about it


def test_the_page_shows_what_is_tested():
    page = (EXAMPLE.parents[2] / "docs" / "proxies.md").read_text()
    shown = [line.strip() for text in re.findall(r"```nginx\n(.*?)```", page, re.DOTALL) for line in text.splitlines()]
    assert shown
    assert set(shown) <= {line.strip() for line in EXAMPLE.read_text().splitlines()}
