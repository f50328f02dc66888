"""Replies: their fields, HEAD and OPTIONS, methods and content types, failures, streams, the log line."""

from __future__ import annotations

import json
import logging
import re

import pytest

from mlx_serve.values import RawRequest, Response, internal_error
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.request_log import RequestLog, as_json, as_text
from tests.sockets.wirekit import HOST, Client, FakeApp, get, post, post_head, serving
from tests.waiting import until


def test_every_reply_says_who_when_and_which() -> None:
    with serving() as running:
        for raw in (get(), get(b"/nope"), b"X Y Z\r\n\r\n", post(b"/boom"), get(b"/echo")):
            headers = running.ask(raw).headers
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT", headers["date"])
            assert headers["server"] == "mlx-serve"
            assert re.fullmatch(r"req_[0-9a-f]{32}", headers["x-request-id"])
            assert headers["openai-processing-ms"].isdigit()
            assert headers["openai-version"] == "2020-10-01"
            assert headers["content-type"] == "application/json"
            assert headers["content-length"].isdigit()


@pytest.mark.parametrize(("given", "kept"), [
    (b"my-id_1.2", True),
    (b"a" * 128, True),
    (b"a" * 129, False),
    (b"a b", False),
    (b"", False),
    (b"\xc3\xa9", False),
])  # fmt: skip
def test_the_clients_request_id_is_kept_if_it_is_sane(given: bytes, kept: bool) -> None:
    with serving() as running:
        reply = running.ask(get(b"/hello", b"X-Request-Id: " + given))
        assert (reply.headers["x-request-id"] == given.decode("latin-1")) == kept
        assert running.app.requests[0].request_id == reply.headers["x-request-id"]


def test_what_the_application_is_told() -> None:
    with serving() as running:
        running.ask(post(b"/ec%68o?x=1", b"body", b"X-A: 1", b"x-a: 2"))
        request = running.app.requests[0]
        assert (request.method, request.path, request.body, request.headers["x-a"]) == (
            "POST",
            "/echo",
            b"body",
            "1, 2",
        )


@pytest.mark.parametrize("raw", [
    b"HEAD /hello HTTP/1.1\r\n\r\n",
    get(b"/hello", b"X Bad: 1", method=b"HEAD"),
    get(b"/nope", method=b"HEAD"),
])  # fmt: skip
def test_a_refused_head_gets_no_content(raw: bytes) -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(raw).half_close().reply(head=True)
        assert (reply.status, reply.headers["content-length"].isdigit()) == (404 if b"/nope" in raw else 400, True)
        assert client.at_end()


def test_a_post_without_a_length() -> None:
    with serving() as running, running.connect() as client:
        # What follows might be a body that is not framed.
        reply = client.send(post_head(b"/cancel") + get()).reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert client.at_end()
        refused = running.ask(post_head(b"/echo"))
        assert (refused.status, refused.headers["connection"]) == (411, "close")
        assert running.ask(post_head(b"/nope")).status == 404
        assert [request.path for request in running.app.requests] == ["/cancel"]


def test_an_https_target_needs_tls() -> None:
    with serving() as running:
        assert running.ask(get(b"https://localhost/hello")).status == 421
        assert running.ask(get(b"http://localhost/hello")).status == 200
    with serving(access=AccessPolicy(is_tls=True)) as running:
        assert running.ask(get(b"https://localhost/hello")).status == 200


def test_an_expectation_said_twice_or_empty_is_met() -> None:
    with serving() as running:
        for fields in ((b"Expect: 100-continue", b"Expect: 100-continue"), (b"Expect:",)):
            assert running.ask(post(b"/echo", b"x", *fields)).body == b"x"
        assert running.ask(post(b"/echo", b"x", b"Expect: 100-continue, a-pony")).status == 417


def test_head_is_get_without_the_body() -> None:
    with serving() as running, running.connect() as client:
        plain = client.send(get()).reply()
        head = client.send(get(method=b"HEAD")).reply(head=True)
        assert head.status == 200
        assert head.headers["content-length"] == plain.headers["content-length"]
        assert [request.method for request in running.app.requests] == ["GET", "GET"]
        missing = client.send(get(b"/nope", method=b"HEAD")).reply(head=True)
        assert missing.status == 404
        assert client.send(get()).reply().status == 200


