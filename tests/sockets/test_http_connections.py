"""Keep-alive, pipelining, Expect, closing: what happens to a connection around its requests."""

from __future__ import annotations

import pytest

from mlx_serve.wire.framing import FramingLimits
from tests.sockets.wirekit import HOST, chunked, get, post, post_head, serving


def test_kept_alive_with_bodies_of_all_kinds() -> None:
    with serving() as running, running.connect() as client:
        for _ in range(3):
            assert client.send(post(b"/echo", b"one")).reply().body == b"one"
            assert client.send(chunked(b"/echo", b"t", b"wo")).reply().body == b"two"
            assert client.send(get()).reply().status == 200
            assert client.send(post(b"/echo", b"")).reply().body == b""
            assert client.send(get(b"/nope")).reply().status == 404
            assert client.send(get(method=b"HEAD")).reply(head=True).headers["content-length"] == "18"
        assert running.server.n_connections == 1


def test_pipelined_requests_are_answered_in_order() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/echo", b"1") + chunked(b"/echo", b"2") + get(b"/nope") + b"\r\n" + post(b"/echo", b"3"))
        assert [client.reply().body for _ in range(2)] == [b"1", b"2"]
        assert client.reply().status == 404
        assert client.reply().body == b"3"


@pytest.mark.parametrize("raw", [post(b"/echo", b"hello"), chunked(b"/echo", b"he", b"llo")], ids=["length", "chunked"])
def test_byte_by_byte(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        for at in range(len(raw)):
            client.send(raw[at : at + 1])
        assert client.reply().body == b"hello"


@pytest.mark.parametrize("bad", [
    b"GET /hello HTTP/1.1\r\nHost: a\r\nX Y: z\r\n\r\n",
    post_head(b"/echo", b"Content-Length: 2", b"Transfer-Encoding: chunked"),
    post_head(b"/echo", b"Transfer-Encoding: chunked") + b"-1\r\n",
    chunked(b"/echo", b"a")[:-5] + b"0\nX",
], ids=["head", "both-lengths", "size", "line-end"])  # fmt: skip
def test_nothing_behind_a_framing_fault_is_run(bad: bytes) -> None:
    with serving() as running, running.connect() as client:
        client.send(get() + bad + get() + post(b"/echo", b"x"))
        assert client.reply().status == 200
        reply = client.reply()
        assert reply.status == 400
        assert reply.headers["connection"] == "close"
        assert reply.error()["type"] == "invalid_request_error"
        assert client.at_end()
        assert [request.path for request in running.app.requests] == ["/hello"]


@pytest.mark.parametrize("raw", [
    get(b"/hello", b"Connection: close"),
    get(b"/hello", b"Connection: TE, Close"),
    get(version=b"1.0"),
    post(b"/echo", b"x", b"Connection: close"),
])  # fmt: skip
def test_close_is_honoured_and_said(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(raw + get()).reply()
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert client.at_end()
        assert len(running.app.requests) == 1


def test_http_1_0_keep_alive_is_honoured_and_said() -> None:
    with serving() as running, running.connect() as client:
        for _ in range(2):
            reply = client.send(get(b"/hello", b"Connection: keep-alive", version=b"1.0")).reply()
            assert reply.headers["connection"] == "keep-alive"


@pytest.mark.parametrize("raw", [
    post(b"/nope", b"x" * 1000),
    post(b"/hello", b"x" * 1000),
    post(b"/echo", b"x" * 1000, b"Content-Encoding: gzip"),
    post(b"/echo", b"x" * 1000, b"Origin: http://evil.example"),
    get(b"/nope", b"Content-Length: 4") + b"GET ",
    get(b"/echo", b"Content-Length: 4", method=b"OPTIONS") + b"GET ",
    post(b"/nope", b"x" * 1000, b"Expect: 100-continue", b"Connection: keep-alive", version=b"1.0"),
], ids=["404", "405", "415", "403", "404-get", "options", "404-1.0"])  # fmt: skip
def test_a_small_refused_body_is_read_and_the_connection_kept(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(raw).reply()
        assert reply.status in (204, 404, 405, 415, 403)
        assert reply.headers.get("connection") != "close"
        assert client.send(get()).reply().status == 200


@pytest.mark.parametrize("raw", [
    post_head(b"/nope", b"Content-Length: 4000000"),
    chunked(b"/nope", get()),
    post_head(b"/nope", b"Content-Length: 5", b"Expect: 100-continue"),
], ids=["large", "chunked", "expect"])  # fmt: skip
def test_a_refused_body_that_is_not_read_closes_the_connection(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(raw).reply()
        assert (reply.status, reply.headers["connection"], reply.interim) == (404, "close", [])
        assert client.at_end()
        assert running.app.requests == []


def test_a_bad_request_of_the_application_keeps_the_connection() -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(post(b"/refuse")).reply()
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert client.send(get()).reply().status == 200


# Expect (RFC 9110 10.1.1)


@pytest.mark.parametrize("length", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
def test_100_continue_then_the_reply(length: bytes) -> None:
    with serving() as running, running.connect() as client:
        client.send(post_head(b"/echo", b"Expect: 100-Continue", length))
        assert client.interim() == 100
        client.send(b"hello" if b"5" in length else b"5\r\nhello\r\n0\r\n\r\n")
        assert client.reply().body == b"hello"


@pytest.mark.parametrize(("raw", "status"), [
    (post_head(b"/echo", b"Content-Length: 2000"), 413),
    (post_head(b"/echo", b"Transfer-Encoding: gzip"), 501),
    (post_head(b"/nope", b"Content-Length: 5"), 404),
    (post_head(b"/hello", b"Content-Length: 5"), 405),
    (post_head(b"/echo", b"Content-Length: 5", b"Content-Type: multipart/form-data; boundary=x"), 415),
    (post_head(b"/echo", b"Content-Length: 5", b"Origin: http://evil.example"), 403),
])  # fmt: skip
def test_no_100_for_what_will_be_refused(raw: bytes, status: int) -> None:
    with serving(limits=FramingLimits(max_body_bytes=1000)) as running, running.connect() as client:
        reply = client.send(raw.replace(HOST, HOST + b"Expect: 100-continue\r\n")).reply()
        assert (reply.status, reply.interim) == (status, [])
        assert client.at_end()


def test_an_unknown_expectation() -> None:
    with serving() as running:
        assert running.ask(post(b"/echo", b"x", b"Expect: a-pony")).status == 417


@pytest.mark.parametrize("raw", [
    post(b"/echo", b"", b"Expect: 100-continue"),
    post(b"/echo", b"hello", b"Expect: 100-continue", version=b"1.0"),
    post(b"/echo", b"hello", b"Expect: 100-continue"),
    get(b"/hello", b"Expect: 100-continue"),
], ids=["no-body", "1.0", "did-not-wait", "get"])  # fmt: skip
def test_no_100_where_nobody_waits_for_it(raw: bytes) -> None:
    with serving() as running:
        reply = running.ask(raw)
        assert (reply.status, reply.interim) == (200, [])


# Too large: the client reads why, though it is still sending (RFC 9112 9.6)


def test_413_is_read_by_a_client_still_sending() -> None:
    with serving(limits=FramingLimits(max_body_bytes=8 << 20)) as running, running.connect() as client:
        client.send(post_head(b"/echo", b"Content-Length: 9000000") + b"x" * (4 << 20))
        reply = client.reply()
        assert reply.status == 413
        assert str(8 << 20) in str(reply.error()["message"])
        assert client.at_end()


def test_413_for_chunks_as_soon_as_the_limit_is_passed() -> None:
    limits = FramingLimits(max_body_bytes=200_000)
    with serving(limits=limits) as running, running.connect() as client:
        client.send(post_head(b"/echo", b"Transfer-Encoding: chunked"))
        for _ in range(4):
            client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert client.reply().status == 413
        assert client.at_end()


def test_413_at_the_size_line_of_one_large_chunk() -> None:
    with serving() as running, running.connect() as client:
        assert client.send(post_head(b"/echo", b"Transfer-Encoding: chunked") + b"5f5e100\r\n").reply().status == 413
        assert client.at_end()


def test_400_is_read_by_a_client_still_sending() -> None:
    with serving() as running, running.connect() as client:
        client.send(post_head(b"/echo", b"X Bad: 1", b"Content-Length: 4194304") + b"x" * (4 << 20))
        assert client.reply().status == 400


def test_what_a_closing_connection_still_sends_does_not_destroy_the_reply() -> None:
    with serving() as running, running.connect() as client:
        client.send(get(b"/hello", b"Connection: close") + b"junk" * 10000)
        assert client.reply().status == 200


# The end of the connection


@pytest.mark.parametrize("raw", [post(b"/echo", b"hello"), chunked(b"/echo", b"hello")], ids=["length", "chunked"])
def test_a_client_that_half_closes_gets_its_reply(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        client.send(raw).half_close()
        assert client.reply().body == b"hello"
        assert client.at_end()


@pytest.mark.parametrize("raw", [
    b"GET /he",
    get()[:-2],
    post_head(b"/echo", b"Content-Length: 5") + b"hell",
    post_head(b"/echo", b"Transfer-Encoding: chunked") + b"5\r\nhell",
    post_head(b"/echo", b"Transfer-Encoding: chunked") + b"5\r\nhello\r\n",
    post_head(b"/echo", b"Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n",
])  # fmt: skip
def test_an_unfinished_request_is_never_run(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        assert client.send(raw).half_close().reply().status == 400
        assert client.at_end()
        assert running.app.requests == []


@pytest.mark.parametrize("raw", [b"", b"\r\n"])
def test_without_a_request_there_is_no_reply(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        assert client.send(raw).half_close().at_end()


def test_a_tls_hello_on_the_plain_port_is_refused_at_once() -> None:
    with serving() as running, running.connect() as client:
        assert client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc").reply().status == 400
