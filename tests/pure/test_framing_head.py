"""Request heads: each row is fed whole and one byte at a time, and must give the same verdict."""

from __future__ import annotations

import pytest

from mlx_serve.wire.framing import FramingLimits, Head, HeadReader, Refusal

LIMITS = FramingLimits(max_request_line=200, max_header_bytes=600, max_header_fields=10)
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
END = b"\r\n"


def read(raw: bytes, step: int, limits: FramingLimits = LIMITS) -> Head | int | None:
    reader = HeadReader(limits)
    try:
        for at in range(0, len(raw), step):
            if head := reader.feed(raw[at : at + step]):
                return head
    except Refusal as refusal:
        return refusal.status
    return None


def feed_all(reader: HeadReader, raw: bytes, step: int) -> None:
    for at in range(0, len(raw), step):
        reader.feed(raw[at : at + step])


def read_both_ways(raw: bytes) -> Head | int | None:
    whole, by_byte = read(raw, len(raw)), read(raw, 1)
    assert whole == by_byte
    return whole


def line(text: bytes) -> bytes:
    return text + b"\r\nHost: localhost\r\n\r\n"


REFUSED = [
    # request line
    ("one-word", line(b"GARBAGE"), 400),
    ("http-0.9", b"GET /\r\n\r\n", 400),
    ("four-words", line(b"GET / HTTP/1.1 x"), 400),
    ("no-target", line(b"GET  HTTP/1.1"), 400),
    ("leading-blank", line(b" GET / HTTP/1.1"), 400),
    ("two-blanks-before-target", line(b"GET  / HTTP/1.1"), 400),
    ("two-blanks-before-version", line(b"GET /  HTTP/1.1"), 400),
    ("trailing-blank", line(b"GET / HTTP/1.1 "), 400),
    ("tabs", line(b"GET\t/\tHTTP/1.1"), 400),
    ("vertical-tab", line(b"GET /\x0bHTTP/1.1"), 400),
    ("method-no-token", line(b"G(T / HTTP/1.1"), 400),
    ("method-colon", line(b"GET: / HTTP/1.1"), 400),
    ("method-non-ascii", line(b"GET\xc3\x9f / HTTP/1.1"), 400),
    ("nul-in-target", line(b"GET /\0 HTTP/1.1"), 400),
    ("del-in-target", line(b"GET /\x7f HTTP/1.1"), 400),
    ("non-ascii-target", line(b"GET /caf\xc3\xa9 HTTP/1.1"), 400),
    ("cr-in-line", line(b"GET /\r HTTP/1.1"), 400),
    ("lf-in-line", line(b"GET /\n HTTP/1.1"), 400),
    ("two-empty-lines-first", b"\r\n\r\n" + GET + END, 400),
    ("bare-lf-first", b"\n" + GET + END, 400),
    ("connect", line(b"CONNECT localhost:1 HTTP/1.1"), 501),
    # versions
    ("http-2", line(b"GET / HTTP/2.0"), 505),
    ("http-2-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ("http-0.9-said", line(b"GET / HTTP/0.9"), 505),
    *[
        (f"version-{text.decode('latin-1')}", line(b"GET / " + text), 400)
        for text in (
            b"HTTP/2",
            b"HTTP/1.10",
            b"HTTP/01.1",
            b"HTTP/1.",
            b"http/1.1",
            b"HTTP/1,1",
            b"FTP/1.1",
            b"HTTP/+1.1",
        )
    ],
    ("version-superscript", line(b"GET / HTTP/1.\xb9"), 400),
    # target forms
    ("fragment", line(b"GET /a#b HTTP/1.1"), 400),
    ("relative", line(b"GET v1/models HTTP/1.1"), 400),
    ("star-without-options", line(b"GET * HTTP/1.1"), 400),
    ("authority-form", line(b"GET localhost:80 HTTP/1.1"), 400),
    ("absolute-without-host", line(b"GET http:///x HTTP/1.1"), 400),
    ("absolute-userinfo", line(b"GET http://a@b/ HTTP/1.1"), 400),
    ("absolute-other-scheme", line(b"GET ftp://a/ HTTP/1.1"), 400),
    ("absolute-odd-brackets", line(b"GET http://]a[/ HTTP/1.1"), 400),
    ("half-an-escape", line(b"GET /%4 HTTP/1.1"), 400),
    ("no-escape", line(b"GET /%zz HTTP/1.1"), 400),
    ("escaped-nul", line(b"GET /%00 HTTP/1.1"), 400),
    ("escaped-line-break", line(b"GET /a%0d%0ab HTTP/1.1"), 400),
    ("escaped-latin-1", line(b"GET /%ff HTTP/1.1"), 400),
    # header syntax
    ("blank-before-colon", GET + b"X-A : b\r\n\r\n", 400),
    ("tab-before-colon", GET + b"X-A\t: b\r\n\r\n", 400),
    ("blank-before-first-field", b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    ("obs-fold", GET + b"X-A: b\r\n c\r\n\r\n", 400),
    ("obs-fold-tab", GET + b"X-A: b\r\n\tc\r\n\r\n", 400),
    ("folded-coding", POST + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 3\r\n\r\n", 400),
    ("no-colon", GET + b"nonsense\r\n\r\n", 400),
    ("no-name", GET + b": v\r\n\r\n", 400),
    *[
        (f"name-{name!r}", GET + name + b": v\r\n\r\n", 400)
        for name in (b"A B", b"A\0B", b"A\x80", b"A@B", b'A"', b"A[")
    ],
    *[(f"value-{code:02x}", GET + b"X-A: b%bc\r\n\r\n" % bytes([code]), 400) for code in (0, 1, 8, 11, 12, 27, 127)],
    ("cr-in-value", GET + b"X-A: b\rc\r\n\r\n", 400),
    ("cr-hides-field", POST + b"X-A: b\rTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
    ("lf-between-fields", GET + b"X-A: b\nX-C: d\r\n\r\n", 400),
    ("lf-hides-length", GET + b"X-A: b\nContent-Length: 30\r\n\r\n", 400),
    ("lf-everywhere", b"GET / HTTP/1.1\nHost: a\n\n", 400),
    ("cr-cr-lf", GET + b"X-A: b\r\r\n\r\n", 400),
    # Host
    ("no-host", b"GET / HTTP/1.1\r\n\r\n", 400),
    ("two-hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("same-host-twice", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("two-hosts-1.0", b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    *[
        (f"host-{host!r}", b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", 400)
        for host in (
            b"",
            b"a b",
            b"a/b",
            b"a@b",
            b"{",
            b"\xff",
            b"a,b",
            b"http://a",
            b":",
            b":80",
            b"a::",
            b"a:b",
            b"a:123456",
            b"[::1",
            b"::1",
        )
    ],
    # the target's authority takes the place of Host, but does not excuse it
    ("absolute-no-host", b"GET http://a/ HTTP/1.1\r\n\r\n", 400),
    ("absolute-two-hosts", b"GET http://a/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("absolute-bad-host", b"GET http://a/ HTTP/1.1\r\nHost: a b/c\r\n\r\n", 400),
    # Content-Length
    *[
        (f"length-{text!r}", POST + b"Content-Length: " + text + b"\r\n\r\n", 400)
        for text in (
            b"",
            b"+3",
            b"-3",
            b"-0",
            b"0x3",
            b"1_0",
            b"3.0",
            b"3;",
            b"3 x",
            b"0 3",
            b"1e1",
            b"3,",
            b'"3"',
            b"3, 3",
            b"\xb2",
        )
    ],
    ("length-arabic", POST + "Content-Length: \u0663\r\n\r\n".encode(), 400),
    ("length-full-width", POST + "Content-Length: \uff13\r\n\r\n".encode(), 400),
    ("length-19-digits", POST + b"Content-Length: 1000000000000000000\r\n\r\n", 413),
    ("length-500-digits", POST + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n", 413),
    ("two-lengths", POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
    ("same-length-twice", POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n", 400),
    # Transfer-Encoding
    *[
        (f"coding-{text!r}", POST + b"Transfer-Encoding: " + text + b"\r\n\r\n", status)
        for text, status in (
            (b"gzip", 501),
            (b"identity", 501),
            (b"xchunked", 501),
            (b"cow", 501),
            (b"gzip, chunked", 501),
            (b"chunked, identity", 501),
            (b"identity, chunked", 501),
            (b"chunked, chunked", 400),
            (b"", 400),
            (b", chunked", 400),
            (b'"chunked"', 400),
            (b"chunked;q=1", 400),
            (b"chunked chunked", 400),
            (b"\x0bchunked", 400),
            (b"\xa0chunked", 400),
            (b"chun\xe2\x84\xaaed", 400),
        )
    ],
    ("two-codings", POST + b"Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n", 400),
    ("chunked-twice", POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("length-then-coding", POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("coding-then-length", POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
    ("bad-length-and-coding", POST + b"Content-Length: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("coding-in-1.0", b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    # limits
    ("long-target", line(b"GET /" + b"a" * 200 + b" HTTP/1.1"), 414),
    ("endless-request-line", b"GET /" + b"a" * 500, 414),
    ("endless-empty-lines", b"\r" * 500, 414),
    ("long-fields", GET + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 200) for n in range(4)) + END, 431),
    ("endless-field", GET + b"X: " + b"a" * 700, 431),
    ("many-fields", GET + b"".join(b"X-%d: y\r\n" % n for n in range(11)) + END, 431),
    # refused at the first byte, without a line end
    ("tls-hello", b"\x16\x03\x01\x02", 400),
    ("tls-hello-behind-empty-line", b"\r\n\x16\x03\x01", 400),
]


@pytest.mark.parametrize(("raw", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(raw: bytes, status: int) -> None:
    assert read_both_ways(raw) == status


ACCEPTED: list[tuple[str, bytes, dict[str, object]]] = [
    (
        "plain",
        GET + END,
        {"method": "GET", "path": "/v1/models", "body": None, "keep_alive": True, "authority": "localhost"},
    ),
    ("empty-line-first", b"\r\n" + GET + END, {"method": "GET"}),
    ("unknown-method", line(b"get / HTTP/1.1"), {"method": "get"}),
    ("later-minor-version", line(b"GET / HTTP/1.2"), {"version": "HTTP/1.1"}),
    ("query-dropped", line(b"GET /a?b=/c%zz HTTP/1.1"), {"path": "/a"}),
    ("escapes", line(b"GET /m/org%2Fname%20%C3%A9 HTTP/1.1"), {"path": "/m/org%2Fname \u00e9"}),
    # An escaped slash is no separator, and stays apart from the text "%2F".
    ("escaped-slash", line(b"GET /v1%2fmodels HTTP/1.1"), {"path": "/v1%2Fmodels"}),
    ("escaped-percent", line(b"GET /%252F%2523 HTTP/1.1"), {"path": "/%252F%2523"}),
    ("post-without-length", POST + END, {"body": None}),
    ("two-slashes", line(b"GET //a HTTP/1.1"), {"path": "//a", "authority": "localhost"}),
    ("options-star", line(b"OPTIONS * HTTP/1.1"), {"path": "*"}),
    (
        "absolute",
        line(b"GET http://example.com:80/a?b HTTP/1.1"),
        {"path": "/a", "authority": "example.com:80", "scheme": "http"},
    ),
    ("absolute-without-path", line(b"GET Https://example.com HTTP/1.1"), {"path": "/", "scheme": "https"}),
    ("absolute-empty-port", line(b"GET http://example.com:/ HTTP/1.1"), {"authority": "example.com"}),
    ("absolute-1.0", b"GET http://a/ HTTP/1.0\r\n\r\n", {"authority": "a", "scheme": "http"}),
    ("host-empty-port", b"GET / HTTP/1.1\r\nHost: localhost:\r\n\r\n", {"authority": "localhost", "scheme": ""}),
    ("host-ipv6-empty-port", b"GET / HTTP/1.1\r\nHost: [::1]:\r\n\r\n", {"authority": "[::1]"}),
    ("absolute-query-only", line(b"GET http://example.com?a=/b HTTP/1.1"), {"path": "/", "authority": "example.com"}),
    ("absolute-ipv6", line(b"GET HTTP://[::1]:8080/a HTTP/1.1"), {"path": "/a", "authority": "[::1]:8080"}),
    ("host-ipv6", b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", {"authority": "[::1]:80"}),
    ("blanks-around-value", GET + b"X-A:\t b \t\r\n\r\n", {"headers": {"host": "localhost", "x-a": "b"}}),
    ("empty-value", GET + b"X-A:\r\n\r\n", {"headers": {"host": "localhost", "x-a": ""}}),
    ("utf-8-value", GET + "X-A: \u00e9\r\n\r\n".encode(), {"headers": {"host": "localhost", "x-a": "\u00c3\u00a9"}}),
    # str.strip would take these for blanks
    ("odd-blanks-stay", GET + b"X-A: \x85a\xa0\r\n\r\n", {"headers": {"host": "localhost", "x-a": "\x85a\xa0"}}),
    ("joined", GET + b"X-A: b\r\nx-a: c\r\n\r\n", {"headers": {"host": "localhost", "x-a": "b, c"}}),
    ("odd-name", GET + b"X.Custom|Pipe: ok\r\n\r\n", {"method": "GET"}),
    ("underscore-frames-nothing", POST + b"Transfer_Encoding: chunked\r\nContent-Length: 3\r\n\r\n", {"body": 3}),
    ("length", POST + b"content-LENGTH: 3\r\n\r\n", {"body": 3}),
    ("length-zero", POST + b"Content-Length: 0\r\n\r\n", {"body": 0}),
    ("length-leading-zeros", POST + b"Content-Length: 0000000000000000000000012\r\n\r\n", {"body": 12}),
    ("length-on-get", GET + b"Content-Length: 5\r\n\r\n", {"body": 5}),
    ("chunked", POST + b"Transfer-Encoding: chunked\r\n\r\n", {"body": "chunked"}),
    ("chunked-any-case", POST + b"transfer-encoding:\tCHUNKED \r\n\r\n", {"body": "chunked"}),
    ("te-is-harmless", GET + b"TE: trailers\r\nConnection: TE\r\n\r\n", {"keep_alive": True}),
    ("close", GET + b"Connection: keep-alive, Close\r\n\r\n", {"keep_alive": False}),
    ("1.0", b"GET / HTTP/1.0\r\n\r\n", {"version": "HTTP/1.0", "keep_alive": False, "authority": None}),
    ("1.0-keep-alive", b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", {"keep_alive": True}),
    ("expect", POST + b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\n", {"expect": "100-continue"}),
    ("expect-twice", GET + b"Expect: 100-continue\r\nExpect: 100-Continue\r\n\r\n", {"expect": "100-continue"}),
    ("expect-nothing", GET + b"Expect:\r\n\r\n", {"expect": None}),
    ("expect-empty-members", GET + b"Expect: , ,\r\n\r\n", {"expect": None}),
    ("expect-more", GET + b"Expect: 100-continue, a-pony\r\n\r\n", {"expect": "100-continue, a-pony"}),
    ("expect-in-1.0", b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", {"expect": None}),
    ("longest-line", line(b"GET /" + b"a" * 186 + b" HTTP/1.1"), {"method": "GET"}),
    ("most-fields", GET + b"".join(b"X-%d: y\r\n" % n for n in range(9)) + END, {"method": "GET"}),
]


@pytest.mark.parametrize(("raw", "expected"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_accepted(raw: bytes, expected: dict[str, object]) -> None:
    head = read_both_ways(raw)
    assert isinstance(head, Head), head
    assert {name: getattr(head, name) for name in expected} == expected


@pytest.mark.parametrize("raw", [b"", b"\r\n", b"G", GET, GET + b"X-A: b", GET + b"\r"], ids=repr)
def test_needs_more(raw: bytes) -> None:
    assert read_both_ways(raw or b"\r") is None


def test_what_follows_the_head_is_left() -> None:
    reader = HeadReader(LIMITS)
    assert reader.feed(GET + END + b"GET / HT") is not None
    assert reader.leftover == b"GET / HT"


def test_an_empty_line_begins_no_request() -> None:
    reader = HeadReader(LIMITS)
    reader.feed(b"\r\n")
    assert not reader.begun
    reader.feed(b"G")
    assert reader.begun


def test_a_refusal_names_the_limit_and_no_client_bytes() -> None:
    with pytest.raises(Refusal, match="200 bytes"):
        HeadReader(LIMITS).feed(b"GET /secret" + b"a" * 300)
    with pytest.raises(Refusal) as raised:
        HeadReader(LIMITS).feed(GET + b"secret line\r\n")
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(("raw", "to_head"), [
    (b"HEAD / HTTP/1.1\r\n\r\n", True),
    (b"HEAD / HTTP/1.1\r\nHost: localhost\r\nX Bad: 1\r\n\r\n", True),
    (b"HEAD / HTTP/1.1 x\r\n", True),
    (b"\r\nHEAD /" + b"a" * 300, True),
    (b"HEADER / HTTP/1.1\r\n\r\n", False),
    (b"GET / HTTP/1.1\r\n\r\n", False),
    (b"\x16HEAD ", False),
])  # fmt: skip
def test_a_refusal_knows_whether_it_answers_a_head(raw: bytes, to_head: bool) -> None:
    for step in (1, len(raw)):
        reader = HeadReader(LIMITS)
        with pytest.raises(Refusal) as raised:
            feed_all(reader, raw, step)
        assert raised.value.to_head is to_head