@pytest.mark.parametrize(("path", "method", "allow"), [
    (b"/echo", b"GET", "OPTIONS, POST"),
    (b"/echo", b"PUT", "OPTIONS, POST"),
    (b"/echo", b"DELETE", "OPTIONS, POST"),
    (b"/echo", b"HEAD", "OPTIONS, POST"),
    (b"/hello", b"POST", "GET, HEAD, OPTIONS"),
    (b"/both", b"PATCH", "GET, HEAD, OPTIONS, POST"),
])  # fmt: skip
def test_405_names_the_methods(path: bytes, method: bytes, allow: str) -> None:
    with serving() as running:
        reply = running.ask(get(path, b"Content-Length: 0", method=method), head=method == b"HEAD")
        assert (reply.status, reply.headers["allow"]) == (405, allow)


@pytest.mark.parametrize("method", [b"FOO", b"get", b"TRACE", b"__init__", b"A" * 5000])
def test_unknown_methods(method: bytes) -> None:
    with serving() as running:
        assert running.ask(get(method=method)).status == 501


def test_options() -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(get(b"/both", method=b"OPTIONS")).reply()
        assert (reply.status, reply.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
        assert "content-length" not in reply.headers
        assert client.send(get(b"*", method=b"OPTIONS")).reply().status == 204
        assert client.send(get(b"/nope", method=b"OPTIONS")).reply().status == 404


@pytest.mark.parametrize(("content_type", "status"), [
    (None, 200),
    (b"", 200),
    (b"application/json", 200),
    (b"application/json; charset=utf-8", 200),
    (b"application/vnd.x+json", 200),
    (b"application/x-www-form-urlencoded", 200),
    (b"text/plain", 200),
    (b"text/plain;charset=UTF-8", 200),
    (b"application/octet-stream", 200),
    (b"multipart/form-data; boundary=x", 415),
    (b"Text/XML", 415),
    (b"text/html", 415),
    (b"application/xml", 415),
    (b"application/soap+xml", 415),
    (b"image/png", 415),
])  # fmt: skip
def test_content_types(content_type: bytes | None, status: int) -> None:
    field = b"Content-Type: " + content_type + b"\r\n" if content_type is not None else b""
    with serving() as running:
        raw = b"POST /echo HTTP/1.1\r\n" + HOST + field + b"Content-Length: 2\r\n\r\n{}"
        assert running.ask(raw).status == status


@pytest.mark.parametrize(("coding", "status"), [(b"identity", 200), (b"", 200), (b"gzip", 415), (b"br, gzip", 415)])
def test_content_codings(coding: bytes, status: int) -> None:
    with serving() as running:
        reply = running.ask(post(b"/echo", b"{}", b"Content-Encoding: " + coding))
        assert reply.status == status
        assert reply.headers.get("accept-encoding") == (None if status == 200 else "identity")


# Failures


def test_a_failure_inside_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, running.connect() as client:
        reply = client.send(post(b"/boom")).reply()
        assert (reply.status, reply.error()["type"]) == (500, "server_error")
        request_id = reply.headers["x-request-id"]
        assert request_id in str(reply.error()["message"])
        assert reply.error()["message"] == internal_error(request_id).message
        assert b"secret" not in reply.body
        assert "secret of the inside" in caplog.text
        assert client.send(get()).reply().status == 200


class Panic(BaseException):
    """As an extension in Rust raises it: no Exception."""


def test_a_panic_inside_is_a_500_too(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(app: FakeApp, request: RawRequest) -> Response:
        raise Panic("secret of the inside")

    with serving() as running, running.connect() as client:
        monkeypatch.setattr(FakeApp, "_answer", panic)
        reply = client.send(post(b"/echo")).reply()
        assert (reply.status, reply.error()["type"]) == (500, "server_error")
        assert b"secret" not in reply.body
        assert "secret of the inside" in caplog.text
        monkeypatch.undo()
        assert client.send(get()).reply().status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_thread_is_not_answered(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(app: FakeApp, request: RawRequest) -> Response:
        raise kind

    with serving() as running:
        monkeypatch.setattr(FakeApp, "_answer", leave)
        with running.connect() as client:
            client.send(post(b"/echo"))
            assert client.at_end()
        monkeypatch.undo()
        assert running.ask(get()).status == 200


def test_a_header_that_would_break_its_line_is_never_sent(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running:
        reply = running.ask(get(b"/bad-header"))
        assert reply.status == 500
        assert "x-injected" not in reply.headers
    assert "would break its line" in caplog.text


# Streams


def begin(client: Client) -> None:
    client.send(post(b"/stream"))


def test_a_stream_is_written_piece_by_piece() -> None:
    with serving() as running, running.connect() as client:
        begin(client)
        pieces = running.app.streams.get()
        pieces.put(b"data: 1\n\n")
        reply = client.begun()
        assert reply.headers["transfer-encoding"] == "chunked"
        assert "content-length" not in reply.headers
        assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert client.chunk() == b"data: 1\n\n"
        # Each piece is there before the next one exists; an empty one does not end the body.
        pieces.put(b"", b"data: 2\n\n")
        assert client.chunk() == b"data: 2\n\n"
        pieces.put(None)
        assert client.chunk() == b""
        assert pieces.closed.wait(10)
        assert client.send(get()).reply().status == 200


def test_a_stream_without_a_piece_is_an_empty_body() -> None:
    with serving() as running, running.connect() as client:
        begin(client)
        running.app.streams.get().put(None)
        assert client.reply().body == b""
        assert client.send(get()).reply().status == 200


def test_a_stream_to_http_1_0_ends_with_the_connection() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/stream", b"{}", b"Connection: keep-alive", version=b"1.0"))
        running.app.streams.get().put(b"data: 1\n\n", b"data: 2\n\n", None)
        reply = client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.headers["connection"] == "close"
        assert reply.body == b"data: 1\n\ndata: 2\n\n"


def test_a_request_behind_a_stream_is_answered_after_it() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/stream") + get())
        running.app.streams.get().put(b"a", b"b", None)
        assert client.reply().body == b"ab"
        assert client.reply().status == 200


def test_a_stream_that_fails_before_its_first_piece_has_its_own_status(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, running.connect() as client:
        begin(client)
        pieces = running.app.streams.get()
        pieces.put(RuntimeError("early"))
        assert client.reply().status == 500
        assert pieces.closed.is_set()
        assert client.send(get()).reply().status == 200
    assert "early" in caplog.text


def test_a_stream_that_fails_later_is_cut_without_its_last_chunk(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, running.connect() as client:
        begin(client)
        pieces = running.app.streams.get()
        pieces.put(b"data: 1\n\n")
        client.begun()
        assert client.chunk() == b"data: 1\n\n"
        pieces.put(RuntimeError("late"))
        assert client.at_end()
        assert pieces.closed.is_set()
    assert "late" in caplog.text


# The log line


def log_lines(caplog: pytest.LogCaptureFixture, n_lines: int) -> list[str]:
    until(lambda: len([r for r in caplog.records if r.name == "mlx_serve.access"]) >= n_lines, "the lines of the log")
    return [record.getMessage() for record in caplog.records if record.name == "mlx_serve.access"]


def test_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_serve.access")
    policy = AccessPolicy(api_keys=("sk-key",))
    with serving(access=policy) as running:
        running.ask(
            post(b"/echo?q=hidden", b'{"prompt": "private"}', b"Authorization: Bearer sk-key", b"X-Request-Id: r1")
        )
        log_lines(caplog, 1)
        running.ask(post(b"/echo", b"private", b"Authorization: Bearer sk-other"))
        log_lines(caplog, 2)
        running.ask(b"private\r\n\r\n")
        served, unknown, refused = log_lines(caplog, 3)
    assert re.match(r"method=POST path=/echo status=200 bytes_in=21 bytes_out=\d+ ms=[\d.]+ id=r1 client=127", served)
    assert served.endswith("model=tiny")
    assert "status=401" in unknown
    assert unknown.endswith("error=invalid_api_key")
    assert refused.startswith("method=- path=- status=400")
    for text in (served, unknown, refused):
        assert not any(word in text for word in ("private", "hidden", "sk-"))


def test_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_serve.access")
    with serving(log_format="json") as running:
        running.ask(post(b"/echo", b"{}"))
        entry = json.loads(log_lines(caplog, 1)[0])
    assert (entry["method"], entry["path"], entry["status"], entry["model"]) == ("POST", "/echo", 200, "tiny")


@pytest.mark.parametrize(
    "path", ["/a\r\nmethod=GET", "/\x1b[2J", "/\x7f\x85\u2028", "/a status=200", '/"x', "/\u202egnp"]
)
def test_nothing_in_a_line_can_forge_another(path: str) -> None:
    entry = RequestLog("GET", path, 404, 0, 0, 1.0, "r1", "c", {"note": path, "status": 200})
    for text in (as_text(entry), as_json(entry)):
        assert all(" " <= character <= "~" for character in text)
    assert re.search(r" status=404 ", as_text(entry).replace(json.dumps(path), ""))
    assert json.loads(as_json(entry))["path"] == path
